"""Forms of whole tensors: Hugging Face's, MindSpore's unified safetensors, and any folder of files."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.layout.names import natural_sort_key
from tests import reference, reference_forms
from tests.checkpoints import COUNTERS, DATA, FULL, STRATEGY, plain


def test_loading_takes_any_form(tmp_path):
    b = str(DATA / "unified" / "predict_mp4.ckpt")
    sources = [DATA / "checkpoint2_2026_dedup", DATA / "unified" / "out_3parts"]
    rankxform.transform(DATA / "checkpoint2", tmp_path / "hf", dst_form="huggingface")
    for src in [*sources, tmp_path / "hf"]:
        for rank in range(4):
            known = reference.read_safetensors(
                DATA / "unified" / "loaded_mp4" / f"rank_{rank}" / "net.safetensors"
            )
            found = rankxform.load(src, dst_strategy=b, rank=rank)
            for name, (_, shape, data) in known.items():
                if name not in COUNTERS:
                    assert (found[name].shape, found[name].tobytes()) == (shape, data)
        assert rankxform.plan(src, dst_strategy=b).dst_ranks == 4


def test_two_forms_in_one_folder_are_a_question(tmp_path):
    shutil.copytree(DATA / "unified" / "out", tmp_path / "both")
    (tmp_path / "both" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(rankxform.UsageError, match=r"unified .* or huggingface .*--src-form"):
        rankxform.plan(tmp_path / "both")
    assert rankxform.plan(tmp_path / "both", src_form="unified").parameters == 47


def test_options_that_whole_tensors_cannot_follow_are_refused(tmp_path):
    for options, text in (
        ({"dst_form": "huggingface", "format": "ckpt"}, "leave out --format"),
        ({"dst_form": "huggingface", "dst_strategy": STRATEGY}, "holds whole tensors"),
        ({"src_pattern": "x_{rank}/*"}, "holds no checkpoint at"),
        ({"suffix": "x"}, "--suffix"),
    ):
        with pytest.raises(rankxform.RankxformError, match=text):
            rankxform.transform(DATA / "checkpoint2", tmp_path / "dst", **options)
        assert not (tmp_path / "dst").exists()


def test_any_folder_of_safetensors_with_disjoint_names(tmp_path):
    tensors = {n: ("Float32", np.arange(6, dtype="<u4")) for n in "abc"}
    reference.write_safetensors(tmp_path / "src" / "first.safetensors", {"a": tensors["a"]})
    reference.write_safetensors(
        tmp_path / "src" / "second.safetensors", {n: tensors[n] for n in "bc"}
    )
    found = rankxform.load(tmp_path / "src")
    assert {n: v.tobytes() for n, v in found.items()} == {
        n: w.tobytes() for n, (_, w) in tensors.items()
    }
    reference.write_safetensors(tmp_path / "src" / "third.safetensors", {"a": tensors["a"]})
    with pytest.raises(rankxform.CheckpointError, match=r"first.* and .*third.*: both hold 'a'"):
        rankxform.load(tmp_path / "src")


@pytest.mark.filterwarnings("ignore:.*the bytes of all tensors:rankxform.RankxformWarning")
def test_an_index_that_lies(tmp_path):
    tensors = {n: ("Float32", np.arange(6, dtype="<u4")) for n in "abcd"}
    reference_forms.write_huggingface(tmp_path / "hf", tensors, files=2)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def says(change):
        document = json.loads(json.dumps(good))
        change(document["weight_map"])
        index.write_text(json.dumps(document))
        return rankxform.load(tmp_path / "hf")

    assert sorted(says(lambda names: None)) == list("abcd")
    first, second = sorted(set(good["weight_map"].values()))
    for change, text in (
        (lambda names: names.update(ghost=first), "does not hold 'ghost'"),
        (lambda names: names.update(a=second), f"lists 'a' in {second}, and {first} holds it"),
        (lambda names: names.pop("a"), "holds 'a', which .* does not list"),
        (lambda names: names.update(x="model-00003-of-00003.safetensors"), "is missing"),
        (lambda names: names.update(x="../x.safetensors"), "not below its folder"),
        (lambda names: names.update(x=7), "names 7"),
    ):
        with pytest.raises(rankxform.CheckpointError, match=text):
            says(change)
        found = rankxform.inspect(tmp_path / "hf")
        assert found["faults"], text
    with pytest.raises(rankxform.CheckpointError):
        says(lambda names: names.pop("a"))
    assert sorted(rankxform.load(tmp_path / "hf", exclude="^a$")) == list("bcd")
    index.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(rankxform.CheckpointError, match="twice"):
        rankxform.load(tmp_path / "hf")


def test_one_ranks_slices_among_loose_values_are_not_taken(tmp_path):
    """MindSpore leaves rank 0's slices in hyper_param, of what `choice_func` refuses."""
    src = DATA / "unified" / "out_noopt"
    found = rankxform.load(src)
    kept = {n for n in FULL if not n.startswith("adam")}
    assert set(found) == kept | {"global_step", "learning_rate"}
    copy = tmp_path / "src"
    shutil.copytree(src, copy)
    loose = {"embedding.position.weight": ("Float32", np.zeros((4, 8), "<u4"))}
    reference.write_safetensors(copy / "hyper_param.safetensors", loose)
    stages = [dict.fromkeys([*found, *loose], ([4], [0, -1], 0, 0))]
    listed = {n: one for n, one in stages[0].items() if n in loose or ".mlp." in n}
    strategy = reference.write_strategy(tmp_path / "b.ckpt", [listed])
    for to in (strategy, None):
        with pytest.raises(rankxform.CheckpointError, match="hyper_param.*one rank's slice"):
            rankxform.load(copy, dst_strategy=to, rank=0)
    left = rankxform.load(copy, dst_strategy=strategy, rank=0, exclude="position")
    assert "embedding.position.weight" not in left


