"""Sources that are not what their strategy says: told, never taken for something smaller."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform import inspection
from rankxform.mindspore import calls
from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs.check import compare_replicas
from rankxform.verbs.launch import launch
from tests import reference
from tests.reference import full_tensor, shard, write_checkpoint, write_ckpt, write_strategy

TIED = [{"emb": ([2], [0, -1], 0, 0), "a": ([2], [0], 0, 0)}, {"b": ([2], [0], 0, 0)}]
PARAMS = {"emb": ((8, 4), "Float32"), "a": ((8,), "Float32"), "b": ((8,), "Float32")}


def tied_source(tmp):
    """Write a pipeline whose second stage still holds the embedding that the first one lists."""
    emb = full_tensor("emb", (8, 4), "Float32")

    def extras(rank):
        return {"emb": ("Float32", shard(emb, TIED[0]["emb"], rank % 2))} if rank > 1 else {}

    return write_checkpoint(tmp / "src", TIED, PARAMS, extras), write_strategy(tmp / "s.ckpt", TIED)


def remove(source, *ranks):
    for rank in ranks:
        for path in (source / f"rank_{rank}").iterdir():
            path.unlink()


def test_a_missing_stage_of_shards_is_not_a_smaller_model(tmp_path):
    source = write_checkpoint(tmp_path / "src", TIED, PARAMS)
    a = write_strategy(tmp_path / "s.ckpt", TIED)
    remove(tmp_path / "src", 0, 1)
    with pytest.raises(
        rankxform.CheckpointError,
        match=r"ranks 0, 1 have no file: no source file holds a, emb(?s:.*)not there: 0, 1",
    ):
        rankxform.transform(source, tmp_path / "dst", a, None)
    report = rankxform.transform(source, tmp_path / "dst", a, None, exclude=("^a$", "^emb$"))
    assert any("a pipeline stage alone holds is left out" in notice for notice in report.notices)
    assert reference.wrong_slices(tmp_path / "dst", None, {"b": PARAMS["b"]}) == []


def test_what_is_lost_and_renamed_is_not_said_to_be_excludable(tmp_path):
    """It is excluded by the name that it gets, which is not known of what no file holds."""
    layouts = [{f"{state}{n}": ([2], [0], 0, 0) for state in ("", "main_param.")} for n in "ab"]
    params = {name: ((8,), "Float32") for layout in layouts for name in layout}
    source = write_checkpoint(tmp_path / "src", layouts, params)
    a = reference.write_stage_files(tmp_path / "a", layouts)
    remove(tmp_path / "src", 0, 1)
    with pytest.raises(rankxform.CheckpointError, match="no source file holds a") as caught:
        rankxform.transform(source, tmp_path / "dst", a, a, masters=True, exclude=["a"])
    assert "--fallback" in str(caught.value) and "--exclude" not in str(caught.value)


def test_a_strategy_of_too_few_ranks_beside_a_torn_step(tmp_path):
    """The ranks of the checkpoint are those of all steps."""
    layouts = [{name: ([2], [0], 0, 0)} for name in "ab"]
    for step in (1, 2):
        source = write_checkpoint(
            tmp_path / "src", layouts, dict.fromkeys("ab", ((8,), "Float32")), name=f"net-{step}_1"
        )
    (tmp_path / "src/rank_3/net-2_1.ckpt").unlink()
    part = write_strategy(tmp_path / "part.ckpt", layouts[:1])
    with pytest.raises(rankxform.CheckpointError, match="is of 2 ranks, and the checkpoint has 4"):
        rankxform.transform(source, tmp_path / "dst", part, None)


def test_missing_keepers_of_a_box_are_told_from_what_was_never_saved(tmp_path):
    layout = ([2], [-1], 0, 0)
    a = write_strategy(tmp_path / "a.ckpt", [dict.fromkeys(["a", "b", "accu_grads.a"], layout)])
    write_ckpt(
        tmp_path / "src/rank_1/c_1.ckpt", {"b": ("Float32", full_tensor("b", (8,), "Float32"))}
    )
    with pytest.raises(rankxform.CheckpointError, match="no source file holds a"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", a, None)
    write_ckpt(
        tmp_path / "src/rank_0/c_0.ckpt", {"a": ("Float32", full_tensor("a", (8,), "Float32"))}
    )
    report = rankxform.transform(tmp_path / "src", tmp_path / "dst", a, None)
    assert report.absent == ("accu_grads.a",)


def test_a_tied_copy_does_not_stand_in_for_its_stage(tmp_path):
    source, a = tied_source(tmp_path)
    rankxform.transform(source, tmp_path / "dst", a, None)
    assert reference.wrong_slices(tmp_path / "dst", None, PARAMS) == []
    remove(tmp_path / "src", 0, 1)
    with pytest.raises(rankxform.CheckpointError, match="no source file holds a, emb"):
        rankxform.transform(source, tmp_path / "again", a, None)


@pytest.mark.parametrize("rank", range(4))
def test_one_rank_of_a_tied_pipeline_is_what_it_is_in_the_full_run(rank, tmp_path):
    source, a = tied_source(tmp_path)
    rankxform.transform(source, tmp_path / "all", a, a)
    rankxform.transform(source, tmp_path / "one", a, a, ranks=(rank,))
    name = f"rank_{rank}/checkpoint_{rank}.ckpt"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()


@pytest.mark.parametrize("allow", [False, True])
def test_a_strategy_of_fewer_ranks_is_another_checkpoints(allow, tmp_path):
    params = {"w": ((8, 16), "Float32")}
    source = write_checkpoint(tmp_path / "src", [{"w": ([4], [0, -1], 0, 0)}], params)
    a = write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    if allow:
        with pytest.warns(rankxform.RankxformWarning, match="rank_3.*none of the ranks 0 to 1 has"):
            report = rankxform.transform(source, tmp_path / "dst", a, a, accept=("extra-ranks",))
        assert sum("holds a slice" in text for text in report.warnings) == 1, "said once"
        return
    with pytest.raises(rankxform.CheckpointError, match="rank_3.*none of the ranks 0 to 1 has"):
        rankxform.transform(source, tmp_path / "dst", a, a)


def test_extra_ranks_that_are_replicas_are_a_warning(tmp_path):
    params = {"w": ((8, 16), "Float32")}
    source = write_checkpoint(tmp_path / "src", [{"w": ([2, 2], [0, -1], 0, 0)}], params)
    a = write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    with pytest.warns(rankxform.RankxformWarning, match="2 ranks from 2 on are beyond the 2"):
        rankxform.transform(source, tmp_path / "dst", a, None)
    assert reference.wrong_slices(tmp_path / "dst", None, params) == []


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_data_parallel_source_that_was_assigned_out(kind, tmp_path):
    """remove_redundancy without a strategy deals whole parameters to the ranks."""
    params = {f"p{i}": ((4, 4), "Float32") for i in range(5)}
    step = ("Int32", np.array([3], "<i4"))
    for rank in range(2):
        entries = {"global_step": step}
        for i, (name, (shape, dtype)) in enumerate(params.items()):
            if i % 2 == rank:
                entries[name] = dtype, full_tensor(name, shape, dtype)
        path = tmp_path / f"src/rank_{rank}/net-1_1.{kind}"
        if kind == "ckpt":
            write_ckpt(path, entries)
        else:
            reference.write_safetensors(path, entries, {"remove_redundancy": "True"})
    with pytest.raises(rankxform.UsageError, match="files of 2 ranks, and no --src-strategy"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst")
    report = rankxform.transform(tmp_path / "src", tmp_path / "dst", "none")
    assert reference.wrong_slices(tmp_path / "dst", None, params, kind) == []
    assert any("as remove_redundancy leaves them" in notice for notice in report.notices)
    if kind == "safetensors":
        with pytest.raises(rankxform.UsageError, match="was saved with remove_redundancy"):
            rankxform.transform(tmp_path / f"src/rank_0/net-1_1.{kind}", tmp_path / "half", "none")


def test_slices_of_zeros_on_some_ranks_are_no_complete_parameters(tmp_path):
    for rank in range(2):
        words = full_tensor("w", (4, 16), "Float32") * (1 - rank)
        write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", {"w": ("Float32", words)})
    a = write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    with pytest.warns(rankxform.RankxformWarning, match="1 of 2 matrices looked at are zero"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", a, None)


def test_only_an_unlisted_parameter_can_be_chosen(tmp_path):
    layouts = [{"w": ([2], [0], 0, 0)}]
    step = {"global_step": ("Int32", np.array([3], "<i4"))}
    source = write_checkpoint(tmp_path / "src", layouts, {"w": ((8,), "Float32")}, step)
    a = write_strategy(tmp_path / "a.ckpt", layouts)
    rankxform.transform(source, tmp_path / "dst", a, a, include=("^global_step$",))
    assert set(reference.read_ckpt(tmp_path / "dst/rank_1/checkpoint_1.ckpt")) == {"global_step"}


def test_one_element_of_any_shape_may_differ(tmp_path):
    layouts = [{"w": ([2], [0], 0, 0)}]
    source = write_checkpoint(
        tmp_path / "src",
        layouts,
        {"w": ((8,), "Float32")},
        lambda rank: {"step": ("Int32", np.array([[rank]], "<i4"))},
    )
    a = write_strategy(tmp_path / "a.ckpt", layouts)
    report = rankxform.transform(source, tmp_path / "dst", a, a)
    assert any("'step' is in no strategy and differs" in notice for notice in report.notices)


def test_moments_of_an_uneven_embedding_have_its_rows(tmp_path):
    """The compiler states the rows for the embedding alone."""
    rows, layout = [3, 1], ([2], [0, -1], 0, 0)
    plain = reference.proto_layout(layout)
    uneven = plain.replace(reference.field(3, b""), reference.field(3, reference.dims(rows)), 1)
    names = {"table": uneven, "moment1.table": plain}
    items = [
        reference.field(3, reference.field(1, n.encode()) + reference.field(2, x))
        for n, x in names.items()
    ]
    (tmp_path / "a.ckpt").write_bytes(reference.field(1, 2) + b"".join(items))
    params = dict.fromkeys(names, ((4, 6), "Float32"))
    for rank, (start, stop) in enumerate(((0, 3), (3, 4))):
        entries = {n: ("Float32", full_tensor(n, (4, 6), "Float32")[start:stop]) for n in names}
        write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", entries)
    rankxform.transform(tmp_path / "src", tmp_path / "dst", tmp_path / "a.ckpt")
    assert reference.wrong_slices(tmp_path / "dst", None, params) == []
    rankxform.transform(tmp_path / "dst", tmp_path / "back", None, tmp_path / "a.ckpt")
    found = reference.read_ckpt(tmp_path / "back/rank_0/checkpoint_0.ckpt")
    assert found["moment1.table"][1] == (3, 6)


@pytest.mark.parametrize("way", ["file", "link", "pattern", "linked rank"])
def test_no_way_leads_into_the_source(way, tmp_path):
    layouts = [{"w": ([2], [0], 0, 0)}]
    params = {"w": ((8,), "Float32")}
    write_checkpoint(tmp_path / "real", layouts, params)
    a = write_strategy(tmp_path / "a.ckpt", layouts)
    before = {p: p.read_bytes() for p in (tmp_path / "real").rglob("*.ckpt")}
    src, dst, options = tmp_path / "real", tmp_path / "real", {}
    if way == "file":
        src, a, options = tmp_path / "real/rank_0/checkpoint_0.ckpt", "none", {"prefix": "x"}
    elif way == "link":
        (tmp_path / "links").mkdir()
        for rank in range(2):
            (tmp_path / f"links/rank_{rank}").symlink_to(tmp_path / f"real/rank_{rank}")
        src = tmp_path / "links"
    elif way == "pattern":
        (tmp_path / "empty").mkdir()
        src, options = tmp_path / "empty", {"src_pattern": "../real/rank_{rank}/*"}
    else:
        dst = tmp_path / "dst"
        dst.mkdir()
        (dst / "rank_1").symlink_to(tmp_path / "real/rank_1")
    b = None if a == "none" else a
    with pytest.raises(rankxform.RankxformError, match="lies in the source folder|is a link"):
        rankxform.transform(src, dst, a, b, overwrite=True, **options)
    assert {p: p.read_bytes() for p in (tmp_path / "real").rglob("*.*")} == before


def flipped(wrong, content):
    """Return a .ckpt entry whose content's tag byte was changed to `wrong`."""
    data = bytearray(reference.ckpt_entry("adam_m.w", "Float32", (len(content) // 4,), content))
    at = len(data) - len(content) - len(reference.varint(len(content))) - 1
    assert data[at] == 0x1A
    data[at] = wrong
    return bytes(data)


@pytest.mark.parametrize("content", [bytes(8), bytes(1 << 22), b"\x7f" * (1 << 22)])
@pytest.mark.parametrize("wrong", [0x0A, 0x12])
def test_content_whose_tag_was_flipped_is_not_read_as_dims_or_type(wrong, content, tmp_path):
    path = tmp_path / "src/rank_0/c.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(flipped(wrong, content))
    with pytest.raises(rankxform.CheckpointError, match="c.ckpt: ") as caught:
        rankxform.transform(tmp_path / "src", tmp_path / "dst")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("stage", [-1, 1, 4294967295])
def test_stages_that_cannot_be(stage, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(
        reference.proto_strategy([("w", ([2], [0], 0, 0))], stage=stage)
    )
    source = write_checkpoint(tmp_path / "src", None, {"w": ((8,), "Float32")})
    with pytest.raises(rankxform.StrategyError, match="no strategy of pipeline stage 0"):
        rankxform.transform(source, tmp_path / "dst", tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        ([4294967295], "'w': device matrix .* is of more than 1,048,576 ranks"),
        ([10**30], "has a number of over 20 digits"),
        ([2] * 70, "'w': device matrix .* has 70 axes, more than 64"),
        ([1 << 16, 1 << 16], "'w': device matrix .* is of more than 1,048,576 ranks"),
    ],
)
def test_device_matrices_that_cannot_be(matrix, text, tmp_path):
    data = reference.json_strategy([("w", (matrix, [0], 0, 0))], shapes={"w": (8,)})
    (tmp_path / "a.json").write_bytes(data)
    for call in (
        lambda: rankxform.ranks(tmp_path / "a.json", None),
        lambda: rankxform.inspect(tmp_path / "a.json"),
    ):
        with pytest.raises(rankxform.StrategyError, match=f"a.json: {text}") as caught:
            call()
        assert len(str(caught.value)) < 400


def test_ranks_of_a_stage_without_a_common_parameter(tmp_path):
    a = write_strategy(tmp_path / "a.ckpt", [{"a": ([2], [0], 0, 0)}])
    b = write_strategy(tmp_path / "b.ckpt", [{"a": ([2], [0], 0, 0)}, {"x": ([2], [0], 0, 0)}])
    with pytest.raises(rankxform.RequestError, match="destination rank 2 needs nothing"):
        rankxform.ranks(a, b)


def test_what_safetensors_cannot_name(tmp_path):
    write_ckpt(
        tmp_path / "src/rank_0/c.ckpt", {"__metadata__": ("Float32", np.ones(2, "<f4").view("<u4"))}
    )
    with pytest.raises(rankxform.RequestError, match="named '__metadata__'"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", format="safetensors")


def test_metadata_are_kept_but_for_what_is_no_longer_true(tmp_path):
    entries = {"q": ("Int4", full_tensor("q", (4,), "Int4"))}
    told = {"q": "Int4", "quant": "Int4", "who": "me", "crc_num": "7", "remove_redundancy": "False"}
    reference.write_safetensors(tmp_path / "src/rank_0/c.safetensors", entries, told)
    rankxform.transform(tmp_path / "src", tmp_path / "dst")
    metadata = rankxform.inspect(tmp_path / "dst/rank_0/checkpoint_0.safetensors")["metadata"]
    assert metadata == {"format": "ms", "q": "Int4", "quant": "Int4", "who": "me"}


def test_a_failed_merge_leaves_nothing(tmp_path):
    folder = reference.write_stage_files(tmp_path / "s", [{"w": ([2], [0], 0, 0)}])
    (tmp_path / "m.ckpt").mkdir()
    with pytest.raises(rankxform.StorageError, match="m.ckpt"):
        rankxform.merge(folder, tmp_path / "m.ckpt", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.ckpt", "s"]


def test_names_that_no_terminal_can_print(tmp_path):
    write_ckpt(tmp_path / "src/rank_0/c.ckpt", {"w": ("Float32", np.ones(2, "<f4").view("<u4"))})
    for argument in (b"caf\xe9", b"src"):
        done = subprocess.run(
            [sys.executable, "-m", "rankxform", "inspect", argument],
            cwd=tmp_path, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if argument == b"caf\xe9" else 0)
        assert b"Traceback" not in done.stderr


def test_a_reader_that_goes_away_does_not_end_the_work(tmp_path):
    write_ckpt(tmp_path / "src/rank_0/c.ckpt", {"w": ("Float32", np.ones(2, "<f4").view("<u4"))})
    for target in ("| true", "> /dev/full"):
        line = f"{sys.executable} -m rankxform transform src 'dst{target}' {target}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"dst{target}" / "rank_0/checkpoint_0.ckpt").exists()


def test_a_pipelines_strategy_for_a_checkpoint_that_is_none(tmp_path):
    """As many ranks, and half of the parameters in each stage: nothing else would tell."""
    names = [f"p{i}" for i in range(8)]
    params = dict.fromkeys(names, ((8, 4), "Float32"))
    source = write_checkpoint(
        tmp_path / "src", [dict.fromkeys(names, ([4], [0, -1], 0, 0))], params
    )
    layout = ([2], [0, -1], 0, 0)
    stages = [dict.fromkeys(names[:4], layout), dict.fromkeys(names[4:], layout)]
    a = write_strategy(tmp_path / "a.ckpt", stages)
    with pytest.raises(
        rankxform.CheckpointError, match="4 parameters that .* places in other pipe"
    ):
        rankxform.transform(source, tmp_path / "dst", a, None)


def test_one_shard_is_not_silently_a_complete_checkpoint(tmp_path):
    source = write_checkpoint(tmp_path / "src", TIED, PARAMS)
    write_strategy(tmp_path / "strategy.ckpt", TIED)
    shard = f"{source}/rank_0/checkpoint_0.ckpt"
    with pytest.raises(
        rankxform.UsageError,
        match=r"is the file of one of 4 rank folders(?s:.*)beside it lies .*strategy\.ckpt \(2 stages of 2",
    ):
        rankxform.transform(shard, tmp_path / "dst")
    report = rankxform.transform(shard, tmp_path / "dst", "none")
    assert any("3 more rank folders lie beside it" in notice for notice in report.notices)
    with pytest.raises(rankxform.CheckpointError, match="one rank's folder; name the folder above"):
        rankxform.transform(f"{source}/rank_0", tmp_path / "no")


STAGES = [{"a": ([2], [-1, -1], 1, -1)}, {"b": ([2], [0, -1], 0, 0)}]
STAGE_PARAMS = {"a": ((8, 4), "Float32"), "b": ((8, 4), "Float32")}


def verbs(src, tmp, **options):
    """Return all calls that read a source, for one that should be refused by all of them."""
    return [
        lambda: rankxform.transform(src, tmp / "dst", **options),
        lambda: rankxform.verify(src, tmp / "dst", **options),
        lambda: rankxform.plan(src, **options),
        lambda: rankxform.load(src, **options),
        lambda: compare_replicas(
            Request(str(src), None, options.get("src_strategy")), SerialTeam()
        ),
        lambda: launch(
            Request(str(src), None, options.get("src_strategy")), tmp / "output", SerialTeam()
        ),
    ]


@pytest.mark.parametrize("call", range(6))
def test_a_pipeline_without_its_strategy_is_refused_whatever_names_its_ranks_hold(call, tmp_path):
    source = write_checkpoint(tmp_path / "output/checkpoint", STAGES, STAGE_PARAMS)
    reference.write_stage_files(tmp_path / "output/strategy", STAGES)
    write_strategy(tmp_path / "output/other_strategy.ckpt", STAGES[:1])
    with pytest.raises(
        rankxform.UsageError, match="files of 4 ranks, and no (--src-strategy|src_strategy=)"
    ) as told:
        verbs(source, tmp_path)[call]()
    assert re.search(r"output/strategy'? \(found there: 2 stages of 2 ranks\)", str(told.value))
    assert "other_strategy" not in str(told.value), "that one is of two ranks"
    assert re.search("--src-strategy none|src_strategy='none'", str(told.value))
    assert not (tmp_path / "dst").exists()


def test_none_said_of_shards_is_refused_for_their_shapes_or_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "src", STAGES, STAGE_PARAMS)
    with pytest.raises(
        rankxform.CheckpointError, match="'[ab]' is not the same in (?s:.*)are 2 such parameters"
    ):
        rankxform.transform(source, tmp_path / "dst", "none")
    with pytest.raises(rankxform.CheckpointError, match="src_strategy='none' says that it is"):
        rankxform.load(source, "none")
    assert not (tmp_path / "dst").exists()
    odd = {"a": ([2], [0, -1], 0, 0, [3, 5]), "b": ([2], [-1, -1], 0, 0)}
    source = write_checkpoint(tmp_path / "odd", [odd], STAGE_PARAMS)
    for call in (rankxform.plan, rankxform.load):
        with pytest.raises(rankxform.UsageError, match=r"'a' has shape \[3, 4\].*and \[5, 4\] in"):
            call(source, "none")


def test_complete_files_on_every_rank_are_compared(tmp_path):
    whole = dict.fromkeys(STAGE_PARAMS, ([3], [-1, -1], 0, 0))
    source = write_checkpoint(
        tmp_path / "src", [whole], STAGE_PARAMS, lambda r: {"rank": ("Int32", np.array([r], "<i4"))}
    )
    report = rankxform.transform(source, tmp_path / "dst", "none")
    assert reference.wrong_slices(tmp_path / "dst", None, STAGE_PARAMS) == []
    assert report.bytes_compared == 3 * (2 * 8 * 4 * 4 + 4), "every copy is read"
    assert any("compares all copies of a, b" in notice for notice in report.notices)
    assert any("'rank' is in no strategy and differs" in notice for notice in report.notices)
    found = rankxform.load(source, "none")
    assert found["a"].shape == (8, 4)
    last = tmp_path / "src/rank_2/checkpoint_2.ckpt"
    data = bytearray(last.read_bytes())
    data[data.index(full_tensor("b", (8, 4), "Float32").tobytes()) + 100] ^= 1
    last.write_bytes(data)
    with pytest.raises(rankxform.CheckpointError, match="'b' is not the same in .*rank_2"):
        rankxform.transform(source, tmp_path / "again", "none")


def test_a_warning_names_the_rank_that_lacks_the_newest_step(tmp_path):
    layouts = [{"w": ([2], [0], 0, 0)}]
    params = {"w": ((8,), "Float32")}
    a = write_strategy(tmp_path / "a.ckpt", layouts)
    for step in ("1_100", "2_200", "3_300"):
        src = write_checkpoint(tmp_path / "src", layouts, params, name=f"net-{step}")
    calls = (
        lambda **more: rankxform.transform(src, tmp_path / "dst", a, a, overwrite=True, **more),
        lambda **more: rankxform.load(src, a, a, **more),
        lambda **more: rankxform.plan(src, a, a, **more),
    )
    for call in calls:
        call()  # older steps are no news
    (tmp_path / "src/rank_1/net-3_300.ckpt").unlink()
    for call in calls:
        with pytest.warns(
            rankxform.RankxformWarning, match="3 step 300 is newer but not complete: rank 1 has no"
        ):
            call()
        call(step="2_200")  # that it is meant was said
        with pytest.raises(
            rankxform.CheckpointError, match="or (--step |step=')2_200'?, which is there"
        ):
            call(step="latest")
    assert not any("steps" in notice for notice in calls[0](step="2_200").notices)


def test_stages_that_are_made_apart_are_not_of_two_steps_unsaid(tmp_path):
    """Rank 1 has an older step only; neither rank needs the other's file."""
    stages = [{"a": ([1], [-1], 0, 0)}, {"b": ([1], [-1], 0, 0)}]
    params = dict.fromkeys("ab", ((8,), "Float32"))
    a = reference.write_stage_files(tmp_path / "strategy", stages)
    for step in ("1_1", "1_2"):
        src = write_checkpoint(tmp_path / "src", stages, params, name=f"net-{step}")
    (tmp_path / "src/rank_1/net-1_2.ckpt").unlink()
    for rank in range(2):
        with pytest.warns(
            rankxform.RankxformWarning, match="epoch 1 step 2 is .*rank 1 has no file"
        ):
            rankxform.load(src, a, a, rank=rank)
        with pytest.raises(rankxform.CheckpointError, match="rank 1 has no file"):
            rankxform.transform(src, tmp_path / "dst", a, a, ranks=(rank,), step="latest")
    rankxform.load(src, a, a, rank=0, step="1_2")


def test_what_is_chosen_does_not_hide_that_shards_are_no_whole_parameters(tmp_path):
    layouts = dict.fromkeys("wz", ([2], [0, -1], 0, 0))
    params = dict.fromkeys("wz", ((8, 4), "Float32"))
    source = write_checkpoint(
        tmp_path / "src", [layouts], params,
        make=lambda n, s, d: full_tensor(n, s, d) * (n == "w"),
    )  # fmt: skip
    with pytest.raises(rankxform.CheckpointError, match="'w' is not the same"):
        rankxform.transform(source, tmp_path / "dst", "none", include="z")


def test_a_rank_that_is_gone_took_its_parameters_with_it(tmp_path):
    for rank in (0, 2):
        entries = {f"p{rank}": ("Float32", full_tensor("p", (4,), "Float32"))}
        write_ckpt(tmp_path / f"src/rank_{rank}/c_{rank}.ckpt", entries)
    with pytest.raises(rankxform.CheckpointError, match="rank 1 has no file, and would hold"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", "none")


def test_one_shard_that_is_given_or_linked_is_not_silently_complete(tmp_path):
    source = write_checkpoint(tmp_path / "src", TIED, PARAMS)
    b = write_strategy(tmp_path / "b.ckpt", TIED[:1])
    shard = f"{source}/rank_0/checkpoint_0.ckpt"
    (tmp_path / "link.ckpt").symlink_to(shard)
    with pytest.raises(rankxform.UsageError, match="is the file of one of 4 rank folders"):
        rankxform.transform(tmp_path / "link.ckpt", tmp_path / "dst")
    with pytest.raises(rankxform.UsageError, match="is the file of one of 4 rank folders"):
        calls.transform_checkpoint_by_rank(1, {0: shard}, str(tmp_path / "one.ckpt"), None, b)


def test_a_strategy_that_is_a_pipe_is_not_waited_for(tmp_path):
    source = write_checkpoint(tmp_path / "src", TIED, PARAMS)
    os.mkfifo(tmp_path / "strategy.ckpt")
    with pytest.raises(rankxform.UsageError, match="no --src-strategy says"):
        rankxform.transform(source, tmp_path / "dst")
    with pytest.raises(rankxform.UsageError, match="is neither a file nor a folder"):
        rankxform.transform(source, tmp_path / "dst", tmp_path / "strategy.ckpt")


def test_a_warning_that_is_an_error_is_one_on_the_only_process(tmp_path):
    layouts, params = [{"w": ([2], [0], 0, 0)}], {"w": ((8,), "Float32")}
    a = write_strategy(tmp_path / "a.ckpt", layouts)
    for step in ("1_1", "1_2"):
        src = write_checkpoint(tmp_path / "src", layouts, params, name=f"net-{step}")
    (tmp_path / "src/rank_1/net-1_2.ckpt").unlink()
    with pytest.raises(rankxform.RankxformWarning, match="rank 1 has no file"):
        rankxform.load(src, a)


@pytest.mark.parametrize("rank", range(4))
def test_the_ranks_that_are_named_are_enough_for_a_tied_pipeline(rank, tmp_path):
    """An old strategy lists the embedding in both stages."""
    tied = [dict(TIED[0]), {**TIED[1], "emb": TIED[0]["emb"]}]
    source = write_checkpoint(tmp_path / "src", tied, PARAMS)
    a = write_strategy(tmp_path / "s.ckpt", tied)
    rankxform.transform(source, tmp_path / "all", a, a)
    needed = rankxform.ranks(a, a, (rank,))[rank]
    paths = {r: f"{source}/rank_{r}/checkpoint_{r}.ckpt" for r in needed}
    whole = (tmp_path / f"all/rank_{rank}/checkpoint_{rank}.ckpt").read_bytes()
    for r in needed:
        (tmp_path / f"some/rank_{r}").mkdir(parents=True)
        (tmp_path / f"some/rank_{r}/c.ckpt").write_bytes(Path(paths[r]).read_bytes())
    rankxform.transform(tmp_path / "some", tmp_path / "one", a, a, ranks=(rank,))
    assert (tmp_path / f"one/rank_{rank}/checkpoint_{rank}.ckpt").read_bytes() == whole
    calls.transform_checkpoint_by_rank(rank, paths, str(tmp_path / "by_rank.ckpt"), a, a)
    assert (tmp_path / "by_rank.ckpt").read_bytes() == whole


def test_one_rank_folders_file_is_not_taken_for_rank_0s(tmp_path):
    """With the strategy of all ranks, the folder is meant."""
    source = write_checkpoint(tmp_path / "src", TIED, PARAMS)
    a = write_strategy(tmp_path / "s.ckpt", TIED)
    file = f"{source}/rank_2/checkpoint_2.ckpt"
    calls = (
        lambda: rankxform.transform(file, tmp_path / "dst", a, a),
        lambda: rankxform.check(file, a),
    )
    for call in calls:
        with pytest.raises(rankxform.UsageError) as caught:
            call()
        parts = caught.value.parts
        assert parts.what.startswith("is the file of one of 4 rank folders, and ")
        assert parts.tries[0] == f"name the folder of them all, {source}"
    shutil.rmtree(tmp_path / "src/rank_3")
    with pytest.raises(rankxform.UsageError, match="is the file of one of 3 rank folders"):
        rankxform.transform(file, tmp_path / "dst", a, a)


def test_a_missing_rank_is_told_by_what_it_alone_holds(tmp_path):
    layouts = {
        f"{state}layers.{i}.w": ([2], [0], 0, 0) for state in ("", "adam_m.") for i in (0, 1)
    }
    never = {f"accu_grads.layers.{i}.norm": ([2], [-1], 0, 0) for i in (0, 1)}
    a = write_strategy(tmp_path / "a.ckpt", [{**layouts, **never}])
    source = write_checkpoint(
        tmp_path / "src", [layouts], dict.fromkeys(layouts, ((8,), "Float32"))
    )
    remove(tmp_path / "src", 1)
    with pytest.raises(rankxform.CheckpointError) as told:
        rankxform.transform(source, tmp_path / "dst", a, None)
    text = str(told.value)
    assert text.startswith("rank 1 has no file: no source file holds 4 of its slices, 64 B")
    assert "such as [4:8] of 'layers." in text and "accu_grads" not in text


@pytest.mark.parametrize("ranks", [(), (2,)])
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_stage_of_nothing_but_unmatched_names_may_be_taken_as_whole(kind, ranks, tmp_path):
    src = [{"a": ([2], [0], 0, 0)}]
    dst = [{"a": ([2], [0], 0, 0)}, {"x": ([2], [0], 0, 0)}]
    x = {"x": ("Float32", full_tensor("x", (8,), "Float32"))}
    source = write_checkpoint(tmp_path / "src", src, {"a": ((8,), "Float32")}, x, kind)
    a, b = write_strategy(tmp_path / "a.ckpt", src), write_strategy(tmp_path / "b.ckpt", dst)
    params = dict.fromkeys("ax", ((8,), "Float32"))
    rankxform.transform(source, tmp_path / "dst", a, b, unmatched="replicate", ranks=ranks)
    assert reference.wrong_slices(tmp_path / "dst", dst, params, kind, ranks or None) == []


def test_options_of_the_function_are_checked(tmp_path):
    source = write_checkpoint(tmp_path / "src", None, PARAMS)
    rankxform.transform(source, tmp_path / "dst", include="^a$")
    assert set(reference.read_ckpt(tmp_path / "dst/rank_0/checkpoint_0.ckpt")) == {"a"}
    for wrong in ({"memory": "lots"}, {"ranks": "0"}, {"formt": "ckpt"}, {"format": "pth"}):
        with pytest.raises(rankxform.UsageError):
            rankxform.transform(source, tmp_path / "no", **wrong)


def test_strategies_of_two_networks(tmp_path):
    source = write_checkpoint(tmp_path / "src", [{"w": ([2], [0], 0, 0)}], {"w": ((8,), "Float32")})
    a = write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0], 0, 0)}])
    b = write_strategy(tmp_path / "b.ckpt", [{"x": ([2], [0], 0, 0)}])
    with pytest.raises(rankxform.RequestError) as caught:
        rankxform.transform(source, tmp_path / "dst", a, b)
    lists = f"{b} lists none of the checkpoint's parameters, and {a} lists them"
    assert caught.value.parts.what == lists
    assert caught.value.parts.tries[0] == "--dst-strategy of this network, which has w"


