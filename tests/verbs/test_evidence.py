"""What samples of files say of a strategy: wrong ones are refused, and healthy ones are not."""

from __future__ import annotations

import os
import re
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.display.text import as_text
from tests import reference
from tests.place import punch

PARAMS = {
    "embed.weight": ((64, 32), "Float32"),
    "layers.0.wq.weight": ((32, 32), "Float32"),
    "layers.0.wo.weight": ((32, 32), "Float32"),
    "layers.0.norm.weight": ((32,), "Float32"),
    "layers.1.wq.weight": ((32, 32), "Float32"),
    "layers.1.wo.weight": ((32, 32), "Float32"),
    "layers.1.norm.weight": ((32,), "Float32"),
}
ALL_ROWS = {"embed.weight", "layers.0.wq.weight", "layers.1.wq.weight"}
COLUMNS = {"layers.0.wo.weight", "layers.1.wo.weight"}


def layouts(dp_first, params=None):
    """Return a stage of 4 ranks: tensor parallel over 2, each copied twice.

    dp_first: ranks 0 and 2 hold the same, or else 0 and 1.
    """
    axis = 0 if dp_first else 1
    return {
        name: (
            [2, 2],
            [axis if name in ALL_ROWS else -1, axis if name in COLUMNS else -1][: len(shape)],
            0,
            0,
        )
        for name, (shape, _) in (params or PARAMS).items()
    }


RIGHT, WRONG = [layouts(True)], [layouts(False)]
STEP = ("Int32", np.array([100], "<i4"))


class Place:
    """A checkpoint of 4 ranks, its strategy, and another one of as many."""

    def __init__(self, folder, extras=None, make=reference.full_tensor, params=PARAMS, stages=None):
        self.folder, self.dst = folder, folder / "dst"
        self.src = folder / "src"
        stages = stages or [layouts(True, params)]
        reference.write_checkpoint(self.src, stages, params, extras or {}, make=make)
        self.right = reference.write_strategy(folder / "right.ckpt", stages)
        self.wrong = reference.write_strategy(folder / "wrong.ckpt", [layouts(False, params)])

    def file(self, rank):
        return self.src / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"

    def change(self, rank, names=None, **values):
        """Replace what a rank's file holds of tensors."""
        entries = {
            n: (d, np.frombuffer(b, reference.WORD[reference.ITEM[d]]).reshape(s).copy())
            for n, (d, s, b) in reference.read_ckpt(self.file(rank)).items()
        }
        for name in names or ():
            entries[name][1].reshape(-1)[...] ^= 1
        for name, value in values.items():
            entries[name] = (entries[name][0], value)
        reference.write_ckpt(self.file(rank), entries)

    def convert(self, strategy=None, **options):
        return rankxform.transform(self.src, self.dst, strategy or self.right, None, **options)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def refused(place, match, strategy=None, kind=rankxform.CheckpointError, **options):
    with pytest.raises(kind, match=match) as caught:
        place.convert(strategy, **options)
    assert not place.dst.exists()
    return caught.value


def test_the_right_strategy_stands_on_samples(place):
    report = place.convert()
    assert report.evidence["samples"] > 6 and report.warnings == () == report.notices
    assert report.evidence["reads"] <= 4 * 32


def test_a_strategy_of_as_many_ranks(place):
    refused(place, "ranks 0 and 1 hold replicas of .* different bytes", place.wrong)
    with pytest.raises(rankxform.CheckpointError, match=r"are on ranks \(0, 2\) and \(1, 3\)"):
        place.convert(place.wrong)


def test_a_file_of_zeros_is_to_be_copied_again(place):
    entries = reference.read_ckpt(place.file(2)).items()
    place.change(2, **{name: np.zeros(shape, "<f4") for name, (_, shape, _) in entries})
    error = refused(place, "hold replicas")
    assert error.parts.tries[0] == (
        f"copy {place.file(2)} again: it has zeros where replicas have numbers"
    )


def test_every_verb_obeys(place):
    for call in (
        lambda: rankxform.plan(place.src, place.wrong, None),
        lambda: rankxform.load(place.src, place.wrong, None),
        lambda: rankxform.verify(place.src, place.src, place.wrong, place.wrong),
    ):
        with pytest.raises(rankxform.CheckpointError, match="hold replicas"):
            call()


