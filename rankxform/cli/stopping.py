"""When to stop before the end: signals, and the time that a batch system gives.

A stop is requested here and carried out by the code that does the work: it syncs and records what
is complete, and the command exits with 75.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from types import FrameType

from rankxform.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_MARGIN_SECONDS, _MARGIN_SHARE = 30.0, 0.1


class Stopping:
    """Tells the work whether to stop, and why.

    The first signal asks for a stop; a second one ends the process at once, which loses what was
    done since the journals' last entry and nothing else.
    """

    def __init__(self, seconds: float | None = None) -> None:
        """Take over the signals; with `seconds`, stop some time before they have passed."""
        self._reason: str | None = None
        self._until: float | None = None
        if seconds is not None:
            margin = min(_MARGIN_SECONDS, seconds * _MARGIN_SHARE)
            self._until = time.monotonic() + seconds - margin
        for number in SIGNALS:
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None:
            os._exit(StoppedError.exit_code)
        self._reason = f"stopped by {signal.Signals(number).name}"

    def __call__(self) -> str | None:
        """Return why to stop, or None."""
        if self._reason is None and self._until is not None and time.monotonic() > self._until:
            self._reason = "stopped: the time limit is near"
        return self._reason


def parse_time(text: str) -> float:
    """Read a time span: seconds, ``M:SS``, ``H:MM:SS``, ``D-H:MM:SS``, or ``90m``, ``2h``.

    >>> parse_time("90"), parse_time("1:30:00"), parse_time("1-0:0:0"), parse_time("1.5h")
    (90.0, 5400.0, 86400.0, 5400.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match:
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return what Slurm says is left of the job's time, in seconds, if it says so.

    >>> seconds_left({})
    """
    end = environ.get("SLURM_JOB_END_TIME", "")
    return max(0.0, float(end) - time.time()) if end.isdigit() else None
