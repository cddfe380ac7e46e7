"""A checkpoint in memory: the slices of a rank, without a file."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import rankxform
from rankxform.engine.cast import word_type
from rankxform.storage import posix as files
from rankxform.storage.user_files import load_strategy as load_strategy
from tests import reference
from tests.cases import random_case
from tests.reference import full_tensor


def prepare(case, tmp, kind="ckpt"):
    reference.write_checkpoint(tmp / "src", case.src, case.params, case.extras, kind)
    for side, stages in (("src", case.src), ("dst", case.dst)):
        if stages:
            reference.write_stage_files(tmp / f"{side}_strategy", stages)
    return tmp / "src", *(
        tmp / f"{side}_strategy" if stages else None
        for side, stages in (("src", case.src), ("dst", case.dst))
    )


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(40))
def test_arrays_hold_what_files_would(seed, tmp_path):
    kind = ("ckpt", "safetensors")[seed % 2]
    case = random_case(seed, mindspore_agrees=False)
    src, a, b = prepare(case, tmp_path, kind)
    report = rankxform.transform(src, tmp_path / "dst", a, b, fsync=False)
    for rank, path in enumerate(report.files):
        found = rankxform.load(src, a, b, rank=rank)
        expected = reference.read_any(path)
        assert list(found) == list(expected) or kind == "safetensors"
        assert {n: (found.dtypes[n], v.shape) for n, v in found.items()} == {
            n: (dtype, shape) for n, (dtype, shape, _) in expected.items()
        }
        for name, (_, _, data) in expected.items():
            assert found[name].tobytes() == data
            assert found[name].flags.writeable


PARAMS = {"w": ((8, 6), "Float32"), "b": ((8,), "BFloat16"), "h": ((8, 2), "Float16")}
SRC = [{"w": ([4], [0, -1], 0, 0), "b": ([4], [0], 0, 0), "h": ([4], [0, -1], 0, 0)}]
DST = [{"w": ([2], [-1, 0], 0, 0), "b": ([2], [-1], 0, 0), "h": ([2], [0, -1], 0, 0)}]


@pytest.fixture
def place(tmp_path):
    src = reference.write_checkpoint(tmp_path / "src", SRC, PARAMS)
    a = reference.write_strategy(tmp_path / "a.ckpt", SRC)
    b = reference.write_strategy(tmp_path / "b.ckpt", DST)
    return src, a, b


def test_what_is_noticed_of_files_while_they_are_read_is_told_by_load_and_verify(place, tmp_path):
    src, a, b = place
    rankxform.transform(src, tmp_path / "dst", a, b, fsync=False)

    def change_mode(done, total, phase):
        for path in Path(src).rglob("*.ckpt"):
            path.chmod(0o600 if done else 0o644)

    found = rankxform.load(src, a, b, rank=0, progress=change_mode)
    verdict = rankxform.verify(src, tmp_path / "dst", a, b, progress=change_mode)
    for notices in (found.notices, verdict.notices):
        assert [text for text in notices if "its name, mode or links were changed" in text]


def test_values_types_and_shapes(place):
    found = rankxform.load(*place, rank=1)
    assert found.rank == 1 and found.full_shapes["w"] == (8, 6)
    assert found["w"].dtype == np.float32
    assert found["w"].tobytes() == full_tensor("w", *PARAMS["w"])[:, 3:].tobytes()
    assert found["h"].dtype == np.float16 and found["h"].shape == (4, 2)
    assert found.dtypes["b"] == "BFloat16"
    assert repr(found) == f"Parameters(3 slices of rank 1, bytes_read={found.bytes_read})"


def test_only_what_a_rank_needs_is_read(place, monkeypatch):
    wanted = []
    real = files.os.preadv
    monkeypatch.setattr(
        files.os, "preadv", lambda fd, parts, at: wanted.append(real(fd, parts, at)) or wanted[-1]
    )
    found = rankxform.load(*place, rank=0, include="h")
    assert found.bytes_read == sum(wanted) == 4 * 2 * 2


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_alone_has_the_copies_of_parameters_that_all_have(rank, tmp_path):
    """Of other pipeline stages names are known, and no shapes; copies keep their type."""
    weights = [[f"layers.{stage}.w", f"layers.{stage}.v"] for stage in range(4)]
    stages = [
        {prefix + name: ([1], [-1, -1], 0, 0) for name in names for prefix in ("", "ema.")}
        for names in weights
    ]
    params = {name: ((4, 2), "Float32") for stage in stages for name in stage}
    reference.write_checkpoint(tmp_path / "src", stages, params)
    a = reference.write_stage_files(tmp_path / "a", stages)
    found = rankxform.load(tmp_path / "src", a, a, rank=rank, dtype="bf16", progress=False)
    expected = dict.fromkeys(weights[rank], "BFloat16")
    assert found.dtypes == expected | {f"ema.{name}": "Float32" for name in weights[rank]}
    with pytest.raises(rankxform.RankxformError, match="repeat other tensors' names"):
        rankxform.load(tmp_path / "src", a, a, rank=rank, weights_only=True, progress=False)


@pytest.mark.parametrize("lacking", [(), (0, 1), (0, 1, 4, 5, 6, 7)])
def test_copies_that_no_strategy_lists_in_files_without_redundancy(lacking, tmp_path):
    """Each of 4 stages has 2 ranks with half of its tensors each; of some there are no files."""
    names = [[f"layers.{stage}.w{n}" for n in range(4)] for stage in range(4)]
    stages = [dict.fromkeys(of_stage, ([2], [-1, -1], 0, 0)) for of_stage in names]
    for rank in {*range(8)}.difference(lacking):
        tensors = {
            prefix + name: ("Float32", full_tensor(prefix + name, (4, 2), "Float32"))
            for name in names[rank // 2][rank % 2 :: 2]
            for prefix in ("", "ema.")
        }
        reference.write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", tensors)
    a = reference.write_stage_files(tmp_path / "a", stages)
    found = rankxform.load(tmp_path / "src", a, a, rank=2, dtype="bf16", progress=False)
    expected = dict.fromkeys(names[1], "BFloat16")
    assert found.dtypes == expected | {f"ema.{name}": "Float32" for name in names[1]}
    assert any("told by the other stages" in text for text in found.notices) == bool(lacking)


def test_one_of_a_family_of_which_only_other_stages_tell(tmp_path):
    layout, types = ([1], [-1, -1], 0, 0), ("Float32", full_tensor("w", (4, 2), "Float32"))
    tied = "embedding.word_embeddings.weight"
    stages = [{f"layers.{stage}.w{n}": layout for n in range(3)} for stage in range(3)]
    copied = [[f"ema.{name}" for name in stage] for stage in stages]
    copied = [[*copied[0], f"ema.{tied}"], copied[1], ["ema.extra"]]
    stages[0][tied] = stages[2][tied] = layout  # its copy is in the first stage alone
    for rank, others in enumerate(copied):
        tensors = dict.fromkeys([*stages[rank], *others], types)
        reference.write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", tensors)
    a = reference.write_stage_files(tmp_path / "a", stages)
    untied = [*stages[:2], {name: layout for name in stages[2] if name != tied}]
    b = reference.write_stage_files(tmp_path / "b", untied)
    for dst in (a, b):
        options = {"dtype": "bf16", "progress": False}
        rankxform.transform(tmp_path / "src", f"{dst}-of", a, dst, **options)
        for rank in range(3):
            found = rankxform.load(tmp_path / "src", a, dst, rank=rank, **options)
            (path,) = Path(f"{dst}-of/rank_{rank}").iterdir()
            assert found.dtypes == {n: v[0] for n, v in reference.read_any(path).items()}


@pytest.mark.filterwarnings("ignore:.*converting them as weights:rankxform.RankxformWarning")
def test_what_is_decided_of_all_tensors_is_so_for_a_rank_alone(tmp_path):
    """A family of which few relate, and an optimizer's root of which others are elsewhere."""
    shapes = {f"layers.{n}.w": (4, 2) for n in range(8)}
    stages = [{name: ([1], [-1, -1], 0, 0)} for name in shapes]
    for n, stage in [*enumerate(stages)][1:]:
        shape = shapes[f"moments.layers.{n}.w"] = (4, 2) if n < 4 else (3,)
        stage[f"moments.layers.{n}.w"] = ([1], [-1] * len(shape), 0, 0)
    stages[0] |= dict.fromkeys(("model.e", "optimizer.model.e"), ([1], [-1, -1], 0, 0))
    stages[1]["optimizer.layers.1.w"] = ([1], [-1, -1], 0, 0)
    shapes |= {"model.e": (4, 2), "optimizer.model.e": (4, 2), "optimizer.layers.1.w": (4, 2)}
    params = {name: (shape, "Float32") for name, shape in shapes.items()}
    reference.write_checkpoint(tmp_path / "src", stages, params)
    a = reference.write_stage_files(tmp_path / "a", stages)
    options = {"weights_only": True, "progress": False}
    rankxform.transform(tmp_path / "src", tmp_path / "dst", a, a, **options)
    for rank in range(8):
        names = {*reference.read_any(next((tmp_path / f"dst/rank_{rank}").iterdir()))}
        assert {*rankxform.load(tmp_path / "src", a, a, rank=rank, **options)} == names
        others = {"model.e"} if rank == 0 else {f"moments.layers.{rank}.w"} if rank > 3 else set()
        assert names == {f"layers.{rank}.w"} | others


