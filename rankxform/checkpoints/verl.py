"""Files of PyTorch's FSDP as verl saves them, one of each rank; read only.

::

    model_world_size_4_rank_0.pt ...   torch.save of a state dict of DTensors
    optim_..., extra_state_...         the optimizer and the rest of the training; never opened
    fsdp_config.json, huggingface/     the number of ranks; the model's config.json and tokenizer

Each DTensor says which box of its tensor the rank has. A tensor that is none is whole where all
ranks have the same bytes, and otherwise a rank's rows (verl's own merger, `model_merger`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rankxform.errors import CheckpointError
from rankxform.formats.container import Index
from rankxform.formats.torch_file import BOXES, SUMS
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import format_ranges
from rankxform.planning.catalog import Description
from rankxform.statements import as_notice
from rankxform.storage.store import Listing, Store
from rankxform.values import pattern_on_use

from . import folders
from .base import CheckpointRef, Form, RankFilter, SelectedFiles
from .placed import PlacedEntry, describe_placed

_FILE = pattern_on_use(r"model_world_size_([0-9]{1,6})_rank_([0-9]{1,6})\.pt")
_OPTIMIZER = "optim_world_size_"


class VerlForm(Form):
    """A folder of FSDP's ranks (`checkpoints.base.Form`)."""

    name = "verl"
    title = "verl FSDP"
    container = "pt"

    def pattern(self, where: CheckpointRef) -> str:
        return "model_world_size_*.pt"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        return next((name for name in listing.entries if _FILE().fullmatch(name)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folders.check_folder(self.name, where, listing)
        matches = [match for name in listing.files if (match := _FILE().fullmatch(name))]
        names = {int(match[2]): match[0] for match in matches}
        worlds = sorted({int(match[1]) for match in matches})
        if len(worlds) != 1:
            text = f"holds files of jobs of {' and '.join(map(str, worlds)) or 'no'} ranks"
            raise CheckpointError(text, "move those of one job away", where=listing.path)
        missing = sorted({*range(worlds[0])} - {*names})
        if missing:
            lacking = listing.at(f"model_world_size_{worlds[0]}_rank_{missing[0]}.pt")
            raise CheckpointError(
                f"is missing; of {worlds[0]} ranks {format_ranges(sorted(names))} are there"
                f"{listing.searched}",
                "copy it into the folder",
                where=lacking,
            )
        states = [name for name in listing.entries if name.startswith(_OPTIMIZER)]
        notice = f"{listing.path}: the optimizer's states ({_OPTIMIZER}*) are not read"
        return SelectedFiles(
            dict(sorted(names.items())),
            description=Description(listing.path, findings=(as_notice(notice),) if states else ()),
        )

    def describe(
        self, description: Description, indexes: Mapping[int, Index], names: Mapping[int, str]
    ) -> Description:
        """Each entry is the box that its DTensor states; of plain tensors their bytes tell."""
        if len(indexes) < len(names):
            return description  # what cannot be read was said
        shapes: dict[str, Shape] = {}
        placed = list[PlacedEntry]()
        plain: dict[str, list[tuple[int, int | None]]] = {}
        for file, index in indexes.items():
            boxes = json.loads(index.metadata.get(BOXES, "[]"))
            sums = json.loads(index.metadata.get(SUMS, "[]"))
            for position, name in enumerate(index.schema.names):
                if not boxes or boxes[position] is None:
                    plain.setdefault(name, []).append((file, sums[position] if sums else None))
                    continue
                shape, start = map(tuple, boxes[position])
                first_shape = shapes.setdefault(name, shape)
                if shape != first_shape:
                    text = f"{name!r} is a part of {list(shape)}, and of {list(first_shape)} on "
                    text += "another rank; the files are not of one checkpoint"
                    raise CheckpointError(text, "copy the files of one job", where=names[file])
                stop = tuple(a + n for a, n in zip(start, index.schema.shapes[position]))
                placed.append(PlacedEntry(file, name, name, Box(start, stop)))
        for name, holders in plain.items():
            if name in shapes or len(holders) != len(indexes):
                text = f"{name!r} is a DTensor, or is not there, on some ranks alone"
                raise CheckpointError(text, "save it again", where=description.source)
            added, shapes[name] = _plain(name, holders, indexes)
            placed += added
        return describe_placed(description, placed, shapes, indexes)


def _plain(
    name: str, holders: list[tuple[int, int | None]], indexes: Mapping[int, Index]
) -> tuple[list[PlacedEntry], Shape]:
    """Return how plain tensors of all ranks make one: as replicas, or by rows; and its shape."""
    shapes = [indexes[file].shape(name) for file, _ in holders]
    sums = {crc for _, crc in holders}
    if len(holders) == 1 or (len({*shapes}) == 1 and len(sums) == 1 and None not in sums):
        box = Box.whole(shapes[0])
        return [PlacedEntry(file, name, name, box) for file, _ in holders], shapes[0]
    if None in sums or not shapes[0] or len({shape[1:] for shape in shapes}) > 1:
        text = f"{name!r} is no DTensor, and nothing says how ranks {list(shapes[0])} make it"
        raise CheckpointError(text, "save it as a DTensor, or whole")
    row, parts = 0, list[PlacedEntry]()
    for (file, _), shape in zip(holders, shapes):
        parts.append(PlacedEntry(file, name, name, Box.whole(shape).shifted(0, row)))
        row += shape[0]
    return parts, (row, *shapes[0][1:])
