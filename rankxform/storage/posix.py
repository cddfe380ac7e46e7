"""Files: positional reads and writes, syncs, renames, and blocks that files share.

Plain POSIX calls: a range is read or written complete, or an error is raised. Nothing is
memory-mapped: a file that shrinks while it is mapped kills the process without a message, but a
short read can be reported.

A file that shares another one's blocks takes neither time nor space. Only whole blocks can be
shared, and only where both files have the bytes at the same place of a block.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from rankxform.errors import CheckpointError, StorageError, raising_storage_errors
from rankxform.formats.container import BLOCK, Blocks, ReadAt, Span
from rankxform.transport.team import OnProgress

Buffer = memoryview
AnyPath = str | Path
"""Told of progress in bytes, often; it may raise to stop."""

SYSCALL_BYTES = 1 << 20
"""Most bytes of one read or write call; larger ones are slow where memory is fragmented."""

_PIPE_SECONDS, _PIPE_BYTES = 10.0, 1 << 20
"""How long a pipe's writer may say nothing; bytes of one read."""

_CACHED_SECONDS, _PAUSE_SECONDS = 3.0, 0.1
"""How long a node may know a folder by what it was before: JuiceFS does for a second."""


def read_bytes(path: Path) -> bytes:
    """Return all bytes of a small file, such as a strategy; of a pipe what its writers say, until
    nothing is heard of them for a while."""
    with (
        raising_storage_errors(path, "read"),
        open(_open_regular(path, takes_pipes=True), "rb", buffering=0) as file,
    ):
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file.readall()
        parts = list[bytes]()
        while select.select([file], [], [], _PIPE_SECONDS)[0]:
            part = file.read(_PIPE_BYTES)
            if not part:
                return b"".join(parts)
            parts.append(part)
        raise TimeoutError(errno.ETIMEDOUT, "nobody writes to this pipe")


def read_own_record(path: Path) -> bytes:
    """Return all bytes of a small file of our own, not through a link. Raises OSError."""
    with open(_open_regular(path, os.O_NOFOLLOW), "rb") as file:
        return file.read()


def _open_regular(path: AnyPath, flags: int = 0, *, takes_pipes: bool = False) -> int:
    """Open a regular file, or a pipe, for reading, and wait for nobody who writes to it. Raises
    OSError."""
    flags |= os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another has a lease on it, as NFS servers have
        fd = os.open(path, flags)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode) and not (takes_pipes and stat.S_ISFIFO(mode)):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file")
    return fd


@contextmanager
def open_for_reading(path: AnyPath) -> Iterator[tuple[int, os.stat_result]]:
    """Open `path`, a file, for reading; yield its descriptor and status."""
    with raising_storage_errors(path, "open"):
        fd = _open_regular(path)
    try:
        with raising_storage_errors(path, "look at"):
            status = os.fstat(fd)
        yield fd, status
    finally:
        _let_go(fd)


@contextmanager
def open_for_writing(path: Path) -> Iterator[int]:
    """Open a file that is there for writing; yield its descriptor."""
    with raising_storage_errors(path, "open"), name_in_folder(path) as (name, folder):
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield fd
    except BaseException:
        _let_go(fd)
        raise
    close(fd, path)


def close(fd: int, path: AnyPath) -> None:
    """Close what was written to; network file systems tell only then that there was no room."""
    with raising_storage_errors(path, "close"):
        os.close(fd)


def _let_go(fd: int) -> None:
    """Close what was only read: nothing can be lost."""
    with suppress(OSError):
        os.close(fd)


