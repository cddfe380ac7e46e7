"""Uploads to stores whose uploads in parts obstore does not give: each part is an object meanwhile.

To complete a file is to read its parts and to write it of them, one after another: each byte is
sent twice and fetched once more, and still any process sends any part, nothing has its key before
it is whole, and a run that stopped goes on with the parts that are there. Parts lie beside the
file, below ``.rankxform-parts/NAME/UPLOAD/``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from rankxform.errors import FormatError, StorageError
from rankxform.storage.posix import random_hex
from rankxform.values import decode_json

from .access import Bucket, library
from .errors import translated
from .multipart import ObjectHead, SentPart

_FOLDER, _BEGUN, _CHUNK, _MOST_CHUNKS = ".rankxform-parts", "begun", 8 << 20, 9_000


class PartObjects:
    """Uploads of a bucket (`multipart.Uploads`). All methods raise StorageError."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._label = bucket, f"{bucket.scheme}://{bucket.name}"
        self.seconds = 300.0

    @property
    def _client(self) -> Any:
        return self._bucket.client(patient=self.seconds > 60)

    def begin(self, key: str, notes: Mapping[str, str]) -> str:
        upload = random_hex(8)
        with translated("begin to upload", f"{self._label}/{key}"):
            content = json.dumps(dict(notes)).encode()
            library().put(self._client, f"{_below(key, upload)}/{_BEGUN}", content)
        return upload

    def send(self, key: str, upload: str, number: int, data: Any) -> None:
        part = f"{_below(key, upload)}/{number:05}"
        with translated("upload", f"{self._label}/{key}"):
            library().put(self._client, part, bytes(data), use_multipart=False)

    def complete(self, key: str, upload: str, parts: Mapping[int, SentPart]) -> None:
        below = _below(key, upload)
        notes = self._notes(key, f"{below}/{_BEGUN}")
        nbytes = sum(part.nbytes for part in parts.values())
        options = {"attributes": notes, "buffer_size": max(_CHUNK, -(-nbytes // _MOST_CHUNKS))}
        writing, where = library().open_writer, f"{self._label}/{key}"
        with translated("complete", where), writing(self._client, key, **options) as writer:
            for number in sorted(parts):
                writer.write(self._read(key, f"{below}/{number:05}"))
        self.abort(key, upload)

    def _notes(self, key: str, path: str) -> dict[str, str]:
        """Return what was noted of an upload when it was begun. Raises StorageError."""
        with suppress(FormatError):
            notes = decode_json(self._read(key, path))
            if isinstance(notes, dict) and all(isinstance(text, str) for text in notes.values()):
                return notes
        raise StorageError(
            "is no note of an upload", "remove it, and run again", where=f"{self._label}/{path}"
        )

    def abort(self, key: str, upload: str) -> None:
        paths = sorted(self._listed(key, f"{_below(key, upload)}/"))
        with translated("abandon", f"{self._label}/{key}"):
            for path in paths:
                with suppress(FileNotFoundError):
                    library().delete(self._client, path)

    def parts(self, key: str, upload: str) -> dict[int, SentPart] | None:
        listed = self._listed(key, f"{_below(key, upload)}/")
        names = {path.rpartition("/")[2]: meta for path, meta in listed.items()}
        if _BEGUN not in names:
            return None
        return {
            int(name): SentPart(meta["e_tag"] or "", meta["size"])
            for name, meta in names.items()
            if name.isdecimal()
        }

    def begun(self, prefix: str) -> Iterator[tuple[str, str]]:
        for path in self._listed(prefix, prefix):
            folder, mark, below = path.rpartition(f"{_FOLDER}/")
            if mark and path.endswith(f"/{_BEGUN}"):
                name, _, upload = below.removesuffix(f"/{_BEGUN}").rpartition("/")
                yield folder + name, upload

    def head(self, key: str) -> ObjectHead | None:
        """Return what the store says of an object; its age is by this process's clock."""
        with translated("look at", f"{self._label}/{key}"):
            try:
                answer = library().get(self._client, key, options={"head": True})
            except FileNotFoundError:
                return None
        meta, written = answer.meta, answer.meta["last_modified"].timestamp()
        notes = {str(name): str(text) for name, text in answer.attributes.items()}
        return ObjectHead(meta["size"], meta["e_tag"] or "", notes, written, time.time() - written)

    def close(self) -> None:
        """Connections are obstore's."""

    def _read(self, key: str, path: str) -> bytes:
        with translated("read the parts of", f"{self._label}/{key}"):
            return bytes(library().get(self._client, path).bytes())

    def _listed(self, key: str, prefix: str) -> dict[str, Any]:
        with translated("look for uploads to", f"{self._label}/{key}"):
            pages = library().list(self._client, prefix=prefix or None)
            return {meta["path"]: meta for page in pages for meta in page}


def _below(key: str, upload: str) -> str:
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{_FOLDER}/{name}/{upload}"
