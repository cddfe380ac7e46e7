"""How near a conversion comes to a plain copy of as many bytes."""

# Beyond 100 % is possible: reading and writing overlap, and blocks may be shared.

from __future__ import annotations

from math import isfinite

from rankxform.errors import StorageError
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.values import dataclass

from .predict import storage_speeds
from .report import Report


@dataclass(frozen=True)
class PlainCopy:
    """A copy of as many bytes as a conversion moves, by as many processes, and nothing else.

    read, write: bandwidths, summed over all processes, in bytes a second. measured: after the
    conversion; else they were given (`--costs`). seconds: to read the bytes that are needed, and
    then to write those of the destination.
    """

    read: float
    write: float
    measured: bool
    seconds: float


def plain_copy(
    request: Request, source: Source, target: Target, done: Report, team: Team
) -> PlainCopy | None:
    """Return the plain copy that a conversion can be compared with. Collective.

    None if the conversion began with files that were there before, or nothing can be measured, as
    on a device that is full.
    """
    if done.files_kept or done.files_continued:
        return None
    costs = request.costs
    try:
        speeds = [costs] * team.size if costs else storage_speeds(request, source, target, team)
    except StorageError:  # raised on every process
        return None
    read = sum(one.read for one in speeds if isfinite(one.read))  # of those that see the source
    write = sum(one.write for one in speeds)
    if not read:
        return None
    seconds = done.bytes_needed / read + done.bytes_written / write
    return PlainCopy(read, write, costs is None, seconds)
