"""Plugins must be named in the root folder."""

import gc
import os
import signal

from hypothesis import settings

pytest_plugins = ["tests.mpi_launch", "tests.tries"]
collect_ignore = ["tests/data"]  # programs that make inputs

# Where a shell started the tests in the background, programs that they start would not hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Else MindSpore asks for protobuf in Python, for files of gigabytes, and takes a seventh longer.
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "upb")

settings.register_profile("patient", deadline=None)  # no timed assertions, here neither
settings.load_profile("patient")


def pytest_collection_finish():
    """Let the garbage collector not go through all modules and tests again in every test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
