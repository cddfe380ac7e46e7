"""The verbs as functions, for programs.

Under mpirun they are collective: every process makes the same call, with the same communicator. A
failure is raised as a `rankxform.RankxformError`, with the same class and message on every process.
Process 0 issues a RankxformWarning for each warning of a result.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from inspect import cleandoc
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar, Union

from rankxform import inspection
from rankxform.display.progress import Callback, progress_shower
from rankxform.display.text import format_count
from rankxform.engine.in_memory import stand_ins
from rankxform.layout.strategy import Strategy
from rankxform.planning.selection import source_ranks_needed
from rankxform.storage.store import ACCESS
from rankxform.storage.user_files import (
    is_none,
    load_strategy,
    merge_stage_files,
    output_path,
    save_strategy,
)
from rankxform.transport.launcher import launched_rank, launched_size
from rankxform.transport.team import Begin
from rankxform.verbs.check import Check
from rankxform.verbs.contents import Contents, Inspection
from rankxform.verbs.follow import Followed, FollowSettings
from rankxform.verbs.load import HeldSlices, Parameters, ReshardPlan
from rankxform.verbs.plan import Plan
from rankxform.verbs.transform import Report
from rankxform.verbs.verdict import Verdict
from rankxform.verbs.verify_folder import share_of_files, verify_folder

from .errors import (
    Message,
    RankxformError,
    RankxformWarning,
    UsageError,
    did_you_mean,
    raising_storage_errors,
)
from .options import AFFECTS_LOAD, OptionType, number_ranges, option_info
from .request import Request, all_options, options_affecting, options_in_words
from .transport import SerialTeam, Team, team
from .verbs import check as checking
from .verbs import contents as containing
from .verbs import follow as following
from .verbs import load as loading
from .verbs import plan as planning
from .verbs import transform as transforming
from .verbs import verify as verifying

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rankxform.derivation.mesh import Parallel
    from rankxform.derivation.request import Derived

    from .keywords import (
        DeriveKeywords,
        FollowKeywords,
        Keywords,
        LoadKeywords,
        ReshardKeywords,
        SourceKeywords,
    )

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
PathLike = Union[str, "os.PathLike[str]"]
Progress = bool | Callback
_GIVEN = ("src_strategy", "dst_strategy", "progress", "comm")
_OF_RESHARD = ("plan", "release", "rank", "src_rank", "dtypes", "into")


def _with_options(names: Callable[[], frozenset[str]]) -> Callable[[F], F]:
    """Add the options to a function's docstring, by group."""

    def documented(function: F) -> F:
        text = cleandoc(function.__doc__ or "")  # which Python 3.13 does by itself
        function.__doc__ = f"{text}\n\nOptions:\n\n{options_in_words(names())}\n"
        return function

    return documented


def _option_names() -> frozenset[str]:
    return frozenset(option.name for option in all_options()) | {"files"}


def _loading_names() -> frozenset[str]:
    return frozenset(options_affecting(AFFECTS_LOAD)) | {"files"}


def resharding_names() -> frozenset[str]:
    """Return the options of `load` that mean something where there are no files."""
    of_files = {"files", "src_pattern", "src_form", "fallback", "step", "suffix", "check_crc"}
    return _loading_names() - of_files


@_with_options(_option_names)
def transform(
    src: PathLike,
    dst: PathLike,
    src_strategy: PathLike | Strategy | None = None,
    dst_strategy: PathLike | Strategy | None = None,
    *,
    progress: Progress = True,
    comm: Any = None,
    **options: Unpack[Keywords],
) -> Report:
    """Convert the checkpoint in `src` to the folder `dst`; return what was done.

    A strategy is a file, a folder of stage files, or "none" for whole tensors. `dst_strategy`
    defaults to "none"; `src_strategy` may be left out if `src` is one complete file. `comm` is an
    mpi4py communicator; without one the launcher's world is used, or this process alone. `options`
    are those of the command line (docs/cli.md), with underscores. If a call is stopped, the same
    call continues it. `progress` draws a bar on a terminal or in a notebook and prints lines
    elsewhere; a function is called with the bytes done, those of all, and the phase ("plan", where
    both are 0, "move", "load", "compare" or "check") on process 0, and ends the call if it raises.
    """

    ask = partial(_request, src, dst, src_strategy, dst_strategy, options, _option_names())

    def run(request: Request, processes: Team, begin: Begin) -> Report:
        return transforming.transform(request, processes, lambda _, total: begin("move", total))

    return _collective(comm, progress, ask, run)


