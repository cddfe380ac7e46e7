"""Megatron-Core's distributed checkpoints (torch_dist), the model's part.

::

    latest_checkpointed_iteration.txt      the number, which is written last
    iter_0000100/metadata.json             the backend, and its version
                 .metadata, __0_0.distcp   as PyTorch's DCP
                 common.pt                 a pickle of the training's arguments

All layers of one kind are stored as one tensor with an axis in front, which is taken apart: what
is converted has a number behind ``layers.``, as the model has. Parts of one parameter that are
stored under names of their own, such as the halves of a gated unit, are one tensor again, and so
are experts that are stored one by one. Names are those of `megatron_names`; what is written has
again the keys that a job asks for (`torch_dist_files`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

from rankxform.errors import CheckpointError, FormatError, UsageError
from rankxform.formats.dcp_metadata import (
    TORCH_FLAVOR,
    DcpMetadata,
    StoredItem,
    format_dcp_metadata,
)
from rankxform.formats.torch_file import read_training
from rankxform.geometry.box import Box
from rankxform.layout.names import format_ranges
from rankxform.planning.catalog import Description
from rankxform.planning.plan import FileContent, Planner
from rankxform.statements import Finding, as_notice
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import decode_json, pattern_on_use

from .base import CheckpointRef, DestinationFiles, Form, RankFilter, SelectedFiles
from .dcp import BACKEND, DISTCP_SUFFIX, entry_of, file_number, is_megatrons, read_table
from .folders import (
    DCP_METADATA,
    DEFAULT_BYTES,
    BoxInItem,
    BoxTable,
    SelectedIteration,
    StepFolders,
    box_table,
    describe_boxes,
    foreign_files,
    iteration_of,
    parts_of,
    table_of,
)
from .megatron_names import (
    ITERATION,
    MEGATRONS_JOINING,
    MEGATRONS_VARIANTS,
    TRACKER,
    holds_rank_files,
    local_names,
    unmappable,
)

_STACKED = pattern_on_use(r"\blayers\.(?![0-9])")
_PART = pattern_on_use(
    r"(?P<base>.*\.weight)_(?P<half>[wv])|(?P<whole>.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.(?P<part>\w+)"
)
_GROUPS = (
    ("w", "v"),  # the gate, and what it is for
    ("query", "key", "value", "z", "beta", "alpha"), ("query", "key", "value"),  # gated delta nets
    ("z", "x", "B", "C", "dt"), ("x", "B", "C"),  # Mamba
)  # fmt: skip
"""Parts of one parameter, in the order of their rows (megatron-core 0.16, `sharded_state_dict` of
`ssm.gated_delta_net` and `ssm.mamba_mixer`)."""
_EXPERT = pattern_on_use(
    r"(?P<before>.*\bexperts\.experts\.)(?P<number>[0-9]{1,6})(?P<after>\.linear_fc[12]\.\w+)"
)
_RAW = "optimizer.distributed."
_OPTIMIZERS = "optimizer.", "chained_"
COMMON = "common.pt"
EXTRA_STATES = "extra_state.pt"
"""What a destination has of every `_extra_state`, in one item that all share."""
_SUPPORTED = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_BACKEND = {"common_backend": "torch", "common_backend_version": 1}


def _files(names: Iterable[str]) -> list[str]:
    """Return those of an iteration among the names that lie directly in a folder."""
    here = (name for name in names if "/" not in name)
    return [name for name in here if name == DCP_METADATA or name.endswith(DISTCP_SUFFIX)]


STEPS_OF = StepFolders(
    "iteration",
    ITERATION(),
    "iter_{:07}",
    TRACKER,
    _files,
    is_whole=lambda names: DCP_METADATA in names,
)


class TorchDistForm(Form):
    """An iteration of Megatron-Core's, or the root of its iterations (`checkpoints.base.Form`)."""

    name = "torch_dist"
    title = "Megatron torch_dist"
    container = "distcp"
    joins = MEGATRONS_JOINING
    variants = MEGATRONS_VARIANTS
    options = ("iteration", "max_part", "transformer_impl")
    tracker = TRACKER
    has_table = True
    is_written = True

    def pattern(self, where: CheckpointRef) -> str:
        return "iter_*/*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER:
            return None
        if is_megatrons(listing, store):
            return BACKEND
        iterations = (name for name in listing.folders if ITERATION().fullmatch(name))
        return next((name for name in iterations if not holds_rank_files(name, store)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        if where.suffix is not None:
            raise UsageError("--suffix chooses among rank files; torch_dist has --step N")
        iteration = iteration_of(listing, where, store, STEPS_OF)
        _check_backend(iteration.at(BACKEND), iteration.below + BACKEND, store)
        table = read_table(iteration.listing, store, iteration.below + DCP_METADATA)
        source = iteration.at(DCP_METADATA)
        training = {} if iteration.number is None else {"global_step": iteration.number}
        refused = {**_raw(table, source), **_lone_parts(table, source)}
        arguments, findings = _arguments_of(iteration, store)
        if arguments.get("moe_use_legacy_grouped_gemm"):
            reason = "lies otherwise than its weight (--moe-use-legacy-grouped-gemm)"
            states = (n for n in table.items if n.startswith(_OPTIMIZERS) and ".experts." in n)
            refused |= {n: f"{source}: {n} {reason}; say --weights-only" for n in states}
        base_description = Description(
            source,
            training=training,
            refused=refused,
            findings=(*iteration.findings, *findings),
            unmappable=unmappable(arguments),
        )
        names, description = describe_boxes(
            listing,
            _of_model(table, base_description.refused, source),
            entry_of,
            (DISTCP_SUFFIX,),
            iteration.below,
            base_description,
        )
        return SelectedFiles(
            names, iteration.step, iteration.skipped_steps, description=description
        )

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        from . import torch_dist_files as written

        parts = dict(enumerate(parts_of(planner, options["max_part"] or DEFAULT_BYTES)))
        typed_shapes = _typed_shapes(planner, parts)
        written.check_names(typed_shapes)
        keys = written.keys_of([*typed_shapes], options["transformer_impl"])
        iteration = step if options["iteration"] is None else options["iteration"]
        number = iteration or 0  # as Megatron-Bridge calls what was not trained
        return DestinationFiles(
            {file: f"__{file}_0{DISTCP_SUFFIX}" for file in parts},
            parts,
            f"iter_{number:07}",
            (TRACKER, str(number).encode()),
            written.stacked_names(typed_shapes),
            keys,
        )

    def owns(self, name: str, file: int) -> bool:
        return file_number(name) == file

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return DCP_METADATA, BACKEND, COMMON, EXTRA_STATES

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        from . import torch_dist_files as written

        assert arrangement.mark is not None
        table = table_of(planner, arrangement, places=True)
        extra_state = written.archive(written.NO_STATE)
        shapes = {name: shape for name, (_, shape) in table.tensors.items()}
        restated = written.restate(table, arrangement.keys, arrangement.stacked)
        for key in written.extra_states(shapes, arrangement.stacked):
            restated.items[key] = (StoredItem(EXTRA_STATES, 0, len(extra_state), key),)
        return {
            BACKEND: [json.dumps({**_SUPPORTED, **_COMMON_BACKEND}).encode()],
            COMMON: [written.training_state(int(arrangement.mark[1]))],
            EXTRA_STATES: [extra_state],
            DCP_METADATA: format_dcp_metadata(restated, TORCH_FLAVOR),
        }

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        return foreign_files(listing, dst_names, (DISTCP_SUFFIX,))


def _typed_shapes(
    planner: Planner, parts: Mapping[int, FileContent]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and full shape of each tensor by name."""
    typed_shapes = dict[str, tuple[str, tuple[int, ...]]]()
    for part in parts.values():
        for name in part.names or ():
            parameter = planner.parameter(name)
            typed_shapes[name] = parameter.dtype, parameter.shape
    return typed_shapes


def _check_backend(path: str, name: str, store: Store) -> None:
    """Refuse backends that keep tensors otherwise."""
    try:
        backend = decode_json(store.read(name))
    except FormatError as error:
        raise CheckpointError.of_parts(error.at(path)) from error
    backend = backend if isinstance(backend, dict) else {}
    for key, supported in _SUPPORTED.items():
        if backend.get(key) != supported:
            raise CheckpointError(
                f"{key} is {backend.get(key)!r}, and {supported!r} can be read",
                "save the checkpoint with --ckpt-format torch_dist",
                where=path,
            )


def _arguments_of(
    iteration: SelectedIteration, store: Store
) -> tuple[Mapping[str, Any], tuple[Finding, ...]]:
    """Return the training's arguments, {} where none were kept, and why they cannot be read."""
    name = iteration.below + COMMON
    if not store.has(name):
        return {}, ()
    try:
        with store.open(name) as file:
            return read_training(file.read_at, file.version.size), ()
    except FormatError as error:
        text = f"{iteration.at(COMMON)}: {error.what}; the training's arguments are not known"
        return {}, (as_notice(text),)


def _raw(table: DcpMetadata, source: str) -> dict[str, str]:
    """Return tensors that are parts of flat buffers, and why they cannot be read."""
    raw = [name for name in table.items if name.startswith(_RAW)]
    reason = (
        "is a part of an optimizer's flat buffer, whose layout only that job knows; save with "
        "--dist-ckpt-optim-fully-reshardable, or say --weights-only"
    )
    return {name: f"{source}: {name} {reason}" for name in (*table.flattened, *raw)}


def _parts_by_whole(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return by name of a parameter the names of its parts, by part."""
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _PART().fullmatch(name):
            whole_name, part = match["base"] or match["whole"], match["half"] or match["part"]
            parts.setdefault(whole_name, {})[part] = name
    return parts


def _lone_parts(table: DcpMetadata, source: str) -> dict[str, str]:
    """Return parts that do not make a parameter as it is known here, and why they are refused."""
    refused = dict[str, str]()
    for whole_name, parts in _parts_by_whole(table.tensors).items():
        group = next((g for g in _GROUPS if {*g} == {*parts}), None)
        shapes = {table.tensors[name][1][2:] for name in parts.values()}
        is_half = {*parts} <= {*"wv"}
        if (group is None or len(shapes) > 1) and not is_half:
            text = f"is a part of {whole_name}, and how {', '.join(parts)} lie in it is not known"
            refused |= {name: f"{source}: {name} {text}" for name in parts.values()}
    return refused


def _of_model(table: DcpMetadata, refused: Collection[str], source: str) -> BoxTable:
    """Return the tensors of a model: layers apart, parts joined; without those refused."""
    model_tensors = {n: s for n, s in table.tensors.items() if n not in refused}
    lying = {
        name: items
        for name, items in table.items.items()
        if name not in refused and not (items and items[0].file == EXTRA_STATES)
    }
    stored_boxes = box_table(DcpMetadata(model_tensors, lying))
    tensors, boxes_by_name = dict(stored_boxes.tensors), dict(stored_boxes.boxes)
    for name in stored_boxes.tensors:
        if _STACKED().search(name):
            _take_apart(name, tensors, boxes_by_name)
    for whole_name, parts in _parts_by_whole([*tensors]).items():
        group = next((g for g in _GROUPS if {*g} == {*parts}), ())
        names = [parts[part] for part in group]
        if names and whole_name not in tensors and all(tensors[name][1] for name in names):
            _join(whole_name, names, tensors, boxes_by_name)
    _pile_experts(tensors, boxes_by_name, source)
    names_by_stored = local_names(tensors, source)
    return BoxTable(
        {names_by_stored[stored]: shape for stored, shape in tensors.items()},
        {names_by_stored[stored]: boxes for stored, boxes in boxes_by_name.items()},
        stored_boxes.items,
    )


def _pile_experts(
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    boxes_by_name: dict[str, tuple[BoxInItem, ...]],
    source: str,
) -> None:
    """Put the experts of a layer that are stored one by one in one tensor, along an axis in front.

    Raises CheckpointError where one lacks, or is of another shape.
    """
    experts_by_whole: dict[str, dict[int, str]] = {}
    for name in tensors:
        if match := _EXPERT().fullmatch(name):
            whole_name = match["before"] + match["after"][1:]
            experts_by_whole.setdefault(whole_name, {})[int(match["number"])] = name
    for whole_name, names in experts_by_whole.items():
        missing = next((number for number in range(len(names)) if number not in names), None)
        if missing is not None:
            text = f"experts {format_ranges(sorted(names))} are there, and {missing} is not"
            text = f"of {whole_name} {text}"
            raise CheckpointError(text, "copy the checkpoint again", where=source)
        kinds = {tensors[name] for name in names.values()}
        if len(kinds) > 1 or whole_name in tensors:
            text = f"experts of {whole_name} are of several shapes or types, or stored twice"
            raise CheckpointError(text, "save the checkpoint again", where=source)
        ((dtype, shape),) = kinds
        boxes = list[BoxInItem]()
        for number, name in sorted(names.items()):
            del tensors[name]
            boxes += (
                placed._replace(
                    box=Box((number, *placed.box.start), (number + 1, *placed.box.stop))
                )
                for placed in boxes_by_name.pop(name)
                if placed.box.size
            )
        tensors[whole_name], boxes_by_name[whole_name] = (dtype, (len(names), *shape)), tuple(boxes)


def _take_apart(
    name: str,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    boxes_by_name: dict[str, tuple[BoxInItem, ...]],
) -> None:
    """Put the layers of a tensor in its place, each a tensor without the axis in front."""
    (dtype, shape), placed_boxes = tensors.pop(name), boxes_by_name.pop(name)
    if not shape:
        tensors[name], boxes_by_name[name] = (dtype, shape), placed_boxes
        return
    layers: dict[int, list[BoxInItem]] = {number: [] for number in range(shape[0])}
    for placed in placed_boxes:
        box = Box(placed.box.start[1:], placed.box.stop[1:])
        for number in range(placed.box.start[0], placed.box.stop[0]):
            first = (number - placed.box.start[0]) * prod(box.shape)
            layers[number].append(BoxInItem(placed.item, box, placed.item_shape, first))
    for number, layer_boxes in layers.items():
        layer = _STACKED().sub(f"layers.{number}.", name, count=1)
        if layer in tensors:
            raise CheckpointError(f"{layer} is stored by itself, and as a layer of {name}")
        tensors[layer], boxes_by_name[layer] = (dtype, shape[1:]), tuple(layer_boxes)


def _join(
    whole_name: str,
    names: Iterable[str],
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    boxes_by_name: dict[str, tuple[BoxInItem, ...]],
) -> None:
    """Put one tensor in the place of its parts, whose rows follow each other."""
    rows, boxes = 0, list[BoxInItem]()
    for name in names:
        dtype, shape = tensors.pop(name)
        boxes += (
            placed._replace(box=Box(
                (placed.box.start[0] + rows, *placed.box.start[1:]),
                (placed.box.stop[0] + rows, *placed.box.stop[1:]),
            ))
            for placed in boxes_by_name.pop(name)
            if placed.box.size  # an empty one ends where the next part begins
        )  # fmt: skip
        rows += shape[0]
    tensors[whole_name] = dtype, (rows, *shape[1:])
    boxes_by_name[whole_name] = tuple(boxes)
