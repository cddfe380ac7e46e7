"""What a verb prints: text or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rankxform
from rankxform.display.progress import Progress, clear_pending_output
from rankxform.display.text import (
    as_text,
    format_buffer,
    format_count,
    format_size,
    labelled_lines,
    shown_path,
    table,
    warning_lines,
)
from rankxform.errors import StorageError
from rankxform.planning.catalog import catalog_text, strategy_text
from rankxform.request import Request
from rankxform.results import NORMAL, QUIET, Result
from rankxform.statements import join
from rankxform.storage.posix import free_bytes
from rankxform.transport import Team
from rankxform.transport.team import show_nothing

from .arguments import build_request, notes_of_script
from .options import Parsed

if TYPE_CHECKING:
    from rankxform.source.source import Source
    from rankxform.target.target import Conversion
    from rankxform.transport.team import ShowProgress
    from rankxform.verbs.plan import Plan
    from rankxform.verbs.transform import Report


VERSION = 1
"""Counts up when a name goes or changes its meaning; a name may be added without notice."""


def as_json(result: str, facts: Mapping[str, Any]) -> str:
    """Write the facts of one result; `result` names what they are of."""
    return json.dumps({"version": VERSION, "result": result, **facts}, indent=1)


_LONG_SECONDS = 10.0
"""From how long a run on more processes is worth a word."""


def header(conversion: Conversion, processes: int) -> str:
    """Say which files were found and what is about to happen."""
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
        derived = [as_text(target.derived), ""]
    total = sum(index.size for index in source.indexes.values())
    return "\n".join(
        (
            *derived,
            f"rankxform {rankxform.__version__}, {format_count(processes, 'process')}",
            labelled_lines(
                "from",
                f"{shown_path(src) or 'shapes alone'}: {_describe_source(source)}{_step(source)}"
                + (f", {format_size(total)}" if src else ""),
                catalog_text(target.planner.catalog),
            ),
            labelled_lines(
                "to",
                f"{shown_path(target.dst)}: {dst_text}" if target.dst else dst_text,
                strategy_text(dst),
            ),
            *([labelled_lines("names", target.map_in_words)] if target.map_in_words else []),
        )
    )


def size_lines(conversion: Conversion, nbytes: int, processes: int) -> list[str]:
    """Say how much is about to be written, and how much is free; on one node.

    Whether that is enough is found when the files are made: those of an earlier run are continued.
    """
    target, memory = conversion.target, conversion.request.buffers
    if not target.in_folder or not nbytes:
        return []
    try:
        free = f" ({format_size(free_bytes(target.folder))} free)"
    except StorageError:  # what is wrong is met again, where all processes hear of it
        free = ""
    suffix = " a process" if processes > 1 else ""
    return [
        labelled_lines(
            "to write", f"{format_size(nbytes)}{free}, {format_buffer(memory)} of buffers{suffix}"
        )
    ]


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


def notice_lines(texts: Sequence[str]) -> list[str]:
    """Write what to know."""
    return [labelled_lines("note", text) for text in texts]


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
        is_verbose = getattr(options, "verbose", False)
        self.level = QUIET if getattr(options, "quiet", False) else NORMAL + is_verbose

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

    def begin(self, conversion: Conversion, nbytes: int, needs: Sequence[str] = ()) -> ShowProgress:
        """Say what is about to happen; return what is shown the progress."""
        self.begun = conversion
        if self._team.rank == 0 and self.level > QUIET:
            notes = notice_lines(notes_of_script(self._options))
            lines = [*warning_lines(conversion.target.warnings), *needs]
            lines += [header(conversion, self._team.size), *self.defaults(), *notes]
            self.say("\n".join(lines))
        return self.progress("", nbytes)

    def command(self, verb: str, without: Collection[str] = ()) -> str:
        """Return this command with another verb, and without some words, as it can be pasted."""
        words = [word for word in self._options.words[1:] if word not in without]
        return join(["rankxform", verb, *words])

    def defaults(self) -> list[str]:
        """Say which options come from a file or the environment."""
        default_options = getattr(self._options, "defaults", ())
        words = [
            f"{' '.join(default.words)} ({shown_path(default.origin)})"
            for default in default_options
        ]
        return [labelled_lines("options", *words)] if words else []

    def progress(self, phase: str, nbytes: int) -> ShowProgress:
        """Return what is shown the progress of a phase, of so many bytes."""
        if self._team.rank:
            return show_nothing
        return Progress(nbytes, getattr(self._options, "progress", "auto"))

    def say(self, text: str) -> None:
        """Print what goes along with the work, which goes on if nobody can read it."""
        if self._team.rank or self._options.json:
            return
        try:
            show_text(text)
        except OSError:
            _show_nobody()

    def show(
        self, name: str, make: Callable[[], Result], head: Callable[[], Sequence[str]] = lambda: ()
    ) -> int:
        """Print a result, `head` behind its first lines; return its exit code. Collective."""

        def tell() -> int:
            shown = make()
            lines = [] if self.level == QUIET or self._options.json else head()
            self._tell(name, shown, "\n".join(lines))
            return shown.exit_code

        return self._team.bcast(tell)

    def show_done(self, name: str, outcome: Result) -> None:
        """Print the result of work, which was done even if nobody can read it."""
        if self._team.rank == 0:
            try:
                self._tell(name, outcome)
            except OSError:
                _show_nobody()

    def _tell(self, name: str, result: Result, head: str = "") -> None:
        is_json = self._options.json
        show_text(as_json(name, result.as_dict()) if is_json else as_text(result, self.level, head))

    def page(self, conversion: Conversion, plan: Plan, **outcome: Any) -> None:
        """Write the page of a plan, if one is asked for. Collective."""
        if self._page is not None:
            from .page import write_page

            self._team.bcast(lambda: write_page(self._options, conversion, plan, **outcome))

    def page_of_work(self, **outcome: Any) -> None:
        """Write the page of what was begun, done and told, if one is asked for. Collective."""
        if self._page is not None:
            from .page import write_page_of_work

            write_page_of_work(self._options, self.begun, self._team, **outcome)


def show_text(text: str) -> None:
    """Print a result; a reader that went away, as `head` does, is no error."""
    clear_pending_output()
    try:
        sys.stdout.buffer.write((text + "\n").encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _show_nobody()


def _show_nobody() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
