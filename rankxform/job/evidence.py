"""Evidence from bytes: whether ranks that hold the same elements agree, and others differ.

A strategy is believed as far as the files bear it out. Before anything is written a little of what
several ranks hold is compared, and parameters that no strategy lists are compared whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rankxform.engine.operands import read_box
from rankxform.errors import CheckpointError, UsageError
from rankxform.geometry.box import Box
from rankxform.layout.names import summarize_names
from rankxform.planning.catalog import Parameter
from rankxform.planning.consistency import (
    Sample,
    check_each_differs,
    check_extra_rank,
    check_slices_differ,
    check_undeclared,
    differing_values,
    extra_to_sample,
    own_candidates,
    sharded_by_pattern,
    to_compare,
    to_sample,
)
from rankxform.planning.selection import sources_of
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage import samples
from rankxform.storage.posix import OnProgress
from rankxform.storage.sources import Sources
from rankxform.target.asked import Asked
from rankxform.target.reading import reading
from rankxform.target.suggestions import suggesting
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.values import dataclass

from .replicas import check_replicas

_ROWS, _PLACES = 64, 64
"""Rows that are looked at at once; places where rows are compared."""


@dataclass(frozen=True)
class Evidence:
    """What ranks were found to hold.

    own: source tensors of which the holders have values of their own. names: of those that were
    compared whole, and nbytes of them. notices: what to know.
    """

    own: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    nbytes: int = 0
    notices: tuple[str, ...] = ()

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.own | other.own,
            self.names + other.names,
            self.nbytes + other.nbytes,
            self.notices + other.notices,
        )


class _Look(NamedTuple):
    """What one process sees of source files, by file id and name: a digest of all bytes of what is
    compared whole, and of others a sample."""

    digests: dict[int, dict[str, bytes]]
    samples: dict[int, dict[str, Sample]]


def examine(asked: Asked, source: Source, target: Target, team: Team) -> Evidence:
    """Compare what ranks hold of the same elements, and of different ones. Collective.

    Raises CheckpointError where that contradicts what is said of the source, or of an adapter, with
    what else may be meant.
    """
    with suggesting(asked, source, team):
        return _examined(asked.request, source, target, team)


def _examined(request: Request, source: Source, target: Target, team: Team) -> Evidence:
    selection = target.planner.selection
    chosen = sources_of(selection.parameters, source.table)
    found = _compare_ranks(request, source, chosen, selection.name_of, team)
    adapter = target.adapter
    if adapter is not None:
        every = adapter.table.parameters
        own = _compare_ranks(request, adapter, every, selection.name_of, team)
        found += replace(own, own=frozenset())
    if target.truncated_vocab or target.tied_duplicates:
        team.bcast(lambda: _check_rows(request, source, target))
    if request.check_replicas != "no":
        found += Evidence(notices=tuple(check_replicas(request, source, team)))
    return found


def _compare_ranks(
    request: Request,
    source: Source,
    chosen: Sequence[Parameter],
    name_of: Callable[[str], str],
    team: Team,
) -> Evidence:
    """Compare what ranks hold of the `chosen` tensors; what differs is ranks' own."""
    looks = team.allgather_work(
        lambda on_progress: _look(request, source, chosen, team.rank, on_progress)
    )
    digests = {file: found for one in looks for file, found in one.digests.items()}
    sampled = {file: found for one in looks for file, found in one.samples.items()}
    seen = _Look(digests, sampled)
    return team.agree(lambda: _judged(request, source, chosen, name_of, seen))


