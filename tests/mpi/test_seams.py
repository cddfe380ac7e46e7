"""A new container, form, per-tensor step and read method: each one registration, end to end."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import rankxform
from rankxform.checkpoints.base import FORMS
from rankxform.errors import FormatError, StorageError, UsageError
from rankxform.formats.container import (
    CONTAINERS,
    Container,
    FileLayout,
    ParsedEntry,
    Span,
    build_index,
    content_bytes,
)
from rankxform.formats.documents import decode_json
from rankxform.geometry.box import Box
from rankxform.operations.base import OPERATIONS
from rankxform.planning.reads import READ_METHODS
from rankxform.storage.store import STORAGE, USUAL_BUFFERS
from rankxform.values import dataclass
from tests import reference
from tests.mpi.conftest import prepare
from tests.mpi_launch import world
from tests.toy_alias import Alias
from tests.toy_forms import CASE, FlatFolder, Tiles, registered, write_tiles
from tests.toy_storage import Memory

METHODS = ("auto", "two-phase")


class ToyContainer(Container):
    """A line of JSON, then the tensors one behind the other."""

    name = "toy"
    alone = True

    def read_index(self, read_at, size):
        head = read_at(0, 1 << 16).split(b"\n")[0] + b"\n"
        at, entries = len(head), []
        try:
            for name, dtype, shape in decode_json(head):
                nbytes = content_bytes(dtype, shape)
                entries.append(ParsedEntry(name, dtype, tuple(shape), (Span(at, nbytes),)))
                at += nbytes
        except (TypeError, ValueError):
            raise FormatError("does not begin with a list of tensors") from None
        if at > size:
            raise FormatError(f"ends at byte {size}, its tensors at {at}")
        return build_index(entries, size)

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


@pytest.mark.world(sizes=(1, 2, 3))
@pytest.mark.parametrize("method", METHODS)
def test_a_container_from_outside(method, tmp):
    src, a, b = prepare(CASE, tmp)
    options = {"comm": world(), "read_method": method, "fsync": False}
    with registered(CONTAINERS, "toy", ToyContainer()):
        rankxform.transform(src, tmp / "toys", a, b, format="toy", verify=True, **options)
        assert rankxform.verify(src, tmp / "toys", a, b, **options).same
        assert rankxform.verify(tmp / "toys", comm=world()).same
        rankxform.transform(tmp / "toys", tmp / "dst", b, b, format="ckpt", **options)
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []


@pytest.mark.world(sizes=(1, 2, 3))
def test_a_form_from_outside_has_options(tmp):
    """Its laws are in tests/conformance/test_forms.py."""
    src, a, b = prepare(CASE, tmp)
    options = {"comm": world(), "fsync": False}
    with registered(FORMS, "flat", FlatFolder()):
        rankxform.transform(src, tmp / "flat", a, b, dst_form="flat", digits=7, **options)
        assert {path.name for path in (tmp / "flat").glob("*.ckpt")} == {
            f"{n:07}.ckpt" for n in range(6)
        }
        rankxform.transform(tmp / "flat", tmp / "dst", b, b, **options)  # recognized
        with pytest.raises(StorageError, match=r"--digits was 7 and is 5"):
            rankxform.transform(src, tmp / "flat", a, b, dst_form="flat", **options)
        with pytest.raises(UsageError, match="^--digits is for --dst-form flat"):
            rankxform.transform(src, tmp / "other", a, b, digits=7, **options)
        with pytest.raises(UsageError, match="^digits 'few': expected a number"):
            rankxform.transform(src, tmp / "other", a, b, digits="few", **options)
    with pytest.raises(UsageError, match="^unknown option 'digits'"):
        rankxform.transform(src, tmp / "other", a, b, digits=7, **options)
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []


@pytest.mark.world(sizes=(1, 2, 3))
@pytest.mark.parametrize("method", METHODS)
def test_a_source_that_follows_no_strategy(method, tmp):
    src, a, b = prepare(CASE, tmp)
    options = {"comm": world(), "read_method": method, "fsync": False}
    tiles = tmp / "tiles"
    with registered(FORMS, "tiles", Tiles()):
        if world().rank == 0:
            write_tiles(tiles)
        world().Barrier()
        rankxform.transform(tiles, tmp / "dst", None, b, verify=True, format="ckpt", **options)
        assert rankxform.verify(tiles, tmp / "dst", None, b, **options).same
        assert rankxform.verify(src, tmp / "dst", a, b, **options).same
        loaded = rankxform.load(tiles, None, b, rank=5, comm=world(), read_method=method)
        with pytest.raises(rankxform.UsageError, match="says where each box is"):
            rankxform.transform(tiles, tmp / "other", a, b, **options)
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []
    for name, layout in CASE.dst[0].items():
        full = reference.full_tensor(name, *CASE.params[name])
        assert loaded[name].tobytes() == reference.shard(full, layout, 5).tobytes()


def narrow(options):
    """A step that makes every Int32 an Int16, and says so in its name."""

    def narrowed(tensor):
        dtype = "Int16" if tensor.dtype == "Int32" else tensor.dtype
        return replace(tensor, name=f"narrow.{tensor.name}", dtype=dtype)

    return narrowed


@pytest.mark.world(sizes=(1, 2, 3))
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


@pytest.mark.world(sizes=(1, 2, 3))
@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_an_option_and_a_document(method, tmp):
    src, a, _ = prepare(CASE, tmp)
    names, b, path = {"a": "one", "c": "three"}, tmp / "aliases.ckpt", tmp / "names.json"
    if world().rank == 0:
        wanted = {names.get(name, name): layout for name, layout in CASE.dst[0].items()}
        reference.write_strategy(b, [wanted])
        path.write_text(json.dumps(names))
    world().Barrier()
    options = {"comm": world(), "read_method": method, "fsync": False, "alias": str(path)}
    with registered(OPERATIONS, "alias", Alias()):
        rankxform.transform(src, tmp / "dst", a, b, verify=True, **options)
        loaded = rankxform.load(src, a, b, rank=5, comm=world(), alias=str(path))
    assert sorted(loaded) == ["b", "one", "three"]
    for rank in range(6):
        found = reference.read_any(tmp / "dst" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        for name, layout in CASE.dst[0].items():
            full = reference.full_tensor(name, *CASE.params[name])
            _, _, data = found[names.get(name, name)]
            assert data == reference.shard(full, layout, rank).tobytes()


@dataclass(frozen=True)
class Halves:
    """Reads the half of the block that holds what is wanted, if one does."""

    exchanges: bool = False
    name: str = "halves"

    def with_latency(self, nbytes):
        return self

    def box(self, wanted, block, item):
        middle = (block.start[0] + block.stop[0]) // 2
        for a, b in ((block.start[0], middle), (middle, block.stop[0])):
            half = Box((a, *block.start[1:]), (b, *block.stop[1:]))
            if half.contains(wanted):
                return half
        return block


@pytest.mark.world(sizes=(1, 2, 3))
@pytest.mark.parametrize("exchanges", [False, True])
def test_a_read_method_from_outside(exchanges, tmp):
    src, a, b = prepare(CASE, tmp)
    options = {"comm": world(), "read_method": "halves", "fsync": False}
    with registered(READ_METHODS, "halves", Halves(exchanges)):
        planned = rankxform.plan(src, a, b, ranks=(0,), processes=1, **options)
        assert {one.method for one in planned.methods} == {"halves"}
        rankxform.transform(src, tmp / "dst", a, b, verify=True, **options)
        assert rankxform.verify(src, tmp / "dst", a, b, **options).same
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []


@pytest.mark.sampled
@pytest.mark.world(sizes=(1, 2, 3))
@pytest.mark.parametrize("method", [*METHODS, "ranges"])
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_source_that_is_no_file(kind, method, tmp):
    src, a, b = prepare(CASE, tmp, kind)
    options = {"comm": world(), "read_method": method, "fsync": False}
    memory = Memory(latency=0.001, ahead=8)
    with registered(STORAGE, "mem", memory):
        memory.add("src", src)
        memory.add("lost", src)
        del memory.files[next(name for name in memory.files if "lost/rank_2" in name)]
        rankxform.transform("mem://src", tmp / "dst", a, b, verify=True, format="ckpt", **options)
        assert rankxform.verify("mem://src", tmp / "dst", a, b, **options).same
        loaded = rankxform.load("mem://src", a, b, rank=5, comm=world(), read_method=method)
        assert rankxform.inspect("mem://src")["kind"] == "folder"
        with pytest.raises(rankxform.CheckpointError, match="^rank 2 has no file"):
            rankxform.transform("mem://lost", tmp / "other", a, b, **options)
        with pytest.raises(rankxform.UsageError, match="mem://src: holds the files of 4 ranks"):
            rankxform.transform("mem://src", tmp / "other", None, b, **options)
        assert memory.announced
        assert memory.most <= USUAL_BUFFERS // 2
    assert reference.wrong_slices(tmp / "dst", CASE.dst, CASE.params) == []
    for name, layout in CASE.dst[0].items():
        full = reference.full_tensor(name, *CASE.params[name])
        assert loaded[name].tobytes() == reference.shard(full, layout, 5).tobytes()