def follow(
    src: PathLike,
    dst: PathLike,
    src_strategy: PathLike | Strategy | None = None,
    dst_strategy: PathLike | Strategy | None = None,
    *,
    progress: Progress = True,
    comm: Any = None,
    **options: Unpack[FollowKeywords],
) -> Followed:
    """Convert the steps of the training in `src` that `dst` lacks, each into a folder of its own.

    With `watch` it goes on as new steps appear, once their files have not changed for `settle`
    seconds (default: 10). A function as `watch` is asked on process 0 between two looks, while the
    others wait (at most 900 s); after it returns False, what is complete is converted and the call
    returns: what cannot be is among the warnings. `keep` is the number of conversions that stay:
    older ones that this function made are removed. The other `options` are those of `transform`;
    `step` may name several, such as "100,200", and then the others are not converted.
    """
    values: dict[str, Any] = {**options}
    how = {name: values.pop(name) for name in FollowSettings._fields if name in values}
    settings = FollowSettings(**how)
    ask = partial(_request, src, dst, src_strategy, dst_strategy, values, _option_names())

    def run(request: Request, processes: Team, begin: Begin) -> Followed:
        return following.follow(request, settings, processes, lambda _, total: begin("move", total))

    return _collective(comm, progress, ask, run)


@_with_options(_loading_names)
def load(
    src: PathLike,
    src_strategy: PathLike | Strategy | None = None,
    dst_strategy: PathLike | Strategy | None = None,
    *,
    rank: int | None = None,
    into: Mapping[str, Any] | None = None,
    progress: Progress = True,
    comm: Any = None,
    **options: Unpack[LoadKeywords],
) -> Parameters:
    """Return this process's slices of the checkpoint in `src` as numpy arrays, by name.

    Nothing is written, and only what the slices need is read. `rank` is the destination rank. It
    defaults to the process's number in `comm` or in the launcher's world, or to RANK_ID under
    msrun; without a destination strategy it is 0, so that every process gets everything. Fewer
    processes than ranks load the slices of theirs alone.
    Slices of names that `into` has are put into its numpy arrays, which must have their shapes and
    types; where an error is raised on the way they may be filled in part. `options` are those of
    `transform` that do not concern destination files, and `files`: the source file of each rank.
    Processes may differ in `rank`, `into` and `include` only.
    """

    ask = partial(_request, src, None, src_strategy, dst_strategy, options, _loading_names())

    def run(request: Request, processes: Team, begin: Begin) -> Parameters:
        dst_rank, arrays = processes.agree(
            lambda: (_own_rank(rank, request, processes), _arrays_to_fill(into))
        )
        return loading.load(
            request, dst_rank, processes, lambda _, total: begin("load", total), arrays
        )

    return _collective(comm, progress, ask, run, speak=_in_keywords)


