"""The file of ``--log``: everything that process 0 prints, each line with its time."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress

_STAMP = "%Y-%m-%d %H:%M:%S%z"


class _LogFile:
    """The descriptor of the log file; None without --log."""

    fd: int | None = None


def open_log(path: str, first: str) -> None:
    """Open the log and write its first line. An existing file is continued. Raises OSError."""
    _LogFile.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    write_log(first)


def close_log() -> None:
    """Close the log, if it is open."""
    if _LogFile.fd is not None:
        os.close(_LogFile.fd)
        _LogFile.fd = None


def is_open() -> bool:
    """Return whether a log is open."""
    return _LogFile.fd is not None


def write_log(text: str) -> None:
    """Append lines to the log, if it is open. If that fails, warn, and go on without a log."""
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
