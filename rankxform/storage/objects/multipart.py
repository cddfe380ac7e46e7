"""Uploads in parts, by several processes: the calls of S3 that obstore lacks.

An object that is uploaded in parts is made by any number of processes: one begins the upload, all
send parts in any order, one completes it, and before that no reader finds it. Each thread has a
connection of its own. Requests are signed without their bodies; a part's bytes are checked by the
CRC-32, or MD5 where the store knows no other, that goes with them.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import re
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from rankxform.errors import StorageError
from rankxform.values import NamedTuple

from .access import Bucket, UploadAccess
from .errors import refused

_UNSIGNED = "UNSIGNED-PAYLOAD"
_SAFE = "-_.~"
_SECONDS, _ATTEMPTS, _FIRST_PAUSE, _LONGEST_PAUSE = 300.0, 12, 0.5, 15.0
_SILENCE = 60.0
"""Seconds in which a request must succeed, how often it is made, how long is waited at first and at
most; and how long a server may say nothing."""
_AGAIN = (408, 429, 500, 502, 503, 504)
_PART_OF_META = "x-amz-meta-"
_CHUNK = 1 << 20


class SentPart(NamedTuple):
    """A part that the store has: what it calls its content, and its bytes."""

    etag: str
    nbytes: int


class ObjectHead(NamedTuple):
    """What a store says of an object: its size, what it calls its content, what was noted with it,
    when it was written, and how many seconds ago that is, by the store's clock."""

    size: int
    etag: str
    notes: Mapping[str, str]
    written: float
    age: float


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The store's word for what is wrong; "" if nothing is."""
        match = re.search(rb"<Code>([A-Za-z0-9]{1,60})</Code>", self.body[:4096])
        return match[1].decode() if match else ""


