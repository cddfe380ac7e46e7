"""The command that writes again what differs in a destination, if there is one that does.

A conversion keeps complete files, and so makes those again that are removed before it. Nothing is
removed that it may not make: the command is left out where the destination is not the manifest's,
or has links, through which a conversion does not write.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.layout.names import format_ranges
from rankxform.publish.folder_records import words_of
from rankxform.statements import Finding
from rankxform.storage.posix import is_same_file

_FEW_FILES = 4
_RANKS = "--ranks"


def repair_command(
    folder: Path, record: Mapping[str, Any], errors: Sequence[Finding], *, whole: bool = False
) -> str | None:
    """Return the command that writes again what differs, by a manifest; None: there is none.

    folder: where the manifest is. whole: all files are written again, whichever differ.
    """
    command = [*words_of(record.get("command"))]
    is_nested = FORMS[record.get("form", DEFAULT_FORM)].tracker is not None
    places = (folder, folder.parent) if is_nested else (folder,)
    dst = _destination_of(command)
    if dst is None or not any(is_same_file(dst, place) for place in places):
        return None  # a copy, or moved
    if _has_links(folder, record["files"]):
        return None
    paths = sorted({error.file for error in errors if error.file is not None})
    whole = whole or len(paths) > _FEW_FILES or not all(error.file for error in errors)
    listed = {str(folder / name): entry["id"] for name, entry in record["files"].items()}
    written = [listed[path] for path in (listed if whole else paths) if path in listed]
    if _RANKS in command and written:  # of the last of several runs
        command[command.index(_RANKS) + 1] = format_ranges(sorted(written)).replace(" ", "")
    if whole:
        return shlex.join([*command, "--overwrite"])
    present = [path for path in paths if os.path.lexists(path)]
    if any(Path(path).is_dir() for path in present):
        return None
    return " && ".join(map(shlex.join, filter(None, [present and ["rm", *present], command])))


def _destination_of(command: Sequence[str]) -> Path | None:
    """Return the destination of a command of a manifest, which may set a folder first."""
    position = [*command, "rankxform"].index("rankxform") + 3  # and `transform SRC`
    return Path(command[position]) if position < len(command) else None


def _has_links(folder: Path, names: Mapping[str, Any]) -> bool:
    """Tell whether files of a folder, or the folders on the way to them, are links."""
    parents = {str(parent) for name in names for parent in Path(name).parents} - {"."}
    return any((folder / name).is_symlink() for name in (*names, *parents))
