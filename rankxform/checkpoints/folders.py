"""What forms share: files of a folder, folders of steps, tables of boxes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from posixpath import isabs, normpath, splitext
from typing import TYPE_CHECKING, Any

from rankxform.errors import CheckpointError, FormatError, RankxformError, UsageError
from rankxform.formats.checkpoint2_metadata import parse_common
from rankxform.formats.container import (
    BOX_MARK,
    BYTES,
    CONTAINERS,
    FIRST_BYTES,
    INT4,
    DeclaredFile,
    EntryView,
    TensorSpec,
    container_of,
    content_bytes,
    file_signature,
    item_size,
)
from rankxform.formats.container import container_suffixes as suffixes_of_files
from rankxform.geometry.box import Box, Shape
from rankxform.layout.layout import Layout
from rankxform.layout.names import STEPS, and_more, format_ranges, natural_sort_key
from rankxform.planning.catalog import DeclaredBox, Description
from rankxform.planning.plan import FileContent, Planner
from rankxform.statements import (
    ALL_TENSORS,
    STEP,
    TOTAL_BYTES,
    Finding,
    Statement,
    as_notice,
    as_warning,
    quote,
)
from rankxform.storage.store import FILE, FOLDER, Listing, Store
from rankxform.values import NamedTuple, dataclass, decode_json, no_garbage_collection

from .base import CheckpointRef, DestinationFiles, SelectedFiles
from .rank_folders import LATEST

if TYPE_CHECKING:  # of the DCP family alone
    from rankxform.formats.dcp_metadata import DcpMetadata, StoredItem

SUFFIX = ".safetensors"
_WHOLE = "model.safetensors"
COMMON = "common.json"
"""Where MindFormers looks for how far a training was."""


def tensor_files(names: Iterable[str], suffixes: tuple[str, ...] = (SUFFIX,)) -> list[str]:
    """Return the files with these ends among names of one folder, as a person would number them."""
    return sorted((n for n in names if n.endswith(suffixes) and "/" not in n), key=natural_sort_key)


def name_in_folder(name: object, source: str, suffixes: Collection[str] = (SUFFIX,)) -> str:
    """Return the name of a file that `source` names. Raises CheckpointError if it leaves the
    folder, or is of another kind."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"names {name!r}, which is no file", where=source)
    stated_name, name = name, normpath(name)  # some tools write ./, or //
    if isabs(name) or name.split("/")[0] == "..":
        name = stated_name
        raise CheckpointError(f"names {name!r}, which is not below its folder", where=source)
    if not name.endswith(tuple(suffixes)):
        kind = " or ".join(suffix[1:] for suffix in suffixes)
        raise CheckpointError(f"names {name!r}, which is no {kind} file", where=source)
    return name


def training(store: Store, name: str, path: str, searched: str = "") -> dict[str, Any]:
    """Return what a common.json states, which is `name` in a store. Raises CheckpointError.

    path, searched: for messages, where it is, and on which nodes it was searched for.
    """
    try:
        return parse_common(store.read(name, searched))
    except FormatError as error:
        raise CheckpointError.of_parts(error.at(path)) from error


def steps(members: Mapping[str, Any], path: str) -> list[Statement]:
    """Return how far a training was, as a common.json states it."""
    numbers_by_name = {name: members[name] for name in STEPS if members.get(name) is not None}
    return [Statement(STEP, name, number, path) for name, number in numbers_by_name.items()]


def weight_map(
    store: Store, listing: Listing, name: str, suffixes: tuple[str, ...] = (SUFFIX,)
) -> tuple[dict[str, str], Any]:
    """Read an index: by parameter its file, and the bytes of all. Raises CheckpointError.

    The members may be those of the document itself, as MindFormers' own conversion leaves them.
    """
    total, data = None, store.read(name, listing.searched)
    try:
        members = decode_json(data)
        if isinstance(members, dict):
            metadata = members.get("metadata")
            total = metadata.get("total_size") if isinstance(metadata, dict) else None
            members = members.get("weight_map", members)
        if not isinstance(members, dict) or not members:
            raise FormatError("holds no weight_map")
    except FormatError as error:
        signature = file_signature(data[:FIRST_BYTES])
        if signature is None:
            raise CheckpointError.of_parts(error.at(listing.at(name))) from error
        raise CheckpointError(
            f"expected an index, and it is {signature.title}", *signature.tries,
            where=listing.at(name),
        ) from error  # fmt: skip
    path = listing.at(name)
    return {n: name_in_folder(file, path, suffixes) for n, file in members.items()}, total


