"""What a process's memory is for: in every case no more than it was given."""

from __future__ import annotations

from itertools import product

import pytest

from rankxform.planning.budget import MemoryBudget

KIB, MIB = 1 << 10, 1 << 20
EXCHANGED = {"exchanges": True}
ALONE = {"exchanges": False}


@pytest.mark.parametrize(
    ("total", "use", "arena", "in_flight", "announced"),
    [
        (64 * MIB, ALONE, 8 * MIB, 1, 0),
        (64 * MIB, EXCHANGED, (32 * MIB) // 12, 12, 0),
        (64 * MIB, {**EXCHANGED, "in_memory": True}, 8 * MIB, 4, 0),
        (64 * MIB, {**ALONE, "is_announced": True}, 8 * MIB, 1, 32 * MIB),
        (8 * MIB, ALONE, 4 * MIB, 1, 0),
        (8 * MIB, EXCHANGED, 512 * KIB, 8, 0),
        (1 * MIB, EXCHANGED, 256 * KIB, 2, 0),
        (1 * MIB, {**EXCHANGED, "is_announced": True}, 128 * KIB, 2, 512 * KIB),
    ],
)
def test_tiles(total, use, arena, in_flight, announced):
    budget = MemoryBudget.of(total, **use)
    assert (budget.arena, budget.in_flight, budget.announced) == (arena, in_flight, announced)


@pytest.mark.parametrize(("files", "size"), [(1, 64 * KIB), (256, 64 * KIB), (1024, 32 * KIB),
                                            (100_000, 4 * KIB)])  # fmt: skip
def test_buffers_of_files(files, size):
    assert MemoryBudget.of(64 * MIB, **ALONE).file_buffer(files) == size


def test_parts_are_no_more_than_the_whole():
    totals = [2**power + more for power in range(20, 34) for more in (0, 12345)]
    for total, *flags in product(totals, *3 * [(False, True)]):
        exchanges, is_announced, in_memory = flags
        budget = MemoryBudget.of(
            total, exchanges=exchanges, is_announced=is_announced, in_memory=in_memory
        )
        tiles = budget.arena * budget.in_flight
        if budget.in_flight == 1:
            tiles += budget.large_arena if budget.large_arena > budget.arena else 0
        assert tiles + budget.announced + budget.file_buffer(10) * 10 <= total
