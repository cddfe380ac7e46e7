"""Text for a terminal: its width, bold and red, and lines that are wrapped to fit it.

Lines that go to a file or a pipe are not wrapped, because other programs read them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache

from rankxform.transport.launcher import terminal

from .log import write_log

USUAL_COLUMNS = 80
_LEAST_COLUMNS = 30
_LABEL = 10
"""Columns of a label and the blanks behind it."""
STDOUT, STDERR = 1, 2


def columns_of(fd: int) -> int:
    """Return the number of columns of a descriptor's terminal."""
    with suppress(OSError):
        return os.get_terminal_size(fd).columns or USUAL_COLUMNS
    return USUAL_COLUMNS


@lru_cache(maxsize=2)
def width(stream: int = STDOUT) -> int | None:
    """Return how many columns a line of output may take. None: no terminal shows it.

    stream: `STDOUT` or `STDERR`.
    """
    path = terminal(stream)
    with suppress(OSError):
        if path:
            fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return max(_LEAST_COLUMNS, columns_of(fd) - 1)
            finally:
                os.close(fd)
    return None


def bold(text: str, stream: int = STDOUT) -> str:
    """Return `text` in bold, if a terminal shows it and NO_COLOR is not set."""
    return _styled(text, "1", stream)


def red(text: str, stream: int = STDOUT) -> str:
    """Return `text` in red, under the conditions of `bold`."""
    return _styled(text, "1;31", stream)


def _styled(text: str, code: str, stream: int) -> str:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or width(stream) is None:
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def wrap_text(text: str, columns: int | None, indent: int = 2) -> str:
    """Break lines between words so that no line is longer than `columns`. None: break none.

    Continuation lines begin with `indent` blanks. A longer word, such as a path, is not broken, so
    that it can be copied.

    >>> print(wrap_text("read 134 MB, 1.00 times the 134 MB needed", 24, 5))
    read 134 MB, 1.00 times
         the 134 MB needed
    """
    if columns is None or all(len(line) <= columns for line in text.splitlines()):
        return text
    lines: list[str] = []
    for line in text.splitlines():
        start = len(line) - len(line.lstrip())
        lines += _wrapped(line.lstrip(), columns, " " * start, " " * max(indent, start))
    return "\n".join(lines)


def _wrapped(text: str, columns: int, first: str, others: str) -> list[str]:
    from textwrap import wrap

    return wrap(
        text, columns, initial_indent=first, subsequent_indent=others,
        break_long_words=False, break_on_hyphens=False,
    ) or [""]  # fmt: skip


def labelled_lines(label: str, *texts: str) -> str:
    """Write texts below each other, behind a label. Commands are not wrapped: they are pasted.

    >>> print(labelled_lines("to", "dst: 4 ranks", "b.ckpt: 4 ranks"))
    to        dst: 4 ranks
              b.ckpt: 4 ranks
    """
    columns, blank, lines = width(), " " * _LABEL, list[str]()
    for number, text in enumerate(map(printable, texts)):
        start = blank if number else f"{label:{_LABEL - 1}} "
        is_short = columns is None or len(start) + len(text) <= columns
        if is_short or text.startswith("rankxform "):
            lines.append(start + text)
        else:
            assert columns is not None
            lines += _wrapped(text, columns, start, blank)
    lines[0] = bold(label) + lines[0][len(label) :]
    return "\n".join(lines)


def printable(text: str) -> str:
    """Return `text` with control characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def warn(text: str) -> None:
    """Print a warning on standard error, in one write, so that lines of processes never mix."""
    line = f"rankxform: warning: {text}\n"
    write_log(line)
    os.write(STDERR, line.encode(errors="backslashreplace"))


def shown_path(path: str) -> str:
    """Return a path relative to the working folder, if it is below it."""
    here = os.getcwd() + os.sep
    return printable(path[len(here) :] if path.startswith(here) and here != "//" else path)
