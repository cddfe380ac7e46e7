"""Where MindSpore 2.10 is silently wrong, rankxform is right or refuses.

Each test names an item of the list of MindSpore's errors (docs/mindspore.md) by its number.
"""

from __future__ import annotations

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.reference import full_tensor, shard, write_checkpoint, write_ckpt, write_strategy

STEP = {"global_step": ("Int32", np.array([7], "<i4"))}


def convert(tmp, src, dst, params, kind="ckpt", **options):
    folder = write_checkpoint(tmp / "src", src, params, STEP, kind)
    a = write_strategy(tmp / "a.ckpt", src) if src else None
    b = write_strategy(tmp / "b.ckpt", dst) if dst else None
    rankxform.transform(folder, tmp / "dst", a, b, **options)
    return reference.wrong_slices(tmp / "dst", dst, params, options.get("format", kind))


def test_item_1_optimizer_shard_with_axes_out_of_order(tmp_path):
    """MindSpore permutes the slices of a [0, 1] map whose data-parallel axis is leftmost."""
    layout = ([2, 2, 2], [0, 1], 4, -1)
    params = {"w": ((16, 8), "Float32")}
    assert convert(tmp_path, [{"w": layout}], None, params) == []
    assert convert(tmp_path / "2", None, [{"w": layout}], params) == []


def test_item_2_safetensors_sharded_on_an_inner_axis(tmp_path):
    """MindSpore writes what is sharded along axis 1 from the wrong memory."""
    params = {"w": ((8, 16), "Float32"), "v": ((4, 6, 8), "Float16")}
    src = [{"w": ([2], [0, -1], 0, 0), "v": ([2], [0, -1, -1], 0, 0)}]
    dst = [{"w": ([2], [-1, 0], 0, 0), "v": ([2], [-1, -1, 0], 0, 0)}]
    assert convert(tmp_path, src, dst, params, "safetensors") == []


@pytest.mark.parametrize("side", ["source", "destination"])
def test_items_3_and_4_a_parameter_that_only_one_strategy_lists(side, tmp_path):
    """MindSpore writes the raw slice, or the whole tensor, where the other sharding is wanted."""
    params = {"both": ((8, 4), "Float32"), "net.0.alone": ((8, 4), "Float32")}
    layout = ([2], [0, -1], 0, 0)
    every, fewer = [dict.fromkeys(params, layout)], [{"both": layout}]
    src, dst = (every, fewer) if side == "source" else (fewer, every)
    extras = dict(STEP)
    if side == "destination":
        extras["net.0.alone"] = "Float32", full_tensor("net.0.alone", (8, 4), "Float32")
    folder = write_checkpoint(tmp_path / "src", src, params, extras)
    a, b = write_strategy(tmp_path / "a.ckpt", src), write_strategy(tmp_path / "b.ckpt", dst)
    with pytest.raises(rankxform.RequestError, match=r"lists net\.0\.alone.*--unmatched drop"):
        rankxform.transform(folder, tmp_path / "dst", a, b)
    assert not (tmp_path / "dst").exists()
    rankxform.transform(folder, tmp_path / "less", a, b, unmatched="drop")
    assert "net.0.alone" not in reference.read_ckpt(tmp_path / "less/rank_0/checkpoint_0.ckpt")
    rankxform.transform(folder, tmp_path / "dst", a, b, unmatched="replicate")
    for rank in range(2):
        found = reference.read_ckpt(tmp_path / f"dst/rank_{rank}/checkpoint_{rank}.ckpt")
        full = full_tensor("net.0.alone", (8, 4), "Float32")
        wanted = full if side == "source" else shard(full, layout, rank)
        assert found["net.0.alone"] == ("Float32", wanted.shape, wanted.tobytes())


def test_item_5_a_shared_parameter_with_three_destination_stages(tmp_path):
    """MindSpore gives every later stage the layout of the last one."""
    params = {"shared": ((8, 8), "Float32"), **{f"p{i}": ((8,), "Float32") for i in range(3)}}
    src = [
        dict.fromkeys(["shared"], ([2], [0, -1], 0, 0))
        | {f"p{i}": ([2], [0], 0, 0) for i in range(3)}
    ]
    maps = ([0, -1], [-1, 0], [-1, -1])
    dst = [{f"p{i}": ([2], [0], 0, 0), "shared": ([2], maps[i], 0, 0)} for i in range(3)]
    assert convert(tmp_path, src, dst, params) == []


