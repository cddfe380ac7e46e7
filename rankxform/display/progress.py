"""What process 0 says while it works: a bar for a person, plain lines for a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from rankxform.errors import RankxformError, UsageError
from rankxform.transport import Team
from rankxform.transport.launcher import CLEAR_LINE, terminal
from rankxform.transport.team import Begin, ShowProgress, begin_silently

from .text import columns_of, format_seconds, format_size

_BAR_SECONDS, _SIGN_SECONDS = 0.2, 10.0
_FIRST_SECONDS, _SECOND_SECONDS, _LINE_SECONDS = 2.0, 10.0, 60.0
_LINE_SHARE, _LEAST_SECONDS = 0.05, 5.0
"""Lines of a log come after two seconds, after ten, and then every minute or every twentieth of the
work, but not more often than every five seconds."""
_WIDTH, _LEAST_WIDTH = 30, 5

Callback = Callable[[int, int, str], None]
"""Called by process 0 with the bytes done, those of all, and the phase: "plan", where both are 0,
"move", "load", "compare" or "check"."""


class _Line(Protocol):
    """A line that is drawn again and again."""

    @property
    def columns(self) -> int:
        """How wide it may be."""

    def draw(self, text: str) -> None:
        """Put a text in the place of what was drawn."""

    def erase(self) -> None:
        """Leave nothing of what was drawn."""

    def close(self) -> None:
        """Draw no more."""


class _OnTerminal:
    """A line of a terminal; `opened`: it is to be closed."""

    def __init__(self, fd: int, *, opened: bool) -> None:
        self._fd, self._opened = fd, opened

    @property
    def columns(self) -> int:
        return columns_of(self._fd) - 1

    def draw(self, text: str) -> None:
        _write(self._fd, f"\r{text}\x1b[K")

    def erase(self) -> None:
        _write(self._fd, CLEAR_LINE)

    def close(self) -> None:
        if self._opened:
            os.close(self._fd)


class _InNotebook:
    """A line below a notebook's cell, which knows carriage returns and nothing else."""

    columns = 72

    def draw(self, text: str) -> None:
        sys.stderr.write(f"\r{text:{self.columns}}")
        sys.stderr.flush()

    def erase(self) -> None:
        self.draw("")
        sys.stderr.write("\r")
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing is open."""


PLANNING = "reading and planning"


class _FirstSign:
    """Prints from time to time that the command is at work, until there is other output.

    Everything before the first output takes long with many files or few cores.
    """

    def __init__(self, passed: float, doing: str) -> None:
        """Start the timer; `passed` seconds ago the user started the command."""
        self._doing = doing
        self._over = threading.Event()
        self._speaking = threading.RLock()  # or else the sign could follow what ended it
        self._began = time.monotonic() - min(passed, _FIRST_SECONDS)
        threading.Thread(target=self._speak, daemon=True).start()

    def _speak(self) -> None:
        wait = self._began + 0.75 * _FIRST_SECONDS - time.monotonic()
        while not self._over.wait(max(0.0, wait)):
            passed = f"{time.monotonic() - self._began:.0f} s"
            with self._speaking:
                if not self._over.is_set():
                    _say(f"rankxform: {self._doing} ({passed})\n")
            wait = _SIGN_SECONDS

    def end(self) -> None:
        with self._speaking:
            self._over.set()


class _PendingOutput:
    """Pending output: the line of an unfinished bar, and a first sign still to come."""

    bar: _Line | None = None
    sign: _FirstSign | None = None


def await_first_word(style: str, passed: float, doing: str = PLANNING) -> None:
    """Print a first sign after two seconds without output, of which `passed` are already over."""
    if style != "none":
        _PendingOutput.sign = _FirstSign(passed, doing)


def clear_pending_output() -> None:
    """Prepare for other output: cancel the first sign, and erase a bar that has been drawn."""
    if _PendingOutput.sign:
        _PendingOutput.sign.end()
        _PendingOutput.sign = None
    if _PendingOutput.bar is not None:
        _PendingOutput.bar.erase()
        _PendingOutput.bar = None


@contextmanager
def progress_shower(progress: bool | Callback, team: Team) -> Iterator[Begin]:
    """Show what a function does as is wished: to a callback, as the command does, or not.

    A callback may raise, which ends the call on every process.
    """

    def call(done: int, total: int, phase: str) -> None:
        assert callable(progress)
        try:
            progress(done, total, phase)
        except Exception as error:
            if team.size == 1 or isinstance(error, RankxformError):
                raise
            text = f"progress raised {type(error).__name__}: {error}"
            raise UsageError(text) from error  # the other processes have no such exception

    def check() -> None:
        if callable(progress):
            call(0, 0, "plan")
        elif not isinstance(progress, bool):
            raise UsageError(f"progress is {progress!r}; expected True, False or a function")

    team.bcast(check)
    if callable(progress):

        def begin(phase: str, total: int) -> ShowProgress:
            return lambda done, end: call(total if end else done, total, phase)

        yield begin if team.rank == 0 else begin_silently
        return
    if team.rank or not progress:
        yield begin_silently
        return
    await_first_word("auto", 0.0)
    try:
        yield _as_the_command
    finally:
        clear_pending_output()


def _as_the_command(phase: str, total: int) -> ShowProgress:
    clear_pending_output()
    return Progress(total)


def is_notebook() -> bool:
    """Tell whether what is written to `sys.stderr` appears below a notebook's cell."""
    return type(sys.stderr).__module__.startswith("ipykernel")


