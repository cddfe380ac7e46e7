"""Blocks that files share: where they may, and what happens where they cannot."""

from __future__ import annotations

import errno
import os

import pytest

from rankxform.errors import StorageError
from rankxform.formats.container import BLOCK
from rankxform.storage.posix import make_folder, share_blocks, shareable_blocks


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
