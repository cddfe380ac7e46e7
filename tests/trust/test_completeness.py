"""What is declared is there, and what is there is declared; what was asked for happened."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs.check import compare_replicas
from tests import reference

PARAMS = {f"layers.{n}.w": ((8, 8), "Float32") for n in range(3)}
STAGE = {name: ([4], [0, -1], 0, 0) for name in PARAMS}


def made(folder, held=None, listed=(), extras=None):
    """Write a checkpoint of 4 ranks that holds `held` tensors, of those that are listed."""
    stage = {**STAGE, **{name: ([4], [0, -1], 0, 0) for name in listed}}
    reference.write_checkpoint(folder / "src", [stage], held or PARAMS, extras)
    return folder / "src", reference.write_strategy(folder / "a.ckpt", [stage])


def convert(src, strategy, folder, **options):
    return rankxform.transform(src, folder / "dst", strategy, None, **options)


class TestAbsent:
    def test_weights_that_no_file_holds(self, tmp_path):
        src, strategy = made(tmp_path, listed=["layers.3.w", "layers.4.w", "head"])
        with pytest.raises(rankxform.CheckpointError) as caught:
            convert(src, strategy, tmp_path)
        assert "no file holds layers.*.w (2), head, which" in str(caught.value)
        assert "on ranks 0-3 (3 of 6 weights)" in str(caught.value)
        assert not (tmp_path / "dst").exists()
        with pytest.raises(rankxform.CheckpointError, match="no file holds head"):
            convert(src, strategy, tmp_path, accept="absent:layers")

    def test_what_is_accepted_is_said_and_noted(self, tmp_path):
        src, strategy = made(tmp_path, listed=["head"])
        with pytest.warns(rankxform.RankxformWarning, match="no file holds head"):
            report = convert(src, strategy, tmp_path, accept=["absent:^head$"])
        assert report.accepted == ("absent:^head$",)
        record = json.loads((tmp_path / "dst" / "rankxform.json").read_text())
        assert record["accepted"] == ["absent:^head$"]

    def test_weights_that_the_destination_alone_lists(self, tmp_path):
        src, a = made(tmp_path)
        head = {**STAGE, "head": STAGE["layers.0.w"], "layers.0.w.lora_a": STAGE["layers.0.w"]}
        b = reference.write_strategy(tmp_path / "b.ckpt", [head])
        with pytest.raises(rankxform.CheckpointError, match=r"no file holds head, which .*b\.ckpt"):
            rankxform.transform(src, tmp_path / "dst", a, b)
        for options in ({"exclude": "head"}, {"unmatched": "drop"}):
            report = rankxform.transform(src, tmp_path / "dst", a, b, overwrite=True, **options)
            assert "head" in report.absent
        with pytest.warns(rankxform.RankxformWarning, match="no file holds head"):
            report = rankxform.transform(src, tmp_path / "new", a, b, accept="new:head")
        assert report.accepted == ("new:head",)
        with pytest.warns(rankxform.RankxformWarning, match="no file holds head"):
            assert {*rankxform.load(src, a, b, rank=0, accept="new")} == {*PARAMS}

    @pytest.mark.parametrize(
        "name",
        ["adam_m.layers.0.w", "accu_grads.layers.0.w", "layers.0.expert_load", "global_step"],
    )
    def test_states_and_what_is_never_saved_are_no_weights(self, tmp_path, name):
        src, strategy = made(tmp_path, listed=[name])
        assert convert(src, strategy, tmp_path).warnings == ()

    def test_an_adapter_alone_is_healthy(self, tmp_path):
        """What MindFormers leaves with save_trainable_only."""
        adapter = {
            f"layers.{n}.w.lora_{part}": ((8, 8), "Float32") for n in (0, 1) for part in "ab"
        }
        src, strategy = made(tmp_path, held=adapter, listed=adapter)
        report = convert(src, strategy, tmp_path)
        assert report.warnings == () and "3 of 7 weights" in " ".join(report.notices)

    def test_a_stage_that_is_not_read_is_not_absent(self, tmp_path):
        stages = [{"a": ([2], [0, -1], 0, 0)}, {"b": ([2], [0, -1], 0, 0)}]
        params = dict.fromkeys("ab", ((8, 8), "Float32"))
        src = reference.write_checkpoint(tmp_path / "src", stages, params)
        strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
        rankxform.load(src, strategy, strategy, rank=0)

    @pytest.mark.parametrize("text", ["abs", "absent:(", ""])
    def test_what_cannot_be_accepted(self, tmp_path, text, capfd):
        from rankxform.cli.main import main

        assert main(["transform", "a", "b", "--accept", text]) == 2
        assert "--accept" in capfd.readouterr().err
        with pytest.raises(rankxform.UsageError, match="expected"):
            rankxform.plan(tmp_path, accept=[text])


class TestAsked:
    def test_nothing_is_compared_with_itself(self, tmp_path):
        src, strategy = made(tmp_path)
        rankxform.transform(src, tmp_path / "dst", strategy, strategy)
        linked = tmp_path / "linked"
        shutil.copytree(src, linked, copy_function=os.link)
        (tmp_path / "symlink").symlink_to(src)
        for dst in (src, linked, tmp_path / "symlink"):
            with pytest.raises(rankxform.UsageError, match="is the same file as"):
                rankxform.verify(src, dst, strategy, strategy)
        copy = tmp_path / "copy"
        shutil.copytree(src, copy)
        assert rankxform.verify(src, copy, strategy, strategy)

    def test_a_verdict_is_true_only_if_every_byte_was_compared(self, tmp_path):
        src, strategy = made(tmp_path)
        convert(src, strategy, tmp_path)
        known = rankxform.verify(tmp_path / "dst")
        assert known.same is None
        with pytest.raises(rankxform.DifferenceError, match="not every byte"):
            bool(known)
        assert bool(rankxform.verify(src, tmp_path / "dst", strategy))
        (file,) = (tmp_path / "dst").glob("rank_0/*")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert not rankxform.verify(src, tmp_path / "dst", strategy)
        assert not rankxform.verify(tmp_path / "dst")

    def test_checksums_that_are_not_there(self, tmp_path):
        src, strategy = made(tmp_path)
        with pytest.raises(rankxform.DifferenceError, match="no file carries a checksum"):
            convert(src, strategy, tmp_path, check_crc=True)
        full = tmp_path / "full"
        rankxform.transform(src, full, strategy, strategy, crc=True)
        report = rankxform.transform(full, tmp_path / "a", None, None)
        assert any("--check-crc" in text for text in report.notices)
        shutil.copyfile(src / "rank_2/checkpoint_2.ckpt", full / "rank_2/checkpoint_2.ckpt")
        (full / "rankxform.json").unlink()
        with pytest.warns(rankxform.RankxformWarning, match="rank_2.*carries no checksum"):
            rankxform.transform(full, tmp_path / "b", strategy, None, check_crc=True)

    def test_replicas_that_are_not_there(self, tmp_path):
        src, strategy = made(tmp_path)
        found = compare_replicas(Request(str(src), None, strategy, strategy), SerialTeam())
        assert found.same is None
        with pytest.raises(rankxform.DifferenceError):
            bool(found)
        from rankxform.cli.main import main

        assert main(["inspect", "--replicas", str(src), "--src-strategy", strategy]) == 6

    @pytest.mark.parametrize("option", ["keep_dtype", "cast_states"])
    def test_patterns_that_match_nothing(self, tmp_path, option):
        src, strategy = made(tmp_path, extras={"global_step": ("Int32", np.array([1], "<i4"))})
        with pytest.warns(rankxform.RankxformWarning, match="'nothing' matches no"):
            convert(src, strategy, tmp_path, dtype="bf16", **{option: "nothing"})


def test_ranks_of_another_tool_beyond_the_destinations(tmp_path):
    src, strategy = made(tmp_path)
    for rank in (0, 5):
        reference.write_ckpt(
            tmp_path / f"dst/rank_{rank}/checkpoint_{rank}.ckpt",
            {"x": ("Float32", np.zeros(4, "<u4"))},
        )
    with pytest.raises(rankxform.StorageError, match="did not write"):
        rankxform.transform(src, tmp_path / "dst", strategy, strategy)
    with pytest.warns(rankxform.RankxformWarning, match="rank_5.*lies beside"):
        rankxform.transform(src, tmp_path / "dst", strategy, strategy, overwrite=True)
