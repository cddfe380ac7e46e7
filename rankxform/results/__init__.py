"""Results: fields, which are JSON, and sections, which are text, a page and a notebook cell.

`rankxform.display.text.as_text` writes the sections for a terminal, `as_document` for HTML.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeAlias

from rankxform.values import NamedTuple, dataclass

QUIET, NORMAL, VERBOSE = 0, 1, 2
"""How much of a result is shown: its last word, all that is usual, also what may be long."""

_MOST_TEXTS, _MOST_ROWS = 5, 200


class Lines(NamedTuple):
    """A label, and the texts behind it."""

    label: str
    texts: tuple[str, ...]


class Group(NamedTuple):
    """A heading, and texts that stand below it, one a line."""

    heading: str
    texts: Sequence[str]


class Table(NamedTuple):
    """Rows of texts and numbers; noun: what the rows are of one that text shortens; "": none."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    noun: str = "rows"


class Drawing(NamedTuple):
    """What only a page shows: a kind of docs/page.schema.json, and its facts."""

    kind: str
    facts: Any


Section: TypeAlias = "Lines | Group | Table | Drawing"


def lines(label: str, *texts: str) -> Lines:
    """Return texts behind a label."""
    return Lines(label, texts)


def first_line(sections: Iterable[Section]) -> str:
    """Return the first line of sections, "" if they have only tables."""
    texts = (text for section in sections if isinstance(section, Lines) for text in section.texts)
    return next(texts, "").partition("\n")[0]


class Result(ABC):
    """What a function of the API returns."""

    json_first: ClassVar[tuple[str, ...]] = ()  # properties that JSON has before the fields
    json_without: ClassVar[tuple[str, ...]] = ()  # fields that it has not

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        return 0

    @abstractmethod
    def in_short(self) -> str:
        """Return one line that says how it went."""

    @abstractmethod
    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield what is shown: at `QUIET` the last word alone, at `VERBOSE` names too."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as ``--json`` prints them."""
        names = [*self.json_first]
        names += [f.name for f in fields(self) if f.name not in self.json_without]  # type: ignore[arg-type]
        return {name: plain(getattr(self, name)) for name in names}

    def notes(self) -> Iterator[Lines]:
        """Yield what to know."""
        yield from (lines("note", text) for text in getattr(self, "notices", ()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_short()})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from .html import fragment

        document = as_document(self)
        rows = [*document["head"]["amounts"], *(("warning", w) for w in document["warnings"])]
        return fragment(document, as_table(repr(self), rows))


@dataclass(frozen=True, repr=False)
class DictResult(Result):
    """Facts for JSON, and sections for people."""

    facts: Mapping[str, Any]
    shown: tuple[Section, ...]
    code: int = 0  # exit code

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        return self.code

    @property
    def warnings(self) -> Sequence[str]:
        """What may be wrong, by the facts."""
        texts: Sequence[str] = self.facts.get("warnings", ())
        return texts

    def in_short(self) -> str:
        return first_line(self.sections())

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        yield from self.shown

    def as_dict(self) -> dict[str, Any]:
        return dict(self.facts)


def plain(value: Any) -> Any:
    """Return a field for JSON: a value's own facts if it has some, else its fields by name."""
    if is_dataclass(value) and not isinstance(value, type):
        own_facts = getattr(value, "facts", None)
        return own_facts or {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [*map(plain, value)] if isinstance(value, (tuple, list)) else value


def as_document(result: Result) -> dict[str, Any]:
    """Return a result in the form of docs/page.schema.json."""
    doubts: Sequence[str] = getattr(result, "warnings", ())
    ending = [f"and {len(doubts) - _MOST_TEXTS} more"] if doubts[_MOST_TEXTS:] else []
    amounts = [
        (label, str(getattr(result, name)))
        for label, name in (("from", "src"), ("step", "step"), ("to", "dst"))
        if getattr(result, name, None)
    ]
    headline, tables, drawings = result.in_short(), [], {}
    for section in result.sections():
        if isinstance(section, Lines):
            if section.texts != (headline,):  # which stands in the head
                amounts.append((section.label, "; ".join(section.texts)))
        elif isinstance(section, Group):
            amounts.append((section.heading, "; ".join(section.texts)))
        elif isinstance(section, Table):
            columns, rows, _ = section
            tables.append({"columns": columns, "rows": rows[:_MOST_ROWS], "total": len(rows)})
        elif section.facts:
            drawings[section.kind] = section.facts
    head = {
        "title": "", "what": type(result).__name__, "told": headline, "state": "plan",
        "amounts": amounts,
    }  # fmt: skip
    warnings = [*doubts[:_MOST_TEXTS], *ending]
    document = {"result": "result", "head": head, "warnings": warnings, **drawings}
    return {**document, "tables": tables} if tables else document


def as_table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with a headline."""
    from html import escape

    left = 'style="text-align:left"'
    body = "".join(
        "<tr>" + "".join(f"<td {left}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div><strong>{escape(head)}</strong><table>{body}</table></div>"


def stage_layers(before: Sequence[str], after: Sequence[str]) -> Drawing:
    """Draw the layers of pipeline stages, such as "0-3, 7"; nothing where there is one stage."""
    sides = [
        {"name": name, "stages": [{"names": names, "layers": _layers_in(names)} for names in side]}
        for name, side in (("before", before), ("after", after))
        if side
    ]
    return Drawing("layers", sides if max(len(before), len(after)) > 1 else [])


def _layers_in(text: str) -> int:
    """Return how many layers a text such as "0-3, 7" names.

    >>> _layers_in("0-3, 7"), _layers_in("")
    (5, 0)
    """
    parts = [part.partition("-") for part in text.split(", ") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)