def test_a_rank_of_whose_tensors_few_are_listed_is_of_this_network(tmp_path):
    """How many of the tensors a strategy knows is asked of all stages."""
    stages = [{f"layers.{n}.{w}": ([1], [-1, -1], 0, 0) for w in "ab"[: 2 - n]} for n in (0, 1)]
    names = [*stages[0], *stages[1], "frozen.a", "frozen.b"]
    params = dict.fromkeys(names, ((4, 2), "Float32"))
    source, folder = reference.write_checkpoint(tmp_path / "src", stages, params), tmp_path / "a"
    entries = {n: ("Float32", full_tensor(n, (4, 2), "Float32")) for n in names[2:]}
    reference.write_ckpt(tmp_path / "src/rank_1/checkpoint_1.ckpt", entries)
    a = reference.write_stage_files(folder, stages)
    rankxform.transform(source, tmp_path / "dst", a, a)
    assert {*rankxform.load(source, a, a, rank=1)} == {*names[2:]}


def test_a_state_in_another_stage_than_its_vocabulary_is_refused(tmp_path):
    layout = ([1], [-1, -1], 0, 0)
    stages = [{"w": layout, "adam_m.lm_head.weight": layout}, {"lm_head.weight": layout}]
    params = {name: ((4, 2), "Float32") for stage in stages for name in stage}
    reference.write_checkpoint(tmp_path / "src", stages, params)
    a = reference.write_stage_files(tmp_path / "a", stages)
    with pytest.raises(rankxform.CheckpointError, match="is a state of 'lm_head.weight', which"):
        rankxform.load(tmp_path / "src", a, a, rank=0, vocab=8, progress=False)


