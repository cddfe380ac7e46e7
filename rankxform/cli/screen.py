"""What a verb prints: text or JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rankxform
from rankxform.display.progress import Progress, clear_pending_output
from rankxform.display.text import (
    format_buffer,
    format_count,
    format_seconds,
    format_size,
    labelled_lines,
    read_and_needed,
    shown_path,
    table,
)
from rankxform.errors import StorageError
from rankxform.layout.names import format_ranges, patterns, summarize_names
from rankxform.layout.states import state_of_name
from rankxform.process import usable_cores
from rankxform.request import Request
from rankxform.storage.posix import free_bytes
from rankxform.storage.store import scheme_of
from rankxform.transport import Team
from rankxform.transport.team import show_nothing

from .arguments import build_request, notes_of_script
from .options import Parsed

if TYPE_CHECKING:
    from rankxform.layout.strategy import Strategy
    from rankxform.planning.catalog import Catalog
    from rankxform.planning.selection import OmittedParameters
    from rankxform.request import Request
    from rankxform.source.open import Source
    from rankxform.target.target import Conversion
    from rankxform.transport.team import ShowProgress
    from rankxform.verbs.transform import Report


VERSION = 1
"""Counts up when a name goes or changes its meaning; a name may be added without notice."""


def as_json(result: str, facts: Mapping[str, Any]) -> str:
    """Write the facts of one result; `result` names what they are of."""
    return json.dumps({"version": VERSION, "result": result, **facts}, indent=1)


_LONG_SECONDS = 10.0
"""From how long a run on more processes is worth a word."""


def header(conversion: Conversion, processes: int, verdict: Sequence[str] = ()) -> str:
    """Say which files were found and what is about to happen; behind warnings the verdict."""
    source, target = conversion.source, conversion.target
    src, dst = source.where.path, target.planner.dst
    selected_count, rank_count = len(target.ranks), dst.ranks
    dst_text = (
        format_count(rank_count, "rank")
        if selected_count == rank_count
        else f"{selected_count} of {format_count(rank_count, 'rank')}"
    )
    if target.arrangement.parts:
        number = format_count(len(target.files), "file")
        dst_text = f"{target.form.title}, {number}" + (f" of {dst_text}" if rank_count > 1 else "")
    derived = []
    if target.derived is not None:
        from .strategy import derived_table

        derived = [derived_table(target.derived), ""]
    total = sum(index.size for index in source.indexes.values())
    return "\n".join(
        (
            *warning_lines(target.warnings),
            *verdict,
            *derived,
            f"rankxform {rankxform.__version__}, {format_count(processes, 'process')}",
            labelled_lines(
                "from",
                f"{shown_path(src) or 'shapes alone'}: {_describe_source(source)}{_step(source)}"
                + (f", {format_size(total)}" if src else ""),
                catalog_words(target.planner.catalog),
            ),
            labelled_lines(
                "to",
                f"{shown_path(target.dst)}: {dst_text}" if target.dst else dst_text,
                strategy_words(dst),
            ),
            *([labelled_lines("names", target.map_in_words)] if target.map_in_words else []),
        )
    )


def size_lines(conversion: Conversion, nbytes: int, processes: int) -> list[str]:
    """Say how much is about to be written, and how much is free; on one node.

    Whether that is enough is found when the files are made: those of an earlier run are continued.
    """
    target, memory = conversion.target, conversion.request.memory
    if target.dst is None or scheme_of(target.dst) or not nbytes:
        return []
    try:
        free = f" ({format_size(free_bytes(target.folder))} free)"
    except StorageError:  # what is wrong is met again, where all processes hear of it
        free = ""
    suffix = " a process" if processes > 1 else ""
    return [
        labelled_lines(
            "to write",
            f"{format_size(nbytes)}{free}, {format_buffer(memory)} of buffers{suffix}",
        )
    ]


def describe_samples(evidence: Mapping[str, int | None]) -> str:
    """Say on what a source's strategy stands, by bytes that were compared."""
    samples_text = format_count(evidence.get("samples") or 0, "sample")
    percent = evidence.get("percent")
    return (
        samples_text
        if not percent
        else f"{samples_text}, of kinds that hold {percent} % of the bytes"
    )