def test_the_only_checkpoint_in_a_folder_is_taken(tmp_path):
    """MindFormers' `output`, in the place of `output/checkpoint`."""
    params = {"w": ((8, 4), "Float32")}
    rows = [{"w": ([2], [0, -1], 0, 0)}]
    reference.write_checkpoint(tmp_path / "output" / "checkpoint", rows, params)
    strategy = reference.write_strategy(tmp_path / "s.ckpt", rows)
    report = rankxform.transform(tmp_path / "output", tmp_path / "dst", strategy)
    assert report.src == str(tmp_path / "output" / "checkpoint")
    assert "the only checkpoint in it is" in report.notices[0]
    reference.write_checkpoint(tmp_path / "output" / "transformed", rows, params)
    with pytest.raises(
        rankxform.CheckpointError, match=r"transformed \(2 ranks\), or .*checkpoint \(2"
    ):
        rankxform.transform(tmp_path / "output", tmp_path / "dst", strategy, overwrite=True)


class TestSeveralFilesOfARank:
    """`--src-pattern` with `*` behind the rank: all that it matches is the rank's shard."""

    @pytest.fixture
    def split(self, tmp_path):
        """Write ranks of two stages as parts of one tensor and of those that are left."""
        write_checkpoint(tmp_path / "ranks", TIED, PARAMS, kind="safetensors")
        for path in (tmp_path / "ranks").glob("rank_*/*"):
            rank = int(path.parent.name.removeprefix("rank_"))
            held = reference.read_safetensors(path)
            for part, name in enumerate(held):
                dtype, shape, data = held[name]
                words = np.frombuffer(data, "<u4").reshape(shape)
                (tmp_path / "src").mkdir(exist_ok=True)
                reference.write_safetensors(
                    tmp_path / f"src/model-rank-{rank}-part-{part}.safetensors",
                    {name: (dtype, words)},
                )
        strategy = write_strategy(tmp_path / "a.ckpt", TIED)
        return tmp_path / "src", strategy, {"src_pattern": "model-rank-{rank}-part-*"}

    def test_are_its_shard(self, split, tmp_path):
        src, strategy, options = split
        options["format"] = "ckpt"
        rankxform.transform(src, tmp_path / "dst", strategy, None, **options)
        assert reference.wrong_slices(tmp_path / "dst", None, PARAMS) == []
        assert rankxform.verify(src, tmp_path / "dst", strategy, None, **options)
        del options["format"]

    def test_only_those_of_the_ranks_that_are_needed_are_read(self, split, tmp_path):
        src, strategy, options = split
        for path in src.glob("model-rank-[01]-*"):
            path.unlink()
        rankxform.transform(src, tmp_path / "dst", strategy, strategy, ranks=(2, 3), **options)
        for rank in (2, 3):
            (path,) = (tmp_path / f"dst/rank_{rank}").iterdir()
            want = shard(full_tensor("b", (8,), "Float32"), TIED[1]["b"], rank % 2)
            assert reference.read_safetensors(path)["b"][2] == want.tobytes()

    def test_a_part_that_is_missing_is_named_by_what_it_held(self, split, tmp_path):
        src, strategy, options = split
        (src / "model-rank-1-part-1.safetensors").unlink()
        with pytest.raises(rankxform.CheckpointError, match="'(a|emb)'"):
            rankxform.transform(src, tmp_path / "dst", strategy, None, **options)
        assert not (tmp_path / "dst/rank_0").exists()

    def test_a_rank_that_comes_later_is_converted_later(self, split, tmp_path):
        src, strategy, options = split
        later = {path: path.read_bytes() for path in src.glob("model-rank-2-*")}
        for path in later:
            path.unlink()
        b = write_strategy(tmp_path / "b.ckpt", [{**TIED[0], **TIED[1]}])
        options = {**options, "exclude": ("^b$",)}
        rankxform.transform(src, tmp_path / "dst", strategy, b, ranks=(0,), **options)
        for path, data in later.items():
            path.write_bytes(data)
        rankxform.transform(src, tmp_path / "dst", strategy, b, ranks=(1,), **options)
        rows = inspection.inspect(str(src), options["src_pattern"])["shards"]
        assert {row["rank"] for row in rows} == {0, 1, 2, 3}

    def test_a_name_in_two_of_them_is_refused(self, split, tmp_path):
        src, strategy, options = split
        shutil.copy(
            src / "model-rank-0-part-0.safetensors", src / "model-rank-0-part-9.safetensors"
        )
        with pytest.raises(rankxform.CheckpointError, match=r"both are rank 0's and hold 'a'"):
            rankxform.transform(src, tmp_path / "dst", strategy, None, **options)

    def test_of_the_newest_step_that_all_ranks_have(self, tmp_path):
        stage = {"w": ([2], [0], 0, 0), "adam_m.w": ([2], [0], 0, 0)}
        params = dict.fromkeys(stage, ((8,), "Float32"))
        for step, change in (("1_5", 1), ("2_5", 0)):
            for rank in range(2):
                for kind, name in (("net", "w"), ("opt", "adam_m.w")):
                    words = shard(full_tensor(name, (8,), "Float32"), stage[name], rank) ^ change
                    path = tmp_path / f"src/card{rank}/{kind}-{step}.ckpt"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_ckpt(path, {name: ("Float32", words)})
        strategy = write_strategy(tmp_path / "a.ckpt", [stage])
        options = {"src_pattern": "card{rank}/*.ckpt"}
        rankxform.transform(tmp_path / "src", tmp_path / "dst", strategy, None, **options)
        assert reference.wrong_slices(tmp_path / "dst", None, params) == []
        path = tmp_path / "src/card1/net-3_5.ckpt"  # of a step that has no opt file yet
        write_ckpt(path, {"w": ("Float32", np.zeros(4, "<u4"))})
        shutil.copy(path, tmp_path / "src/card0/net-3_5.ckpt")
        with pytest.warns(rankxform.RankxformWarning, match="step 5 is newer but not complete"):
            rankxform.transform(tmp_path / "src", tmp_path / "again", strategy, None, **options)
        assert reference.wrong_slices(tmp_path / "again", None, params) == []
        write_ckpt(tmp_path / "src/card0/last.ckpt", {"x": ("Float32", np.zeros(4, "<u4"))})
        with pytest.raises(rankxform.CheckpointError, match="some do not"):
            rankxform.transform(tmp_path / "src", tmp_path / "no", strategy, None, **options)
        (tmp_path / "src/card0/last.ckpt").unlink()
        for rank in range(2):
            (tmp_path / f"src/card{rank}/net-3_5.ckpt").unlink()
            shutil.copytree(tmp_path / f"src/card{rank}", tmp_path / f"plain/rank_{rank}")
        with pytest.raises(rankxform.CheckpointError, match="families"):  # no pattern says so
            rankxform.transform(tmp_path / "plain", tmp_path / "no", strategy, None)
