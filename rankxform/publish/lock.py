"""One run in a folder at a time: a lock that tells a live run from a dead one.

The lock is a file that says which process holds it: host, boot id, process id and its start
time. A process of this boot and process namespace is looked up; for any other the file's age
counts, which the holder renews every ten seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rankxform.errors import StorageError
from rankxform.storage.posix import create, make_folder, random_hex, remove, write_small

HEARTBEAT_SECONDS = 10.0
DEAD_AFTER_SECONDS = 60.0
_GUARD_SECONDS = 10.0
_CLOCK = "clock-"

_held: set[str] = set()
"""Tokens of the locks that this process holds: one that could not be removed is not held."""


class Lock:
    """Holds a folder until it is released, or this process ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock `path`. Raises StorageError where a live run has it."""
        self._path = path
        self._mine = {**_this_process(), "token": random_hex(8)}
        self._ended = threading.Event()
        with _guarded(path):
            holder = _read(path)
            if holder is not None and _alive(holder, path):
                raise StorageError(
                    f"{path.parent.parent}: process {holder.get('pid')} on {holder.get('host')} "
                    "works on this folder; wait for it, or choose another folder "
                    f"(if that run is gone, {path} is let go after {DEAD_AFTER_SECONDS:.0f} s)"
                )
            write_small(path, json.dumps(self._mine).encode(), durable=False)
            _held.add(self._mine["token"])
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)

    def check(self) -> None:
        """Raise StorageError where another run has taken the lock, as after a long suspension."""
        if _read(self._path) != self._mine:
            raise StorageError(
                f"{self._path}: another run has taken this folder over; this one stops"
            )

    def release(self) -> None:
        """Let go, and remove the lock's folder where nothing else is in it."""
        self._ended.set()
        _held.discard(self._mine["token"])
        try:
            with _guarded(self._path):
                self._remove()
        except StorageError:
            self._remove()  # without the guard, rather than not at all

    def _remove(self) -> None:
        if _read(self._path) in (self._mine, None):  # one that cannot be read is no other's
            remove(self._path)


def _this_process() -> dict[str, Any]:
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
    """Return what a lock says; None where there is none that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else None
    return None


def _alive(holder: Mapping[str, Any], path: Path) -> bool:
    me = _this_process()
    if all(holder.get(key) == me[key] and me[key] for key in ("boot", "namespace")):
        pid, start = holder.get("pid"), holder.get("start")
        if (pid, start) == (me["pid"], me["start"]):
            return holder.get("token") in _held
        return isinstance(pid, int) and start is not None and _start_time(pid) == start
    try:
        return _now(path.parent) - path.stat().st_mtime < DEAD_AFTER_SECONDS
    except OSError:
        return False


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps the folder's files."""
    probe = folder / f"{_CLOCK}{os.uname().nodename}-{os.getpid()}"
    try:
        create(probe)
        return probe.stat().st_mtime
    except (OSError, StorageError):
        return time.time()
    finally:
        remove(probe)


def is_of_lock(path: Path) -> bool:
    """Tell whether a file in a lock's folder belongs to the lock."""
    return path.name in ("lock", "lock.guard") or path.name.startswith(_CLOCK)


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """Keep others from checking and taking the lock at the same moment, where that is possible.

    Makes the lock's folder; on leaving removes it again where nothing is in it.
    """
    guard = path.with_name(path.name + ".guard")
    until = time.monotonic() + _GUARD_SECONDS
    fd = _hold(guard, until)
    try:
        yield
    finally:
        with suppress(OSError):
            there = list(guard.parent.iterdir())
            if path not in there and all(map(is_of_lock, there)):
                for one in (*there, guard):
                    remove(one)
                guard.parent.rmdir()
        with suppress(OSError):
            os.close(fd)


def _hold(guard: Path, until: float) -> int:
    """Return a descriptor of the file `guard`, locked if that succeeds before `until`."""
    while True:
        make_folder(guard.parent)
        try:
            fd = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the folder was removed in between
            continue
        except OSError as error:
            raise StorageError.of(error, guard, "open") from error
        while time.monotonic() < until:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # no such locks here; the lock's own content has to do
                break
        with suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.stat(guard)) or time.monotonic() > until:
                return fd
        os.close(fd)  # removed by the one that had it
