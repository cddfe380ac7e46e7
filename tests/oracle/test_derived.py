"""MindSpore's own functions take a derived strategy for the compiler's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import rankxform
from rankxform.derivation.derive import derive
from rankxform.layout.states import NEVER_SAVED, find_states
from rankxform.storage import user_files
from tests import reference
from tests.compiled import COMPILED, from_preset, with_facts

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
pytestmark = pytest.mark.oracle

BY_NAME = {str(one): one for one in COMPILED}
PRESET = [name for name, one in BY_NAME.items() if "preset" in one.facts and "671b" not in name]
LLAMA = BY_NAME["llama2_7b:mp2pp2"]


@pytest.mark.parametrize("name", PRESET)
def test_it_reads_the_same_from_a_derived_file(name, tmp_path):
    one = BY_NAME[name]
    found = derive(from_preset(one)).strategy
    user_files.save_strategy(found, tmp_path / "derived.ckpt")
    if len(one.files) == 1:
        theirs = ms.build_searched_strategy(str(one.files[0]))
        ours = ms.build_searched_strategy(str(tmp_path / "derived.ckpt"))
        assert set(ours) == set(theirs)
        for key, entry in theirs.items():
            assert str(ours[key]) == str(entry), key
    if len(found.stages) > 1:
        user_files.save_strategy(found, tmp_path / "stages")
        ms.merge_pipeline_strategys(str(tmp_path / "stages"), str(tmp_path / "merged.ckpt"))
        again = rankxform.inspect(tmp_path / "merged.ckpt")["layouts"]
        assert again == rankxform.inspect(tmp_path / "derived.ckpt")["layouts"]


def test_it_needs_the_same_ranks(tmp_path):
    src = BY_NAME["llama2_7b:dp8_opt"]
    found = derive(with_facts(src, LLAMA)).strategy
    user_files.save_strategy(found, tmp_path / "derived.ckpt")
    for rank in range(LLAMA.sizes.ranks):
        for a, b in ((src.files[0], None), (None, src.files[0])):
            ours, theirs = (
                ms.rank_list_for_transform(rank, *(str(one or other) for one in (a, b)))
                for other in (tmp_path / "derived.ckpt", LLAMA.files[0])
            )
            assert ours == theirs


def test_it_transforms_to_the_same_bytes(tmp_path):
    """A small transformer from 8 ranks to 2 stages of 4, by MindSpore with either strategy."""
    src, dst = BY_NAME["transformer:dp2mp4_opt"], BY_NAME["transformer:dp2mp2pp2_opt"]
    found = derive(with_facts(src, dst)).strategy
    user_files.save_strategy(found, tmp_path / "derived.ckpt")
    stages = [
        {n: (list(o.device_matrix), o.printable_map, o.opt_step, o.opt_size) for n, o in s.items()}
        for s in src.strategy.stages
    ]
    params = {name: (src.extents[name].shape, "Float32") for name in stages[0]}
    reference.write_checkpoint(tmp_path / "src", stages, params)
    for name, strategy in (("ours", tmp_path / "derived.ckpt"), ("theirs", dst.files[0])):
        ms.transform_checkpoints(
            str(tmp_path / "src"), str(tmp_path / name), "checkpoint_", str(src.files[0]),
            str(strategy),
        )  # fmt: skip
    theirs = sorted((tmp_path / "theirs").rglob("*.ckpt"))
    assert len(theirs) == 8
    for path in theirs:
        same = tmp_path / "ours" / path.relative_to(tmp_path / "theirs")
        assert reference.read_ckpt(same) == reference.read_ckpt(path)


def test_a_network_is_filled_by_a_derived_strategy(tmp_path):
    import rankxform.mindspore as ours

    stage = {"0.weight": ([4], [0, -1], 0, 0), "0.bias": ([4], [0], 0, 0)}
    params = {"0.weight": ((16, 8), "Float32"), "0.bias": ((16,), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", [stage], params)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", [stage])
    net = ms.nn.SequentialCell(ms.nn.Dense(8, 8))
    report = ours.load_into(
        net, src, strategy, src_parallel="dp=1,mp=4", dst_parallel="dp=1,mp=2", predict=True,
        rank=1, strict=True,
    )  # fmt: skip
    assert set(report.loaded) == {"0.weight", "0.bias"}
    whole = reference.full_tensor("0.weight", (16, 8), "Float32").view(np.float32)
    assert (net[0].weight.asnumpy() == whole[8:]).all()


def test_every_state_that_is_saved_is_listed():
    one = BY_NAME["llama2_7b:dp2pp4"]
    given = from_preset(one)
    found = derive(replace(given, predict=True)).strategy
    names = {name for layouts in found.stages for name in layouts}
    assert not find_states(dict.fromkeys(names)).related
    assert any(n.startswith(f"{NEVER_SAVED}.") for n in derive(given).strategy.stages_of)
