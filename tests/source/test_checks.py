"""A folder that rankxform wrote knows itself: its strategy, its step, and its files."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import rankxform
from tests import reference

PARAMS = {
    "embed.weight": ((16, 8), "Float32"),
    "layers.0.w": ((8, 8), "BFloat16"),
    "layers.1.w": ((8, 8), "BFloat16"),
}
ROWS = [{n: ([4], [0, -1], 0, 0) for n in PARAMS}]
COLUMNS = [{n: ([2, 2], [-1, 0], 0, 0) for n in PARAMS}]
PIPELINE = [
    {"embed.weight": ([2], [0, -1], 0, 0), "layers.0.w": ([2], [-1, 0], 0, 0)},
    {"layers.1.w": ([2], [-1, 0], 0, 0)},
]
STEP = {"global_step": ("Int32", np.array([100], "<i4"))}


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


class Place:
    def __init__(self, folder):
        self.folder = folder
        reference.write_checkpoint(folder / "src", ROWS, PARAMS, STEP)
        self.rows = reference.write_strategy(folder / "rows.ckpt", ROWS)
        self.columns = reference.write_strategy(folder / "columns.ckpt", COLUMNS)
        self.pipeline = reference.write_strategy(folder / "pipeline.ckpt", PIPELINE)

    def made(self, strategy=None, **options):
        dst = self.folder / "made"
        rankxform.transform(
            self.folder / "src", dst, self.rows, strategy or self.columns, **options
        )
        return dst

    def check(self, made, **options):
        """Convert a folder without any strategy, and compare all bytes."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        report = rankxform.transform(made, out, None, None, **options)
        (file,) = out.glob("rank_0/*")
        found = reference.read_any(file)
        for name, (shape, dtype) in PARAMS.items():
            assert found[name][2] == reference.full_tensor(name, shape, dtype).tobytes()
        return report

    def refused(self, made, match, strategy=None, kind=rankxform.CheckpointError):
        with pytest.raises(kind, match=match):
            rankxform.transform(made, self.folder / "refused", strategy, None)
        assert not (self.folder / "refused").exists()


@pytest.mark.parametrize(
    "options",
    [{}, {"format": "safetensors"}, {"link": "hard"}, {"link": "reflink"}, {"verify": True}],
    ids=str,
)
@pytest.mark.parametrize("to", ["columns", "pipeline", "rows"])
def test_no_strategy_is_needed(place, to, options):
    made = place.made(getattr(place, to), **options)
    assert place.check(made).notices == ()
    assert rankxform.plan(made).src_ranks == 4
    assert rankxform.load(made, None, None)["embed.weight"].shape == (16, 8)
    assert rankxform.verify(made, place.folder / "out").same