def range_reader(fd: int, path: AnyPath) -> ReadAt:
    """Return a `read_at` over an open file, for the formats' header readers."""

    def read_at(offset: int, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            try:
                got = os.pread(fd, nbytes - len(data), offset + len(data))
            except OSError as error:
                raise StorageError.of(error, path, f"read {nbytes} bytes at {offset}") from error
            if not got:
                break
            data = data + got if data else got
        return data

    return read_at


class Descriptors:
    """Open files by path, the least recently used closed when there are too many.

    advice: how they will be read, one of POSIX_FADV_*.
    """

    def __init__(self, flags: int, advice: int = os.POSIX_FADV_NORMAL) -> None:
        self._flags, self._advice = flags | os.O_CLOEXEC, advice
        self._open: OrderedDict[AnyPath, int] = OrderedDict()
        self._most = max(16, _descriptor_limit() // 6)

    def get(self, path: AnyPath) -> int:
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        while len(self._open) >= self._most:
            oldest, fd = self._open.popitem(last=False)
            close(fd, oldest)
        with raising_storage_errors(path, "open"), name_in_folder(path) as (name, folder):
            fd = os.open(name, self._flags, dir_fd=folder)
        if self._advice:
            advise(fd, self._advice)
        self._open[path] = fd
        return fd

    def close(self) -> None:
        """Close all files; raise the error of the first that fails."""
        failures = []
        while self._open:
            path, fd = self._open.popitem()
            try:
                close(fd, path)
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]


FILE_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
"""How many files this process might have open when it started."""


def _descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return soft


def read_into(fd: int, path: AnyPath, offset: int, target: Buffer) -> None:
    """Fill `target` from byte `offset` on. Raises CheckpointError where the file ends before."""
    done, nbytes = 0, len(target)
    while done < nbytes:
        part = target[done : done + SYSCALL_BYTES] if done or nbytes > SYSCALL_BYTES else target
        try:
            got = os.preadv(fd, [part], offset + done)
        except OSError as error:
            raise StorageError.of(
                error, path, f"read {len(part)} bytes at {offset + done}"
            ) from error
        if not got:
            raise CheckpointError(
                f"ends at byte {offset + done}, where its headers place data up to "
                f"{offset + nbytes}; it was changed while it was read",
                where=path,
            )
        done += got


def blocks(
    fill: Callable[[int, Buffer], None], on_progress: OnProgress = lambda nbytes: None
) -> Blocks:
    """Return the bytes of spans of a file, in order, in blocks; `fill` reads from a byte on."""

    def read(spans: Iterable[Span]) -> Iterator[Buffer]:
        block = memoryview(bytearray(SYSCALL_BYTES))
        for span in spans:
            for start in range(0, span.nbytes, SYSCALL_BYTES):
                part = block[: min(SYSCALL_BYTES, span.nbytes - start)]
                fill(span.offset + start, part)
                yield part
                on_progress(0)

    return read


def write_from(fd: int, path: Path, offset: int, *sources: Buffer) -> None:
    """Write all of `sources`, one after another, from byte `offset` on."""
    waiting = [source for source in sources if len(source)]
    while waiting:
        parts, room = [], SYSCALL_BYTES
        for source in waiting:
            parts.append(source[:room])
            room -= len(parts[-1])
            if not room:
                break
        try:
            done = os.pwritev(fd, parts, offset)
        except OSError as error:
            nbytes = sum(map(len, parts))
            raise StorageError.of(error, path, f"write {nbytes} bytes at {offset}") from error
        offset += done
        while waiting and done >= len(waiting[0]):
            done -= len(waiting.pop(0))
        if done:
            waiting[0] = waiting[0][done:]


def start_writing(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing a range to the device.

    POSIX_FADV_DONTNEED starts writing dirty pages, and does not drop them.
    """
    advise(fd, os.POSIX_FADV_DONTNEED, max(0, offset), nbytes)


def advise(fd: int, advice: int, offset: int = 0, nbytes: int = 0) -> None:
    """Tell the kernel what will be done with a range, or, of 0 bytes, with all from `offset` on;
    a hint, so errors do not matter."""
    with suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, advice)


def random_hex(nbytes: int) -> str:
    """Return random bytes, as hexadecimal digits."""
    return os.urandom(nbytes).hex()


def create(path: Path) -> None:
    """Make an empty file that does not share its bytes with anything that had its name.

    Where its folder is there, and yet the file cannot be made in it, another node has removed that
    folder and made it anew: this one sees it in a moment.
    """
    until = monotonic() + _CACHED_SECONDS
    while True:
        try:
            with name_in_folder(path) as (name, folder):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                fd = os.open(name, flags, 0o666, dir_fd=folder)
            break
        except FileNotFoundError as error:
            if not path.parent.is_dir() or monotonic() > until:
                raise StorageError.of(error, path, "create") from error
            sleep(_PAUSE_SECONDS)
        except OSError as error:
            raise StorageError.of(error, path, "create") from error
    close(fd, path)


PROBE = ".rankxform-"
"""How files begin that are made to learn something of a folder."""


@contextmanager
def nameless_file(folder: Path) -> Iterator[int]:
    """Open a file in a folder that nothing is left of, and that has no name where that can be.

    Raises StorageError.
    """
    path = folder / f"{PROBE}{os.uname().nodename}-{os.getpid()}-{random_hex(2)}.part"
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # not every file system has them
        create(path)
        with raising_storage_errors(path, "open"):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        remove_if_possible(path)
    try:
        yield fd
    finally:
        _let_go(fd)
        remove_if_possible(path)  # where what is open cannot be removed


_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_IS_LINK = "is a link, and inside a destination none is followed"

_ROOTS: dict[str, tuple[str, list[int]]] = {}
"""Of each folder that was claimed, by its path: its destination; then whether that is to stay the
folder that it is, and if so a descriptor of it, once something was done there."""

# Somebody may put a link in the place of such a folder while a run is at work, or another folder in
# that of the destination. What is opened, made, renamed or removed there is named relative to its
# folder, which is opened from the destination on, name by name. The destination itself may be a
# link: its user named it. Before a run has its lock, others may remove the destination and make it
# anew, and a node may see an old one for a moment.


def claim_folders(root: Path, folders: Iterable[Path] | None, *, keeps_root: bool = False) -> None:
    """Let no call follow a link on the way from `root` to what lies in it, and in some folders of
    it; None: from now on as ever.

    keeps_root: whether the folder that `root` is then is the only one from now on. Raises
    StorageError for a folder that is a link.
    """
    claimed = _ROOTS.get(str(root), ("", []))
    kept = claimed[1] if claimed[0] == str(root) else []
    if folders is None:
        for name in [name for name, (place, _) in list(_ROOTS.items()) if place == str(root)]:
            _ROOTS.pop(name, None)
        for fd in kept[1:]:
            _let_go(fd)
        return
    kept[:1] = [int(keeps_root or bool(kept and kept[0]))]
    seen = {root}
    _ROOTS[str(root)] = str(root), kept
    for folder in folders:
        while folder not in seen and root in folder.parents:
            if folder.is_symlink():
                raise StorageError(_IS_LINK, "remove it", "choose another folder", where=folder)
            _ROOTS[str(folder)] = str(root), kept
            seen.add(folder)
            folder = folder.parent


@contextmanager
def name_in_folder(path: AnyPath) -> Iterator[tuple[AnyPath, int | None]]:
    """Yield a name of `path`, and the descriptor of the folder that it is relative to, or None.

    Raises OSError where its folder is gone, or another now.
    """
    folder, name = os.path.split(path)
    claimed = _ROOTS.get(folder)
    if claimed is None:
        yield path, None
        return
    root, kept = claimed
    fds = [os.open(root, _FOLDER)]
    try:
        if len(kept) > 1 and not os.path.samestat(os.fstat(fds[0]), os.fstat(kept[1])):
            raise OSError(errno.ESTALE, f"{root} is another folder now", folder)
        below = os.path.relpath(folder, root)
        for part in below.split(os.sep) if below != "." else ():
            try:
                fds.append(os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=fds[-1]))
            except NotADirectoryError as error:
                text = f"its folder {_IS_LINK}, or it is no folder"
                raise OSError(errno.ELOOP, text, folder) from error
        yield name, fds[-1]
        if kept == [1]:
            kept.append(os.dup(fds[0]))
    finally:
        for fd in fds:
            _let_go(fd)


def remove_if_possible(path: Path) -> None:
    """Remove an unfinished file, if it is there and can be removed."""
    with suppress(OSError), name_in_folder(path) as (name, folder):
        os.unlink(name, dir_fd=folder)


def nearest_existing(folder: Path) -> Path:
    """Return `folder`, or the nearest one above it that is there."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free where `folder` is, or will be."""
    with raising_storage_errors(folder, "ask how much is free in"):
        room = os.statvfs(nearest_existing(folder))
    return room.f_bavail * room.f_frsize


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they are not there; also while other runs remove it."""
    with raising_storage_errors(path, "make the folder"):
        for tries_left in reversed(range(10)):
            try:
                path.mkdir(parents=True, exist_ok=True)
                break
            except FileExistsError:  # no folder, or one that was removed before mkdir looked again
                if not tries_left:
                    raise


def fsync(fd: int, path: Path) -> None:
    """Wait until an open file's contents are on the device."""
    with raising_storage_errors(path, "sync"):
        os.fsync(fd)


def suggest_similar_path(path: Path, is_fit: Callable[[Path], bool]) -> list[str]:
    """Return, as something to try, the path beside one that is not there whose name is nearest.

    is_fit: tells whether what lies there may be meant.
    """
    from difflib import get_close_matches

    with suppress(OSError):
        names = [entry.name for entry in path.parent.iterdir()]
        paths = map(path.with_name, get_close_matches(path.name, names, 3, _LIKENESS))
        near_paths = (near for near in paths if near.name[0] == path.name[0] and is_fit(near))
        return [f"{near}, which is there" for near in near_paths][:1]
    return []


_LIKENESS = 0.75


def preallocate(path: Path, nbytes: int) -> None:
    """Take room on the device for the first bytes of a file that is there, if that can be done.

    Those that nobody writes are zeros.
    """
    with suppress(OSError, StorageError, AttributeError), open_for_writing(path) as fd:
        os.posix_fallocate(fd, 0, nbytes)


def truncate(path: Path, nbytes: int) -> None:
    """Let a file end after so many bytes."""
    with raising_storage_errors(path, "truncate"), open_for_writing(path) as fd:
        os.ftruncate(fd, nbytes)


def sync(path: Path) -> None:
    """Wait until a file's, or a folder's, contents are on the device."""
    try:
        with name_in_folder(path) as (name, folder):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.fsync(fd)
        finally:
            _let_go(fd)
    except OSError as error:
        raise StorageError.of(error, path, "sync") from error


def publish_file(part: Path, final: Path, *, durable: bool) -> None:
    """Give a complete file its final name, in one step."""
    with (
        raising_storage_errors(final, "rename the finished file to this name"),
        name_in_folder(part) as (old, old_folder),
        name_in_folder(final) as (new, folder),
    ):
        os.replace(old, new, src_dir_fd=old_folder, dst_dir_fd=folder)
    if durable:
        sync(final.parent)


def unique_name(path: Path) -> Path:
    """Return a name beside `path` that no other process has."""
    return path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}")


def write_atomically(
    path: Path, data: bytes | Iterable[bytes], *, durable: bool = True, shared: bool = False
) -> None:
    """Write a small file under its final name, complete or not at all.

    data: the bytes, or parts of them, one after another. shared: several processes may write it
    at the same moment.
    """
    make_folder(path.parent)
    beside = unique_name(path) if shared else path
    part = beside.with_name(beside.name + ".part")
    try:
        create(part)
        with open_for_writing(part) as fd:
            offset = 0
            for block in (data,) if isinstance(data, bytes) else data:
                write_from(fd, part, offset, memoryview(block))
                offset += len(block)
        if durable:
            sync(part)
        publish_file(part, path, durable=durable)
    except BaseException as error:
        remove_if_possible(part)
        if isinstance(error, StorageError):
            error.say(error.parts._replace(where=str(path)))  # not a name that nobody has seen
        raise


# Hence a safetensors header of a file of a megabyte or more is padded until content begins where
# the source's does. With --verify nothing is shared, because that sums what is in memory.

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
