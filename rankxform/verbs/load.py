"""`load`: a checkpoint in memory; each process gets the slices of its own destination rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rankxform.errors import UsageError
from rankxform.layout.names import summarize_names
from rankxform.planning.catalog import Parameter
from rankxform.request import Request
from rankxform.results import as_table
from rankxform.target.destination import ArrayDestination
from rankxform.transport import Team
from rankxform.transport.launcher import msrun_workers
from rankxform.verbs.convert import OnStart, convert, start_silently

_SHOWN = 20
"""Slices that a notebook shows."""


class Parameters(dict[str, Any]):
    """The slices of one destination rank: numpy arrays by name, in the order of its file.

    bfloat16 has the type of `ml_dtypes` if that is installed, else its words as ``uint16``; Int4
    its bytes, two values in each, as ``int8``. The text of an `append_dict` entry is a str.

    rank: whose slices. dtypes: MindSpore's names of the element types. full_shapes: of the
    parameters, in elements. left_over: names in the checkpoint that were not wanted. bytes_read:
    bytes that this process read. notices: what to know; warnings: what may not be what was meant.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        rank: int,
        parameters: Mapping[str, Parameter],
        left_over: Sequence[str],
        bytes_read: int,
        notices: Sequence[str],
        warnings: Sequence[str],
    ) -> None:
        super().__init__(arrays)
        self.rank = rank
        self.dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self.full_shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.left_over, self.bytes_read = tuple(left_over), bytes_read
        self.notices, self.warnings = tuple(notices), tuple(warnings)

    def __repr__(self) -> str:
        return f"Parameters({len(self)} slices of rank {self.rank}, bytes_read={self.bytes_read})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first slices, with their types and shapes."""
        rows = [
            (name, self.dtypes[name], f"{list(array.shape)} of {list(self.full_shapes[name])}")
            for name, array in islice(self.items(), _SHOWN)
            if name in self.dtypes
        ]
        hidden_count = len(self) - _SHOWN
        return as_table(
            repr(self),
            [
                *rows,
                *([(f"and {hidden_count} more", "", "")] if hidden_count > 0 else []),
                *((kind, text, "") for kind, text in self._doubts()),
            ],
        )

    def _doubts(self) -> Iterator[tuple[str, str]]:
        yield from (("note", text) for text in self.notices)
        yield from (("warning", text) for text in self.warnings)


def load(request: Request, rank: int, team: Team, on_start: OnStart = start_silently) -> Parameters:
    """Return the slices of destination `rank`.

    Every process calls this, each with a rank and an `include` of its own; two may ask
    for the same. Only the byte ranges that the slices need are read, in the memory that
    `request` allows. Raises UsageError where processes ask otherwise for different things.
    """
    destination = ArrayDestination(rank)
    outcome = convert(request, destination, team, on_start)
    planner, arrays = outcome.conversion.planner, destination.arrays
    parameters_by_name = {name: planner.parameter(name) for name in arrays}
    notices = [*outcome.notices]
    words = [name for name, parameter in parameters_by_name.items()
             if parameter.dtype == "BFloat16" and str(arrays[name].dtype) == "uint16"]  # fmt: skip
    if words:
        names_text = summarize_names(words, 2)
        notices.append(f"{names_text}: words of bfloat16 as uint16, for ml_dtypes is not installed")
    dropped = [name for omitted in planner.selection.left_out for name in omitted.names]
    return Parameters(
        arrays,
        rank,
        parameters_by_name,
        [*dropped, *(p.name for p in planner.selection.parameters if p.name not in arrays)],
        outcome.processes[team.rank].traffic.read,
        notices,
        outcome.warnings,
    )


def own_rank(team: Team, environ: Mapping[str, str]) -> int:
    """Return the destination rank of this process: its number in the team, or in the job.

    Without an MPI launcher, msrun or a script may have started the process and set RANK_ID. Raises
    UsageError if RANK_ID is not a number, or is missing although there are several workers.
    """
    if team.size > 1:
        return team.rank
    if not environ.get("RANK_ID"):
        if msrun_workers(environ) > 1:
            raise UsageError(
                f"this is one of {msrun_workers(environ)} workers, and RANK_ID does not say which "
                "(msrun sets it where --node_rank is given)",
                "pass rank=",
            )
        return team.rank
    text = environ["RANK_ID"]
    if not text.isdecimal():
        raise UsageError(f"RANK_ID is {text!r} in the environment; a rank is a number from 0 on")
    return int(text)
