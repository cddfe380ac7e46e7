"""A source in several places, of which each node sees other files, at several processes."""

from __future__ import annotations

import random
import shutil

import pytest

import rankxform
from tests import reference
from tests.cases import random_case
from tests.mpi.conftest import as_nodes
from tests.mpi.test_exchange import prepare
from tests.mpi_launch import world


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