def whole_tensors(
    listing: Listing,
    store: Store,
    index: str | None,
    untracked: str | None = None,
    below: str = "",
    suffixes: tuple[str, ...] = (SUFFIX,),
) -> SelectedFiles:
    """Return the files of a folder of whole tensors, each in one file, as `index` lists them.

    Without an index these are all files with one of `suffixes`. `untracked` is one with values that
    the index does not list. below: the folder, with a slash, if it is not the place itself.
    """
    if listing.kind == FILE:
        return SelectedFiles({0: ""}, description=Description(listing.path))
    present_names = files_directly_in(listing, below)
    searched, listed, statements = listing.searched, dict[str, list[str]](), tuple[Statement, ...]()
    if index is None:
        names = [name for name in tensor_files(present_names, suffixes) if name != untracked]
    else:
        files_by_parameter, total = weight_map(store, listing, index, suffixes)
        for parameter, file in files_by_parameter.items():
            listed.setdefault(file, []).append(parameter)
        if type(total) is int:
            statements = (Statement(TOTAL_BYTES, ALL_TENSORS, total, listing.at(index)),)
        names = sorted(listed, key=natural_sort_key)
    if not names:
        kind = suffixes[0].removeprefix(".")
        raise CheckpointError(
            f"holds no {kind} file{searched}", where=listing.at(below.rstrip("/"))
        )
    missing = [n for n in names if n not in present_names and not store.has(below + n)]
    if missing:
        assert index is not None
        raise _missing_files(
            listing, index, missing, listed, [n for n in present_names if n not in names]
        )
    unlisted_names = (n for n in tensor_files(present_names, suffixes) if n not in names)
    unlisted_files = [name for name in unlisted_names if name != untracked]
    findings: tuple[Finding, ...] = ()
    passed_over: dict[str, dict[str, str]] = {}
    if unlisted_files:
        assert index is not None
        for file in unlisted_files:
            # One that holds nothing else is an earlier copy; in what cannot be read is nothing.
            stored_names: tuple[str, ...] = ()
            with suppress(RankxformError, FormatError), store.open(below + file) as opened:
                container = container_of(splitext(file)[1])
                index_of_file = container.read_index(opened.read_at, opened.version.size)
                stored_names = index_of_file.schema.names
            if {*stored_names} <= files_by_parameter.keys():
                passed_over[below + file] = {n: files_by_parameter[n] for n in stored_names}
        other_files = [file for file in unlisted_files if not passed_over.get(below + file)]
        if other_files:
            unlisted_text = listing.at(other_files[0]) + and_more(other_files, "file")
            notice = f"{unlisted_text}: {index} does not list it, and it was not used"
            findings = (as_notice(notice),)
    names_by_id = {number: below + name for number, name in enumerate(names)}
    if untracked is not None and untracked in present_names:
        names_by_id[len(names)] = below + untracked
    return SelectedFiles(
        names_by_id,
        description=Description(
            listing.at(index if index is not None else below.rstrip("/")),
            listed={number: tuple(listed[n]) for number, n in enumerate(names) if n in listed},
            untracked=len(names) if len(names_by_id) > len(names) else None,
            statements=statements,
            findings=findings,
            passed_over=passed_over,
        ),
    )


def single_index(listing: Listing, ending: str) -> str | None:
    """Return the index of a folder, if it has one. Raises UsageError for several."""
    indexes = [name for name in listing.files if name.endswith(ending)]
    if len(indexes) > 1:
        raise UsageError(
            f"holds several indexes ({', '.join(indexes)}), of which one is meant",
            "move the others away",
            where=listing.path,
        )
    return indexes[0] if indexes else None


def check_alone(listing: Listing, alone: Sequence[str], rivals: Sequence[str]) -> None:
    """Raise UsageError where a file that is a whole model lies with what may be meant instead."""
    if alone and rivals:
        raise UsageError(
            f"holds {alone[0]} and {rivals[0]}, of which one is meant",
            f"name {listing.at(alone[0])} itself",
            "move what is not the model away",
            where=listing.path,
        )


