"""Checks before the first byte is written: of the target, and whether ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from posixpath import relpath
from typing import Any

from rankxform.engine.operands import read_box
from rankxform.errors import CheckpointError, StorageError, UsageError
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
from rankxform.publish.target import FOLDER_NAME, JOB_NAME, MANIFEST_NAME
from rankxform.request import Request
from rankxform.source.opening import Source, listing_at
from rankxform.storage import samples
from rankxform.storage.posix import OnProgress, inode, is_inside, is_same, lies_in
from rankxform.storage.sources import Sources
from rankxform.target.aim import Conversion
from rankxform.target.reading import opened
from rankxform.target.target import Target
from rankxform.transport import Team


def check_target(
    request: Request, sources: Iterable[Path], output_paths: Iterable[Path], team: Team
) -> None:
    """See that writing will harm nothing, on every node. Raises UsageError or StorageError."""

    def check() -> None:
        if request.dst is None:
            raise UsageError("no destination folder")
        if request.shapes is not None:
            raise UsageError("shapes are for a plan; a transform reads a checkpoint")

    team.agree(check)
    is_leader = team.nodes.is_leader(team.rank)
    team.agree(lambda: _check_apart(request, list(sources), output_paths) if is_leader else None)


def check_foreign_files(request: Request, target: Target, own: Iterable[Path], team: Team) -> None:
    """Refuse a destination that holds another's checkpoint files, and nothing of rankxform's.

    Raises StorageError. Collective.
    """
    dst = Path(request.dst or "")
    marks = dst / MANIFEST_NAME, dst / FOLDER_NAME / JOB_NAME
    if request.overwrite or any(team.allgather(lambda: any(mark.exists() for mark in marks))):
        return
    found = foreign_files(target, own, team)
    if found:
        raise StorageError(
            f"{dst}: holds checkpoint files that rankxform did not write ({_few(found)}). Are SRC "
            "and DST in this order? Name an empty folder, or say --overwrite to write beside them"
        )


def _check_apart(request: Request, sources: list[Path], output_paths: Iterable[Path]) -> None:
    """Refuse destination files that are, or lie among, source files, whatever their paths."""
    src, dst = Path(request.src), Path(request.dst or "")
    if dst.exists() and not dst.is_dir():
        raise StorageError(f"{dst}: is a file, and DST must be a folder; name another")
    files = {inode(path): path for path in sources}
    folders = {inode(path.parent) for path in sources}
    inside = src.is_dir() and (is_inside(dst, src) or lies_in(dst, folders))
    for option in ("lora", "like"):
        given = getattr(request, option)
        if given is not None and (is_same(Path(given), dst) or is_inside(dst, Path(given))):
            raise UsageError(
                f"{dst}: is the folder of --{option}, which is never written to; choose another "
                "destination"
            )
    for final in output_paths:
        there, folder = inode(final), inode(final.parent)
        if inside or (folder is not None and folder in folders):
            raise UsageError(
                f"{final}: lies in the source folder {src}, which is never written to; "
                "choose another destination"
            )
        if there is not None and there in files:
            raise UsageError(
                f"{final}: is the source file {files[there]} under another name, which is never "
                "replaced; choose another destination"
            )
        if final.is_dir():
            raise StorageError(f"{final}: is a folder, where a checkpoint file is to be written")
    if any(is_same(path.parent.parent, dst) for path in sources if path.parent != src):
        raise UsageError(
            f"{dst}: holds the source in its rank folders, which are never written to; choose "
            "another destination"
        )


def foreign_files(target: Target, own: Iterable[Path], team: Team) -> list[str]:
    """Return other checkpoint files that may be taken for a destination's own. Collective."""
    form, folder = target.form, target.folder
    names = [relpath(path, folder) for path in own]

    def look() -> list[str]:
        if not team.nodes.is_leader(team.rank) or not folder.is_dir():
            return []
        listing = listing_at(folder, form)
        return [str(folder / name) for name in form.foreign_files(listing, names)]

    every = team.allgather(look)
    return sorted({path for some in every for path in some})


def warn_of(found: Sequence[str]) -> list[str]:
    """Return a warning of other checkpoint files, if there are any."""
    if not found:
        return []
    return [
        f"{_few(found)}: another checkpoint file lies beside those of this destination, and may "
        "be loaded instead; remove what does not belong there"
    ]


def _few(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if paths[1:] else "")


_ROWS, _PLACES = 64, 64
"""Rows that are looked at at once; places where rows are compared."""

Digests = dict[int, dict[str, bytes]]
Samples = dict[int, dict[str, Sample]]
"""What the source files hold, by file id and name: for unlisted parameters a digest of all bytes,
for others a sample."""


def compare_ranks(conversion: Conversion, team: Team) -> tuple[Conversion, int, list[str]]:
    """Check by digests that the folder fits its strategy. Collective.

    Returns the conversion, planned with what is known now of ranks' own values; the bytes read; and
    notices. An adapter's folder is checked alike.
    """
    request, planner = conversion.request, conversion.planner
    selection = planner.selection
    chosen = sources_of(selection.parameters, planner.catalog)
    own, nbytes, notices = _compare_ranks(
        request, conversion.source, chosen, selection.name_of, team
    )
    if conversion.adapter is not None:
        adapter = conversion.adapter
        _, more, others = _compare_ranks(
            request, adapter, adapter.table.parameters, selection.name_of, team
        )
        nbytes, notices = nbytes + more, [*notices, *others]
    if conversion.truncated_vocab:
        team.agree(lambda: check_cut(conversion) if team.rank == 0 else None)
    if conversion.tied_duplicates:
        team.agree(lambda: check_repeated(conversion) if team.rank == 0 else None)
    if own:
        conversion = replace(conversion, planner=planner.with_own(own))
    return conversion, nbytes, notices


