"""The command in forked processes: what a launcher would start, without its seconds.

An interpreter that imports the package takes 0.3 s, mpirun of three a second. What a command says
and writes is the same in a process that is forked from the tests' own, over a local world
(tests/local_world.py). tests.cli.test_main.py starts the command itself.
"""

from __future__ import annotations

import os
import sys
from tempfile import TemporaryFile
from typing import NamedTuple

from rankxform.cli import main as command_line
from rankxform.transport import team
from tests.local_world import Failed, run_world
from tests.mpi_launch import LAUNCHERS, SIGN_OF_LIFE


class Done(NamedTuple):
    """How a command ended: the exit code of process 0, and what all of them printed."""

    code: int
    stdout: str
    stderr: str


def run_forked(words, processes, folder, deadline=120.0, **environ):
    """Run the command in forked processes.

    words: its arguments. processes: how many; one runs without MPI. folder: it works there.
    environ: more of the environment.
    """

    def work(comm):
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            del os.environ[name]
        os.environ.update(environ)
        if processes > 1:
            os.environ.update(PMI_SIZE=str(processes), PMI_RANK=str(comm.rank))
            command_line.team = lambda: team(comm)
        os.chdir(folder)
        for number, file in enumerate((nothing, *captured)):
            os.dup2(file.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, "rw"[fd > 0], closefd=False) for fd in range(3)
        )
        sys.argv = ["rankxform", *map(str, words)]
        try:
            return command_line.main()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    with open(os.devnull) as nothing, TemporaryFile("a+") as stdout, TemporaryFile("a+") as stderr:
        captured = stdout, stderr
        codes = run_world(processes, work, deadline=deadline)
        printed = []
        for file in captured:
            file.seek(0)
            printed.append(SIGN_OF_LIFE.sub("", file.read()))
    failed = [code for code in codes if isinstance(code, Failed)]
    assert not failed, failed[0]
    return Done(codes[0], *printed)
