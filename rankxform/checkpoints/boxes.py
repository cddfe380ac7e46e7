"""What forms have in common whose tables say box by box where each tensor lies, and is to lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from rankxform.errors import CheckpointError
from rankxform.formats.base import FORMATS, PLACE, Stated, View
from rankxform.formats.distcp import items_of
from rankxform.formats.dtype import BYTES, item_size
from rankxform.formats.torch_metadata import Item, Table
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import natural_sort_key
from rankxform.planning.description import Description, StatedBox
from rankxform.planning.parts import Part
from rankxform.planning.plan import Planner
from rankxform.storage.store import Listing
from rankxform.values import without_collection

from . import folder

EntryOf = Callable[[Item, int], str]
"""Returns what a file's own table of contents calls an item whose content has so many bytes."""

METADATA = ".metadata"
DEFAULT_BYTES = 4 << 30


class Placed(NamedTuple):
    """A box of a tensor in a file: where an item of the file's own table of contents has it.

    there: the item's own shape, in elements. first: the element of the item with which it begins.
    """

    item: Item
    box: Box
    there: Shape
    first: int = 0


class Boxes(NamedTuple):
    """What a checkpoint's table says, as tensors are to be read: types, full shapes and boxes."""

    tensors: Mapping[str, tuple[str, Shape]]
    boxes: Mapping[str, tuple[Placed, ...]]
    items: Mapping[str, Item]


def as_stored(table: Table) -> Boxes:
    """Return the boxes of a table, under the names that they have there."""
    boxes = {
        name: tuple(
            Placed(one, one.box, one.box.shape) for one in table.items[name] if one.box is not None
        )
        for name in table.tensors
    }
    rest = {name: some[0] for name, some in table.items.items() if name not in boxes and some}
    return Boxes(table.tensors, boxes, rest)


@without_collection()
def described(
    listing: Listing,
    found: Boxes,
    entry_of: EntryOf,
    suffixes: tuple[str, ...],
    below: str,
    stated: Description,
) -> tuple[dict[int, str], Description]:
    """Return the files of a checkpoint, by id, and what is stated of it.

    suffixes: those of its files. below: their folder in the place, with a slash. stated: what else
    is stated, and by what. Raises CheckpointError where a file is not there.
    """
    source = stated.source
    names = _files(listing, found, suffixes, below, source)
    ids = {file: number for number, file in enumerate(names)}
    views: dict[str, dict[tuple[str, int], View]] = {file: {} for file in names}
    boxes: dict[str, tuple[StatedBox, ...]] = {}
    known: dict[int, tuple[Shape, int, str]] = {}  # most tensors have the same boxes as others
    for name, some in found.boxes.items():
        for placed in some:
            box = placed.box
            if id(box) not in known:
                known[id(box)] = box.shape, box.size, f"{PLACE}{str(box.start)[1:]}"
        _check_name(name, source)
        full = len({one.box.start for one in some if known[id(one.box)][1]})
        made, item_bytes = [], item_size(found.tensors[name][0])
        for item, box, there, first in some:
            shape, size, suffix = known[id(box)]
            if (full == 1 and size) or len(some) == 1:
                suffix = ""
            entry = entry_of(item, size * item_bytes)
            view = View(entry, there, name + suffix, shape, first)
            key = (entry, first) if size else (name + suffix, -2)
            if views[item.file].setdefault(key, view) is not view:
                raise CheckpointError(
                    f"{name}: two boxes of a tensor in one SAFETENSORS file overwrite each other",
                    "save again with another serialization",
                    where=source,
                )
            made.append(StatedBox(ids[item.file], box, suffix))
        boxes[name] = tuple(made)
    rest: dict[str, tuple[str, Shape]] = {}
    for name, item in found.items.items():
        shape, entry = (max(0, item.nbytes),), entry_of(item, -1)
        rest_of = View(entry, shape, name, shape, raw=True)
        views[item.file][name, -1] = rest_of if entry else View("", None, name, shape, item.offset)
        rest[name], boxes[name] = (BYTES, shape), (StatedBox(ids[item.file], Box.whole(shape)),)
    ends = _ends(found)
    return (
        {number: below + file for file, number in ids.items()},
        replace(
            stated,
            boxes=boxes,
            declared={**found.tensors, **rest},
            stated={
                ids[file]: Stated(tuple(some.values()), ends[file], METADATA)
                for file, some in views.items()
            },
            notices=(*stated.notices, *_unused(listing, below, ids, source, suffixes)),
        ),
    )