def check_shards(listing: Listing, matches: Iterable[re.Match[str]]) -> None:
    """Raise CheckpointError where files, by `number` and `of` how many, are not all there."""
    shards = [match for match in matches if match["of"]]
    for count in {match["of"] for match in shards}:
        have = {int(match["number"]) for match in shards if match["of"] == count}
        missing_numbers = sorted(set(range(1, int(count) + 1)) - have)
        if missing_numbers:
            raise CheckpointError(
                f"has {len(have)} of {int(count)} shards, and no index",
                f"copy number {format_ranges(missing_numbers)} into it",
                where=listing.path,
            )


def _missing_files(
    listing: Listing,
    index: str,
    missing: Sequence[str],
    listed: Mapping[str, Sequence[str]],
    present: Sequence[str],
) -> CheckpointError:
    """Say which files of an index are missing, and which lie there that it does not list."""
    unlisted_files = tensor_files(present)
    tries, details = ["copy the missing files into the folder"], ""
    if _WHOLE in unlisted_files:
        tries.insert(0, f"name {quote(listing.at(_WHOLE))} itself")
    elif unlisted_files:
        tries.insert(0, f"mv {quote(listing.at(index))} {quote(listing.at(index) + '.old')}")
        details = (
            f"{unlisted_files[0]}{and_more(unlisted_files, 'file')} lie there, and the index does "
            "not list them; without an index all files in the folder are converted"
        )
    first = missing[0]
    return CheckpointError(
        f"is missing; {index} lists {len(listed[first])} parameters in it, such as "
        f"{listed[first][0]!r}{listing.searched}{and_more(missing, 'file')}",
        *tries,
        where=listing.at(first),
        details=details,
    )


def files_directly_in(listing: Listing, below: str = "") -> tuple[str, ...]:
    """Return the names of the files that lie directly in a folder of a listing."""
    named = (name[len(below) :] for name in listing.files if name.startswith(below))
    return tuple(name for name in named if "/" not in name)


def index_document(files: Mapping[str, Sequence[TensorSpec]], **style: object) -> bytes:
    """Return an index: of each tensor the file that it is in, and the bytes of all."""
    tensors = [(tensor, file) for file, tensors in files.items() for tensor in tensors]
    content = {
        "metadata": {"total_size": sum(content_bytes(t.dtype, t.shape) for t, _ in tensors)},
        "weight_map": {tensor.name: file for tensor, file in tensors},
    }
    return json.dumps(content, ensure_ascii=False, **style).encode()  # type: ignore[arg-type]


def foreign_files(
    listing: Listing, dst_names: Collection[str], suffixes: Collection[str] = ()
) -> list[str]:
    """Return other checkpoint files beside a destination's own: loaders read all that lies there.

    suffixes: those of the form's files, if these are no checkpoints by themselves.
    """
    own_entries, ends = {*dst_names, *listing.folders}, tuple(suffixes) or suffixes_of_files()
    return [n for n in listing.entries if n.endswith(ends) and n not in own_entries]


def split_by_bytes(tensors: Iterable[TensorSpec], max_bytes: int) -> list[list[str]]:
    """Return names by file, in the order of names; one that would exceed the limit opens another.

    A tensor over the limit has a file of its own, and the open one stays open.
    """
    files: list[list[str]] = []
    current: list[str] = []
    load = 0
    for tensor in sorted(tensors, key=lambda spec: natural_sort_key(spec.name)):
        nbytes = content_bytes(tensor.dtype, tensor.shape)
        if nbytes > max_bytes:
            files.append([tensor.name])
            continue
        if current and load + nbytes > max_bytes:
            files.append(current)
            current, load = [], 0
        current.append(tensor.name)
        load += nbytes
    return [*files, current] if current else files


def refuse_sharded_strategy(form: str, ranks: int) -> None:
    """Raise UsageError where a form of whole tensors is to be sharded."""
    if ranks > 1:
        raise UsageError(
            f"{form} holds whole tensors", "leave out --dst-strategy", "choose another --dst-form"
        )


