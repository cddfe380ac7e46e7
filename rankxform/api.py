"""The verbs as functions, for programs.

Under mpirun they are collective: every process calls them alike, with the communicator.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import index
from pathlib import Path
from typing import Any

from rankxform import inspection, job
from rankxform.cli.planned import plan_summary
from rankxform.errors import (
    RankxformError,
    RankxformWarning,
    StorageError,
    UsageError,
    storage_errors,
)
from rankxform.layout.strategy import Strategy
from rankxform.storage import strategies
from rankxform.transport import Team, team

_OPTIONS = frozenset(option.name for option in fields(job.Request))
_LOADING = _OPTIONS & {
    "step", "suffix", "src_pattern", "include", "exclude", "one_sided", "unlisted", "replicas",
    "allow_equal_slices", "allow_extra_ranks", "check_crc", "memory", "reading", "costs", "files",
}  # fmt: skip


def transform(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    src_strategy: str | os.PathLike[str] | None = None,
    dst_strategy: str | os.PathLike[str] | None = None,
    *,
    comm: Any = None,
    **options: Any,
) -> job.Report:
    """Convert the checkpoint in `src` to `dst`; return what was done.

    A strategy is a file, a folder of stage files, or "none" for whole tensors; the destination's
    may be left out then, and the source's where `src` is one complete file. `comm` is an mpi4py
    communicator;
    without one the launcher's world is used, or this process alone. `options` are the other
    fields of `rankxform.job.Request`: prefix, format, ranks, src_pattern, step, suffix, include,
    exclude, one_sided, unlisted, replicas, allow_equal_slices, allow_extra_ranks, check_crc, crc,
    overwrite, fsync, link, dst_placement, memory, reading, costs, verify, check_replicas. Raises
    RankxformError, of one class on every process; a RankxformWarning is given on process 0 for each
    of the report's warnings.
    """
    with _together(comm) as together:
        with together.together():
            request = _request(src, dst, src_strategy, dst_strategy, options)
        report = job.transform(request, together)
        _warn(report.warnings, together)
        return report


def load(
    src: str | os.PathLike[str],
    src_strategy: str | os.PathLike[str] | Strategy | None = None,
    dst_strategy: str | os.PathLike[str] | Strategy | None = None,
    *,
    rank: int | None = None,
    comm: Any = None,
    **options: Any,
) -> job.Parameters:
    """Return this process's slices of the checkpoint in `src` as numpy arrays, by name.

    Nothing is written, and only what the slices need is read. `rank` is the destination rank;
    without it, the process's number in `comm` or in the launcher's world, or what RANK_ID says
    to a process of msrun; 0 where the destination has no strategy, so that all get all.
    All processes of `comm` or of the launcher's world call this together.
    A strategy may also be a network's (`rankxform.mindspore.strategy_of`). `options` are those
    of `transform` that do not concern files: step, suffix, src_pattern, include, exclude,
    one_sided, unlisted, replicas, allow_equal_slices, allow_extra_ranks, check_crc, memory,
    reading, costs.
    """
    with _together(comm) as together:
        with together.together():
            request = _request(src, None, src_strategy, dst_strategy, options, _LOADING)
            wanted = _own_rank(rank, request, together)
        found = job.load(request, together, wanted)
        _warn(found.warnings, together)
        return found


def _own_rank(rank: int | None, request: job.Request, together: Team) -> int:
    if rank is None:
        whole = strategies.is_none(request.dst_strategy)
        return 0 if whole else job.own_rank(together, os.environ)
    try:
        return index(rank)
    except TypeError:
        raise UsageError(f"rank is {rank!r}; a number is wanted") from None


def verify(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    src_strategy: str | os.PathLike[str] | None = None,
    dst_strategy: str | os.PathLike[str] | None = None,
    *,
    comm: Any = None,
    **options: Any,
) -> job.Verdict:
    """Compare every byte of `dst` with what `src` and the strategies make of it.

    Whatever tool wrote `dst`; the arguments are those of `transform`. With one folder, it is
    compared with its own manifest. The verdict's `differences` are empty where all is right.
    """
    with _together(comm) as together:
        if dst is None:
            return job.verify_alone(os.fspath(src), together)
        with together.together():
            request = _request(src, dst, src_strategy, dst_strategy, options)
        verdict = job.verify(request, together)
        _warn(verdict.warnings, together)
        return verdict


def plan(
    src: str | os.PathLike[str],
    src_strategy: str | os.PathLike[str] | None = None,
    dst_strategy: str | os.PathLike[str] | None = None,
    *,
    processes: int | None = None,
    comm: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Return what `transform` would read and write, as ``plan --json`` prints it.

    `options` are those of `transform`, and `shapes`: a JSON file of full shapes in place of `src`.
    """
    with _together(comm) as together:
        with together.together():
            request = _request(src, None, src_strategy, dst_strategy, options)
        conversion = job.prepare(request, together)
        _warn(conversion.warnings, together)
        found, choice = job.foreseen(conversion, processes or together.size, together)
        with together.together():
            return plan_summary(conversion, found, choice.call)
    raise AssertionError("together() raises or returns")


