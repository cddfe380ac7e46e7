"""Progress on process 0: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from rankxform.transport.launcher import gives_terminals

from .units import seconds, size

_BAR_SECONDS, _LINE_SECONDS = 0.1, 10.0
_WIDTH = 30


class Progress:
    """Shows bytes done of `total`; rate and time left are of the run so far.

    On a terminal one line is drawn over and over. Elsewhere (a log, a batch job, under Open MPI,
    which makes every stream look like a terminal) a line is printed every ten seconds.
    """

    def __init__(self, total: int, style: str = "auto") -> None:
        self._total = total
        terminal = sys.stderr.isatty() and not gives_terminals()
        self._style = ("bar" if terminal else "lines") if style == "auto" else style
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, end: bool) -> None:
        """Take note of the bytes done by all processes; `end` is said once, at the end."""
        now = time.monotonic()
        pause = _BAR_SECONDS if self._style == "bar" else _LINE_SECONDS
        if self._style == "none" or not (end or now - self._last >= pause):
            return
        self._last = now
        passed = max(now - self._began, 1e-6)
        share = min(done / self._total, 1.0) if self._total else 1.0
        left = passed / share - passed if share else 0.0
        text = f"{share:4.0%} of {size(self._total)}, {size(done / passed)}/s, {seconds(left)} left"
        with suppress(OSError):  # the work goes on if nobody can read of it
            self._draw(text, share, end)

    def _draw(self, text: str, share: float, end: bool) -> None:
        if self._style == "bar":
            filled = round(share * _WIDTH)
            bar = "#" * filled + "." * (_WIDTH - filled)
            sys.stderr.write(f"\r{bar} {text}\x1b[K" + ("\r\x1b[K" if end else ""))
            sys.stderr.flush()
        elif not end:
            print(f"rankxform: {text}", file=sys.stderr, flush=True)