def check_folder(form: str, where: CheckpointRef, listing: Listing) -> None:
    """Refuse a place that is no folder, and a step in one."""
    check_no_step(form, where)
    if listing.kind != FOLDER:
        raise CheckpointError(f"no such folder{listing.searched}", where=listing.path)


def check_no_step(form: str, where: CheckpointRef) -> None:
    """Raise UsageError for a choice among steps, of which the form has but one: the latest."""
    if where.step not in (None, LATEST) or where.suffix is not None:
        raise UsageError(f"--step and --suffix choose among files; a {form} folder holds one step")


def plain_metadata(source: Mapping[str, str], kind: str) -> Mapping[str, str]:
    """Return metadata that say which library's tensors these are, and no more of the source's."""
    return {"format": kind} | {k: v for k, v in source.items() if v == INT4}


def is_repeated_slice(
    planner: Planner, name: str, layout: Layout, rank: int, slice_keys: set[object]
) -> bool:
    """Tell whether a lower rank holds the same slice; it is known from now on."""
    key = name, planner.cell(layout, rank)
    is_repeated = key in slice_keys
    slice_keys.add(key)
    return is_repeated


@dataclass(frozen=True)
class StepFolders:
    """How a form names the folders of steps."""

    word: str  # what a step is called
    expression: re.Pattern[str]  # of a folder's name, with the number as its group
    name: str  # the same, to be filled in
    tracker: str  # the file that names the last complete one
    # Picks checkpoint files among names, which lie in a step's own folder.
    files: Callable[[Iterable[str]], list[str]]
    # Tells by the names in its folder whether a step is complete, where that does not depend on the
    # tracker.
    is_complete: Callable[[Iterable[str]], bool] | None = None
    # The same of steps of which the tracker tells: what is not whole cannot be read.
    is_whole: Callable[[Iterable[str]], bool] = bool


