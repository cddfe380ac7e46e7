"""A kind of storage that is no file system: files in memory, behind a latency."""

from __future__ import annotations

import re
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rankxform.errors import StorageError
from rankxform.storage.store import (
    FOLDER,
    NOTHING,
    FileVersion,
    HeaderReader,
    Listing,
    RangeReader,
    Store,
    expression_of,
)

SCHEME = "mem://"


class Memory:
    """Files by their address, each a buffer in the memory of every process.

    latency: seconds that every read takes; ahead: how many reads are in flight at most. most: the
    bytes that were announced and not yet read, at their highest.
    """

    def __init__(self, latency=0.0, ahead=64):
        self.files, self.latency, self.ahead = {}, latency, ahead
        self.most = self.announced = self.direct = 0

    def add(self, place, folder):
        """Take all files of a folder."""
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                self.files[f"{SCHEME}{place}/{name}"] = path.read_bytes()

    def store(self, place):
        return MemoryStore(self, place)

    def ranges(self):
        return MemoryRanges(self)

    has_versions = False
    has_folders = False
    is_shared = True
    read_each = None
    buffers = 64 << 20

    def is_reached(self, address):
        return True

    def get(self, path):
        if path not in self.files:
            raise StorageError(f"{path}: there is no such object")
        return self.files[path]


class MemoryStore(Store):
    def __init__(self, memory, place):
        self._memory, self._place = memory, place

    def _address(self, name):
        return f"{self._place}/{name}" if name else self._place

    def list(self, pattern):
        parts = [expression_of(part) for part in pattern.split("/")]
        below = self._address("") + "/"
        there = sorted(n.removeprefix(below) for n in self._memory.files if n.startswith(below))
        names = [
            name
            for name in there
            if len(split := name.split("/")) == len(parts)
            and all(map(re.Pattern.fullmatch, parts, split))
        ]
        entries = dict.fromkeys(name.split("/")[0] for name in there)
        folders = {name.split("/")[0] for name in there if "/" in name}
        kind = FOLDER if there else NOTHING
        return Listing(self._place, kind, tuple(names), tuple(entries), frozenset(folders))

    def read(self, name, searched=""):
        return bytes(self._memory.get(self._address(name)))

    def has(self, name):
        return self._address(name) in self._memory.files

    def version(self, name):
        return FileVersion(len(self.read(name)), 1) if self.has(name) else None

    @contextmanager
    def open(self, name):
        data = self._memory.get(self._address(name))
        yield HeaderReader(
            lambda offset, nbytes: data[offset : offset + nbytes], FileVersion(len(data), 1)
        )


class MemoryRanges(RangeReader):
    """Reads what is announced in threads, one for each read in flight."""

    def __init__(self, memory):
        self._memory, self.ahead = memory, memory.ahead
        self._threads = ThreadPoolExecutor(max(1, self.ahead))
        self._begun: deque[tuple[object, Future]] = deque()
        self._waiting = 0

    def version(self, path, sparse=False):
        return FileVersion(len(self._memory.get(path)), 1)

    def version_now(self, path):
        return FileVersion(len(self._memory.files[path]), 1) if path in self._memory.files else None

    def _get(self, path, offset, nbytes):
        time.sleep(self._memory.latency)
        found = memoryview(self._memory.get(path))[offset : offset + nbytes]
        if len(found) < nbytes:
            raise StorageError(f"{path}: ends at byte {offset + len(found)}")
        return bytearray(found)

    def announce(self, path, offset, nbytes):
        memory, key = self._memory, (path, offset, nbytes)
        self._begun.append((key, self._threads.submit(self._get, *key)))
        self._waiting += nbytes
        memory.announced += 1
        memory.most = max(memory.most, self._waiting)
        assert len(self._begun) <= self.ahead

    def read(self, path, offset, room, sparse=False):
        key = path, offset, len(room)
        if any(key == one for one, _ in self._begun):
            while True:
                one, future = self._begun.popleft()
                self._waiting -= one[2]
                if one == key:
                    break
            room[:] = future.result()
        else:
            self._memory.direct += 1
            room[:] = self._get(*key)

    def close(self):
        self._threads.shutdown(cancel_futures=True)
