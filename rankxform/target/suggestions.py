"""What else than the given strategies may be meant, where a check fails."""

# A guess never goes before a fact that it may hide, and is looked for only where a check fails.
# Ranks beyond the strategy make it likelier than the check's own words, and it is said first;
# fewer ranks may be lost ones, and it is said last.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from rankxform.errors import (
    CheckpointError,
    Message,
    RankxformError,
    RequestError,
    StrategyError,
)
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.ops.base import Tensor
from rankxform.planning.description import Description
from rankxform.planning.table import catalog_of
from rankxform.request import Request
from rankxform.source.choice import earlier_step, ranks_at
from rankxform.source.hints import option_for, short_path
from rankxform.source.opening import Source
from rankxform.source.options import ACCEPT_EXTRA_RANKS
from rankxform.storage.store import is_path
from rankxform.storage.strategies import load_readable, path_of, read_strategy_file, strategies_near
from rankxform.transport import Team

from .asked import ResolvedRequest
from .operation_inputs import name_map, read_operation_inputs

_LOOKED_AT = 100
"""Files of a folder that are looked at for another strategy."""


@contextmanager
def adding_suggestions(resolved: ResolvedRequest, source: Source, team: Team) -> Iterator[None]:
    """Where a check fails, say what else than the given strategies may be meant, if anything.

    Around what fails on every process alike; process 0 looks for other strategies only then.
    """
    try:
        yield
    except (CheckpointError, StrategyError, RequestError) as error:
        suggestion = team.bcast(lambda: _meant_if_readable(resolved.request, source, resolved.dst))
        if suggestion is not None:
            error.say(suggestion.added_to(error.parts))
        raise


class _Suggestion(NamedTuple):
    """What may be meant: what was found ("": nothing more), what to try, and whether that is
    likelier than what the error says."""

    message: str
    tries: tuple[str, ...]
    first: bool = True

    def added_to(self, parts: Message) -> Message:
        """Return what an error says with this."""
        if self.first and self.message:
            return Message(self.message, self.tries, details=str(parts._replace(details="")))
        if self.first:
            return parts._replace(tries=(*self.tries, *parts.tries))
        details = "\n".join(filter(None, (parts.details, self.message)))
        return parts._replace(tries=(*parts.tries, *self.tries), details=details)


def _meant_if_readable(request: Request, source: Source, dst: object) -> _Suggestion | None:
    with suppress(RankxformError, OSError):  # the check's own error is what counts
        return _meant(request, source, dst)
    return None


def _meant(request: Request, source: Source, dst: object) -> _Suggestion | None:
    """Return what may be meant."""
    if request.map is not None and (suggestion := _other_map(request, source)) is not None:
        return suggestion
    if request.map is None and (suggestion := _missing_map(request, source, dst)) is not None:
        return suggestion
    src = source.where.strategy if request.src_strategy is not None else None
    unreadable = any(fault.file is not None for fault in source.faults[:1])
    if unreadable and source.listing is not None:
        earlier = earlier_step(source.form, source.where, source.listing, source.selected)
        if earlier is not None:
            step = f"--step {earlier}, an earlier one of which all ranks have files"
            return _Suggestion("", (step,), first=False)
    if source.form.described or request.files is not None or not source.paths or unreadable:
        return None
    if src is None:
        src = WholeStrategy()
    ranks = source.selected.rank_count
    src_path = path_of(request.src_strategy)
    fits = ranks == src.ranks or (request.accepts(ACCEPT_EXTRA_RANKS) and ranks > src.ranks)
    if src_path is not None and not fits:
        suggestion = _other_strategy(request, source, src_path, src, dst)
        if suggestion is not None:  # fewer ranks may be lost ones as well
            return suggestion._replace(first=ranks > src.ranks)
    return _stage_file(request.dst_strategy, "--dst-strategy")


def _other_map(request: Request, source: Source) -> _Suggestion | None:
    """Return which maps fit the source's tensors, where the given one does not."""
    if source.catalog is None or request.map in (fitting := _fitting_maps(request, source)):
        return None
    return _Suggestion("", tuple(f"--map {name}" for name in fitting)) if fitting else None