@_with_options(resharding_names)
def reshard(
    slices: MutableMapping[str, Any] | None,
    src_strategy: PathLike | Strategy | None = None,
    dst_strategy: PathLike | Strategy | None = None,
    *,
    plan: ReshardPlan | None = None,
    release: bool = False,
    progress: Progress = True,
    comm: Any = None,
    **options: Unpack[ReshardKeywords],
) -> Parameters:
    """Return this process's slices under another strategy, of numpy arrays that processes hold.

    No file is read or written: `slices` are those of a source rank, by name, and None or {} for a
    process that holds none; the result is as `load` returns it. `src_rank` and `rank`, whose slices
    are held and wanted, default to the process's number in `comm` or in the launcher's world; a
    process beyond the destination's ranks gets nothing, and without a destination strategy process
    0 gets everything. Where ranks hold replicas, one is read;
    what nobody holds is an error. `dtypes` names MindSpore's types of arrays whose own types do not
    tell, such as BFloat16 of uint16 words. With `release`, arrays are popped from `slices` as soon
    as they are not needed any more, so that both sides are never in memory together, if nothing
    else refers to them. `into` are arrays to fill, as of `load`; none may share memory with another
    or with `slices`. `plan` is that of `plan_reshard`, in the place of strategies and options. The
    other `options` are those of `load`.
    """
    ask, find_own = _resharding(slices, src_strategy, dst_strategy, options)
    is_apart = (src_strategy, dst_strategy) == (None, None) and not {*options} - {"into"}

    def check_plan_and_find(processes: Team) -> tuple[HeldSlices, int]:
        if plan is not None and not isinstance(plan, loading.ReshardPlan):
            raise UsageError(f"plan is a {type(plan).__name__}; expected what plan_reshard returns")
        return find_own(processes)

    def run(request: Request, processes: Team, begin: Begin) -> Parameters:
        held_slices, dst_rank = processes.agree(lambda: check_plan_and_find(processes))
        planned = processes.allgather(lambda: (plan is not None, is_apart))
        if any(has_plan and not alone for has_plan, alone in planned):
            raise UsageError("plan= stands for strategies and options", "leave them out")
        if len({has_plan for has_plan, _ in planned}) > 1:
            raise UsageError("plan= is given by some processes and not by all")
        reshard_plan = plan or loading.plan_reshard(request, held_slices, dst_rank, processes)
        if plan is not None:
            held_slices = held_slices._replace(rank=plan.src_rank, dtypes=plan.dtypes)
        held_slices = held_slices._replace(release=release)
        return loading.reshard(
            reshard_plan, held_slices, processes, lambda _, total: begin("reshard", total),
            is_reused=plan is not None,
        )  # fmt: skip

    return _collective(comm, progress, ask, run, speak=_in_keywords)


def plan_reshard(
    slices: MutableMapping[str, Any] | None,
    src_strategy: PathLike | Strategy | None = None,
    dst_strategy: PathLike | Strategy | None = None,
    *,
    shapes: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
    comm: Any = None,
    **options: Unpack[ReshardKeywords],
) -> ReshardPlan:
    """Return a plan with which `reshard` moves slices of these names, shapes and types again.

    The arguments are those of `reshard` but `into`. `shapes`, in the place of `slices`, are (shape,
    numpy type) by name of what this process will hold.
    """
    ask, find_own = _resharding(slices, src_strategy, dst_strategy, options)

    def describe_slices(processes: Team) -> tuple[HeldSlices, int]:
        held_slices, dst_rank = find_own(processes)
        if held_slices.into:
            raise UsageError("a plan fills no arrays", "into= of reshard")
        if shapes is None:
            return held_slices, dst_rank
        if slices is not None:
            raise UsageError("slices and shapes are given; a plan is made of one", "slices=None")
        return held_slices._replace(slices=stand_ins(shapes), has_values=False), dst_rank

    def run(request: Request, processes: Team, begin: Begin) -> ReshardPlan:
        held_slices, dst_rank = processes.agree(lambda: describe_slices(processes))
        return loading.plan_reshard(request, held_slices, dst_rank, processes)

    return _collective(comm, False, ask, run, speak=_in_keywords)


def _resharding(
    slices: Any, src_strategy: Any, dst_strategy: Any, options: Mapping[str, Any]
) -> tuple[Callable[[], Request], Callable[[Team], tuple[HeldSlices, int]]]:
    """Return what makes a request, and what says what a process holds and which rank it wants."""
    own_options = {name: options.get(name) for name in ("src_rank", "rank", "dtypes", "into")}
    others = {name: value for name, value in options.items() if name not in own_options}
    names = resharding_names()
    ask = partial(_request, "arrays://", None, src_strategy, dst_strategy, others, names)

    def find_own(processes: Team) -> tuple[HeldSlices, int]:
        if slices is not None and not isinstance(slices, MutableMapping):
            raise UsageError(f"slices is a {type(slices).__name__}; expected a dict")
        into = _arrays_to_fill(own_options["into"])
        src_rank, rank = (
            processes.rank if own_options[name] is None else _number(name, own_options[name])
            for name in ("src_rank", "rank")
        )
        if min(src_rank, rank) < 0:
            raise UsageError(f"src_rank is {src_rank}, rank {rank}; expected numbers from 0 on")
        if not isinstance(dtypes := own_options["dtypes"] or {}, Mapping):
            raise UsageError(f"dtypes is {dtypes!r}; expected names of types by name")
        return HeldSlices({} if slices is None else slices, src_rank, dtypes, into=into), rank

    return ask, find_own


