"""What a destination consists of beside its tensors: index, tracker, a model's small files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from posixpath import relpath

from rankxform.engine.compare_sink import Difference
from rankxform.errors import StorageError
from rankxform.publish.companions import changed_model_files, means, wrong_companions
from rankxform.publish.target import MANIFEST_NAME, read_manifest
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage.maps import CONFIG
from rankxform.storage.posix import read_bytes
from rankxform.target.model_files import of_another, own_config
from rankxform.target.target import Target
from rankxform.transport import Team


def compare_beside(
    request: Request, source: Source, target: Target, dst_source: Source, team: Team
) -> tuple[list[Difference], list[str]]:
    """Compare what a destination consists of beside its tensors; return differences, and notices.
    Collective.

    What another tool wrote is asked for what its form needs, and no more.
    """
    return team.bcast(lambda: _compare_companions(request, source, target, dst_source))


def _compare_companions(
    request: Request, source: Source, target: Target, dst_source: Source
) -> tuple[list[Difference], list[str]]:
    if not target.form.described:
        return [], []
    folder, record, notices = Path(dst_source.folder), None, list[str]()
    with suppress(StorageError):
        record = read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None
    if record is not None and record.get("form") == target.form.name:
        wrong = list(wrong_companions(folder, record).items())
        wrong += _tracker(target, folder)
        notices += changed_model_files(folder, record)
    else:
        wrong = [*_without_record(target, dst_source, folder)]
    if target.form.configured:
        shapes = {
            name: shape
            for index in dst_source.indexes.values()
            for name, shape in zip(index.schema.names, index.schema.shapes)
        }
        if (folder / CONFIG).is_file():
            model_config = own_config(request, source, target)
            is_part = bool(request.include or request.exclude)
            mismatch = of_another(folder, model_config, shapes, is_part=is_part)
            wrong += [(CONFIG, f"is of another model: {mismatch}")] if mismatch else []
        wrong_names = {name for name, _ in wrong}
        for name, content in target.companions.items():
            path = folder / name
            if name not in wrong_names and not (path.is_file() and read_bytes(path) == content):
                state = "is not what it would be" if path.is_file() else "is not there"
                notices.append(f"{path}: {state}, by --like or --config")
    return [Difference(name, -1, reason, whole_file=True) for name, reason in wrong], notices


def _without_record(target: Target, dst_source: Source, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the companions without which no reader finds a destination's files.

    Those that readers can do without are not asked for; others, the opening of it has asked for.
    """
    names = [relpath(path, folder) for path in dst_source.paths.values()]
    if target.form.configured and len(names) > 1:
        for name in target.form.companion_names(names):
            if not (folder / name).is_file():
                yield name, "is missing, and readers find the files by it"


def _tracker(target: Target, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield that the file by which readers find a destination is missing or means another."""
    if target.arrangement.mark is None or target.dst is None:
        return
    name, content = target.arrangement.mark
    path = Path(target.dst) / name
    if folder.resolve() == Path(target.dst).resolve():
        return  # one step's folder was named itself
    if not path.is_file():
        yield name, "is missing, and readers find the newest checkpoint by it"
    elif not means(read_bytes(path), content):
        yield name, f"does not say {content.decode().strip()}, and readers find the newest by it"