def test_types_that_mindspore_does_not_have(tmp_path):
    tensors = {"scale": ("F8_E4M3", np.arange(8, dtype="u1")),
               "w": ("BFloat16", np.arange(8, dtype="<u2")),
               "n": ("Int64", np.array(7, "<i8"))}  # fmt: skip
    reference_forms.write_huggingface(tmp_path / "hf", tensors)
    for form in ("unified", "huggingface", "ranks"):
        rankxform.transform(tmp_path / "hf", tmp_path / form, dst_form=form)
        assert rankxform.verify(tmp_path / "hf", tmp_path / form).same
    read = reference_forms.read_unified(tmp_path / "unified")
    assert plain(read) == plain(tensors)
    with pytest.raises(rankxform.RequestError, match="'scale', which is F8_E4M3"):
        rankxform.transform(tmp_path / "hf", tmp_path / "dst", format="ckpt")


def test_complete_files_on_every_rank(tmp_path):
    """What `integrated_save` leaves: accepted after all copies were compared, with a notice."""
    words = {"w": ("Float32", np.arange(6, dtype="<u4"))}
    for rank in range(4):
        reference.write_ckpt(tmp_path / "src" / f"rank_{rank}" / "net-1_1.ckpt", words)
    done = rankxform.transform(tmp_path / "src", tmp_path / "hf", "none", dst_form="huggingface")
    assert any("taken as whole" in text and "all copies" in text for text in done.notices)
    assert plain(reference_forms.read_huggingface(tmp_path / "hf")) == plain(words)
    words = {"w": ("Float32", np.arange(1, 7, dtype="<u4"))}
    reference.write_ckpt(tmp_path / "src" / "rank_3" / "net-1_1.ckpt", words)
    with pytest.raises(rankxform.CheckpointError, match="not the same in"):
        rankxform.transform(tmp_path / "src", tmp_path / "hf2", "none", dst_form="huggingface")


def test_hugging_faces_libraries(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("huggingface_hub")
    from huggingface_hub.serialization._base import split_state_dict_into_shards_factory

    for limit, text in ((3000, "3000"), (1 << 30, "5GB")):
        dst = tmp_path / text
        rankxform.transform(
            DATA / "checkpoint2", dst, dst_form="huggingface", max_shard=limit,
            exclude=("global_step",),
        )  # fmt: skip
        index = dst / "model.safetensors.index.json"
        found, order = {}, []
        for path in sorted(dst.glob("*.safetensors")):
            held = safetensors.load_file(path)
            found |= held
            order.append(set(held))
        assert {n: v.tobytes() for n, v in found.items()} == {n: d for n, (_, _, d) in FULL.items()}
        arrays = {n: found[n] for n in sorted(found, key=natural_sort_key)}
        split = split_state_dict_into_shards_factory(
            arrays, get_storage_size=lambda a: a.nbytes, max_shard_size=limit,
            filename_pattern="model{suffix}.safetensors",
        )  # fmt: skip
        assert {p.name for p in dst.glob("*.safetensors")} == set(split.filename_to_tensors)
        assert index.exists() == split.is_sharded
        if split.is_sharded:
            document = json.loads(index.read_text())
            assert document["weight_map"] == split.tensor_to_filename
            assert document["metadata"]["total_size"] == split.metadata["total_size"]
            text = json.dumps(document, indent=2, sort_keys=True) + "\n"
            assert index.read_text() == text