def test_inspect_says_whether_a_strategy_is_borne_out(place, capfd):
    assert main(["inspect", str(place.src), "--src-strategy", place.right]) == 0
    assert "strategy  fits, by" in capfd.readouterr().out
    assert main(["inspect", str(place.src), "--src-strategy", place.wrong]) == 3
    assert "hold replicas of" in " ".join(capfd.readouterr().err.split())
    one = shutil.copy(place.file(0), place.folder)
    assert main(["inspect", one, "--src-strategy", "none"]) == 6
    assert "nothing could be compared" in capfd.readouterr().out


def test_one_ranks_file_is_not_complete_where_anothers_differs(place):
    """Ranks of a data-parallel job hold the same."""
    with pytest.raises(rankxform.CheckpointError) as caught:
        rankxform.transform(place.file(2), place.dst, "none", place.right)
    parts = caught.value.parts
    assert re.match(r"is one rank's file, and rank_[013]'s holds other bytes of '", parts.what)
    assert parts.tries[0] == f"name the folder of all ranks, {place.src}, with --src-strategy"
    assert not place.dst.exists()
    options = {"accept": ["contradictions"]}
    rankxform.transform(place.file(2), place.dst, "none", place.right, **options)
    for rank in range(1, 4):
        shutil.copy(place.file(0), place.file(rank))
    rankxform.transform(place.file(0), place.folder / "same", "none", place.right)


def test_two_folders_exchanged(place):
    a, b, aside = place.src / "rank_0", place.src / "rank_1", place.src / "aside"
    for one, other in ((a, aside), (b, a), (aside, b)):
        one.rename(other)
    for rank, old in ((0, 1), (1, 0)):
        (place.src / f"rank_{rank}" / f"checkpoint_{old}.ckpt").rename(place.file(rank))
    refused(place, "hold replicas")


