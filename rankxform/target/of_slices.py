"""The strategy of a source that has none, from the configuration of the job that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from rankxform.checkpoints.base import Where
from rankxform.derivation.asked import source_request
from rankxform.derivation.options import DeriveOptions
from rankxform.derivation.request import Derived, DeriveRequest
from rankxform.errors import UsageError
from rankxform.layout.strategy import Strategy
from rankxform.publish.target import MANIFEST_NAME
from rankxform.source.choice import look_at
from rankxform.storage.index import index
from rankxform.storage.samples import sample
from rankxform.storage.store import address_of


def of_slices(where: Where, options: DeriveOptions) -> Strategy | None:
    """Derive how the files of ranks are sharded, by --src-config; None if they are no such files.

    So it is of one file, of a form that describes itself, and of what rankxform wrote. Raises
    UsageError, DerivationError, CheckpointError.
    """
    if where.files is not None:
        return None
    form, listing, selected = look_at(where)
    own = MANIFEST_NAME in (*listing.entries, *listing.files)
    if form.described or own or len(selected.names) < 2:
        return None
    given = source_request(options)
    paths = {rank: address_of(where.path, name) for rank, name in selected.names.items()}
    label = f"derived from {options.src_config} and the slices"
    return derived_of(given, paths, where.path, label).strategy


def derived_of(given: DeriveRequest, paths: Mapping[int, str], where: str, label: str) -> Derived:
    """Derive how files are sharded; paths: of all ranks' files, where: what messages call them.

    Raises UsageError where these are not as many as the sizes make, DerivationError.
    """
    from rankxform.derivation.slices import derive_of_slices

    sizes = given.dst
    ranks = sizes.stage_size * sizes.pp
    if {*paths}.symmetric_difference(range(ranks)):
        raise UsageError(
            f"holds the files of {len(paths)} ranks, and {sizes} makes {ranks}",
            "give the configuration of the job that wrote it",
            where=where,
        )
    index_of = cache(lambda rank: index(paths[rank]))
    first = [stage * sizes.stage_size for stage in range(sizes.pp)]
    schemas = {rank: index_of(rank).schema for rank in first}

    def holds_same(name: str, a: int, b: int) -> bool | None:
        stage = next(rank for rank in first if name in schemas[rank].position)
        ranks = stage + a, stage + b
        seen = [sample(paths[r], index_of(r), [name], _quiet)[name] for r in ranks]
        return None if any(one.constant for one in seen) else seen[0].digest == seen[1].digest

    return derive_of_slices(given, schemas, label, holds_same)


def _quiet(nbytes: int) -> None:
    """Report no progress: a few kilobytes are read."""
