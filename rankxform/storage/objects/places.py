"""Prefixes of object storage as places: what lies there, and small documents (`storage.store`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from rankxform.errors import CheckpointError, StorageError, UsageError
from rankxform.storage.store import (
    ANY_FOLDER,
    FILE,
    FOLDER,
    LARGEST_DOCUMENT,
    FileVersion,
    HeaderReader,
    Listing,
    Store,
    expression_of,
    is_hidden,
    is_litter,
)
from rankxform.values import blake2b

from .access import Bucket, ObjectAddress, library
from .errors import translated
from .headers import WINDOW, HeaderWindows

_MOST_OBJECTS = 1_000_000
_LEAST_CHUNK, _SHORT_ANSWERS = 64 << 10, 8


class ObjectMeta:
    """What a store says of an object: its size, and a mark that no other content has."""

    def __init__(self, meta: Any) -> None:
        self.size, self.etag = int(meta["size"]), meta.get("e_tag")
        if self.etag and not self.etag.endswith('"'):  # as some stores list it
            self.etag = f'"{self.etag}"'
        self._modified = meta.get("last_modified")

    @property
    def version(self) -> FileVersion:
        """The same whether it was listed or asked for: times differ in their precision."""
        seconds = self._modified.timestamp() if self._modified else 0.0
        return version_of(self.size, self.etag, seconds)


def version_of(size: int, etag: str | None, written: float) -> FileVersion:
    """Return which version of an object has this ETag; of one without, which was written then."""
    if not etag:
        return FileVersion(size, int(written) * 10**9)
    mark = int.from_bytes(blake2b(etag.encode(), digest_size=7).digest(), "big")
    return FileVersion(size, mark, mark)


ObjectHeader = tuple[ObjectMeta | None, bytes]
"""What a store says of an object, None if there is none; and its first bytes."""


def fetch_header(address: str) -> ObjectHeader:
    """Return the header of an object, in one request. Raises StorageError."""
    place = ObjectAddress.of(address)
    client, options = Bucket.of(place).client(patient=True), {"range": (0, WINDOW)}
    with translated("read", address, f" (bytes 0 to {WINDOW - 1})"):
        try:
            answer = library().get(client, place.key, options=options)
            meta, data = ObjectMeta(answer.meta), bytes(answer.bytes())
        except FileNotFoundError:
            return None, b""
        except library().exceptions.GenericError as error:
            if "InvalidRange" not in str(error) and " 416" not in str(error):
                raise
            return look_at(Bucket.of(place), place), b""  # an object without bytes has no range
    return meta, data if len(data) == min(WINDOW, meta.size) else b""


class ObjectPlace(Store):
    """A prefix, or one object. A prefix is listed once, as long as this object lives."""

    def __init__(self, place: str) -> None:
        self._place = place.rstrip("/")
        self._address = ObjectAddress.of(place)
        self._bucket = Bucket.of(self._address)

    @cached_property
    def _objects(self) -> dict[str, ObjectMeta]:
        """What lies below the prefix, by its name there."""
        prefix, client = self._address.key, self._bucket.client(patient=False)
        below, objects = prefix + "/" if prefix else "", dict[str, ObjectMeta]()
        with translated("list", self._place):
            for metas in library().list(client, prefix=prefix or None, chunk_size=1000):
                for meta in metas:
                    objects[meta["path"].removeprefix(below)] = ObjectMeta(meta)
                    self._bucket.listed[meta["path"]] = objects[meta["path"].removeprefix(below)]
                if len(objects) > _MOST_OBJECTS:
                    raise UsageError(
                        f"holds over {_MOST_OBJECTS:,} objects", "name a prefix", where=self._place
                    )
        return dict(sorted(objects.items(), key=lambda pair: pair[0].split("/")))

    @cached_property
    def _itself(self) -> ObjectMeta | None:
        """The object that has the prefix as its name; None if there is none."""
        if not self._address.key:
            return None
        return self._bucket.listed.get(self._address.key) or look_at(self._bucket, self._address)

    def list(self, pattern: str) -> Listing:
        if not self._objects:
            return Listing(self._place, FILE) if self._itself else Listing(self._place)
        names = [name for name in self._objects if name]
        entries = dict.fromkeys(name.partition("/")[0] for name in names)
        shown = tuple(name for name in entries if not is_hidden(name))
        folders = frozenset(first for n in names if (first := n.partition("/")[0]) != n)
        below = pattern.removeprefix(ANY_FOLDER)
        files = dict.fromkeys(_matching(names, below))
        if below != pattern:
            files |= dict.fromkeys(_matching(names, f"*/{below}"))
        return Listing(self._place, FOLDER, tuple(files), shown, folders & {*shown})

    def read(self, name: str, searched: str = "") -> bytes:
        meta = self._meta(name)
        if meta is None:
            raise CheckpointError(f"is not there{searched}", where=self._address_of(name))
        if meta.size > LARGEST_DOCUMENT:
            text = f"has over {LARGEST_DOCUMENT} bytes, and is no index"
            raise CheckpointError(text, where=self._address_of(name))
        return self._fetched(name, meta, 0, meta.size)

    def version(self, name: str) -> FileVersion | None:
        meta = self._meta(name)
        return None if meta is None else meta.version

    def has(self, name: str) -> bool:
        return self._meta(name) is not None

    @contextmanager
    def open(self, name: str) -> Iterator[HeaderReader]:
        if name or self._address.key in self._bucket.listed:
            meta, data = self._meta(name), b""
        else:  # which one request tells, with the first bytes
            meta, data = fetch_header(self._place)
        if meta is None:
            raise CheckpointError("is not there", where=self._address_of(name))
        windows = HeaderWindows(partial(self._fetched, name, meta), meta.size, data)
        yield HeaderReader(windows.read_at, meta.version, windows.expect)

    def _meta(self, name: str) -> ObjectMeta | None:
        if not name:
            return self._itself
        return self._objects.get(name)

    def _address_of(self, name: str) -> str:
        return f"{self._place}/{name}" if name else self._place

    def _fetched(self, name: str, meta: ObjectMeta, offset: int, nbytes: int) -> bytes:
        """Return a range of an object as it was listed. Raises StorageError."""
        key = "/".join(filter(None, (self._address.key, name)))
        data, client = bytearray(nbytes), self._bucket.client(patient=True)
        fill(client, key, self._address_of(name), meta, offset, [np.frombuffer(data, np.uint8)])
        return bytes(data)


def look_at(bucket: Bucket, address: ObjectAddress) -> ObjectMeta | None:
    """Return what the store says of an object; None if there is none. Raises StorageError."""
    with translated("look at", "{}://{}/{}".format(*address)):
        try:
            return ObjectMeta(library().head(bucket.client(patient=True), address.key))
        except FileNotFoundError:
            return None


def fill(
    client: Any, key: str, path: str, meta: ObjectMeta, offset: int, rooms: Sequence[Any]
) -> None:
    """Fill rooms, one after another, with a range of an object that is still what `meta` says.

    Raises StorageError.
    """
    nbytes, filled_bytes, unfilled = sum(map(len, rooms)), 0, deque(rooms)
    part = f" (bytes {offset} to {offset + nbytes - 1})"
    if nbytes <= 0:
        return
    if offset + nbytes > meta.size:
        raise CheckpointError(f"ends at byte {meta.size}{part}", "copy it again", where=path)
    options: dict[str, Any] = {"if_match": meta.etag} if meta.etag else {}
    for _ in range(_SHORT_ANSWERS):  # a whole answer that is too short is no error of obstore's
        options["range"] = (offset + filled_bytes, offset + nbytes)
        with translated("read", path, part):
            answer = library().get(client, key, options=options)
            if answer.meta["size"] != meta.size:
                text = f"was replaced while it was read{part}"
                raise StorageError(text, "the same command again", where=path)
            for chunk in answer.stream(min_chunk_size=_LEAST_CHUNK):
                data = np.frombuffer(chunk, np.uint8)[: nbytes - filled_bytes]
                filled_bytes += len(data)
                while len(data):
                    room = unfilled.popleft()
                    length = min(len(room), len(data))
                    room[:length] = data[:length]
                    data = data[length:]
                    if length < len(room):
                        unfilled.appendleft(room[length:])
        if filled_bytes == nbytes:
            return
    text = f"the answer ended after {filled_bytes} of {nbytes} bytes{part}"
    raise StorageError(text, "the same command again", where=path)


def _matching(names: list[str], pattern: str) -> Iterator[str]:
    """Yield the names that match each part of a pattern."""
    parts = [expression_of(part) for part in pattern.split("/") if part != "."]
    for name in names:
        split = name.split("/")
        if len(split) == len(parts) and all(
            part is not None
            and part.fullmatch(text)
            and (part.pattern.startswith(r"\.") or not is_litter(text))
            for part, text in zip(parts, split)
        ):
            yield name