@pytest.mark.parametrize("link", [shutil.copyfile, os.link])
def test_one_file_for_two_ranks(tmp_path, link):
    """Nothing is replicated, so that only what should differ tells."""
    params = {n: one for n, one in PARAMS.items() if n in ALL_ROWS}
    stage = {name: ([4], [0, -1], 0, 0) for name in params}
    reference.write_checkpoint(tmp_path / "src", [stage], params)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", [stage])
    first, third = (tmp_path / f"src/rank_{n}/checkpoint_{n}.ckpt" for n in (1, 3))
    third.unlink()
    link(first, third)
    with pytest.raises(rankxform.CheckpointError, match="one is a copy of the other"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", strategy, None)


def test_a_few_that_differ_are_a_warning(place):
    place.change(1, ["layers.0.wq.weight"])
    with pytest.warns(rankxform.RankxformWarning, match=r"1 of 5 tensors compared contradict"):
        report = place.convert()
    assert len(report.warnings) == 1


def upcycled(name, shape, dtype):
    """Return a tensor; of experts, one after another, all the same."""
    if ".w1" not in name:
        return reference.full_tensor(name, shape, dtype)
    return np.broadcast_to(reference.full_tensor(name, shape[1:], dtype), shape).copy()


def test_experts_that_were_all_made_of_one(tmp_path):
    """All boxes of one kind are equal, and others differ: upcycled experts."""
    params = {**PARAMS, "layers.0.experts.w1": ((4, 32, 8), "Float32")}
    stage = {**layouts(True), "layers.0.experts.w1": ([4], [0, -1, -1], 0, 0)}
    report = Place(tmp_path, make=upcycled, params=params, stages=[stage]).convert()
    assert report.warnings == ()
    assert "every rank holds the same bytes" in " ".join(report.notices)


def test_a_tied_embedding_whose_copies_differ(tmp_path):
    stage = {"embed.weight": ([2], [0, -1], 0, 0), "w0": ([2], [0, -1], 0, 0)}
    last = {"embed.weight": ([2], [0, -1], 0, 0), "w1": ([2], [0, -1], 0, 0)}
    params = dict.fromkeys(("embed.weight", "w0", "w1"), ((64, 32), "Float32"))
    place = Place(tmp_path, params=params, stages=[stage, last])
    assert place.convert(overwrite=True).warnings == ()
    shutil.rmtree(place.dst)
    for rank in (2, 3):
        place.change(rank, ["embed.weight"])
    refused(place, "hold replicas of 'embed.weight'")


def test_a_destination_strategy_of_another_network(place, tmp_path):
    stage = layouts(True)
    shapes = {name: shape for name, (shape, _) in PARAMS.items()} | {"embed.weight": (128, 32)}
    other = reference.write_strategy(tmp_path / "b.json", [stage], "json", shapes)
    with pytest.raises(rankxform.RequestError, match=r"\[64, 32\], and \[128, 32\] by"):
        rankxform.transform(place.src, place.dst, place.right, other)


def test_json_beside_protobuf_states_the_shapes(place, tmp_path):
    """Halves of rows taken for halves of columns: nothing but the shape tells."""
    shapes = {name: shape for name, (shape, _) in PARAMS.items()} | {"embed.weight": (32, 64)}
    folder = tmp_path / "both"
    folder.mkdir()
    for kind in ("ckpt", "json"):
        reference.write_strategy(folder / f"s.{kind}", RIGHT, kind, shapes)
    refused(place, r"the full shape of 'embed.weight' is \[32, 64\]", str(folder))


def test_a_single_rank_is_looked_at_to_be_known_again(tmp_path):
    stages = [{"w": ([1], [-1, -1], 0, 0)}]
    reference.write_checkpoint(tmp_path / "src", stages, {"w": ((64, 64), "Float32")})
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    report = rankxform.transform(tmp_path / "src", tmp_path / "dst", strategy, None)
    expected = {
        "samples": 0,
        "percent": 0,
        "ordered": None,
        "exchangeable": 0,
        "reads": 1,
        "bytes_read": 4096,
    }
    assert report.evidence == expected


@pytest.mark.parametrize(
    ("layout", "ordered"),
    [(([4], [0, -1], 0, 0), 0), (([2, 2], [0, -1], 0, 0), 1), (([4], [-1, -1], 0, 0), None)],
)
def test_evidence_says_whether_the_order_of_the_ranks_was_checked(layout, ordered, tmp_path):
    """That slices differ says nothing of it; that ranks of one slice hold the same does."""
    stages = [{"w": layout, "norm": ([4], [-1], 0, 0)}]
    params = {"w": ((64, 64), "Float32"), "norm": ((512,), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", stages, params)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    report = rankxform.transform(src, tmp_path / "dst", strategy, None)
    assert report.evidence["ordered"] == ordered and report.evidence["samples"] > 0
    told = as_text(rankxform.verify(src, tmp_path / "dst", strategy))
    text = "no slice of a sharded weight is on two ranks: the order of the ranks was not checked"
    assert (text in told) == (ordered == 0)


@pytest.mark.parametrize(("other", "exchangeable"), [
    ([2, 2], 0),  # ranks 0 and 1 hold the same of both
    ([4], 4),  # rank 0 and 1 hold the same of one, and each a slice of its own of the other
])  # fmt: skip
def test_ranks_that_could_be_exchanged_unnoticed_are_counted(other, exchangeable, tmp_path):
    """Their files were exchanged, and the evidence read as that of the right ones."""
    stages = [{"w": ([2, 2], [1, -1], 0, 0), "v": (other, [len(other) - 1, -1], 0, 0)}]
    params = {"w": ((64, 64), "Float32"), "v": ((64, 64), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", stages, params)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    names = [tmp_path / f"src/rank_{rank}/checkpoint_{rank}.ckpt" for rank in (0, 1)]
    for path, other_path in zip(names, [path.read_bytes() for path in names[::-1]]):
        path.write_bytes(other_path)
    report = rankxform.transform(src, tmp_path / "dst", strategy, None)
    assert report.evidence["exchangeable"] == exchangeable
    told = as_text(rankxform.verify(src, tmp_path / "dst", strategy))
    assert ("4 ranks could be exchanged with another unnoticed" in told) == (exchangeable == 4)
    assert str(exchangeable) + " ranks could" in as_text(rankxform.check(src, strategy)) or (
        exchangeable == 0
    )


def test_a_launch_with_nothing_to_convert_looks_too(tmp_path):
    from rankxform.request import Request
    from rankxform.transport import SerialTeam
    from rankxform.verbs.launch import launch

    place = Place(
        tmp_path, lambda rank: {"global_step": (STEP[0], np.array([100 - rank // 3], "<i4"))}
    )
    request = Request(str(place.src), None, place.right, place.right)
    with pytest.raises(rankxform.CheckpointError, match="global_step"):
        launch(request, tmp_path / "output", SerialTeam())


class TestHoles:
    """Lost writes read as zeros."""

    def made(self, tmp_path, make=reference.full_tensor):
        params = {f"layers.{n}.w": ((1024, 1024), "Float32") for n in range(4)}
        stage = {name: ([2], [0, -1], 0, 0) for name in params}
        reference.write_checkpoint(tmp_path / "src", [stage], params, make=make)
        return tmp_path / "src", reference.write_strategy(tmp_path / "a.ckpt", [stage])

    def test_a_part_of_a_weight(self, tmp_path):
        src, strategy = self.made(tmp_path)
        punch(src / "rank_1/checkpoint_1.ckpt", 1 << 18, 3 << 19)
        with pytest.warns(rankxform.RankxformWarning, match=r"rank_1.*bytes are holes"):
            rankxform.transform(src, tmp_path / "dst", strategy, None)

    def test_all_of_a_rank(self, tmp_path):
        src, strategy = self.made(tmp_path)
        path = src / "rank_1/checkpoint_1.ckpt"
        for _, (_, _, data) in sorted(reference.read_ckpt(path).items()):
            punch(path, path.read_bytes().index(bytes(data)), len(data))
        with pytest.raises(rankxform.CheckpointError, match=r"rank_1.*nothing was ever written"):
            rankxform.transform(src, tmp_path / "dst", strategy, None)

    def test_zeros_that_are_stored_as_holes_are_healthy(self, tmp_path):
        def zeros(name, shape, dtype):
            return np.zeros(shape, "<u4")

        src, strategy = self.made(tmp_path, zeros)
        for rank in range(2):
            punch(tmp_path / f"src/rank_{rank}/checkpoint_{rank}.ckpt", 1 << 18, 3 << 19)
        with pytest.warns(rankxform.RankxformWarning, match="sampled weights are zero"):
            report = rankxform.transform(src, tmp_path / "dst", strategy, None)
        assert len(report.warnings) == 1


def test_experts_that_were_all_made_of_one_with_tensor_parallelism(tmp_path):
    """Expert parallel 2, tensor parallel 2: experts' boxes repeat along one axis."""
    params = {"layers.0.wq": ((32, 32), "Float32"), "layers.0.w1": ((4, 32, 32), "Float32"),
              "layers.1.w1": ((4, 32, 32), "Float32")}  # fmt: skip
    stage = {
        name: ([2, 2], [1, -1, 0], 0, 0) if "w1" in name else ([2, 2], [0, -1], 0, 0)
        for name in params
    }
    place = Place(tmp_path, make=upcycled, params=params, stages=[stage])
    assert place.convert().warnings == ()


def test_a_tied_embedding_that_two_stages_shard_otherwise(tmp_path):
    stages = [
        {"embed.weight": ([2], [-1, -1], 0, 0), "w0": ([2], [0, -1], 0, 0)},
        {"embed.weight": ([2], [0, -1], 0, 0), "w1": ([2], [0, -1], 0, 0)},
    ]
    params = dict.fromkeys(("embed.weight", "w0", "w1"), ((64, 32), "Float32"))
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    reference.write_checkpoint(tmp_path / "src", stages, params)
    assert rankxform.transform(tmp_path / "src", tmp_path / "dst", strategy, None).warnings == ()


def test_masters_that_are_not_the_parameters(tmp_path):
    """Each parameter is its master, rounded; the masters of another step are not."""
    values = {
        n: np.random.default_rng(at).standard_normal((16, 8), "f4") for at, n in enumerate("abcd")
    }
    halves = {n: one.astype("f2") for n, one in values.items()}
    tensors = {n: ("Float16", one.view("<u2")) for n, one in halves.items()}
    tensors |= {f"main_param.{n}": ("Float32", one.view("<u4")) for n, one in values.items()}
    reference.write_ckpt(tmp_path / "right.ckpt", tensors)
    rankxform.transform(tmp_path / "right.ckpt", tmp_path / "dst")
    tensors |= {f"main_param.{n}": ("Float32", (values[n] * 1.5).view("<u4")) for n in "abcd"}
    reference.write_ckpt(tmp_path / "wrong.ckpt", tensors)
    with pytest.warns(rankxform.RankxformWarning, match="4 of 4 masters looked at do not round"):
        rankxform.load(tmp_path / "wrong.ckpt")