def ranks(
    src_strategy: str | os.PathLike[str] | None,
    dst_strategy: str | os.PathLike[str] | None,
    wanted: tuple[int, ...] = (),
) -> dict[int, tuple[int, ...]]:
    """Return for each destination rank the source ranks whose bytes it needs."""
    with storage_errors():
        src, dst = (
            strategies.load(_strategy(src_strategy)),
            strategies.load(_strategy(dst_strategy)),
        )
    return inspection.needed_ranks(src, dst, wanted)


def merge(
    folder: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write the strategy files of all pipeline stages in `folder` as the one file `target`."""
    path = Path(target)
    if path.exists() and not overwrite:
        raise StorageError(f"{path}: is already there; remove it, or pass overwrite=True")
    with storage_errors():
        strategies.merge(Path(folder), path)


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a checkpoint file, a checkpoint folder or a strategy."""
    with storage_errors():
        return inspection.inspect(Path(path))


def _warn(texts: Iterable[str], together: Team) -> None:
    """Warn the program on process 0, as the command line does in words. Collective.

    Where warnings are errors, every process raises the first.
    """
    for text in texts:
        if together.share(lambda text=text: _is_refused(text)):  # type: ignore[misc]
            raise RankxformWarning(text)


def _is_refused(text: str) -> bool:
    try:
        warnings.warn(text, RankxformWarning, stacklevel=6)
    except RankxformWarning:
        return True
    return False


@contextmanager
def _together(comm: Any) -> Iterator[Team]:
    """Work as a team, and let its communicator go when all have ended alike."""
    together = team(comm)
    try:
        yield together
    except (RankxformError, RankxformWarning):  # raised on every process
        together.free()
        raise
    together.free()


def _request(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None,
    src_strategy: str | os.PathLike[str] | Strategy | None,
    dst_strategy: str | os.PathLike[str] | Strategy | None,
    options: dict[str, Any],
    known: Collection[str] = _OPTIONS,
) -> job.Request:
    for several in ("include", "exclude"):
        if several in options:
            given = options[several]
            options[several] = (given,) if isinstance(given, str) else tuple(given)
    unknown = sorted(set(options).difference(known))
    if unknown:
        raise UsageError(
            f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}"
        )
    target = None if dst is None else os.fspath(dst)
    return job.Request(
        os.fspath(src),
        target,
        src_strategy=_strategy(src_strategy),
        dst_strategy=_strategy(dst_strategy),
        **options,
    )


def _strategy(given: str | os.PathLike[str] | Strategy | None) -> str | Strategy | None:
    return given if given is None or isinstance(given, Strategy) else os.fspath(given)
