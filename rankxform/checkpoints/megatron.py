"""Megatron-LM's files of ranks (`--ckpt-format torch`), the model's part; read only.

::

    latest_checkpointed_iteration.txt           the number, which is written last
    iter_0000100/mp_rank_00/model_optim_rng.pt  tensor parallel rank 0
                 mp_rank_01_002/...             1, of pipeline stage 2, or of expert parallel rank 2
                 mp_rank_01_002_003/...         1, of both

A file names its layers from 0 in each pipeline stage and its experts from 0 on each rank, and says
nothing of how its tensors are cut; that its arguments (`args`) tell, and Megatron's own code
(megatron-core 0.16.1). Here each entry is a box of a tensor with the names of `megatron_names`. Of
a gated unit a rank has a part of the gate and then the same part of the other matrix, which makes
two boxes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import Index
from rankxform.formats.torch_file import DEGREES, TRAINING
from rankxform.geometry.box import Box, Shape
from rankxform.layout.layout import MOST_RANKS
from rankxform.layout.names import natural_sort_key
from rankxform.planning.catalog import Description
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import pattern_on_use

from .base import CheckpointRef, Form, RankFilter, SelectedFiles
from .folders import StepFolders, iteration_of
from .megatron_names import (
    ITERATION,
    MEGATRONS_JOINING,
    RANK_FILES,
    TRACKER,
    holds_rank_files,
    local_name,
    unmappable,
)
from .placed import PlacedEntry, describe_placed

_RANK_FOLDER = pattern_on_use(r"mp_rank_([0-9]{2,6})(?:_([0-9]{3,6}))?(?:_([0-9]{3,6}))?")
_LAYER = pattern_on_use(r"(?P<before>decoder\.layers\.)(?P<number>[0-9]{1,6})(?P<after>\..*)")
_CHUNK = pattern_on_use(r"model(?P<number>[0-9]{1,6})\.(?P<name>.*)")
_EXPERT = pattern_on_use(
    r"(?P<before>.*\bmlp\.experts\.)"
    r"(?:local_experts\.(?P<a>[0-9]{1,6})\.(?P<one>linear_fc[12])\.weight"
    r"|(?P<many>linear_fc[12])\.weight(?P<b>[0-9]{1,6}))"
)
"""An expert of SequentialMLP, or of Transformer Engine's grouped matrices."""
_ROWS = (
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias",
    "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight",
)  # fmt: skip
_COLUMNS = "linear_proj.weight", "linear_fc2.weight"
_GATED = "linear_fc1.weight", "linear_fc1.bias"
_GATING = "swiglu", "quick_geglu", "gated_linear_unit"
"""Arguments with any of which the first matrix has a gate before the other half."""
_WHOLE = (
    "layernorm.weight", "layernorm.bias", "linear_proj.bias", "linear_fc2.bias", "router.weight",
    "router.bias", "expert_bias", "position_embeddings.weight", "enorm.weight", "hnorm.weight",
    "shared_experts.gate_weight",
)  # fmt: skip
_DOWN = {
    "linear_q_down_proj.weight": ("q_lora_rank",),
    "linear_kv_down_proj.weight": ("kv_lora_rank", "qk_pos_emb_head_dim"),
}
"""Matrices that a rank has whole or in part, and the arguments that make their rows."""
_FUSED_DOWN = "linear_qkv_down_proj.weight"
_GROUPED = "mlp.experts.weight1", "mlp.experts.weight2"
_OLD = "language_model."
_FIRST_VERSION = 2


class _Parallel(NamedTuple):
    """How a training was parallel: ranks of tensors, stages, and ranks of experts."""

    tensor: int
    stages: int
    experts: int


class _Rank(NamedTuple):
    tensor: int
    stage: int
    expert: int


class _CutBox(NamedTuple):
    """A part of an entry: the tensor that it is of, with its full shape, and where it lies."""

    name: str
    shape: Shape
    box: Box
    first: int = 0  # the element of the entry with which it begins


