"""Work that may be done by one of several processes, dealt out so that none has much more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .visibility import Processes

_SWEEPS = 100
_STILL = 1e-3
_RUN = 16 << 20
"""Bytes of small pieces that one process reads in a row."""


def level(
    amounts: Mapping[Processes, float], speeds: Sequence[float], loads: Sequence[float] = ()
) -> dict[Processes, list[float]]:
    """Return how much of the work of each class each of its processes does.

    amounts: in bytes, by the class of processes that could do the work; speeds: by process, in
    bytes a second; loads: what each process has to do anyway, in bytes. Every class in turn fills
    up those of its processes that would be done first, until nothing changes. That is descent by
    coordinates on the sum of load squared over speed, a convex function over a product of
    simplices, so it ends at its minimum, where the longest time is as short as it can be. (With
    work in pieces, a process gets at most half a piece of each class more than here.)

    >>> level({(0,): 6.0, (0, 1): 10.0}, (1.0, 1.0))
    {(0,): [6.0], (0, 1): [2.0, 8.0]}
    """
    total = list(loads) or [0.0] * len(speeds)
    dealt = {}
    for members, amount in amounts.items():  # begin evenly, so that what is alike ends alike
        width = sum(speeds[p] for p in members)
        dealt[members] = [amount * speeds[p] / width for p in members]
        for process, part in zip(members, dealt[members]):
            total[process] += part
    for _ in range(_SWEEPS):
        change = 0.0
        for members, amount in amounts.items():
            before = dealt[members]
            others = [total[p] - own for p, own in zip(members, before)]
            after = _fill(amount, others, [speeds[p] for p in members])
            for p, other, own in zip(members, others, after):
                total[p] = other + own
            change = max(change, *(abs(a - b) for a, b in zip(after, before)))
            dealt[members] = after
        if change <= _STILL * max(total):
            break
    return dealt


def _fill(amount: float, loads: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Pour `amount` over vessels that hold `loads`, `speeds` wide, to one level of time."""
    order = sorted(range(len(loads)), key=lambda i: loads[i] / speeds[i])
    width, filled, height = 0.0, amount, 0.0
    for n, i in enumerate(order):
        width += speeds[i]
        filled += loads[i]
        height = filled / width
        if n + 1 == len(order) or height <= loads[order[n + 1]] / speeds[order[n + 1]]:
            break
    return [max(0.0, height * v - load) for load, v in zip(loads, speeds)]


class Dealer:
    """Deals pieces of work out in order, so that at any time all processes have done a like part
    of theirs, and small pieces come in runs: what a reader skips is read ahead for nothing."""

    def __init__(self, dealt: Mapping[Processes, Sequence[float]]) -> None:
        """`dealt` is what `level` found: how much each process does of each class."""
        self._left = {members: list(shares) for members, shares in dealt.items()}
        self._all: dict[int, float] = {}
        for members, shares in dealt.items():
            for process, share in zip(members, shares):
                self._all[process] = self._all.get(process, 0.0) + share
        self._done = dict.fromkeys(self._all, 0.0)
        self._run: dict[Processes, tuple[int, float]] = {}

    def next(self, members: Processes, nbytes: float) -> int:
        """Return the process that does the next piece of a class."""
        left = self._left[members]
        at, run = self._run.get(members, (0, float(_RUN)))
        if run + nbytes > _RUN or left[at] < nbytes / 2:
            able = [i for i, rest in enumerate(left) if rest >= nbytes / 2]
            at, run = min(able or range(len(left)), key=lambda i: (self._part(members[i]), i)), 0.0
        left[at] -= nbytes
        self._done[members[at]] += nbytes
        self._run[members] = at, run + nbytes
        return members[at]

    def _part(self, process: int) -> float:
        """Return which part of its work a process has been dealt."""
        return self._done[process] / max(self._all[process], 1e-9)
