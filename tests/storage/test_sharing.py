"""Blocks that files share: where they may, and what happens where they cannot."""

from __future__ import annotations

import errno
import os

import pytest

from rankxform.errors import StorageError
from rankxform.formats.base import BLOCK
from rankxform.storage.sharing import share, shared_part


@pytest.mark.parametrize("start", [0, 8, 4088, 5000])
@pytest.mark.parametrize("nbytes", [0, 100, 4096, 12_345])
def test_whole_blocks_are_shared(start, nbytes):
    part = shared_part(start, start + 3 * BLOCK, nbytes)
    assert len(part) % BLOCK == 0
    assert part.stop <= nbytes or not part
    if part:
        assert (start + part.start) % BLOCK == 0
        assert part.start < BLOCK
        assert nbytes - part.stop < BLOCK
    assert not shared_part(start, start + 3 * BLOCK + 8, nbytes)


def test_sharing_blocks_fails_as_writing_does(tmp_path, monkeypatch):
    def answer(code):
        def ioctl(*_):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("fcntl.ioctl", ioctl)

    positions = (0, tmp_path / "a", 0), (1, tmp_path / "b", 0)
    for code in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL):
        answer(code)
        assert not share(*positions, 4096)
    answer(errno.ENOSPC)
    with pytest.raises(StorageError, match="b: cannot share 4096 bytes|No space"):
        share(*positions, 4096)