class MegatronForm(Form):
    """An iteration of Megatron's rank files, or the root of its iterations (`Form`)."""

    name = "megatron"
    title = "Megatron rank files"
    container = "pt"

    joins = MEGATRONS_JOINING

    def pattern(self, where: CheckpointRef) -> str:
        return "**/mp_rank_*/model_*rng.pt"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER:
            return None
        ranks = sorted(name for name in listing.folders if _RANK_FOLDER().fullmatch(name))
        paths = (f"{rank}/{name}" for rank in ranks for name in RANK_FILES)
        iterations = (name for name in listing.folders if ITERATION().fullmatch(name))
        return next(
            filter(store.has, paths),
            next((name for name in iterations if holds_rank_files(name, store)), None),
        )

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        if where.suffix is not None:
            raise UsageError("--suffix chooses among rank files; Megatron's have --step N")
        folders = {name.rpartition("/")[0]: name for name in listing.files}
        here = frozenset(name for name in folders if "/" not in name)
        of_ranks = replace(listing, files=tuple(folders), folders=listing.folders - here)
        iteration = iteration_of(of_ranks, where, store, _STEPS_OF)
        names = sorted(filter(_RANK_FOLDER().fullmatch, iteration.names), key=natural_sort_key)
        names = [name for name in names if iteration.below + name in folders]
        training = {} if iteration.number is None else {"global_step": iteration.number}
        return SelectedFiles(
            {number: folders[iteration.below + name] for number, name in enumerate(names)},
            iteration.step,
            iteration.skipped_steps,
            description=Description(iteration.path, training=training, findings=iteration.findings),
        )

    def describe(
        self, description: Description, indexes: Mapping[int, Index], names: Mapping[int, str]
    ) -> Description:
        """Each entry is a box by the arguments of the training, and by Megatron's own rules."""
        if len(indexes) < len(names):
            return description  # what cannot be read was said
        trainings = {f: json.loads(i.metadata.get(TRAINING, "{}")) for f, i in indexes.items()}
        training = _one_training(trainings, names)
        ranks = _ranks_of(names, training)
        parallel = _parallel(ranks, training, description.source)
        table = _Table(training, parallel, ranks, indexes, names)
        placed = [entry for file in indexes for entry in table.place_entries(file)]
        description = replace(description, unmappable=unmappable(training))
        if training.get("optimizer"):
            reason = "is in buffers of the job's own layout; say --weights-only"
            refused = {"optimizer.param_groups": f"{description.source}: optimizer {reason}"}
            description = replace(description, refused=refused)
        return describe_placed(description, placed, table.shapes, indexes)


_STEPS_OF = StepFolders(
    "iteration",
    ITERATION(),
    "iter_{:07}",
    TRACKER,
    lambda names: [name for name in names if _RANK_FOLDER().fullmatch(name)],
)


def _one_training(
    trainings: Mapping[int, Mapping[str, Any]], names: Mapping[int, str]
) -> Mapping[str, Any]:
    """Return the arguments that all files state. Raises CheckpointError where they differ."""
    first, *others = trainings
    for file in trainings:
        if not trainings[file]:
            text = "states no arguments of its training (args), which tell how ranks are cut"
            raise CheckpointError(text, "save it with Megatron's own code", where=names[file])
    for file in others:
        for name in (*DEGREES, "num_layers", "hidden_size", "iteration"):
            a, b = (trainings[number].get(name) for number in (first, file))
            if a != b:
                text = f"{name} is {b}, and {a} in {names[first]}; the files are not of one job"
                raise CheckpointError(text, "copy the files of one job", where=names[file])
    version = trainings[first].get("checkpoint_version")
    if isinstance(version, (int, float)) and version < _FIRST_VERSION:
        text = f"is of checkpoint_version {version}, whose queries, keys and values lie otherwise"
        raise CheckpointError(text, "save it again with a newer Megatron-LM", where=names[first])
    sizes = [trainings[first].get(n) for n in ("expert_tensor_parallel_size", DEGREES[0])]
    if sizes[0] not in (None, sizes[1]) and (trainings[first].get(DEGREES[2]) or 1) > 1:
        text = f"experts are cut by {sizes[0]} ranks, and other tensors by {sizes[1]}"
        raise CheckpointError(text, "save it with --ckpt-format torch_dist", where=names[first])
    return trainings[first]


