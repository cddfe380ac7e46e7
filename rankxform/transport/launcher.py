"""What the launcher says in the environment, before any MPI library is loaded."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from contextlib import suppress

CLEAR_LINE = "\r\x1b[K"
_ANSWER_SECONDS = 5.0
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun", "srun")
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"
)  # fmt: skip
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK")


def launched_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many processes the launcher started, or None without a launcher.

    >>> launched_size({"PMI_SIZE": "4"}), launched_size({"SLURM_JOB_ID": "7"})
    (4, None)
    """
    sizes: tuple[str, ...] = _SIZES
    if "MS_WORKER_NUM" in environ or "MS_ROLE" in environ:
        return _first_number(environ, sizes)  # msrun's, though a step of srun may have started it
    if environ.get("SLURM_STEP_ID", "").isdecimal():  # a step of srun; not the batch script itself
        sizes += ("SLURM_STEP_NUM_TASKS",)
    return _first_number(environ, sizes)


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's number as the launcher counts, 0 without a launcher."""
    return _first_number(environ, (*_RANKS, "SLURM_PROCID")) or 0


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's number on its host, 0 where the launcher does not say.

    >>> local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "3"})
    3
    """
    return _first_number(environ, _LOCAL_RANKS) or 0


def msrun_workers(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a job has that was started without MPI, as by msrun.

    >>> msrun_workers({"MS_WORKER_NUM": "8"}), msrun_workers({})
    (8, 1)
    """
    return _first_number(environ, ("MS_WORKER_NUM", "RANK_SIZE")) or 1


def leave_hydra(environ: Mapping[str, str] = os.environ) -> None:
    """Tell MPICH's launcher that this process needs no MPI any more, now that it is finalized.

    The library says so only when the process exits. The launcher would regard a process that has
    become another program by then as lost, and kill all others. The message is PMI-1's.
    """
    if "PMI_FD" not in environ or "SLURM_STEP_ID" in environ:
        return
    with suppress(OSError, ValueError):
        fd = int(environ["PMI_FD"])
        os.write(fd, b"cmd=finalize\n")
        ready, _, _ = select.select([fd], [], [], _ANSWER_SECONDS)
        if ready:
            os.read(fd, 1024)


def terminal(stream: int = 2, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the terminal on which a person reads what this process writes, if it is one.

    stream: 1 for what goes to stdout, 2 for stderr.

    Under a launcher it is the launcher's own terminal: its processes write to a pipe or, with Open
    MPI, to a pseudo-terminal, wherever their output goes from there. None where the launcher is on
    another host.
    """
    if launched_size(environ) is None:
        return os.ttyname(stream) if os.isatty(stream) else None
    with suppress(OSError, ValueError, IndexError):
        name, parent = _process(os.getpid())
        while parent > 1 and not name.startswith(_LAUNCHERS):
            pid = parent
            name, parent = _process(pid)
            if name.startswith(_LAUNCHERS):
                path = os.readlink(f"/proc/{pid}/fd/{stream}")
                return path if path.startswith(_TERMINALS) else None
    return None


def _process(pid: int) -> tuple[str, int]:
    """Return a process's name and its parent (proc(5), fields 2 and 4 of stat)."""
    with open(f"/proc/{pid}/stat") as file:
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(environ[n]) for n in names if environ.get(n, "").isdecimal()), None)