def _say(text: str) -> None:
    """Print a line on standard error, where a notebook shows it too."""
    if is_notebook():
        sys.stderr.write(text)
    else:
        _write(2, text)


def _write(fd: int, text: str) -> None:
    with suppress(OSError):  # the work goes on if nobody can read of it
        os.write(fd, text.encode())


def style_of(words: Sequence[str]) -> str:
    """Return what the command line asks for, before it is understood.

    >>> style_of(["transform", "a", "b", "--progress=none"]), style_of(["plan"])
    ('none', 'auto')
    """
    for word, after in zip(words, [*words[1:], ""]):
        flag, _, value = word.partition("=")
        if flag == "--progress":
            return value or after
    return "none" if {"-q", "--quiet"} & {*words} else "auto"


class Progress:
    """Shows bytes done of `total`; rate and time left are of the run so far.

    On a terminal one line is redrawn, never longer than the terminal is wide. Under a launcher the
    launcher's own terminal is used, because a launcher holds back a line until it ends. Elsewhere
    (a log, a batch job, a launcher on another host) lines are printed.
    """

    def __init__(self, total: int, style: str = "auto") -> None:
        self._total = total
        self._line = _line() if style in ("auto", "bar") else None
        if style == "bar" and self._line is None:
            self._line = _OnTerminal(2, opened=False)
        lines = style == "lines" or (style == "auto" and self._line is None)
        self._style = "lines" if lines else style
        self._began = time.monotonic()
        self._next = self._began + (_FIRST_SECONDS if lines else _BAR_SECONDS)
        self._last, self._said = self._began, 0.0

    def __call__(self, done: int, end: bool) -> None:
        """Show the bytes done by all processes; `end` is true in the last call only."""
        now = time.monotonic()
        if end:
            clear_pending_output()
            if self._line is not None:
                self._line.close()
                self._line = None
        elif self._style != "none" and self._is_due(now, done):
            self._draw(done, max(now - self._began, 1e-6))

    def _is_due(self, now: float, done: int) -> bool:
        """Whether it is time to show something; if so, the next time is set."""
        if self._style != "lines":
            due = now >= self._next
            self._next = now + _BAR_SECONDS if due else self._next
            return due
        share = self._share(done)
        early = now - self._began > _SECOND_SECONDS and share - self._said >= _LINE_SHARE
        if now < (min(self._next, self._last + _LEAST_SECONDS) if early else self._next):
            return False
        second = self._began + _SECOND_SECONDS
        self._next = second if now < second else now + _LINE_SECONDS
        self._last, self._said = now, share
        return True

    def _share(self, done: int) -> float:
        return min(done / self._total, 1.0) if self._total else 1.0

    def _words(self, done: int, passed: float) -> tuple[tuple[str, str, str], str]:
        """Return what was done, of how much, how fast; and the time that is left."""
        share = self._share(done)
        left = passed / share - passed if share else 0.0
        rate = f"{format_size(done / passed)}/s,"
        return (
            f"{share:4.0%}",
            f"of {format_size(self._total)},",
            rate,
        ), f"{format_seconds(left)} left"

    def _in_words(self, done: int, passed: float) -> str:
        words, left = self._words(done, passed)
        return f"rankxform: {' '.join(words)} {format_seconds(passed)} passed, {left}"

    def _draw(self, done: int, passed: float) -> None:
        if self._line is None:
            _write(2, f"{time.strftime('%H:%M:%S')} {self._in_words(done, passed)}\n")
            return
        words, left = self._words(done, passed)
        text = bar_line(words, left, self._share(done), self._line.columns)
        self._line.draw(text)
        _PendingOutput.bar = self._line


def _line() -> _Line | None:
    """Return the line that a person looks at, if there is one; never to wait for it."""
    if is_notebook():
        return _InNotebook()
    path = terminal()
    with suppress(OSError):
        if path:
            mode = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            return _OnTerminal(os.open(path, mode), opened=True)
    return None


def bar_line(words: tuple[str, str, str], left: str, share: float, width: int) -> str:
    """Return the line for a terminal of `width` columns: as much of it as there is room for.

    >>> bar_line((" 61%", "of 269 MB,", "165 MB/s,"), "1 s left", 0.61, 48)
    '#######.....  61% of 269 MB, 165 MB/s, 1 s left'
    >>> bar_line((" 61%", "of 269 MB,", "165 MB/s,"), "1 s left", 0.61, 26)
    ' 61% 165 MB/s, 1 s left'
    """
    part, total, rate = words
    texts = (f"{part} {total} {rate} {left}", f"{part} {rate} {left}", f"{part} {left}", part)
    text = next((text for text in texts if len(text) <= width), "")
    room = min(_WIDTH, width - len(text) - 1)
    if room < _LEAST_WIDTH:
        return text
    filled = round(share * room)
    return f"{'#' * filled}{'.' * (room - filled)} {text}"
