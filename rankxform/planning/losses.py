"""What the source should hold and does not: in words, what matters first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from rankxform.errors import CheckpointError
from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box
from rankxform.layout.names import summarize_names

from .catalog import Catalog, Parameter
from .sharding import Sharding

Loss = tuple[Parameter, Box]
"""A region of a parameter that no file holds."""


def missing_slices(parameters: Iterable[Parameter]) -> dict[tuple[int, ...], list[Loss]]:
    """Return the slices that no source file holds, by the ranks that should hold them."""
    losses_by_ranks: dict[tuple[int, ...], list[Loss]] = {}
    for parameter in parameters:
        sharding = parameter.sharding
        if isinstance(sharding, Sharding):
            for cell, should in sharding.placement.lacking.items():
                loss = parameter, sharding.grid.box(cell)
                losses_by_ranks.setdefault(should, []).append(loss)
    return losses_by_ranks


def missing_slices_error(
    catalog: Catalog, parameters: Iterable[Parameter], ranks_by_name: Mapping[str, Sequence[int]]
) -> CheckpointError:
    """Return the error that names the ranks whose files are missing, and what only they hold.

    `parameters`: the needed ones of the catalog. `ranks_by_name`: needed names that no file has ->
    the ranks whose files are missing. Parameters come before optimizer states, and large losses
    before small ones.
    """
    states = catalog.states
    ordered = sorted(ranks_by_name, key=lambda name: (states.of(name) is not None, name))
    names = summarize_names(ordered, 2)
    label, searched = catalog.label, catalog.searched
    groups = missing_slices(parameters)
    if not groups:
        ranks = sorted({rank for missing in ranks_by_name.values() for rank in missing})
        return CheckpointError(
            f"{_ranks(ranks)} no file{searched}: no source file holds {names}",
            "bring the missing rank folders",
            "leave these parameters out (--exclude)",
            details=f"{label} places them on ranks whose files are not there: {_few(ranks)}",
        )
    should, losses = max(groups.items(), key=lambda group: sum(map(_nbytes, group[1])))
    parameter, box = max(losses, key=_weight)
    files = {catalog.rank_of(file): file for file in catalog.paths}
    missing = [rank for rank in should if rank not in files]
    missing_files = catalog.description.missing_files
    gone_files = [missing_files[rank] for rank in should if rank in missing_files]
    if gone_files:
        where = f"{gone_files[0]}: is not there"
    elif missing:
        where = f"{_ranks(missing)} no file"
    elif sum(catalog.rank_of(file) == should[0] for file in catalog.paths) > 1:
        where = f"rank {should[0]} lacks one of its files"
    else:
        where = f"{catalog.paths[files[should[0]]]}: is incomplete"
    also = f", and none of {names}" if names else ""
    count = len({rank for ranks in groups for rank in ranks}.difference(should))
    its, owner = ("their", "one of these ranks") if len(missing) > 1 else ("its", "the rank")
    other_losses_text = (
        f"slices of {count} more rank{'s' if count > 1 else ''} are lost too" if count else ""
    )
    bring = "that file" if gone_files else f"the folder of {owner}"
    return CheckpointError(
        f"{where}{searched}: no source file holds {len(losses):,} of {its} slices, "
        f"{_amount(sum(map(_nbytes, losses)))}, such as {box} of {parameter.src_name!r} ({label})"
        f"{also}",
        f"bring {bring}",
        "use another checkpoint",
        details=other_losses_text,
    )


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes:,} bytes"


def _weight(loss: Loss) -> tuple[bool, int]:
    parameter, box = loss
    return parameter.state is None, box.size


def _nbytes(loss: Loss) -> int:
    parameter, box = loss
    return prod(box.shape) * item_size(parameter.src_dtype)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {_few(ranks)} have"


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:12])) + (", ..." if len(ranks) > 12 else "")
