"""What a folder that rankxform wrote says of itself: its manifest, compared with what is there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, DEFAULT_PATTERN, CheckpointRef, Form
from rankxform.checkpoints.rank_folders import LATEST
from rankxform.errors import FormatError, Message, RankxformError, StorageError
from rankxform.facts import MANIFEST, STEP, TYPE, Statement
from rankxform.layout.strategy import Strategy
from rankxform.publish.companions import changed_model_files, wrong_companions
from rankxform.publish.contents import manifest_sharding
from rankxform.publish.facts import is_unchanged, stat_or_none
from rankxform.publish.target import MANIFEST_NAME, read_manifest
from rankxform.storage.store import Listing, address_of, is_path
from rankxform.values import dataclass


@dataclass(frozen=True)
class SourceManifest:
    """What a manifest states of a checkpoint. label: the manifest's path.

    strategy: how its ranks shard; None where it does not say so of all pipeline stages, or the form
    does. dtypes: by name. files: what is noted of each, by name relative to the folder. steps: how
    far the training was; applied: digests of the adapters that were added. wrong: companion files
    that are not as written, and missing_files: files that are not there, of a form that describes
    itself, in words; doubts: a model's small files that are not as they were copied. notice: why
    the manifest could not be read.
    """

    label: str
    strategy: Strategy | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    applied: tuple[str, ...] = ()
    wrong: tuple[Message, ...] = ()
    missing_files: tuple[Message, ...] = ()
    doubts: tuple[str, ...] = ()
    notice: str = ""

    @property
    def facts(self) -> Iterator[Statement]:
        """What it states that files may contradict."""
        for name, dtype in self.dtypes.items():
            yield Statement(TYPE, name, dtype, MANIFEST, self.label)
        for name, value in self.steps.items():
            yield Statement(STEP, name, value, MANIFEST, self.label)


def read_source_manifest(
    where: CheckpointRef, form: Form, listing: Listing | None, below: str = ""
) -> SourceManifest | None:
    """Return what the manifest beside a checkpoint's files says of them; None if there is none.

    It speaks of the files that it lists: where others lie among them, or are chosen, nothing is
    known. A manifest that cannot be read is said, and is no reason to
    refuse the files. below: the folder of the files, relative to the place.
    """
    if listing is None or where.files is not None or not is_path(where.path):
        return None
    folder = Path(where.path) / below
    path = folder / MANIFEST_NAME
    if (not form.described and _is_choice(where)) or not path.is_file():
        return None
    try:
        return _read(folder, form, listing)
    except RankxformError as error:
        return SourceManifest(str(path), notice=f"{error}; the files were taken as any others")


def _is_choice(where: CheckpointRef) -> bool:
    default = (where.pattern, where.suffix) == (DEFAULT_PATTERN, None)
    return not default or where.step not in (None, LATEST)


def _read(folder: Path, form: Form, listing: Listing) -> SourceManifest | None:
    record, path = read_manifest(folder), folder / MANIFEST_NAME
    names = list(record["files"])
    if record.get("form", DEFAULT_FORM) != form.name:
        return None
    if not form.described and form.foreign_files(listing, names):
        return None
    strategy: Strategy | None = None
    dtypes: Mapping[str, str] = {}
    if not form.described:
        try:
            sharding = manifest_sharding(record, str(path))
        except FormatError as error:
            raise StorageError(f"damaged: {error}", where=path) from error
        strategy, dtypes = sharding.strategy, sharding.dtypes
    steps, label = record.get("step"), str(path)
    present_names = (
        [name for name in names if (folder / name).exists()] if form.described else names
    )
    return SourceManifest(
        str(path),
        strategy,
        dtypes,
        record["files"],
        {n: v for n, v in steps.items() if isinstance(v, int)} if isinstance(steps, dict) else {},
        tuple(digest for digest in record.get("applied", ()) if isinstance(digest, str)),
        tuple(
            Message(r, where=str(folder / n)) for n, r in wrong_companions(folder, record).items()
        ),
        tuple(_gone(label, names, present_names)),
        tuple(changed_model_files(folder, record)),
    )


def missing_manifest_files(
    src_manifest: SourceManifest, present_names: Collection[str], ranks: Collection[int] | None
) -> Iterator[Message]:
    """Yield what a manifest lists and is not there. ranks: those that are needed."""
    needed_names = [n for n, f in src_manifest.files.items() if ranks is None or f["rank"] in ranks]
    yield from _gone(src_manifest.label, needed_names, present_names)


def _gone(
    label: str, expected_names: Collection[str], present_names: Collection[str]
) -> Iterator[Message]:
    present_set = {*present_names}
    missing_names = [name for name in expected_names if name not in present_set]
    if missing_names:
        suffix = f", and {len(missing_names) - 1} files more" if missing_names[1:] else ""
        yield Message(
            f"is gone, and {label} lists it",
            ("bring it back", "convert the original again"),
            f"{address_of(str(Path(label).parent), missing_names[0])}{suffix}",
        )


def changed_manifest_file(
    path: str, manifest_entry: Mapping[str, Any], label: str
) -> Message | None:
    """Return that a file is not the one that a manifest lists; None if it is."""
    facts = stat_or_none(Path(path).resolve())
    with suppress(RankxformError):
        if facts is None or is_unchanged(Path(path), manifest_entry, facts):
            return None
    return Message(
        f"is not the file that {label} lists: it was changed or replaced since",
        ("bring the right one", "remove the manifest if it is meant"),
        path,
    )
