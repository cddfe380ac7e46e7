"""One run in a folder at a time: a lock that tells a live run from a dead one.

The lock is a file that says which process holds it: host, boot id, process id and its start
time. A process of this boot and process namespace is looked up; for any other the file's age
counts, which the holder renews every ten seconds: it is waited for until it does, or is dead.

Of two that come at once, one takes its turn after the other. Where nodes' caches are not coherent,
other nodes may not see an flock, nor that a file was just replaced: there the turn is a folder
(made by one of two on JuiceFS 1.4 and SeaweedFS 4.48, where a file may be created by both), and
what is left of a dead run is read again after a while.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rankxform.errors import FormatError, StorageError, raising_storage_errors
from rankxform.storage.identity import is_coherent
from rankxform.storage.posix import (
    PROBE,
    claim_folders,
    make_folder,
    name_in_folder,
    nameless_file,
    random_hex,
    remove_if_possible,
    write_atomically,
)
from rankxform.values import decode_json

HEARTBEAT_SECONDS = 10.0
DEAD_AFTER_SECONDS = 60.0
_GUARD_SECONDS = 10.0
_CACHED_SECONDS = 2.0
"""How long a node may see a file that another one has replaced: JuiceFS shows it for one."""
_LOOK_SECONDS = 1.0
_TURN, _MOST_NAME = "lock.turn", 120
FOREVER = float("inf")
_NO_LOCK = FileNotFoundError, NotADirectoryError, IsADirectoryError

_held: set[str] = set()
"""Tokens of the locks that this process holds, or waits for: one that could not be removed is not
held."""


_JOIN_SECONDS = 2.0
"""How long a renewal that is under way is waited for."""
_WORKS = {"folder": "works on this folder", "address": "works on this address"}


def say_line(line: str) -> None:
    os.write(2, f"rankxform: {line}\n".encode())


class RunLock(ABC):
    """Holds a place until it is released, or this process ends."""

    def __init__(
        self, path: str, place: str, say: Callable[[str], None] = say_line, kind: str = "folder"
    ) -> None:
        """Take the lock `path` of a place. Raises StorageError where a live run has it.

        say: tells people what is waited for, if a run elsewhere may be dead.
        """
        self._mine = {**this_process(), "token": random_hex(8)}
        self._ended = threading.Event()
        # A holder that was watched for as long as a dead one is silent, whatever clocks say.
        self._silent: tuple[Any, float] | None = None
        _held.add(self._mine["token"])
        first: tuple[Any, float] | None = None
        began = time.monotonic()
        try:
            while (lock_state := self._take_if_free()) is not None:
                holder, seconds, renewed = lock_state
                name = f"process {holder.get('pid')} on {holder.get('host')}"[:_MOST_NAME]
                if seconds == FOREVER or (first is not None and first != (holder, renewed)):
                    raise StorageError(
                        f"{name} {_WORKS[kind]}",
                        "wait for it",
                        f"choose another {kind} (if that run is gone, {path} is let go after "
                        f"{DEAD_AFTER_SECONDS:.0f} s)",
                        where=place,
                    )
                if first is None:
                    began, seconds = time.monotonic(), min(seconds, DEAD_AFTER_SECONDS)
                    say(
                        f"{place}: {name} worked on this {kind}; if nothing is heard of it in "
                        f"{seconds:.0f} s, this run goes on there"
                    )
                    first = holder, renewed
                seconds = min(seconds, DEAD_AFTER_SECONDS - (time.monotonic() - began))
                if seconds <= 0:
                    self._silent = first
                time.sleep(max(0.0, min(_LOOK_SECONDS, seconds)))
        except BaseException:  # what was written of it is nobody's
            _held.discard(self._mine["token"])
            raise
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @abstractmethod
    def _take_if_free(self) -> tuple[Mapping[str, Any], float, float] | None:
        """Take the lock if nobody has it, and return None.

        Or else return the holder, the seconds after which it counts as dead, and when it last
        renewed the lock.
        """

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError, StorageError):
                self._renew()

    @abstractmethod
    def _renew(self) -> None:
        """Say that this process lives."""

    @abstractmethod
    def check(self) -> None:
        """Raise StorageError where another run has taken the lock, as after a long suspension."""

    def release(self) -> None:
        """Let go, and leave nothing."""
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)
        _held.discard(self._mine["token"])
        self._remove()

    @abstractmethod
    def _remove(self) -> None:
        """Remove the lock, unless another run has taken it."""


class FolderLock(RunLock):
    """Holds a folder."""

    def __init__(self, path: Path, say: Callable[[str], None] = say_line) -> None:
        """Take the lock `path`. Raises StorageError where a live run has it."""
        self._path = path
        try:
            super().__init__(str(path), str(path.parent.parent), say)
        except BaseException:
            claim_folders(path.parent.parent, None)
            raise

    def _take_if_free(self) -> tuple[dict[str, Any], float, float] | None:
        with taking_turns(self._path):
            holder, settled = _read(self._path), is_coherent(self._path)
            while holder is not None:
                seconds, renewed = _life(holder, self._path)
                if seconds > 0 and (holder, renewed) != self._silent:
                    return holder, seconds, renewed
                if settled:
                    break
                time.sleep(_CACHED_SECONDS)
                earlier_holder, holder = holder, _read(self._path)
                settled = holder == earlier_holder
            write_atomically(self._path, json.dumps(self._mine).encode(), durable=False)
            return None

    def _renew(self) -> None:
        with name_in_folder(self._path) as (name, folder):
            os.utime(name, dir_fd=folder)

    def check(self) -> None:
        if _read(self._path) != self._mine:
            raise StorageError(
                "another run has taken this folder over; this one stops", where=self._path
            )

    def _remove(self) -> None:
        """Remove the lock's folder too, where nothing else is in it."""
        for turn in (taking_turns(self._path), nullcontext()):  # without, rather than not at all
            with suppress(StorageError), turn:
                if _read(self._path) in (self._mine, None):
                    remove_if_possible(self._path)
                break
        claim_folders(self._path.parent.parent, None)


