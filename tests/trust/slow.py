"""The command, made slow enough to be interrupted: every read waits for SLOW_SECONDS first.

Prints ``at work`` with its process id when it reads for the first time.
"""

from __future__ import annotations

import os
import sys
import time

from rankxform.cli.main import main
from rankxform.engine import pipeline as engine


def slow_down():
    real, told = engine.SourceReader.read, []

    def read(self, *arguments):
        if not told:
            told.append(1)
            os.write(1, f"at work {os.getpid()}\n".encode())
        time.sleep(float(os.environ["SLOW_SECONDS"]))
        real(self, *arguments)

    engine.SourceReader.read = read


if __name__ == "__main__":
    slow_down()
    sys.exit(main())
