"""Boxes that are told by the tables of the files themselves, once all of them are read.

A form whose ranks' files name their own parts alone, such as layers counted from 0 in each pipeline
stage, says here which box of which tensor each entry is; nothing behind the catalog knows more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from rankxform.errors import CheckpointError
from rankxform.formats.container import BOX_MARK, DeclaredFile, EntryView, Index
from rankxform.formats.torch_file import SUMS
from rankxform.geometry.box import Box, Shape
from rankxform.planning.catalog import DeclaredBox, Description


class PlacedEntry(NamedTuple):
    """An entry of a file, or a part of it, as a box of a tensor."""

    file: int
    entry: str  # its own name
    name: str  # the tensor's
    box: Box
    first: int = 0  # the element of the entry with which a part begins


def describe_placed(
    description: Description,
    placed: Iterable[PlacedEntry],
    shapes: Mapping[str, Shape],
    indexes: Mapping[int, Index],
) -> Description:
    """Return what is stated of a checkpoint whose entries are such boxes.

    shapes: full shapes by name, in elements. What lies nowhere in `placed` is left out. Raises
    CheckpointError.
    """
    by_name: dict[str, list[PlacedEntry]] = {}
    for entry in placed:
        by_name.setdefault(entry.name, []).append(entry)
    sums = {
        file: dict(zip(index.schema.names, json.loads(index.metadata.get(SUMS, "[]"))))
        for file, index in indexes.items()
    }
    boxes: dict[str, tuple[DeclaredBox, ...]] = {}
    declared: dict[str, tuple[str, Shape]] = {}
    views: dict[int, list[EntryView]] = {file: [] for file in indexes}
    suffixes: dict[Shape, str] = {}
    for name, entries in by_name.items():
        if BOX_MARK in name:
            text = f"{name!r} is no name that can be told from a box's"
            raise CheckpointError(text, where=description.source)
        filled = [entry for entry in entries if entry.box.size] or entries[:1]
        _check_replicas(filled, sums, description.source)
        is_whole = len({entry.box.start for entry in filled}) == 1
        name_boxes = []
        for entry in filled:
            start, index = entry.box.start, indexes[entry.file]
            if start not in suffixes:
                suffixes[start] = f"{BOX_MARK}{str(start)[1:]}"
            suffix = "" if is_whole else suffixes[start]
            box, stored_shape = entry.box, index.shape(entry.entry)
            view = EntryView(entry.entry, stored_shape, name + suffix, box.shape, entry.first)
            views[entry.file].append(view)
            name_boxes.append(DeclaredBox(entry.file, box, suffix))
        boxes[name] = tuple(name_boxes)
        declared[name] = indexes[filled[0].file].dtype(filled[0].entry), shapes[name]
    declared_files = {file: DeclaredFile(tuple(file_views)) for file, file_views in views.items()}
    return replace(description, boxes=boxes, declared=declared, declared_files=declared_files)


def _check_replicas(
    entries: Iterable[PlacedEntry], sums: Mapping[int, Mapping[str, int | None]], source: str
) -> None:
    """Refuse ranks that hold the same box and state other CRC-32s of it.

    sums: by file and entry, as far as files state any. Raises CheckpointError.
    """
    first_holders: dict[tuple[Shape, int], tuple[int, int]] = {}
    for entry in entries:
        crc = sums[entry.file].get(entry.entry)
        if crc is None:
            continue
        first_crc, first_file = first_holders.setdefault(
            (entry.box.start, entry.first), (crc, entry.file)
        )
        if crc != first_crc:
            text = f"{entry.name!r} is not the same in the files of ranks {first_file} and "
            text += f"{entry.file}, which should hold it alike"
            raise CheckpointError(text, "copy the files of one job", where=source)
