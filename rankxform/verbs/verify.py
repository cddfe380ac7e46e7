"""`verify SRC DST`: a destination compared with what its source makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM
from rankxform.errors import StorageError, UsageError
from rankxform.request import Request
from rankxform.source.written import BYTES
from rankxform.statements import Finding, as_notice, as_warning
from rankxform.target.existing import ExistingDestination
from rankxform.target.manifest import verify_command, verify_options
from rankxform.target.target import Conversion
from rankxform.transport import Team

from .convert import OnStart, Outcome, convert, start_silently
from .keep_fingerprints import FingerprintedDestination
from .repair import repair_command
from .verdict import Verdict
from .verify_folder import manifests_of_nodes, merge_manifests


def verify(request: Request, team: Team, on_start: OnStart = start_silently) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows. Nothing is written but fingerprints, if
    the request wants them kept, and nothing differs. Collective.
    """
    kind = FingerprintedDestination if request.keep_fingerprints else ExistingDestination
    destination = kind()
    outcome = convert(request, destination, team, on_start)
    conversion = outcome.conversion
    differences, folder = destination.differences, conversion.target.place
    manifest = find_manifest(folder, team) if differences else None
    other_options = notice_of_other_options(conversion, manifest) if manifest else []
    return Verdict(
        request.src,
        folder,
        BYTES,
        (
            *differences,
            *map(as_notice, chain(outcome.notices, other_options)),
            *map(as_warning, outcome.warnings),
        ),
        destination.ranks,
        files_compared=len(destination.existing.indexes),
        bytes_compared=outcome.bytes_written,
        seconds=outcome.seconds,
        processes=team.size,
        repair=_repair(outcome, manifest, differences) if manifest else None,
        step=conversion.source.selected.step_name,
        evidence=conversion.target.evidence.facts,
        fingerprints_kept=request.keep_fingerprints and not differences,
    )


def _repair(
    outcome: Outcome, manifest: Mapping[str, Any], differences: Sequence[Finding]
) -> str | None:
    """Return what writes again what differs; None where it may be as it was made, of another
    step."""
    conversion = outcome.conversion
    step = manifest["identity"].get("step")
    if step not in (None, conversion.source.selected.step_name):
        return None
    return repair_command(conversion.target.place, manifest, differences, outcome)


def find_manifest(folder: str, team: Team) -> Mapping[str, Any] | None:
    """Return what the manifests of a destination say; None: there is none, or one cannot be read.

    Collective; what it does not find or cannot read, no process does.
    """
    with suppress(StorageError, UsageError):
        return merge_manifests(manifests_of_nodes(folder, team)[0])
    return None


def notice_of_other_options(conversion: Conversion, manifest: Mapping[str, Any]) -> list[str]:
    """Return, as a notice, the command with the options that a destination was made with, if they
    are not those of the request."""
    request, folder = conversion.request, conversion.target.place
    src = None if request.files is not None else conversion.source.where.path
    request_options = [src, *verify_options(conversion)]
    was = [manifest["identity"].get("source"), *(manifest.get("verify") or ())]
    if _normal(was) == _normal(request_options):
        return []
    command = verify_command(manifest, folder)
    return [f"{folder} was made with other options; compare it with: {command}"]


def _normal(words: Iterable[str | None]) -> list[str]:
    """Return a source and options without defaults and links, so that equal ones are equal."""
    pairs = [str(Path(word).resolve()) if word[0] == "/" else word for word in words if word]
    for default in (["--dst-form", DEFAULT_FORM], ["--dst-strategy", "none"]):
        for position in range(len(pairs) - 1):
            if pairs[position : position + 2] == default:
                del pairs[position : position + 2]
                break
    return pairs
