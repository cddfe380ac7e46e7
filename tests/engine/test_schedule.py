"""Schedules: shared by what is sharded alike, planned in numbers."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from rankxform.engine import schedule as schedules
from rankxform.engine.schedule import Strided
from tests.engine.test_pipeline import COLUMN, ROW, convert, counter

__all__ = ["counter"]


def test_parameters_that_are_sharded_alike_share_a_schedule(tmp_path, counter, monkeypatch):
    made = []
    real = schedules.Schedule.__init__

    def count(self, transfer, method, **options):
        made.append(transfer.parameter.name)
        real(self, transfer, method, **options)

    monkeypatch.setattr(schedules.Schedule, "__init__", count)
    names = [f"w{i}" for i in range(12)]
    convert(tmp_path, ([4], ROW, 0, 0), ([4], COLUMN, 0, 0), counter, names)
    assert len(made) == 1


# -- places in numbers --------------------------------------------------------------------------------


def random_box(rng, shape):
    start = [rng.randrange(n) for n in shape]
    return tuple(start), tuple(rng.randint(1, n - a) for n, a in zip(shape, start))


@pytest.mark.parametrize("seed", range(40))
def test_a_place_in_numbers_is_the_view_that_numpy_makes(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    kind = np.dtype(rng.choice(["u1", "<u2", "<f4", "V16"]))
    first, step, repeat = rng.randrange(64), rng.randrange(8) * 16, rng.randrange(4)
    nbytes = prod(shape) * kind.itemsize
    buffer = np.arange(first + 3 * 112 + nbytes, dtype=np.uint8)
    start, extent = random_box(rng, shape)
    place = Strided(1, first, (nbytes,), step=step).boxed(shape, kind, start, extent)
    found = place.words_in([np.empty(0, np.uint8), buffer], repeat)
    begin = first + repeat * step
    whole = buffer[begin : begin + nbytes].view(kind).reshape(shape)
    assert np.shares_memory(found, buffer)
    wanted = whole[tuple(slice(a, a + n) for a, n in zip(start, extent))]
    assert found.dtype == kind and found.strides == wanted.strides
    assert found.tobytes() == wanted.tobytes()


def test_a_number_has_a_place_without_axes():
    place = Strided(0, 4, (4,)).boxed((), np.dtype("<u4"), (), ())
    words = place.words_in([np.arange(8, dtype=np.uint8)], 0)
    assert words.shape == () and int(words) == 0x07060504


def test_what_leaves_its_buffer_is_refused():
    place = Strided(0, 0, (64,), step=32)[16:48]
    arena = np.zeros(64, np.uint8)
    assert len(place.words_in([arena], 0)) == 32
    with pytest.raises((TypeError, ValueError)):
        place.words_in([arena], 1)