def _missing_map(request: Request, source: Source, dst: object) -> _Suggestion | None:
    """Return which maps give the source's tensors names of the destination, where it has none."""
    if source.catalog is None or not isinstance(dst, Strategy) or isinstance(dst, WholeStrategy):
        return None
    if request.rename:
        return None
    names = [parameter.name for parameter in source.table.parameters]
    if any(name in dst for name in names):
        return None
    fitting = tuple(f"--map {name}" for name in _fitting_maps(request, source, dst))
    if not fitting:
        return None
    example_text = f"such as {names[0]}"
    return _Suggestion(
        f"none of the {len(names)} names of SRC is in {dst.label} ({example_text})", fitting
    )


def _fitting_maps(request: Request, source: Source, dst: Strategy | None = None) -> list[str]:
    """Return the maps that fit all of the source's tensors, and make some that `dst` lists."""
    from rankxform.storage import maps

    tensors = [Tensor.of(p.name, p.src_dtype, p.shape) for p in source.table.parameters]
    fitting_names = []
    for name in filter(None, (request.map, *maps.map_names())):
        with suppress(RankxformError):
            map_request = replace(request, map=name)
            mapping = name_map(map_request, read_operation_inputs(map_request, source.where.path))
            composed_tensors = mapping.compose(tensors) if mapping is not None else []
            if any(dst is None or tensor.name in dst for tensor in composed_tensors):
                fitting_names.append(name)
    return list(dict.fromkeys(fitting_names))


def _fits(strategy: Strategy, source: Source) -> bool:
    """Tell whether the headers of a source's files fit a strategy."""
    schemas = {file: index.schema for file, index in {**source.indexes, **source.extra}.items()}
    with suppress(RankxformError):
        description = Description(strategy.label, strategy)
        catalog_of(description, schemas, source.paths, range(strategy.ranks))
        return True
    return False


def _other_strategy(
    request: Request, source: Source, src_path: Path, src: Strategy, dst: object
) -> _Suggestion | None:
    ranks = source.selected.rank_count
    counts = f"{src.label} is of {src.ranks} ranks, and the checkpoint has {ranks}"
    if request.dst is not None and _ranks_in(Path(request.dst)) == src.ranks:
        tries = ["exchange SRC and DST"]
        if isinstance(dst, Strategy) and dst.ranks == ranks:  # either pair may be meant
            tries.insert(0, "exchange --src-strategy and --dst-strategy")
        return _Suggestion(f"{counts}; {request.dst} has {src.ranks}", tuple(tries))
    around = load_readable([src_path.parent]) if src_path.is_file() else []
    stages = [candidate for candidate in around if candidate[1].ranks == ranks]
    if stages:
        return _Suggestion(counts, (option_for(*stages[0]),))
    if isinstance(dst, Strategy) and dst.ranks == ranks:
        exchange_text = "exchange --src-strategy and --dst-strategy"
        return _Suggestion(f"{counts}, as many as {dst.label} is of", (exchange_text,))
    candidates = strategies_near(Path(request.src), ranks) if is_path(request.src) else []
    if not candidates:  # under any name where the given one lies
        candidates = load_readable(sorted(src_path.parent.iterdir())[:_LOOKED_AT])
    fitting = [c for c in candidates if c[1].ranks == ranks and _fits(c[1], source)]
    if fitting:
        return _Suggestion(counts, (option_for(*fitting[0]),))
    if ranks > src.ranks:
        advice_text = f"give the strategy of all {ranks} ranks, such as a folder of all stages"
        return _Suggestion(counts, (advice_text,))
    return None


def _stage_file(strategy: str | Strategy | None, flag: str) -> _Suggestion | None:
    """Return what to do if a strategy's file is of one pipeline stage of several; else None."""
    path = path_of(strategy)
    if path is None or not path.is_file() or (record := read_strategy_file(path)).merged:
        return None
    for folder, job_strategy in load_readable([path.parent]):
        if len(job_strategy.stages) > 1:
            return _Suggestion(
                f"{path} is of pipeline stage {record.stage} alone",
                (f"{flag} {quote(short_path(folder))} (found there: {job_strategy.extent})",),
            )
    return None


def _ranks_in(folder: Path) -> int:
    """Return how many ranks the rank folders there are of; 0 if there are none."""
    with suppress(RankxformError, OSError):
        return ranks_at(folder)
    return 0
