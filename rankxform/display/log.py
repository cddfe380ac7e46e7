"""The file of ``--log``: all that process 0 says, each line with its time."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

_STAMP = "%Y-%m-%d %H:%M:%S%z"


class _Open:
    """The descriptor of the file, if one is wanted."""

    fd: int | None = None


def open_log(path: str, first: str) -> None:
    """Say everything to a file too from here on; lines are added to one that is there. OSError."""
    _Open.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    note(first)


def close_log() -> None:
    """Say nothing more to the file."""
    if _Open.fd is not None:
        os.close(_Open.fd)
        _Open.fd = None


def is_open() -> bool:
    """Tell whether a file is written."""
    return _Open.fd is not None


def note(text: str) -> None:
    """Add lines to the file, if there is one. Where it cannot be written, that is said and the
    work goes on without."""
    if _Open.fd is None:
        return
    now, plain = time.strftime(_STAMP), re.sub("\x1b\\[[0-9;]*m", "", text)
    lines = "".join(f"{now} {line}".rstrip() + "\n" for line in plain.splitlines() or [""])
    data = lines.encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(_Open.fd, data) :]
    except OSError as error:
        close_log()
        with suppress(OSError):
            os.write(2, f"rankxform: warning: --log ends here: {error.strerror}\n".encode())
