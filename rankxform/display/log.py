"""The file of ``--log``: all that process 0 says, each line with its time."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

_STAMP = "%Y-%m-%d %H:%M:%S%z"


class _LogFile:
    """The descriptor of the file, if one is wanted."""

    fd: int | None = None


def open_log(path: str, first: str) -> None:
    """Say everything to a file too from here on; lines are added to one that is there. OSError."""
    _LogFile.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    write_log(first)


def close_log() -> None:
    """Say nothing more to the file."""
    if _LogFile.fd is not None:
        os.close(_LogFile.fd)
        _LogFile.fd = None


def is_open() -> bool:
    """Tell whether a file is written."""
    return _LogFile.fd is not None


def write_log(text: str) -> None:
    """Add lines to the file, if there is one. Where it cannot be written, that is said and the
    work goes on without."""
    if _LogFile.fd is None:
        return
    now, plain = time.strftime(_STAMP), re.sub("\x1b\\[[0-9;]*m", "", text)
    lines = "".join(f"{now} {line}".rstrip() + "\n" for line in plain.splitlines() or [""])
    data = lines.encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(_LogFile.fd, data) :]
    except OSError as error:
        close_log()
        with suppress(OSError):
            os.write(2, f"rankxform: warning: --log ends here: {error.strerror}\n".encode())
