"""Unified safetensors: whole tensors in parts, and a map of them.

::

    part0.safetensors ...     whole tensors
    param_name_map.json       {"metadata": {"total_size": N}, "weight_map": {name: part}}
    hyper_param.safetensors   values that are no parameters, such as global_step, if there are some
    common.json               global_step and the like, for MindFormers since 1.9, which looks there

MindSpore's `unified_safetensors` writes it, and `load_distributed_checkpoint` reads it. In
MindSpore's own hyper_param there may be slices of one rank, of parameters that it was told to leave
out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from heapq import heapreplace
from math import prod
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints import folders
from rankxform.errors import CheckpointError
from rankxform.formats.checkpoint2_metadata import format_common
from rankxform.formats.container import TensorSpec, content_bytes
from rankxform.layout.names import format_ranges, natural_sort_key
from rankxform.layout.states import state_of_name
from rankxform.planning.plan import FileContent, Planner
from rankxform.statements import as_warning
from rankxform.storage.store import Listing, Store
from rankxform.values import pattern_on_use

from .base import CheckpointRef, DestinationFiles, Form, RankFilter, SelectedFiles
from .folders import COMMON

MAP, FIRST, LOOSE = "param_name_map.json", "part0.safetensors", "hyper_param.safetensors"
DEFAULT_BYTES = 3 << 30
_PART = pattern_on_use(r"part(0|[1-9][0-9]{0,8})\.safetensors")


class UnifiedForm(Form):
    """A folder of unified safetensors (`checkpoints.base.Form`)."""

    name = "unified"
    title = "unified safetensors"
    options = ("max_part",)
    container = "safetensors"
    training = COMMON
    counters = True
    is_written = True
    joins = MappingProxyType({})

    def pattern(self, where: CheckpointRef) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        marks = (MAP, FIRST)
        return next((name for name in marks if name in listing.files), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folders.check_no_step(self.name, where)
        index = MAP if MAP in listing.files else None
        if index is None:
            _check_no_gap(listing)
        selected = folders.whole_tensors(listing, store, index, untracked=LOOSE)
        assert selected.description is not None
        common = listing.at(COMMON)
        training = folders.training(store, COMMON, common) if COMMON in listing.files else {}
        statements = *selected.description.statements, *folders.steps(training, common)
        description = replace(selected.description, training=training, statements=statements)
        selected = replace(selected, description=description)
        parts = len(selected.names) - (LOOSE in listing.files)
        if index is None and parts > 1:
            doubt = f"{listing.path}: has no {MAP}, which is written last; are {parts} parts all?"
            selected = replace(
                selected,
                description=replace(
                    description, findings=(*description.findings, as_warning(doubt))
                ),
            )
        return selected

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        """Assign tensors as MindSpore does, the largest first, to the part with the fewest bytes.

        There are more parts than MindSpore makes where one would exceed the limit.
        """
        folders.refuse_sharded_strategy(self.name, planner.dst.ranks)
        untracked = [t.name for t in planner.tensors(0) if belongs_in_untracked_file(planner, t)]
        sizes = {
            t.name: content_bytes(t.dtype, t.shape)
            for t in planner.tensors(0)
            if t.name not in untracked
        }
        max_bytes = options["max_part"] or DEFAULT_BYTES
        count = max(1, min(-(-sum(sizes.values()) // max_bytes), len(sizes)))
        parts = _distribute_by_bytes(sizes, count)
        while count < len(sizes) and any(
            part[1:] and sum(sizes[name] for name in part) > max_bytes for part in parts
        ):
            count += 1
            parts = _distribute_by_bytes(sizes, count)
        names = {number: f"part{number}.safetensors" for number, part in enumerate(parts) if part}
        contents_by_id = {number: FileContent(0, frozenset(parts[number])) for number in names}
        if untracked:
            names[count], contents_by_id[count] = LOOSE, FileContent(0, frozenset(untracked))
        return DestinationFiles(names, contents_by_id)

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        return folders.plain_metadata(source, "ms")

    def owns(self, name: str, file: int) -> bool:
        return name == LOOSE or name == f"part{file}.safetensors"

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return (MAP, COMMON)

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        files = {
            name: planner.tensors(file) for file, name in arrangement.names.items() if name != LOOSE
        }
        index = {MAP: [folders.index_document(files, indent=4)]}  # written last
        tensors = (tensor for file_tensors in files.values() for tensor in file_tensors)
        goes_on = any(planner.parameter(tensor.name).state for tensor in tensors)
        if goes_on and training.get("global_step") is not None:
            return {COMMON: [format_common(training)], **index}
        return index

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        return folders.foreign_files(listing, dst_names)


def _distribute_by_bytes(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Return names by part: the largest tensor first, each to the part with the fewest bytes."""
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], natural_sort_key(name))):
        load, number = loads[0]
        parts[number].append(name)
        heapreplace(loads, (load + sizes[name], number))
    return parts


def _check_no_gap(listing: Listing) -> None:
    """Refuse parts without a map if one of them is not there."""
    matches = (_PART().fullmatch(name) for name in listing.files)
    numbers = {int(match[1]) for match in matches if match}
    missing_parts = sorted(set(range(max(numbers, default=0))) - numbers)
    if missing_parts:
        raise CheckpointError(
            f"has no {MAP}, and part {format_ranges(missing_parts)} is not there",
            "bring what is missing",
            where=listing.path,
        )


def belongs_in_untracked_file(planner: Planner, tensor: TensorSpec) -> bool:
    """Tell whether a tensor is no parameter of the network: a counter, or one value that no
    strategy lists and that is no state, which readers would not take for one there."""
    parameter = planner.parameter(tensor.name)
    is_loose = not parameter.is_declared and prod(tensor.shape) == 1
    is_state = parameter.state is not None or state_of_name(tensor.name) is not None
    return not is_state and (not parameter.is_weight or is_loose)
