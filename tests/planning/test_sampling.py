"""Which tensors are sampled, and what samples prove."""

from __future__ import annotations

import re

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.verbs.test_evidence import PARAMS, Place, layouts, place, refused

__all__ = ["place"]


def test_zeros_prove_nothing(tmp_path):
    def make(name, shape, dtype):
        return np.zeros(shape, reference.WORD[reference.ITEM[dtype]])

    with pytest.warns(rankxform.RankxformWarning, match="sampled weights are zero"):
        report = Place(tmp_path, make=make).convert()
    assert report.evidence["samples"] == 0 and len(report.warnings) == 1


def test_ranks_own_statistics_are_a_notice(tmp_path):
    params = {**PARAMS, **{f"adam_m.{n}": one for n, one in PARAMS.items()}}
    stages = [{n: layouts(True)[n.removeprefix("adam_m.")] for n in params}]
    params["layers.0.load"] = ((32,), "Float32")
    stages[0]["layers.0.load"] = ([2, 2], [-1], 0, 0)
    place = Place(tmp_path, params=params, stages=stages)
    for rank in range(4):
        load = np.full(32, rank + 1, "<f4").view("<u4")
        place.change(rank, **{"layers.0.load": load})
    report = place.convert()
    assert report.warnings == () and "layers.0.load" in " ".join(report.notices)


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.wo.weight"])
def test_equal_slices_of_what_nobody_repeats(name, tmp_path):
    """As where the optimizer's shard of a strategy is another job's; keys' heads may be equal."""
    stages = [{n: ([4], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in PARAMS.items()}]

    def halves_twice(one, shape, dtype):
        full = reference.full_tensor(one, shape, dtype)
        if one == repeated:
            full[shape[0] // 2 :] = full[: shape[0] // 2]
        return full

    repeated = name
    place = Place(tmp_path, make=halves_twice, stages=stages)
    refused(place, f"shards {name}, and files hold the same bytes of different slices")
    with pytest.warns(rankxform.RankxformWarning, match=f"shards {name}, and files hold the same"):
        place.convert(accept=["equal-slices"])
    for pattern, is_right in ((f"^{re.escape(name)}$", True), ("another", False)):
        raised = (
            pytest.warns(rankxform.RankxformWarning, match=f"shards {name}, and files hold the")
            if is_right
            else pytest.raises(
                rankxform.CheckpointError, match=f"shards {name}, and files hold the"
            )
        )
        with raised:
            place.convert(accept=[f"equal-slices:{pattern}"], overwrite=True)
    repeated = "layers.0.wk.weight"
    params = {**PARAMS, repeated: ((32, 32), "Float32")}
    stages[0][repeated] = ([4], [0, -1], 0, 0)
    report = Place(tmp_path / "keys", make=halves_twice, params=params, stages=stages).convert()
    assert report.warnings == ()


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
@pytest.mark.parametrize("ones", ["norm", "weight"])
def test_ones_prove_nothing(ones, dtype, tmp_path):
    """As a network begins: what has one value everywhere is neither equal slices nor one file."""
    params = {name: (shape, dtype) for name, (shape, _) in PARAMS.items()}
    stages = [{n: ([4], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in params.items()}]
    one = {"Float32": 0x3F800000, "BFloat16": 0x3F80}[dtype]

    def initial(name, shape, dtype):
        full = reference.full_tensor(name, shape, dtype)
        return np.full_like(full, one) if ones in name else full

    report = Place(tmp_path, make=initial, params=params, stages=stages).convert()
    assert report.warnings == () and not any("same bytes" in text for text in report.notices)


def test_a_long_run_of_ones_is_not_all_of_a_tensor(tmp_path):
    """The sample of a triangle of this size lies where all is one; all ranks hold the triangle."""
    mask = np.tril(np.full((1127, 1127), 0x3F800000, "<u4"))
    weight = reference.full_tensor("w", (64, 32), "Float32")
    for rank in range(4):
        rows = weight[16 * rank : 16 * rank + 16]
        reference.write_ckpt(
            tmp_path / f"src/rank_{rank}/c_{rank}.ckpt",
            {"w": ("Float32", rows), "mask": ("Float32", mask)},
        )
    with pytest.raises(rankxform.CheckpointError, match="'mask', and all ranks hold the same"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", "shard:.*=0@4", "none")


def test_few_samples_of_many_files():
    """Of 1,024 files of many kinds at most four samples each."""
    from rankxform.formats.container import Schema
    from rankxform.layout.layout import Layout
    from rankxform.layout.strategy import Strategy
    from rankxform.planning.build_catalog import catalog_of
    from rankxform.planning.catalog import Description
    from rankxform.planning.sampling import choose_samples, entries_to_read

    ranks, stage = 1024, {}
    shapes = {}
    for number in range(12):
        axes = [(0,), ()] if number % 2 else [(), (0,)]
        split = 1 << (number // 2 + 1)
        for layer in range(4):
            name = f"layers.{layer}.w{number}"
            stage[name] = Layout((ranks // split, split), tuple(axes))
            shapes[name] = (64, 64 * split // split) if number % 2 else (64, 64)
    schema = Schema(tuple(stage), ("Float32",) * len(stage), tuple(shapes.values()))
    strategy = Strategy((stage,), ranks, "a")
    names = {rank: f"rank_{rank}" for rank in range(ranks)}
    schemas = dict.fromkeys(range(ranks), schema)
    catalog = catalog_of(Description("a", strategy), schemas, names, range(ranks))
    looked = choose_samples(catalog.parameters, catalog, range(ranks))
    assert len({one.kind for one in looked}) == 12, "every kind is looked at"
    entries = entries_to_read(looked)
    assert max(map(len, entries.values())) <= 4 and len(entries) == ranks