def _describe_source(source: Source) -> str:
    description = source.selected.description
    if description is None:
        selected, files = source.selected, f", {format_count(len(source.indexes), 'file')}"
        source_text = format_count(len({*map(selected.rank_of, source.indexes)}), "rank")
        return source_text + (files if selected.ranks else "")
    ranks = len({description.ranks[file] for file in source.indexes if file in description.ranks})
    source_text = f"{source.form.title}, {format_count(len(source.indexes), 'file')}"
    return source_text + (f" of {format_count(ranks, 'rank')}" if ranks > 1 else "")


def _step(source: Source) -> str:
    step = source.selected.step
    if not step:
        return ""
    if len(step) == 1:
        return f", iteration {step[0]}"
    return f", epoch {step[0]} step {step[1]}"


def warning_lines(texts: Sequence[str]) -> list[str]:
    """Write warnings, which are said first and last."""
    return [labelled_lines("WARNING:", text) for text in texts]


def notice_lines(texts: Sequence[str]) -> list[str]:
    """Write what to know."""
    return [labelled_lines("note", text) for text in texts]


def strategy_words(strategy: Strategy) -> str:
    """Name a strategy, and what it describes."""
    if strategy.label == "none":
        return "no strategy: whole tensors"
    return f"{shown_path(strategy.label)}: {strategy.extent}"


def catalog_words(catalog: Catalog) -> str:
    """Name what describes a source, and what that is."""
    if catalog.strategy is not None:
        return strategy_words(catalog.strategy)
    return f"{shown_path(catalog.declared_by)}: {catalog.extent}"


def summary(
    report: Report, verify: Callable[[], str], verbose: bool = False, quiet: bool = False
) -> str:
    """Say what was read and left out, what deserves a look, how to go on, and what was written.

    verify: returns the command that compares every byte. verbose: with names; quiet: the last line
    alone.
    """
    detail_lines = [] if quiet else _detail_lines(report, verbose)
    if report.files_kept == len(report.files):
        last_line = (
            f"{format_count(report.files_kept, 'file')} complete already; nothing was written"
        )
    else:
        linked = f" ({report.files_linked} linked to equal ones)" if report.files_linked else ""
        files = format_count(len(report.files) - report.files_kept, "file")
        prior = ""
        if report.bytes_before:
            prior = f", of which {format_size(report.bytes_before)} had been written before"
        last_line = (
            f"{format_size(report.bytes_written + report.bytes_before)} in {files}{linked}{prior}, "
            f"{format_seconds(report.seconds)}, "
            f"{format_size(report.bytes_written / max(report.seconds, 1e-9))}/s"
        )
    lines = [
        *detail_lines,
        *([] if quiet else _next(report, verify)),
        labelled_lines("done", last_line),
    ]
    return "\n".join(lines + warning_lines(report.warnings))


def _detail_lines(report: Report, verbose: bool) -> list[str]:
    """Say what was read, what was not written, and what to know."""
    if report.files_kept == len(report.files):
        return []
    lines = []
    if report.files_kept or report.files_continued:
        files_text = format_count(report.files_kept, "file")
        text = f"an earlier run: {files_text} complete, {report.files_continued} begun"
        lines.append(labelled_lines("continued", text))
    if report.placement:
        lines.append(labelled_lines("placed", report.placement))
    sent = f"; sent {format_size(report.bytes_sent)} between processes" if report.bytes_sent else ""
    text = (
        f"{read_and_needed(report.bytes_read, report.bytes_needed)}{sent}; peak memory "
        f"{format_size(report.peak_memory_bytes)} a process"
    )
    lines.append(labelled_lines("read", text))
    if report.strategy:
        lines.append(
            labelled_lines("strategy", f"of the destination: {shown_path(report.strategy)}")
        )
    if report.bytes_compared:
        names = report.compared_names
        names_text = ", ".join(names if verbose else names[:4]) + (", ..." if names[4:] else "")
        text = f"between ranks, all bytes: {names_text} ({format_size(report.bytes_compared)})"
        lines.append(labelled_lines("compared", text))
    return [
        *lines,
        *left_out(report.left_out, report.absent, verbose),
        *notice_lines(report.notices),
    ]


