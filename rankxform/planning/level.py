"""Work that may be done by one of several processes, dealt out so that none has much more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Class = tuple[int, ...]
"""Processes, ascending, each of which could do some piece of work."""

_SWEEPS = 100
_STILL = 1e-3


def level(
    amounts: Mapping[Class, float], speeds: Sequence[float], loads: Sequence[float] = ()
) -> dict[Class, list[float]]:
    """Return how much of the work of each class each of its processes does.

    amounts: by class, in bytes; speeds: by process, in bytes a second; loads: what each process
    has to do anyway, in bytes. Every class in turn fills up those of its processes that would be
    done first, until nothing changes. That is descent by coordinates on the sum of load squared
    over speed, a convex function over a product of simplices, so it ends at its minimum, where
    the longest time is as short as it can be. (With work in pieces, a process gets at most half a
    piece of each class more than here.)

    >>> level({(0,): 6.0, (0, 1): 10.0}, (1.0, 1.0))
    {(0,): [6.0], (0, 1): [2.0, 8.0]}
    """
    total = list(loads) or [0.0] * len(speeds)
    dealt = {members: [0.0] * len(members) for members in amounts}
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
    """Deals pieces of work out in order, so that each process gets long runs of them."""

    def __init__(self, amounts: Mapping[Class, float], dealt: Mapping[Class, list[float]]) -> None:
        """`dealt` is what `level` made of `amounts`."""
        self._ends = {members: _ends(dealt[members]) for members in amounts}
        self._done = dict.fromkeys(amounts, 0.0)

    def next(self, members: Class, nbytes: float) -> int:
        """Return the process that does the next piece of a class."""
        middle = self._done[members] + nbytes / 2
        self._done[members] += nbytes
        ends = self._ends[members]
        return next((p for p, end in zip(members, ends) if middle <= end), members[-1])


def _ends(shares: Sequence[float]) -> list[float]:
    ends, total = [], 0.0
    for share in shares:
        total += share
        ends.append(total)
    return ends
