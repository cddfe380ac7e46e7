"""Facts of training that common.json states are tensors in other forms."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.errors import CheckpointError
from tests import reference, reference_dcp, reference_forms
from tests.checkpoints import DATA, METADATA


@pytest.mark.parametrize("form", ["ranks", "unified"])
def test_what_common_json_states_becomes_tensors(form, tmp_path):
    """A trainer of rank folders or of unified safetensors knows its step by them."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(DATA / "checkpoint2_2026_dedup", src)
    common = src / "iteration_00000100/common.json"
    stated = {"epoch_num": 2, "step_num": 40, "loss_scale": None, "global_batch_size": 16}
    common.write_text(json.dumps({**json.loads(common.read_text()), **stated}))
    strategy = str(src / METADATA) if form == "ranks" else None
    rankxform.transform(src, dst, dst_strategy=strategy, dst_form=form)
    files = [*dst.glob("rank_*/*" if form == "ranks" else "hyper_param.safetensors")]
    assert len(files) == (8 if form == "ranks" else 1)
    number = {"epoch_num": 2, "step_num": 40, "loss_scale": 1, "global_batch_size": 16}
    for path in files:
        held = reference.read_safetensors(path)
        assert held["global_step"] == ("Int32", (1,), (100).to_bytes(4, "little"))
        for name, value in number.items():
            assert held[name] == ("Int64", (), value.to_bytes(8, "little")), name
    assert rankxform.verify(src, dst, dst_strategy=strategy).same
    if form == "unified":
        written = json.loads((dst / "common.json").read_text())
        assert written == {**stated, "global_step": 100}
        (dst / "common.json").write_text(json.dumps({**written, "global_step": 90}))
        assert not rankxform.verify(src, dst).same
        with pytest.raises(rankxform.CheckpointError, match="common.json"):
            rankxform.transform(dst, tmp_path / "again")
    common.write_text(common.read_text().replace('"step_num": 40', '"step_num": 41'))
    assert not rankxform.verify(src, dst, dst_strategy=strategy).same
    options = {"dst_strategy": strategy, "dst_form": form}
    report = rankxform.transform(src, tmp_path / "less", exclude=("^step_num$",), **options)
    assert not any("matches no" in one for one in report.notices)
    rankxform.transform(src, tmp_path / "weights", weights_only=True, **options)
    for folder in ("less", "weights"):
        for path in (tmp_path / folder).rglob("*.safetensors"):
            assert "step_num" not in reference.read_safetensors(path)


FACTS = {"epoch_num": 3, "step_num": 40, "loss_scale": 2.5, "global_batch_size": 8}


