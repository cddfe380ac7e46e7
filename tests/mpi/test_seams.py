"""A new container, form, per-tensor step and read method: each one registration, end to end."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

import rankxform
from rankxform.checkpoints.base import FORMS, Arrangement, Listing, Shards
from rankxform.checkpoints.rank_folders import RankFolders
from rankxform.formats.base import FORMATS, Entry, FileLayout, Span, build
from rankxform.formats.dtype import content_bytes
from rankxform.geometry.box import Box
from rankxform.ops.base import OPERATIONS
from rankxform.planning.read_method import READ_METHODS
from tests import reference
from tests.cases import Case
from tests.mpi.conftest import prepare, world

ROW, COLUMN = [0, -1], [-1, 0]
CASE = Case(
    dict.fromkeys("abc", ((48, 42), "Int32")),
    [dict.fromkeys("abc", ([4], ROW, 0, 0))],
    [dict.fromkeys("abc", ([6], COLUMN, 0, 0))],
)
METHODS = ("auto", "two-phase")


@contextmanager
def registered(registry, name, one):
    registry[name] = one
    try:
        yield
    finally:
        del registry[name]


class ToyContainer:
    """A line of JSON, then the tensors one behind the other."""

    name = "toy"

    def read_index(self, read_at, size):
        head = read_at(0, 1 << 16).split(b"\n")[0] + b"\n"
        at, entries = len(head), []
        for name, dtype, shape in json.loads(head):
            nbytes = content_bytes(dtype, shape)
            entries.append(Entry(name, dtype, tuple(shape), (Span(at, nbytes),)))
            at += nbytes
        return build(entries, size)

    def order(self, name, dtype):
        return name

    def lay_out(self, tensors, metadata, checksum, begins=0):
        tensors = sorted(tensors)
        head = json.dumps(tensors).encode() + b"\n"
        spans, at = {}, len(head)
        for one in tensors:
            spans[one.name] = (Span(at, content_bytes(one.dtype, one.shape)),)
            at += spans[one.name][0].nbytes
        return FileLayout(((0, head),), spans, at)

    def checksums(self, index, read_at, blocks):
        return None


@pytest.mark.mpi(min_size=1, sizes=(1, 2, 3))
@pytest.mark.parametrize("method", METHODS)
def test_a_container_from_outside(method, tmp):
    src, a, b = prepare(CASE, tmp)
    options = {"comm": world(), "read_method": method, "fsync": False}
    with registered(FORMATS, "toy", ToyContainer()):
        rankxform.transform(src, tmp / "toys", a, b, format="toy", verify=True, **options)
        assert rankxform.verify(src, tmp / "toys", a, b, **options).same
        assert rankxform.verify(tmp / "toys", comm=world()).same
        rankxform.transform(tmp / "toys", tmp / "dst", b, b, format="ckpt", **options)
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []


class FlatFolder(RankFolders):
    """All files in one folder, and a list of them that appears when they are complete."""

    name = "flat"

    def recognizes(self, where):
        return "files.json" if (where / "files.json").is_file() else None

    def look(self, where, wish):
        if not where.is_dir():
            return Listing()
        found = {int(path.stem): (path,) for path in where.glob("*.ckpt")}
        return Listing(is_folder=True, files=dict(sorted(found.items())))

    def choose(self, where, there, wanted, wish, searched="", among=None):
        return Shards({file: paths[0] for file, paths in there.files.items()})

    def arrange(self, planner, naming):
        return Arrangement({n: f"{n:05}{naming.suffix}" for n in range(planner.dst.ranks)})

    def owns(self, name, file):
        return name.startswith(f"{file:05}.") and "/" not in name

    def companion_names(self, names):
        return ("files.json",)

    def companions(self, planner, arrangement, common):
        return {"files.json": [json.dumps(sorted(arrangement.names.values())).encode()]}

    def strangers(self, own):
        return []


@pytest.mark.mpi(min_size=1, sizes=(1, 2, 3))
@pytest.mark.parametrize("method", METHODS)
def test_a_form_from_outside(method, tmp):
    src, a, b = prepare(CASE, tmp)
    options = {"comm": world(), "read_method": method, "fsync": False}
    with registered(FORMS, "flat", FlatFolder()):
        flat = tmp / "flat"
        rankxform.transform(src, flat, a, b, dst_form="flat", verify=True, **options)
        assert json.loads((flat / "files.json").read_text()) == [f"{n:05}.ckpt" for n in range(6)]
        assert rankxform.verify(src, flat, a, b, dst_form="flat", **options).same
        assert rankxform.verify(flat, comm=world()).same
        again = rankxform.transform(src, flat, a, b, dst_form="flat", verify=True, **options)
        assert again.files_kept == 6
        rankxform.transform(flat, tmp / "dst", b, b, **options)  # recognized
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []


def narrow(options):
    """A step that makes every Int32 an Int16, and says so in its name."""

    def narrowed(tensor):
        dtype = "Int16" if tensor.dtype == "Int32" else tensor.dtype
        return replace(tensor, name=f"narrow.{tensor.name}", dtype=dtype)

    return narrowed


@pytest.mark.mpi(min_size=1, sizes=(1, 2, 3))
@pytest.mark.parametrize("method", METHODS)
def test_a_step_from_outside(method, tmp):
    src, a, _ = prepare(CASE, tmp)
    wanted = [{f"narrow.{n}": layout for n, layout in CASE.dst[0].items()}]
    b = tmp / "narrow.ckpt"
    if world().rank == 0:
        reference.write_strategy(b, wanted)
    world().Barrier()
    options = {"comm": world(), "read_method": method, "fsync": False}
    with registered(OPERATIONS, "narrow", narrow):
        rankxform.transform(src, tmp / "dst", a, b, verify=True, **options)
        assert rankxform.verify(src, tmp / "dst", a, b, **options).same
        loaded = rankxform.load(src, a, b, rank=5, comm=world(), read_method=method)
    for rank in range(6):
        found = reference.read_any(tmp / "dst" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        for name, layout in CASE.dst[0].items():
            full = reference.full_tensor(name, *CASE.params[name]).view("<i4")
            want = reference.shard(full, layout, rank).astype("<i2")
            dtype, shape, data = found[f"narrow.{name}"]
            assert (dtype, shape, data) == ("Int16", want.shape, want.tobytes())
            if rank == 5:
                assert np.array_equal(loaded[f"narrow.{name}"], want)


@dataclass(frozen=True)
class Halves:
    """Reads the half of the block that holds what is wanted, if one does."""

    exchanges: bool = False

    def with_latency(self, nbytes):
        return self

    def box(self, wanted, block, item):
        middle = (block.start[0] + block.stop[0]) // 2
        for a, b in ((block.start[0], middle), (middle, block.stop[0])):
            half = Box((a, *block.start[1:]), (b, *block.stop[1:]))
            if half.contains(wanted):
                return half
        return block


@pytest.mark.mpi(min_size=1, sizes=(1, 2, 3))
@pytest.mark.parametrize("exchanges", [False, True])
def test_a_read_method_from_outside(exchanges, tmp):
    src, a, b = prepare(CASE, tmp)
    options = {"comm": world(), "read_method": "halves", "fsync": False}
    with registered(READ_METHODS, "halves", Halves(exchanges)):
        rankxform.transform(src, tmp / "dst", a, b, verify=True, **options)
        assert rankxform.verify(src, tmp / "dst", a, b, **options).same
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []
