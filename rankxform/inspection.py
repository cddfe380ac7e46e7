"""What a checkpoint or a strategy holds, and which source ranks a destination rank needs.

Functions that look and return plain values (dictionaries of texts, numbers and lists), for the
command line and for programs; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from rankxform.checkpoints.base import (
    DEFAULT_FORM,
    DEFAULT_PATTERN,
    FORMS,
    CheckpointRef,
    Form,
    SelectedFiles,
)
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.formats.container import BYTES, Index, container_suffixes
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.planning.catalog import Description
from rankxform.publish.files import wrong_companions
from rankxform.publish.folder_records import (
    FOLDER_NAME,
    JOB_NAME,
    MANIFEST_NAME,
    BegunJob,
    begun_job,
    read_manifest,
)
from rankxform.source.open import open_source
from rankxform.source.place import form_at, list_and_select, listing_at
from rankxform.source.source import Source
from rankxform.storage.source_reader import container_of_path, index_file
from rankxform.storage.store import (
    FILE,
    NOTHING,
    absolute,
    address_of,
    is_litter,
    storage_of,
    store_at,
)
from rankxform.storage.user_files import SUFFIXES, is_strategy, load_strategy

from .errors import RankxformError, StorageError, StrategyError, UsageError
from .transport import SerialTeam

Found: TypeAlias = "dict[str, Any] | None"
Look: TypeAlias = Callable[[str, str], Found]
"""Describes what is at a place, where files' names have a pattern; None if it is something else."""


def inspect(place: str, pattern: str = DEFAULT_PATTERN) -> dict[str, Any]:
    """Describe what is at `place`: a checkpoint file or folder, a strategy, or a folder with these.

    ``kind`` says which: "checkpoint", "folder" (rank folders), "described" (a folder that says
    itself what its files hold), "destination" (what rankxform wrote
    or began), "strategy", "strategies" (a folder of several), "files" (a rank's folder), "json" (of
    another kind) or "collection" (a folder with some of these). Raises UsageError where nothing is,
    and CheckpointError or StrategyError for one file that cannot be read; in a folder, such a file
    is listed with its error.
    """
    looks: tuple[Look, ...] = (_object, _describe_self_describing, _ranks)
    if storage_of(place).has_folders:
        place = str(Path(place))
        looks = (_file, _destination, _describe_self_describing, _rank_folders, _folder)
    descriptions = (look(place, pattern) for look in looks)
    return next(description for description in descriptions if description is not None)


def _object(place: str, pattern: str) -> Found:
    """Describe one file at an address."""
    kind = store_at(place).list("*").kind
    if kind == NOTHING:
        raise UsageError("no such file or folder", where=place)
    return _checkpoint(place) if kind == FILE else None


def described_form_at(place: str) -> Form | None:
    """Return the form of a folder that describes itself; None of any other."""
    with suppress(RankxformError, OSError):
        form = form_at(CheckpointRef(absolute(place)))
        return form if form.described else None
    return None


def _describe_self_describing(place: str, pattern: str) -> Found:
    """Describe a checkpoint that describes itself, with all that it says wrongly of its files."""
    form = described_form_at(place) if pattern == DEFAULT_PATTERN else None  # else they are ranks'
    if form is None:
        return None
    common_fields: dict[str, Any] = {
        "kind": "described",
        "path": place,
        "form": form.name,
        "form_title": form.title,
    }
    source = open_source(CheckpointRef(absolute(place), form.name), SerialTeam())
    faults = [error.text for error in source.errors if error.file is None]
    listing, description = source.listing, source.description
    if not source.paths:
        names = listing.files if listing is not None else ()
        files = [_facts(address_of(place, n)) for n in names if n.endswith(container_suffixes())]
        return {**common_fields, "step": None, "steps": [], "faults": faults, "shards": files}
    strategy, rows = description.strategy, []
    is_of_files = isinstance(strategy, WholeStrategy)  # each file has tensors of its own
    for number, row in _rows(place, source).items():
        rank = {"rank": description.ranks[number]} if number in description.ranks else {}
        rows.append({**row, **rank})
    return {
        **common_fields,
        **_steps(source.selected),
        "ranks": None if strategy is None or is_of_files else strategy.ranks,
        "faults": faults,
        "notices": [*_boxes_in_words(description), *source.notices],
        **_warnings(source),
        "shards": rows,
    }


def _warnings(source: Source) -> dict[str, list[str]]:
    return {"warnings": [*source.warnings]} if source.warnings else {}


def _boxes_in_words(description: Description) -> Iterator[str]:
    """Say what a table has that says box by box where each tensor lies."""
    if not description.boxes:
        return
    non_tensor_count = sum(dtype == BYTES for dtype, _ in description.declared.values())
    tensors = len(description.declared) - non_tensor_count
    boxes = sum(map(len, description.boxes.values())) - non_tensor_count
    also = f", and {non_tensor_count:,} that are no tensors" if non_tensor_count else ""
    yield f"{tensors:,} tensors in {boxes:,} boxes{also}"


def _rows(place: str, source: Source) -> dict[int, dict[str, Any]]:
    """Describe each file of a checkpoint, or say why it cannot be read."""
    wrong = {error.file: error.text for error in source.errors}
    indexes = {**source.indexes, **source.extra_rank_index}
    return {
        file: {
            "file": address_of(place, name),
            **(
                _totals(indexes[file])
                if file in indexes
                else {"error": wrong.get(source.paths[file])}
            ),
        }
        for file, name in source.selected.names.items()
        if file in source.paths
    }


def _steps(selected: SelectedFiles) -> dict[str, Any]:
    """Return which step is chosen, and which there are."""
    steps = sorted({*selected.skipped_steps, *([selected.step] if selected.step else [])})
    return {"step": selected.step_name, "steps": ["_".join(map(str, step)) for step in steps]}


def _by_rank(path: Path, pattern: str) -> dict[int, list[str]]:
    """Return the checkpoint files of each rank, by names, of rank folders."""
    where = CheckpointRef(pattern=pattern)
    return by_rank(listing_at(path, FORMS[DEFAULT_FORM], where), where.pattern)


def _file(place: str, pattern: str) -> Found:
    path = Path(place)
    if not path.exists():
        raise UsageError("no such file or folder", where=path)
    if path.is_dir():
        return None
    if not path.is_file():
        raise UsageError("is neither a file nor a folder", where=path)
    if is_strategy(path):
        return _strategy(path)
    if path.suffix != ".json":
        return _checkpoint(path)
    if path.name == MANIFEST_NAME:
        return _destination(str(path.parent), pattern)
    return {"kind": "json", "path": str(path), "file_bytes": path.stat().st_size}


def describe_briefly(path: Path, pattern: str = DEFAULT_PATTERN) -> dict[str, Any] | None:
    """Say what is at `path` without opening checkpoint files; None if it is nothing of interest."""
    title = None
    try:
        if path.is_file():
            title = _in_words(path)
        elif path.is_dir():
            title = _folder_in_words(path, pattern)
    except (RankxformError, OSError) as error:
        title = str(error)
    return {"path": str(path), "what": title} if title else None


def _in_words(path: Path) -> str | None:
    if path.suffix in SUFFIXES and is_strategy(path):
        return f"strategy, {load_strategy(str(path)).extent}"
    if path.suffix in container_suffixes():
        return f"checkpoint file, {path.stat().st_size:,} bytes"
    return None


def _folder_in_words(path: Path, pattern: str) -> str | None:
    if _begun_at(path) is not None:
        return "unfinished work of rankxform; inspect it to see what continues it"
    form = described_form_at(str(path))
    if form is not None:
        return f"checkpoint, {form.title}"
    ranks = _by_rank(path, pattern)
    if ranks:
        try:
            where = CheckpointRef(str(path.absolute()), DEFAULT_FORM, pattern)
            steps = ", ".join(_steps(list_and_select(where).selected)["steps"])
        except RankxformError as error:
            steps = str(error)
        ours = ", written by rankxform" if (path / MANIFEST_NAME).exists() else ""
        return f"checkpoint of {len(ranks):,} ranks{ours}" + (f"; steps {steps}" if steps else "")
    entries = sorted(entry for entry in path.iterdir() if not is_litter(entry.name))
    if any(_is_strategy(entry) for entry in entries):
        return f"strategy, {load_strategy(str(path)).extent}"
    files = [e for e in entries if e.suffix in container_suffixes() and e.is_file()]
    if files:
        return f"{len(files):,} checkpoint file" + ("s" if files[1:] else "")
    inside = [e.name for e in entries if e.is_dir() and _by_rank(e, pattern)]
    return f"holds {', '.join(inside)}" if inside else None


def _is_strategy(path: Path) -> bool:
    """Tell whether a file in a folder is a strategy; one that cannot be read is not known to be."""
    with suppress(RankxformError, OSError):
        may_be_strategy = path.suffix in SUFFIXES and path.is_file()
        return may_be_strategy and is_strategy(path)
    return False


def _folder(place: str, pattern: str) -> Found:
    """Describe a folder of strategies, of a rank's files, or with some of these."""
    path = Path(place)
    entries = sorted(entry for entry in path.iterdir() if not is_litter(entry.name))
    strategy_files = [entry for entry in entries if _is_strategy(entry)]
    files = [
        e
        for e in entries
        if e.suffix in container_suffixes() and e not in strategy_files and e.is_file()
    ]
    folders = (entry for entry in entries if entry.is_dir())
    if (
        strategy_files
        and not files
        and not any(describe_briefly(folder, pattern) for folder in folders)
    ):
        return _strategies(path, strategy_files)
    if files and not strategy_files:
        return {"kind": "files", "path": place, "shards": [_facts(str(file)) for file in files]}
    reason_field = {}
    try:
        _ranks(place, pattern)
    except (RankxformError, OSError) as error:
        reason_field = {"why": str(error)}
    parts = [part for entry in entries if (part := describe_briefly(entry, pattern))]
    return {"kind": "collection", "path": place, **reason_field, "items": parts}


def _strategies(path: Path, files: list[Path]) -> dict[str, Any]:
    """Describe a folder of strategy files: as one if they are stages of one, else each."""
    try:
        return _strategy(path)
    except StrategyError as error:
        parts = [part for file in files if (part := describe_briefly(file))]
        return {"kind": "strategies", "path": str(path), "why": str(error), "items": parts}


class StrategyFacts(dict[str, Any]):
    """What a strategy says, for JSON, and the strategy."""

    def __init__(self, path: Path, strategy: Strategy) -> None:
        super().__init__(
            kind="strategy",
            path=str(path),
            **strategy.facts,
            layouts=[
                {"stage": stage, "name": name, **_layout(layout)}
                for stage, layouts in enumerate(strategy.stages)
                for name, layout in layouts.items()
            ],
        )
        self.strategy = strategy


def _strategy(path: Path) -> StrategyFacts:
    return StrategyFacts(path, load_strategy(str(path)))


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "device_matrix": list(layout.device_matrix),
        "tensor_map": layout.printable_map,
        "opt_step": layout.opt_step,
        "opt_size": layout.opt_size,
        "slice_counts": list(layout.counts),
        "replicas": layout.free_ranks // layout.opt_shards,
    }


def _checkpoint(path: str | Path) -> dict[str, Any]:
    file_index = index_file(path)
    schema = file_index.schema
    return {
        "kind": "checkpoint",
        "path": str(path),
        **_totals(file_index),
        "format": container_of_path(path).name,
        "checksum": file_index.has_checksum,
        "metadata": dict(file_index.metadata),
        "entries": [
            {
                "name": name,
                "dtype": dtype,
                "shape": list(shape),
                "nbytes": file_index.nbytes(name),
                "pieces": len(file_index.spans(name)),
            }
            for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes)
        ],
    }


def _totals(file_index: Index) -> dict[str, int]:
    names = file_index.schema.names
    return {
        "parameters": len(names),
        "nbytes": sum(map(file_index.nbytes, names)),
        "file_bytes": file_index.size,
    }


def _facts(path: str) -> dict[str, Any]:
    """Describe a checkpoint file in few numbers, or say why it cannot be read."""
    try:
        return {"file": path, **_totals(index_file(path))}
    except RankxformError as error:
        return {"file": path, "error": str(error)}


def _rank_folders(place: str, pattern: str) -> Found:
    with suppress(RankxformError, OSError):
        return _ranks(place, pattern)
    return None


def _ranks(place: str, pattern: str) -> Found:
    """Describe rank folders: the files that a conversion would take, or all if none is clear."""
    common_fields = {"kind": "folder", "path": place}
    source = open_source(CheckpointRef(absolute(place), DEFAULT_FORM, pattern), SerialTeam())
    if source.paths:
        rank_of, rows_by_file = source.selected.rank_of, _rows(place, source)
        rows = [{"rank": rank_of(file), **row} for file, row in rows_by_file.items()]
        rows.sort(key=lambda row: row["rank"])
        return {**common_fields, **_steps(source.selected), **_warnings(source), "shards": rows}
    files_of = _by_rank(Path(place), pattern)
    if not files_of and storage_of(place).has_folders:
        return None
    unclear = source.errors[0].text
    rows = [
        {"rank": rank, **_facts(address_of(place, name))}
        for rank, names in sorted(files_of.items())
        for name in names
    ]
    return {**common_fields, "step": None, "unclear": unclear, "shards": rows}


def _destination(place: str, pattern: str) -> Found:
    """Describe what rankxform wrote, or began to write, as its own records tell."""
    path = Path(place)
    has_manifest, begun = (path / MANIFEST_NAME).is_file(), (path / FOLDER_NAME / JOB_NAME).exists()
    if not (has_manifest or begun):
        begun_at = _begun_at(path)
        return None if begun_at is None else _destination(str(begun_at), pattern)
    common_fields: dict[str, Any] = {"kind": "destination", "path": place, "continued_by": []}
    unfinished = {**common_fields, "complete": False, "src": None, "shards": []}
    try:
        record = read_manifest(path) if has_manifest else {"files": {}}
        job = begun_job(path) if begun else BegunJob()
        listed_names = {*record["files"]} - job.names
        common_fields |= {
            "begun": begun,
            "continued_by": job.command,
            "at_work": job.is_at_work,
            "files_complete": len(listed_names | job.complete_names),
            "files_to_make": len(listed_names | job.names),
            "bytes_begun": job.part_bytes,
            "slices_begun": job.part_slices,
        }
        if not has_manifest:
            return {**unfinished, **common_fields}
    except StorageError as error:
        return {**unfinished, "unclear": str(error)}
    files = sorted(record["files"].items(), key=lambda item: item[1]["id"])
    rows = [_describe_written(path / name, file_entry) for name, file_entry in files]
    form = FORMS[record.get("form", DEFAULT_FORM)]
    return {
        **common_fields,
        "form": form.name,
        "form_title": form.title if form.described else None,
        "faults": [
            f"{companion}: {text}" for companion, text in wrong_companions(path, record).items()
        ],
        "complete": not begun and not any("error" in file_row for file_row in rows),
        "src": record["identity"].get("source") or "-",
        "options": record.get("verify", []),
        "written_at": (path / MANIFEST_NAME).stat().st_mtime,
        "fingerprints": all("digest" in file_entry for _, file_entry in files),
        "shards": rows,
    }


def _begun_at(path: Path) -> Path | None:
    """Return where a run was begun: in a folder, or in an iteration's with nothing beside it."""
    entries = [*islice(path.iterdir(), 2)]
    alone = entries[:1] if len(entries) == 1 and not entries[0].is_symlink() else []
    for folder in (path, *alone):
        with suppress(OSError):  # such as a folder that may not be looked into
            if (folder / FOLDER_NAME / JOB_NAME).exists():
                return folder
    return None


def _describe_written(path: Path, file_entry: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a file that a manifest lists; an error where it is not of the size written."""
    if path.is_file() and path.stat().st_size == file_entry["size"]:
        return {"rank": file_entry["id"], **_facts(str(path))}
    error = f"is not the file of {file_entry['size']:,} bytes that was written"
    return {"rank": file_entry["id"], "file": str(path), "error": error}