class TestCounters:
    """What common.json states, as tensors and back."""

    @pytest.fixture
    def place(self, tmp_path):
        shutil.copytree(DATA / "checkpoint2_2026_dedup", tmp_path / "src")
        self.state(tmp_path / "src/iteration_00000100", global_step=100, **FACTS)
        return tmp_path

    def state(self, folder, **facts):
        (folder / "common.json").write_text(json.dumps(facts))

    def unified(self, place, name="u", **options):
        rankxform.transform(place / "src", place / name, dst_form="unified", **options)
        (place / name / "rankxform.json").unlink()
        return place / name

    def counters(self, folder):
        """Return the counters of a folder's files, and what its common.json states."""
        held = {}
        for path in folder.rglob("*.safetensors"):
            held |= reference.read_safetensors(path)
        names = {*FACTS, "global_step"}.intersection(held)
        common = [json.loads(path.read_text()) for path in folder.rglob("common.json")]
        return names, common

    def test_they_are_no_weights(self, place):
        u = self.unified(place)
        rankxform.transform(u, place / "w", weights_only=True, dst_form="huggingface")
        assert self.counters(place / "w") == (set(), [])

    def test_they_come_back_as_common_json(self, place):
        rankxform.transform(
            place / "src", place / "ranks", dst_strategy=str(place / "src" / METADATA)
        )
        for form, folder in (("unified", "a"), ("checkpoint2", "b")):
            strategy = str(place / "src" / METADATA)
            rankxform.transform(place / "ranks", place / folder, strategy, dst_form=form)
            (common,) = self.counters(place / folder)[1]
            assert common == {"global_step": 100, **FACTS}

    def test_a_folder_of_two_forms_is_refused(self, place):
        rankxform.transform(place / "src", place / "both", dst_form="checkpoint2")
        rankxform.transform(place / "src", place / "u", dst_form="unified")
        for path in (place / "u").iterdir():
            shutil.copyfile(path, place / "both" / path.name)
        with pytest.raises(rankxform.UsageError, match="may be checkpoint2 .* or unified"):
            rankxform.transform(place / "both", place / "no")

    @pytest.mark.parametrize("facts", [
        {"global_step": 0}, {"global_step": 100, "loss_scale": 99},
        {"global_step": 100, "global_batch_size": 9}, {"global_step": 100, "epoch_num": 2},
    ])  # fmt: skip
    def test_a_common_json_that_differs_is_refused(self, facts, place):
        u = self.unified(place)
        self.state(u, **facts)
        with pytest.raises(rankxform.CheckpointError, match="is (0|99|9|2)"):
            rankxform.transform(u, place / "no", dst_form="checkpoint2")

    @pytest.mark.parametrize("name", ["epoch_num", "step_num", "loss_scale", "global_step"])
    def test_verify_compares_it(self, name, place):
        u = self.unified(place)
        assert rankxform.verify(place / "src", u).same
        self.state(u, **{"global_step": 100, **FACTS, name: 77})
        assert not rankxform.verify(place / "src", u).same

    def test_patterns_shard_none(self, place):
        """Patterns list no states either, and without these there are no counters."""
        rankxform.transform(place / "src", place / "dst", dst_strategy="shard:.*=0@2")
        assert self.counters(place / "dst")[0] == set()

    def test_they_belong_to_states(self, place):
        u = self.unified(place, exclude=("^adam",))
        assert self.counters(u) == (set(), [])
        u = self.unified(place, "steps", exclude=("^(global_step|epoch_num)$",))
        assert self.counters(u) == ({"step_num", "loss_scale", "global_batch_size"}, [])

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_where_consumed_samples_are_is_true(self, weights_only, place):
        """Without states there is no common.json that says it."""
        facts = {"global_step": 100, "consumed_samples": 3200, **FACTS}
        self.state(place / "src/iteration_00000100", **facts)
        options = {"dst_form": "unified", "weights_only": weights_only}
        report = rankxform.transform(place / "src", place / "u", **options)
        (notice,) = (text for text in report.notices if "3,200" in text)
        assert ("has no place" in notice) == weights_only
        assert (place / "u" / "common.json").exists() != weights_only

    def test_a_step_that_only_the_folder_says(self, place):
        (place / "src/iteration_00000100/common.json").unlink()
        u = self.unified(place)
        names, (common,) = self.counters(u)
        assert names == {"global_step"} and common["global_step"] == 100

    def test_numbers_are_exact(self, place):
        self.state(
            place / "src/iteration_00000100", global_step=100, loss_scale=16777217.0, step_num=4.0
        )
        held = reference.read_safetensors(self.unified(place) / "hyper_param.safetensors")
        assert np.frombuffer(held["loss_scale"][2], "<f8") == [16777217.0]
        assert held["step_num"][0] == "Int64"

    @pytest.mark.parametrize("value", ["NaN", "Infinity", '"3"', "true", "1.5", str(1 << 63)])
    def test_what_is_no_number_is_refused(self, value, place):
        path = place / "src/iteration_00000100/common.json"
        path.write_text('{"global_step": 100, "epoch_num": VALUE}'.replace("VALUE", value))
        with pytest.raises(rankxform.CheckpointError, match="epoch_num is .*cannot hold it"):
            rankxform.transform(place / "src", place / "no")


def test_a_number_that_no_counter_holds_is_refused(tmp_path):
    src = tmp_path / "src"
    shutil.copytree(DATA / "checkpoint2_2026_dedup", src)
    common = src / "iteration_00000100/common.json"
    common.write_text(json.dumps({**json.loads(common.read_text()), "step_num": 1 << 63}))
    with pytest.raises(rankxform.CheckpointError, match="step_num is .9223372036854775808"):
        rankxform.transform(src, tmp_path / "dst")


# -- folders of steps -------------------------------------------------------------------------------


MEGATRON = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
W = [{"w": ([2], [0, -1], 0, 0)}]


def step(folder, value, *, megatron=True, whole=True):
    """Write one step of DCP files, all of whose values are one."""
    reference_dcp.write_dcp(folder, {"w": ("Float32", np.full((4, 4), value, "<f4").view("<u4"))})
    if megatron:
        (folder / "metadata.json").write_text(MEGATRON)
    if not whole:
        (folder / ".metadata").unlink()


def iterations(root, tracker, *, whole=(100, 200), torn=()):
    for number in (*whole, *torn):
        step(root / f"iter_{number:07}", number, whole=number in whole)
    (root / "latest_checkpointed_iteration.txt").write_text(tracker)