def _arrays_to_fill(into: Any) -> Mapping[str, Any]:
    if into is not None and not isinstance(into, Mapping):
        raise UsageError(f"into is a {type(into).__name__}; expected a dict")
    return into or {}


def _own_rank(rank: int | None, request: Request, processes: Team) -> int:
    if rank is None:
        is_unsharded = is_none(request.dst_strategy) and not request.derives
        return 0 if is_unsharded else loading.own_rank(processes, os.environ)
    return _number("rank", rank)


@_with_options(_option_names)
def verify(
    src: PathLike,
    dst: PathLike | None = None,
    src_strategy: PathLike | Strategy | None = None,
    dst_strategy: PathLike | Strategy | None = None,
    *,
    subset: str | None = None,
    progress: Progress = True,
    comm: Any = None,
    **options: Unpack[Keywords],
) -> Verdict:
    """Compare every byte of `dst` with what `src` and the strategies make of it.

    Any tool may have written `dst`; the arguments are those of `transform`. A single folder is
    compared with its own manifest; subset: "3/10", to read the third of ten shares of its files.
    The verdict's `differences` are empty if everything matches, and
    `same` is None if not every byte was compared.
    """

    ask = partial(_request, src, dst, src_strategy, dst_strategy, options, _option_names())

    def run(request: Request, processes: Team, begin: Begin) -> Verdict:
        if dst is None:
            if src_strategy is not None or dst_strategy is not None or options:
                raise UsageError("one folder is compared with its manifest, which has all options")
            share = None if subset is None else share_of_files(subset)
            return verify_folder(request.src, processes, begin, share)
        if subset is not None:
            raise UsageError("subset is for one folder")
        return verifying.verify(request, processes, lambda _, total: begin("compare", total))

    return _collective(comm, progress, ask, run)


@_with_options(_option_names)
def plan(
    src: PathLike,
    src_strategy: PathLike | Strategy | None = None,
    dst_strategy: PathLike | Strategy | None = None,
    *,
    processes: int | None = None,
    prove: bool = False,
    progress: Progress = True,
    comm: Any = None,
    **options: Unpack[Keywords],
) -> Plan:
    """Return what `transform` would read, exchange and write by so many `processes`.

    Headers are read, and a few samples of tensors. `options` are those of `transform`, and
    `shapes`: a JSON file of full shapes in place of `src`. prove: compare what all processes would
    do with what files are to hold; raises RankxformError where that differs.
    """

    def ask() -> Request:
        if processes is not None and _number("processes", processes) < 1:
            raise UsageError(f"processes is {processes!r}; expected a number from 1 on")
        return _request(src, None, src_strategy, dst_strategy, options, _option_names())

    def run(request: Request, members: Team, begin: Begin) -> Plan:
        return planning.plan(request, members, processes and index(processes), proves=prove)[1]

    return _collective(comm, progress, ask, run)


def ranks(
    src_strategy: PathLike | None, dst_strategy: PathLike | None, wanted: tuple[int, ...] = ()
) -> dict[int, tuple[int, ...]]:
    """Return for each destination rank the source ranks whose bytes it needs."""
    with raising_storage_errors():
        src = load_strategy(_strategy("src_strategy", src_strategy))
        dst = load_strategy(_strategy("dst_strategy", dst_strategy))
    numbers = [_number("wanted", rank) for rank in _several("wanted", wanted)]
    return source_ranks_needed(src, dst, numbers)


