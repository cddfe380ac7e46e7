"""Llama as Meta publishes it, one file of each model parallel rank; read only.

::

    consolidated.00.pth, consolidated.01.pth ...   torch.save of a state dict
    params.json                                    {"dim": 4096, "n_heads": 32, ...}

Nothing in a file says how its tensors are cut; by their names it is known (fairscale's parallel
layers in `llama/model.py` of meta-llama/llama and meta-llama/llama3). Llama 1 and 2 cut the
embedding by columns and Llama 3 by rows, which the length of a norm tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankxform.errors import CheckpointError
from rankxform.formats.container import Index
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import format_ranges
from rankxform.planning.catalog import Description
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import pattern_on_use

from . import folders
from .base import CheckpointRef, Form, RankFilter, SelectedFiles
from .placed import PlacedEntry, describe_placed

_FILE = pattern_on_use(r"consolidated\.([0-9]{2,6})\.pth")
_ROWS = (
    "attention.wq.weight", "attention.wk.weight", "attention.wv.weight", "feed_forward.w1.weight",
    "feed_forward.w3.weight", "output.weight",
)  # fmt: skip
_COLUMNS = "attention.wo.weight", "feed_forward.w2.weight"
_WHOLE = "norm.weight", "rope.freqs"
_HEADS = "attention.wo.weight"
"""A matrix of as many columns as rows, which tells how many ranks there are."""
_EMBEDDING, _NORM = "tok_embeddings.weight", "norm.weight"
_SIZES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}  # fmt: skip


def sizes_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what params.json states, under the names that config.json has for it.

    >>> sizes_of({"dim": 4096, "norm_eps": 1e-05})
    {'hidden_size': 4096}
    """
    return {name: params[key] for key, name in _SIZES.items() if key in params}


class MetaForm(Form):
    """A folder of Meta's files (`checkpoints.base.Form`)."""

    name = "meta"
    title = "Meta"
    container = "pt"

    def pattern(self, where: CheckpointRef) -> str:
        return "consolidated.*.pth"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """By a rank's file, where no file of another form is: many folders have both."""
        of_others = folders.SUFFIX, ".bin"
        if listing.kind != FOLDER or any(name.endswith(of_others) for name in listing.entries):
            return None
        return next((name for name in listing.entries if _FILE().fullmatch(name)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folders.check_folder(self.name, where, listing)
        matches = [match for name in listing.files if (match := _FILE().fullmatch(name))]
        names = {int(match[1]): match[0] for match in matches}
        if len(names) < len(matches):
            text = f"holds {len(matches)} files of {len(names)} ranks"
            raise CheckpointError(text, "move those of another model away", where=listing.path)
        missing = sorted({*range(max(names, default=0) + 1)} - {*names})
        if missing:
            raise CheckpointError(
                f"is missing; ranks {format_ranges(sorted(names)) or 'none'} are there"
                f"{listing.searched}",
                "copy it into the folder",
                where=listing.at(f"consolidated.{missing[0]:02}.pth"),
            )
        return SelectedFiles(dict(sorted(names.items())), description=Description(listing.path))

    def describe(
        self, description: Description, indexes: Mapping[int, Index], names: Mapping[int, str]
    ) -> Description:
        """Each entry is the box that its name and its file's number tell."""
        if len(indexes) < len(names):
            return description  # what cannot be read was said
        shapes: dict[str, Shape] = {}
        placed = list[PlacedEntry]()
        for file, index in indexes.items():
            for name, full_shape, box in _boxes(index, file, len(indexes), names[file]):
                if shapes.setdefault(name, full_shape) != full_shape:
                    text = (
                        f"{name} makes {list(full_shape)}, and another rank's {list(shapes[name])}"
                    )
                    raise CheckpointError(text, "copy the files of one model", where=names[file])
                placed.append(PlacedEntry(file, name, name, box))
        return describe_placed(description, placed, shapes, indexes)


def _boxes(index: Index, rank: int, ranks: int, where: str) -> Iterator[tuple[str, Shape, Box]]:
    """Yield of each entry of a file its name, its tensor's full shape, and its box.

    Raises CheckpointError for a tensor of which it is not known how ranks hold it.
    """
    shapes = dict(zip(index.schema.names, index.schema.shapes))
    width = next(iter(shapes.get(_NORM, ())), None)
    for name, shape in shapes.items():
        axis = None
        if name.endswith(_HEADS) and width is not None and shape[-1] * ranks != width:
            text = f"{ranks} ranks have {shape[-1] * ranks} of {width} columns of {name}"
            raise CheckpointError(text, "copy the files of all ranks", where=where)
        if ranks > 1 and name == _EMBEDDING:
            axis = _embedding_axis(shape, shapes.get(_NORM), ranks, where)
        elif ranks > 1 and name.endswith((*_ROWS, *_COLUMNS)) and len(shape) == 2:
            axis = int(name.endswith(_COLUMNS))
        elif ranks > 1 and not name.endswith(_WHOLE):
            text = f"how {ranks} ranks hold {name!r} is not known"
            raise CheckpointError(text, "--src-form pytorch for each file by itself", where=where)
        full_shape, box = shape, Box.whole(shape)
        if axis is not None:
            extent = shape[axis]
            full_shape = (*shape[:axis], ranks * extent, *shape[axis + 1 :])
            box = box.shifted(axis, rank * extent)
        yield name, full_shape, box


def _embedding_axis(shape: Shape, norm: Shape | None, ranks: int, where: str) -> int:
    """Return along which axis ranks have parts of the embedding. Raises CheckpointError."""
    columns = shape[1] if len(shape) == 2 else 0
    if norm in ((columns,), (columns * ranks,)):
        return int(norm != (columns,))
    text = f"{_EMBEDDING} is {list(shape)} on one of {ranks} ranks, and norm.weight {norm}"
    raise CheckpointError(text, "copy the files of one model", where=where)
