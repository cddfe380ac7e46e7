"""When to stop before the end: signals, and the time that a batch system gives.

A stop is requested here and carried out by the code that does the work: it syncs and records what
is complete, and the command exits with 75.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from rankxform.signals import Signals

_MARGIN_SECONDS, _MARGIN_SHARE = 30.0, 0.1


class CommandStop:
    """Tells the work whether to stop, and why.

    While work is done, the first signal asks for a stop; a second one ends the process at once,
    which loses what was done since the journals' last entry and nothing else.
    """

    def __init__(self, signals: Signals, seconds: float | None = None) -> None:
        """With `seconds`, stop some time before they have passed."""
        self._signals = signals
        self._until: float | None = None
        if seconds is not None:
            margin = min(_MARGIN_SECONDS, seconds * _MARGIN_SHARE)
            self._until = time.monotonic() + seconds - margin

    def reason(self) -> str | None:
        """Return why to stop, or None."""
        signal_reason = self._signals.reason
        if signal_reason is None and self._until is not None and time.monotonic() > self._until:
            return "stopped: the time limit is near"
        return signal_reason

    def at_work(self, is_at_work: bool) -> None:
        """Say whether work is done that ends by itself when it is asked to."""
        self._signals.at_work = is_at_work


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