def derive(
    source: PathLike | Strategy | None = None,
    *,
    dst: Parallel | str,
    src: Parallel | str | None = None,
    shapes: PathLike | None = None,
    preset: PathLike | None = None,
    rules: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    output: PathLike | None = None,
    **options: Unpack[DeriveKeywords],
) -> Derived:
    """Derive the strategy of a job that was never compiled.

    `source` is the strategy of a job of the same network with the sizes `src`; or None for whole
    parameters, whose names `shapes` tells. `dst` are the sizes of the wanted job, or "same".
    `shapes` is a JSON file of full shapes, or the source's checkpoint. `rules` are pairs of a
    regular expression and a spec: names by tensor axis, such as ("mp", None), a JAX PartitionSpec,
    a `mindspore.parallel.Layout` called with its axes, or a text. `output` is a file or folder to
    write, which must not exist; of processes under mpirun the first writes it. The options are
    those of `strategy derive` (docs/cli.md).

    Raises DerivationError with all that is not known, and what would answer it.
    """
    from rankxform.derivation.inputs import derive_request
    from rankxform.derivation.mesh import Parallel
    from rankxform.verbs.strategies import derive_strategy, with_stated_sizes

    from .keywords import DeriveKeywords

    jobs = {"optimizer_shard": dst, "threshold": dst, "src_threshold": src}
    twice = [name for name in options if isinstance(jobs.get(name), Parallel)]
    if twice:
        raise UsageError(f"{', '.join(twice)}: a Parallel was given, which states it")
    unknown = sorted(set(options).difference(DeriveKeywords.__annotations__))
    if unknown:
        suggestion = did_you_mean(unknown[0], DeriveKeywords.__annotations__)
        raise UsageError(
            f"unknown option {unknown[0]!r}{suggestion or '; see help(rankxform.derive)'}"
        )
    texts = {
        "dst_parallel": dst if isinstance(dst, str) else str(dst),
        "src_parallel": src if isinstance(src, str) else None,
        "preset": None if preset is None else _path("preset", preset),
    }
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    with raising_storage_errors():
        request = derive_request(
            _request("", None, None, None, {**options, **texts}, _option_names())
        )
        assert request is not None
        sizes = (parallel if isinstance(parallel, Parallel) else None for parallel in (src, dst))
        strategy = load_strategy(_strategy("source", source))
        where = None if shapes is None else _path("shapes", shapes)
        derived = derive_strategy(with_stated_sizes(request, tuple(sizes), pairs), strategy, where)
        if output is not None:
            target = output_path(_path("output", output)).absolute()
            derived = replace(derived, strategy=replace(derived.strategy, label=str(target)))
            if launched_rank() == 0:  # they all derive the same
                save_strategy(derived.strategy, target)
    return derived


def merge(folder: PathLike, target: PathLike, *, overwrite: bool = False) -> None:
    """Write the strategy files of all pipeline stages in `folder` as the one file `target`."""
    with raising_storage_errors():
        merge_stage_files(_path("folder", folder), _path("target", target), overwrite=overwrite)


def inspect(path: PathLike, *, progress: Progress = True) -> Inspection:
    """Describe a checkpoint file, a checkpoint folder or a strategy, as ``inspect --json`` does.

    A dictionary: "kind" says which it is, and so which other keys there are.
    """
    with raising_storage_errors(), progress_shower(progress, SerialTeam()):
        return Inspection(inspection.inspect(_path("path", path)))


def check(
    src: PathLike,
    src_strategy: PathLike | Strategy | None = None,
    *,
    full: bool = False,
    progress: Progress = True,
    comm: Any = None,
    **options: Unpack[SourceKeywords],
) -> Check:
    """Look for all that is wrong with a checkpoint, as ``inspect --check`` does.

    `full`: read every byte. `options` say which files are meant: `src_pattern`, `step`, `suffix`
    and `files`. What is wrong is in the result's rows, and its `same` is None if nothing could be
    compared with anything.
    """
    from .keywords import SourceKeywords

    names = frozenset(SourceKeywords.__annotations__)
    ask = partial(_request, src, None, src_strategy, "none", options, names)

    def run(request: Request, processes: Team, begin: Begin) -> Check:
        return checking.check(request, full, processes, begin)

    return _collective(comm, progress, ask, run)


