"""Folders that vLLM starts from without cutting anything (`--load-format sharded_state`).

::

    model-rank-0-part-0.safetensors ...        what each rank holds, in parts by size
    model-pp-1-tp-0-part-0.safetensors ...     the same of several pipeline stages
    config.json, tokenizer's files             as a Hugging Face folder has them

Files say nothing of how many ranks there are: vLLM takes a smaller tensor without an error, so that
a folder for other ranks starts and answers nonsense. The manifest states it. Names and cuts are
those of vLLM 0.32 and 0.33; `rankxform.operations.serving` makes the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.checkpoints import folders
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import Index
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout
from rankxform.layout.names import format_ranges, natural_sort_key
from rankxform.layout.strategy import Strategy
from rankxform.planning.catalog import Description
from rankxform.planning.plan import FileContent, Planner
from rankxform.storage.store import Listing, Store
from rankxform.values import pattern_on_use

from .base import CheckpointRef, DestinationFiles, Form, RankFilter, SelectedFiles

DEFAULT_BYTES = 5 * 10**9
_NUMBER = r"(0|[1-9][0-9]{0,5})"
_FILE = pattern_on_use(
    rf"model-(?:rank-{_NUMBER}|pp-{_NUMBER}-tp-{_NUMBER})-part-{_NUMBER}\.safetensors"
)
_LAYER = pattern_on_use(r"model\.layers\.([0-9]{1,6})\.")
_EXPERTS = pattern_on_use(r"(.*\bexperts)\.(?:routed_experts\.)?w(?:13|2)_weight")
_GATES = "gate", "_gate", "runner.gate"
"""What versions call a router within the module of experts."""
_LAST = "model.norm.weight", "lm_head.weight"
_AXES = (
    pattern_on_use(
        r"\b(embed_tokens|lm_head|q_b_proj|q_proj|kv_b_proj)\.weight$"
        r"|\b(qkv_proj|gate_up_proj)\.(weight|bias)$"
    ),
    pattern_on_use(r"\b(o_proj|down_proj)\.weight$|\bw13_weight$"),
    pattern_on_use(r"\bw2_weight$"),
)
"""By axis the names of what ranks cut along it."""
_WHOLE = pattern_on_use(
    r"norm\.weight$|gate\.weight$|_bias$|_scale$|(o_proj|down_proj)\.bias$"
    r"|(fused_qkv_a_proj|kv_a_proj_with_mqa)\.weight$"
)
"""Names of what each rank has whole."""


def axis_of(name: str, *, has_whole_experts: bool = False) -> int | None:
    """Return the axis along which ranks cut a tensor; None of one that each of them has whole.

    >>> axis_of("model.layers.0.self_attn.o_proj.weight"), axis_of("model.norm.weight")
    (1, None)
    """
    if has_whole_experts and _EXPERTS().fullmatch(name):
        return 0
    return next((axis for axis, pattern in enumerate(_AXES) if pattern().search(name)), None)


class VllmForm(Form):
    """A folder of vLLM's ranks (`checkpoints.base.Form`)."""

    name = "vllm"
    title = "vLLM sharded_state"
    options = (
        "tensor_parallel", "pipeline_parallel", "expert_parallel", "max_shard", "vllm_version",
        "platform",
    )  # fmt: skip
    container = "safetensors"
    configured = True
    is_written = True
    is_served = True

    def pattern(self, where: CheckpointRef) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        return next((name for name in listing.entries if _FILE().fullmatch(name)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folders.check_no_step(self.name, where)
        names = [name for name in listing.files if _FILE().fullmatch(name)]
        ranks = sorted({_rank_of(name) for name in names})
        stages, count = (1 + max((rank[n] for rank in ranks), default=0) for n in range(2))
        if ranks != [(stage, rank) for stage in range(stages) for rank in range(count)]:
            numbers = format_ranges(sorted({rank for _, rank in ranks})) or "none"
            text = f"lacks files of some ranks; there are those of {numbers}{listing.searched}"
            raise CheckpointError(text, "copy those of all ranks", where=listing.path)
        ordered = sorted(names, key=natural_sort_key)
        parallel = map(_rank_of, ordered)
        own_ranks = {file: stage * count + rank for file, (stage, rank) in enumerate(parallel)}
        description = Description(listing.path, ranks=own_ranks)
        return SelectedFiles(dict(enumerate(ordered)), description=description)

    def describe(
        self, description: Description, indexes: Mapping[int, Index], names: Mapping[int, str]
    ) -> Description:
        """Each tensor is cut along the axis that its name tells."""
        if len(indexes) < len(names):
            return description  # what cannot be read was said
        parallel = {file: _rank_of(name) for file, name in names.items()}
        stages, count = (1 + max(ranks[n] for ranks in parallel.values()) for n in range(2))
        has_whole_experts = _has_whole_experts(indexes, count)
        layouts: list[dict[str, Layout]] = [{} for _ in range(stages)]
        declared: dict[str, tuple[str, Shape]] = {}
        for file, index in indexes.items():
            for name, shape in zip(index.schema.names, index.schema.shapes):
                axis = axis_of(name, has_whole_experts=has_whole_experts)
                if axis is None and count > 1 and not _WHOLE().search(name):
                    raise CheckpointError(
                        f"how vLLM cuts {name!r} is not known",
                        "--src-pattern 'model-rank-{rank}-part-*' if a strategy says how its ranks "
                        "are cut",
                        where=names[file],
                    )
                layouts[parallel[file][0]][name] = _layout(count, axis, len(shape))
                full = (n * count if number == axis else n for number, n in enumerate(shape))
                declared[name] = index.dtype(name), tuple(full)
        strategy = Strategy(tuple(layouts), count, f"the names of vLLM's tensors, {count} ranks")
        listed = {file: index.schema.names for file, index in indexes.items()}
        return replace(description, strategy=strategy, declared=declared, listed=listed)

    def destination_strategy(
        self, shapes: Mapping[str, Shape], options: Mapping[str, Any]
    ) -> Strategy:
        """Equal slices along the axis that a name tells."""
        ranks, stages = options["tensor_parallel"], options["pipeline_parallel"] or 1
        if ranks is None:
            raise UsageError(
                "--dst-form vllm is cut for a number of ranks", "give --tensor-parallel N"
            )
        numbers = [int(match[1]) for name in shapes if (match := _LAYER().match(name))]
        stage_of_layer = _stage_of_layer(1 + max(numbers, default=0), stages)
        layouts: list[dict[str, Layout]] = [{} for _ in range(stages)]
        for name, shape in shapes.items():
            axis = axis_of(name, has_whole_experts=options["expert_parallel"])
            if axis == 0 and shape[0] % ranks:
                raise UsageError(
                    f"--tensor-parallel {ranks} does not divide {shape[0]} rows of {name!r}",
                    "--tensor-parallel N that divides them",
                )
            match = _LAYER().match(name)
            stage = stage_of_layer[int(match[1])] if match else stages - 1 if name in _LAST else 0
            layouts[stage][name] = _layout(ranks, axis, len(shape))
        return Strategy(tuple(layouts), ranks, f"--tensor-parallel {ranks}")

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        names, parts = dict[int, str](), dict[int, FileContent]()
        max_bytes, ranks = options["max_shard"] or DEFAULT_BYTES, options["tensor_parallel"]
        for rank in range(planner.dst.ranks):
            who = f"rank-{rank}"
            if planner.dst.ranks > ranks:
                who = f"pp-{rank // ranks}-tp-{rank % ranks}"
            for part, part_names in enumerate(
                folders.split_by_bytes(planner.tensors(rank), max_bytes)
            ):
                names[len(names)] = f"model-{who}-part-{part}.safetensors"
                parts[len(parts)] = FileContent(rank, frozenset(part_names))
        return DestinationFiles(names, parts)

    def stated_options(self, description: Description) -> Mapping[str, Any]:
        strategy = description.strategy
        assert strategy is not None
        stages = len(strategy.stages)
        shards_experts = any(
            _EXPERTS().fullmatch(name) and layout.tensor_map[0] == (0,)
            for layouts in strategy.stages
            for name, layout in layouts.items()
        )
        return {
            "tensor_parallel": strategy.stage_size,
            "pipeline_parallel": stages if stages > 1 else None,
            "expert_parallel": shards_experts,
            **_naming_told([name for layouts in strategy.stages for name in layouts]),
        }

    def owns(self, name: str, file: int) -> bool:
        return _FILE().fullmatch(name) is not None

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        """A part of an earlier folder would be loaded too."""
        return folders.foreign_files(listing, dst_names)


def _rank_of(name: str) -> tuple[int, int]:
    """Return the pipeline stage and the tensor-parallel rank that a file is of."""
    match = _FILE().fullmatch(name)
    assert match is not None
    return int(match[2] or 0), int(match[1] or match[3] or 0)


def _naming_told(names: Sequence[str]) -> dict[str, str | None]:
    """Return by option a version and a platform that call tensors so; None: the newest of CUDA.

    >>> _naming_told(["model.layers.0.mlp.experts.w2_weight", "x._k_scale", "x.mlp.gate.weight"])
    {'vllm_version': '0.20', 'platform': None}
    """

    def is_in_a_name(text: str) -> bool:
        return any(text in name for name in names)

    if not is_in_a_name("._k_scale"):
        return {"vllm_version": "0.13", "platform": None}
    is_latent = is_in_a_name(".kv_b_proj.")
    if not is_in_a_name(".experts."):
        is_on_ascend = is_latent and not is_in_a_name(".mla_attn.o_proj.")
        return {"vllm_version": None, "platform": "ascend" if is_on_ascend else None}
    if is_in_a_name(".routed_experts."):
        is_on_ascend = is_in_a_name(".experts._gate.") or (
            is_latent and not is_in_a_name(".mla_attn.o_proj.")
        )
        return {"vllm_version": None, "platform": "ascend" if is_on_ascend else None}
    earlier = is_in_a_name("._gate.") or is_in_a_name("._shared_experts.")
    version = "0.23" if is_in_a_name(".runner.gate.") else "0.16" if earlier else "0.20"
    return {"vllm_version": version, "platform": None}


def _layout(ranks: int, axis: int | None, axes: int) -> Layout:
    """Return how ranks cut a tensor along an axis; None: each has it whole."""
    return Layout((ranks,), tuple((0,) if number == axis else () for number in range(axes)))


def _stage_of_layer(layers: int, stages: int) -> list[int]:
    """Return by layer its stage: what remains goes one each to the stages before the last.

    As vLLM's `get_pp_indices` divides them, unless VLLM_PP_LAYER_PARTITION says otherwise.

    >>> _stage_of_layer(7, 3)
    [0, 0, 1, 1, 1, 2, 2]
    """
    counts = [layers // stages] * stages
    for number in range(layers % stages):
        counts[stages - 2 - number] += 1
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _has_whole_experts(indexes: Mapping[int, Index], ranks: int) -> bool:
    """Tell whether a rank has some of the experts that its router knows."""
    for index in indexes.values():
        for name, shape in zip(index.schema.names, index.schema.shapes):
            if match := _EXPERTS().fullmatch(name):
                module = match[1].rpartition(".")[0]
                within = (f"{match[1]}.{gate}.weight" for gate in _GATES)
                routers = (*within, f"{module}.gate.weight")
                experts = next((index.shape(router)[0] for router in routers if router in index), 0)
                return ranks > 1 and experts == shape[0] * ranks
    return False
