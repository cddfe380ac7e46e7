"""Whether ranks agree about the same bytes, checked before anything is written.

These are pure functions of digests from all processes. A parameter that no strategy lists must be
the same on every rank, or it was sharded in a way that no file tells. A parameter that the strategy
shards must not be the same everywhere, or the folder holds complete parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from rankxform.errors import CheckpointError
from rankxform.formats.base import Index
from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box
from rankxform.layout.names import summarize_names
from rankxform.layout.strategy import SHARD_PREFIX, WholeStrategy
from rankxform.values import dataclass

from .catalog import Catalog, Parameter
from .selection import Selection, sources_of

_SAMPLED = 12
_LEAST_SAMPLE = 64


@dataclass(frozen=True)
class Sample:
    """What one rank's file holds of one parameter: a digest, and whether all bytes are equal."""

    digest: bytes
    constant: bool


def to_compare(selection: Selection, catalog: Catalog) -> list[str]:
    """Return the parameters in no strategy that several source ranks hold.

    Without a source strategy these are all parameters, even those not selected: a difference
    in one casts doubt on the others.
    """
    if isinstance(catalog.strategy, WholeStrategy):
        return [p.name for p in catalog.listed.values() if len(p.holders) > 1]
    sources = sources_of(selection.parameters, catalog)
    return [p.name for p in sources if not p.listed and len(p.holders) > 1]


def check_unlisted(
    catalog: Catalog,
    digests: Mapping[int, Mapping[str, bytes]],
    take_one: bool,
) -> list[str]:
    """Refuse parameters in no strategy that differ between ranks; return notices about the rest.

    `digests` is by source rank and name. One element may differ (a counter): a notice. More
    elements mean a parameter that was sharded, unless the source has a strategy and `take_one`
    says to take one rank's as it is. Raises CheckpointError.
    """
    known = {**catalog.unlisted, **catalog.listed}
    first: dict[str, int] = {}
    differing: dict[str, int] = {}
    for rank in sorted(digests):
        for name, digest in digests[rank].items():
            if digest != digests[first.setdefault(name, rank)][name]:
                differing.setdefault(name, rank)
    for name in differing_shapes(catalog, first):
        differing.setdefault(name, known[name].holders[-1])
    large = [n for n in differing if _is_large(known[n])]
    if large and isinstance(catalog.strategy, WholeStrategy):
        name = large[0]
        shown = catalog.src_name(name)
        raise CheckpointError(
            f"give the strategy; --src-strategy none says that every rank holds whole parameters, "
            f"but {shown!r} is not the same in {catalog.paths[first[name]]} and "
            f"{catalog.paths[differing[name]]}, one of {len(large):,} that differ: they are "
            "shards, or replicas that differ"
        )
    if large and not take_one:
        name = large[0]
        shown = catalog.src_name(name)
        raise CheckpointError(
            f"{summarize_names(map(catalog.src_name, large))}: {catalog.strategy.label} does not "
            f"list {'it' if len(large) == 1 else 'these'}, and {shown!r} differs between "
            f"{catalog.paths[first[name]]} and {catalog.paths[differing[name]]}. A frozen "
            "parameter is sharded without being listed, and how is not known; leave it out "
            f"(--exclude '^{re.escape(name)}$'), or take one rank's bytes as they are "
            "(--unlisted take-one)"
        )
    return [
        f"{catalog.src_name(name)!r} is in no strategy and differs between rank {first[name]} and "
        f"rank {rank}; each destination rank gets one source rank's, as with MindSpore"
        for name, rank in differing.items()
    ]


def differing_shapes(catalog: Catalog, names: Iterable[str]) -> list[str]:
    """Return those of the unlisted `names` whose shape is not the same in every file."""
    found = []
    for name in names:
        shapes = {
            group.schema.shapes[group.schema.position[name]]
            for groups in catalog.groups
            for group in groups
            if name in group.schema.position
        }
        if len(shapes) > 1:
            found.append(name)
    return found


def _is_large(parameter: Parameter) -> bool:
    return prod(parameter.shape) > 1


