"""The command, with a fault at one of its calls that change the file system.

``python -m tests.trust.victim transform ...`` reads from the environment what is to happen:
VICTIM_PROCESS and VICTIM_CALL say on which process and at which call, VICTIM_WHOM who is killed
there: ``one`` (this process), ``all`` (every process with this VICTIM_ID), ``launcher`` (mpirun). A
journal entry is written after every parameter. With VICTIM_COUNTS, a folder, nobody is killed, and
each process leaves its number of calls there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

CHANGING = ("pwritev", "fsync", "replace", "link", "unlink", "mkdir", "open", "close")
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prte")


def relatives(mark):
    """Return (pid, command) of the processes that were started with this VICTIM_ID."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
                found.append((int(entry.name), os.path.basename(command)))
        except OSError:
            continue
    return found


def kill(whom, mark):
    mine = os.getpid()
    for pid, command in relatives(mark):
        if pid != mine and (whom == "all" or (whom == "launcher" and command in LAUNCHERS)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    if whom != "launcher":
        os.kill(mine, signal.SIGKILL)


def sync_nothing(fd):
    """Stand in for `os.fsync`: what a killed process wrote stays, whether it was synced or not."""


def count_calls(act):
    """Have `act` called with the number of each changing call, before it is made."""
    number = [0]

    def counted(real):
        def call(*args, **kwargs):
            number[0] += 1
            act(number[0])
            return real(*args, **kwargs)

        return call

    for name in CHANGING:
        setattr(os, name, counted(sync_nothing if name == "fsync" else getattr(os, name)))
    return number


def main():
    from rankxform.cli.main import main as command
    from rankxform.publish import journal
    from rankxform.transport.launcher import launched_rank

    journal.JOURNAL_SECONDS = 0
    counts = os.environ.get("VICTIM_COUNTS")
    if counts:
        number = count_calls(lambda number: None)
        code = command()
        Path(counts, str(launched_rank())).write_text(str(number[0]))
        return code
    if launched_rank() == int(os.environ.get("VICTIM_PROCESS", "0")):
        mark = f"VICTIM_ID={os.environ['VICTIM_ID']}".encode()
        at, whom = int(os.environ["VICTIM_CALL"]), os.environ["VICTIM_WHOM"]
        count_calls(lambda number: kill(whom, mark) if number == at else None)
    return command()


if __name__ == "__main__":
    sys.exit(main())
