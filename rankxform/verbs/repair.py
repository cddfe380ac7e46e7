"""The command that writes again what differs in a destination, if there is one that does.

A conversion keeps complete files, and so makes those again that are removed before it. Nothing is
removed that it may not make: the command is left out where the destination is not the manifest's,
has links, through which a conversion does not write, or where something that it reads is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.layout.names import format_ranges
from rankxform.publish.folder_records import words_of
from rankxform.statements import WARNING, Finding, HasFindings, join
from rankxform.storage.identity import is_same_file

_FEW_FILES = 4
_RANKS, _STRAYS = "--ranks", "nothing_else_is_there"


def repair_command(
    place: str,
    record: Mapping[str, Any],
    errors: Sequence[Finding],
    with_source: HasFindings | None = None,
) -> str | None:
    """Return the command that writes again what differs, by a manifest; None: there is none.

    place: where the manifest is. with_source: of a comparison with the source, all of it.
    """
    folder = Path(place)
    command, form = [*words_of(record.get("command"))], FORMS[record.get("form", DEFAULT_FORM)]
    if not _is_made_anew(folder, record, command):
        return None
    if with_source and any(f.file for f in with_source.findings if f.severity == WARNING):
        return None  # a conversion refuses a folder in which others' files lie
    paths = sorted({error.file for error in errors if error.file is not None})
    listed = {str(folder / name): entry["id"] for name, entry in record["files"].items()}
    # Files that are no ranks' are compared as an index says; where it differs, any may.
    all_files = form.described and with_source is not None and not {*paths} <= {*listed}
    all_files = all_files or len(paths) > _FEW_FILES or not all(error.file for error in errors)
    written = [listed[path] for path in (listed if all_files else paths) if path in listed]
    if _RANKS in command and written:  # of the last of several runs
        command[command.index(_RANKS) + 1] = format_ranges(sorted(written)).replace(" ", "")
    if all_files:  # what does not belong there is removed all the same
        paths = sorted({e.file for e in errors if e.file and e.rule == _STRAYS})
        command.append("--overwrite")
    present = [path for path in paths if Path(path).exists()]
    if any(Path(path).is_dir() for path in present):
        return None
    if all(error.rule == _STRAYS for error in errors):  # they go, and nothing is made again
        command = []
    # What differs may be the best that is left, where it cannot be made again.
    if any(word.startswith("/") and not Path(word).exists() for word in command):
        return None
    return " && ".join(map(join, filter(None, [present and ["rm", *present], command])))


def _is_made_anew(folder: Path, record: Mapping[str, Any], command: Sequence[str]) -> bool:
    """Tell whether a manifest's command writes the files that it lists: it is no copy's, and no
    files, or folders on the way to them, are links."""
    position = [*command, "rankxform"].index("rankxform") + 3  # `rankxform transform SRC DST`
    if position >= len(command):
        return False
    is_nested = FORMS[record.get("form", DEFAULT_FORM)].tracker is not None
    places, dst = (folder, folder.parent) if is_nested else (folder,), Path(command[position])
    parents = {str(parent) for name in record["files"] for parent in Path(name).parents} - {"."}
    has_links = any((folder / name).is_symlink() for name in (*record["files"], *parents))
    return not has_links and any(is_same_file(dst, place) for place in places)
