"""`rankxform.mindspore`: MindSpore's calls, compared with MindSpore's."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.cases import random_case
from tests.verbs.test_load import prepare

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
ours = pytest.importorskip("rankxform.mindspore")
from rankxform.mindspore.network import parameter  # noqa: E402

pytestmark = pytest.mark.oracle
REAL = Path(__file__).parents[1] / "data" / "real_strategies"
NAMES = (
    "transform_checkpoints",
    "transform_checkpoint_by_rank",
    "rank_list_for_transform",
    "merge_pipeline_strategys",
    "merge_sliced_parameter",
    "build_searched_strategy",
    "load_distributed_checkpoint",
    "unified_safetensors",
    "convert_checkpoints",
    "convert_checkpoint_by_rank",
    "rank_list_for_convert",
    "load_segmented_checkpoints",
    "ckpt_to_safetensors",
    "safetensors_to_ckpt",
    "get_ckpt_path_with_strategy",
)


def theirs(name):
    parallel = __import__("mindspore.parallel", fromlist=[name])
    return getattr(parallel if hasattr(parallel, name) else ms, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_names_and_arguments(name):
    a, b = (inspect.signature(getattr(ours, name)), inspect.signature(theirs(name)))
    facts = [[(p.name, p.default, p.kind) for p in s.parameters.values()] for s in (a, b)]
    assert facts[0] == facts[1]


def paths(found):
    return [None if one is None else str(one) for one in found]


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("rank_*/*"))}


@pytest.mark.parametrize("seed", range(6))
def test_transform_checkpoints(seed, tmp_path):
    case = random_case(seed, mindspore_agrees=True)
    src, a, b = prepare(case, tmp_path)
    strategies = []
    for side, folder in (("a", a), ("b", b)):
        if folder is None:
            strategies.append(None)
            continue
        merged = str(tmp_path / f"{side}.ckpt")
        assert ours.merge_pipeline_strategys(str(folder), merged) is None
        strategies.append(merged)
    for module, name in ((theirs, "ms"), (lambda name: getattr(ours, name), "rx")):
        call = module("transform_checkpoints")
        for _ in range(2 if name == "rx" else 1):  # again: replaces what is there
            assert call(str(src), str(tmp_path / name), "net_", *strategies) is None
    assert files_of(tmp_path / "rx") == files_of(tmp_path / "ms")


@pytest.mark.parametrize("seed", range(6))
def test_by_rank(seed, tmp_path):
    case = random_case(seed, mindspore_agrees=True)
    src, a, b = prepare(case, tmp_path)
    a, b = (
        None if f is None else str(rankxform.merge(f, tmp_path / f"{f.name}.ckpt") or f"{f}.ckpt")
        for f in (a, b)
    )
    ranks = len(rankxform.ranks(a, b))
    for rank in range(ranks):
        needed = ours.rank_list_for_transform(rank, a, b)
        assert needed == theirs("rank_list_for_transform")(rank, a, b)
        assert [type(n) for n in needed] == [
            type(n) for n in theirs("rank_list_for_transform")(rank, a, b)
        ]
        files = {int(n): str(next((src / f"rank_{n}").iterdir())) for n in needed}
        for which, call in (
            ("ms", theirs("transform_checkpoint_by_rank")),
            ("rx", ours.transform_checkpoint_by_rank),
        ):
            target = tmp_path / which / f"out_{rank}.ckpt"
            target.parent.mkdir(exist_ok=True)
            assert call(rank, files, str(target), a, b) is None
        name = f"out_{rank}.ckpt"
        assert (tmp_path / "rx" / name).read_bytes() == (tmp_path / "ms" / name).read_bytes()
    assert not list(tmp_path.rglob("*.part"))


def test_a_list_of_ranks_where_mindspore_has_none(tmp_path):
    case = random_case(3, mindspore_agrees=False, ranks=(8, 6), whole=False)
    src, a, b = prepare(case, tmp_path)
    a, b = (next(folder.iterdir()) for folder in (a, b))
    for rank in range(6):
        found = ours.rank_list_for_transform(rank, str(a), str(b))
        assert found == sorted(found, reverse=True)
        assert set(rankxform.ranks(a, b)[rank]) <= set(map(int, found))
        files = {int(n): str(next((src / f"rank_{n}").iterdir())) for n in found}
        target = tmp_path / f"{rank}.ckpt"
        ours.transform_checkpoint_by_rank(rank, files, str(target), str(a), str(b))
        loaded = rankxform.load(src, a, b, rank=rank)
        assert {n: v.tobytes() for n, v in loaded.items()} == {
            n: data for n, (_, _, data) in reference.read_any(target).items()
        }
    assert ours.rank_list_for_transform(3, None, str(b)) == [0]


def test_wrong_arguments_are_told_as_mindspore_tells_them(tmp_path):
    for error, call in (
        (TypeError, lambda m: m("rank_list_for_transform")("0", "a", "b")),
        (TypeError, lambda m: m("transform_checkpoint_by_rank")(0, [], "x.ckpt")),
        (TypeError, lambda m: m("transform_checkpoint_by_rank")("0", {}, "x.ckpt")),
        (ValueError, lambda m: m("transform_checkpoint_by_rank")(0, {}, "x.bin")),
        (NotADirectoryError, lambda m: m("merge_pipeline_strategys")(str(tmp_path / "no"), "x")),
        (TypeError, lambda m: m("build_searched_strategy")(3)),
        (ValueError, lambda m: m("build_searched_strategy")(str(tmp_path / "no"))),
        (TypeError, lambda m: m("merge_sliced_parameter")("x")),
        (ValueError, lambda m: m("merge_sliced_parameter")([])),
        (TypeError, lambda m: m("merge_sliced_parameter")([3])),
    ):
        for module in (theirs, lambda name: getattr(ours, name)):
            with pytest.raises(error):
                call(module)


STRATEGY_FILES = sorted(REAL.glob("*/*/strategy/*.ckpt")) + sorted(REAL.glob("*/*/merged*.ckpt"))


def test_there_are_strategy_files():
    assert len(STRATEGY_FILES) > 20


@pytest.mark.parametrize("path", STRATEGY_FILES[::3], ids=lambda p: p.parent.parent.name)
def test_build_searched_strategy(path):
    found, expected = (
        m("build_searched_strategy")(str(path)) for m in (theirs, lambda n: getattr(ours, n))
    )
    assert list(found) == list(expected)
    assert all(found[name] == expected[name] for name in found)
    assert ours.build_searched_strategy(None) is None


def slices_of(name, full, layout, ranks):
    return [
        ms.Parameter(
            ms.Tensor(np.ascontiguousarray(reference.shard(full, layout, rank))), name=name
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_merge_sliced_parameter(seed, tmp_path):
    rng = random.Random(seed)
    matrix = [rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 3)))]
    axes = list(range(len(matrix)))
    rng.shuffle(axes)
    tensor_map = [axes.pop() if axes and rng.random() < 0.7 else -1 for _ in range(2)]
    layout = (matrix, tensor_map, 0, 0)
    full = np.arange(36 * 36, dtype=np.float32).reshape(36, 36)
    path = reference.write_strategy(tmp_path / "s.ckpt", [{"w": layout}])
    strategy = ours.build_searched_strategy(str(path))
    slices = slices_of("w", full, layout, int(np.prod(matrix)))
    found = ours.merge_sliced_parameter(slices, strategy)
    expected = theirs("merge_sliced_parameter")(slices, strategy)
    assert isinstance(found, ms.Parameter) and found.name == "w"
    assert np.array_equal(found.asnumpy(), expected.asnumpy())
    assert np.array_equal(found.asnumpy(), full)


def test_slices_that_mindspore_merges_wrongly(tmp_path):
    """Optimizer shards and nested maps: wrong there without a word (SEMANTICS: B23)."""
    full = np.arange(64, dtype=np.float32).reshape(8, 8)
    for layout in (([2, 2], [0, -1], 2, -1), ([2, 2], [[1, 0], -1], 0, 0)):
        path = reference.write_strategy(tmp_path / "s.ckpt", [{"w": layout}])
        strategy = ours.build_searched_strategy(str(path))
        found = ours.merge_sliced_parameter(slices_of("w", full, layout, 4), strategy)
        assert np.array_equal(found.asnumpy(), full)


def test_slices_in_rank_order_uneven_ones_and_embeddings_of_several_fields(tmp_path):
    rows = [np.full((n, 3), n, np.float32) for n in (2, 5, 1, 4)]
    slices = [ms.Parameter(ms.Tensor(r), name="w") for r in rows]
    for module in (theirs, lambda name: getattr(ours, name)):
        call = module("merge_sliced_parameter")
        assert np.array_equal(call(slices).asnumpy(), np.concatenate(rows))
        message = next(iter(theirs("build_searched_strategy")(str(STRATEGY_FILES[0])).values()))
        uneven = type(message)()
        uneven.CopyFrom(message)
        for field in ("dev_matrix", "tensor_map", "param_split_shape", "indices_offset"):
            uneven.ClearField(field)
        uneven.opt_weight_shard_step = uneven.opt_weight_shard_size = uneven.field = 0
        uneven.dev_matrix.add(dim=[4])
        uneven.tensor_map.add(dim=[0, -1])
        uneven.param_split_shape.add(dim=[2, 5, 1, 4])
        uneven.indices_offset.add()
        assert np.array_equal(call(slices, {"w": uneven}).asnumpy(), np.concatenate(rows))
        with pytest.raises(ValueError, match=r"slice"):
            call(slices[::-1], {"w": uneven})
        with pytest.raises(KeyError):
            call(slices, {"other": uneven})
    even = [
        ms.Parameter(ms.Tensor(np.arange(12 * r, 12 * r + 12.0).reshape(4, 3)), name="w")
        for r in range(4)
    ]
    fields = type(uneven)()
    fields.CopyFrom(uneven)
    fields.ClearField("param_split_shape")
    fields.param_split_shape.add()
    fields.field = 2
    results = [
        m("merge_sliced_parameter")(even, {"w": fields}).asnumpy()
        for m in (theirs, lambda name: getattr(ours, name))
    ]
    assert np.array_equal(*results)


def test_bfloat16_slices_stay_what_they_are():
    words = [np.arange(8 * i, 8 * i + 8, dtype=np.uint16) for i in (1, 2)]
    slices = [parameter("w", "BFloat16", value) for value in words]
    found = ours.merge_sliced_parameter(slices)
    assert found.dtype == ms.bfloat16 and found.shape == (16,)
    assert found.get_bytes() == words[0].tobytes() + words[1].tobytes()