def test_item_6_pipeline_stages_of_one_device(tmp_path):
    """MindSpore asks for ranks that do not exist."""
    params = {f"p{i}": ((8, 4), "Float32") for i in range(4)}
    src = [{n: ([2], [0, -1], 0, 0) for n in params}]
    dst = [{n: ([1], [-1, -1], 0, 0)} for n in params]
    assert convert(tmp_path, src, dst, params) == []


def test_item_7_sources_saved_with_remove_redundancy(tmp_path):
    """MindSpore drops what the rank that it chose does not hold."""
    layout = ([2], [-1], 0, 0)
    full = {n: full_tensor(n, (8,), "Float32") for n in ("a", "b")}
    for rank, name in enumerate(full):
        write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", {name: ("Float32", full[name])})
    a = write_strategy(tmp_path / "a.ckpt", [dict.fromkeys(full, layout)])
    rankxform.transform(tmp_path / "src", tmp_path / "dst", a, None)
    params = dict.fromkeys(full, ((8,), "Float32"))
    assert reference.wrong_slices(tmp_path / "dst", None, params) == []


def test_item_10_int4_stays_int4(tmp_path):
    params = {"q": ((8, 4), "Int4")}
    src, dst = [{"q": ([2], [0, -1], 0, 0)}], [{"q": ([2], [-1, 0], 0, 0)}]
    assert convert(tmp_path / "1", src, dst, params) == []
    assert convert(tmp_path / "2", src, dst, params, format="safetensors") == []


@pytest.mark.filterwarnings("ignore:.*infinite or no numbers")
def test_item_11_bfloat16_nans_keep_their_payload(tmp_path):
    words = np.array([0x7FC1, 0xFFFF, 0x7F81, 0x3F80], "<u2")
    write_ckpt(tmp_path / "src/rank_0/c.ckpt", {"w": ("BFloat16", words)})
    b = write_strategy(tmp_path / "b.ckpt", [{"w": ([2], [0], 0, 0)}])
    rankxform.transform(tmp_path / "src", tmp_path / "dst", None, b)
    halves = [
        reference.read_ckpt(tmp_path / f"dst/rank_{r}/checkpoint_{r}.ckpt")["w"][2] for r in (0, 1)
    ]
    assert b"".join(halves) == words.tobytes()


def test_item_12_texts_are_carried(tmp_path):
    text = "bf16 ünïcode".encode("utf-32-le")
    path = tmp_path / "src/rank_0/c.ckpt"
    path.parent.mkdir(parents=True)
    w = np.arange(4, dtype="<f4")
    path.write_bytes(
        reference.ckpt_entry("w", "Float32", (4,), w.tobytes())
        + reference.ckpt_entry("note", "str", (0,), text)
    )
    b = write_strategy(tmp_path / "b.ckpt", [{"w": ([2], [0], 0, 0)}])
    rankxform.transform(tmp_path / "src", tmp_path / "dst", None, b)
    found = reference.read_ckpt(tmp_path / "dst/rank_1/checkpoint_1.ckpt")
    assert found["note"] == ("str", (0,), text)
    with pytest.raises(
        rankxform.RequestError, match="cannot hold texts, such as 'note'.*--exclude"
    ):
        rankxform.transform(tmp_path / "src", tmp_path / "no", None, b, format="safetensors")


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_item_13_parameters_without_elements(form, tmp_path):
    params = {"empty": ((0, 4), "Float32"), "w": ((4,), "Float32"), "scalar": ((), "Float32")}
    dst = [{"empty": ([2], [-1, -1], 0, 0), "w": ([2], [0], 0, 0), "scalar": ([2], [], 0, 0)}]
    assert convert(tmp_path, None, dst, params, "safetensors", format=form) == []


