"""How a process is asked to stop."""

from __future__ import annotations

import signal
import subprocess
import sys

from rankxform.cli.options import CommandStop
from rankxform.errors import StoppedError
from rankxform.process import NAMES as HEARD
from rankxform.process import STOPPED, Signals
from tests.mpi_launch import environment
from tests.trust.test_signals import ROOT


def test_a_stop_is_asked_for_once():
    before = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, HEARD)}
    try:
        stopping = CommandStop(Signals(), 1000)
        assert stopping.reason() is None
        stopping.at_work(True)
        signal.raise_signal(signal.SIGUSR1)
        assert stopping.reason() == "stopped by SIGUSR1"
        assert StoppedError.exit_code == STOPPED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_process_that_alone_was_asked_says_so():
    """While it plans, process 0 does not hear of it, and would be ended without a word."""
    code = (
        "import os, signal; from rankxform.process import Signals; Signals().ready(os._exit); "
        "signal.raise_signal(signal.SIGTERM)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment(PMI_RANK="1"), cwd=ROOT, text=True,
        capture_output=True,
    )  # fmt: skip
    assert found.returncode == STOPPED
    assert found.stderr == "rankxform: error: stopped by SIGTERM; what is complete is kept\n"