def this_process() -> dict[str, Any]:
    return {
        "host": os.uname().nodename,
        "boot": boot_id(),
        "namespace": _link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "start": _start_time(os.getpid()),
    }


def boot_id() -> str:
    """Return what is new each time that the machine starts."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""


def _start_time(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a lock says; None where there is none, or something else. Raises StorageError
    where it cannot be read, which does not say that nobody has it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with raising_storage_errors(path, "read"), suppress(*_NO_LOCK, FormatError):
        with name_in_folder(path) as (name, folder):
            try:
                fd = os.open(name, flags | os.O_NONBLOCK, dir_fd=folder)  # it may be a pipe
            except BlockingIOError:  # another has a lease on it, as NFS servers have
                fd = os.open(name, flags, dir_fd=folder)
        with open(fd, "rb") as file:
            holder = decode_json(file.read() or b"")
        return holder if isinstance(holder, dict) else None
    return None


def is_held(path: Path) -> bool:
    """Tell whether a live run has a lock, by this node's clock; nothing is written."""
    holder = _read(path)
    return holder is not None and _life(holder, path, lambda folder: time.time())[0] > 0


def is_alive_here(holder: Mapping[str, Any]) -> bool | None:
    """Tell whether the holder of a lock lives; None where it is no process of this machine."""
    me = this_process()
    if any(holder.get(key) != me[key] or not me[key] for key in ("boot", "namespace")):
        return None
    pid, start = holder.get("pid"), holder.get("start")
    if (pid, start) == (me["pid"], me["start"]):
        return str(holder.get("token")) in _held
    return isinstance(pid, int) and start is not None and _start_time(pid) == start


def _life(
    holder: Mapping[str, Any], path: Path, clock: Callable[[Path], float] | None = None
) -> tuple[float, float]:
    """Return after how many seconds the holder of a lock is dead, and when it renewed the lock."""
    alive = is_alive_here(holder)
    if alive is not None:
        return (FOREVER if alive else 0.0), 0.0
    try:
        renewed = path.stat().st_mtime
    except OSError:
        return 0.0, 0.0
    now = (clock or _now)(path.parent)
    return max(0.0, DEAD_AFTER_SECONDS - (now - renewed)), renewed


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps the folder's files."""
    with suppress(OSError, StorageError), nameless_file(folder) as fd:
        return os.fstat(fd).st_mtime
    return time.time()


def is_of_lock(path: Path) -> bool:
    """Tell whether a file in a lock's folder belongs to the lock."""
    return path.name in ("lock", "lock.guard", _TURN) or path.name.startswith(PROBE)


@contextmanager
def taking_turns(path: Path) -> Iterator[None]:
    """Keep others from checking and taking the lock at the same moment, where that is possible.

    Makes the lock's folder; on leaving removes it again where nothing is in it.
    """
    claim_folders(path.parent.parent, [path.parent])
    guard = path.with_name(path.name + ".guard")
    deadline = time.monotonic() + _GUARD_SECONDS
    fd = _hold(guard, deadline)
    try:
        yield
    finally:
        with suppress(OSError):
            present_files = list(guard.parent.iterdir())
            if path not in present_files and all(map(is_of_lock, present_files)):
                # The guard last, and once: when it is gone another run makes its own.
                for lock_file in (*(file for file in present_files if file != guard), guard):
                    remove_if_possible(lock_file)  # of the turn, which is a folder, nothing comes
        with suppress(OSError):
            guard.with_name(_TURN).rmdir()
        with suppress(OSError):
            guard.parent.rmdir()  # unless there is something in it
        with suppress(OSError):
            os.close(fd)
        with suppress(OSError):  # file systems that keep what is open keep its folder, too
            guard.parent.rmdir()


def _hold(guard: Path, deadline: float) -> int:
    """Return a descriptor of the file `guard`, locked if that succeeds before `deadline`."""
    while True:
        make_folder(guard.parent)
        try:
            with name_in_folder(guard) as (name, folder):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(name, flags, 0o666, dir_fd=folder)
        except FileNotFoundError as error:  # the folder was removed in between
            if time.monotonic() > deadline:
                raise StorageError.of(error, guard, "open") from error
            time.sleep(0.01)
            continue
        except OSError as error:
            raise StorageError.of(error, guard, "open") from error
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # no such locks here; the lock's own content has to do
                break
        with suppress(OSError):
            ours = os.path.samestat(os.fstat(fd), os.stat(guard)) and _turn(guard, deadline)
            if ours or time.monotonic() > deadline:
                return fd
        os.close(fd)  # removed by the one that had it


def _turn(guard: Path, deadline: float) -> bool:
    """Take this node's turn where an flock may be its own alone; tell whether it is.

    A turn that nobody ends by `deadline` is that of a dead run.
    """
    if is_coherent(guard):
        return True
    while time.monotonic() < deadline:
        try:
            guard.with_name(_TURN).mkdir()
            return True
        except FileExistsError:
            time.sleep(0.01)
        except FileNotFoundError:
            return False
        except OSError:  # no folder can be made: nor can the lock be
            return True
    return False
