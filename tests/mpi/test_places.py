"""A source in several places, of which each node sees other files, at several processes."""

from __future__ import annotations

import random
import shutil

import pytest

import rankxform
from rankxform.source import copies
from tests import reference
from tests.cases import random_case
from tests.mpi.conftest import as_nodes
from tests.mpi.test_exchange import prepare
from tests.mpi_launch import world


@pytest.mark.world(sizes=(2, 3))
def test_what_process_0_does_not_see_tells_copies_too(tmp, monkeypatch):
    """On nodes with disks of their own: each sees two of four pipeline stages."""
    comm, layout = world(), ([1], [-1, -1], 0, 0)
    stages = [{p + f"layers.{n}.w": layout for p in ("", "moments.")} for n in range(4)]
    params = {name: ((4, 2), "Float32") for stage in stages for name in stage}
    params["moments.layers.3.w"] = ((3,), "Float32")
    stages[3]["moments.layers.3.w"] = ([1], [-1], 0, 0)
    if comm.rank == 0:
        reference.write_checkpoint(tmp / "src", stages, params, None, "safetensors")
        reference.write_stage_files(tmp / "a", stages)
    comm.Barrier()
    as_nodes(monkeypatch, 2, 1)
    real = copies.Indexer.index

    def index(self, path, *declared):
        if comm.rank == 0 and "rank_3" not in str(path):
            raise rankxform.StorageError("is on another node", where=path)
        return real(self, path, *declared)

    monkeypatch.setattr(copies.Indexer, "index", index)
    found = rankxform.load(
        tmp / "src", tmp / "a", tmp / "a", rank=3, dtype="bf16", comm=comm, progress=False
    )
    assert found.dtypes == {"layers.3.w": "BFloat16", "moments.layers.3.w": "Float32"}


@pytest.mark.sampled
@pytest.mark.world(sizes=(2, 3, 5))
@pytest.mark.parametrize("seed", range(6))
def test_each_slice_is_right_whoever_holds_its_parts(seed, tmp, monkeypatch):
    case = random_case(seed, mindspore_agrees=False, whole=False)
    _, a, b = prepare(case, tmp, "safetensors")
    places = [tmp / name for name in ("first", "second", "storage")]
    if world().rank == 0:
        rng = random.Random(seed)
        for place, share in zip(places, (0.5, 0.5, 1.0)):
            place.mkdir()
            for folder in sorted((tmp / "src").iterdir()):
                if rng.random() < share:
                    shutil.copytree(folder, place / folder.name)
    world().Barrier()
    as_nodes(monkeypatch, 1 + seed % 2, seed)
    options = {"fallback": places[1:], "comm": world(), "verify": True}
    report = rankxform.transform(places[0], tmp / "dst", a, b, fsync=False, **options)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params, "safetensors") == []
    lacking = {
        folder.name
        for folder in (tmp / "src").iterdir()
        if not any((place / folder.name).exists() for place in places[:2])
    }
    assert {f"rank_{rank}" for rank in report.places[2].ranks_read} <= lacking
