"""How much memory this process takes."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path


def peak_memory() -> int:
    """Return the largest resident size this process has had, in bytes.

    What getrusage says counts from before the program was started, its parent's pages too.
    """
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
