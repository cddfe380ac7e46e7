"""Megatron-Core's distributed checkpoints (torch_dist), the model's part; read only.

::

    latest_checkpointed_iteration.txt      the number, which is written last
    iter_0000100/metadata.json             the backend, and its version
                 .metadata, __0_0.distcp   as PyTorch's DCP
                 common.pt                 a pickle of the training's arguments; never opened

All layers of one kind are stored as one tensor with an axis in front, which is taken apart: what
is converted has a number behind ``layers.``, as the model has. Halves of a gated unit that are
stored under two names are one tensor again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from math import prod

from rankxform.errors import CheckpointError, FormatError, UsageError
from rankxform.formats.json_stream import load
from rankxform.formats.torch_metadata import Table
from rankxform.geometry.box import Box
from rankxform.planning.description import Description
from rankxform.storage.store import FOLDER, Listing, Store

from . import boxes
from .base import Needed, ReadOnly, Selected, Where
from .boxes import METADATA, Boxes, Placed
from .dcp import BACKEND, SUFFIX, entry_of, is_megatrons, read_table
from .iterations import Steps, iteration_of

TRACKER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"iter_([0-9]{7,18})")
_STACKED = re.compile(r"\blayers\.(?![0-9])")
_HALF = re.compile(r"(.*\.weight)_([wv])")
_RAW = "optimizer.distributed."
_SUPPORTED = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def _files(names: Iterable[str]) -> list[str]:
    return [name for name in names if name == METADATA or name.endswith(SUFFIX)]


STEPS_OF = Steps("iteration", _STEP, "iter_{:07}", TRACKER, _files)


class TorchDist(ReadOnly):
    """An iteration of Megatron-Core's, or the root of its iterations (`checkpoints.base.Form`)."""

    name = "torch_dist"
    title = "Megatron torch_dist"
    container: str | None = "distcp"

    def pattern(self, where: Where) -> str:
        return "iter_*/*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER:
            return None
        if is_megatrons(listing, store):
            return BACKEND
        return next((name for name in listing.folders if _STEP.fullmatch(name)), None)

    def select(self, listing: Listing, where: Where, store: Store, needed: Needed) -> Selected:
        if where.suffix is not None:
            raise UsageError("--suffix chooses among rank files; torch_dist has --step N")
        chosen = iteration_of(listing, where, store, STEPS_OF)
        _check_backend(chosen.at(BACKEND), chosen.below + BACKEND, store)
        table = read_table(chosen.listing, store, chosen.below + METADATA)
        source = chosen.at(METADATA)
        training = {} if chosen.number is None else {"global_step": chosen.number}
        stated = Description(source, training=training, refused=_raw(table, source))
        names, description = boxes.described(
            listing, _of_model(table, stated.refused), entry_of, (SUFFIX,), chosen.below, stated
        )
        return Selected(names, chosen.step, chosen.others, description=description)


def _check_backend(path: str, name: str, store: Store) -> None:
    """Refuse backends that keep tensors otherwise."""
    try:
        stated = load(store.read(name))
    except FormatError as error:
        raise CheckpointError.of_parts(error.at(path)) from error
    stated = stated if isinstance(stated, dict) else {}
    for key, supported in _SUPPORTED.items():
        if stated.get(key) != supported:
            raise CheckpointError(
                f"{key} is {stated.get(key)!r}, and {supported!r} can be read",
                "save the checkpoint with --ckpt-format torch_dist",
                where=path,
            )


def _raw(table: Table, source: str) -> dict[str, str]:
    """Return tensors that are parts of flat buffers, and why they cannot be read."""
    raw = [name for name in table.items if name.startswith(_RAW)]
    why = (
        "is a part of an optimizer's flat buffer, whose layout only that job knows; save with "
        "--dist-ckpt-optim-fully-reshardable, or say --weights-only"
    )
    return {name: f"{source}: {name} {why}" for name in (*table.flattened, *raw)}


def _of_model(table: Table, refused: Collection[str]) -> Boxes:
    """Return the tensors of a model: layers apart, halves joined; without those refused."""
    kept = {name: one for name, one in table.tensors.items() if name not in refused}
    lying = {name: some for name, some in table.items.items() if name not in refused}
    found = boxes.as_stored(Table(kept, lying))
    tensors, made = dict(found.tensors), dict(found.boxes)
    for name in found.tensors:
        if _STACKED.search(name):
            _take_apart(name, tensors, made)
    for name in [*tensors]:
        match = _HALF.fullmatch(name)
        if (
            match
            and match[2] == "w"
            and tensors[name][1]
            and f"{match[1]}_v" in tensors
            and match[1] not in tensors
        ):
            _join_halves(match[1], tensors, made)
    return Boxes(tensors, made, found.items)


def _take_apart(
    name: str,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    made: dict[str, tuple[Placed, ...]],
) -> None:
    """Put the layers of a tensor in its place, each a tensor without the axis in front."""
    (dtype, shape), some = tensors.pop(name), made.pop(name)
    if not shape:
        tensors[name], made[name] = (dtype, shape), some
        return
    layers: dict[int, list[Placed]] = {number: [] for number in range(shape[0])}
    for placed in some:
        box = Box(placed.box.start[1:], placed.box.stop[1:])
        for number in range(placed.box.start[0], placed.box.stop[0]):
            first = (number - placed.box.start[0]) * prod(box.shape)
            layers[number].append(Placed(placed.item, box, placed.there, first))
    for number, own in layers.items():
        layer = _STACKED.sub(f"layers.{number}.", name, count=1)
        if layer in tensors:
            raise CheckpointError(f"{layer} is stored by itself, and as a layer of {name}")
        tensors[layer], made[layer] = (dtype, shape[1:]), tuple(own)


def _join_halves(
    name: str,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    made: dict[str, tuple[Placed, ...]],
) -> None:
    """Put one tensor, gate before up, in the place of its halves."""
    (dtype, shape), (_, other) = (tensors.pop(f"{name}_{half}") for half in "wv")
    first, second = (made.pop(f"{name}_{half}") for half in "wv")
    moved = tuple(
        one._replace(box=Box(
            (one.box.start[0] + shape[0], *one.box.start[1:]),
            (one.box.stop[0] + shape[0], *one.box.stop[1:]),
        ))
        for one in second
    )  # fmt: skip
    tensors[name] = dtype, (shape[0] + other[0], *shape[1:])
    made[name] = (*first, *moved)
