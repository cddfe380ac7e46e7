"""Text for people: widths, units, tables.

Lines that go to a file or a pipe are not wrapped, because other programs read them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from rankxform.results import NORMAL, Group, Lines, Result, Table
from rankxform.transport.launcher import terminal
from rankxform.values import pattern_on_use

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
    return _style(text, "1", stream)


def red(text: str, stream: int = STDOUT) -> str:
    """Return `text` in red, under the conditions of `bold`."""
    return _style(text, "1;31", stream)


def _style(text: str, code: str, stream: int) -> str:
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
        lines += _wrap_lines(line.lstrip(), columns, " " * start, " " * max(indent, start))
    return "\n".join(lines)


def _wrap_lines(text: str, columns: int, first: str, others: str) -> list[str]:
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
            lines += _wrap_lines(text, columns, start, blank)
    style = red if label.rstrip(":") in _BAD else bold
    lines[0] = style(label) + lines[0][len(label) :]
    return "\n".join(lines)


_BAD = ("DIFFERENT", "NO ROOM", "WRONG")


def warning_lines(texts: Sequence[str]) -> list[str]:
    """Write warnings, which are said first and last."""
    return [labelled_lines("WARNING:", text) for text in texts]


def as_text(result: Result, level: int = NORMAL, head: str = "") -> str:
    """Write a result for people: its sections, and its warnings last.

    head: stands behind the first section; then the warnings come first, too.
    """
    warnings = warning_lines(getattr(result, "warnings", ()))
    parts: list[str] = [*warnings] if head else []
    for section in result.sections(level):
        if isinstance(section, Lines):
            label, texts = section
            parts += [labelled_lines(label, *texts)] if label else map(printable, texts)
        elif isinstance(section, Group):
            parts.append(wrap_text(f"  {printable(section.heading)}", width(), 4))
            parts += [wrap_text(f"{_BELOW}  {printable(t)}", width(), 8) for t in section.texts]
        elif isinstance(section, Table):
            columns, rows, noun = section
            show = short_table(columns, rows, noun) if noun else table(columns, rows)
            parts += ["", show, ""]
        parts, head = [*parts, *([head] if head else [])], ""
    return re.sub("\n{3,}", "\n\n", "\n".join([*parts, *warnings])).strip("\n")


def printable(text: str) -> str:
    """Return `text` with control characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def warn(text: str) -> None:
    """Print a warning on standard error, in one write, so that lines of processes never mix."""
    line = f"rankxform: warning: {printable(text)}\n"
    os.write(STDERR, line.encode(errors="backslashreplace"))


def from_here(path: str) -> str:
    """Return a path relative to the working folder, if it is below it; never like an option."""
    here = os.getcwd() + os.sep
    short = path[len(here) :] if path.startswith(here) and here != "//" else path
    return f"./{short}" if short.startswith("-") else short


def shown_path(path: str) -> str:
    """Return a path as people read it: relative to the working folder, if it is below it."""
    return printable(from_here(path))


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MANY_ROWS = 40
_LEAST_LAST = 12
_BELOW = " " * 4
_NUMBER = pattern_on_use(r"\d+(,\d{3})*(\.\d+)?( |$)")


def format_size(nbytes: float) -> str:
    """Write bytes in decimal units.

    >>> format_size(999), format_size(1_350_000_000)
    ('999 B', '1.35 GB')
    """
    exponent = 0
    while nbytes >= 999.5 and exponent < len(_UNITS) - 1:
        nbytes /= 1000
        exponent += 1
    return f"{nbytes:.{3 if exponent else 0}{'g' if exponent else 'f'}} {_UNITS[exponent]}"


def format_buffer(nbytes: int) -> str:
    """Write the size of a buffer, in powers of 1024 if it is round, as options take it.

    >>> format_buffer(64 << 20), format_buffer(100_000_000)
    ('64 MiB', '100 MB')
    """
    return format_size(nbytes) if nbytes % (1 << 20) else f"{nbytes >> 20:,} MiB"


def read_and_needed(read: int, needed: int) -> str:
    """Write how many bytes are read, and the reason if they are more than the needed ones.

    >>> read_and_needed(2000, 2000)
    '2 kB, 1.00 times the 2 kB that the slices need'
    """
    times = read / needed if needed else 1
    why = "; equal slices are read by every process that writes one, or whole rows for a part"
    reason = why if times > 1.05 else ""
    need = f"the {format_size(needed)} that the slices need"
    return f"{format_size(read)}, {times:.2f} times {need}{reason}"


def format_count(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is 1.

    >>> format_count(1, "file"), format_count(1024, "process"), format_count(2, "entry")
    ('1 file', '1,024 processes', '2 entries')
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("try"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun[-1:] in 'sx' else 's'}"


def format_seconds(value: float) -> str:
    """Write a time.

    >>> format_seconds(3e-5), format_seconds(0.4), format_seconds(75), format_seconds(7380)
    ('30 us', '0.40 s', '1 min 15 s', '2 h 3 min')
    """
    if 0 < value < 0.01:
        return f"{value * 1e6:.0f} us" if value < 0.001 else f"{value * 1e3:.1f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    minutes, whole_seconds = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {whole_seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out columns: texts on the left, numbers on the right.

    On a terminal the last column is wrapped. If there is no room for its longest word, it stands
    below the other columns.
    """
    cells = [[printable(str(c)) for c in row] for row in rows]
    right = [all(_NUMBER().match(row[i]) for row in cells) for i in range(len(head))]
    widths = [max(map(len, column)) for column in zip(head, *cells)]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    columns = width()
    longest = max((len(word) for row in cells for word in row[-1].split()), default=0)
    below = columns is not None and before <= columns < before + max(longest, _LEAST_LAST)

    def line(row: Sequence[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)]
        if below and not right[-1]:
            last = wrap_text(_BELOW + row[-1], columns, len(_BELOW))
            return "  ".join(padded[:-1]).rstrip() + f"\n{last}"
        text = "  ".join(padded).rstrip()
        fits = columns is None or right[-1] or columns < before
        return text if fits else wrap_text(text, columns, before)

    return "\n".join(map(line, [list(head), *cells]))


def first_of_ranks(ranks: Sequence[object]) -> str:
    """Write the first twelve ranks or files, and their number if there are more."""
    shown = ", ".join(map(str, ranks[:12]))
    return shown + (f", ... ({len(ranks)})" if len(ranks) > 12 else "")


def short_table(head: Sequence[str], rows: Sequence[Sequence[object]], noun: str = "ranks") -> str:
    """Lay out the first rows of a long table, and say how many rows are left out."""
    text = table(head, rows[:_MANY_ROWS])
    omitted = len(rows) - _MANY_ROWS
    return text + (f"\nand {omitted:,} {noun} more (--json prints all)" if omitted > 0 else "")
