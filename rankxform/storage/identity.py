"""What tells files and folders apart, or that they are the same; this module alone decides.

On one node a file or folder is known by its device and inode, never by its name: links, letters'
case and mounts give it more names. What lies above a folder is found from the folder itself, by
``..``, as the kernel sees it. Above a mount there are other folders than above what it shows: those
of its place; so the same folder in its other mounts is looked at too, and of an overlay the folder
that gets what is written. What a file system in user space mirrors is known to nobody else.

Between hosts device numbers differ, and on a node's own disk inode numbers mean nothing, and two
files may be written within one tick of the clock: so bytes are sampled too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import TypeAlias

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

Inode = tuple[int, int]
"""Device and inode number."""

_MOUNTS = Path("/proc/self/mountinfo")
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_SAMPLES, SAMPLE_BYTES = 64, 4096
_FEWEST, _EACH = 12, 512 << 10
"""Samples of a small file, and of how many bytes there is one more. Between neighbours lies less
than a tenth of a file, so that a tenth that was changed in a row is met."""
_STALE_SECONDS = 3600
_SEEN_SECONDS, _PAUSE_SECONDS = 3.0, 0.1


def inode(path: Path) -> Inode | None:
    """Return device and inode of what is there, links followed; None if nothing is."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_same_file(a: Path, b: Path) -> bool:
    """Tell whether two paths lead to one file or folder that is there."""
    return inode(a) is not None and inode(a) == inode(b)


def inodes_of(place: Path, *, with_folders: bool = False) -> set[Inode]:
    """Return what a folder is, and what it is under its other names; nothing if it is not there.

    with_folders: and what each folder in it is that is named by a number, as ranks and steps are,
    through links too.
    """
    folders = [place]
    if with_folders:
        with suppress(OSError), os.scandir(place) as entries:
            folders += [Path(e.path) for e in entries if e.is_dir() and re.search(r"\d", e.name)]
    names = (name for f in folders for name in (str(f), *_other_names(os.path.realpath(f))))
    return {number for name in names if (number := inode(Path(name))) is not None}


def is_below_any(path: Path, folders: Set[Inode]) -> bool:
    """Tell whether `path`, which need not be there, is one of some folders, or below one."""
    waiting, seen = [str(path), os.path.realpath(path)], set[str]()
    while waiting:
        name = waiting.pop()
        while not os.path.isdir(name or "."):
            name = os.path.dirname(name)
        if name in seen:
            continue
        seen.add(name)
        with suppress(OSError):  # it is gone, or those above cannot be searched
            fd, last = os.open(name or ".", _FOLDER), None
            try:
                while (here := os.fstat(fd)[1:3][::-1]) != last:  # the root is above itself
                    if here in folders:
                        return True
                    below, fd = fd, os.open("..", _FOLDER, dir_fd=fd)
                    os.close(below)
                    last = here
            finally:
                os.close(fd)
        real = os.path.realpath(name)
        waiting += _other_names(real)
        mount = _mount_of(real)
        if mount is not None and mount[_POINT] != "/":
            waiting.append(os.path.dirname(mount[_POINT][:-1]))
    return False


_Mount: TypeAlias = "tuple[str, str, str, str, str]"
"""A mounted file system: its device, the folder of it that is shown, where, both ending in "/", its
type, and of an overlay the folder that is written to."""
_POINT, _TYPE = 2, 3


@cache
def _mounts() -> tuple[_Mount, ...]:
    """Return what is mounted, in this order; () where /proc does not tell."""
    mounts = []
    with suppress(OSError):
        for line in _MOUNTS.read_bytes().splitlines():
            fields, _, about = line.partition(b" - ")
            fstype, *_, options = about.split()
            uppers = [o[9:] for o in options.split(b",") if o.startswith(b"upperdir=")]
            # Blanks and ends of lines are octal.
            device, root, point, *others = (
                os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda n: bytes([int(n[1], 8)]), field))
                for field in (*fields.split()[2:5], fstype, b"".join(uppers))
            )
            kind, upper = others
            mounts.append((device, f"{root.rstrip('/')}/", f"{point.rstrip('/')}/", kind, upper))
    return tuple(mounts)


def _mount_of(path: str) -> _Mount | None:
    """Return the mount that a real path is in; None if it is not known."""
    best = None
    for mount in _mounts():
        is_better = best is None or len(mount[_POINT]) >= len(best[_POINT])  # a later one hides
        if is_better and f"{path.rstrip('/')}/".startswith(mount[_POINT]):
            best = mount
    return best


def _other_names(path: str) -> Iterator[str]:
    """Yield the names that a real path has in other mounts, where they lead to the same."""
    mount = _mount_of(path)
    if mount is None:
        return
    device, root, point, _, upper = mount
    below = f"{path.rstrip('/')}/".removeprefix(point)
    if upper and os.path.isdir(upper):  # a container's lies outside of it
        yield os.path.join(upper, below)
    for other_device, other_root, other_point, *_ in _mounts():
        if other_device == device and (root + below).startswith(other_root):
            name = other_point + (root + below).removeprefix(other_root)
            if is_same_file(Path(name), Path(path)):
                yield name


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
    mount = _mount_of(os.path.realpath(path))
    return mount is None or mount[_TYPE].startswith(_NETWORK)


def is_coherent(path: Path) -> bool:
    """Tell whether nodes that have mounted the file system see at once what others write."""
    mount = _mount_of(os.path.realpath(path))
    return mount is not None and mount[_TYPE] in _COHERENT


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