def _ranks_of(names: Mapping[int, str], training: Mapping[str, Any]) -> dict[int, _Rank]:
    """Return which rank each file is of. Raises CheckpointError.

    A number behind the first is of a stage or of an expert parallel rank, which the arguments tell.
    """
    ranks: dict[int, _Rank] = {}
    stages = training.get("pipeline_model_parallel_size") or 1
    for file, name in names.items():
        match = _RANK_FOLDER().fullmatch(name.split("/")[-2])
        assert match is not None
        tensor, *others = (int(number) for number in match.groups() if number is not None)
        stage = others.pop(0) if others and stages > 1 else 0
        ranks[file] = _Rank(tensor, stage, others.pop(0) if others else 0)
        if others:
            text = f"its name has three numbers, and its training {stages} stages"
            raise CheckpointError(text, "copy the files of one job", where=name)
    return ranks


def _parallel(ranks: Mapping[int, _Rank], training: Mapping[str, Any], source: str) -> _Parallel:
    """Return how the training was parallel. Raises CheckpointError where a rank is missing."""
    experts = training.get("expert_model_parallel_size") or 1 + max(
        r.expert for r in ranks.values()
    )
    tensor, stages = (training.get(name) or 1 for name in DEGREES[:2])
    parallel = _Parallel(tensor, stages, experts)
    if tensor * stages * experts > MOST_RANKS:
        text = f"its training states {tensor} x {stages} x {experts} ranks"
        raise CheckpointError(text, "copy the files again", where=source)
    all_ranks = {
        _Rank(tensor, stage, expert)
        for tensor in range(parallel.tensor)
        for stage in range(parallel.stages)
        for expert in range(parallel.experts)
    }
    if missing := sorted(all_ranks - {*ranks.values()}):
        name = f"{_folder_of(missing[0], parallel)}/{RANK_FILES[0]}"
        text = f"{len(missing)} of {len(all_ranks)} ranks are missing, such as {name}"
        raise CheckpointError(text, f"copy {name} into it", where=source)
    if foreign := sorted({*ranks.values()} - all_ranks):
        text = f"{_folder_of(foreign[0], parallel)} is of no rank of {len(all_ranks)}"
        raise CheckpointError(text, "move it away", where=source)
    return parallel


def _folder_of(rank: _Rank, parallel: _Parallel) -> str:
    """Return the folder of a rank's file."""
    stage = f"_{rank.stage:03}" if parallel.stages > 1 else ""
    return f"mp_rank_{rank.tensor:02}{stage}" + (
        f"_{rank.expert:03}" if parallel.experts > 1 else ""
    )