def contents(
    src: PathLike,
    src_strategy: PathLike | Strategy | None = None,
    *,
    comm: Any = None,
    progress: Progress = True,
    **options: Unpack[SourceKeywords],
) -> Contents:
    """Return what a checkpoint holds, as ``inspect --page`` shows it; a notebook searches in it.

    `options` say which files are meant: `src_pattern`, `step`, `suffix` and `files`. What is wrong
    with them is in the result's `faults`.
    """
    from .keywords import SourceKeywords

    names = frozenset(SourceKeywords.__annotations__)
    ask = partial(_request, src, None, src_strategy, "none", options, names)

    def run(request: Request, processes: Team, begin: Begin) -> Contents:
        return containing.contents(request, processes)

    return _collective(comm, progress, ask, run)


def _with_keywords(message: Message) -> Message:
    """Add the keywords of options that a message writes as the command line does."""
    flags = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]+", str(message)))
    names = ((flag, flag[2:].replace("-", "_")) for flag in flags)
    keywords = [f"{flag} is {name}=" for flag, name in names if name in {*_option_names(), *_GIVEN}]
    details = [message.details, f"in Python: {', '.join(keywords)}" if keywords else ""]
    return message._replace(details="\n".join(filter(None, details)))


def _in_keywords(message: Message) -> Message:
    """Write the options that a message names as keywords.

    >>> _in_keywords(Message("x", ("--src-strategy FILE, --step 7 or --src-strategy",))).tries
    ('src_strategy=FILE, step=7 or src_strategy=',)
    """
    spell = partial(
        re.sub, r"(?<![\w-])--([a-z][a-z-]*)(?:([ =])('[^']*'|[^\s,;:'()]+))?", _keyword
    )
    tries = message.tries
    if tries[:1] and tries[0].startswith("--ranks "):  # a rank that is not there; `load` takes one
        numbers = tries[0].split()[1]
        start = f"start {format_count(len(number_ranges(numbers)), 'process')}"
        tries = (start,) * (launched_size() is not None) + (f"pass rank= of {numbers}",)
    return Message(
        spell(message.what), tuple(map(spell, tries)), spell(message.where), spell(message.details)
    )


def _keyword(match: re.Match[str]) -> str:
    """Return how Python writes an option, with its value where a value follows."""
    kinds = {option.name: option_info(option).kind for option in all_options()}
    name, space, text = match[1].replace("-", "_"), match[2] or "", match[3] or ""
    if name not in kinds and name not in _GIVEN:
        return match[0]
    kind = kinds.get(name, OptionType())
    if kind.stands_for is not None:
        return f"{name}={kind.stands_for}{space}{text}"
    if text.isupper() or text.isdecimal():
        return f"{name}={text}"
    is_value = text in {"none", *kind.choices} or not re.fullmatch(r"[a-z-]*", text)
    is_value = is_value or (name == "accept" and bool(text))  # kinds of doubts, which are words
    return f"{name}={text.strip(_QUOTE)!r}" if is_value else f"{name}={space}{text}"


_QUOTE = "'"


def _collective(
    comm: Any,
    progress: Progress,
    ask: Callable[[], Request],
    run: Callable[[Request, Team, Begin], T],
    speak: Callable[[Message], Message] = _with_keywords,
) -> T:
    """Return `run` of what each process asks and the team of `comm`; free its communicator if all
    processes end alike. speak: how a message names options."""
    processes, verb = team(comm), run.__qualname__.partition(".")[0]
    try:
        with progress_shower(progress, processes) as begin:
            verbs = processes.allgather(lambda: verb) if processes.size > 1 else [verb]
            verbs = [*dict.fromkeys(verbs)]
            if verbs[1:]:
                raise UsageError(
                    f"processes of one communicator call {' and '.join(verbs)} at once",
                    "comm=, a communicator of those that make the call",
                    "the same call on all of them",
                )
            request = processes.agree(ask)
            if request.endpoint_url or request.storage_option or ACCESS.options:
                processes.agree(lambda: ACCESS.state(request.endpoint_url, request.storage_option))
            outcome = run(request, processes, begin)
        # On process 0, as the command line does in words; where they are errors, all raise one.
        for text in getattr(outcome, "warnings", ()):
            if processes.bcast(lambda text=text: _is_refused(text)):  # type: ignore[misc]
                raise RankxformWarning(text)
    except RankxformWarning:  # raised on every process
        processes.free()
        raise
    except RankxformError as error:
        processes.free()
        error.say(speak(error.parts))
        # Every process prints this: no lines of this package, and none of what it was met in.
        raise error.with_traceback(None) from None
    processes.free()
    return outcome


