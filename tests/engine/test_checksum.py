"""Fingerprints add up however a tensor is sharded, and tell every place from every other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankxform.engine import checksum as fingerprint
from rankxform.engine.checksum import MODULUS, Fingerprint
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Grid
from tests.geometry.test_box import boxes


def tensor(shape, item, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape, item), dtype=np.uint8)


def whole(prints, full, item):
    shape = full.shape[:-1]
    box = Box.whole(shape)
    return prints.of(shape, item, box, full.reshape(-1), box)


def by_definition(seed, full, item):
    """The sum, word by word, from the keys of rows, units and places."""
    prints, shape = Fingerprint(seed), full.shape[:-1] or (1,)
    axis = fingerprint._row_axis(shape, item)
    rows = full.reshape(int(np.prod(shape[:axis])), -1)
    total = 0
    for r, row in enumerate(rows):
        key = int(fingerprint._odd_keys(np.array([r], np.uint64), seed, 1)[0])
        for place, value in enumerate(row):
            unit, at = divmod(place // 4, 1 << 16)
            column = int(fingerprint._odd_keys(np.array([unit], np.uint64), seed, 2)[0]) * int(
                prints._table(4)[at]
            )
            total += int(value) * (1 << 8 * (place % 4)) * column * key
    return total % MODULUS


@given(st.data())
def test_any_sharded_adds_up(data):
    counts = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(n * data.draw(st.integers(1, 5)) for n in counts)
    item = data.draw(st.sampled_from([1, 2, 4, 8]))
    small, unit = (
        data.draw(st.sampled_from([0, 16 << 10])),
        data.draw(st.sampled_from([2, 1 << 16])),
    )
    full, grid = tensor(shape, item), Grid.even(shape, counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "_SMALL", small)
        patch.setattr(fingerprint, "_UNIT", unit)
        prints = Fingerprint(data.draw(st.integers(0, 1 << 62)))
        total = 0
        for cell in np.ndindex(*counts):
            box = grid.box(cell)
            piece = np.ascontiguousarray(full[box.slices()]).reshape(-1)
            total += prints.of(shape, item, box, piece, box)
        assert total % MODULUS == whole(prints, full, item)
        part = data.draw(boxes(shape))
        alone = np.ascontiguousarray(full[part.slices()]).reshape(-1)
        within = prints.of(shape, item, Box.whole(shape), full.reshape(-1), part)
        assert within == prints.of(shape, item, part, alone, part)


@pytest.mark.parametrize(("shape", "item"), [((), 8), ((7,), 2), ((5, 3), 4), ((2, 3, 5), 1)])
def test_the_definition(shape, item):
    full = tensor(shape, item)
    for small in (0, 1 << 14):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fingerprint, "_SMALL", small)
            assert whole(Fingerprint(11), full, item) == by_definition(11, full, item)


def test_rows_longer_than_a_unit(monkeypatch):
    full = tensor((2, 300_000), 4)
    prints = Fingerprint(3)
    total = whole(prints, full, 4)
    at = 123_457
    halves = [(Box((0, 0), (2, at)), full[:, :at]), (Box((0, at), (2, 300_000)), full[:, at:])]
    added = sum(
        prints.of((2, 300_000), 4, box, np.ascontiguousarray(data).reshape(-1), box)
        for box, data in halves
    )
    assert added % MODULUS == total
    full[[0, 0], [5, 5 + (1 << 16)]] = full[[0, 0], [5 + (1 << 16), 5]]
    assert whole(prints, full, 4) != total, "units are told apart"


def test_ten_thousand_faults_are_found():
    """Flipped bits, swapped words, rows and blocks, lost blocks: every one changes the sum."""
    rng = np.random.default_rng(1)
    for shape, item in (((64, 96), 4), ((4096,), 2), ((8, 6, 16), 8), ((3, 40_000), 2)):
        full = tensor(shape, item)
        flat = full.reshape(-1)
        prints = Fingerprint(int(rng.integers(1 << 62)))
        right = whole(prints, full, item)
        faults = 0
        while faults < 2500:
            before = flat.copy()
            kind = rng.integers(5)
            a, b = rng.integers(0, len(flat) // item, 2) * item
            size = int(rng.integers(1, 64)) * item
            if kind == 0:
                flat[rng.integers(len(flat))] ^= 1 << rng.integers(8)
            elif kind == 1:
                flat[a + item - 1] ^= 128  # the top bits of two elements
                flat[b + item - 1] ^= 128
            elif kind in (2, 3):
                stop = len(flat) - max(a, b)
                size = min(size, stop, abs(a - b))
                flat[a : a + size], flat[b : b + size] = before[b : b + size], before[a : a + size]
            else:
                flat[a : a + size] = 0
            if (flat != before).any():
                faults += 1
                assert whole(prints, full, item) != right
            flat[:] = before


def test_seeds_and_names_count():
    full = tensor((8, 8), 4)
    assert whole(Fingerprint(1), full, 4) != whole(Fingerprint(2), full, 4)
    assert Fingerprint(1).name_key("a") != Fingerprint(1).name_key("b")
    assert Fingerprint(1).name_key("a") % 2 == 1
