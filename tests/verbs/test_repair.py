"""The commands that repair a destination do."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

import rankxform
from rankxform.cli.main import main
from tests.mpi_launch import environment
from tests.verbs.test_verify_folder import converted, src

__all__ = ["src"]


@pytest.mark.parametrize("with_source", [False, True])
@pytest.mark.parametrize("name", ["hf", "ranks"])
def test_the_command_that_repairs_does(name, with_source, src, capfd):
    dst = converted(src, name)
    first, second = sorted(dst.rglob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-4] + b"\1\2\3\4")
    if not with_source:
        second.unlink()
    a, b = src.parent / "a.ckpt", src.parent / "b.ckpt"
    to = {"dst_strategy": b} if name == "ranks" else {"dst_form": "huggingface"}
    verdict = rankxform.verify(src, dst, a, **to) if with_source else rankxform.verify(dst)
    assert verdict.same is False
    command = verdict.repair.replace("rankxform ", f"{sys.executable} -m rankxform ", 1)
    done = subprocess.run(command, shell=True, env=environment(), capture_output=True)
    assert done.returncode == 0, (command, done)
    assert rankxform.verify(src, dst, a, **to).same


def repair_of(dst):
    verdict = rankxform.verify(dst)
    assert verdict.same is False
    return verdict.repair


def damage(path):
    path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
    return path


def test_a_copy_is_not_repaired_by_the_command_of_another(src):
    dst = converted(src, "ranks")
    shutil.copytree(dst, src.parent / "copy")
    damage(src.parent / "copy/rank_1/checkpoint_1.safetensors")
    assert repair_of(src.parent / "copy") is None
    dst.rename(src.parent / "moved")
    damage(src.parent / "moved/rank_1/checkpoint_1.safetensors")
    assert repair_of(src.parent / "moved") is None


def test_nothing_is_removed_through_a_link(src):
    dst = converted(src, "ranks")
    shutil.rmtree(dst / "rank_1")
    (dst / "rank_1").symlink_to(src / "rank_1")
    assert repair_of(dst) is None


def test_ranks_that_were_made_by_another_run_are_repaired(src):
    a, b = src.parent / "a.ckpt", src.parent / "b.ckpt"
    for rank in range(2):
        rankxform.transform(src, src.parent / "dst", a, b, ranks=[rank], fsync=False)
    damage(src.parent / "dst/rank_0/checkpoint_0.safetensors")
    command = repair_of(src.parent / "dst")
    assert "--ranks 0 " in command
    command = command.replace("rankxform ", f"{sys.executable} -m rankxform ", 1)
    assert subprocess.run(command, shell=True, env=environment()).returncode == 0
    assert rankxform.verify(src, src.parent / "dst", a, b).same


@pytest.mark.parametrize("form", ["huggingface", "unified"])
def test_files_that_were_exchanged_are_all_written_again(form, src):
    size = {"huggingface": "max_shard", "unified": "max_part"}[form]
    options = {"dst_form": form, size: 9_000}
    a, dst = src.parent / "a.ckpt", src.parent / "dst"
    rankxform.transform(src, dst, a, fsync=False, **options)
    first, second, *_ = sorted(dst.glob("*part*") if form == "unified" else dst.glob("model-*"))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    repair = rankxform.verify(src, dst, a, **options).repair
    assert repair.endswith("--overwrite") and not repair.startswith("rm")
    command = repair.replace("rankxform ", f"{sys.executable} -m rankxform ", 1)
    assert subprocess.run(command, shell=True, env=environment()).returncode == 0
    assert rankxform.verify(src, dst, a, **options).same


def test_many_files_are_overwritten_and_strays_removed(src):
    dst = src.parent / "dst"
    a = src.parent / "a.ckpt"
    rankxform.transform(src, dst, a, fsync=False, dst_form="huggingface", max_shard=9_000)
    files = sorted(dst.glob("model-*.safetensors"))
    stray = dst / "other.safetensors"
    stray.write_bytes(files[0].read_bytes())
    for path in files:
        damage(path)
    (dst / "model.safetensors.index.json").unlink()
    repair = repair_of(dst)
    assert repair.startswith(f"rm {stray} && rankxform transform ")
    assert repair.endswith(" --overwrite")
    command = repair.replace("rankxform ", f"{sys.executable} -m rankxform ", 1)
    assert subprocess.run(command, shell=True, env=environment()).returncode == 0
    assert rankxform.verify(src, dst, a, dst_form="huggingface", max_shard=9_000).same


@pytest.mark.parametrize("missing", ["src", "a.ckpt"])
@pytest.mark.parametrize("name", ["hf", "ranks"])
def test_nothing_is_removed_that_cannot_be_made_again(missing, name, src, capfd):
    """It was, and the conversion behind it failed: the last copy was lost for a byte."""
    dst = converted(src, name, verify=True)
    damage(sorted(dst.rglob("*.safetensors"))[0])
    assert repair_of(dst).startswith("rm ")
    (src.parent / missing).rename(src.parent / "elsewhere")
    assert repair_of(dst) is None
    assert main(["verify", str(dst)]) == 6
    assert "to repair: copy what differs from where it is whole" in capfd.readouterr().out


def test_a_stray_alone_goes_without_a_conversion(src):
    dst = converted(src, "ranks", verify=True)
    stray = dst / "rank_0" / "other.safetensors"
    stray.write_bytes(sorted(dst.rglob("*.safetensors"))[0].read_bytes())
    assert repair_of(dst) == f"rm {stray}"
    src.rename(src.parent / "elsewhere")
    assert repair_of(dst) == f"rm {stray}"


def test_what_a_conversion_would_refuse_is_no_repair(src):
    dst = converted(src, "hf")
    (dst / "other.safetensors").write_bytes(damage(next(dst.glob("model-00001*"))).read_bytes())
    with pytest.warns(rankxform.RankxformWarning, match="another checkpoint file lies beside"):
        verdict = rankxform.verify(src, dst, src.parent / "a.ckpt", dst_form="huggingface")
    assert verdict.same is False and verdict.repair is None
