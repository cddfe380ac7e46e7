"""How results show themselves: in a line to a program's user, and drawn in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_TEXTS = 5


class Result(ABC):
    """The result of a function of the API."""

    @abstractmethod
    def in_short(self) -> str:
        """Return one line that says how it went."""

    def amounts(self) -> Mapping[str, str]:
        """Return the rows of its table: label -> text."""
        return {}

    def layers(self) -> Mapping[str, Sequence[str]]:
        """Return the layers of each pipeline stage, as texts: side -> one text a stage."""
        return {}

    def drawn(self) -> Mapping[str, Any]:
        """Return more sections for a notebook, in the form of docs/page.schema.json."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_short()})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from .html import fragment

        doubts: Sequence[str] = getattr(self, "warnings", ())
        texts = list(doubts[:_MOST_TEXTS])
        if doubts[_MOST_TEXTS:]:
            texts.append(f"and {len(doubts) - _MOST_TEXTS} more")
        amounts = self.amounts()
        notices = [("note", text) for text in getattr(self, "notices", ())[:_MOST_TEXTS]]
        head = {
            "title": "",
            "what": type(self).__name__,
            "told": self.in_short(),
            "state": "plan",
            "amounts": [*amounts.items(), *notices],
        }
        facts = {"result": "result", "head": head, "warnings": texts, **stage_layers(self.layers())}
        rows = [*amounts.items(), *notices, *(("warning", text) for text in texts)]
        return fragment({**facts, **self.drawn()}, as_table(repr(self), rows))


def as_table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with a headline."""
    from html import escape

    left = 'style="text-align:left"'
    body = "".join(
        "<tr>" + "".join(f"<td {left}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div><strong>{escape(head)}</strong><table>{body}</table></div>"


def stage_layers(layers: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the layers of pipeline stages in the form of docs/page.schema.json."""
    sides = [
        {
            "name": name,
            "stages": [{"names": names, "layers": _layers_in(names)} for names in stage_layers],
        }
        for name, stage_layers in layers.items()
        if stage_layers
    ]
    return {"layers": sides} if any(len(side["stages"]) > 1 for side in sides) else {}


def _layers_in(text: str) -> int:
    """Return how many layers a text such as "0-3, 7" names.

    >>> _layers_in("0-3, 7"), _layers_in("")
    (5, 0)
    """
    parts = [part.partition("-") for part in text.split(", ") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)
