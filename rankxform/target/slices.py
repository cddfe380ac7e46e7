"""The strategy of a source that has none, from the configuration of the job that wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from rankxform.checkpoints.base import CheckpointRef
from rankxform.derivation.inputs import source_request
from rankxform.derivation.options import DeriveOptions
from rankxform.derivation.request import Derived, DeriveRequest
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import Schema
from rankxform.layout.names import compile_regex, format_ranges, summarize_names
from rankxform.planning.sampling import may_repeat
from rankxform.publish.folder_records import MANIFEST_NAME
from rankxform.source.place import list_and_select
from rankxform.storage.source_reader import digest_samples, index_file
from rankxform.storage.store import address_of


def derive_from_slices(
    where: CheckpointRef, options: DeriveOptions, exclude: Sequence[str]
) -> Derived | None:
    """Derive how the files of ranks are sharded, by --src-config; None if they are no such files.

    So it is of one file, of a form that describes itself, and of what rankxform wrote. exclude:
    expressions of what is not converted. Raises UsageError, DerivationError, CheckpointError.
    """
    if where.files is not None:
        return None
    place = list_and_select(where)
    listing, selected = place.listing, place.selected
    has_manifest = listing is not None and MANIFEST_NAME in (*listing.entries, *listing.files)
    if place.form.described or has_manifest or selected.rank_count < 2:
        return None
    if selected.ranks:
        raise UsageError(
            "each rank has several files, of which no strategy is derived",
            "--src-strategy FILE or FOLDER of the job that wrote them",
            where=where.path,
        )
    derive_request = source_request(options)
    paths = {rank: address_of(where.path, name) for rank, name in selected.names.items()}
    label = f"derived from {options.src_config} and the slices"
    return derived_of(derive_request, paths, where.path, label, exclude)


def derived_of(
    derive_request: DeriveRequest,
    paths: Mapping[int, str],
    where: str,
    label: str,
    exclude: Sequence[str] = (),
) -> Derived:
    """Derive how files are sharded; paths: of all ranks' files, where: what messages call them.

    Raises UsageError where these are not as many as the sizes make, DerivationError.
    """
    from rankxform.derivation.slices import SliceBytes, derive_of_slices

    sizes = derive_request.dst
    ranks = sizes.ranks
    missing = sorted({*range(ranks)} - {*paths})
    if missing and missing[0] < max(paths) < ranks and 2 * len(missing) < ranks:  # some between
        raise CheckpointError(
            f"rank {format_ranges(missing)} has no file",
            "bring the folder of the rank",
            where=where,
        )
    if {*paths}.symmetric_difference(range(ranks)):
        raise UsageError(
            f"holds the files of {len(paths)} ranks, and {sizes} makes {ranks}",
            "give the configuration of the job that wrote it",
            *(("bring the folders of the other ranks",) if missing else ()),
            where=where,
        )
    index_of = cache(lambda rank: index_file(paths[rank]))
    first = [stage * sizes.stage_size for stage in range(sizes.pp)]
    excluded_patterns = [compile_regex(text, "--exclude") for text in exclude]
    schemas = {rank: _without(index_of(rank).schema, excluded_patterns) for rank in first}
    names_of = {rank: {*schema.names} for rank, schema in schemas.items()}
    for rank, names in names_of.items():
        last = rank + sizes.stage_size - 1  # of another stage, if there are more than are said
        differing = names ^ {*_without(index_of(last).schema, excluded_patterns).names}
        copies = [r for r in first if r > rank and names_of[r] == names]
        if differing or copies:
            wrong, stages = (
                f"{rank} and {min(copies, default=0)} hold the same parameters",
                "two pipeline stages",
            )
            if differing:
                wrong = f"{rank} and {last} do not both hold {summarize_names(differing, 2)}"
                stages = "one pipeline stage"
            raise UsageError(
                f"ranks {wrong}, and {sizes} makes them {stages}",
                "correct pp (pipeline_stage), or give the configuration of the job that wrote it",
                where=where,
            )

    def holds_same(name: str, a: int, b: int) -> bool | None:
        stage = next(rank for rank in first if name in schemas[rank].position)
        ranks = stage + a, stage + b
        digests = [digest_samples(paths[r], index_of(r), [name]).get(name) for r in ranks]
        digest_a, digest_b = digests
        if digest_a is None or digest_b is None or digest_a.constant or digest_b.constant:
            return None  # not there: the other is a rank of another stage
        return digest_a.digest == digest_b.digest

    return derive_of_slices(derive_request, schemas, label, SliceBytes(holds_same, may_repeat))


def _without(schema: Schema, excluded_patterns: Sequence[re.Pattern[str]]) -> Schema:
    specs = zip(schema.names, schema.dtypes, schema.shapes)
    remaining_specs = [
        spec for spec in specs if not any(pattern.search(spec[0]) for pattern in excluded_patterns)
    ]
    names, dtypes, shapes = zip(*remaining_specs) if remaining_specs else ((), (), ())
    return Schema(names, dtypes, shapes)