def value_of(dst):
    (path,) = dst.rglob("*.safetensors")
    return float(np.frombuffer(reference.read_safetensors(path)["w"][2], "<f4")[0])


def converted(src, dst, **options):
    rankxform.transform(src, dst, dst_form="huggingface", fsync=False, **options)
    return value_of(dst)


def test_a_newer_iteration_than_the_tracker_says(tmp_path):
    """A roll-back is legal: what the tracker says is taken, and the other named."""
    iterations(tmp_path / "src", "100")
    with pytest.warns(
        rankxform.RankxformWarning, match="iteration 200 is newer.*; --step 200 takes"
    ):
        assert converted(tmp_path / "src", tmp_path / "dst") == 100
    assert converted(tmp_path / "src", tmp_path / "newer", step="200") == 200


def test_a_newer_iteration_that_is_torn_is_not_offered(tmp_path):
    iterations(tmp_path / "src", "100", whole=(100,), torn=(200,))
    with pytest.warns(rankxform.RankxformWarning, match="200 is newer") as told:
        assert converted(tmp_path / "src", tmp_path / "dst") == 100
    assert "--step" not in str(told[0].message)


@pytest.mark.parametrize("options", [{}, {"step": "300"}])
def test_an_iteration_that_is_torn_names_the_newest_whole_one(options, tmp_path):
    iterations(tmp_path / "src", "300", torn=(300, 250))
    with pytest.raises(CheckpointError, match="iteration 300 was not saved whole") as refusal:
        converted(tmp_path / "src", tmp_path / "dst", **options)
    assert refusal.value.parts.tries[0].startswith("--step 200 ")
    assert converted(tmp_path / "src", tmp_path / "dst", step="200") == 200


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_tracker_that_names_no_iteration(has_folder, tmp_path):
    iterations(tmp_path / "src", "release")
    if has_folder:
        step(tmp_path / "src/release", 7)
    with pytest.raises(CheckpointError, match="says 'release'") as refusal:
        converted(tmp_path / "src", tmp_path / "dst")
    tries = refusal.value.parts.tries
    assert tries[-1].startswith("--step 200 ") and len(tries) == 1 + has_folder
    if has_folder:
        assert tries[0].startswith(f"name {tmp_path / 'src/release'}")
        assert converted(tmp_path / "src/release", tmp_path / "dst") == 7


@pytest.mark.parametrize("name", ["step-{}", "global_step_{}", "checkpoint-{}"])
def test_folders_of_dcp_files_are_dcp(name, tmp_path):
    """Whatever their numbers are called; a torn one is not offered."""
    for number in (9, 10, 11):
        folder = tmp_path / "src" / name.format(number)
        step(folder, number, megatron=False, whole=number < 11)
    with pytest.raises(rankxform.RankxformError, match="3 checkpoints in its folders") as refusal:
        converted(tmp_path / "src", tmp_path / "dst")
    parts = refusal.value.parts
    names = [name.format(10), name.format(9)]
    assert [text.rpartition("/")[2] for text in parts.tries] == names
    assert name.format(11) in parts.details and "not saved whole" in parts.details
    assert converted(tmp_path / "src" / name.format(10), tmp_path / "dst") == 10


@pytest.mark.parametrize("form", ["ranks", "checkpoint2"])
def test_a_torn_file_of_the_newest_step(form, tmp_path):
    """The newest step all of whose files can be read is named, and can be taken."""
    src, strategy = tmp_path / "src", None
    for number in (1, 2, 3):
        if form == "ranks":
            strategy = reference.write_strategy(tmp_path / "a.ckpt", W)
            params = {"w": ((4, 4), "Float32")}
            reference.write_checkpoint(src, W, params, kind="safetensors", name=f"net-1_{number}")
        else:
            reference_forms.write_checkpoint2(
                src, W, {"w": ((4, 4), "Float32")}, {}, iteration=number
            )
    for number in (2, 3):
        pattern = f"*1_{number}.*" if form == "ranks" else f"*{number:07}*/*model-0000001-*"
        for path in src.rglob(pattern):
            path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError) as refusal:
        rankxform.transform(src, tmp_path / "dst", strategy)
    (named,) = [text for text in refusal.value.parts.tries if text.startswith("--step")]
    taken = named.split()[1]
    assert taken == ("1_1" if form == "ranks" else "1")
    rankxform.transform(src, tmp_path / "dst", strategy, step=taken, fsync=False)