def to_sample(selection: Selection, catalog: Catalog) -> list[str]:
    """Return a few large parameters that the source strategy shards, spread over the model."""
    sharded = [
        p
        for p in selection.sources(catalog)
        if p.listed
        and len(p.sharding.files) > 1
        and p.box(p.holders[0]).size * item_size(p.src_dtype) >= _LEAST_SAMPLE
    ]
    step = max(1, len(sharded) // _SAMPLED)
    return [p.name for p in sharded[::step][:_SAMPLED]]


def sharded_by_pattern(selection: Selection, catalog: Catalog) -> list[str]:
    """Return the parameters that the source strategy shards, if that is a `PatternStrategy`."""
    if not catalog.strategy.label.startswith(SHARD_PREFIX):
        return []
    sources = selection.sources(catalog)
    return [p.name for p in sources if p.listed and len(p.sharding.files) > 1]


def check_each_differs(
    catalog: Catalog, samples: Mapping[int, Mapping[str, Sample]], names: Iterable[str]
) -> None:
    """Refuse a pattern that matches a parameter of which all ranks hold the same bytes.

    A parameter whose bytes are all equal, such as a moment of zeros, proves nothing. Raises
    CheckpointError.
    """
    for name in names:
        found = [samples[r][name] for r in catalog.listed[name].holders if name in samples[r]]
        if len({one.digest for one in found}) == 1 and not found[0].constant and len(found) > 1:
            raise CheckpointError(
                f"{catalog.strategy.label!r} shards {catalog.src_name(name)!r}, and all ranks hold "
                "the same bytes of it: it was not sharded. Let the expression match fewer names, "
                "or say --allow-equal-slices if the slices really are equal"
            )


def check_slices_differ(
    catalog: Catalog,
    samples: Mapping[int, Mapping[str, Sample]],
    sampled: Iterable[str],
) -> None:
    """Refuse a folder in which every rank holds the same bytes of what should be sharded.

    `samples` are by source rank and name; `sampled` the names that the strategy shards. Raises
    CheckpointError if no sampled parameter differs anywhere between ranks; one whose bytes are all
    equal, such as a moment of zeros, tells nothing.
    """
    telling: dict[str, set[bytes]] = {}
    for name in sampled:
        found = [samples[r][name] for r in catalog.listed[name].holders if name in samples[r]]
        if not all(one.constant for one in found):
            telling[name] = {one.digest for one in found}
    if not telling or any(len(digests) > 1 for digests in telling.values()):
        return
    name = sorted(telling)[0]
    parameter = catalog.listed[name]
    rank = parameter.holders[0]
    counts = " x ".join(map(str, parameter.layout.counts))
    raise CheckpointError(
        f"{catalog.paths[rank]}: {catalog.strategy.label} shards {parameter.src_name!r} into "
        f"{counts} slices of {list(parameter.box(rank).shape)}, "
        f"but every rank holds the same bytes, of this and of all {len(telling)} parameters looked "
        "at. The files seem to hold complete parameters: give one of them as SRC with "
        "--src-strategy none, or say --allow-equal-slices if the slices really are equal"
    )


def extra_to_sample(catalog: Catalog, extra: Mapping[int, Index]) -> list[str]:
    """Return a few listed parameters that a file beyond the strategy's ranks holds too."""
    listed = {parameter.src_name: name for name, parameter in catalog.listed.items()}
    every = (name for one in extra.values() for name in one.schema.names)
    names = [listed[name] for name in every if name in listed]
    step = max(1, len(names) // _SAMPLED)
    return names[::step][:_SAMPLED]


def check_extra_rank(
    catalog: Catalog, samples: Mapping[int, Mapping[str, Sample]], rank: int, path: str
) -> None:
    """Refuse a rank beyond the strategy's that holds slices which no other rank has.

    `samples` are by rank and name. Such a checkpoint was sharded by a strategy of more ranks.
    """
    for name, one in samples.get(rank, {}).items():
        holders = catalog.listed[name].holders
        if not one.constant and all(samples[r][name].digest != one.digest for r in holders):
            ranks = catalog.strategy.ranks
            raise CheckpointError(
                f"{path}: rank {rank} holds a slice of {catalog.src_name(name)!r} that none of the "
                f"ranks 0 to {ranks - 1} has; {catalog.strategy.label} describes only {ranks} "
                "ranks and is not this checkpoint's. Give the right strategy, or say "
                "--allow-extra-ranks if these ranks are left over from another run"
            )


@dataclass(frozen=True)
class Unequal:
    """Source ranks that should hold the same bytes of a parameter and do not.

    box: the region that they hold. groups: the ranks, grouped by equal bytes, the
    largest group first.
    """

    name: str
    box: Box
    groups: tuple[tuple[int, ...], ...]


def unequal_replicas(
    catalog: Catalog, digests: Mapping[int, Mapping[str, bytes]]
) -> Iterator[Unequal]:
    """Yield where replicas differ; `digests` is by source rank and name."""
    for parameter in catalog.parameters:
        for cell, ranks in parameter.sharding.files.items():
            groups: dict[bytes, list[int]] = {}
            for rank in ranks:
                groups.setdefault(digests[rank][parameter.name], []).append(rank)
            if len(groups) > 1:
                ordered = sorted(map(tuple, groups.values()), key=lambda g: (-len(g), g))
                yield Unequal(parameter.name, parameter.grid.box(cell), tuple(ordered))
