"""Blocks that files share, where they may; and links inside a destination, which are not followed."""

from __future__ import annotations

import errno
import os

import pytest

from rankxform.errors import StorageError
from rankxform.formats.container import BLOCK
from rankxform.storage import posix
from rankxform.storage.posix import (
    claim_folders,
    make_folder,
    name_in_folder,
    share_blocks,
    shareable_blocks,
)


@pytest.mark.parametrize("start", [0, 8, 4088, 5000])
@pytest.mark.parametrize("nbytes", [0, 100, 4096, 12_345])
def test_whole_blocks_are_shared(start, nbytes):
    part = shareable_blocks(start, start + 3 * BLOCK, nbytes)
    assert len(part) % BLOCK == 0
    assert part.stop <= nbytes or not part
    if part:
        assert (start + part.start) % BLOCK == 0
        assert part.start < BLOCK
        assert nbytes - part.stop < BLOCK
    assert not shareable_blocks(start, start + 3 * BLOCK + 8, nbytes)


def test_where_blocks_cannot_be_shared_they_are_copied(tmp_path, monkeypatch):
    for code in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOSPC, errno.EIO):

        def ioctl(*_, code=code):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("fcntl.ioctl", ioctl)
        assert not share_blocks((0, tmp_path / "a", 0), (1, tmp_path / "b", 0), 4096)


def test_a_folder_that_another_run_removes_meanwhile_is_made(tmp_path, monkeypatch):
    folder = tmp_path / "dst"
    folder.mkdir()
    is_dir = type(folder).is_dir

    def removed_before_it_is_looked_at(path):
        if path == folder and path.exists():
            path.rmdir()
        return is_dir(path)

    monkeypatch.setattr(type(folder), "is_dir", removed_before_it_is_looked_at)
    make_folder(folder)
    monkeypatch.undo()
    assert folder.is_dir()


def test_a_file_where_a_folder_is_to_be_is_an_error(tmp_path):
    (tmp_path / "dst").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot make the folder: File exists"):
        make_folder(tmp_path / "dst")


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "dst"
    (root / "a/b").mkdir(parents=True)
    claim_folders(root, [root / "a/b"], keeps_root=True)
    yield root
    claim_folders(root, None)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["a", "a/b"])
def test_a_folder_that_becomes_a_link_is_not_followed(name, root, tmp_path):
    file = root / "a/b/f"
    posix.create(file)
    moved = tmp_path / "moved"
    (root / name).rename(moved)
    (root / name).symlink_to(moved)
    before = names(moved)
    calls = (
        lambda: posix.create(file),
        lambda: posix.publish_file(file, file.with_name("g"), durable=False),
        lambda: posix.truncate(file, 7),
        lambda: posix.sync(file),
        lambda: posix.write_atomically(file.with_name("h"), b"x"),
        lambda: posix.Descriptors(os.O_RDWR).get(file),
    )
    for call in calls:
        with pytest.raises(StorageError, match="its folder is a link, and inside a destination"):
            call()
    posix.remove_if_possible(file)
    assert names(moved) == before


def test_the_destination_itself_may_be_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    named = tmp_path / "link"
    claim_folders(named, [named / "a/b"])
    posix.create(named / "a/b/f")
    posix.create(named / "top")
    assert names(root) == ["a", "a/b", "a/b/f", "top"]


def test_a_folder_that_is_a_link_is_refused_by_its_name(root, tmp_path):
    (root / "c").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="c: is a link, and inside a destination none is"):
        claim_folders(root, [root / "c/d"])


def test_no_descriptor_stays_open(root):
    before = len(os.listdir("/proc/self/fd"))
    posix.create(root / "a/b/g")
    posix.remove_if_possible(root / "a/b/g")
    for _ in range(3):
        with name_in_folder(root / "a/b/f") as (name, folder):
            assert name == "f" and folder is not None
    (root / "a/b").rmdir()
    with pytest.raises(FileNotFoundError), name_in_folder(root / "a/b/f"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the destination's
    claim_folders(root, None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_destination_that_another_folder_replaces_is_not_written_to(root, tmp_path):
    file = root / "a/b/f"
    posix.create(file)
    root.rename(tmp_path / "moved")
    (tmp_path / "other/a/b").mkdir(parents=True)
    root.symlink_to(tmp_path / "other")
    for path in (file, root / "top"):
        with pytest.raises(StorageError, match="dst is another folder now"):
            posix.create(path)
    claim_folders(root, None)
    posix.create(file)
    assert names(tmp_path / "other") == ["a", "a/b", "a/b/f"]


def test_a_destination_that_is_made_anew_before_something_was_done_there(tmp_path):
    """Others remove it while a run waits for its lock; a node may see the old one for a moment."""
    root = tmp_path / "dst"
    (root / "a").mkdir(parents=True)
    claim_folders(root, [root / "a"])
    posix.create(root / "a/f")
    root.rename(tmp_path / "old")
    (root / "a").mkdir(parents=True)
    posix.create(root / "a/f")
    claim_folders(root, [], keeps_root=True)
    with pytest.raises(StorageError):
        posix.create(root / "b/f")
    posix.create(root / "a/g")
    claim_folders(root, None)
    assert names(root) == ["a", "a/f", "a/g"]
