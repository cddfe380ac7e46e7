"""The tree of errors: a class says whose fault it is, and with which code the command ends.

::

    RankxformError              70  a bug of rankxform's own
    ├── UsageError               2  the call: arguments, launcher and MPI library disagree
    ├── StrategyError            3  a strategy file, or two that contradict each other
    ├── CheckpointError          3  a source file, or a folder that does not fit its strategy
    ├── RequestError             3  strategies and checkpoint are sound, the wish is not: shapes
    │                               that do not divide, names that only one side knows
    ├── StorageError             4  reading or writing failed: space, permission, device
    ├── StoppedError            75  stopped by a signal or a stall; run the command again
    └── PeerError                *  another process failed first: its message, its code

A message says what was found where, what was wanted, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class RankxformError(Exception):
    """Any failure that rankxform reports by one message."""

    exit_code: ClassVar[int] = 70


class UsageError(RankxformError):
    """The call itself cannot be carried out as written."""

    exit_code = 2


class StrategyError(RankxformError):
    """A strategy file is unreadable, incomplete, or contradicts another."""

    exit_code = 3


class CheckpointError(RankxformError):
    """A source checkpoint is broken or does not fit its strategy."""

    exit_code = 3


class RequestError(RankxformError):
    """Sound inputs, and a conversion between them that has no right answer."""

    exit_code = 3


class StorageError(RankxformError):
    """The file system refused a read or a write."""

    exit_code = 4

    @classmethod
    def of(cls, error: OSError, path: object, doing: str) -> StorageError:
        """Build the message for `error`, met while `doing` (a verb) something to `path`."""
        return cls(f"{path}: cannot {doing}: {error.strerror or error}")


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn what the operating system refuses inside the block into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError.of(error, error.filename or "a file", "use") from error


class StoppedError(RankxformError):
    """Stopped before the end by a signal or because a process stopped answering."""

    exit_code = 75


class PeerError(RankxformError):
    """The agreed failure of a run: raised on every process with the same text and code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def exit_code(error: BaseException) -> int:
    """Return the process exit code for `error`.

    >>> exit_code(StorageError("disk full")), exit_code(PeerError("x", 3)), exit_code(KeyError())
    (4, 3, 70)
    """
    if isinstance(error, PeerError):
        return error.code
    if isinstance(error, RankxformError):
        return error.exit_code
    return RankxformError.exit_code
