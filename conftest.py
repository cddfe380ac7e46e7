"""Plugins must be named in the root folder."""

import ctypes
import gc
import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest
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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Where RANKXFORM_SHARE asks for it, keep one case in three of what is `sampled`.

    Of three the first, of the next three the second: else a list of three would be kept by its
    first value alone.
    """
    if not os.environ.get("RANKXFORM_SHARE") or "RANKXFORM_MPI_RESULTS" in os.environ:
        return  # the processes under mpirun are told what to run
    cases_by_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            # A law of a suite is one function, of which each subclass has cases.
            cases_by_test[item.function].append(item)
    left_out = [
        item
        for cases in cases_by_test.values()
        for number, item in enumerate(cases)
        if number % 3 != number // 3 % 3
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Let the garbage collector not go through all modules and tests again in every test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    use_huge_pages()


def use_huge_pages():
    """Put this process's memory into pages of 2 MiB, where the system does so (Linux 6.1 or later).

    Tests fork some thousand times, and a fork copies one table entry per page: 28 ms for 190 MB of
    small pages, 6 ms for these. On a virtual machine tests of crashes took 7-11 % less, others 2 %.
    """
    size, collapse = 2 << 20, 25  # 25: MADV_COLLAPSE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    maps = Path("/proc/self/maps")
    for addresses, rights, _, _, inode, *names in (
        line.split() for line in (maps.read_text().splitlines() if maps.exists() else ())
    ):
        if rights.startswith("rw") and inode == "0" and names in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for aligned in range(-(-start // size) * size, end - size + 1, size):
                madvise(aligned, size, collapse)  # what cannot be is left as it is