def _judged(
    request: Request,
    source: Source,
    chosen: Sequence[Parameter],
    name_of: Callable[[str], str],
    seen: _Look,
) -> Evidence:
    """Return what all processes saw amounts to; pure. Raises CheckpointError."""
    catalog, own = source.table, set(own_candidates(chosen, source.table))
    by_pattern = sharded_by_pattern(chosen, catalog)
    if by_pattern and not request.allow_equal_slices:
        check_each_differs(catalog, seen.samples, by_pattern)
    elif not request.allow_equal_slices:
        check_slices_differ(catalog, seen.samples, to_sample(chosen))
    for rank in () if request.allow_extra_ranks else source.extra:
        check_extra_rank(catalog, seen.samples, rank, str(source.paths[rank]))
    differing = differing_values(catalog, seen.digests)
    listed = [name for name in differing if name in own]
    others = {name: files for name, files in differing.items() if name not in own}
    take_one = request.unlisted == "take-one"
    notices = check_undeclared(catalog, others, take_one, name_of)
    if listed:
        notices.append(
            f"{summarize_names(listed, 2)} differ between ranks, as running statistics do; "
            "each destination rank gets one source rank's"
        )
    nbytes = sum(
        source.indexes[file].nbytes(name) for file, found in seen.digests.items() for name in found
    )
    names = dict.fromkeys(name for found in seen.digests.values() for name in found)
    return Evidence(frozenset(differing), tuple(names), nbytes, tuple(notices))


def _look(
    request: Request,
    source: Source,
    chosen: Sequence[Parameter],
    process: int,
    on_progress: OnProgress,
) -> _Look:
    every, catalog = {**source.indexes, **source.extra}, source.table
    compared = [*to_compare(chosen, catalog), *own_candidates(chosen, catalog)]
    extra, by_pattern = extra_to_sample(catalog, source.extra), sharded_by_pattern(chosen, catalog)
    sampled = [*to_sample(chosen), *extra, *by_pattern]
    seen = _Look({}, {})
    for file in source.reach.partition(every)[process]:
        path, index = source.paths[file], every[file]
        if request.check_crc:
            samples.check_crc(path, index, on_progress)
        if compared and file in source.indexes:
            seen.digests[file] = samples.digest_all(path, index, compared, on_progress)
        if sampled:
            seen.samples[file] = samples.sample(path, index, sampled)
        on_progress(0)
    return seen


# -- rows of whole tensors ------------------------------------------------------------------------


def _check_rows(request: Request, source: Source, target: Target) -> None:
    """Compare rows that are left out with what they are said to be; on process 0."""
    with reading(source, target) as inputs:
        if target.truncated_vocab:
            _check_truncated(request, source, target, inputs.sources)
        if target.tied_duplicates and source.reach.is_full:
            _check_tied(source, target, inputs.sources)


def _check_tied(source: Source, target: Target, sources: Sources) -> None:
    """Compare some rows of tensors that are left out because each is the same as another."""
    known = {p.src_name: p for p in source.table.parameters}
    for name, of in target.tied_duplicates:
        a, b = known[name], known.get(of)
        if b is None:
            continue
        rows = min(a.shape[:1] + b.shape[:1], default=0)
        alike = (a.shape, a.src_dtype) == (b.shape, b.src_dtype)
        for first in range(0, rows, max(1, rows // _PLACES)) if alike else ():
            own, other = (_rows(one, sources, first, min(first + 1, rows)) for one in (a, b))
            alike = alike and own.tobytes() == other.tobytes()
        if not alike:
            raise CheckpointError(
                f"{name!r} should be the same as {of!r} by {target.map_in_words}, and is "
                "not; is it this model's configuration? --exclude leaves it out as it is"
            )


def _check_truncated(request: Request, source: Source, target: Target, sources: Sources) -> None:
    """Refuse to take rows from a vocabulary that are no padding, unless told to."""
    rows = request.vocab
    if request.vocab_cut or rows is None:
        return
    if not source.reach.is_full:
        raise UsageError(
            "--vocab: which rows are padding, one process looks up, and it does not see all "
            "files; say --vocab-cut if they are"
        )
    known = {p.src_name: p for p in source.table.parameters}
    for name in target.truncated_vocab:
        parameter, more = known[name], known[name].shape[0]
        for first in range(rows, more, _ROWS):
            kept = _rows(parameter, sources, rows - 1, rows)
            found = _rows(parameter, sources, first, min(first + _ROWS, more))
            if found.any() and not (found == kept).all():
                raise CheckpointError(
                    f"{name!r}: rows {rows} to {more - 1} are not padding (zeros, or the last "
                    f"row again); give --vocab {more}, or say --vocab-cut to lose them"
                )


def _rows(parameter: Parameter, sources: Sources, first: int, last: int) -> Any:
    shape = parameter.shape
    box = Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    return read_box(parameter, box, sources)
