"""A look never fails on what can be looked at."""

from __future__ import annotations

import json
import os
import shlex
from importlib import import_module

import numpy as np
import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.display.text import as_text
from rankxform.publish.folder_records import read_manifest
from rankxform.publish.lock import FolderLock
from rankxform.request import Request
from tests import reference
from tests.forked import run_forked

SHARDED = [{"w": ([4], [0, -1], 0, 0)}]
HALF = [{"w": ([2], [0, -1], 0, 0)}]
PARAMS = {"w": ((8, 6), "Float32")}


@pytest.fixture
def job(tmp_path):
    """What a MindFormers job leaves: two steps of four ranks, and the strategy beside."""
    output = tmp_path / "output"
    for step in ("1_100", "2_200"):
        reference.write_checkpoint(
            output / "checkpoint", SHARDED, PARAMS, name=f"net_{{rank}}-{step}"
        )
    reference.write_stage_files(output / "strategy", SHARDED)
    (output / "checkpoint/rank_0/meta.json").write_text('{"last_epoch": 2}')
    return output


def look(path):
    """Return what was found, which can always be told in words."""
    found = rankxform.inspect(path)
    assert str(path) in as_text(found) or found["kind"] == "destination"
    return found


def test_an_output_folder_is_a_list_of_what_is_in_it(job):
    parts = {part["path"]: part["what"] for part in look(job)["items"]}
    assert parts == {
        f"{job}/checkpoint": "checkpoint of 4 ranks; steps 1_100, 2_200",
        f"{job}/strategy": "strategy, 4 ranks",
    }
    (one,) = look(job.parent)["items"]
    assert one == {"path": str(job), "what": "holds checkpoint"}


def test_a_folder_two_above_is_refused_with_the_checkpoint_to_name(job):
    with pytest.raises(rankxform.RankxformError, match="and a checkpoint in its folders") as raised:
        rankxform.plan(job.parent, job / "strategy", "none")
    assert raised.value.parts.tries == (f"name {job / 'checkpoint'} (4 ranks)",)


def test_a_checkpoint_says_which_step_is_taken_and_which_are_there(job):
    found = look(job / "checkpoint")
    assert (found["step"], found["steps"]) == ("2_200", ["1_100", "2_200"])
    assert [one["rank"] for one in found["shards"]] == [0, 1, 2, 3]
    (job / "checkpoint/rank_3/net_3-2_200.ckpt").unlink()
    found = look(job / "checkpoint")
    assert found["step"] == "1_100" and "rank 3 has no file" in found["warnings"][0]
    assert "WARNING:  epoch 2 step 200" in as_text(found)


def test_files_among_which_there_is_no_choice_are_all_listed(job):
    reference.write_ckpt(job / "checkpoint/rank_1/other.ckpt", {})
    found = look(job / "checkpoint")
    assert "state an epoch and a step and some do not" in found["unclear"]
    assert len(found["shards"]) == 9


def test_a_broken_file_is_listed_with_its_error(job):
    os.truncate(job / "checkpoint/rank_2/net_2-2_200.ckpt", 30)
    found = look(job / "checkpoint")
    assert [("error" in one) for one in found["shards"]] == [False, False, True, False]
    with pytest.raises(rankxform.CheckpointError):
        rankxform.inspect(job / "checkpoint/rank_2/net_2-2_200.ckpt")


def test_one_ranks_folder_and_what_lies_in_it(job):
    found = look(job / "checkpoint/rank_0")
    assert [os.path.basename(one["file"]) for one in found["shards"]] == [
        "net_0-1_100.ckpt", "net_0-2_200.ckpt",
    ]  # fmt: skip
    assert look(job / "checkpoint/rank_0/meta.json")["kind"] == "json"


def test_several_strategies_are_a_line_each(tmp_path):
    reference.write_strategy(tmp_path / "four.ckpt", SHARDED)
    reference.write_strategy(tmp_path / "two.ckpt", HALF)
    found = look(tmp_path)
    assert [part["what"] for part in found["items"]] == ["strategy, 4 ranks", "strategy, 2 ranks"]


def test_what_cannot_be_read_hides_nothing_else(job, tmp_path):
    folder = tmp_path / "mixed"
    reference.write_ckpt(folder / "full.ckpt", {})
    reference.write_strategy(folder / "strategy.ckpt", SHARDED)
    os.mkfifo(folder / "pipe.ckpt")
    os.mkfifo(folder / "rankxform.json")
    (folder / "loop.ckpt").symlink_to("loop.ckpt")
    (folder / "line\nbreak.ckpt").write_bytes(b"")
    found = look(folder)
    assert [os.path.basename(part["path"]) for part in found["items"]] == [
        "full.ckpt", "line\nbreak.ckpt", "strategy.ckpt",
    ]  # fmt: skip
    assert "line\\nbreak.ckpt" in as_text(found)
    (job / "checkpoint/rank_0/loop.ckpt").symlink_to("loop.ckpt")
    assert len(look(job / "checkpoint")["shards"]) == 4
    (job / "checkpoint/rank_00").mkdir()
    reference.write_ckpt(job / "checkpoint/rank_00/net_0-1_100.ckpt", {})
    assert len(look(job / "checkpoint")["items"]) == 5