def test_item_14_a_dash_in_a_name(tmp_path):
    """MindSpore reads what stands before any dash as a stage."""
    params = {"my-param": ((8,), "Float32"), "0-x-1": ((8,), "Float32")}
    src = [{n: ([2], [0], 0, 0)} for n in params]
    assert convert(tmp_path, src, [dict.fromkeys(params, ([4], [0], 0, 0))], params) == []


def test_item_15_nested_maps_in_json(tmp_path):
    """MindSpore refuses the expanded form that its own compiler writes."""
    params = {"w": ((16, 8), "Float32"), "b": ((16,), "Float32")}
    src = [{"w": ([2, 2, 2], [[0, 2], 1], 0, 0), "b": ([2, 2, 2], [[1, 0]], 4, -1)}]
    dst = [{"w": ([2, 2], [-1, [0, 1]], 0, 0), "b": ([2, 2], [[1, 0]], 0, 0)}]
    folder = write_checkpoint(tmp_path / "src", src, params)
    shapes = {n: s for n, (s, _) in params.items()}
    a = write_strategy(tmp_path / "a.json", src, "json", shapes)
    b = write_strategy(tmp_path / "b.json", dst, "json", shapes)
    rankxform.transform(folder, tmp_path / "dst", a, b)
    assert reference.wrong_slices(tmp_path / "dst", dst, params) == []


def test_item_19_the_same_file_is_chosen_in_either_format(tmp_path):
    """MindSpore takes the last name for .ckpt: net-9_2 before net-10_2."""
    for kind in ("ckpt", "safetensors"):
        for value, name in enumerate(("net-9_2", "net-10_2")):
            entries = {"w": ("Float32", np.full(4, value, "<f4"))}
            write = write_ckpt if kind == "ckpt" else reference.write_safetensors
            write(tmp_path / kind / "rank_0" / f"{name}.{kind}", entries)
        report = rankxform.transform(tmp_path / kind, tmp_path / f"{kind}-out")
        found = reference.read_any(next((tmp_path / f"{kind}-out").rglob("checkpoint_0.*")))
        assert np.frombuffer(found["w"][2], "<f4").tolist() == [1.0] * 4
        assert report.notices == report.warnings == (), "an older step is no news"


@pytest.mark.parametrize("size", [3, 8])
def test_item_20_an_optimizer_shard_larger_than_its_group(size, tmp_path):
    layout = ([4], [-1, -1], 1, size)
    b = write_strategy(tmp_path / "b.ckpt", [{"w": layout}])
    folder = write_checkpoint(tmp_path / "src", None, {"w": ((24, 4), "Float32")})
    with pytest.raises(rankxform.StrategyError, match=f"b.ckpt: 'w': optimizer shard size {size}"):
        rankxform.transform(folder, tmp_path / "dst", None, b)


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [6, 300_000])
@pytest.mark.parametrize("rows", [[3, 1, 4, 2], [0, 5, 0, 5], [5, 5, 0, 0], [0, 0, 0, 10]])
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_item_21_uneven_slices(kind, rows, columns, tmp_path):
    """MindSpore's transform ignores param_split_shape."""
    params = {"w": ((10, columns), "Float32")}
    uneven, even = [{"w": ([4], [0, -1], 0, 0, rows)}], [{"w": ([2], [0, -1], 0, 0)}]
    a, b = (write_strategy(tmp_path / n, s) for n, s in (("a.ckpt", uneven), ("b.ckpt", even)))
    write_checkpoint(tmp_path / "src", uneven, params, kind=kind)
    rankxform.transform(tmp_path / "src", tmp_path / "dst", a, b, verify=True)
    assert reference.wrong_slices(tmp_path / "dst", even, params, kind) == []
    rankxform.transform(tmp_path / "dst", tmp_path / "back", b, a, verify=True)
    assert reference.wrong_slices(tmp_path / "back", uneven, params, kind) == []


