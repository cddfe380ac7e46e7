"""What forms have in common whose tables say box by box where each tensor lies, and is to lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from rankxform.checkpoints.folder import (
    and_more,
    files_directly_in,
    is_repeated_slice,
    name_in_folder,
    split_by_bytes,
)
from rankxform.errors import CheckpointError
from rankxform.formats.base import BOX_MARK, CONTAINERS, DeclaredFile, EntryView
from rankxform.formats.distcp import items_of
from rankxform.formats.dtype import BYTES, item_size
from rankxform.formats.torch_metadata import DcpMetadata, StoredItem
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import natural_sort_key
from rankxform.planning.description import DeclaredBox, Description
from rankxform.planning.parts import FileContent
from rankxform.planning.plan import Planner
from rankxform.storage.store import Listing
from rankxform.values import no_garbage_collection

EntryOf = Callable[[StoredItem, int], str]
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
        _check_name(name, source)
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
        non_tensors[name], boxes[name] = (
            (BYTES, shape),
            (DeclaredBox(ids[item.file], Box.whole(shape)),),
        )
    ends = _ends(table)
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
            notices=(*description.notices, *_unused(listing, below, ids, source, suffixes)),
        ),
    )


def _check_name(name: str, source: str) -> None:
    if BOX_MARK in name:
        raise CheckpointError(f"{name!r} is no name that can be told from a box's", where=source)


def _ends(table: BoxTable) -> dict[str, int]:
    """Return how many bytes each file has at least."""
    ends: dict[str, int] = {}
    for item in _all_items(table):
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    return ends


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


def _unused(
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
        layouts = planner.names(rank)
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


def table_of(planner: Planner, names: Mapping[int, str], *, places: bool) -> DcpMetadata:
    """Return the table of a destination with these files.

    places: state where items lie in files; else a file's own table of contents says it.
    """
    table = DcpMetadata()
    lying: dict[str, list[StoredItem]] = {}
    for file, name in names.items():
        tensors = planner.tensors(file)
        container = CONTAINERS[name.rpartition(".")[2]]
        layout = container.lay_out(tensors, {}, False)
        spans = items_of(layout)
        layouts = planner.names(file)
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
