"""The strategy of a source that has none, from the configuration of the job that wrote it."""

from __future__ import annotations

from collections.abc import Mapping

from rankxform.checkpoints.base import Where
from rankxform.derivation.asked import source_request
from rankxform.derivation.mesh import Parallel
from rankxform.derivation.options import DeriveOptions
from rankxform.errors import UsageError
from rankxform.formats.base import Schema
from rankxform.layout.strategy import Strategy
from rankxform.publish.target import MANIFEST_NAME
from rankxform.source.choice import look_at
from rankxform.storage.index import Indexer
from rankxform.storage.store import address_of, store_at


def of_slices(where: Where, options: DeriveOptions) -> Strategy | None:
    """Derive how the files of ranks are sharded, by --src-config; None if they are no such files.

    So it is of one file, of a form that describes itself, and of what rankxform wrote. Raises
    UsageError, DerivationError, CheckpointError.
    """
    form, _, selected = look_at(where)
    own = where.files is None and store_at(where.path).has(MANIFEST_NAME)
    if form.described or own or len(selected.names) < 2:
        return None
    from rankxform.derivation.slices import derive_of_slices

    given = source_request(options)
    paths = {rank: address_of(where.path, name) for rank, name in selected.names.items()}
    schemas = of_stages(paths, given.dst, where.path)
    label = f"derived from {options.src_config} and the slices"
    return derive_of_slices(given, schemas, label).strategy


def of_stages(paths: Mapping[int, str], sizes: Parallel, where: str) -> dict[int, Schema]:
    """Return what one file of each pipeline stage holds, by rank; paths: of all ranks' files.

    Raises UsageError where these are not as many as the sizes make.
    """
    ranks = sizes.stage_size * sizes.pp
    if sorted(paths) != list(range(ranks)):
        raise UsageError(
            f"holds the files of {len(paths)} ranks, and {sizes} makes {ranks}",
            "give the configuration of the job that wrote it",
            where=where,
        )
    indexer = Indexer()
    first = [stage * sizes.stage_size for stage in range(sizes.pp)]
    return {rank: indexer.index(paths[rank]).schema for rank in first}
