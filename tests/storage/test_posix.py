"""Blocks that files share: where they may, and what happens where they cannot."""

from __future__ import annotations

import errno
import os

import pytest

from rankxform.formats.container import BLOCK
from rankxform.storage.posix import share_blocks, shareable_blocks


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
