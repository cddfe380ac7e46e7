"""Digests of whole files, as other programs check them: ``sha256sum -c``, ``xxhsum -c``.

A document of them lies beside each manifest, which knows it as a companion. It lists the tensor
files, and what was written beside them, but the manifest, which `verify --keep-fingerprints` may
change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from rankxform.errors import FormatError, UsageError
from rankxform.publish.options import SUMS
from rankxform.storage.posix import AnyPath, Buffer
from rankxform.storage.store import address_of, store_at
from rankxform.values import NamedTuple

if TYPE_CHECKING:
    from rankxform.engine.helper_thread import HelperThread

SHA256, XXH3 = SUMS
_BLOCK = 4 << 20
_WORTH_HELP = 128 << 10
"""Bytes from which on another thread sums, as to wake it takes time."""
_DIGITS = {SHA256: 64, XXH3: 16}
_LINE = re.compile(r"(?P<escaped>\\?)(?:XXH3_)?(?P<digest>[0-9a-fA-F]+) [ *](?:\./)?(?P<name>.+)")
_TAGGED = re.compile(
    r"(?P<escaped>\\?)(?:XXH3|SHA256) \((?:\./)?(?P<name>.+)\) = (?P<digest>[0-9a-fA-F]+)"
)
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


def new_digest(kind: str) -> Any:
    """Return an empty digest. Raises UsageError where the library of its kind is not installed."""
    if kind == SHA256:
        return sha256()
    try:
        from xxhash import xxh3_64
    except ImportError:
        text = "--digests xxh3 needs the package xxhash, which is not installed"
        raise UsageError(text, "pip install xxhash", "--digests sha256") from None
    return xxh3_64()


class WrittenDigest:
    """Of a file that one process writes, from its first byte to its last, its digest."""

    def __init__(self, kind: str) -> None:
        self._digest, self._nbytes = new_digest(kind), 0

    def add(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Take bytes that are written, one buffer after the other; what does not follow on the last
        ones ends it."""
        for data in filter(None, buffers):
            self._nbytes = self._nbytes if offset == self._nbytes else -1
            if self._nbytes >= 0:
                self._digest.update(data)
                self._nbytes += len(data)
            offset += len(data)

    def add_beside(
        self, helper: HelperThread, offset: int, buffers: Sequence[Buffer]
    ) -> Callable[[], object] | None:
        """Take them in a thread of its own, if that is worth it; return what waits for it."""
        if sum(map(len, buffers)) < _WORTH_HELP:
            self.add(offset, buffers)
            return None
        return helper.start(partial(self.add, offset, buffers))

    def of_file(self, nbytes: int) -> str | None:
        """Return the digest if it is of a whole file, of so many bytes; otherwise None."""
        return str(self._digest.hexdigest()) if self._nbytes == nbytes else None


class StatedDigests(NamedTuple):
    """What documents at a place state of its files, and which documents cannot be read, and why."""

    by_name: dict[str, tuple[str, str]]  # kind and digest
    unreadable: dict[str, str]  # by address


def stated_at(place: AnyPath, documents: Iterable[str]) -> StatedDigests:
    """Read those of some documents of digests that lie at a place."""
    by_name, unreadable = dict[str, tuple[str, str]](), dict[str, str]()
    store, kinds = store_at(str(place)), {document: kind for kind, document in SUMS.items()}
    for document in filter(store.has, documents):
        try:
            sums = parse_sums(kinds[document], store.read(document))
        except FormatError as error:
            unreadable[address_of(str(place), document)] = str(error)
        else:
            by_name |= {name: (kinds[document], digest) for name, digest in sums.items()}
    return StatedDigests(by_name, unreadable)


def digest_of(kind: str, content: bytes) -> str:
    """Return the digest of a small document."""
    digest = new_digest(kind)
    digest.update(content)
    return str(digest.hexdigest())


def digest_at(kind: str, path: AnyPath, on_progress: Callable[..., object]) -> str:
    """Return the digest of a file, which is read from its first byte to its last."""
    digest = new_digest(kind)
    with store_at(str(path)).open("") as file:
        for start in range(0, file.version.size, _BLOCK):
            block = file.read_at(start, _BLOCK)
            digest.update(block)
            on_progress(len(block))
    return str(digest.hexdigest())


def format_sums(kind: str, digests: Mapping[str, str]) -> bytes:
    """Return the document of the digests of files, by name.

    >>> format_sums("xxh3", {"a.ckpt": "2d06800538d394c2"})
    b'XXH3 (a.ckpt) = 2d06800538d394c2\\n'
    """
    lines = []
    for name, digest in sorted(digests.items()):
        escaped = "".join(_ESCAPES.get(character, character) for character in name)
        if kind == XXH3:  # whose program escapes nothing
            lines += [f"XXH3 ({name}) = {digest}\n"] if escaped == name else []
        else:
            lines.append(f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n")
    return "".join(lines).encode()


def parse_sums(kind: str, data: bytes) -> dict[str, str]:
    """Return the digests of a document, by name. Raises FormatError.

    >>> parse_sums("xxh3", b"XXH3_2d06800538d394c2  ./a.ckpt\\n")
    {'a.ckpt': '2d06800538d394c2'}
    """
    digests: dict[str, str] = {}
    for number, line in enumerate(data.decode(errors="replace").split("\n"), 1):
        line = line.rstrip("\r")
        if not line or line.startswith("#"):
            continue
        match = _TAGGED.fullmatch(line) or _LINE.fullmatch(line)
        if match is None or len(match["digest"]) != _DIGITS[kind]:
            raise FormatError(f"line {number} states no {kind} of a file: {line[:80]!r}")
        name = match["name"]
        if match["escaped"]:
            name = re.sub(r"\\(.)", lambda m: {"n": "\n", "r": "\r"}.get(m[1], m[1]), name)
        digests[name] = match["digest"].lower()
    return digests