class _Table:
    """The boxes of all files. shapes: full shapes by name, in elements."""

    def __init__(
        self,
        training: Mapping[str, Any],
        parallel: _Parallel,
        ranks: Mapping[int, _Rank],
        indexes: Mapping[int, Index],
        names: Mapping[int, str],
    ) -> None:
        self._training, self._parallel, self._ranks = training, parallel, ranks
        self._indexes, self._names = indexes, names
        self.shapes: dict[str, Shape] = {}
        self._experts_of: dict[int, int] = {}
        layers: dict[tuple[int, int], int] = {}
        for file, index in indexes.items():
            stage = ranks[file].stage
            for name in index.schema.names:
                chunk, local = _chunk_of(name)
                if match := _LAYER().fullmatch(local):
                    count = layers.setdefault((chunk, stage), 0)
                    layers[chunk, stage] = max(count, int(match["number"]) + 1)
        self._first_layer: dict[tuple[int, int], int] = {}
        first = 0
        for key in sorted(layers):
            self._first_layer[key] = first
            first += layers[key]
        if (layer_count := training.get("num_layers")) not in (None, first):
            raise CheckpointError(
                f"its files have {first} layers, and num_layers is {layer_count}",
                "copy the files of one job",
                where=names[min(names)],
            )

    def place_entries(self, file: int) -> Iterator[PlacedEntry]:
        """Yield a file's entries as boxes. Raises CheckpointError, which names the entry."""
        schema, where = self._indexes[file].schema, self._names[file]
        entries: dict[tuple[str, Shape], str] = {}
        for entry, shape in zip(schema.names, schema.shapes):
            for name, full_shape, box, first in self._boxes(entry, shape, file):
                first_entry = entries.setdefault((name, box.start), entry)
                if first_entry != entry:
                    text = f"{first_entry} and {entry} are two names of one tensor, {name}"
                    raise CheckpointError(text, "save the checkpoint again", where=where)
                expected = self.shapes.setdefault(name, full_shape)
                if expected != full_shape:
                    text = f"{entry} makes {name} {list(full_shape)}, and others {list(expected)}"
                    raise CheckpointError(text, "copy the files of one job", where=where)
                yield PlacedEntry(file, entry, name, box, first)

    def _boxes(self, entry: str, shape: Shape, file: int) -> Iterator[_CutBox]:
        """Yield of an entry the tensor's name and full shape, the box, and its first element."""
        rank, where = self._ranks[file], self._names[file]
        chunk, name = _chunk_of(entry)
        if name.startswith(_OLD):
            text = f"{entry} is a name of Megatron-LM before its Core; its tensors lie otherwise"
            raise CheckpointError(text, "save it with a newer Megatron-LM", where=where)
        if match := _LAYER().fullmatch(name):
            number = int(match["number"]) + self._first_layer[chunk, rank.stage]
            name = f"{match['before']}{number}{match['after']}"
        name = local_name(name)
        if name.endswith(_GROUPED):
            yield self._grouped(name, shape, file)
        elif match := _EXPERT().fullmatch(name):
            name = f"{match['before']}experts.{match['one'] or match['many']}.weight"
            count = self._experts(file)
            number = int(match["a"] or match["b"]) + count * rank.expert
            for cut in self._cut(name, shape, file):
                box = Box((number, *cut.box.start), (number + 1, *cut.box.stop))
                experts = count * self._parallel.experts
                yield cut._replace(shape=(experts, *cut.shape), box=box)
        else:
            yield from self._cut(name, shape, file)

    def _experts(self, file: int) -> int:
        """Return how many experts a rank has. Raises CheckpointError."""
        if file not in self._experts_of:
            matches = map(_EXPERT().fullmatch, self._indexes[file].schema.names)
            numbers = {int(match["a"] or match["b"]) for match in matches if match}
            all_experts, degree = self._training.get("num_experts"), self._parallel.experts
            count = len(numbers) or (all_experts or 0) // degree
            if not count or all_experts not in (None, count * degree):
                text = f"has {count} experts of each layer, and num_experts is {all_experts}, on "
                text += f"{degree} ranks"
                raise CheckpointError(text, "copy it again", where=self._names[file])
            self._experts_of[file] = count
        return self._experts_of[file]

    def _grouped(self, name: str, shape: Shape, file: int) -> _CutBox:
        """Return how the experts of GroupedMLP lie, whose matrices are transposed in memory."""
        count = self._experts(file)
        if self._parallel.tensor > 1 or prod(shape) % count:
            text = f"{name} is cut by columns within each expert, which is not read"
            tries = ("save it with --ckpt-format torch_dist",)
            raise CheckpointError(text, *tries, where=self._names[file])
        is_first = name.endswith(_GROUPED[0])
        matrix = (shape[0], shape[1] // count) if is_first else (shape[0] // count, shape[1])
        box = Box.whole((count, *matrix)).shifted(0, count * self._ranks[file].expert)
        return _CutBox(name, (count * self._parallel.experts, *matrix), box)

    def _cut(self, name: str, shape: Shape, file: int) -> Iterator[_CutBox]:
        """Yield the boxes of what tensor parallel ranks have of a tensor.

        Raises CheckpointError for a name of which that is not known.
        """
        degree, number = self._parallel.tensor, self._ranks[file].tensor
        if name.endswith(_FUSED_DOWN):
            yield from self._fused_down(name, shape, file)
        elif degree == 1 or name.endswith(_WHOLE) or self._has_all_rows(name, shape, file):
            yield _CutBox(name, shape, Box.whole(shape))
        elif name.endswith(_GATED) and any(map(self._training.get, _GATING)):
            rows = shape[0] // 2
            part = Box.whole((rows, *shape[1:]))
            full_shape = 2 * rows * degree, *shape[1:]
            for half in range(2):
                box = part.shifted(0, (half * degree + number) * rows)
                yield _CutBox(name, full_shape, box, half * part.size)
        elif name.endswith((*_ROWS, *_GATED, *_DOWN)):
            box = Box.whole(shape).shifted(0, number * shape[0])
            yield _CutBox(name, (degree * shape[0], *shape[1:]), box)
        elif name.endswith(_COLUMNS):
            box = Box.whole(shape).shifted(1, number * shape[1])
            yield _CutBox(name, (shape[0], degree * shape[1]), box)
        else:
            text = f"how {degree} ranks hold {name} is not known"
            try_dist = "save it with --ckpt-format torch_dist, which says it"
            raise CheckpointError(text, try_dist, where=self._names[file])

    def _has_all_rows(self, name: str, shape: Shape, file: int) -> bool:
        """Tell whether a rank has all rows of a matrix that some jobs cut."""
        sizes = next((keys for end, keys in _DOWN.items() if name.endswith(end)), None)
        if sizes is None:
            return False
        rows = self._sum_of(sizes, file)
        if shape[0] not in (rows, rows // self._parallel.tensor):
            text = f"{name} has {shape[0]} rows, and {' + '.join(sizes)} make {rows}"
            raise CheckpointError(text, "copy the files of one job", where=self._names[file])
        return shape[0] == rows

    def _sum_of(self, sizes: tuple[str, ...], file: int) -> int:
        arguments = (self._training.get(name) for name in sizes)
        numbers = [number for number in arguments if type(number) is int]
        if len(numbers) < len(sizes):
            text = f"states no {' and no '.join(sizes)} among its training's arguments"
            raise CheckpointError(text, "save it again", where=self._names[file])
        return sum(numbers)

    def _fused_down(self, name: str, shape: Shape, file: int) -> Iterator[_CutBox]:
        """Yield the two matrices that newer versions have in one, a rank's rows of each."""
        before = name.removesuffix(_FUSED_DOWN)
        rows_of = {f"{before}{end}": self._sum_of(keys, file) for end, keys in _DOWN.items()}
        degree = 1 if shape[0] == sum(rows_of.values()) else self._parallel.tensor
        number, local = self._ranks[file].tensor if degree > 1 else 0, 0
        if shape[0] * degree != sum(rows_of.values()) or any(n % degree for n in rows_of.values()):
            text = f"{name} has {shape[0]} rows, and its parts make {sum(rows_of.values())}"
            raise CheckpointError(text, "copy the files of one job", where=self._names[file])
        for part, full_rows in rows_of.items():
            rows = full_rows // degree
            box = Box.whole((rows, shape[1])).shifted(0, number * rows)
            yield _CutBox(part, (full_rows, shape[1]), box, local * shape[1])
            local += rows


def _chunk_of(entry: str) -> tuple[int, str]:
    """Return the part of a virtual pipeline that an entry is of, and its name there.

    >>> _chunk_of("model1.decoder.layers.0.mlp.linear_fc2.weight")
    (1, 'decoder.layers.0.mlp.linear_fc2.weight')
    """
    match = _CHUNK().fullmatch(entry)
    return (int(match["number"]), match["name"]) if match else (0, entry)
