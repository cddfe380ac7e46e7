"""Reading ahead: every byte is announced once, before it is read, and never too far."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rankxform.engine import ahead
from rankxform.engine.ahead import Turn, announced
from rankxform.engine.tile_work import Fetch, TileWork


class Recorded:
    """Stands for sources: keeps what was announced and not read."""

    def __init__(self):
        self.pending, self.most = [], 0

    def announce(self, file, name, start, nbytes):
        self.pending.append((file, name, start, nbytes))
        self.most = max(self.most, sum(one[-1] for one in self.pending))


def step(*fetches):
    return SimpleNamespace(on=lambda arena: TileWork(8, fetches, ()))


def fetch(nbytes, start=0, sparse=False):
    return Fetch((0,), start, nbytes, memoryview(bytearray(nbytes)), sparse)


TRANSFER = SimpleNamespace(
    readers={(0,): 7}, parameter=SimpleNamespace(entry=lambda cell, file: "w")
)


@pytest.mark.parametrize("nbytes", [1000, 1 << 20, 20 << 20])
def test_all_is_announced_before_it_is_read_and_not_too_far(nbytes):
    sources, one = Recorded(), step(fetch(nbytes))
    turns = [Turn(TRANSFER, one, repeat) for repeat in range(40)]
    read = []
    for turn in announced(iter(turns), sources, lambda work: True):
        read.append(turn)
        assert sources.pending.pop(0) == (7, "w", turn.repeat * nbytes, nbytes)
    assert read == turns and not sources.pending
    assert nbytes <= sources.most <= max(ahead.AHEAD + nbytes, 2 * nbytes)


def test_what_is_shared_or_picked_is_not_announced():
    sources = Recorded()
    turns = [Turn(TRANSFER, step(fetch(64, sparse=True))), Turn(TRANSFER)]
    assert list(announced(iter(turns), sources, lambda work: True)) == turns
    turns = [Turn(TRANSFER, step(fetch(64)))]
    assert list(announced(iter(turns), sources, lambda work: False)) == turns
    assert not sources.pending