def left_out(
    omitted_groups: Sequence[OmittedParameters], absent: Sequence[str], verbose: bool = False
) -> list[str]:
    """Say what is not written; the names of all patterns only if `verbose`."""
    lines = [
        _describe_names(
            "left out",
            group.names,
            group.families,
            f"{format_size(group.nbytes)}; {group.reason}",
            verbose,
        )
        for group in omitted_groups
    ]
    if absent:
        states = {name: state for name in absent if (state := state_of_name(name)) is not None}
        families = {name: state.family for name, state in states.items()}
        reason = "in the strategies, not in the checkpoint"
        lines.append(_describe_names("absent", absent, families, reason, verbose))
    return lines


def _describe_names(
    label: str, names: Sequence[str], families: Mapping[str, str], reason: str, verbose: bool
) -> str:
    """Say what names there are: states by their family, the others by pattern."""
    counts = Counter(families[name] for name in names if name in families)
    other_names = [name for name in names if name not in families]
    shown = [f"{family} ({count:,})" for family, count in counts.items()]
    shown += [summarize_names(other_names, 3)] if other_names else []
    return labelled_lines(
        label,
        f"{', '.join(shown)}: {reason}",
        *(f"  {name}" for name in patterns(names) if verbose),
    )


def verify_command(conversion: Conversion, processes: int) -> str:
    """Return the command that compares every byte of a destination, as it can be pasted here."""
    from rankxform.target.manifest import verify_options

    number = ["-n", str(processes)] if processes > 1 else []
    request, source, target = conversion.request, conversion.source, conversion.target
    words = [source.where.path, target.dst or "DST", *verify_options(conversion)]
    if request.ranks:
        words += ["--ranks", format_ranges(request.ranks).replace(" ", "")]
    shown = [shown_path(word) if word.startswith("/") else word for word in words]
    shown[:2] = [f"./{word}" if word.startswith("-") else word for word in shown[:2]]
    return shlex.join(["rankxform", "verify", *number, *shown])


def _next(report: Report, verify: Callable[[], str]) -> list[str]:
    """Say what a job loads, how to check that, and how a slow run would be faster."""
    if report.form != "ranks":
        load = report.dst
    elif report.dst_ranks == 1 < report.src_ranks:
        load = f"one complete file, for one device: {report.files[0]} (--dst-strategy: for more)"
    else:
        container = Path(report.files[0]).suffix.removeprefix(".") if report.files else ""
        load = f"in the job's YAML, load_checkpoint: {report.dst}, auto_trans_ckpt: False"
        load += f", load_ckpt_format: {container}" if container != "ckpt" else ""
    check = shlex.join(["rankxform", "verify", shown_path(report.dst)])
    command = check if report.fingerprints else verify()
    lines = [labelled_lines("load", load), labelled_lines("next", command)]
    is_slow = report.processes == 1 and report.seconds > _LONG_SECONDS
    if is_slow and (core_count := usable_cores()) > 1:
        faster = f"rankxform transform -n {core_count} ... would use all {core_count} cores"
        lines.append(labelled_lines("faster", faster))
    return lines


def profile(report: Report) -> str:
    """Write the seconds that each process spent in each phase."""
    names = [n for n in report.phases[0] if any(seconds[n] >= 5e-5 for seconds in report.phases)]
    rows = [
        (process, *(f"{seconds[n]:.4f}" for n in names), f"{sum(seconds.values()):.4f}")
        for process, seconds in enumerate(report.phases)
    ]
    moved = f"moved in {report.move_seconds:.4f} s, from the finished plan to the last file's name"
    return f"\n{table(('process', *names, 'all'), rows)}\n{moved}"