def _check_name(name: str, source: str) -> None:
    if PLACE in name:
        raise CheckpointError(f"{name!r} is no name that can be told from a box's", where=source)


def _ends(found: Boxes) -> dict[str, int]:
    """Return how many bytes each file has at least."""
    ends: dict[str, int] = {}
    for item in _all_items(found):
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    return ends


def _all_items(found: Boxes) -> Iterator[Item]:
    yield from found.items.values()
    yield from (one.item for some in found.boxes.values() for one in some)


def _files(
    listing: Listing, found: Boxes, suffixes: tuple[str, ...], below: str, source: str
) -> list[str]:
    """Return the files of a checkpoint, in order. Raises CheckpointError where one is not there."""
    names = sorted({item.file for item in _all_items(found)}, key=natural_sort_key)
    there = {*folder.own_files(listing, below)} if below else {*listing.entries}
    for file in names:
        folder.in_folder(file, source, suffixes)
        if file not in there:
            tensors = (
                name for name, some in found.boxes.items() if any(b.item.file == file for b in some)
            )
            lost = next((f" ({name} lies there)" for name in tensors), "")
            raise CheckpointError(
                f"{listing.at(below + file)} is missing{lost}{listing.searched}",
                "copy it into the folder",
            )
    return names


def _unused(
    listing: Listing, below: str, used: Collection[str], source: str, suffixes: Collection[str]
) -> tuple[str, ...]:
    """Return that files of the form lie there of which its table does not speak."""
    there = folder.own_files(listing, below) if below else listing.entries
    others = [name for name in there if name.endswith(tuple(suffixes)) and name not in used]
    if not others:
        return ()
    more = folder.more(others, "file")
    return (f"{listing.at(below + others[0])}{more}: {source} does not list it; it was not used",)


# -- written --------------------------------------------------------------------------------------


def parts_of(planner: Planner, most: int) -> list[Part]:
    """Return what each file is to hold: each box once, in that of the lowest rank that has it.

    Whole tensors are in files of at most `most` bytes.
    """
    if planner.dst.ranks == 1:
        return [Part(0, frozenset(some)) for some in folder.by_bytes(planner.tensors(0), most)]
    seen: set[object] = set()
    found = []
    for rank in range(planner.dst.ranks):
        held = planner.names(rank)
        first = [n for n in held if not folder.is_seen(planner, n, held[n], rank, seen)]
        own = [n for n in first if _has_elements(planner, n, held[n], rank)]
        if own:
            found.append(Part(rank, frozenset(own)))
    return found


def _has_elements(planner: Planner, name: str, layout: Any, rank: int) -> bool:
    """Tell whether a rank's box of a tensor is to be stored: an empty one is not."""
    shape = planner.parameter(name).shape
    box = layout.grid(shape).box(planner.cell(layout, rank))
    return not prod(shape) or box.size > 0


def table_of(planner: Planner, names: Mapping[int, str], *, places: bool) -> Table:
    """Return the table of a destination with these files.

    places: state where items lie in files; else a file's own table of contents says it.
    """
    found = Table()
    lying: dict[str, list[Item]] = {}
    for file, name in names.items():
        tensors = planner.tensors(file)
        container = FORMATS[name.rpartition(".")[2]]
        layout = container.lay_out(tensors, {}, False)
        spans = items_of(layout)
        layouts = planner.names(file)
        for one in tensors:
            shape, place = planner.parameter(one.name).shape, spans[one.name]
            if one.dtype == BYTES:
                lying[one.name] = [Item(name, place.offset, place.nbytes, one.name)]
                continue
            own = layouts[one.name]
            box = own.grid(shape).box(planner.cell(own, file))
            at, nbytes = (place.offset, place.nbytes) if places else (0, -1)
            found.tensors[one.name] = one.dtype, shape
            lying.setdefault(one.name, []).append(Item(name, at, nbytes, one.name, box))
    found.items = {name: tuple(some) for name, some in sorted(lying.items())}
    return found
