"""The command, made slow enough to be interrupted: every read waits for SLOW_SECONDS first.

Prints ``at work`` with its process id when it has read for the first time.
"""

from __future__ import annotations

import os
import sys
import time

from rankxform.cli.main import main
from rankxform.execution import engine

real = engine.Sources.read
told = []


def read(self, *arguments):
    if not told:
        told.append(1)
        os.write(1, f"at work {os.getpid()}\n".encode())
    time.sleep(float(os.environ["SLOW_SECONDS"]))
    real(self, *arguments)


engine.Sources.read = read
sys.exit(main())