@dataclass(frozen=True)
class SelectedIteration:
    """An iteration: its number, the names of its files, and other iterations.

    below: its folder in the place, with a slash; "" if it is the place itself.
    """

    listing: Listing
    below: str
    number: int | None
    names: tuple[str, ...]
    skipped_steps: tuple[tuple[int, ...], ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def path(self) -> str:
        return self.listing.at(self.below.rstrip("/"))

    def at(self, name: str) -> str:
        return self.listing.at(self.below + name)

    @property
    def step(self) -> tuple[int, ...] | None:
        return None if self.number is None else (self.number,)


def iteration_of(
    listing: Listing, where: CheckpointRef, store: Store, kind: StepFolders
) -> SelectedIteration:
    """Return the iteration that is meant. Raises UsageError, CheckpointError."""
    if listing.kind != FOLDER:
        raise UsageError(f"no such checkpoint folder{listing.searched}", where=listing.path)
    names_by_number: dict[int, list[str]] = {}
    folders: dict[int, str] = {}
    for name in listing.files:
        parent, _, file_name = name.rpartition("/")
        match = kind.expression.fullmatch(parent)
        if match:
            names_by_number.setdefault(int(match[1]), []).append(file_name)
            folders[int(match[1])] = parent + "/"
    direct = tuple(name for name in listing.entries if name not in listing.folders)
    if kind.files(direct):
        match = kind.expression.fullmatch(listing.name)
        number = int(match[1]) if match else None
        if names_by_number or (where.step not in (None, LATEST) and where.step != str(number)):
            raise UsageError(
                f"{listing.path}: is one {kind.word}'s folder; --step chooses one in the folder "
                "above it"
                if not names_by_number
                else f"{listing.path}: holds files of a checkpoint beside folders of {kind.word}s; "
                "name one"
            )
        return SelectedIteration(listing, "", number, direct)
    if not names_by_number:
        raise CheckpointError(
            f"holds no {re.sub('{.*}', 'N', kind.name)} folder with files{listing.searched}",
            where=listing.path,
        )
    if kind.is_complete is not None and where.step in (None, LATEST):
        names_by_number = {
            n: names for n, names in names_by_number.items() if kind.is_complete(names)
        } or names_by_number
        tracker_number = _tracked_number(listing, store, kind)
        number = tracker_number if tracker_number in names_by_number else max(names_by_number)
        findings = _doubts(listing, kind, names_by_number, tracker_number)
    else:
        readable = [n for n, names in sorted(names_by_number.items()) if kind.is_whole(names)]
        number, findings = _number(listing, where, store, sorted(names_by_number), readable, kind)
        if number not in readable:
            raise CheckpointError(
                f"{kind.word} {number} was not saved whole",
                *([f"--step {readable[-1]} takes the newest that was"] if readable else []),
                "save again",
                where=listing.at(folders[number].rstrip("/")),
                details=f"there are {', '.join(sorted(names_by_number[number])[:4])}",
            )
    skipped_steps = tuple((n,) for n in sorted(names_by_number) if n != number)
    return SelectedIteration(
        listing, folders[number], number, tuple(names_by_number[number]), skipped_steps, findings
    )


def _doubts(
    listing: Listing, kind: StepFolders, complete: Collection[int], tracker_number: int
) -> tuple[Finding, ...]:
    """Return that a tracker names no complete step, or not the newest."""
    if kind.tracker not in listing.entries or tracker_number == max(complete):
        return ()
    named = (
        f"names {kind.word} {tracker_number}" if tracker_number >= 0 else f"names no {kind.word}"
    )
    selected_number = tracker_number if tracker_number in complete else max(complete)
    text = (
        f"{listing.at(kind.tracker)}: {named}, and complete are {format_ranges(sorted(complete))}; "
        f"{kind.word} {selected_number} is taken (--step says which)"
    )
    return (as_warning(text),)


def _tracked_number(listing: Listing, store: Store, kind: StepFolders) -> int:
    """Return the number that a tracker states; -1 if it states none."""
    if kind.tracker not in listing.entries:
        return -1
    text = store.read(kind.tracker, listing.searched).decode(errors="replace").strip()
    return int(text) if _is_number(text) else -1


def _number(
    listing: Listing,
    where: CheckpointRef,
    store: Store,
    numbers: list[int],
    readable: list[int],
    kind: StepFolders,
) -> tuple[int, tuple[Finding, ...]]:
    """Return which step is meant, and what is doubtful of it. readable: those that can be read."""
    if where.step not in (None, LATEST):
        assert where.step is not None
        if not _is_number(where.step) or int(where.step) not in numbers:
            raise UsageError(
                f"--step {where.step!r}: {listing.path} has {kind.word}s {format_ranges(numbers)}",
                "say one of them",
            )
        return int(where.step), ()
    if kind.tracker not in listing.entries:
        raise CheckpointError(
            f"has no {kind.tracker}, by which a complete {kind.word} is known",
            "name the folder of the one that is meant, such as "
            f"{listing.at(kind.name.format((readable or numbers)[-1]))}",
            where=listing.path,
        )
    text = store.read(kind.tracker, listing.searched).decode(errors="replace").strip()
    if not _is_number(text) or int(text) not in numbers:
        is_folder = text == _RELEASE and text in listing.folders
        raise CheckpointError(
            f"says {text[:20]!r}, and the {kind.word}s that are there are {format_ranges(numbers)}",
            *([f"name {quote(listing.at(text))}, which it means"] if is_folder else []),
            *([f"--step {readable[-1]} takes the newest"] if readable else []),
            where=listing.at(kind.tracker),
        )
    newer = [n for n in numbers if n > int(text)]
    if newer and where.step == LATEST:
        raise CheckpointError(
            f"{kind.word} {newer[-1]} is newer than {text}, the last complete one by "
            f"{kind.tracker}",
            f"say --step {text} if that is meant",
            where=listing.path,
        )
    newer_texts = [
        f"{listing.path}: {kind.word} {number} is newer, and {kind.tracker} does not call it "
        f"complete{f'; --step {number} takes it' if number in readable else ''}"
        for number in newer[-1:]
    ]
    return int(text), tuple(as_warning(text) for text in newer_texts)


_RELEASE = "release"
"""What Megatron's tracker says of a converted model, and calls its folder."""


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text) is not None


EntryOf = Callable[["StoredItem", int], str]
"""Returns what a file's own table of contents calls an item whose content has so many bytes."""

DCP_METADATA = ".metadata"
DEFAULT_BYTES = 4 << 30


class BoxInItem(NamedTuple):
    """A box of a tensor in a file: where an item of the file's own table of contents has it.

    item_shape: the item's own shape, in elements. first: the element of the item with which it
    begins.
    """

    item: StoredItem
    box: Box
    item_shape: Shape
    first: int = 0


class BoxTable(NamedTuple):
    """What a checkpoint's table says, as tensors are to be read: types, full shapes and boxes."""

    tensors: Mapping[str, tuple[str, Shape]]
    boxes: Mapping[str, tuple[BoxInItem, ...]]
    items: Mapping[str, StoredItem]


def box_table(table: DcpMetadata) -> BoxTable:
    """Return the boxes of a table, under the names that they have there."""
    boxes = {
        n: tuple(BoxInItem(i, i.box, i.box.shape) for i in table.items[n] if i.box is not None)
        for n in table.tensors
    }
    non_tensor_items = {n: i[0] for n, i in table.items.items() if n not in boxes and i}
    return BoxTable(table.tensors, boxes, non_tensor_items)


@no_garbage_collection()
def describe_boxes(
    listing: Listing,
    table: BoxTable,
    entry_of: EntryOf,
    suffixes: tuple[str, ...],
    below: str,
    description: Description,
) -> tuple[dict[int, str], Description]:
    """Return the files of a checkpoint, by id, and what is stated of it.

    suffixes: those of its files. below: their folder in the place, with a slash. description: what
    else is stated, and by what. Raises CheckpointError where a file is not there.
    """
    source = description.source
    names = _files(listing, table, suffixes, below, source)
    ids = {file: number for number, file in enumerate(names)}
    views: dict[str, dict[tuple[str, int], EntryView]] = {file: {} for file in names}
    boxes: dict[str, tuple[DeclaredBox, ...]] = {}
    box_cache: dict[int, tuple[Shape, int, str]] = {}  # most tensors have the same boxes as others
    for name, placed_boxes in table.boxes.items():
        for placed in placed_boxes:
            box = placed.box
            if id(box) not in box_cache:
                box_cache[id(box)] = box.shape, box.size, f"{BOX_MARK}{str(box.start)[1:]}"
        if BOX_MARK in name:
            text = f"{name!r} is no name that can be told from a box's"
            raise CheckpointError(text, where=source)
        full = len({b.box.start for b in placed_boxes if box_cache[id(b.box)][1]})
        declared_boxes, item_bytes = [], item_size(table.tensors[name][0])
        for item, box, item_shape, first in placed_boxes:
            shape, size, suffix = box_cache[id(box)]
            if (full == 1 and size) or len(placed_boxes) == 1:
                suffix = ""
            entry = entry_of(item, size * item_bytes)
            view = EntryView(entry, item_shape, name + suffix, shape, first)
            key = (entry, first) if size else (name + suffix, -2)
            if views[item.file].setdefault(key, view) is not view:
                raise CheckpointError(
                    f"{name}: two boxes of a tensor in one SAFETENSORS file overwrite each other",
                    "save again with another serialization",
                    where=source,
                )
            declared_boxes.append(DeclaredBox(ids[item.file], box, suffix))
        boxes[name] = tuple(declared_boxes)
    non_tensors: dict[str, tuple[str, Shape]] = {}
    for name, item in table.items.items():
        shape, entry = (max(0, item.nbytes),), entry_of(item, -1)
        rest_of = EntryView(entry, shape, name, shape, raw=True)
        views[item.file][name, -1] = (
            rest_of if entry else EntryView("", None, name, shape, item.offset)
        )
        non_tensors[name] = (BYTES, shape)
        boxes[name] = (DeclaredBox(ids[item.file], Box.whole(shape)),)
    ends: dict[str, int] = {}  # the bytes that each file has at least
    for item in _all_items(table):
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    return (
        {number: below + file for file, number in ids.items()},
        replace(
            description,
            boxes=boxes,
            declared={**table.tensors, **non_tensors},
            declared_files={
                ids[f]: DeclaredFile(tuple(v.values()), ends[f], DCP_METADATA)
                for f, v in views.items()
            },
            findings=(
                *description.findings,
                *map(as_notice, _unused_file_notices(listing, below, ids, source, suffixes)),
            ),
        ),
    )


def _all_items(table: BoxTable) -> Iterator[StoredItem]:
    yield from table.items.values()
    yield from (placed.item for placed_boxes in table.boxes.values() for placed in placed_boxes)