@pytest.mark.parametrize("form", ["unified", "huggingface", "checkpoint2"])
def test_other_forms_describe_themselves_and_are_checked(place, form):
    strategy = place.columns if form == "checkpoint2" else "none"
    made = place.made(strategy, dst_form=form)
    place.check(made)
    (file, *_) = sorted(made.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    place.refused(made, "is not the file that .*rankxform.json lists")


def test_files_that_were_kept_or_made_in_parts_are_known(place):
    dst = place.folder / "made"
    for ranks in ((0, 1), (2, 3), ()):
        rankxform.transform(place.folder / "src", dst, place.rows, place.pipeline, ranks=ranks)
    place.check(dst)


def test_some_ranks_of_a_pipeline_are_not_the_whole(place):
    made = place.made(place.pipeline, ranks=(0, 1))
    place.refused(
        made,
        "no --src-strategy says how they were sharded; --src-strategy",
        kind=rankxform.UsageError,
    )
    with pytest.warns(rankxform.RankxformWarning, match="2 of 4 ranks"):
        verdict = rankxform.verify(made)
    assert verdict.same is None


@pytest.mark.parametrize("wrong", ["rows", "none"])
def test_another_strategy_is_refused(place, wrong):
    made, given = place.made(), getattr(place, wrong, wrong)
    place.refused(made, "leave out --src-strategy", given, rankxform.RankxformError)


def test_the_same_boxes_in_other_words_are_accepted(place):
    made = place.made()
    other = [{n: ([2, 2, 1], [-1, 1], 0, 0) for n in PARAMS}]
    path = reference.write_strategy(place.folder / "other.json", other, "json")
    rankxform.transform(made, place.folder / "out", path, None)


def test_the_first_parameter_that_differs_is_named(place):
    made = place.made()
    other = [{**COLUMNS[0], "layers.1.w": ([4], [0, -1], 0, 0)}]
    path = reference.write_strategy(place.folder / "other.ckpt", other)
    place.refused(made, "shard 'layers.1.w' in two ways", path, rankxform.StrategyError)


def test_copies_are_the_same_and_links_too(place):
    made = place.made()
    copy = place.folder / "copy"
    shutil.copytree(made, copy, copy_function=shutil.copyfile)
    place.check(copy)
    link = place.folder / "link"
    shutil.copytree(made, link, copy_function=os.link)
    place.check(link)


def one_byte(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    status = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def of_another_rank(file):
    shutil.copyfile(file.parent.parent / "rank_3" / "checkpoint_3.ckpt", file)


def longer(file):
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("change", [one_byte, of_another_rank, longer])
def test_files_that_were_changed(place, change):
    made = place.made()
    change(made / "rank_0" / "checkpoint_0.ckpt")
    place.refused(made, r"rank_0/checkpoint_0.ckpt: is not the file that .*rankxform.json lists")
    with pytest.raises(rankxform.RankxformError):
        rankxform.load(made, None, None)


@pytest.mark.parametrize("strategy", [None, "columns"])
@pytest.mark.parametrize("ranks", [(3,), (2, 3)])
def test_files_that_are_gone(place, ranks, strategy):
    made = place.made()
    for rank in ranks:
        shutil.rmtree(made / f"rank_{rank}")
    given = strategy and place.columns
    place.refused(made, rf"rank_{ranks[0]}/checkpoint_{ranks[0]}.ckpt.*is gone", given)


def test_a_file_of_another_conversion(place):
    made = place.made()
    rankxform.transform(place.folder / "src", place.folder / "b", place.rows, place.rows)
    shutil.copyfile(place.folder / "b/rank_1/checkpoint_1.ckpt", made / "rank_1/checkpoint_1.ckpt")
    place.refused(made, "rank_1")


def damaged(path):
    path.write_text("{")


def of_a_later_version(path):
    path.write_text(path.read_text().replace('"version": 4', '"version": 9'))


def without_sense(path):
    record = json.loads(path.read_text())
    record["stages"]["0"]["kinds"] = 7
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("change", [damaged, of_a_later_version, without_sense])
def test_a_manifest_that_cannot_be_read_is_said_and_is_no_obstacle(place, change):
    made = place.made()
    change(made / "rankxform.json")
    place.refused(made, "--src-strategy", kind=rankxform.UsageError)
    report = rankxform.transform(made, place.folder / "out", place.columns, None)
    assert any("rankxform.json" in text for text in report.notices)


def test_a_newer_step_beside_the_files_is_chosen_as_ever(place):
    made = place.made(prefix="net-1_")
    for rank in range(4):
        folder = made / f"rank_{rank}"
        (old,) = folder.iterdir()
        shutil.copyfile(old, folder / f"net-2_{rank}.ckpt")
    place.refused(made, "no step is there for every rank")


def test_the_step_is_known(place):
    made = place.made()
    record = json.loads((made / "rankxform.json").read_text())
    assert record["step"] == {"global_step": 100}
    record["step"]["global_step"] = 90
    (made / "rankxform.json").write_text(json.dumps(record))
    place.refused(made, "global_step is 90, and 100 by")


def test_a_companion_that_was_changed(place):
    made = place.made(place.columns, dst_form="checkpoint2")
    (path,) = made.rglob("common.json")
    path.write_text(path.read_text().replace("100", "90"))
    place.refused(made, "common.json: was changed since it was written")


def test_a_small_manifest(tmp_path):
    """4,600 parameters on 64 ranks: 1 MB of names, shapes and files, at most."""
    params = {
        f"{state}model.layers.{layer}.block.part{part}.weight": ((8,), "Float32")
        for state in ("", "adam_m.", "adam_v.")
        for layer in range(61)
        for part in range(25)
    }
    stages = [{name: ([64], [-1], 0, 0) for name in params}]
    whole = {name: (dtype, np.zeros(shape, "<u4")) for name, (shape, dtype) in params.items()}
    reference.write_ckpt(tmp_path / "a.ckpt", whole)
    strategy = reference.write_strategy(tmp_path / "b.ckpt", stages)
    rankxform.transform(tmp_path / "a.ckpt", tmp_path / "dst", None, strategy, link="hard")
    assert (tmp_path / "dst" / "rankxform.json").stat().st_size < 1 << 20


def test_whole_tensors_on_every_rank_are_none(tmp_path):
    stages = [{n: ([2], [-1, -1], 0, 0) for n in PARAMS}]
    reference.write_checkpoint(tmp_path / "src", stages, PARAMS)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    rankxform.transform(tmp_path / "src", tmp_path / "made", strategy, strategy)
    rankxform.transform(tmp_path / "made", tmp_path / "dst", "none", None)


def test_uneven_rows_of_an_embedding_and_of_its_moments(tmp_path):
    """The strategy states them for the embedding alone."""
    params = dict.fromkeys(("emb", "adam_m.emb"), ((10, 4), "Float32"))
    stages = [{"emb": ([2], [0, -1], 0, 0, [4, 6]), "adam_m.emb": ([2], [0, -1], 0, 0)}]
    whole = {n: ("Float32", reference.full_tensor(n, (10, 4), "Float32")) for n in params}
    reference.write_ckpt(tmp_path / "a.ckpt", whole)
    strategy = reference.write_strategy(tmp_path / "s.ckpt", stages)
    rankxform.transform(tmp_path / "a.ckpt", tmp_path / "made", None, strategy)
    rankxform.transform(tmp_path / "made", tmp_path / "dst", strategy, None)
