"""Evidence from bytes: what files hold of the same elements must agree, and of different ones not.

A parameter that no strategy lists must be the same on every rank, or it was sharded in a way that
no file tells. A parameter that the strategy shards must not be the same everywhere, or the folder
holds complete parameters. Such rules look at what all processes have seen of the files, a
`planning.sampling.SampledSource`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING

from rankxform.display.text import format_count
from rankxform.errors import Message
from rankxform.formats.container import Index, content_bytes
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Grid
from rankxform.layout.names import option_to_exclude, summarize_names
from rankxform.layout.strategy import SHARD_PREFIX
from rankxform.statements import (
    ACCEPT_EXTRA_RANKS,
    SAMPLES,
    Finding,
    HasFindings,
    Statement,
    as_notice,
    as_warning,
    rule,
)
from rankxform.values import NamedTuple, dataclass, pattern_on_use

from .catalog import Catalog, Parameter

if TYPE_CHECKING:
    from .sampling import SampledSource

_SAMPLED = 12
ALLOW_EQUAL = "--accept equal-slices if the slices really are equal"
_LARGEST_OWN = 64 << 10
"""Bytes of values that are compared whole, where each rank may have its own."""


class ContentDigest(NamedTuple):
    """What a file holds of a tensor: all of its bytes, or a sample of them."""

    digest: bytes
    constant: bool = False  # all of its elements are equal, or the bytes of a single one
    content: bytes = b""  # the bytes themselves, of one small element that was read whole
    is_zero: bool = False  # all of its bytes are zero
    is_finite: bool = True  # of a sample of floats: no value is infinite or no number
    holds_zeros: bool = False  # of a sample of floats, and of both ends: each value is zero


DigestsByFile = Mapping[int, Mapping[str, ContentDigest]]
"""What was seen of files, by id and name of the tensor."""


@dataclass(frozen=True)
class Evidence(HasFindings):
    """What ranks were found to hold."""

    # Tensors of which each rank has values of its own.
    per_rank_tensors: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()  # tensors of which every byte was compared
    nbytes: int = 0  # bytes of these
    samples: int = 0  # number of comparisons of samples
    sampled: frozenset[str] = frozenset()  # tensors whose samples were compared
    # Share of the source's bytes in tensors like the sampled ones, rounded down; None: nothing to
    # compare.
    percent: int | None = None
    # Number of sharded weights of which ranks were compared that hold one slice: that they agree
    # says which rank is which. None: no weight is sharded, or files say themselves what they hold.
    ordered: int | None = None
    # Number of ranks that could be exchanged with another, and each sample would agree as before.
    exchangeable: int = 0
    reads: int = 0  # number of reads
    bytes_read: int = 0  # bytes that were read
    digests_by_file: DigestsByFile = field(default_factory=dict, compare=False)  # of samples
    steps: tuple[Statement, ...] = ()  # training steps that files declare
    findings: tuple[Finding, ...] = ()  # what was noticed
    differing: tuple[str, ...] = ()  # tensors of which replicas should be equal, and are not
    # Of these one that lies as each other does -> the files whose replicas are taken.
    taken_from: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, int | None]:
        """Its numbers, for JSON."""
        names = ("samples", "percent", "ordered", "exchangeable", "reads", "bytes_read")
        return {name: getattr(self, name) for name in names}

    def __add__(self, other: Evidence) -> Evidence:
        numbers = ("names", "nbytes", "samples", "reads", "bytes_read", "findings", "differing")
        return Evidence(
            per_rank_tensors=self.per_rank_tensors | other.per_rank_tensors,
            sampled=self.sampled | other.sampled,
            percent=self.percent if other.percent is None else other.percent,
            ordered=other.ordered if self.ordered is None else self.ordered,
            exchangeable=max(self.exchangeable, other.exchangeable),
            digests_by_file=self.digests_by_file or other.digests_by_file,
            steps=self.steps or other.steps,
            taken_from={**self.taken_from, **other.taken_from},
            **{name: getattr(self, name) + getattr(other, name) for name in numbers},
        )


def undeclared_to_compare(parameters: Sequence[Parameter], catalog: Catalog) -> list[str]:
    """Return the parameters in no strategy that several source ranks hold.

    Without a source strategy these are all parameters, even those not selected: a difference
    in one casts doubt on the others.
    """
    if catalog.is_whole:
        return [p.name for p in catalog.declared.values() if len(p.holders) > 1]
    return [p.name for p in parameters if not p.is_declared and len(p.holders) > 1]


def per_rank_candidates(parameters: Sequence[Parameter], catalog: Catalog) -> list[str]:
    """Return the parameters that the strategy lists and of which each rank may have its own values.

    Running statistics, and counters of experts' load, are listed as any parameter that every rank
    holds whole, and no optimizer has states of them. They are small; larger ones are weights.
    """
    with_states = {p.base_name for p in catalog.declared.values() if p.state is not None}
    if not with_states or catalog.is_whole:
        return []
    return [
        p.name
        for p in parameters
        if p.is_declared
        and len(p.sharding.files) == 1 < len(p.holders)
        and p.state is None
        and p.name not in with_states
        and is_small(p)
    ]


def differing_values(
    catalog: Catalog, samples: DigestsByFile, names: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """Return which of `names` not all holders hold alike, each with two files that differ."""
    parameters_by_name, compared_names = {**catalog.undeclared, **catalog.declared}, set(names)
    first: dict[str, int] = {}
    files_by_name: dict[str, tuple[int, int]] = {}
    for file in sorted(samples):
        for name in (sample_name for sample_name in samples[file] if sample_name in compared_names):
            if samples[file][name] != samples[first.setdefault(name, file)][name]:
                files_by_name.setdefault(name, (first[name], file))
    for name in differing_shapes(catalog, first):
        files_by_name.setdefault(name, (first[name], parameters_by_name[name].holders[-1]))
    return files_by_name


@rule(SAMPLES)
def unlisted_values_agree(sample: SampledSource) -> Iterator[Finding | Evidence]:
    """A parameter that no strategy lists is the same on all ranks.

    One element may differ (a counter): a notice. More elements mean a parameter that was sharded,
    unless the source has a strategy and the request takes one rank's as it is. What a strategy
    lists may be ranks' own.
    """
    catalog, take_one, name_of = sample.catalog, sample.take_one, sample.name_of
    names = {*sample.undeclared_names, *sample.per_rank_names}
    all_differing = differing_values(catalog, sample.whole, names)
    differing = {n: files for n, files in all_differing.items() if n not in sample.per_rank_names}
    parameters_by_name = {**catalog.undeclared, **catalog.declared}
    large = [n for n in differing if _is_large(parameters_by_name[n])]
    other_names = [name_of(name) for name in parameters_by_name.keys() - {*large}]
    if large and catalog.is_whole:
        name = large[0]
        a, b = (catalog.paths[file] for file in differing[name])
        text = f"{name!r} is not the same in {a} and {b}, and --src-strategy none says that it is"
        tries = ("--src-strategy FILE of the job that wrote them",)
        suffix = f"; there are {len(large):,} such parameters" if large[1:] else ""
        details = f"they are shards, or replicas that differ{suffix}"
        yield Finding(Message(text, tries, details=details))
    elif large and not take_one:
        name = large[0]
        a, b = (catalog.paths[file] for file in differing[name])
        # Of a matrix, or experts, one rank's would be a part.
        leave = option_to_exclude(map(name_of, large), other_names)
        is_whole = all(len(parameters_by_name[n].shape) < 2 and "expert" not in n for n in large)
        take = "--unlisted take-one, which takes one rank's bytes as they are"
        yield Finding(
            Message(
                f"{catalog.declared_by} does not list {'it' if len(large) == 1 else 'these'}, and "
                f"{name!r} differs between {a} and {b}",
                (
                    f"{leave} leaves such tensors out",
                    take if is_whole else "give a strategy that lists it",
                ),
                summarize_names(large),
                "a frozen parameter is sharded without being listed, and how is not known",
            )
        )
    for name, (a_file, b_file) in differing.items():
        yield as_notice(
            f"{name!r} is in no strategy and differs between rank {catalog.rank_of(a_file)} and "
            f"rank {catalog.rank_of(b_file)}; each destination rank gets one source rank's, as "
            "with MindSpore"
        )
    per_rank_names = [name for name in all_differing if name in sample.per_rank_names]
    if per_rank_names:
        yield as_notice(
            f"{summarize_names(per_rank_names, 2)} differ between ranks, as running statistics do; "
            "each destination rank gets one source rank's"
        )
    compared = [
        (file, name) for file, digests in sample.whole.items() for name in digests if name in names
    ]
    yield Evidence(
        frozenset(all_differing),
        tuple(dict.fromkeys(name for _, name in compared)),
        sum(sample.sizes[file].nbytes(name) for file, name in compared),
    )


_NORM = pattern_on_use(r"norm|(?:^|[._])ln[_.\d]", re.IGNORECASE)
_OF_HEADS = pattern_on_use(r"(?:^|[._])[qk]_?(?:layer)?norm", re.IGNORECASE)
"""A norm of queries or keys is as long as a head, of which a rank may have one."""


@rule(SAMPLES)
def unlisted_tensors_are_no_slices(sample: SampledSource) -> Iterator[Finding]:
    """An unlisted tensor that is equal on all ranks is no slice.

    A bias of zeros is the same on every rank, and so are its slices. What tells is a matrix of its
    module whose rows the strategy shards: its own, or one behind which a norm stands, if its slices
    have as many rows. Other layers tell nothing.
    """
    if sample.take_one:
        return
    catalog, samples = sample.catalog, sample.whole
    rows_by_module: dict[str, list[tuple[str, int, int]]] = {}
    for matrix in catalog.declared.values():
        module, _, kind = matrix.name.rpartition(".")
        if kind != "weight" or len(matrix.shape) < 2 or not isinstance(matrix.grid, Grid):
            continue
        rows = matrix.grid.box((0,) * len(matrix.shape)).shape[0]
        if rows < matrix.shape[0]:
            weight = matrix.name, rows, matrix.shape[0]
            rows_by_module.setdefault(module, []).append(weight)
            rows_by_module.setdefault(f"{module.rpartition('.')[0]}.*", []).append(weight)
    constants = []
    for name in sample.undeclared_names:
        parameter = catalog.undeclared.get(name)
        if parameter is None or not _is_large(parameter):
            continue
        digests = [samples[f][name] for f in parameter.holders if name in samples.get(f, {})]
        if not digests or not all(digest.constant for digest in digests):
            continue
        constants.append(name)
        module, _, kind = name.rpartition(".")
        weights = rows_by_module.get(module, []) if kind == "bias" else []
        if _NORM().search(name) and not _OF_HEADS().search(name):
            above = module.rpartition(".")[0]
            weights = [*weights, *rows_by_module.get(f"{above}.*", [])]
        for matrix_name, rows, whole_rows in weights:
            if parameter.shape == (rows,):
                count = f"{rows:,} of {whole_rows:,} rows"
                yield as_warning(
                    f"{name!r}: {catalog.declared_by} does not list it, its {rows:,} elements are "
                    f"equal, and slices of {matrix_name!r} have {count}; is it one rank's slice?"
                )
                constants.pop()
                break
    if constants:
        count = format_count(len(constants), "unlisted tensor")
        yield as_notice(f"{count} of equal elements: whole ({summarize_names(constants, 3)})")


def differing_shapes(catalog: Catalog, names: Iterable[str]) -> list[str]:
    """Return those of the unlisted `names` whose shape is not the same in every file."""
    differing_names = []
    for name in names:
        shapes = {
            group.schema.shapes[group.schema.position[name]]
            for groups in catalog.groups
            for group in groups
            if name in group.schema.position
        }
        if len(shapes) > 1:
            differing_names.append(name)
    return differing_names


def is_small(parameter: Parameter) -> bool:
    """Tell whether a parameter may be compared whole because it is small."""
    return content_bytes(parameter.src_dtype, parameter.shape) <= _LARGEST_OWN


def _is_large(parameter: Parameter) -> bool:
    return prod(parameter.shape) > 1


def sharded_by_pattern(parameters: Sequence[Parameter], catalog: Catalog) -> list[str]:
    """Return the parameters that the source strategy shards, if that is a `PatternStrategy`."""
    if not catalog.declared_by.startswith(SHARD_PREFIX):
        return []
    return [p.name for p in parameters if p.is_declared and len(p.sharding.files) > 1]


def extra_to_sample(catalog: Catalog, extra: Mapping[int, Index]) -> list[str]:
    """Return a few listed parameters that a file beyond the strategy's ranks holds too."""
    extra_names = (name for index in extra.values() for name in index.schema.names)
    names = [name for name in extra_names if name in catalog.declared]
    step = max(1, len(names) // _SAMPLED)
    return names[::step][:_SAMPLED]


@rule(SAMPLES, ACCEPT_EXTRA_RANKS)
def extra_ranks_are_left_over(sample: SampledSource) -> Iterator[Finding]:
    """A rank beyond the strategy's holds no slices that no other rank has.

    Such a checkpoint was sharded by a strategy of more ranks.
    """
    catalog, samples = sample.catalog, sample.samples
    for rank, path in sample.extra_paths.items():
        for name, extra_digest in samples.get(rank, {}).items():
            holders = catalog.declared[name].holders
            if not extra_digest.constant and all(
                samples[r][name].digest != extra_digest.digest for r in holders
            ):
                yield Finding(
                    Message(
                        f"rank {rank} holds a slice of {name!r} that none of the ranks 0 to "
                        f"{catalog.ranks - 1} has",
                        (
                            "give the right strategy",
                            "--accept extra-ranks if these ranks are left over from another run",
                        ),
                        path,
                        f"{catalog.declared_by} describes only {catalog.ranks} ranks and is not "
                        "this checkpoint's",
                    )
                )
                return  # one such slice tells it


def samples_text(facts: Mapping[str, int | None]) -> str:
    """Say on what a source's strategy stands, by bytes that were compared."""
    percent, text = facts.get("percent"), format_count(facts.get("samples") or 0, "sample")
    text += f", of kinds that hold {percent} % of the bytes" if percent else ""
    return text + order_text(facts)


def order_text(numbers: Mapping[str, int | None]) -> str:
    """Say what of the order of the ranks no comparison of samples shows; "": nothing."""
    if numbers.get("ordered") == 0:
        return (
            "; no slice of a sharded weight is on two ranks: the order of the ranks was not checked"
        )
    number = numbers.get("exchangeable")
    return f"; {number:,} ranks could be exchanged with another unnoticed" if number else ""


@dataclass(frozen=True)
class ReplicaDifference:
    """Source ranks that should hold the same bytes of a parameter and do not.

    box: the region that they hold. groups: the ranks, grouped by equal bytes, the
    largest group first.
    """

    name: str
    box: Box
    groups: tuple[tuple[int, ...], ...]


def replicas_to_compare(catalog: Catalog, files: Iterable[int]) -> dict[int, list[str]]:
    """Return by file its entries of which another file should hold the same region."""
    names_by_file: dict[int, list[str]] = {file: [] for file in files}
    for parameter in catalog.parameters:
        for cell, holders in parameter.sharding.files.items():
            for file in holders if len(holders) > 1 else ():
                names_by_file[file].append(parameter.entry(cell, file))
    return names_by_file


def unequal_replicas(catalog: Catalog, samples: DigestsByFile) -> Iterator[ReplicaDifference]:
    """Yield where replicas differ."""
    for parameter in catalog.parameters:
        for cell, files in parameter.sharding.files.items():
            groups: dict[bytes, list[int]] = {}
            for file in files if len(files) > 1 else ():
                digest = samples[file][parameter.entry(cell, file)].digest
                groups.setdefault(digest, []).append(catalog.rank_of(file))
            if len(groups) > 1:
                ordered = sorted(map(tuple, groups.values()), key=lambda g: (-len(g), g))
                yield ReplicaDifference(parameter.name, parameter.grid.box(cell), tuple(ordered))