def _files(
    listing: Listing, table: BoxTable, suffixes: tuple[str, ...], below: str, source: str
) -> list[str]:
    """Return the files of a checkpoint, in order. Raises CheckpointError where one is not there."""
    names = sorted({item.file for item in _all_items(table)}, key=natural_sort_key)
    present_names = {*files_directly_in(listing, below)} if below else {*listing.entries}
    for file in names:
        name_in_folder(file, source, suffixes)
        if file not in present_names:
            tensors = (
                name
                for name, placed_boxes in table.boxes.items()
                if any(b.item.file == file for b in placed_boxes)
            )
            tensor_text = next((f" ({name} lies there)" for name in tensors), "")
            raise CheckpointError(
                f"{listing.at(below + file)} is missing{tensor_text}{listing.searched}",
                "copy it into the folder",
            )
    return names


def _unused_file_notices(
    listing: Listing,
    below: str,
    listed_files: Collection[str],
    source: str,
    suffixes: Collection[str],
) -> tuple[str, ...]:
    """Return that files of the form lie there of which its table does not speak."""
    present_names = files_directly_in(listing, below) if below else listing.entries
    unlisted_files = [
        n for n in present_names if n.endswith(tuple(suffixes)) and n not in listed_files
    ]
    if not unlisted_files:
        return ()
    more_text = and_more(unlisted_files, "file")
    return (
        f"{listing.at(below + unlisted_files[0])}{more_text}: {source} does not list it; it was "
        "not used",
    )


# -- written --------------------------------------------------------------------------------------


def parts_of(planner: Planner, max_bytes: int) -> list[FileContent]:
    """Return what each file is to hold: each box once, in that of the lowest rank that has it.

    Whole tensors are in files of at most `max_bytes` bytes.
    """
    if planner.dst.ranks == 1:
        return [FileContent(0, frozenset(n)) for n in split_by_bytes(planner.tensors(0), max_bytes)]
    slice_keys: set[object] = set()
    parts = []
    for rank in range(planner.dst.ranks):
        layouts = planner.layouts_of_file(rank)
        first = [
            n for n in layouts if not is_repeated_slice(planner, n, layouts[n], rank, slice_keys)
        ]
        stored_names = [n for n in first if _has_elements(planner, n, layouts[n], rank)]
        if stored_names:
            parts.append(FileContent(rank, frozenset(stored_names)))
    return parts


def _has_elements(planner: Planner, name: str, layout: Any, rank: int) -> bool:
    """Tell whether a rank's box of a tensor is to be stored: an empty one is not."""
    shape = planner.parameter(name).shape
    box = layout.grid(shape).box(planner.cell(layout, rank))
    return not prod(shape) or box.size > 0


def table_of(planner: Planner, arrangement: DestinationFiles, *, places: bool) -> DcpMetadata:
    """Return the table of a destination.

    places: state where items lie in files; else a file's own table of contents says it.
    """
    from rankxform.formats.dcp_containers import items_of
    from rankxform.formats.dcp_metadata import DcpMetadata, StoredItem

    table = DcpMetadata()
    lying: dict[str, list[StoredItem]] = {}
    for file, name in arrangement.names.items():
        tensors = planner.tensors(file)
        container = CONTAINERS[name.rpartition(".")[2]]
        layout = container.lay_out(arrangement.as_in_files(tensors), {}, False)
        spans = items_of(layout)
        layouts = planner.layouts_of_file(file)
        for tensor in tensors:
            shape, place = planner.parameter(tensor.name).shape, spans[tensor.name]
            if tensor.dtype == BYTES:
                lying[tensor.name] = [StoredItem(name, place.offset, place.nbytes, tensor.name)]
                continue
            tensor_layout = layouts[tensor.name]
            box = tensor_layout.grid(shape).box(planner.cell(tensor_layout, file))
            offset, nbytes = (place.offset, place.nbytes) if places else (0, -1)
            table.tensors[tensor.name] = tensor.dtype, shape
            lying.setdefault(tensor.name, []).append(
                StoredItem(name, offset, nbytes, tensor.name, box)
            )
    table.items = {name: tuple(stored_items) for name, stored_items in sorted(lying.items())}
    return table
