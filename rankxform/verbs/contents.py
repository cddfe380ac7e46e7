"""What a checkpoint holds, as facts that can be searched: tensors, boxes, files, keys, offsets.
What lies at a path, in short.

Tensors that are stored alike share a sharding, boxes in the same files a placement, and files that
are laid out alike a layout, so that thousands of ranks take no more room than a few.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from rankxform.display.text import format_count, format_size, shown_path
from rankxform.errors import CheckpointError, StoppedError
from rankxform.formats.container import Index, content_bytes
from rankxform.geometry.tiling import Grid
from rankxform.layout.names import natural_sort_key, pattern_of
from rankxform.layout.strategy import Strategy
from rankxform.planning.catalog import Parameter, Sharding
from rankxform.planning.selection import missing_slices, missing_slices_error
from rankxform.request import Request
from rankxform.results import NORMAL, VERBOSE, Drawing, Result, Section, Table, first_line, lines
from rankxform.source.choose import a_strategy_is_given
from rankxform.source.open import open_source
from rankxform.source.source import Source
from rankxform.statements import join
from rankxform.target.inputs import source_ref_with_strategy
from rankxform.transport import Team
from rankxform.values import dataclass

_MOST_FAULTS = 50


@dataclass(frozen=True, repr=False)
class Contents(Result):
    """What a checkpoint holds: a notebook shows a search over it.

    facts: tensors, how they are sharded, and where their boxes lie in files, as
    docs/page.schema.json has them.
    """

    facts: Mapping[str, Any]

    @property
    def src(self) -> str:
        """What was opened."""
        return str(self.facts["title"])

    @property
    def faults(self) -> tuple[str, ...]:
        """What was found wrong, in words."""
        return tuple(self.facts["faults"])

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be wrong."""
        return tuple(self.facts["warnings"])

    def in_short(self) -> str:
        wrong = f"; {format_count(len(self.faults), 'fault')}" if self.faults else ""
        return f"{self.facts['about']}{wrong}"

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        return CheckpointError.exit_code if self.faults else 0

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        yield lines("", f"{shown_path(self.src)}: {self.in_short()}")
        yield from (lines("", f"  {text}") for text in self.faults)
        yield Drawing("contents", [self.facts])


def contents(request: Request, team: Team) -> Contents:
    """Return what a source holds. Collective.

    Raises what opening it does; what is found wrong with its files is among the facts.
    """
    where = team.bcast(lambda: source_ref_with_strategy(request))
    source = open_source(where, team)
    if not source.paths or any(e.rule == a_strategy_is_given.__name__ for e in source.errors):
        source.require()
    return team.agree(lambda: Contents(_facts(source)))


def _facts(source: Source) -> dict[str, Any]:
    catalog = source.catalog
    parameters = sorted(  # states behind their parameters, and layers by number
        catalog.parameters if catalog else [],
        key=lambda p: (natural_sort_key(p.base_name), p.state is not None, p.name),
    )
    position = {parameter.name: number for number, parameter in enumerate(parameters)}
    faults = [error.text_of_inspection for error in source.errors[:_MOST_FAULTS]]
    if source.errors[_MOST_FAULTS:]:
        faults.append(f"and {len(source.errors) - _MOST_FAULTS} more faults")
    if catalog is not None and (missing_slices(parameters) or catalog.unreachable):
        faults.append(str(missing_slices_error(catalog, parameters, catalog.unreachable)))
    ids = {file: number for number, file in enumerate(source.paths)}
    layouts, layout_of = _layouts(source.indexes, ids, position)
    nbytes = [content_bytes(parameter.dtype, parameter.shape) for parameter in parameters]
    states = [parameter.state.kind if parameter.state else "parameters" for parameter in parameters]
    step = f", step {source.selected.step_name}" if source.selected.step_name else ""
    extent = f"{catalog.extent}, " if catalog and catalog.strategy else ""
    types = _totals((parameter.dtype for parameter in parameters), nbytes)
    numbers = {dtype: number for number, (dtype, *_) in enumerate(types)}
    shardings = _ShardingNumbers(ids)
    stored = sum(index.size for index in source.indexes.values())
    is_of_ranks = catalog is not None and catalog.strategy is not None
    parts = (catalog.rank_of, catalog.stage_of) if catalog and is_of_ranks else (None, None)
    return {
        "title": source.where.path,
        "about": f"{source.form.title}{step}: {extent}"
        f"{format_count(len(source.paths), 'file')} of {format_size(stored)}, "
        f"{format_count(len(parameters), 'tensor')} of {format_size(sum(nbytes))}",
        "faults": faults, "warnings": source.warnings,
        "kinds": _totals(states, nbytes),
        "types": types,
        "files": [
            [path, *(part(file) if part else None for part in parts), index.size if index else None]
            for file, path in source.paths.items()
            for index in [source.indexes.get(file)]
        ],
        "tensors": [
            [tensor.name, numbers[tensor.dtype], tensor.shape, number, shardings.number(tensor)]
            for tensor, number in zip(parameters, nbytes)
        ],
        "shardings": shardings.every,
        "placements": shardings.placements,
        "layouts": layouts,
        "layout_of": layout_of,
    }  # fmt: skip


