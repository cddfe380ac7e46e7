"""Headers that are fetched before they are asked for; no server is needed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rankxform.errors import StorageError
from rankxform.formats.container import Span
from rankxform.storage.objects.headers import WINDOW, HeaderWindows

DATA = np.arange(40 << 18, dtype="<u4").tobytes()
SIZE = len(DATA)


class Object:
    """An object that counts what is asked for; `slow` seconds each."""

    def __init__(self, slow=0.0):
        self.asked, self.slow, self.in_flight, self.peak = [], slow, 0, 0
        self.lock = threading.Lock()

    def fetch(self, offset, nbytes):
        with self.lock:
            self.asked.append((offset, nbytes))
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
        time.sleep(self.slow)
        self.in_flight -= 1
        assert offset >= 0 and offset + nbytes <= SIZE
        return DATA[offset : offset + nbytes]


def layers(count, drift=0):
    """Return the offsets of headers of layers that are alike; names may grow by some bytes."""
    offset = 100
    for layer in range(count):
        for nbytes in (200_000, 300_000, 4_000, 200_000, 90_000):
            yield offset
            offset += nbytes + drift * (layer // 3)


@pytest.mark.parametrize("drift", [0, 3])
def test_headers_of_layers_are_foreseen(drift):
    there = Object(slow=0.005)
    windows = HeaderWindows(there.fetch, SIZE, DATA[:WINDOW])
    for offset in layers(40, drift):
        assert windows.read_at(offset, 500) == DATA[offset : offset + 500]
    awaited = sum(nbytes > 8 << 10 for _, nbytes in there.asked)
    assert awaited <= 12, "those of the first layers, and of none that follows"
    assert len(there.asked) <= 1.2 * 40 * 4 and there.peak > 8
    assert sum(nbytes for _, nbytes in there.asked) < 0.3 * SIZE


def test_what_is_told_is_fetched_at_the_same_time_and_near_parts_together():
    there = Object(slow=0.005)
    windows = HeaderWindows(there.fetch, SIZE, b"")
    spans = [Span(offset, 300) for offset in layers(20)]
    windows.expect(spans)
    assert all(windows.read_at(s.offset, 300) == DATA[s.offset : s.offset + 300] for s in spans)
    assert [*sorted(there.asked)][2] == (500_100, 4300), "the third and the fourth are near"
    assert len(there.asked) == len({*there.asked}) == 20 * 4 and there.peak > 8


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_for_is_right(seed):
    rng, there = np.random.default_rng(seed), Object()
    windows = HeaderWindows(there.fetch, SIZE, DATA[: int(rng.integers(0, 2 * WINDOW))])
    if seed % 2:
        offsets = np.sort(rng.integers(0, SIZE, 100))
        windows.expect(Span(int(offset), int(rng.integers(1, 9000))) for offset in offsets)
    for _ in range(300):
        offset, nbytes = int(rng.integers(0, SIZE)), int(rng.choice([1, 8, 400, 70_000]))
        assert windows.read_at(offset, nbytes) == DATA[offset : offset + nbytes]
    assert windows.read_at(SIZE - 3, 10) == DATA[-3:]


def test_what_fails_in_vain_does_not_count():
    there = Object()

    def fetch(offset, nbytes):
        if offset > SIZE // 2:
            raise StorageError("it is cut off")
        return there.fetch(offset, nbytes)

    windows = HeaderWindows(fetch, SIZE, b"")
    windows.expect([Span(10, 10), Span(SIZE - 100, 10)])
    assert windows.read_at(10, 10) == DATA[10:20]
    with pytest.raises(StorageError, match="cut off"):
        windows.read_at(SIZE - 100, 10)
