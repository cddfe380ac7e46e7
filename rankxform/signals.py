"""Signals that ask this process to stop, heard from the command's first statement on."""

from __future__ import annotations

import _signal as signal  # `signal` itself takes milliseconds, in which nobody listens
import os
import time
from collections.abc import Callable
from types import FrameType

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
STOPPED = 75
_FIRST_SPEAKS, _FORWARDED = 2.0, 0.3
"""Seconds for process 0 to speak, and for a launcher to forward what it says."""
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


class Signals:
    """What was heard. Stopping costs nothing but while work is done that is noted as it goes.

    at_work: whether such work is done, which then ends by itself; at any other moment a signal ends
    the process at once, as a second one does. reason: why to stop.

    Where a launcher started the process, signals wait until it is `ready`: while MPI starts, in
    which nobody listens, the others would wait for one that is gone.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.at_work = False
        self._waiting = any(name in os.environ for name in _RANKS)
        self._leave: Callable[[int], object] = os._exit
        self._names = {getattr(signal, name): name for name in NAMES}
        for number in self._names:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        again, self.reason = self.reason, f"stopped by {self._names[number]}"
        if not self._waiting and not (self.at_work and again is None):
            self._end(again is None)

    def ready(self, leave: Callable[[int], object]) -> None:
        """Say that MPI has started, if it does; end the process if it was asked to stop before.

        leave: ends all processes now, with an exit code.
        """
        self._waiting, self._leave = False, leave
        if self.reason is not None:
            self._end(True)

    def done(self) -> None:
        """Say that nothing is left to be stopped: MPI and the interpreter end, in a while."""
        for number in self._names:
            signal.signal(number, signal.SIG_IGN)

    def _end(self, is_first: bool) -> None:
        if any(os.environ.get(name, "0") != "0" for name in _RANKS):
            time.sleep(_FIRST_SPEAKS)  # process 0, which mostly got the signal too, ends all
        elif is_first:
            text = f"rankxform: error: {self.reason}; what is complete is kept\n"
            os.write(2, text.encode())
            if self._leave is not os._exit:
                time.sleep(_FORWARDED)
        self._leave(STOPPED)
