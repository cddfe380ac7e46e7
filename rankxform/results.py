"""How results show themselves: in a line to a program's user, as a small table in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MOST_TEXTS = 5


class Result:
    """What a function returns. `in_short` is its line, and `amounts` what a table has beside."""

    def in_short(self) -> str:
        """Return in a line what it is."""
        raise NotImplementedError

    def amounts(self) -> Mapping[str, str]:
        """Return what is worth knowing, each thing under its name."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_short()})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        doubts: Sequence[str] = getattr(self, "warnings", ())
        rows = [*self.amounts().items(), *(("warning", one) for one in doubts[:_MOST_TEXTS])]
        more = len(doubts) - _MOST_TEXTS
        return as_table(
            repr(self), [*rows, *([("warning", f"and {more} more")] if more > 0 else [])]
        )


def as_table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML with a line above it."""
    from html import escape

    left = 'style="text-align:left"'
    body = "".join(
        "<tr>" + "".join(f"<td {left}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div><strong>{escape(head)}</strong><table>{body}</table></div>"
