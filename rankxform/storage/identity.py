"""What tells files and folders of several nodes apart, or that they are the same."""

# Device and inode, never names, say that two paths are one file: a bind mount or a hard link of the
# source is the source. Between hosts device numbers differ, and on a node's own disk inode numbers
# mean nothing, and two files may be written within one tick of the clock: so bytes are sampled too.

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep

from rankxform.formats.container import ReadAt, Span
from rankxform.transport.team import OnProgress
from rankxform.values import blake2b, dataclass

from .posix import (
    advise,
    blocks,
    create,
    nearest_existing,
    open_for_reading,
    range_reader,
    read_into,
    remove_if_possible,
)
from .store import storage_of, store_at

_NETWORK = ("nfs", "lustre", "gpfs", "ceph", "cifs", "smb", "beegfs", "gluster", "wekafs", "panfs",
            "pvfs", "orangefs", "9p", "virtiofs", "fuse", "afs", "mmfs", "daos")  # fmt: skip
"""Prefixes of the types of file systems that several hosts may have mounted."""

_COHERENT = frozenset(
    ("lustre", "gpfs", "mmfs", "beegfs", "ceph", "fuse.ceph", "ext2", "ext3", "ext4", "xfs",
     "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay", "tmpfs", "ramfs", "rootfs", "gfs2",
     "ocfs2")
)  # fmt: skip
"""Types of file systems on which what one node writes is what another reads at once: local ones,
and those that lock what their nodes cache."""

_MOUNTS = Path("/proc/self/mountinfo")
_SAMPLES, SAMPLE_BYTES = 64, 4096
_FEWEST, _EACH = 12, 512 << 10
"""Samples of a small file, and of how many bytes there is one more. Between neighbours lies less
than a tenth of a file, so that a tenth that was changed in a row is met."""
_STALE_SECONDS = 3600
_SEEN_SECONDS, _PAUSE_SECONDS = 3.0, 0.1


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file or folder of one node from that of another: size, time, inode number.

    On a disk of the node's own the inode number says nothing, and times are accurate to
    milliseconds only; there, a digest of some bytes of the file replaces the inode number.
    """

    size: int
    modified: int
    inode: int | None
    samples: str = ""


def file_identity(path: Path) -> FileIdentity | None:
    """Return what tells a file from another, or None where there is none."""
    try:
        status = path.stat()
        if _is_network(path):
            return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)
        return FileIdentity(status.st_size, status.st_mtime_ns, None, sample_digest(path))
    except OSError:
        return None


def network_folder(path: Path) -> FileIdentity | None:
    """Return what distinguishes a folder on the network from others; None for a local folder."""
    if not path.is_dir() or not _is_network(path):
        return None
    status = path.stat()
    return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)


def _is_network(path: Path) -> bool:
    """Tell whether other hosts may have mounted the file system that `path` is on."""
    return _kind_of(path).startswith(_NETWORK)


def is_coherent(path: Path) -> bool:
    """Tell whether nodes that have mounted the file system see at once what others write."""
    return _kind_of(path) in _COHERENT


def _kind_of(path: Path) -> str:
    """Return the type of the file system that `path` is on, or will be."""
    place, longest, kind = os.path.realpath(path), -1, "nfs"  # without /proc nothing is known
    for point, mounted in _mounts():
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two mounted in one place, the later counts
            longest, kind = len(point), mounted
    return kind


@cache
def _mounts() -> tuple[tuple[str, str], ...]:
    """Return where file systems are mounted, and of which type they are."""
    mounts = []
    with suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape")
            mounts.append((point, after.split()[0]))
    return tuple(mounts)


def sample_digest(path: Path, most: int = _SAMPLES) -> str:
    """Return a digest of a file's size, start and end, and of blocks between them, `most` in all.

    By it a file that was copied is known again, and one that was changed mostly is not.
    """
    with open_for_reading(path) as (fd, status):
        advise(fd, os.POSIX_FADV_RANDOM)  # or a network file system would read much more
        return digest_of_samples(status.st_size, range_reader(fd, path), most)


def sample_at(address: str, most: int = _SAMPLES) -> str:
    """Return the digest of a file's samples, wherever it is, as `sample_digest` does."""
    if storage_of(address).has_folders:
        return sample_digest(Path(address), most)
    with store_at(address).open("") as file:
        return digest_of_samples(file.version.size, file.read_at, most)


