"""Bytes, times and tables as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .terminal import printable, width, wrap_text

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MANY_ROWS = 40
_LEAST_LAST = 12
_BELOW = " " * 4
_NUMBER = re.compile(r"\d+(,\d{3})*(\.\d+)?( |$)")


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
    '2 kB, 1.00 times the 2 kB needed'
    """
    times = read / needed if needed else 1
    why = "; equal slices are read by every process that writes one, or whole rows for a part"
    reason = why if times > 1.05 else ""
    return f"{format_size(read)}, {times:.2f} times the {format_size(needed)} needed{reason}"


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
    right = [all(_NUMBER.match(row[i]) for row in cells) for i in range(len(head))]
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