def test_what_is_not_loaded_by_any_process_is_said(place):
    (notice,) = [text for text in rankxform.load(*place, rank=1).notices if "was loaded" in text]
    assert notice.startswith("rank 1 of ") and "as many processes as ranks load all" in notice


def test_bfloat16_has_a_type_to_calculate_with(place):
    loaded = rankxform.load(*place, rank=0)["b"]
    words = full_tensor("b", *PARAMS["b"]).view(np.uint16)
    assert loaded.dtype == ml_dtypes.bfloat16
    assert loaded.view(np.uint16).tolist() == words.tolist()
    values = (words.astype("<u4") << 16).view("<f4")
    assert np.array_equal((loaded + loaded).astype("<f4"), 2 * values, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": []}, "format is "),
        ({"read_method": ["auto"]}, "read_method is "),
        ({"ranks": 1.0}, "ranks is 1.0; expected one value or several"),
        ({"files": ["x"]}, "expected a mapping of ranks to paths"),
        ({"files": {0: 5}}, r"files\[0\] is 5; expected a path"),
        ({"comm": 5}, "comm is 5; expected a communicator"),
        ({"src_strategy": 5}, "src_strategy is 5; expected a path"),
        ({"dst": ""}, "dst is ''; expected a path"),
        ({"vocab": 0}, "--vocab 0: expected a number of rows from 1 on"),
    ],
)
def test_what_no_option_can_be_is_a_usage_error(options, words, place, tmp_path):
    src, a, b = place
    given = {"src": src, "dst": tmp_path / "dst", "src_strategy": a, "dst_strategy": b, **options}
    with pytest.raises(rankxform.UsageError, match=words):
        rankxform.transform(**given)
    assert not (tmp_path / "dst").exists()


def test_what_is_no_path_and_no_mapping_is_one_message(place, tmp_path):
    for places, words in ((None, tmp_path), "folder is None"), ((tmp_path, 5), "target is 5"):
        with pytest.raises(rankxform.UsageError, match=f"{words}; expected a path"):
            rankxform.merge(*places)
    with pytest.raises(rankxform.UsageError, match="dtypes is 5; expected"):
        rankxform.reshard({"w": np.zeros(4)}, dtypes=5, progress=False)


