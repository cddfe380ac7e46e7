"""A metadata.json that makes no sense, or says little."""

from __future__ import annotations

import pytest

import rankxform
from rankxform.display.text import as_text
from tests.checkpoints import FULL, METADATA
from tests.checkpoints.test_checkpoint2 import second

__all__ = ["second"]


NAME = "decoder.layers.0.mlp.linear_fc1.weight"
KEY = f"('{NAME}', (0,))"


def _set(*path, to):
    def change(parameters, storage):
        at = {"p": parameters, "s": storage}[path[0]]
        for step in path[1:-1]:
            at = at[step]
        at[path[-1]] = to

    return change


def _without_group(change):
    def both(parameters, storage):
        change(parameters, storage)
        for one in storage[KEY]:
            one.pop("rank_group", None)  # as versions before 1.9

    return both


WRONG = {
    "a slice that is nowhere": (lambda p, s: s.pop(KEY), "does not say where slice 0 is"),
    "a parameter that is nothing": (lambda p, s: p.pop(NAME), "and not what they are"),
    "another local_shape": (
        _set("p", NAME, "chunk", 0, "local_shape", to=[2, 8]),
        r"slice 0 of \[2, 8\] is stated",
    ),
    "other counts": (_set("p", NAME, "axis_fragmentations", to=[2, 1]), "not those of its layout"),
    "a path that leaves": (
        _set("s", KEY, 0, "file_name", to="../../etc/passwd.safetensors"),
        "not below its folder",
    ),
    "an absolute path": (_set("s", KEY, 0, "file_name", to="/x.safetensors"), "not below"),
    "a rank too large": (_set("s", KEY, 0, "storage_rank", to=1 << 40), "is no rank"),
    "another rank": (_without_group(_set("s", KEY, 0, "storage_rank", to=3)), "is said to be rank"),
    "a rank outside its group": (_set("s", KEY, 0, "storage_rank", to=3), "not in its rank_group"),
    "a rank list with gaps": (
        _set("p", NAME, "layout", "rank_list", to=[0, 2, 4, 6]),
        "not a pipeline stage",
    ),
    "a device matrix of other ranks": (
        _set("p", NAME, "layout", "device_matrix", to=[2, 4]),
        "is not of the 4",
    ),
    "an unknown type": (_set("p", NAME, "properties", "dtype", to="Float3"), "'Float3'"),
    "another type": (_set("p", NAME, "properties", "dtype", to="Int32"), "is Float32, and"),
    "an axis twice": (_set("p", NAME, "layout", "tensor_map", to=[[0, 0], -1]), "twice"),
    "no chunk": (lambda p, s: p[NAME].pop("chunk"), "lacks 'chunk'"),
    "an interleaved layout": (
        _set("p", NAME, "layout", "interleaved_parallel", to=True),
        "interleaved",
    ),
    "a key that is code": (
        lambda p, s: s.update({"__import__('os').getcwd()": s[KEY]}),
        "is no key such as",
    ),
    "a shape that the files do not have": (
        lambda p, s: (
            p[NAME].update(global_shape=[64, 8]),
            [c.update(local_shape=[16, 8]) for c in p[NAME]["chunk"]],
        ),
        r"(?s)has shape \[8, 8\].*optimizer_weight_shard_size",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_metadata_that_makes_no_sense(what, second, tmp_path):
    change, text = WRONG[what]
    src = second(change)
    with pytest.raises(rankxform.CheckpointError, match=text) as caught:
        rankxform.transform(src, tmp_path / "dst", dst_form="huggingface")
    assert METADATA in str(caught.value)
    assert not (tmp_path / "dst").exists()
    found = rankxform.inspect(src)
    assert found["kind"] == "described" and len(found["faults"]) >= 1
    assert "WRONG" in as_text(found)


def test_a_layout_of_null_is_a_whole_tensor(second, tmp_path):
    name = "decoder.final_layernorm.weight"
    src = second(_set("p", name, "layout", to=None))
    assert rankxform.load(src)[name].tobytes() == FULL[name][2]
    src = second(_set("p", NAME, "layout", to=None))
    with pytest.raises(rankxform.CheckpointError, match="no layout"):
        rankxform.load(src)