def digest_of_samples(size: int, read_at: ReadAt, most: int = _SAMPLES) -> str:
    """Return the digest of a file of so many bytes, as `sample_digest` does."""
    state = blake2b(f"{size}".encode(), digest_size=16)
    for start in sample_starts(size, most):
        state.update(read_at(start, SAMPLE_BYTES))
    return state.hexdigest()


def sample_starts(size: int, most: int = _SAMPLES) -> tuple[int, ...]:
    """Return the bytes at which the samples of a file of so many bytes begin."""
    last = max(0, size - SAMPLE_BYTES)
    count = min(most, max(_FEWEST, size // _EACH))
    places = {last * number // (count - 1) // SAMPLE_BYTES for number in range(count - 1)}
    return (*sorted(place * SAMPLE_BYTES for place in places), last)  # whole pages, and the end


def sampled_bytes(size: int) -> int:
    """Return how many different bytes of a file of so many bytes `sample_digest` looks at.

    >>> sampled_bytes(100), sampled_bytes(300 << 20)
    (100, 262144)
    """
    starts = (*sample_starts(size), size)
    return sum(min(SAMPLE_BYTES, stop - start) for start, stop in pairwise(starts))


def file_digest(path: Path, on_progress: OnProgress = lambda nbytes: None) -> bytes:
    """Return a digest of all bytes of a file."""
    state = blake2b(digest_size=16)
    with open_for_reading(path) as (fd, status):
        for block in blocks(partial(read_into, fd, path), on_progress)([Span(0, status.st_size)]):
            state.update(block)
    return state.digest()


class FolderMarker:
    """An empty file by which nodes find out whether a folder is one for all of them."""

    def __init__(self, folder: Path, token: str, node: int) -> None:
        """Leave one where `folder` is, or will be made."""
        self._folder, self._token = nearest_existing(folder), token
        self._own = self._path(node)
        create(self._own)
        self._remove_stale()

    def _path(self, node: int) -> Path:
        return self._folder / f".rankxform-{self._token}-{node}.part"

    def nodes_with_marker(self, nodes: int) -> tuple[int, ...]:
        """Return the nodes whose markers are here.

        Where caches are not coherent, another's may be seen a moment after it was made.
        """
        until = monotonic() + (0 if is_coherent(self._folder) else _SEEN_SECONDS)
        missing = [*range(nodes)]
        while True:
            missing = [node for node in missing if not self._path(node).exists()]
            if not missing or monotonic() >= until:
                return tuple(sorted({*range(nodes)} - {*missing}))
            sleep(_PAUSE_SECONDS)

    def remove(self) -> None:
        remove_if_possible(self._own)

    def _remove_stale(self) -> None:
        """Remove old markers of runs that were killed; this file system's clock gives their age."""
        with suppress(OSError):
            now = self._own.stat().st_mtime
            for path in self._folder.glob(".rankxform-*.part"):
                if now - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()


def addresses_of_this_host(hosts: Iterable[str], name: str) -> frozenset[str]:
    """Return those of `hosts`, names or addresses, that mean this host, called `name`."""
    return frozenset(h for h in hosts if _short(h) == _short(name) or h == name or _is_local(h))


def _short(host: str) -> str:
    return host if host.replace(".", "").isdigit() else host.split(".")[0]


def _is_local(host: str) -> bool:
    """Return whether an address is this host's: only then a socket can be bound to it."""
    import socket  # milliseconds, for those alone who name hosts

    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as listener:
                listener.bind(address)
                return True
    return False


def group_by_file(identities: Mapping[int, FileIdentity]) -> list[list[int]]:
    """Group nodes whose files are the same. `identities`: node -> identity of its file.

    >>> first, second = FileIdentity(1, 5, 7), FileIdentity(1, 5, 8)
    >>> group_by_file({0: first, 1: first, 2: second})
    [[0, 1], [2]]
    """
    groups: dict[FileIdentity, list[int]] = {}
    for node, identity in identities.items():
        groups.setdefault(identity, []).append(node)
    return list(groups.values())