def _is_refused(text: str) -> bool:
    try:
        warnings.warn(text, RankxformWarning, stacklevel=_depth_of_caller())
    except RankxformWarning:
        return True
    return False


def _depth_of_caller() -> int:
    """Return how many calls above its own caller the first is that is not this package's."""
    depth, frame = 1, sys._getframe(1)
    package = os.path.dirname(__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        depth, frame = depth + 1, frame.f_back
    return depth


def _as_typed(name: str, value: Any, kind: OptionType) -> Any:
    """Take what the command line takes, such as "256M", a path, and a step that is a number."""
    if kind.item is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str) and (kind.item in (int, float) or kind.choices):
        try:
            return kind.parse(value)
        except ValueError as error:
            raise UsageError(f"{name} {error}") from error
    is_number = name == "step" and hasattr(value, "__index__") and not isinstance(value, bool)
    return str(value) if is_number else value


def _request(
    src: PathLike,
    dst: PathLike | None,
    src_strategy: PathLike | Strategy | None,
    dst_strategy: PathLike | Strategy | None,
    options: Mapping[str, Any],
    option_names: frozenset[str],
) -> Request:
    unknown = sorted(set(options).difference(option_names))
    if unknown:
        own_names = _OF_RESHARD if option_names == resharding_names() else ()
        suggestion = did_you_mean(unknown[0], {*option_names, *_GIVEN, *own_names} - {unknown[0]})
        verb = "reshard" if own_names else "load" if "dst_form" not in option_names else "transform"
        see = f"; help(rankxform.{verb}) lists the options"
        raise UsageError(f"unknown option {unknown[0]!r}{suggestion or see}")
    option_values = dict(options)
    for option in all_options():
        kind = option_info(option).kind
        if option.name not in option_values:
            continue
        if not kind.is_tuple:
            option_values[option.name] = _as_typed(option.name, option_values[option.name], kind)
        else:
            values = _several(option.name, option_values[option.name])
            read = _number if kind.item is int else partial(_as_typed, kind=kind)
            option_values[option.name] = tuple(read(option.name, value=value) for value in values)
    files = option_values.get("files")
    if files is not None:
        if not isinstance(files, Mapping) or not all(hasattr(n, "__index__") for n in files):
            raise UsageError(f"files is {files!r}; expected a mapping of ranks to paths")
        option_values["files"] = {index(n): _path(f"files[{n}]", path) for n, path in files.items()}
    return Request(
        _path("src", src),
        None if dst is None else _path("dst", dst),
        src_strategy=_strategy("src_strategy", src_strategy),
        dst_strategy=_strategy("dst_strategy", dst_strategy),
        **option_values,
    )


def _number(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise UsageError(f"{name} is {value!r}; expected a number")


def _several(name: str, value: Any) -> tuple[Any, ...]:
    """Return one value, some, or none (None) as a tuple."""
    if value is None:
        return ()
    if isinstance(value, (str, int, os.PathLike)):
        return (value,)
    try:
        if not isinstance(value, (bytes, Mapping)):
            return tuple(value)
    except TypeError:
        pass
    raise UsageError(f"{name} is {value!r}; expected one value or several")


def _path(name: str, value: Any) -> str:
    try:
        path = os.fspath(value)
    except TypeError:
        path = b""
    if not isinstance(path, str) or (name == "dst" and not path):
        raise UsageError(f"{name} is {value!r}; expected a path")
    return path


def _strategy(name: str, strategy: Any) -> str | Strategy | None:
    return strategy if strategy is None or isinstance(strategy, Strategy) else _path(name, strategy)