def check_repeated(conversion: Conversion) -> None:
    """Compare some rows of tensors that are left out because each is the same as another."""
    known = {p.src_name: p for p in conversion.planner.catalog.parameters}
    if not conversion.source.reach.is_full:
        return
    with opened(conversion) as (sources, _):
        for name, of in conversion.tied_duplicates:
            a, b = known[name], known.get(of)
            if b is None:
                continue
            rows = min(a.shape[:1] + b.shape[:1], default=0)
            step = max(1, rows // _PLACES)
            alike = (a.shape, a.src_dtype) == (b.shape, b.src_dtype)
            for first in range(0, rows, step) if alike else ():
                last = min(first + 1, rows)
                some = (_rows(one, sources, first, last) for one in (a, b))
                alike = alike and next(some).tobytes() == next(some).tobytes()
            if not alike:
                raise CheckpointError(
                    f"{name!r} should be the same as {of!r} by {conversion.map_in_words}, and is "
                    "not; is it this model's configuration? --exclude leaves it out as it is"
                )


def check_cut(conversion: Conversion) -> None:
    """Refuse to take rows from a vocabulary that are no padding, unless told to."""
    rows = conversion.request.vocab
    if conversion.request.vocab_cut or rows is None:
        return
    known = {p.src_name: p for p in conversion.planner.catalog.parameters}
    with opened(conversion) as (sources, _):
        if not conversion.source.reach.is_full:
            raise UsageError(
                "--vocab: which rows are padding, one process looks up, and it does not see all "
                "files; say --vocab-cut if they are"
            )
        for name in conversion.truncated_vocab:
            parameter = known[name]
            more = parameter.shape[0]
            for first in range(rows, more, _ROWS):
                last = min(first + _ROWS, more)
                kept = _rows(parameter, sources, rows - 1, rows)
                found = _rows(parameter, sources, first, last)
                if found.any() and not (found == kept).all():
                    raise CheckpointError(
                        f"{name!r}: rows {rows} to {more - 1} are not padding (zeros, or the last "
                        f"row again); give --vocab {more}, or say --vocab-cut to lose them"
                    )


def _rows(parameter: Parameter, sources: Sources, first: int, last: int) -> Any:
    shape = parameter.shape
    box = Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    return read_box(parameter, box, sources)


def _compare_ranks(
    request: Request,
    source: Source,
    chosen: Sequence[Parameter],
    name_of: Callable[[str], str],
    team: Team,
) -> tuple[frozenset[str], int, list[str]]:
    """Compare what ranks hold of the `chosen` tensors; return those that differ, bytes, notices."""
    catalog = source.table
    looks = team.allgather_work(
        lambda on_progress: _look(request, source, chosen, team.rank, on_progress)
    )
    digests = {file: found for some, _ in looks for file, found in some.items()}
    sampled = {file: found for _, some in looks for file, found in some.items()}

    def check() -> tuple[frozenset[str], list[str]]:
        by_pattern = sharded_by_pattern(chosen, catalog)
        if by_pattern and not request.allow_equal_slices:
            check_each_differs(catalog, sampled, by_pattern)
        elif not request.allow_equal_slices:
            check_slices_differ(catalog, sampled, to_sample(chosen))
        for rank in () if request.allow_extra_ranks else source.extra:
            check_extra_rank(catalog, sampled, rank, str(source.paths[rank]))
        differing = differing_values(catalog, digests)
        listed = {name for name in differing if name in own}
        others = {name: files for name, files in differing.items() if name not in listed}
        take_one = request.unlisted == "take-one"
        notices = check_undeclared(catalog, others, take_one, name_of)
        if listed:
            notices.append(
                f"{summarize_names(listed, 2)} differ between ranks, as running statistics do; "
                "each destination rank gets one source rank's"
            )
        return frozenset(differing), notices

    own = set(own_candidates(chosen, catalog))
    differing, notices = team.agree(check)
    nbytes = sum(
        source.indexes[file].nbytes(name) for file, found in digests.items() for name in found
    )
    return differing, nbytes, notices


def _look(
    request: Request,
    source: Source,
    chosen: Sequence[Parameter],
    process: int,
    on_progress: OnProgress,
) -> tuple[Digests, Samples]:
    every, catalog = {**source.indexes, **source.extra}, source.table
    compared = [*to_compare(chosen, catalog), *own_candidates(chosen, catalog)]
    extra, by_pattern = extra_to_sample(catalog, source.extra), sharded_by_pattern(chosen, catalog)
    sampled = [*to_sample(chosen), *extra, *by_pattern]
    digests: Digests = {}
    some: Samples = {}
    for file in source.reach.partition(every)[process]:
        path, index = source.paths[file], every[file]
        if request.check_crc:
            samples.check_crc(path, index, on_progress)
        if compared and file in source.indexes:
            digests[file] = samples.digest_all(path, index, compared, on_progress)
        if sampled:
            some[file] = samples.sample(path, index, sampled)
        on_progress(0)
    return digests, some
