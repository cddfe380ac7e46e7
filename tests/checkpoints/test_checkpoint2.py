"""Checkpoint 2.0 of MindFormers: what its own code writes and reads, and what may be wrong."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import rankxform
from tests import reference, reference_forms
from tests.checkpoints import COUNTERS, DATA, FULL, METADATA, STRATEGY, plain


def test_dedup_states_the_same_and_stores_each_slice_once(tmp_path):
    src, dst = DATA / "unified" / "src", tmp_path / "dst"
    rankxform.transform(src, dst, STRATEGY, STRATEGY, dst_form="checkpoint2", dedup=True)
    ours = json.loads((dst / METADATA).read_text())
    theirs = json.loads((DATA / "checkpoint2_2026_dedup" / METADATA).read_text())
    assert ours["state_dict_metadata"] == theirs["state_dict_metadata"]
    assert ours["storage_data"].keys() == theirs["storage_data"].keys()
    for key, (entry,) in ours["storage_data"].items():
        assert entry["rank_group"] == theirs["storage_data"][key][0]["rank_group"]
        assert entry["storage_rank"] == min(entry["rank_group"])
    held = [n for p in dst.rglob("*.safetensors") for n in reference.read_safetensors(p)]
    slices = [key for key in ours["storage_data"] if "accu_grads" not in key]
    assert len([n for n in held if n not in COUNTERS]) == len(slices)


@pytest.mark.parametrize("sample", ["checkpoint2_noprefix_dedup", "checkpoint2_2026_dedup"])
def test_a_deduplicated_checkpoint_becomes_one_that_every_version_loads(sample, tmp_path):
    """From 1.9 on the loader finds nothing in a folder that 1.7 or 1.8 deduplicated."""
    old = DATA / sample / METADATA
    rankxform.transform(DATA / sample, tmp_path / "dst", dst_strategy=str(old),
                        dst_form="checkpoint2")  # fmt: skip
    for new in (True, False):
        assert plain(reference_forms.read_checkpoint2(tmp_path / "dst", new)) == FULL
    common = json.loads((tmp_path / "dst/iteration_00000100/common.json").read_text())
    assert common == json.loads(
        (DATA / "checkpoint2" / METADATA).with_name("common.json").read_text()
    )
    if sample == "checkpoint2_noprefix_dedup":
        with pytest.raises((KeyError, StopIteration)):
            reference_forms.read_checkpoint2(DATA / sample, True)


def test_there_and_back(tmp_path):
    """1.0 to 2.0 and back, by its own metadata as a strategy: the files are the same again.

    Epoch and step stand in the names of the files, become those of common.json, and then tensors.
    """
    src = DATA / "unified" / "src"
    rankxform.transform(src, tmp_path / "2", STRATEGY, STRATEGY, dst_form="checkpoint2")
    metadata = tmp_path / "2" / METADATA
    rankxform.transform(tmp_path / "2", tmp_path / "1", dst_strategy=str(metadata))
    for rank in range(8):
        (theirs,) = (src / f"rank_{rank}").iterdir()
        (ours,) = (tmp_path / "1" / f"rank_{rank}").iterdir()
        a, b = reference.read_safetensors(ours), reference.read_safetensors(theirs)
        steps = {name: a.pop(name)[2][0] for name in [*a.keys() - b.keys()] if name != "only_rank5"}
        assert steps == {"epoch_num": 1, "step_num": 100, "loss_scale": 1}
        assert {n: a[n] for n in a if n != "only_rank5"} == {
            n: b[n] for n in b if n != "only_rank5"
        }


@pytest.mark.filterwarnings("ignore:.*the iteration is 100, and 200:rankxform.RankxformWarning")
@pytest.mark.filterwarnings("ignore:.*says 200, and 100 was written:rankxform.RankxformWarning")
def test_iterations_in_one_root(tmp_path):
    """The tracker names the latest that is complete; `--step` chooses another."""
    root = tmp_path / "root"
    for number, sample in ((200, "checkpoint2"), (100, "checkpoint2_2026")):
        rankxform.transform(DATA / sample, root, dst_strategy=str(DATA / sample / METADATA),
                            dst_form="checkpoint2", iteration=number)  # fmt: skip
    tracker = root / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "200"
    assert rankxform.inspect(root)["steps"] == ["100", "200"]
    assert rankxform.plan(root).step == "200" and rankxform.plan(root, step="100").step == "100"
    tracker.write_text("100")
    with pytest.warns(rankxform.RankxformWarning, match="200 is newer"):
        rankxform.plan(root)
    with pytest.raises(rankxform.CheckpointError, match="iteration 200 is newer"):
        rankxform.plan(root, step="latest")
    with pytest.raises(rankxform.UsageError, match="iterations 100, 200"):
        rankxform.plan(root, step="150")
    tracker.unlink()
    with pytest.raises(rankxform.CheckpointError, match=r"name the folder .*iteration_00000200"):
        rankxform.plan(root)
    assert rankxform.plan(root / "iteration_00000100").step == "100"
    assert rankxform.verify(root / "iteration_00000100").same is None


def test_a_given_strategy_is_compared(tmp_path):
    sample = DATA / "checkpoint2"
    assert rankxform.plan(sample, STRATEGY).src_ranks == 8
    with pytest.raises(rankxform.UsageError, match=r"is of 4 ranks, and .*metadata.json, .* of 8"):
        rankxform.plan(sample, str(DATA / "unified" / "predict_mp4.ckpt"))
    with pytest.raises(rankxform.UsageError, match="leave out --src-strategy"):
        rankxform.plan(sample, "none")
    with pytest.raises(rankxform.UsageError, match="tensors are whole"):
        rankxform.plan(DATA / "unified" / "out", STRATEGY)
    assert rankxform.plan(DATA / "unified" / "out", "none").src_ranks == 2


@pytest.fixture
def second(tmp_path):
    """A Checkpoint 2.0 that may be damaged, and its metadata."""
    shutil.copytree(DATA / "checkpoint2_2026", tmp_path / "c2")
    path = tmp_path / "c2" / METADATA

    def damage(change):
        document = json.loads((DATA / "checkpoint2_2026" / METADATA).read_text())
        change(document["state_dict_metadata"], document["storage_data"])
        path.write_text(json.dumps(document))
        return tmp_path / "c2"

    return damage


def test_a_wrong_layout_is_repaired_where_the_files_decide(tmp_path):
    """Groups of 2 among 2 x 3 ranks: MindSpore states 3 shards; the files have halves."""
    full = np.arange(48, dtype="<u4").reshape(12, 4)
    layout = ([2, 3], [-1, -1], 1, 2)
    matrix, tensor_map = [2, 1, 3], [0, -1]
    where = reference_forms.cells(matrix, tensor_map, 6)
    storage = {}
    folder = tmp_path / "c2" / "iteration_00000001"
    for rank in range(6):
        file = f"model-{rank:07}-0000006.safetensors"
        reference.write_safetensors(
            folder / file, {"w": ("Float32", reference.shard(full, layout, rank))}
        )
        entry = {"file_name": file, "storage_rank": rank}
        storage.setdefault(str(("w", (where[rank][0],))), []).append(entry)
    stated = {
        "properties": {"dtype": "Float32"}, "global_shape": [12, 4], "axis_fragmentations": [3, 1],
        "layout": {"device_matrix": matrix, "tensor_map": tensor_map, "alias_name": ["a", "b", "c"],
                   "interleaved_parallel": False, "rank_list": list(range(6))},
        "chunk": [{"global_offset": [n], "local_shape": [4, 4]} for n in range(3)],
    }  # fmt: skip
    document = {"state_dict_metadata": {"w": stated}, "storage_data": storage}
    (folder / "metadata.json").write_text(json.dumps(document))
    found = rankxform.load(folder)
    assert found["w"].tobytes() == full.tobytes()
    assert any("states wrong layouts of 'w'" in text for text in found.notices)
    assert rankxform.inspect(folder)["faults"] == []
    for rank in range(3, 6):  # what is left are two different halves, of which the file says three
        (folder / f"model-{rank:07}-0000006.safetensors").unlink()
    assert rankxform.load(folder)["w"].tobytes() == full.tobytes()
    (folder / "model-0000001-0000006.safetensors").unlink()
    with pytest.raises(rankxform.CheckpointError, match="is not there"):
        rankxform.load(folder)


def test_a_missing_file_is_served_by_copies_or_named(second, tmp_path):
    src = second(lambda p, s: None)
    folder = src / "iteration_00000100"
    (folder / "llm-opt-0000001-0000008.safetensors").unlink()
    with pytest.raises(
        rankxform.CheckpointError, match=r"opt-0000001.*: is not there.*; bring that file"
    ):
        rankxform.load(src)
    found = rankxform.load(src, include="layernorm")  # of which every rank has a copy
    assert found["adam_m.decoder.layers.0.input_layernorm.weight"].shape == (8,)
    assert any("llm-opt-0000001" in text for text in found.notices)


def test_a_job_of_one_device_has_no_metadata(tmp_path):
    folder = tmp_path / "root" / "iteration_00000005"
    whole = {n: ("Float32", np.arange(4, dtype="<u4")) for n in ("w", "adam_m.w")}
    for kind, name in (("model", "w"), ("opt", "adam_m.w")):
        reference.write_safetensors(
            folder / f"{kind}-0000000-0000001.safetensors", {name: whole[name]}
        )
    (folder / "common.json").write_text(json.dumps({"global_step": 5, "unknown": 1}))
    (tmp_path / "root" / "latest_checkpointed_iteration.txt").write_text("5")
    assert sorted(rankxform.load(tmp_path / "root")) == ["adam_m.w", "w"]
    rankxform.transform(tmp_path / "root", tmp_path / "dst", dst_form="checkpoint2")
    assert plain(reference_forms.read_checkpoint2(tmp_path / "dst", True)) == plain(whole)


def test_an_earlier_iteration_of_ours_is_no_other_tools(tmp_path):
    params = {"w": ((8, 4), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", None, params)
    options = {"dst_form": "checkpoint2", "iteration": 1}
    rankxform.transform(src, tmp_path / "dst", **options)
    b = reference.write_strategy(tmp_path / "b.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    with pytest.raises(rankxform.StorageError, match="holds the work of an earlier run"):
        rankxform.transform(src, tmp_path / "dst", None, b, **options)
    rankxform.transform(src, tmp_path / "dst", None, b, **options, overwrite=True)


PYNATIVE = {
    "a.w": ((8, 4), "Float32"), "a.expert_bias": ((8,), "Float32"),
    "muon_m.a.w": ((8, 4), "Float32"), "b.w": ((8, 4), "Float32"),
}  # fmt: skip


class TestWhatPyNativeStatesOtherwise:
    """MindFormers 2.0 and 2.1: layouts over a part of a stage, and states that no layout has."""

    @pytest.fixture
    def written(self, tmp_path):
        """Write a Checkpoint 2.0 of two stages of 4 ranks, and return it with its metadata."""
        rows, whole = ([2, 2], [0, -1], 0, 0), ([2, 2], [-1], 0, 0)
        stages = [{"a.w": rows, "a.expert_bias": whole, "muon_m.a.w": rows}, {"b.w": rows}]
        src = reference.write_checkpoint(tmp_path / "src", stages, PYNATIVE)
        a = reference.write_stage_files(tmp_path / "a", stages)
        options = {"dst_form": "checkpoint2", "iteration": 100}
        rankxform.transform(src, tmp_path / "c2", a, a, **options)
        (tmp_path / "c2/iteration_00000100/rankxform.json").unlink()  # as another tool's

        def changed(change):
            path = tmp_path / "c2" / METADATA
            document = json.loads(path.read_text())
            change(document["state_dict_metadata"], document["storage_data"])
            path.write_text(json.dumps(document))
            return tmp_path / "c2"

        return changed

    def whole(self, src, tmp_path):
        rankxform.transform(src, tmp_path / "whole", format="ckpt")
        return reference.wrong_slices(tmp_path / "whole", None, PYNATIVE)

    @pytest.mark.parametrize("ranks", [[0, 1], [2, 3]])
    def test_a_layout_over_an_aligned_part(self, ranks, written, tmp_path):
        def change(parameters, storage):
            layout = parameters["a.expert_bias"]["layout"]
            layout.update(device_matrix=[2], alias_name=["tp"], rank_list=ranks)

        assert self.whole(written(change), tmp_path) == []

    @pytest.mark.parametrize("ranks", [[0, 2], [1, 2], [0, 1, 2]])
    def test_a_layout_over_another_part_is_refused(self, ranks, written, tmp_path):
        def change(parameters, storage):
            layout = parameters["a.expert_bias"]["layout"]
            layout.update(device_matrix=[len(ranks)], alias_name=["tp"], rank_list=ranks)

        with pytest.raises(rankxform.CheckpointError, match=r"rank_list|no part|stages of 4"):
            self.whole(written(change), tmp_path)

    def test_a_state_that_is_not_listed_follows_its_parameter(self, written, tmp_path):
        def change(parameters, storage):
            del parameters["muon_m.a.w"]
            for key in [key for key in storage if "muon_m" in key]:
                del storage[key]

        src = written(change)
        assert self.whole(src, tmp_path) == []
        one = [{"a.w": ([2], [0, -1], 0, 0), "b.w": ([2], [0, -1], 0, 0)}]
        one[0]["a.expert_bias"] = [2], [-1], 0, 0
        b = reference.write_strategy(tmp_path / "b.ckpt", one)
        rankxform.transform(src, tmp_path / "dst", None, b, format="ckpt")
        wanted = [{**one[0], "muon_m.a.w": ([2], [0, -1], 0, 0)}]
        assert reference.wrong_slices(tmp_path / "dst", wanted, PYNATIVE) == []


MANIFEST = "mindformers_adapter_config.json"


class TestWhatTrainersSinceTwoOneState:
    """The number of samples that were consumed, and what an adapter is for."""

    @pytest.fixture
    def adapter(self, tmp_path):
        """Write a Checkpoint 2.0 of an adapter alone, as PyNative's trainer does, and its base."""
        shapes = {"l.lora_a": (2, 4), "l.lora_b": (8, 2), "adam_m.l.lora_a": (2, 4)}
        params = {name: (shape, "Float32") for name, shape in shapes.items()}
        src = reference.write_checkpoint(tmp_path / "plain", None, params)
        rankxform.transform(src, tmp_path / "src", dst_form="checkpoint2", iteration=3)
        config = {"lora_rank": 2, "lora_alpha": 6}
        stated = json.dumps({"lora_config": config, "base_load_path": "/base"})
        for folder in (tmp_path / "src", tmp_path / "src/iteration_00000003"):
            (folder / "rankxform.json").unlink(missing_ok=True)
            (folder / MANIFEST).write_text(stated)
        base = reference.write_checkpoint(
            tmp_path / "base", None, {"l.weight": ((8, 4), "Float32")}, kind="safetensors"
        )
        return tmp_path / "src", base

    @pytest.mark.parametrize("place", [".", "iteration_00000003"])
    def test_alpha_and_rank_are_read(self, place, adapter, tmp_path):
        src, base = adapter
        if place != ".":
            (src / MANIFEST).unlink()
        rankxform.transform(base, tmp_path / "dst", lora=str(src), dst_form="huggingface")
        (path,) = (tmp_path / "dst").glob("*.safetensors")
        found = np.frombuffer(reference.read_safetensors(path)["l.weight"][2], "f4")
        w, a, b = (
            reference.full_tensor(name, shape, "Float32").view("f4")
            for name, shape in (("l.weight", (8, 4)), ("l.lora_a", (2, 4)), ("l.lora_b", (8, 2)))
        )
        np.testing.assert_allclose(found.reshape(8, 4), w + 3 * (b @ a), rtol=1e-5, atol=1e-5)
        with pytest.raises(rankxform.UsageError, match="states both"):
            rankxform.transform(base, tmp_path / "no", lora=str(src), lora_alpha=2)

    def test_they_are_those_of_the_iteration_that_is_read(self, adapter, tmp_path):
        """A later iteration was begun, and has a manifest of its own."""
        src, base = adapter
        other = json.dumps({"lora_config": {"lora_rank": 2, "lora_alpha": 60}, "global_step": 9})
        (src / "iteration_00000009").mkdir()
        (src / "iteration_00000009" / MANIFEST).write_text(other)
        (src / MANIFEST).write_text(other)
        rankxform.transform(base, tmp_path / "one", lora=str(src), dst_form="huggingface")
        named = str(src / "iteration_00000003")
        rankxform.transform(base, tmp_path / "two", lora=named, dst_form="huggingface")
        one, two = (next((tmp_path / n).glob("*.safetensors")) for n in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        with pytest.warns(rankxform.RankxformWarning, match="9 is newer"):
            rankxform.transform(src, tmp_path / "dst", dst_form="checkpoint2")
        written = json.loads((tmp_path / "dst/iteration_00000003" / MANIFEST).read_text())
        assert written["lora_config"]["lora_alpha"] == 6
        (src / "iteration_00000003" / MANIFEST).unlink()
        with pytest.raises(rankxform.UsageError, match="--lora-alpha"):
            rankxform.transform(base, tmp_path / "no", lora=str(src), dst_form="huggingface")

    def test_what_the_trainer_knows_it_by_goes_with_it(self, adapter, tmp_path):
        src, _ = adapter
        rankxform.transform(src, tmp_path / "dst", dst_form="checkpoint2")
        written = tmp_path / "dst/iteration_00000003" / MANIFEST
        assert written.read_bytes() == (src / MANIFEST).read_bytes()
        with pytest.warns(rankxform.RankxformWarning, match="gets no such file"):
            rankxform.transform(src, tmp_path / "hf", dst_form="huggingface")

    def test_consumed_samples(self, adapter, tmp_path):
        src, _ = adapter
        path = src / "iteration_00000003/common.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "consumed_samples": 96}))

        def written(name, **options):
            report = rankxform.transform(src, tmp_path / name, dst_form="checkpoint2", **options)
            path = tmp_path / name / "iteration_00000003/common.json"
            return json.loads(path.read_text()), [one for one in report.notices if "96" in one]

        facts, (notice,) = written("dst")
        assert facts["consumed_samples"] == 96 and "before 2.1" in notice
        facts, notices = written("old", exclude=("^consumed_samples$",))
        assert "consumed_samples" not in facts and notices == []
