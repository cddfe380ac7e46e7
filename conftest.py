"""Plugins must be named in the root folder."""

import signal

from hypothesis import settings

pytest_plugins = ["tests.mpi_launch", "tests.tries"]
collect_ignore = ["tests/data"]  # programs that make inputs

# Where a shell started the tests in the background, programs that they start would not hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("patient", deadline=None)  # no timed assertions, here neither
settings.load_profile("patient")
