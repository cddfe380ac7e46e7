"""Arithmetic on values while they are copied: the same whatever tiles they are copied in."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rankxform.engine.copier import multiply_matrices


@pytest.mark.parametrize("seed", range(40))
def test_a_part_of_a_product_is_that_part_of_the_whole(seed):
    """Rows, columns and steps are those of tiles; BLAS sums otherwise for other shapes."""
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    rows, columns = rng.choice([1, 4, 33]), rng.choice([1, 2, 7, 300])
    rank = rng.choice([1, 2, 8, 19, 64, 200])
    b, a = bits.normal(0, 1, (rows, rank)), bits.normal(0, 1, (rank, columns))
    whole = multiply_matrices(b, a)
    assert np.allclose(whole, b @ a)
    for _ in range(40):
        row_slice, column_slice = (
            slice(first, rng.randrange(first, size) + 1, rng.choice([1, 1, 2, 3]))
            for size in (rows, columns)
            for first in (rng.randrange(size),)
        )
        part = multiply_matrices(b[row_slice], a[:, column_slice])
        assert np.array_equal(part, whole[row_slice, column_slice]), (row_slice, column_slice)
