"""`rankxform.mindspore`'s calls for single files, compared with MindSpore's."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
ours = pytest.importorskip("rankxform.mindspore")
from mindspore.train import serialization  # noqa: E402

from rankxform.mindspore import files  # noqa: E402

pytestmark = pytest.mark.oracle
PARAMS = {
    "dense.weight": ((8, 16), "Float32"),
    "dense.bias": ((8,), "Float16"),
    "adam_m.dense.weight": ((8, 16), "Float32"),
    "scale": ((4, 4), "Float64"),
}
NAMES = {"dense.weight": "proj.weight", "adam_m.dense.weight": "adam_m.proj.weight", "scale": "s"}


def ranks(tmp, kind, count=2):
    layouts = [dict.fromkeys(PARAMS, ([count], [0, -1], 0, 0))]
    for name, (shape, _) in PARAMS.items():
        layouts[0][name] = ([count], [0] + [-1] * (len(shape) - 1), 0, 0)
    return Path(reference.write_checkpoint(tmp / kind, layouts, PARAMS, kind=kind))


def contents(folder, kind):
    return {
        str(path.relative_to(folder)): ms.load_checkpoint(str(path), format=kind)
        for path in sorted(Path(folder).rglob(f"*.{kind}"))
    }


def same(a, b):
    assert a.keys() == b.keys() and a
    for file, mine in a.items():
        assert mine.keys() == b[file].keys(), file
        for name, value in mine.items():
            other = b[file][name]
            assert value.dtype == other.dtype and value.shape == other.shape, name
            assert value.asnumpy().tobytes() == other.asnumpy().tobytes(), name


@pytest.mark.parametrize("names", [None, NAMES])
@pytest.mark.parametrize(("call", "kind"), [("ckpt_to_safetensors", "ckpt"),
                                            ("safetensors_to_ckpt", "safetensors")])  # fmt: skip
def test_a_folder_of_ranks(call, kind, names, tmp_path):
    src = ranks(tmp_path, kind)
    other = {"ckpt": "safetensors", "safetensors": "ckpt"}[kind]
    for module, name in ((ms, "ms"), (ours, "rx")):
        assert getattr(module, call)(str(src), str(tmp_path / name), names) is None
    same(contents(tmp_path / "rx", other), contents(tmp_path / "ms", other))
    before = contents(src, kind)
    getattr(ours, call)(str(src), file_name_regex="_1")
    assert list(contents(src, other)) == [f"rank_1/checkpoint_1.{other}"], "beside the file itself"
    same(contents(src, kind), before)


@pytest.mark.parametrize("call", ["ckpt_to_safetensors", "safetensors_to_ckpt"])
def test_one_file_and_what_is_refused(call, tmp_path):
    kind, other = ("ckpt", "safetensors") if call.startswith("ckpt") else ("safetensors", "ckpt")
    file = ranks(tmp_path, kind) / "rank_1" / f"checkpoint_1.{kind}"
    for module, name in ((ms, "ms"), (ours, "rx")):
        getattr(module, call)(str(file), str(tmp_path / name))
    same(contents(tmp_path / "rx", other), contents(tmp_path / "ms", other))
    for wrong in (
        (str(tmp_path / "none"),),
        (str(tmp_path / "rx" / f"checkpoint_1.{other}"),),
        (str(file), str(tmp_path / "a.folder")),
        (str(file), None, ["a"]),
        (str(file), None, None, "rank_7"),
        (str(file.parent),),
    ):
        for module in (ms, ours):
            with pytest.raises(ValueError):  # noqa: PT011  # theirs and ours have other words
                getattr(module, call)(*wrong)


def test_states_follow_their_parameter(tmp_path):
    file = ranks(tmp_path, "ckpt") / "rank_0" / "checkpoint_0.ckpt"
    ours.ckpt_to_safetensors(str(file), str(tmp_path / "rx"), {"dense.weight": "proj.weight"})
    (found,) = contents(tmp_path / "rx", "safetensors").values()
    assert "adam_m.proj.weight" in found and "adam_m.dense.weight" not in found


def test_counters_of_a_training(tmp_path):
    """What common.json states is written as MindSpore writes what is appended to parameters."""
    src = reference.write_checkpoint(tmp_path / "src", None, PARAMS, kind="safetensors")
    facts = {"epoch_num": 2, "step_num": 7, "loss_scale": 1024.0, "global_batch_size": 16}
    rankxform.transform(src, tmp_path / "c2", dst_form="checkpoint2", iteration=40)
    (common,) = (tmp_path / "c2").rglob("common.json")
    common.write_text(json.dumps({**json.loads(common.read_text()), **facts}))
    (manifest,) = (tmp_path / "c2").rglob("rankxform.json")
    manifest.unlink()  # it says that common.json was another
    rankxform.transform(tmp_path / "c2", tmp_path / "rx")
    step = ms.Parameter(ms.Tensor([40], ms.int32), name="global_step")
    appended = {**facts, "global_step": step}
    ms.save_checkpoint([], str(tmp_path / "theirs.safetensors"), append_dict=appended,
                       format="safetensors")  # fmt: skip
    (mine,) = contents(tmp_path / "rx", "safetensors").values()
    theirs = ms.load_checkpoint(str(tmp_path / "theirs.safetensors"), format="safetensors")
    same({"": {name: mine[name] for name in theirs}}, {"": theirs})


def segments(folder, **more):
    """Write two segments of a checkpoint, as `save_checkpoint` does of a large one."""
    folder.mkdir()
    tensors = {f"w{i}": ms.Tensor(np.full((2, 3), i, np.float32)) for i in range(4)}
    for number, names in enumerate((("w0", "w1"), ("w2", "w3"))):
        record = [{"name": n, "data": tensors[n]} for n in names]
        ms.save_checkpoint(record, str(folder / f"net_{number}.ckpt"), append_dict=more or None)
    return str(folder)


@pytest.mark.parametrize("options", [
    {}, {"filter_prefix": "w1"}, {"specify_prefix": ["w0", "w2"]}, {"choice_func": lambda n: n > "w0"},
    {"specify_prefix": "w", "filter_prefix": ("w3",), "choice_func": lambda n: False},
])  # fmt: skip
def test_segments(options, tmp_path):
    folder = segments(tmp_path / "rank_0")
    mine, theirs = (one.load_segmented_checkpoints(folder, **options) for one in (ours, ms))
    same({"": mine}, {"": theirs})

    class Net(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            for i in range(4):
                one = ms.Parameter(ms.Tensor(np.full((2, 3), -1, np.float32)), name=f"w{i}")
                setattr(self, f"w{i}", one)

    nets = [Net(), Net()]
    for net, module in zip(nets, (ours, ms)):
        module.load_segmented_checkpoints(folder, net, **options)
    for mine, theirs in zip(*(net.get_parameters() for net in nets)):
        assert mine.asnumpy().tobytes() == theirs.asnumpy().tobytes(), mine.name


def test_segments_that_are_no_segments(tmp_path):
    folder = segments(tmp_path / "s")
    for module in (ms, ours):
        with pytest.raises(ValueError):  # noqa: PT011
            module.load_segmented_checkpoints(str(tmp_path / "none"))
        with pytest.raises(TypeError):
            module.load_segmented_checkpoints(7)
    with pytest.raises(ValueError, match="holds what is to be loaded"):
        ours.load_segmented_checkpoints(folder, choice_func=lambda name: False)
    other = [{"name": "w3", "data": ms.Tensor(np.zeros((2, 3), np.float32))}]
    ms.save_checkpoint(other, str(tmp_path / "s" / "net_2.ckpt"))
    with pytest.raises(rankxform.CheckpointError, match=r"net_1\.ckpt and .*net_2\.ckpt: hold dif"):
        ours.load_segmented_checkpoints(folder)


@pytest.mark.parametrize("rank", range(4))
def test_another_rank_that_holds_the_same(rank, tmp_path, monkeypatch):
    """4 ranks, two by two the same: one of the pair is missing."""
    layouts = [{"w": ([2, 2], [0, -1], 0, 0), "b": ([2, 2], [-1, -1], 0, 0)}]
    strategy = str(reference.write_strategy(tmp_path / "s.ckpt", layouts))
    monkeypatch.setattr(serialization, "get_rank", lambda: rank)
    monkeypatch.setattr(files, "_own_rank", lambda: rank)
    redundancy = import_module(serialization.get_parameter_redundancy.__module__)
    monkeypatch.setattr(redundancy, "get_rank", lambda: rank, raising=False)
    for present in (range(4), (0, 1), (2, 3), (rank,), ()):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        for one in present:
            (folder / f"rank_{one}").mkdir(parents=True)
            (folder / f"rank_{one}" / "net.ckpt").touch()
        asked = str(folder / f"rank_{rank}" / "net.ckpt")
        found = ours.get_ckpt_path_with_strategy(asked, strategy)
        assert found == ms.get_ckpt_path_with_strategy(asked, strategy)
        if rank in present:
            assert found == asked


def test_the_file_of_rank_12_is_not_that_of_rank_1(tmp_path, monkeypatch):
    """MindSpore looks for the text ``rank_1`` in the path."""
    layouts = [{"w": ([16], [0, -1], 0, 0)}]
    strategy = str(reference.write_strategy(tmp_path / "s.ckpt", layouts))
    monkeypatch.setattr(files, "_own_rank", lambda: 1)
    path = tmp_path / "rank_12" / "net.ckpt"
    path.parent.mkdir()
    path.touch()
    assert ours.get_ckpt_path_with_strategy(str(path), strategy) is None
