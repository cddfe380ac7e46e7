"""Laws of tensors put together of pieces, against numpy on whole arrays."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankxform.geometry.box import Box
from rankxform.geometry.pieces import (
    BROADCAST_AXIS,
    Assembly,
    PieceTiling,
    concatenate,
    concatenate_by_group,
    interleave_rows,
    invert,
)
from rankxform.geometry.tiling import Grid

extents = st.integers(1, 5)


@st.composite
def assemblies(draw):
    """A random derivation of sources filled with their own flat index: (assembly, array, sources).

    The array is what numpy makes of the sources in the same way.
    """
    sources, known = [], {}

    def leaf(shape):
        number = len(sources)
        array = 1 + 1000 * number + np.arange(prod(shape)).reshape(shape)
        sources.append(array)
        known[number] = shape
        return Assembly.of(shape, number), array

    def tensor(shape, depth):
        kinds = ["leaf"] if depth == 0 else ["leaf", "concat", "transpose", "interleave", "groups"]
        kind = draw(st.sampled_from(kinds))
        rows, *rest = shape
        if kind == "transpose" and len(shape) >= 2:
            *outer, a, b = shape
            one, array = tensor((*outer, b, a), depth - 1)
            return one.transposed(), np.swapaxes(array, -1, -2)
        if kind == "concat" and rows > 1:
            first = draw(st.integers(1, rows - 1))
            parts = [tensor((n, *rest), depth - 1) for n in (first, rows - first)]
            return concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])
        if kind == "interleave" and rows % 2 == 0:
            parts = [tensor((rows // 2, *rest), depth - 1) for _ in range(2)]
            return interleave_rows([a for a, _ in parts]), np.stack(
                [b for _, b in parts], 1
            ).reshape(shape)
        if kind == "groups" and rows % 6 == 0:
            parts = [tensor((rows * n // 3, *rest), depth - 1) for n in (2, 1)]
            stacked = [b.reshape(2, b.shape[0] // 2, *rest) for _, b in parts]
            return concatenate_by_group([a for a, _ in parts], 2), np.concatenate(
                stacked, 1
            ).reshape(shape)
        return leaf(shape)

    rows = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    shape = (rows, *draw(st.lists(extents, max_size=2)))
    one, array = tensor(shape, 3)
    return one, array, sources


def made(assembly, sources):
    """Make a tensor element by element, as the docstring of a piece says."""
    found = np.zeros(assembly.shape, int)
    hits = np.zeros(assembly.shape, int)
    for piece in assembly.pieces:
        for index in np.ndindex(piece.shape):
            dst = tuple(a + s * i for a, s, i in zip(piece.dst_start, piece.dst_step, index))
            src = list(piece.src_start)
            for axis, step, i in zip(piece.axes, piece.src_step, index):
                if axis != BROADCAST_AXIS:
                    src[axis] += step * i
            found[dst] = sources[piece.source][tuple(src)]
            hits[dst] += 1
    return found, hits


@given(assemblies())
def test_pieces_tile_the_tensor_once_and_make_what_numpy_makes(case):
    assembly, array, sources = case
    found, hits = made(assembly, sources)
    assert (hits == 1).all()
    assert (found == array).all()


@given(assemblies())
def test_inverses_take_the_sources_out_of_the_tensor(case):
    assembly, array, sources = case
    for one, source in zip(invert(assembly, [s.shape for s in sources]), sources):
        found, hits = made(one, [array])
        assert (hits == 1).all()
        assert (found == source).all()


@st.composite
def grids(draw, shape):
    edges = []
    for n in shape:
        inner = draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else set()
        edges.append((0, *sorted(inner), n))
    return Grid(tuple(edges))


@given(st.data(), assemblies())
def test_cells_of_any_grids_are_made_of_each_element_once(data, case):
    assembly, array, sources = case
    stored = PieceTiling(assembly, [data.draw(grids(source.shape)) for source in sources])
    dst = data.draw(grids(assembly.shape))
    for cell in dst.cells_over(Box.whole(assembly.shape)):
        box = dst.box(cell)
        found = np.zeros(assembly.shape, int)
        for at, region in stored.overlaps(dst, cell):
            piece, held = stored.piece(at), stored.source_box(at)
            assert held.contains(stored.box_in_source(at, region))
            assert stored.box(at).contains(region)
            for index in np.ndindex(region.shape):
                own = Box(
                    tuple(a + i for a, i in zip(region.start, index)),
                    tuple(a + i + 1 for a, i in zip(region.start, index)),
                )
                target, source = piece.dst_box(own), piece.src_box(own)
                assert found[target.start] == 0 and box.contains(target)
                found[target.start] = sources[piece.source][source.start]
        assert (found[box.slices()] == array[box.slices()]).all()


@given(st.data(), assemblies(), st.booleans())
def test_rows_are_added_and_taken_away(data, case, repeat_last):
    assembly, array, sources = case
    rows = array.shape[0]
    stop = data.draw(st.integers(1, rows))
    start = data.draw(st.integers(0, stop - 1))
    assert (made(assembly.rows(start, stop), sources)[0] == array[start:stop]).all()
    more = data.draw(st.integers(1, 4))
    found, hits = made(assembly.resized_rows(rows + more, repeat_last=repeat_last), sources)
    assert (found[:rows] == array).all() and hits.max() == 1
    assert (found[rows:] == (array[-1] if repeat_last else 0)).all()
