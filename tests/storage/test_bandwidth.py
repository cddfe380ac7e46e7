"""What is measured in a moment reads as much as it says, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from rankxform.storage import bandwidth as speed
from rankxform.storage.bandwidth import ReadTimer


@pytest.fixture
def reads(monkeypatch):
    """Every read of a sample takes a second, and is noted: (first, last)."""
    found = []

    def read(timer, first, last, *, sparse=False):
        found.append((first, last))
        return 1.0

    monkeypatch.setattr(ReadTimer, "_read", read)
    return found


@pytest.fixture
def path(tmp_path):
    """A file of 2.5 MiB."""
    path = tmp_path / "x"
    path.write_bytes(bytes(5 << 19))
    return path


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_a_timer_reads_runs_and_then_a_row_that_ends_with_the_file(part, path, reads):
    with ReadTimer(str(path), part) as timer:
        found = timer.speed(most=1e9)
    size, run = 5 << 19, (5 << 19) // 64
    assert [last - first for first, last in reads[:16]] == [run] * 16
    assert [b[0] - a[0] for a, b in itertools.pairwise(reads[:16])] == [4 * run] * 15
    assert reads[15][1] <= size
    assert reads[16:] == [(0, 1 << 20), (1 << 20, 2 << 20), (2 << 20, size)]
    assert found.read == size / 3
    assert found.read_latency == pytest.approx(1 - run / (1 << 20), abs=1e-5)


def test_a_timer_ends_when_it_takes_long(path, reads):
    with ReadTimer(str(path)) as timer:
        timer.speed(most=2.0)
    assert len(reads) == 2 + 2


def test_reading_on_starts_again_where_the_file_ends(path, reads):
    with ReadTimer(str(path)) as timer:
        assert timer.read_more(3 << 20) == 4.0
        timer.read_more(1 << 20)
    half = 1 << 19
    assert reads == [(0, 2 * half), (2 * half, 4 * half), (4 * half, 5 * half), (0, half),
                     (half, 3 * half)]  # fmt: skip


def test_an_empty_file_is_no_trouble(tmp_path):
    path = tmp_path / "x"
    path.touch()
    with ReadTimer(str(path)) as timer:
        assert timer.speed().read > 0
        assert timer.read_more(1) == 0.0
    assert speed.reading(str(path)) > 0
    assert speed.measure_reading(str(path), 1e9) > 0