def test_item_22_an_embedding_with_fields_is_refused(tmp_path):
    layout = reference.proto_layout(([2], [0, -1], 0, 0)).replace(
        reference.field(5, 0), reference.field(5, 3)
    )
    item = reference.field(1, b"table") + reference.field(2, layout)
    (tmp_path / "a.ckpt").write_bytes(reference.field(1, 2) + reference.field(3, item))
    for rank in range(2):
        entries = {"table": ("Float32", full_tensor(f"t{rank}", (6, 4), "Float32"))}
        write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", entries)
    with pytest.raises(rankxform.CheckpointError, match="'table'.*embedding of 3 fields"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", tmp_path / "a.ckpt")


def test_item_26_stage_files_that_contradict_each_other(tmp_path):
    """MindSpore keeps whichever the directory lists first."""
    folder = tmp_path / "strategies"
    folder.mkdir()
    for rank, tensor_map in enumerate(([0, -1], [-1, 0])):
        data = reference.proto_strategy([("w", ([2], tensor_map, 0, 0))])
        (folder / f"strategy_{rank}.ckpt").write_bytes(data)
    source = write_checkpoint(tmp_path / "src", None, {"w": ((4, 4), "Float32")})
    with pytest.raises(rankxform.StrategyError, match="strategy_0.ckpt and .*strategy_1.ckpt both"):
        rankxform.transform(source, tmp_path / "dst", None, folder)


@pytest.mark.parametrize("missing", [-4, 4])
def test_item_33_content_that_does_not_fit_its_dims(missing, tmp_path):
    """MindSpore pads with what is in memory, or cuts off."""
    path = tmp_path / "src/rank_0/c.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(reference.ckpt_entry("w", "Float32", (4,), bytes(16 + missing)))
    with pytest.raises(rankxform.CheckpointError, match=f"takes 16 bytes.*holds {16 + missing}"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst")


def test_a_folder_of_complete_parameters_is_not_multiplied(tmp_path):
    """MindSpore makes (16, 2) of two ranks that both hold the full (8, 2)."""
    full = full_tensor("w", (8, 16), "Float32")
    for rank in range(2):
        write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", {"w": ("Float32", full)})
    a = write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    with pytest.raises(rankxform.CheckpointError, match="every rank holds the same bytes"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", a, None)
    with pytest.warns(rankxform.RankxformWarning, match="every rank holds the same bytes"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", a, None, accept=("equal-slices",))


def test_types_that_differ_between_ranks_are_not_promoted(tmp_path):
    for rank, dtype in enumerate(("Float32", "Float64")):
        words = full_tensor("w", (8, 2), dtype)
        write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", {"w": (dtype, words)})
    a = write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    with pytest.raises(rankxform.CheckpointError, match="'w' is Float32 in .*rank_0.* and Float64"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", a, None)


def test_a_frozen_parameter_that_was_sharded_is_found(tmp_path):
    """It is in no strategy, and MindSpore copies one rank's slice as if it were the whole."""
    layouts = [{"w": ([2], [0], 0, 0)}]
    full = full_tensor("frozen", (8, 4), "Float32")

    def extras(rank):
        return {"frozen": ("Float32", full[4 * rank : 4 * rank + 4])}

    source = write_checkpoint(tmp_path / "src", layouts, {"w": ((8,), "Float32")}, extras)
    a = write_strategy(tmp_path / "a.ckpt", layouts)
    with pytest.raises(rankxform.CheckpointError, match="frozen.*differs.*rank_0.*rank_1"):
        rankxform.transform(source, tmp_path / "dst", a, None)
    rankxform.transform(source, tmp_path / "dst", a, None, unlisted="take-one")
    found = reference.read_ckpt(tmp_path / "dst/rank_0/checkpoint_0.ckpt")["frozen"]
    assert found == ("Float32", (4, 4), full[:4].tobytes())


def test_a_counter_that_differs_between_ranks_is_a_notice(tmp_path):
    layouts = [{"w": ([2], [0], 0, 0)}]
    params = {"w": ((8,), "Float32")}
    source = write_checkpoint(
        tmp_path / "src", layouts, params, lambda rank: {"step": ("Int32", np.array([rank], "<i4"))}
    )
    a = write_strategy(tmp_path / "a.ckpt", layouts)
    report = rankxform.transform(source, tmp_path / "dst", a, a)
    assert any("'step' is in no strategy and differs" in notice for notice in report.notices)
    for rank in range(2):
        found = reference.read_ckpt(tmp_path / f"dst/rank_{rank}/checkpoint_{rank}.ckpt")["step"]
        assert np.frombuffer(found[2], "<i4")[0] == rank
