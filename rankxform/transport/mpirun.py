"""Starts this command's processes with the mpirun that belongs to this Python's MPI library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankxform.errors import UsageError

from .library import OPEN_MPI, family_of, load, name_of

_ANSWER = 30.0
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def command(processes: int, words: Sequence[str], hostfile: str | None = None) -> list[str]:
    """Return the command line that runs rankxform with `words` on so many processes.

    hostfile: the hosts to use, in the form of that mpirun. Raises UsageError where there is no MPI
    library, or no mpirun that fits it.
    """
    library = load().Get_library_version()
    mpirun = _found(library)
    own = [sys.executable, "-m", "rankxform", *words]
    number = ["-n", str(processes)]
    if family_of(library) != OPEN_MPI:
        return [mpirun, *(("-f", hostfile) if hostfile else ()), *number, *own]
    options = ["--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if hostfile:
        options += ["--hostfile", hostfile]
        options += [word for name in _PASSED_ON if name in os.environ for word in ("-x", name)]
    elif processes > len(os.sched_getaffinity(0)):
        options.append("--oversubscribe")
    return [mpirun, *options, *number, *own]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of the processes: numpy's libraries start no threads of their own."""
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **environ}


def _found(library: str) -> str:
    """Return the path of the mpirun that fits a library, by its version's text."""
    name = name_of(library)
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        raise UsageError(
            f"-n: put the mpirun of {name} in PATH; there is none there, nor beside "
            f"{sys.executable}"
        )
    try:
        told = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"-n: {path} --version does not answer ({error})") from None
    if family_of(told.stdout + told.stderr) != family_of(library):
        first = next(iter(told.stdout.splitlines()), "no version")
        raise UsageError(
            f"-n: put the mpirun of {name} in PATH; {path} is another's ({first}), and this "
            f"Python ({sys.executable}) uses {name}"
        )
    return path