class Uploads:
    """Uploads into one bucket. seconds: for which a request that fails is made again."""

    def __init__(self, bucket: Bucket) -> None:
        self._access: UploadAccess = bucket.upload_access()
        self._label = f"{bucket.scheme}://{bucket.name}"
        self.seconds = _SECONDS
        self._local, self._is_closed = threading.local(), False
        self._connections: list[HTTPConnection] = []

    def begin(self, key: str, notes: Mapping[str, str]) -> str:
        """Begin an upload; return its id. notes: are kept with the object."""
        headers = {f"{_PART_OF_META}{name}": text for name, text in notes.items()}
        if self._access.has_crc:
            # Else the parts' own were asked for at the end, and not all stores list them.
            headers |= {
                "x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"
            }  # fmt: skip
        answer = self._call("begin to upload", "POST", key, {"uploads": ""}, headers)
        match = re.search(rb"<UploadId>([^<]+)</UploadId>", answer.body)
        if match is None:
            raise self._refused("begin to upload", key, answer)
        return _text(self._parsed(key, match[0]))

    def send(self, key: str, upload: str, number: int, data: Any) -> None:
        """Send a part: its number counts from 1, in the order of the object's bytes."""
        if self._access.has_crc:
            headers = {
                "x-amz-checksum-crc32": b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
            }
        else:
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            headers = {"content-md5": b64encode(digest).decode()}
        query = {"partNumber": str(number), "uploadId": upload}
        self._call("upload", "PUT", key, query, headers, data)

    def complete(self, key: str, upload: str, parts: Mapping[int, SentPart]) -> None:
        """Make the object of its parts. One that was made already stays."""
        lines = []
        for number, part in sorted(parts.items()):
            etag = f"<ETag>{escape(part.etag)}</ETag>"
            lines.append(f"<Part><PartNumber>{number}</PartNumber>{etag}</Part>")
        document = f"<CompleteMultipartUpload>{''.join(lines)}</CompleteMultipartUpload>"
        query = {"uploadId": upload}
        self._call("complete", "POST", key, query, {}, document.encode(), may_be_gone=True)

    def abort(self, key: str, upload: str) -> None:
        """Let the store forget an upload, and what was sent of it."""
        self._call("abandon", "DELETE", key, {"uploadId": upload}, may_be_gone=True)

    def parts(self, key: str, upload: str) -> dict[int, SentPart] | None:
        """Return the parts that the store has, by number; None if there is no such upload."""
        parts_by_number = dict[int, SentPart]()
        query = {"uploadId": upload}
        while True:
            answer = self._call("look at", "GET", key, query, may_be_gone=True)
            if answer.status == 404:
                return None
            document = self._parsed(key, answer.body)
            for part in document.iterfind("{*}Part"):
                sent_part = SentPart(_text(part, "ETag"), int(_text(part, "Size") or 0))
                parts_by_number[int(_text(part, "PartNumber"))] = sent_part
            if _text(document, "IsTruncated") != "true":
                return parts_by_number
            query["part-number-marker"] = _text(document, "NextPartNumberMarker")

    def begun(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield the key and the id of each upload below a prefix that was not completed."""
        query = {"uploads": "", "prefix": prefix}
        while True:
            answer = self._call("look for uploads to", "GET", "", query)
            document = self._parsed(prefix, answer.body)
            for upload in document.iterfind("{*}Upload"):
                yield _text(upload, "Key"), _text(upload, "UploadId")
            if _text(document, "IsTruncated") != "true":
                return
            query["key-marker"] = _text(document, "NextKeyMarker")
            query["upload-id-marker"] = _text(document, "NextUploadIdMarker")

    def head(self, key: str) -> ObjectHead | None:
        """Return what the store says of an object; None if there is none."""
        answer = self._call("look at", "HEAD", key, may_be_gone=True)
        if answer.status == 404:
            return None
        headers = answer.headers
        notes = {
            name.removeprefix(_PART_OF_META): text
            for name, text in headers.items()
            if name.startswith(_PART_OF_META)
        }
        now, written = (_seconds(headers.get(name, "")) for name in ("date", "last-modified"))
        age = now - written if now and written else 0.0
        size = int(headers["content-length"])
        return ObjectHead(size, headers.get("etag", ""), notes, written, age)

    def _parsed(self, key: str, data: bytes) -> ElementTree.Element:
        try:
            return ElementTree.fromstring(data)
        except ElementTree.ParseError:
            raise refused("look at", f"{self._label}/{key}", "", "its answer is no XML") from None

    def close(self) -> None:
        """Let go of all connections; requests that are under way end with an error."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()

    # -- requests -----------------------------------------------------------------------------

    def _call(
        self,
        action: str,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = b"",
        *,
        may_be_gone: bool = False,
    ) -> _Answer:
        """Make a request until it succeeds, or time is up. Raises StorageError.

        may_be_gone: whether an answer that there is nothing is one.
        """
        began, pause, answer, fault = time.monotonic(), _FIRST_PAUSE, None, ""
        for _ in range(_ATTEMPTS):
            try:
                answer = self._once(method, key, query or {}, headers or {}, body)
                is_error = answer.status >= 300 or bool(answer.code)  # one of 200 may be an error
                if not is_error or (may_be_gone and answer.status == 404):
                    return answer
                if answer.status not in (200, *_AGAIN) and answer.code != "RequestTimeout":
                    break
            except ValueError:  # it has the header's value, which may be a key
                raise refused(action, f"{self._label}/{key}", "", "its keys are no text") from None
            except (OSError, HTTPException) as error:
                answer, fault = None, f"{error or type(error).__name__}"
                connection, self._local.connection = self._connection(), None
                self._connections.remove(connection)
                connection.close()
            if self._is_closed or time.monotonic() - began + pause > self.seconds:
                break
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise self._refused(action, key, answer, fault)

    def _refused(
        self, action: str, key: str, answer: _Answer | None, fault: str = ""
    ) -> StorageError:
        status = "" if answer is None else f"HTTP {answer.status}"
        code = "" if answer is None else answer.code
        return refused(action, f"{self._label}/{key}".rstrip("/"), code, status or fault)

    def _once(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: Any
    ) -> _Answer:
        path = quote(f"{self._access.base}/{key}", safe="/" + _SAFE)
        pairs = (f"{quote(n, safe=_SAFE)}={quote(t, safe=_SAFE)}" for n, t in sorted(query.items()))
        text = "&".join(pairs)
        signed = signed_headers(self._access, method, path, text, headers)
        connection = self._connection()
        connection.putrequest(
            method, f"{path}?{text}" if text else path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in signed.items():
            connection.putheader(name, value)
        if method in ("PUT", "POST"):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        view = memoryview(body)
        for start in range(0, len(view), _CHUNK):
            connection.send(view[start : start + _CHUNK])
        response = connection.getresponse()
        answer_headers = {name.lower(): value for name, value in response.getheaders()}
        return _Answer(response.status, answer_headers, response.read())

    def _connection(self) -> HTTPConnection:
        connection: HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            parts = urlsplit(self._access.endpoint)
            kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            connection = self._local.connection = kind(parts.netloc, timeout=_SILENCE)
            self._connections.append(connection)
        return connection


def signed_headers(
    access: UploadAccess, method: str, path: str, query: str, headers: Mapping[str, str]
) -> dict[str, str]:
    """Return a request's headers with its signature (AWS Signature Version 4, body unsigned)."""
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    signed = {"host": urlsplit(access.endpoint).netloc, **headers}
    if not access.key:
        return signed
    signed |= {"x-amz-content-sha256": _UNSIGNED, "x-amz-date": now}
    if access.token:
        signed["x-amz-security-token"] = access.token
    names = sorted(signed)
    lines = [f"{name}:{signed[name].strip()}" for name in names]
    canonical = "\n".join([method, path, query, *lines, "", ";".join(names), _UNSIGNED])
    scope = f"{now[:8]}/{access.region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"
    key = f"AWS4{access.secret}".encode()
    for word in scope.split("/"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access.key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return signed


def _text(element: ElementTree.Element, name: str = "") -> str:
    """Return the text of an element, or of its child of this name; "" if there is none."""
    return (element.findtext(f"{{*}}{name}") if name else element.text) or ""


def _seconds(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return 0.0
