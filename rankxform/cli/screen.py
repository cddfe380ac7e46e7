"""What a verb shows: text for people or JSON, progress, and a page. Process 0 alone speaks."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankxform.cli.arguments import build_request, notes_of_script
from rankxform.cli.report import header, notice_lines, size_lines
from rankxform.display.log import is_open, write_log
from rankxform.display.progress import Progress, clear_pending_output
from rankxform.display.terminal import labelled_lines, shown_path
from rankxform.request import Request
from rankxform.transport import Team
from rankxform.transport.team import show_nothing

from .json_output import as_json

if TYPE_CHECKING:
    from rankxform.source.opening import Source
    from rankxform.target.target import Target
    from rankxform.transport.team import ShowProgress


class Screen:
    """Shows what one call of a verb says, as its options want it."""

    begun: tuple[Source, Target]
    """What work was begun with."""

    def __init__(self, options: argparse.Namespace, team: Team) -> None:
        self._options, self._team = options, team
        self._page = getattr(options, "report", None)
        self.is_quiet, self.is_verbose = (getattr(options, n, False) for n in ("quiet", "verbose"))

    def request(self) -> Request:
        """Return what the options ask for; see that a page may be written. Collective."""

        def read() -> Request:
            request = build_request(self._options)
            if self._page is not None:
                from .page.file import check_page_path

                check_page_path(self._page, request)
            return request

        return self._team.bcast(read)

    def begin_writing(
        self, request: Request, source: Source, target: Target, nbytes: int
    ) -> ShowProgress:
        """Say what is about to be written; return what is shown the progress."""
        may_omit_needs = self._team.nodes.count > 1 or self._team.rank > 0
        needs = [] if may_omit_needs else size_lines(request, target, nbytes, self._team.size)
        return self.begin(source, target, nbytes, needs)

    def begin(
        self, source: Source, target: Target, nbytes: int, verdict: Sequence[str] = ()
    ) -> ShowProgress:
        """Say what is about to happen; return what is shown the progress."""
        self.begun = source, target
        if self._team.rank == 0 and (not self.is_quiet or is_open()):
            lines = [header(source, target, self._team.size, verdict), *self.defaults()]
            lines += notice_lines(notes_of_script(self._options))
            if self.is_quiet:
                write_log("\n".join(lines))
            else:
                self.say("\n".join(lines))
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
        if self._team.rank:
            return
        if self._options.json:
            write_log(text)
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

    def page_of_work(self, request: Request, **outcome: Any) -> None:
        """Write the page of what was begun, done and told, if one is asked for. Collective."""
        if self._page is not None:
            from .page.file import write_page_of_work

            source, target = self.begun
            write_page_of_work(self._options, request, source, target, self._team, **outcome)


def _print(text: str) -> None:
    """Print a result; a reader that went away, as `head` does, is no error."""
    clear_pending_output()
    write_log(text)
    try:
        sys.stdout.buffer.write((text + "\n").encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _print_to_nobody()


def _print_to_nobody() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
