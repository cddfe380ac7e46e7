"""Drawings as SVG, for a page that needs no script: a matrix, sharded tensors, bars by phase.

Colours are classes, which the page defines for light and dark screens and for paper. Every drawing
has a title for those who do not see it, and every shape one that tells its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from math import sqrt

from rankxform.display.units import count, seconds, size
from rankxform.job.picture import Drawn, Flow, Kind, axes_of, drawn, marginals
from rankxform.layout.names import ranges

_HUES = 8
"""Classes h0 to h7 of the page: the colours of Okabe and Ito, told apart by the colour-blind."""
_MOST_BOXES = 1024
_LABELLED = 32
_SHADES = 16
_TEXT = 6.2
"""Width of a character of small text, in pixels."""


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """Wrap shapes; the drawing shrinks with the page, and never grows."""
    return (
        f'<svg role="img" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _rect(x: float, y: float, w: float, h: float, kind: str, tip: str = "", more: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" class="{kind}"{more}>'
        f"{title}</rect>"
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def matrix(flow: Flow) -> str:
    """Draw who takes how many bytes from whom: darker is more, bars are the sums."""
    rows, columns = len(flow.rows), len(flow.columns)
    wide = max(9.0, min(58.0, 620.0 / max(columns, 1)))
    high = max(9.0, min(28.0, 620.0 / max(rows, 1)))
    left = 16 + _TEXT * (max(len(flow.row) + 1, *map(len, flow.rows)) + 1)
    top = 54.0
    most = max(flow.cells.values(), default=1)
    few = rows * columns <= _MOST_BOXES
    parts = [
        _text(left, 12, f"from source {flow.column}", "small"),
        *_stage_bars(flow, left, top, wide),
        _text(left - 8, top - 6, flow.row, "small", "end"),
    ]
    every = max(1, round(_TEXT * (max(map(len, flow.columns)) + 1) / wide + 0.49))
    for number in range(0, columns, every):
        x = left + (number + 0.5) * wide
        parts.append(_text(x, top - 6, flow.columns[number], "small", "middle"))
    for number, name in enumerate(flow.rows):
        y = top + number * high
        if number % max(1, round(12 / high + 0.49)) == 0:
            parts.append(_text(left - 8, y + high / 2 + 4, name, "small", "end"))
        for column in range(columns) if few else ():
            x, nbytes = left + column * wide, flow.cells.get((number, column), 0)
            tip = f"{flow.row} {name} from {flow.column} {flow.columns[column]}: {size(nbytes)}"
            shade = f' fill-opacity="{0.12 + 0.88 * sqrt(nbytes / most):.2f}"' if nbytes else ""
            kind = "cell" if nbytes else "none"
            parts.append(_rect(x + 0.5, y + 0.5, wide - 1, high - 1, kind, tip, shade))
            if nbytes and wide >= 44 and high >= 16:
                tone = "small light" if nbytes > 0.25 * most else "small oncell"
                parts.append(_text(x + wide / 2, y + high / 2 + 4, size(nbytes), tone, "middle"))
    right, bottom = left + columns * wide, top + rows * high
    if not few:
        parts += _shades(flow, left, top, wide, high)
    of_rows, of_columns = marginals(flow)
    for number, nbytes in enumerate(of_rows):
        long = 60 * nbytes / max(1, *of_rows)
        y = top + number * high
        parts.append(_rect(right + 8, y + 1, long, high - 2, "sum", size(nbytes)))
        if high >= 11:
            parts.append(_text(right + 12 + long, y + high / 2 + 4, size(nbytes), "small"))
    for number, nbytes in enumerate(of_columns):
        long = 40 * nbytes / max(1, *of_columns)
        x = left + number * wide
        parts.append(_rect(x + 1, bottom + 8, wide - 2, long, "sum", size(nbytes)))
        if wide >= 44:
            parts.append(_text(x + wide / 2, bottom + 22 + long, size(nbytes), "small", "middle"))
    title = f"bytes of each destination {flow.row} by source {flow.column}"
    return svg(right + 150, bottom + 70, title, parts)


def _shades(flow: Flow, left: float, top: float, wide: float, high: float) -> list[str]:
    """Draw many cells: those of about one shade are one path, which takes few bytes."""
    rows, columns = len(flow.rows), len(flow.columns)
    most = max(flow.cells.values(), default=1)
    alike: dict[int, list[str]] = {}
    for (row, column), nbytes in sorted(flow.cells.items()):
        x, y = left + column * wide, top + row * high
        shade = 1 + int((_SHADES - 1) * sqrt(nbytes / most))
        square = f"M{x + 0.5:.1f} {y + 0.5:.1f}h{wide - 1:.1f}v{high - 1:.1f}h{1 - wide:.1f}z"
        alike.setdefault(shade, []).append(square)
    parts = [_rect(left, top, columns * wide, rows * high, "none")]
    return parts + [
        f'<path class="cell" fill-opacity="{shade / _SHADES:.2f}" d="{"".join(some)}"/>'
        for shade, some in sorted(alike.items())
    ]


def _stage_bars(flow: Flow, left: float, top: float, wide: float) -> list[str]:
    """Draw a bar over the columns of each pipeline stage, where there are several."""
    if len(set(flow.stages)) < 2 or flow.column == "stage":
        return []
    parts, first = [], 0
    for at in range(1, len(flow.stages) + 1):
        if at == len(flow.stages) or flow.stages[at] != flow.stages[first]:
            x, stage = left + first * wide, flow.stages[first]
            tip = f"pipeline stage {stage}"
            parts.append(
                _rect(x + 1, top - 34, (at - first) * wide - 2, 10, f"h{stage % _HUES}", tip)
            )
            if (at - first) * wide > 60:
                parts.append(_text(x + 4, top - 26, f"stage {stage}", "tiny"))
            first = at
    return parts


def tensors(kinds: Sequence[Kind]) -> str:
    """Draw how kinds of tensor are sharded before and after, one below the other."""
    parts: list[str] = []
    y, side, across = 0.0, 132.0, 250.0
    width = 480.0
    for kind in kinds:
        shape = " x ".join(map(str, kind.shape)) or "one value"
        parts.append(_text(0, y + 14, _fitting(kind.name, width), "label"))
        states = f"; with {', '.join(kind.states)}" if kind.states else ""
        facts = (
            f"{count(kind.count, 'tensor')} of {kind.dtype} {shape}; {size(kind.nbytes)}{states}"
        )
        axes = axes_of(kind)
        if len(kind.shape) > 2:
            facts += f"; axes {axes[0]} and {axes[1]} are drawn"
        parts.append(_text(0, y + 30, _fitting(facts, width), "small"))
        for number, (one, words) in enumerate(((kind.src, "source"), (kind.dst, "destination"))):
            x = number * across
            if one is None:
                parts.append(_text(x + side / 2, y + 100, "made of several", "small", "middle"))
                continue
            parts += _boxes(list(drawn(one, kind.shape, axes)), x, y + 38, side)
            pieces = "whole" if one.pieces == 1 else f"{one.pieces:,} slices"
            if one.copies > 1:
                pieces += f" on {one.copies:,} ranks" + (" each" if one.pieces > 1 else "")
            parts.append(_text(x, y + 54 + side, f"{words}: {pieces}", "small"))
        parts.append(_text(across - 60, y + 42 + side / 2, "\u2192", "arrow", "middle"))
        if kind.runs:
            read, written = map(size, kind.runs)
            words = f"contiguous: {read} or more a read, {written} or more a write"
            parts.append(_text(0, y + 70 + side, _fitting(words, width), "small"))
        parts.append(_text(0, y + 86 + side, _fitting(kind.change, width), "small"))
        y += side + 108
    return svg(width, y, "how tensors are sharded before and after", parts)


def _boxes(shown: Sequence[Drawn], x: float, y: float, side: float) -> list[str]:
    parts = [_rect(x, y, side, side, "frame")]
    many = len(shown) > _LABELLED
    first, block = 0, 1
    if many:  # ranks next to each other share a colour
        starts = [ranks[0] for *_, ranks in shown]
        first, block = min(starts), -(-(1 + max(starts) - min(starts)) // _HUES)
    for top, left, high, wide, ranks in shown[:_MOST_BOXES]:
        numbers = ranges(ranks)
        tip = f"rank{'s' if ranks[1:] else ''} {numbers}"
        place = x + left * side, y + top * side, wide * side, high * side
        hue = f"h{(ranks[0] - first) // block % _HUES}"
        parts.append(_rect(*place, hue if many else f"{hue} box", tip))
        if many or high * side <= 13:
            continue
        at = x + (left + wide / 2) * side, y + (top + high / 2) * side + 4
        for words in (tip, numbers, f"{ranks[0]}, ..."):
            if wide * side > _TEXT * len(words) + 2:
                parts.append(_text(*at, words, "small onbox", "middle"))
                break
    return parts


def _fitting(words: str, width: float) -> str:
    most = int(width / _TEXT)
    return words if len(words) <= most else words[: most - 1] + "\u2026"


def bars(rows: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """Draw seconds by phase, a stacked bar for each row, and what the colours mean."""
    left, wide, high = 16 + _TEXT * max(map(len, rows), default=0), 480.0, 22.0
    most = max((sum(row.values()) for row in rows.values()), default=0) or 1
    parts = []
    for number, (name, row) in enumerate(rows.items()):
        y = number * (high + 6)
        parts.append(_text(left - 8, y + 15, name, "small", "end"))
        ends = [0.0, *accumulate(row.get(phase, 0.0) for phase in names)]
        for phase in range(len(names)):
            start, stop = ends[phase : phase + 2]
            x = left + wide * start / most
            tip = f"{names[phase]}: {seconds(stop - start)}"
            kind = f"h{phase % _HUES}" + (" thin" if phase >= _HUES else "")
            parts.append(_rect(x, y, wide * (stop - start) / most, high, kind, tip))
        parts.append(_text(left + wide * ends[-1] / most + 6, y + 15, seconds(ends[-1]), "small"))
    x, y = left, len(rows) * (high + 6) + 10
    for phase, name in enumerate(names):
        room = 26 + _TEXT * (len(name) + 1)
        if x + room > left + wide:
            x, y = left, y + 20
        kind = f"h{phase % _HUES}" + (" thin" if phase >= _HUES else "")
        parts += [_rect(x, y, 12, 12, kind), _text(x + 17, y + 10, name, "small")]
        x += room
    return svg(left + wide + 70, y + 22, f"seconds by phase of {count(len(rows), 'row')}", parts)
