"""What goes wrong with a request, in one line: the store's own code, and what can be done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rankxform.errors import RankxformError, StorageError

_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_STATUS = re.compile(r"\b(?:status code|status|HTTP status|error)[^0-9]{0,24}\b([345]\d\d)\b")
_TRIES = {
    "NoSuchBucket": ("correct the bucket's name, or its endpoint (AWS_ENDPOINT_URL)",),
    "NoSuchKey": ("list what is there, and correct the address",),
    "AccessDenied": ("ask for the right to list and read it",),
    "SignatureDoesNotMatch": ("correct AWS_SECRET_ACCESS_KEY", "correct AWS_REGION"),
    "InvalidAccessKeyId": ("correct AWS_ACCESS_KEY_ID, or AWS_ENDPOINT_URL, which knows others",),
    "ExpiredToken": ("fetch new credentials, and give the same command again",),
    "SlowDown": ("the same command again, with fewer processes",),
    "PermanentRedirect": ("correct AWS_REGION",),
    "AuthorizationHeaderMalformed": ("correct AWS_REGION",),
}
_KINDS = {
    "FileNotFoundError": ("there is no such bucket or object", "correct the address"),
    "NotFoundError": ("there is no such bucket or object", "correct the address"),
    "PermissionDeniedError": ("access is denied", "correct the credentials, or ask for the right"),
    "UnauthenticatedError": ("the credentials are not known there", "correct them"),
    "PreconditionError": ("was replaced while it was read", "the same command again"),
}
_UNREACHABLE = "error sending request", "dns error", "Connection refused", "connect error"


def is_unanswered(error: BaseException) -> bool:
    """Tell whether nothing answered a request."""
    return any(words in str(error) for words in _UNREACHABLE)


@contextmanager
def translated(action: str, address: str, part: str = "") -> Iterator[None]:
    """Raise what a request raises as a StorageError. part: the bytes that were meant, in words."""
    try:
        yield
    except BaseException as error:  # a panic of obstore's is no Exception
        of_library = type(error).__module__.startswith(("obstore", "pyo3"))
        if isinstance(error, RankxformError) or not (of_library or isinstance(error, OSError)):
            raise
        raise _as_storage_error(error, action, address, part) from None


def refused(action: str, address: str, code: str, status: str) -> StorageError:
    """Return the error of a request that a store answered with a code, or not at all."""
    tries = _TRIES.get(code, ("the same command again",))
    return StorageError(f"cannot {action} it: {code or _first_line(status)}", *tries, where=address)


def _as_storage_error(error: BaseException, action: str, address: str, part: str) -> StorageError:
    text = str(error).partition("\n\nDebug source")[0]
    kind, code = type(error).__name__, _CODE.search(text)
    what, tries = f"cannot {action} it{part}", ["the same command again"]
    if kind == "PreconditionError":
        return StorageError(f"{_KINDS[kind][0]}{part}", _KINDS[kind][1], where=address)
    if code is not None:
        what = f"{what}: {code[1]}"
        tries = [*_TRIES.get(code[1], tries)]
    elif kind in _KINDS:
        what, tries = f"{what}: {_KINDS[kind][0]}", [_KINDS[kind][1]]
    elif is_unanswered(error):
        what = f"{what}: nothing answers there"
        tries = ["correct AWS_ENDPOINT_URL", "look whether this node reaches it"]
    elif "metadata" in text or "api/token" in text:
        what, tries = f"{what}: there are no credentials", ["export AWS_ACCESS_KEY_ID=..."]
    elif "Account must be specified" in text:
        what = f"{what}: nothing says of which account it is"
        tries = ["export AZURE_STORAGE_ACCOUNT_NAME=... AZURE_STORAGE_ACCOUNT_KEY=..."]
    elif match := _STATUS.search(text):
        what = f"{what}: HTTP {match[1]}"
    else:
        what = f"{what}: {_first_line(text)}"
    return StorageError(what, *tries, where=address)


def _first_line(text: str) -> str:
    """Return the beginning of what a library says, without an address that may hold a signature."""
    line = re.sub(r"https?://\S+", "...", text.strip().partition("\n")[0])
    return line[:120] or "no reason was given"
