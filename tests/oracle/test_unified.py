"""Unified safetensors: MindSpore reads ours, we read MindSpore's, and both write the same tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import reference, reference_forms
from tests.cases import DTYPES, random_case
from tests.checkpoints import COUNTERS, DATA, FULL, STRATEGY

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
ours = pytest.importorskip("rankxform.mindspore")

pytestmark = pytest.mark.oracle
PREDICT = str(DATA / "unified" / "predict_mp4.ckpt")
CHOICES = {
    "none": None,
    "no optimizer": lambda name: not name.startswith("adam"),
    "renamed": lambda name: name.replace("decoder.", "model."),
}


def tensors(folder):
    return {
        name: one
        for path in Path(folder).glob("*.safetensors")
        for name, one in reference.read_safetensors(path).items()
    }


@pytest.mark.parametrize("choice", CHOICES)
def test_both_write_the_same_tensors(choice, tmp_path):
    src = DATA / "unified" / "src"
    for who, write in (("theirs", ms.unified_safetensors), ("ours", ours.unified_safetensors)):
        write(str(src), STRATEGY, str(tmp_path / who), choice_func=CHOICES[choice])
    a, b = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    slices = {n for n in b if n.startswith("adam_")} if choice == "no optimizer" else set()
    loose = {"only_rank5"}  # of rank 5, which MindSpore does not look at
    if choice == "renamed":
        slices = {n for n in set(b) - set(a) if "decoder." in n}
        b |= {n: a[n] for n in a if n not in b and n.startswith("adam")}
    assert {n: a[n] for n in a if n not in loose} == {n: b[n] for n in b if n not in slices}


@pytest.mark.parametrize("limit", [1 << 30, 3000])
def test_mindspore_loads_what_is_written(limit, tmp_path):
    """Its slicing of our folder is its slicing of its own, and a part is a checkpoint to it."""
    import rankxform

    rankxform.transform(DATA / "checkpoint2", tmp_path / "u", dst_form="unified", max_part=limit)
    for rank in range(4):  # each by itself: its pool of forked processes may hang when it ends
        ms.load_distributed_checkpoint(
            None, predict_strategy=PREDICT, format="safetensors", rank_id=rank,
            unified_safetensors_dir=str(tmp_path / "u"), dst_safetensors_dir=str(tmp_path / "out"),
        )  # fmt: skip
        known = reference.read_safetensors(
            DATA / "unified" / "loaded_mp4" / f"rank_{rank}" / "net.safetensors"
        )
        found = reference.read_safetensors(tmp_path / "out" / f"rank_{rank}" / "net.safetensors")
        assert {n: found.get(n) for n in known if n not in COUNTERS} == {
            n: known[n] for n in known if n not in COUNTERS
        }
    for path in (tmp_path / "u").glob("part*.safetensors"):
        for name, value in ms.load_checkpoint(str(path), format="safetensors").items():
            assert value.asnumpy().tobytes() == FULL[name][2]


@pytest.mark.parametrize("rank", [None, 2])
def test_slices_of_its_folder_are_its_own(rank, tmp_path):
    ours.load_distributed_checkpoint(
        None, predict_strategy=PREDICT, format="safetensors",
        unified_safetensors_dir=str(DATA / "unified" / "out_3parts"),
        dst_safetensors_dir=str(tmp_path), rank_id=rank,
    )  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"rank_{r}" for r in (range(4) if rank is None else (rank,))
    ]
    for folder in tmp_path.iterdir():
        own = reference.read_safetensors(folder / "net.safetensors")
        known = DATA / "unified" / "loaded_mp4" / folder.name / "net.safetensors"
        assert own == reference.read_safetensors(known)


class Net(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        for number, name in enumerate(("decoder.final_layernorm.weight", "output_layer.weight")):
            zeros = ms.Tensor(np.zeros(FULL[name][1], np.float32))
            setattr(self, f"p{number}", ms.Parameter(zeros, name=name))


@pytest.mark.parametrize("renamed", [False, True])
def test_a_network_gets_its_values(renamed):
    net, names = Net(), None
    if renamed:
        names = {"theirs": "decoder.final_layernorm.weight"}
        net.p0.name = "theirs"
    found = ours.load_distributed_checkpoint(
        net, format="safetensors", unified_safetensors_dir=str(DATA / "unified" / "out"),
        name_map=names,
    )  # fmt: skip
    assert found == ([], [])
    for own, name in ((net.p0, "decoder.final_layernorm.weight"), (net.p1, "output_layer.weight")):
        assert own.asnumpy().tobytes() == FULL[name][2]
    held = ours.load_distributed_checkpoint(
        net, format="safetensors", unified_safetensors_dir=str(DATA / "unified" / "out"),
        name_map=names, return_param_dict=True,
    )  # fmt: skip
    assert set(held) == {net.p0.name, net.p1.name}


@pytest.mark.parametrize("sample", ["checkpoint2_2026_dedup", "unified/out_3parts"])
def test_load_into_takes_any_form(sample):
    net = Net()
    done = ours.load_into(net, DATA / sample)
    assert len(done.loaded) == 2 and not done.missing
    for own, name in ((net.p0, "decoder.final_layernorm.weight"), (net.p1, "output_layer.weight")):
        assert own.asnumpy().tobytes() == FULL[name][2]


@pytest.mark.parametrize("seed", range(8))
def test_random_models(seed, tmp_path):
    types = [t for t in DTYPES if t != "BFloat16"]  # which MindSpore cannot read with numpy 2
    case = random_case(seed, dtypes=types, whole=False, nested=False)
    reference.write_checkpoint(tmp_path / "src", case.src, case.params, case.extras, "safetensors")
    strategy = reference.write_strategy(tmp_path / "a.ckpt", case.src)
    ours.unified_safetensors(str(tmp_path / "src"), strategy, str(tmp_path / "u"))
    assert reference_forms.wrong_in("unified", tmp_path / "u", case) == []
    ms.unified_safetensors(str(tmp_path / "src"), strategy, str(tmp_path / "theirs"))
    assert tensors(tmp_path / "theirs") == tensors(tmp_path / "u")
