"""Blocks that two files share, copy on write, where the file system can: XFS, Btrfs, NFS 4.2.

The second file then takes neither time nor space. Only whole blocks can be shared, and only where
both files have the bytes at the same place of a block.
"""

# Hence a safetensors header of a file of a megabyte or more is padded until content begins where
# the source's does. With --verify nothing is shared, because that sums what is in memory.

from __future__ import annotations

import errno
import fcntl
import struct
from pathlib import Path

from rankxform.formats.base import BLOCK

CANNOT = frozenset(
    {
        errno.EOPNOTSUPP,
        errno.EXDEV,
        errno.EINVAL,
        errno.ENOTTY,
        errno.ENOSYS,
        errno.EPERM,
        errno.ETXTBSY,
    }
)
"""What the system answers where two files cannot share blocks."""

_FICLONERANGE = 0x4020940D

Position = tuple[int, str | Path, int]
"""A place in an open file: its descriptor, its path, and a byte."""


def shareable_blocks(start: int, dst_start: int, nbytes: int) -> range:
    """Return which of `nbytes` bytes from `start` on can become those from `dst_start` on.

    >>> shareable_blocks(100, 8292, 10_000), shareable_blocks(100, 108, 10_000)
    (range(3996, 8092), range(0, 0))
    """
    if (start - dst_start) % BLOCK:
        return range(0)
    head = min(-start % BLOCK, nbytes)
    return range(head, head + (nbytes - head) // BLOCK * BLOCK)


def share_blocks(source: Position, target: Position, nbytes: int) -> bool:
    """Let a file have whole blocks of another as its own; tell whether the file system does.

    Whatever the reason if not, a copy may still succeed, and says what is wrong if it fails too.
    """
    (src, _, start), (dst, _, dst_start) = source, target
    try:
        fcntl.ioctl(dst, _FICLONERANGE, struct.pack("qQQQ", src, start, nbytes, dst_start))
    except OSError:
        return False
    return True
