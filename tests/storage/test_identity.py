"""What paths lead to, whatever they are called: links, mounts, overlays, folders that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankxform.storage.identity import inodes_of, is_below_any, is_same_file
from tests.mpi_launch import environment


def is_below(path, folder):
    return is_below_any(path, inodes_of(folder))


@pytest.fixture
def tree(tmp_path):
    for name in ("src/rank_0", "src/deep/er", "other", "elsewhere/rank_1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("src")
    (tmp_path / "src/rank_1").symlink_to("../elsewhere/rank_1")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["src", "src/new/er", "link/new", "other/../src", "new/../src/x", "./src/rank_0/.."]
)
def test_a_path_below_by_any_name(name, tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert is_below(Path(name), Path("src"))
    assert is_below(Path(name), tree / "src")
    assert not is_below(Path(name), tree / "other")


@pytest.mark.parametrize("name", ["other", "src_new", "src/../other/new", "link/../other"])
def test_a_path_beside(name, tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert not is_below(Path(name), Path("src"))


def test_what_is_not_there_is_the_same_as_nothing(tree):
    assert not is_same_file(tree / "a", tree / "a")
    assert not is_below(tree / "a", tree / "a")
    assert inodes_of(tree / "a", with_folders=True) == set()


def test_folders_that_are_linked_into_a_place_are_folders_of_it(tree):
    assert is_below_any(tree / "elsewhere/rank_1/new", inodes_of(tree / "src", with_folders=True))
    assert not is_below_any(tree / "elsewhere/new", inodes_of(tree / "src", with_folders=True))


MOUNTED = {
    "of the folder": ("mount --bind src other", "other/new", True),
    "of a folder below": ("mount --bind src/deep other", "other/er/new", True),
    "of a folder above": ("mkdir m; mount --bind . m", "m/src/new", True),
    "beside it": ("mkdir m; mount --bind . m", "m/other/new", False),
    "of another": ("mount --bind elsewhere other", "other/rank_1", False),
    "another file system in it": ("mount -t tmpfs none src/deep", "src/deep/new", True),
    "another file system in its mount": (
        "mount --bind src other; mount -t tmpfs none other/deep", "other/deep/new", True),
    "an overlay that writes to it": (
        "mkdir l w m; mount -t overlay none -o lowerdir=l,upperdir=src,workdir=w m", "m/new", True),
    "an overlay that reads it": (
        "mkdir u w m; mount -t overlay none -o lowerdir=src,upperdir=u,workdir=w m", "m/new", False),
    "by an open file": ("exec 8<src; mount -t tmpfs none src; cd /proc/self/fd", "8/new", None),
}  # fmt: skip


@pytest.mark.parametrize("case", MOUNTED)
def test_mounts_give_a_folder_more_names(case, tree):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root")
    commands, path, is_inside = MOUNTED[case]
    src = "8" if is_inside is None else "src"
    program = (
        "from pathlib import Path; from rankxform.storage.identity import inodes_of, is_below_any;"
        f"print(is_below_any(Path({path!r}), inodes_of(Path({src!r}))))"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{commands}\nexec "$@"', "sh", sys.executable, "-c", program],
        cwd=tree, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.strip() == str(is_inside is not False), done.stderr
