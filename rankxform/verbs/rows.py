"""Values that are compared with what is said of them, on process 0: rows, and masters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote
from typing import Any

from rankxform.engine.cast import BFLOAT16, FLOAT16, cast_function
from rankxform.engine.copier import read_box
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import content_bytes
from rankxform.geometry.box import Box
from rankxform.layout.names import summarize_names
from rankxform.operations.rename import STEP_OF_ONE
from rankxform.operations.select import is_master
from rankxform.planning.catalog import Parameter
from rankxform.planning.evidence import Evidence
from rankxform.request import Request
from rankxform.source.open import Source
from rankxform.source.options import ACCEPT_STEP
from rankxform.storage.source_reader import SourceReader
from rankxform.target.destination import open_work_inputs
from rankxform.target.target import Target
from rankxform.transport import Team

_ROWS, _COLUMNS = 64, 8192
"""Rows that are looked at at once, and columns of masters."""
_PLACES, _BLOCK = 64, 16
"""Places where rows of large tensors are compared, and rows at each."""
_ALL, _AT_ONCE = 64 << 20, 4 << 20
"""Bytes of two tensors all of whose rows are compared, and of rows that are read at once."""
_FEW_ROWS = 4
_MOST_UNLIKE = 0.5
"""Part of the values that stochastic rounding may round otherwise."""


def check_values(request: Request, source: Source, target: Target, team: Team) -> Evidence:
    """Compare values with what is said of them: rows that are left out, and masters. Collective.

    Raises CheckpointError.
    """
    masters = _masters(target)
    if not (target.truncated_vocab or target.tied_duplicates or masters):
        return Evidence()
    return team.bcast(lambda: _checked(request, source, target, masters))


def _checked(
    request: Request, source: Source, target: Target, masters: Sequence[tuple[Parameter, Parameter]]
) -> Evidence:
    with open_work_inputs(source, target) as inputs:
        if target.truncated_vocab:
            _check_truncated(request, source, target, inputs.sources)
        if target.tied_duplicates and source.reach.is_full:
            _check_tied(request, source, target, inputs.sources)
        if masters and source.reach.is_full:
            return _compare_masters(masters, inputs.sources)
    return Evidence()


def _masters(target: Target) -> list[tuple[Parameter, Parameter]]:
    """Return some masters of a longer type, spread over the model, each with its parameter."""
    parameters_by_name = {p.name: p for p in target.planner.catalog.parameters}
    pairs = [
        (parameter, parameters_by_name[parameter.base_name])
        for name, parameter in parameters_by_name.items()
        if is_master(parameter.state)
        and parameter.base_name in parameters_by_name
        and parameter.shape == parameters_by_name[parameter.base_name].shape
        and len(parameter.shape) > 1
        and parameters_by_name[parameter.base_name].src_dtype in (FLOAT16, BFLOAT16)
    ]
    return pairs[:: max(1, len(pairs) // _FEW_ROWS)][:_FEW]


def _compare_masters(
    pairs: Sequence[tuple[Parameter, Parameter]], sources: SourceReader
) -> Evidence:
    """Warn of masters that do not round to their parameters."""
    wrong = []
    for master, parameter in pairs:
        inner = min(master.shape[-2], _ROWS), min(master.shape[-1], _COLUMNS)
        box = Box((0,) * len(master.shape), (1,) * (len(master.shape) - 2) + inner)
        values, words = (read_box(tensor, box, sources) for tensor in (master, parameter))
        rounded = words.copy()
        cast_function(master.src_dtype, parameter.src_dtype)(rounded, values)
        if (rounded.view("<u2") != words.view("<u2")).mean() > _MOST_UNLIKE:
            wrong.append(master.name)
    if not wrong:
        return Evidence()
    count = f"{len(wrong)} of {len(pairs)} masters looked at"
    text = f"{summarize_names(wrong, 2)}: {count} do not round to their parameters; are they of "
    return Evidence(warnings=(f"{text}another step, or of another rank?",))


def _check_tied(request: Request, source: Source, target: Target, sources: SourceReader) -> None:
    """Compare some rows of tensors that are left out because each is the same as another.

    Steps of single parameters differ if these were trained later; with --accept step the first is
    taken for all.
    """
    parameters_by_name = {p.src_name: p for p in source.table.parameters}
    for name, original in target.tied_duplicates:
        a, b = parameters_by_name[name], parameters_by_name.get(original)
        if b is None:
            continue
        rows = min(a.shape[:1] + b.shape[:1], default=1)  # a number is one row
        is_equal = (a.shape, a.src_dtype) == (b.shape, b.src_dtype)
        small = _is_small(a, b)
        many = _rows_at_once(a) if small else _BLOCK
        stride = many if small else max(many, rows // _PLACES)
        for first in range(0, rows, stride) if is_equal else ():
            duplicate_rows, original_rows = (
                _rows(parameter, sources, first, min(first + many, rows)) for parameter in (a, b)
            )
            is_equal = is_equal and duplicate_rows.tobytes() == original_rows.tobytes()
        if not is_equal and a.state is not None and a.state.kind == STEP_OF_ONE:
            if request.accepts(ACCEPT_STEP, name):
                continue
            raise CheckpointError(
                f"{name!r} and {original!r} differ, and the destination has one step for all",
                "--accept step takes the first of them for all",
                f"--exclude {quote('^global_step$')} leaves the step out",
            )
        if not is_equal:
            raise CheckpointError(
                f"{name!r} should be the same as {original!r} by "
                f"{target.map_in_words or '--names'}, and "
                "is not",
                "give this model's configuration, if it is another's",
                f"--exclude {quote(f'^{re.escape(name)}$')} leaves it out",
            )


def _check_truncated(
    request: Request, source: Source, target: Target, sources: SourceReader
) -> None:
    """Refuse to take rows from a vocabulary that are no padding, unless told to."""
    rows = request.vocab
    if request.vocab_cut or rows is None:
        return
    if not source.reach.is_full:
        raise UsageError(
            "--vocab: which rows are padding, one process looks up, and it does not see all files",
            "say --vocab-cut if they are",
        )
    parameters_by_name = {p.src_name: p for p in source.table.parameters}
    for name in target.truncated_vocab:
        parameter, n_rows = parameters_by_name[name], parameters_by_name[name].shape[0]
        for first in range(rows, n_rows, _ROWS):
            last_row = _rows(parameter, sources, rows - 1, rows)
            dst_rows = _rows(parameter, sources, first, min(first + _ROWS, n_rows))
            if dst_rows.any() and not (dst_rows == last_row).all():
                raise CheckpointError(
                    f"rows {rows} to {n_rows - 1} are not padding (zeros, or the last row again)",
                    f"give --vocab {n_rows}",
                    "say --vocab-cut to lose them",
                    where=f"{name!r}",
                )


def _rows(parameter: Parameter, sources: SourceReader, first: int, stop: int) -> Any:
    shape = parameter.shape
    box = Box((first, *(0 for _ in shape[1:])), (stop, *shape[1:])) if shape else Box((), ())
    return read_box(parameter, box, sources)


def _rows_at_once(parameter: Parameter) -> int:
    nbytes = content_bytes(parameter.src_dtype, parameter.shape)
    return max(2, _AT_ONCE * (*parameter.shape, 1)[0] // max(1, nbytes))


def _is_small(*parameters: Parameter) -> bool:
    """Tell whether all rows are looked at, and not some."""
    return (
        sum(content_bytes(parameter.src_dtype, parameter.shape) for parameter in parameters) <= _ALL
    )