def _totals(names: Iterable[str], nbytes: Iterable[int]) -> list[list[Any]]:
    """Return how many there are of each name, and their bytes; the largest first."""
    totals_by_name: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, stored in zip(names, nbytes):
        totals_by_name[name][0] += 1
        totals_by_name[name][1] += stored
    return sorted(
        ([name, *totals] for name, totals in totals_by_name.items()), key=lambda row: -row[2]
    )


def _layouts(
    indexes: Mapping[int, Index], ids: Mapping[int, int], position: Mapping[str, int]
) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Return where entries lie in files that are laid out alike, and which layout each file has.

    An entry is the number of its tensor, or its name where that is another.
    """
    numbers: dict[object, int] = {}
    layouts: list[dict[str, Any]] = []
    layout_of: list[int | None] = [None] * len(ids)
    for file, index in indexes.items():
        key = index.schema, index.offsets.tobytes()
        if key not in numbers:
            numbers[key] = len(layouts)
            names = index.schema.names
            layouts.append({
                "entries": [position.get(name, name) for name in names],
                "offsets": index.offsets.tolist(),
                "nbytes": [index.schema.nbytes(number) for number in range(len(names))],
            })  # fmt: skip
        layout_of[ids[file]] = numbers[key]
    return layouts, layout_of


class _ShardingNumbers:
    """Numbers shardings and placements as they are met."""

    def __init__(self, ids: Mapping[int, int]) -> None:
        self.every: list[dict[str, Any]] = []
        self.placements: list[list[int]] = []
        self._ids = ids
        self._numbers: dict[object, int] = {}
        self._placed: dict[tuple[int, ...], int] = {}

    def number(self, parameter: Parameter) -> int:
        """Return which of `every` a tensor's sharding is."""
        sharding = parameter.sharding
        assert isinstance(sharding, Sharding)  # a catalog's tensors are made of no others
        if sharding not in self._numbers:
            self._numbers[sharding] = len(self.every)
            self.every.append(self._described(sharding))
        return self._numbers[sharding]

    def _described(self, sharding: Sharding) -> dict[str, Any]:
        grid, cells = sharding.grid, sorted(sharding.files)
        boxes = [grid.box(cell) for cell in cells]
        files = [self._place(sharding.files[cell]) for cell in cells]
        copies = max((len(holders) for holders in sharding.files.values()), default=0)
        lacking = len(sharding.placement.lacking)
        text = format_count(len(cells), "slice")
        if [box.shape for box in boxes] == [grid.shape]:
            text = "whole"
        suffixes = sharding.placement.suffixes
        cuts = [sorted({box.start[axis] for box in boxes}) for axis in range(len(grid.shape))]
        many = sorted(range(len(cuts)), key=lambda axis: (-len(cuts[axis]), axis))[:2]
        axes: list[int | None] = [*sorted(many), None, None]
        return {
            "holds": f"{text}, in {format_count(copies, 'file')}{' each' if len(cells) > 1 else ''}"
            + (f"; {lacking:,} in no file" if lacking else ""),
            "axes": axes[:2],
            **(
                {
                    "edges": [_runs(edges) for edges in grid.edges],
                    # None: all, in their order
                    "cells": None if len(cells) == prod(len(e) - 1 for e in grid.edges) else cells,
                }
                if isinstance(grid, Grid)
                else {"boxes": [[box.start, box.stop] for box in boxes]}
            ),
            "files": _runs(files),
            "keys": [
                [suffixes.get((cell, file), "") for file in sharding.files[cell]] for cell in cells
            ]
            if suffixes
            else None,
        }  # fmt: skip

    def _place(self, files: tuple[int, ...]) -> int:
        if files not in self._placed:
            self._placed[files] = len(self.placements)
            self.placements.append(_runs([self._ids[file] for file in files]))
        return self._placed[files]