class Screen:
    """Shows what one call of a verb says, as its options want it."""

    begun: Conversion
    """What was begun."""

    def __init__(self, options: Parsed, team: Team) -> None:
        self._options, self._team = options, team
        self._page = getattr(options, "report", None)
        self.is_quiet, self.is_verbose = (getattr(options, n, False) for n in ("quiet", "verbose"))

    def request(self) -> Request:
        """Return what the options ask for; see that a page may be written. Collective."""

        def read() -> Request:
            request = build_request(self._options)
            if self._page is not None:
                from .page import check_page_path

                check_page_path(self._page, request)
            return request

        return self._team.bcast(read)

    def begin_writing(self, conversion: Conversion, nbytes: int) -> ShowProgress:
        """Say what is about to be written; return what is shown the progress."""
        may_omit_needs = self._team.nodes.count > 1 or self._team.rank > 0
        needs = [] if may_omit_needs else size_lines(conversion, nbytes, self._team.size)
        return self.begin(conversion, nbytes, needs)

    def begin(
        self, conversion: Conversion, nbytes: int, verdict: Sequence[str] = ()
    ) -> ShowProgress:
        """Say what is about to happen; return what is shown the progress."""
        self.begun = conversion
        if self._team.rank == 0 and not self.is_quiet:
            lines = [header(conversion, self._team.size, verdict), *self.defaults()]
            self.say("\n".join([*lines, *notice_lines(notes_of_script(self._options))]))
        return self.progress(nbytes)

    def command(self, verb: str, without: Collection[str] = ()) -> str:
        """Return this command with another verb, and without some words, as it can be pasted."""
        words = [word for word in self._options.words[1:] if word not in without]
        return shlex.join(["rankxform", verb, *words])

    def defaults(self) -> list[str]:
        """Say which options come from a file or the environment."""
        default_options = getattr(self._options, "defaults", ())
        words = [
            f"{' '.join(default.words)} ({shown_path(default.origin)})"
            for default in default_options
        ]
        return [labelled_lines("options", *words)] if words else []

    def progress(self, nbytes: int) -> ShowProgress:
        """Return what is shown the progress of so many bytes."""
        if self._team.rank:
            return show_nothing
        return Progress(nbytes, getattr(self._options, "progress", "auto"))

    def say(self, text: str) -> None:
        """Print what goes along with the work, which goes on if nobody can read it."""
        if self._team.rank or self._options.json:
            return
        try:
            _print(text)
        except OSError:
            _print_to_nobody()

    def result(
        self, name: str, facts: Callable[[], Mapping[str, Any]], text: Callable[[], str]
    ) -> None:
        """Print a result for people, or as JSON. Collective."""
        self._team.bcast(lambda: self._tell(name, facts, text))

    def done(
        self, name: str, facts: Callable[[], Mapping[str, Any]], text: Callable[[], str]
    ) -> None:
        """Print the result of work, which was done even if nobody can read it."""
        if self._team.rank == 0:
            try:
                self._tell(name, facts, text)
            except OSError:
                _print_to_nobody()

    def _tell(
        self, name: str, facts: Callable[[], Mapping[str, Any]], text: Callable[[], str]
    ) -> None:
        _print(as_json(name, facts()) if self._options.json else text())

    def page_of_work(self, **outcome: Any) -> None:
        """Write the page of what was begun, done and told, if one is asked for. Collective."""
        if self._page is not None:
            from .page import write_page_of_work

            write_page_of_work(self._options, self.begun, self._team, **outcome)


def _print(text: str) -> None:
    """Print a result; a reader that went away, as `head` does, is no error."""
    clear_pending_output()
    try:
        sys.stdout.buffer.write((text + "\n").encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _print_to_nobody()


def _print_to_nobody() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