def test_none_leaves_an_option_as_it_is(place):
    found = rankxform.plan(*place, include=None, rename=None, ranks=None)
    assert len(found.shards) == rankxform.plan(*place).dst_ranks
    assert rankxform.ranks(place[1], place[2], 1).keys() == {1}


@pytest.mark.parametrize("processes", [0, -1, "3", 2.0, True])
def test_a_plan_is_for_a_number_of_processes(processes, place):
    with pytest.raises(rankxform.UsageError, match="expected a number"):
        rankxform.plan(*place, processes=processes)


def test_numbers_of_numpy_are_numbers(place):
    found = rankxform.plan(
        *place,
        processes=np.int64(3),
        ranks=np.arange(1),
        costs=rankxform.Costs(read=np.float32(1e9)),
    )
    assert found.processes == 3 and len(found.shards) == 1


@pytest.mark.parametrize(
    "costs", [{"read": -1}, {"read": "fast"}, {"overlap": -2}, {"latency": True}]
)
def test_costs_are_positive_numbers(costs):
    with pytest.raises(rankxform.UsageError, match="expected a number"):
        rankxform.Costs(**costs)


@pytest.mark.parametrize("dtype", ["Int4", "str"])
def test_what_is_no_number_is_not_converted(dtype):
    with pytest.raises(rankxform.RankxformError, match="cannot be converted"):
        word_type(dtype)


def test_the_rank_of_a_process_without_mpi(place, monkeypatch):
    assert rankxform.load(*place).rank == 0
    monkeypatch.setenv("RANK_ID", "1")
    assert rankxform.load(*place).rank == 1
    whole = rankxform.load(*place[:2], None)
    assert whole.rank == 0 and whole["w"].shape == (8, 6), "without a strategy all get all"
    monkeypatch.setenv("RANK_ID", "2")
    with pytest.raises(rankxform.UsageError, match="destination rank 2 does not exist"):
        rankxform.load(*place)
    monkeypatch.setenv("RANK_ID", "x")
    with pytest.raises(rankxform.UsageError, match="RANK_ID is 'x'"):
        rankxform.load(*place)


def test_a_strategy_as_an_object(place):
    src, a, b = place
    as_files = rankxform.load(src, a, b, rank=1)
    as_objects = rankxform.load(src, load_strategy(str(a)), load_strategy(str(b)), rank=1)
    assert {n: v.tobytes() for n, v in as_files.items()} == {
        n: v.tobytes() for n, v in as_objects.items()
    }


def test_a_text_is_a_str(tmp_path):
    path = tmp_path / "one.ckpt"
    text = np.frombuffer("étape 3\0".encode("utf-32-le"), np.uint8)
    reference.write_ckpt(
        path, {"w": ("Float32", np.ones((2, 2), np.float32)), "note": ("str", text)}
    )
    found = rankxform.load(path, None, None)
    assert found["note"] == "étape 3" and found["w"].tolist() == [[1, 1], [1, 1]]


def test_one_of_several_workers_must_know_which(place, monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.raises(rankxform.UsageError, match="one of 2 workers, and RANK_ID does not say"):
        rankxform.load(*place)
    assert rankxform.load(*place, rank=np.int64(1)).rank == 1
    monkeypatch.setenv("RANK_ID", "1")
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # msrun, started by srun
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert rankxform.load(*place).rank == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": "0"}, "rank is '0'; expected a number"),
        ({"rank": 7}, "destination rank 7 does not exist"),
        ({"verify": True}, "unknown option 'verify'"),
        ({"shapes": "x"}, "unknown option 'shapes'"),
    ],
)
def test_what_loading_cannot_do(place, options, words):
    with pytest.raises(rankxform.UsageError, match=words):
        rankxform.load(*place, **options)


def test_a_text_that_is_none(tmp_path):
    bad = np.frombuffer(b"\xff\xff\xff\xff", np.uint8)
    reference.write_ckpt(tmp_path / "a.ckpt", {"note": ("str", bad)})
    with pytest.raises(rankxform.CheckpointError, match="'note': is no UTF-32 text"):
        rankxform.load(tmp_path / "a.ckpt")


def test_errors_of_the_call_and_the_inputs_are_value_errors(place):
    for call in (
        lambda: rankxform.load("nowhere", None, None),
        lambda: rankxform.load(place[0], "shard:w=0@²", None),
        lambda: rankxform.load(place[0], "shard:w=0@9999999", None),
    ):
        with pytest.raises(ValueError, match=r"nowhere|REGEX=AXIS") as caught:
            call()
        assert isinstance(caught.value, rankxform.RankxformError)
