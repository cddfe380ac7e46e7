"""A prefix of object storage that is written to: small objects, and what lies there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from rankxform.errors import StorageError

from .access import OBS, S3, Bucket, ObjectAddress, library
from .errors import translated
from .multipart import Uploads
from .part_objects import PartObjects
from .places import ObjectMeta

_HURRY_SECONDS, _MOST_CHANGES = 4.0, 20


class WritablePrefix:
    """Objects below an address, by their names there. All methods raise StorageError."""

    def __init__(self, address: str, *, patient: bool = True) -> None:
        """patient: whether requests that fail are made again for minutes."""
        self._patient, self.address = patient, address.rstrip("/")
        self._place = ObjectAddress.of(address)
        self._bucket = Bucket.of(self._place)
        self.takes_parts = self._bucket.takes_parts  # else parts are objects meanwhile

    @cached_property
    def uploads(self) -> Uploads | PartObjects:
        """Uploads in parts."""
        return Uploads(self._bucket) if self.takes_parts else PartObjects(self._bucket)

    def hurry(self) -> None:
        """Let requests that fail be made again for seconds alone."""
        self._patient = False
        self.uploads.seconds = _HURRY_SECONDS

    def close(self) -> None:
        """Let go of connections."""
        if "uploads" in vars(self):
            self.uploads.close()
            del self.uploads

    def key(self, name: str) -> str:
        """Return the key of an object."""
        return "/".join(filter(None, (self._place.key, name)))

    def put(self, name: str, data: bytes, notes: Mapping[str, str] | None = None) -> str:
        """Write a small object, in place of one that is there; return its ETag. notes: are kept
        with it, by most stores."""
        with translated("write", f"{self.address}/{name}"):
            return self._put_object(name, data, "overwrite", notes)

    def put_new(self, name: str, data: bytes) -> str | None:
        """Write a small object, unless there is one; return its ETag, or None where there is one.

        Some stores replace it all the same.
        """
        with translated("write", f"{self.address}/{name}"):
            try:
                return self._put_object(name, data, "create")
            except library().exceptions.AlreadyExistsError:
                return None

    def put_instead(self, name: str, data: bytes, etag: str) -> str | None:
        """Write a small object in place of that with this ETag; return the new one's, or None where
        another is there, or none. Some stores replace any."""
        with translated("write", f"{self.address}/{name}"):
            try:
                update = {"e_tag": etag}
                if self._bucket.scheme not in (S3, OBS):  # of which some know it by its number
                    client = self._bucket.client(patient=self._patient)
                    meta = library().head(client, self.key(name))
                    if ObjectMeta(meta).etag != etag:
                        return None
                    update = {mark: meta[mark] for mark in ("e_tag", "version") if meta[mark]}
                return self._put_object(name, data, update)
            except (library().exceptions.PreconditionError, FileNotFoundError):
                return None

    def change(self, name: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Write a small object anew, or remove it, by what it holds (None: there is none), again if
        another did meanwhile. Some stores do not tell."""
        for _ in range(_MOST_CHANGES):
            head, content = self.uploads.head(self.key(name)), self.read(name)
            changed = change(content)
            if changed is None and head is not None:
                if not head.etag or self.put_instead(name, b"{}", head.etag) is not None:
                    self.remove([name])
                    return
                continue
            if changed is None:
                return
            if head is None or not head.etag:
                etag = self.put_new(name, changed) if head is None else self.put(name, changed)
            else:
                etag = self.put_instead(name, changed, head.etag)
            if etag is not None:
                return
        raise StorageError(
            "another run changes it all the time", "the same command again",
            where=f"{self.address}/{name}",
        )  # fmt: skip

    def _put_object(
        self, name: str, data: bytes, mode: object, notes: Mapping[str, str] | None = None
    ) -> str:
        client = self._bucket.client(patient=self._patient)
        self._bucket.writes += 1
        answer = library().put(client, self.key(name), data, mode=mode, attributes=notes)
        return answer["e_tag"] or ""

    def read(self, name: str) -> bytes | None:
        """Return a small object; None if there is none."""
        with translated("read", f"{self.address}/{name}"):
            try:
                client = self._bucket.client(patient=self._patient)
                return bytes(library().get(client, self.key(name)).bytes())
            except FileNotFoundError:
                return None

    def read_ranges(self, name: str, starts: Sequence[int], nbytes: int) -> list[bytes]:
        """Return ranges of so many bytes of an object, or up to its end, several at a time."""
        with translated("read", f"{self.address}/{name}"):
            client = self._bucket.client(patient=self._patient)
            lengths = [nbytes] * len(starts)
            ranges = library().get_ranges(
                client, self.key(name), starts=[*starts], lengths=lengths, coalesce=0
            )
            return [*map(bytes, ranges)]

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, those that are gone already too."""
        keys, client = [*map(self.key, names)], self._bucket.client(patient=self._patient)
        self._bucket.writes += len(keys)
        with translated("remove", self.address):
            if keys and self._bucket.scheme in (S3, OBS):
                library().delete(client, keys)
                return
            for key in keys:
                with suppress(FileNotFoundError):  # which others say of one that is gone
                    library().delete(client, key)

    def objects(self) -> dict[str, ObjectMeta]:
        """Return what lies below the address, by name."""
        below, client = self.key("x").removesuffix("x"), self._bucket.client(patient=False)
        with translated("list", self.address):
            pages = library().list(client, prefix=below or None)
            metas = [meta for page in pages for meta in page]
        return {meta["path"].removeprefix(below): ObjectMeta(meta) for meta in metas}
