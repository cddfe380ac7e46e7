"""How results show themselves: in a line to a program's user, as a small table in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

_MOST_TEXTS = 5


class Result(ABC):
    """What a function returns. `in_short` is its line, and `amounts` what a table has beside."""

    @abstractmethod
    def in_short(self) -> str:
        """Return in a line what it is."""

    def amounts(self) -> Mapping[str, str]:
        """Return what is worth knowing, each thing under its name."""
        return {}

    def layers(self) -> Mapping[str, Sequence[str]]:
        """Return which layers pipeline stages have, before and after, each under its name."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_short()})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        doubts: Sequence[str] = getattr(self, "warnings", ())
        rows = [*self.amounts().items(), *(("warning", one) for one in doubts[:_MOST_TEXTS])]
        if doubts[_MOST_TEXTS:]:
            rows.append(("warning", f"and {len(doubts) - _MOST_TEXTS} more"))
        return as_table(repr(self), rows, self.layers())


def as_table(
    head: str, rows: Sequence[Sequence[str]], stages: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return a table of HTML with a line above it, and between them bars of pipeline stages."""
    from html import escape

    bars = "".join(_bar(name, some) for name, some in (stages or {}).items() if some)
    left = 'style="text-align:left"'
    body = "".join(
        "<tr>" + "".join(f"<td {left}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div><strong>{escape(head)}</strong>{bars}<table>{body}</table></div>"


def _bar(name: str, stages: Sequence[str]) -> str:
    """Draw the stages of a pipeline beside each other, each as wide as it has layers."""
    from html import escape

    cell = "border:1px solid #8888;padding:1px 6px;overflow:hidden;white-space:nowrap"
    drawn = "".join(
        f'<div title="stage {number}: layers {escape(layers)}" '
        f'style="flex:{_layers_in(layers)} 1 0;{cell}">{escape(layers) or "-"}</div>'
        for number, layers in enumerate(stages)
    )
    label = f'<div style="width:9em">layers {escape(name)}</div>'
    return f'<div style="display:flex;max-width:60em;margin:2px 0">{label}{drawn}</div>'


def _layers_in(text: str) -> int:
    """Count layers that are written shortly; 1 at least.

    >>> _layers_in("0-3, 7"), _layers_in("")
    (5, 1)
    """
    parts = [part.partition("-") for part in text.split(", ") if part]
    return max(1, sum(int(last or first) - int(first) + 1 for first, _, last in parts))