def test_a_manifest_of_somebody_elses_making(tmp_path):
    record = {
        "kind": "rankxform manifest", "version": 4, "seed": 1, "files": {}, "verify": ["1", "2"],
        "identity": {"options": {}, "source files": {}},
    }  # fmt: skip
    (tmp_path / "rankxform.json").write_text(json.dumps(record))
    assert "options   1 2" in as_text(look(tmp_path))
    for other in ({"version": 1}, {"form": ["ranks"]}, {"form": "boxes"}, {"verify": [1, 2]}):
        (tmp_path / "rankxform.json").write_text(json.dumps({**record, **other}))
        text = as_text(look(tmp_path))
        assert "rankxform's records cannot be read" in text and "rankxform.json: " in text


def test_a_very_large_json_is_not_read_whole(tmp_path):
    path = tmp_path / "large.json"
    path.write_text("{")
    os.truncate(path, 1 << 40)
    assert look(path)["kind"] == "json"


def test_nothing_of_interest(tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    assert look(tmp_path)["items"] == []
    with pytest.raises(rankxform.UsageError, match="no such file"):
        rankxform.inspect(tmp_path / "nowhere")


@pytest.mark.parametrize("verify", [False, True])
def test_what_rankxform_wrote_says_from_what_and_whether_it_is_whole(verify, job, tmp_path):
    b, dst = reference.write_strategy(tmp_path / "b.ckpt", HALF), tmp_path / "dst"
    rankxform.transform(job / "checkpoint", dst, job / "strategy", b, verify=verify)
    for path in (dst, dst / "rankxform.json"):
        found = look(path)
        assert (found["kind"], found["complete"], found["fingerprints"]) == (
            "destination",
            True,
            verify,
        )
        assert found["src"] == str(job / "checkpoint") and str(b) in found["options"]
        assert [one["parameters"] for one in found["shards"]] == [1, 1]
    (dst / "rank_1/checkpoint_1.ckpt").unlink()
    found = look(dst)
    assert not found["complete"] and "error" in found["shards"][1]
    assert "NOT COMPLETE" in as_text(found)
    (dst / "rankxform.json").write_text("{")
    assert "not JSON" in as_text(look(dst)) and "continues" not in as_text(look(dst))


@pytest.fixture
def stopping(monkeypatch):
    """Every conversion is stopped before its first file has a name."""

    def stop(*_, **__):
        raise rankxform.StoppedError("stopped by a test")

    with monkeypatch.context() as patch:
        patch.setattr(import_module("rankxform.target.folder"), "publish_file", stop)
        yield patch


def test_unfinished_work_says_so(job, tmp_path, stopping):
    with pytest.raises(rankxform.StoppedError):
        rankxform.transform(
            job / "checkpoint", tmp_path / "dst", job / "strategy", "none", exclude=["x", "-y"],
            dtype="fp16", fsync=False, link="none", layers_per_stage=(), memory=1 << 22, ranks=[0],
        )  # fmt: skip
    found = look(tmp_path / "dst")
    assert not found["complete"] and "unfinished work" in as_text(found)
    command = as_text(found).split("next", 1)[1]
    assert shlex.split(command.replace("\\\n", "")) == found["continued_by"]
    assert found["continued_by"][-2:] == ["--step", "2_200"]  # a newer one may be there by then
    stopping.undo()
    assert main(found["continued_by"][1:]) == 0
    assert look(tmp_path / "dst")["complete"]


def test_what_is_known_of_a_stopped_run(job, tmp_path, stopping, capfd):
    """The last command is kept, whatever it has that does not change a byte."""
    dst = tmp_path / "dst"
    for options in ({}, {"throttle": 1 << 30, "memory": 1 << 23}):
        with pytest.raises(rankxform.StoppedError):
            rankxform.transform(
                job / "checkpoint", dst, job / "strategy", "none", step="1_100", fsync=False,
                **options,
            )  # fmt: skip
    found = look(dst)
    assert found["continued_by"].count("--throttle") == 1
    assert (found["files_complete"], found["files_to_make"]) == (0, 1) and found["bytes_begun"]
    assert main(["inspect", str(dst)]) == 75
    printed = capfd.readouterr().out
    assert "begun     0 of 1 files complete" in printed and "no run is at work on it" in printed
    lock = FolderLock(dst / ".rankxform" / "lock")
    assert look(dst)["at_work"] and "next" not in as_text(look(dst))
    lock.release()
    assert not look(dst)["at_work"]
    stopping.undo()
    assert main(found["continued_by"][1:]) == 0
    assert "continued an earlier run: 0 of 1 files were complete, 1 begun" in capfd.readouterr().out
    assert main(["inspect", str(dst)]) == 0
    next(dst.glob("rank_*/*")).write_bytes(b"")
    assert main(["inspect", str(dst)]) == 3


def test_a_command_states_its_processes(job, tmp_path):
    words = ["transform", str(job / "checkpoint"), str(tmp_path / "dst"), "--step", "1_100"]
    words += ["--src-strategy", str(job / "strategy"), "--no-fsync"]
    assert run_forked(words, 2, tmp_path).code == 0
    assert read_manifest(tmp_path / "dst")["command"][-2:] == ["-n", "2"]


@pytest.mark.parametrize("form", ["checkpoint2", "hyperparallel"])
def test_unfinished_work_is_found_in_the_folder_of_its_iteration(form, job, tmp_path, stopping):
    dst = tmp_path / "out" / "dst"
    with pytest.raises(rankxform.StoppedError):
        rankxform.transform(
            job / "checkpoint", dst, job / "strategy", dst_form=form, iteration=7, step="1_100"
        )
    command = look(dst)["continued_by"]
    assert "NOT COMPLETE" in as_text(look(dst)) or "unfinished work" in as_text(look(dst))
    assert "unfinished work" in as_text(look(dst.parent))
    stopping.undo()
    assert main(command[1:]) == 0
    assert not look(dst).get("begun")


def test_a_stopped_run_inside_hides_no_checkpoint(job, tmp_path, stopping):
    model = tmp_path / "model"
    model.mkdir()
    rank_file = job / "checkpoint/rank_0/net_0-1_100.ckpt"
    (model / "model.ckpt").write_bytes(rank_file.read_bytes())
    before = look(model)
    with pytest.raises(rankxform.StoppedError):
        rankxform.transform(
            job / "checkpoint", model / "ms", job / "strategy", "none", step="1_100"
        )
    found = look(model)
    assert found["kind"] != "destination" and before["kind"] == "files"
    (tmp_path / "link").mkdir()
    (tmp_path / "link/to").symlink_to(model / "ms")
    assert look(tmp_path / "link")["kind"] != "destination"


def test_a_command_with_relative_paths_runs_everywhere(job, tmp_path, stopping):
    (tmp_path / "given").mkdir()
    (tmp_path / "given/preset.toml").write_text("[[rules]]\nnames = 'w'\nspec = '(tp, None)'\n")
    stopping.chdir(tmp_path / "given")
    with pytest.raises(rankxform.StoppedError):
        rankxform.transform(
            job / "checkpoint", tmp_path / "dst", job / "strategy",
            src_parallel="dp=1,mp=4", dst_parallel="dp=1,mp=2", preset="preset.toml",
        )  # fmt: skip
    words = look(tmp_path / "dst")["continued_by"]
    assert words[words.index("--preset") + 1] == str(tmp_path / "given/preset.toml")


def test_no_one_command_continues_runs_of_different_ranks(job, tmp_path, stopping):
    b, dst = reference.write_strategy(tmp_path / "b.ckpt", HALF), tmp_path / "dst"
    for rank, known in ((0, True), (1, False)):
        with pytest.raises(rankxform.StoppedError):
            rankxform.transform(job / "checkpoint", dst, job / "strategy", b, ranks=[rank])
        assert bool(look(dst)["continued_by"]) == known
    assert "the same command continues it" in as_text(look(dst))


def test_replicas_are_not_compared_without_a_strategy(job):
    """What a pipeline's or a sharded checkpoint's ranks hold under one name is not the same."""
    from rankxform.transport import SerialTeam
    from rankxform.verbs.check import compare_replicas

    with pytest.raises(rankxform.UsageError, match="no --src-strategy says"):
        compare_replicas(Request(str(job / "checkpoint"), None), SerialTeam())
    strategy = str(job / "strategy")
    found = compare_replicas(
        Request(str(job / "checkpoint"), None, strategy, strategy), SerialTeam()
    )
    assert found.differences == ()


def test_a_look_without_shapes(tmp_path):
    reference.write_ckpt(
        tmp_path / "src/rank_0/c.ckpt", {"n": ("Int32", np.array([3], "<i4").view("<u4"))}
    )
    assert look(tmp_path / "src")["steps"] == []


def test_a_strategy_is_shown_without_its_file(tmp_path):
    """What a result shows was read when it was made."""
    path = reference.write_strategy(tmp_path / "st.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    found = rankxform.inspect(path)
    shown = as_text(found)
    (tmp_path / "st.ckpt").rename(tmp_path / "elsewhere.ckpt")
    assert as_text(found) == shown and "w" in shown
    assert "strategy" in found._repr_html_()
