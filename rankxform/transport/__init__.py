"""The only use of mpi4py: processes that share values, work side by side, and fail as one.

`team` gives the processes of this run; without a launcher it is this process alone, and MPI is
not imported.
"""

from __future__ import annotations

from typing import Any

from rankxform.errors import UsageError

from .launcher import launched_size
from .team import SerialTeam, Team


def team(comm: Any = None) -> Team:
    """Return the processes that share the work.

    comm: an mpi4py communicator of an embedding program; it is duplicated. Without one, the
    launcher's world if this process was started by one, else this process alone.
    Raises UsageError where launcher and MPI library disagree, or no MPI library is found.
    """
    if comm is None and launched_size() is None:
        return SerialTeam()
    if comm is not None and not hasattr(comm, "Dup"):
        raise UsageError(f"comm is {comm!r}; expected a communicator of mpi4py")
    from .mpi import MpiTeam

    return MpiTeam.over(comm)


__all__ = ["SerialTeam", "Team", "team"]
