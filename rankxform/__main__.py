"""``python -m rankxform``: see `rankxform.cli`."""

import gc

from .process import Signals

# What the start makes lives on: the collector would look at it dozens of times, for 4 % of a short
# command. It still runs, after more objects.
gc.set_threshold(50_000, 20, 20)

signals = Signals()  # before anything else is imported, which takes a while


def run() -> int:
    """Run the command that this process was started with; return its exit code."""
    from rankxform.cli.main import main

    return main(signals=signals)


# CPython (from 3.11) keeps frames in blocks of 16 KiB, and maps and unmaps one at each call that
# crosses a block's end: 900 times while the package is imported, 6 % of a short command. This
# frame asks for half a MiB and gets a block of one, whose other half has room for all others.
run.__code__ = run.__code__.replace(co_stacksize=1 << 16)


if __name__ == "__main__":
    import sys

    sys.exit(run())