def _runs(numbers: Sequence[int]) -> list[int]:
    """Write numbers as first, how many, step, and so on.

    >>> _runs([0, 4, 8, 12]), _runs([0, 1, 2, 7])
    ([0, 4, 4], [0, 3, 1, 7, 1, 1])
    """
    runs: list[int] = []
    start = 0
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        runs.extend((numbers[start], end - start, step))
        start = end
    return runs


_FILE_COLUMNS = "tensors", "bytes", "file"


class Inspection(dict[str, Any], Result):
    """What lies at a path: the facts that ``inspect --json`` prints, by name.

    "kind" says which it is, and so which other facts there are.
    """

    def __init__(self, facts: Mapping[str, Any], *, is_raw: bool = False) -> None:
        """is_raw: a strategy is shown with device matrices and tensor maps too."""
        super().__init__(facts)
        self._is_raw = is_raw
        # Of kind "strategy": the one that was read, so that nothing is read when it is shown.
        self._strategy: Strategy | None = getattr(facts, "strategy", None)

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        if self.get("begun"):
            return StoppedError.exit_code
        is_incomplete = self["kind"] == "destination" and not self["complete"]
        return CheckpointError.exit_code if is_incomplete or self.get("faults") else 0

    @property
    def warnings(self) -> Sequence[str]:
        """What may not be what was meant."""
        texts: Sequence[str] = self.get("warnings", ())
        return texts

    def as_dict(self) -> dict[str, Any]:
        return dict(self)

    def in_short(self) -> str:
        return first_line(self.sections())

    def __repr__(self) -> str:
        return dict.__repr__(self)

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield a headline and a table.

        At `VERBOSE` each parameter of a file has a row, and each of many files.
        """
        kind, path = self["kind"], shown_path(self["path"])
        if self._strategy is not None:
            from .strategies import strategy_sections

            yield from strategy_sections(self["path"], self._strategy, self._is_raw)
        elif kind == "json":
            size = format_size(self["file_bytes"])
            yield lines("", f"{path}: JSON, and no strategy; {size}")
        elif kind == "checkpoint":
            yield from self._of_file(path, level)
        elif kind in ("strategies", "collection"):
            yield from self._of_entries(path)
        elif kind == "destination" and self["src"] is None:
            if "unclear" in self:
                yield lines("", f"{path}: rankxform's records cannot be read ({self['unclear']})")
            else:
                yield lines("", f"{path}: unfinished work of rankxform")
                yield from self._continuation()
        else:
            yield from self._heads(kind, path)
            yield self._files("" if level >= VERBOSE else "files")

    def _of_file(self, path: str, level: int) -> Iterator[Section]:
        """Yield what a file holds: a row for all layers' parameters of one kind, or for each."""
        entries_by_kind: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for entry in sorted(self["entries"], key=lambda entry: natural_sort_key(entry["name"])):
            name = entry["name"] if level >= VERBOSE else pattern_of(entry["name"])
            key = name, entry["dtype"], str(entry["shape"])
            entries_by_kind.setdefault(key, []).append(entry)
        rows = [
            (dtype, shape, format_size(sum(e["nbytes"] for e in entries)),
             entries[0]["name"] if len(entries) == 1 else f"{name} ({len(entries):,})")
            for (name, dtype, shape), entries in entries_by_kind.items()
        ]  # fmt: skip
        ending = ", with a checksum" if self["checksum"] else ""
        count, size = format_count(self["parameters"], "tensor"), format_size(self["nbytes"])
        yield lines("", f"{path}: {self['format']}, {count}, {size}{ending}")
        yield Table(("type", "shape", "bytes", "tensor"), rows, "")

    def _of_entries(self, path: str) -> Iterator[Section]:
        """Yield what lies in a folder of strategies, or of several kinds of files."""
        if not self["items"]:
            yield lines("", f"{path}: holds no checkpoint and no strategy")
            return
        yield lines("", f"{path}: {format_count(len(self['items']), 'entry')}")
        if "why" in self:
            yield lines("", f"cannot be read as one: {self['why']}")
        rows = [(Path(part["path"]).name, part["what"]) for part in self["items"]]
        yield Table(("name", "is"), rows, "")

    def _heads(self, kind: str, path: str) -> Iterator[Section]:
        """Yield what is said above the files of a checkpoint."""
        files = self["shards"]
        size = format_size(sum(file.get("nbytes", 0) for file in files))
        if kind == "files":
            yield lines("", f"{path}: {format_count(len(files), 'checkpoint file')}")
        elif kind == "destination":
            summary = f"checkpoint of {format_count(len(files), 'rank')}"
            if self["form_title"]:
                summary = f"{self['form_title']}, {format_count(len(files), 'file')}"
            state = "complete" if self["complete"] else "NOT COMPLETE"
            yield lines("", f"{path}: {summary}, {size}, {state}")
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self["written_at"]))
            checks = "fingerprints are kept: verify can compare all bytes with them"
            if not self["fingerprints"]:
                checks = (
                    "no fingerprints are kept: verify compares all bytes with SRC, else samples"
                )
            yield lines("written", f"by rankxform, {when}")
            yield lines("from", self["src"])
            yield lines("options", join(self["options"]) or "-")
            yield lines("checks", checks)
        elif kind == "described":
            ranks = f" of {format_count(self['ranks'], 'rank')}" if self.get("ranks") else ""
            count, steps = format_count(len(files), "file"), self._steps("iteration")
            yield lines("", f"{path}: {self['form_title']}{steps}, {count}{ranks}, {size}")
        else:
            ranks = format_count(len({file["rank"] for file in files}), "rank")
            yield lines("", f"{path}: checkpoint of {ranks}{self._steps('step')}, {size}")
        if "unclear" in self:
            yield lines("", f"not clear: {self['unclear']}")
        yield from (lines("", f"WRONG: {fault}") for fault in self.get("faults", ()))
        yield from (lines("", f"note: {notice}") for notice in self.get("notices", ()))
        if self.get("begun"):
            yield from self._continuation()

    def _continuation(self) -> Iterator[Section]:
        """Yield how far a run came, and how it is continued if it was stopped."""
        files = f"{self['files_complete']:,} of {self['files_to_make']:,} files"
        size, slices = format_size(self["bytes_begun"]), self["slices_begun"]
        slices_text = format_count(slices, "slice") if slices else "nothing yet"
        written = f"{size} of others written, of which a resume keeps {slices_text}"
        yield lines("begun", f"{files} complete; {written}")
        if self["at_work"]:
            yield lines("at work", "a run, on this folder now")
            return
        words = self["continued_by"]
        command = join(words) if words else "the same command continues it"
        yield lines("stopped", "no run is at work on it")
        yield lines("next", command)

    def _steps(self, noun: str) -> str:
        step = self["step"]
        others = [name for name in self.get("steps", ()) if name != step]
        also = f" (there are {', '.join(others)} too)" if others else ""
        return (f", {noun} {step}" if step else "") + also

    def _files(self, noun: str) -> Table:
        """Return a row for each file, with its rank where it is a rank's."""
        files = self["shards"]
        rows = [_file_row(file, self["path"]) for file in files]
        is_of_ranks = self["kind"] == "described" or not self.get("form_title")
        if not (is_of_ranks and any("rank" in file for file in files)):
            return Table(_FILE_COLUMNS, rows, noun)
        ranked_rows = [(file.get("rank", "-"), *row) for file, row in zip(files, rows)]
        return Table(("rank", *_FILE_COLUMNS), ranked_rows, noun)


def _file_row(facts: Mapping[str, Any], folder: str) -> tuple[object, object, str]:
    file = facts["file"].removeprefix(folder.rstrip("/") + "/")
    if "error" in facts:
        return "-", "-", f"{file}: {facts['error'].removeprefix(facts['file'] + ': ')}"
    return facts["parameters"], format_size(facts["nbytes"]), file
