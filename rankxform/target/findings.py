"""What is doubtful in a target, and what else may be meant.

Pure, and the same on every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, DestinationFiles
from rankxform.errors import (
    CheckpointError,
    Message,
    RankxformError,
    RequestError,
    StrategyError,
    UsageError,
)
from rankxform.formats.checkpoint2_metadata import CONSUMED
from rankxform.layout.names import format_ranges, summarize_names
from rankxform.layout.states import States, is_never_saved, state_of_name
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.operations.base import OperationChain, Tensor
from rankxform.operations.rename import AS_STORED, rules_without_match
from rankxform.operations.select import (
    NOT_WEIGHTS,
    copies_pattern,
    is_added,
    patterns_without_match,
)
from rankxform.options import flag_of
from rankxform.planning.build_catalog import catalog_of
from rankxform.planning.catalog import Catalog, Description
from rankxform.planning.evidence import sharded_by_pattern
from rankxform.planning.selection import Selection, types_by_file, unusual_tensors
from rankxform.request import Request
from rankxform.source.choose import earlier_step, ranks_at
from rankxform.source.hints import option_for, short_path
from rankxform.source.open import Source
from rankxform.source.options import ACCEPT_ABSENT, ACCEPT_EXTRA_RANKS
from rankxform.statements import (
    HEADER,
    ITERATION,
    OPTION,
    PLAN,
    SCALAR,
    SHAPE,
    STRATEGY,
    Finding,
    Statement,
    as_notice,
    as_warning,
    contradictions,
)
from rankxform.storage.store import is_path
from rankxform.storage.user_files import (
    CONFIG,
    load_readable,
    path_of,
    read_strategy_file,
    strategies_near,
)
from rankxform.transport import Team

from .inputs import ResolvedRequest
from .operation_inputs import (
    OperationInputs,
    assumptions,
    map_operation,
    name_map,
    read_operation_inputs,
)
from .target import training_notices, training_step

_ADAPTER = "lora"
"""What is in the names of an adapter's tensors."""


def target_findings(
    resolved: ResolvedRequest,
    source: Source,
    selection: Selection,
    derivation: OperationChain,
    tensors: Sequence[Tensor],
) -> Iterator[Finding]:
    """Yield what to know, and patterns that match nothing."""
    request, operation = resolved.request, resolved.operation
    catalog = source.require_catalog()
    matchless = [*_matchless(request, catalog, derivation, tensors)]
    _check_numbered(request, tensors, catalog.states)
    added, doubts = _compositions(source, derivation)
    notices = (
        *_remarks(request, source, selection, operation),
        *_without_effect(request, tensors),
        *assumptions(request, operation, derivation),
        *(text for option, text in matchless if option == "exclude"),
        *added,
    )
    warnings = (
        *(text for option, text in matchless if option != "exclude"),
        *doubts,
        *_like_states(catalog.states, tensors),
        *_unusual(catalog, tensors),
        *resolved.doubts,
    )
    yield from (as_notice(text, PLAN) for text in notices)
    yield from (as_warning(text, PLAN) for text in warnings)


def _check_numbered(request: Request, tensors: Sequence[Tensor], states: States) -> None:
    """Refuse to take numbered states for weights. Raises RequestError."""
    names = [t.name for t in tensors if t.name in states.numbered and not t.dropped]
    weights = [name for name in names if states.is_weight(name)]
    if request.weights_only and weights:
        family_patterns = dict.fromkeys(map(_family_expression, weights))
        raise RequestError(
            f"{summarize_names(weights, 2)} are named like optimizer states, by numbers that "
            "are no parameter's name",
            f"--exclude {quote('|'.join(family_patterns))} to leave them out",
        )


def _family_expression(name: str) -> str:
    """Return an expression for all numbered states that have a state's prefix or suffix."""
    state = state_of_name(name)
    assert state is not None
    return rf"^{re.escape(state.before)}\d+{re.escape(state.after)}$"


def _like_states(states: States, tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield which tensors may be states of parameters that are not there."""
    written = {source.name for tensor in tensors if not tensor.dropped for source in tensor.sources}
    for family, names in states.unrelated.items():
        unrelated_names = [name for name in names if name in written]
        if unrelated_names:
            yield (
                f"{summarize_names(unrelated_names, 2)}: named like the states {family}, but "
                "belong to no "
                "parameter of their shape; converting them as weights"
            )
    numbered = [name for name in states.numbered if name in written]
    if numbered:
        yield (
            f"{summarize_names(numbered, 2)}: states by number, which name no parameter; they keep "
            "these names and are sharded by them alone"
        )


def _unusual(catalog: Catalog, tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield which of the tensors that are converted are hardly weights."""
    written = [tensor for tensor in tensors if not tensor.dropped and tensor.is_weight]
    sources = {source.name for tensor in written for source in tensor.sources}
    shapes = {p.name: p.shape for p in catalog.parameters if p.name in sources and p.is_weight}
    yield from unusual_tensors(shapes, [tensor.name for tensor in written])
    yield from types_by_file(catalog)


def _without_effect(request: Request, tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield options that change nothing, and copies that an option leaves alone."""
    if request.weights_only and not any(tensor.dropped == NOT_WEIGHTS for tensor in tensors):
        yield "--weights-only leaves nothing out: there is no optimizer state and no counter"
    written = [tensor for tensor in tensors if not tensor.dropped]
    unrenamed_tensors = [t for t in written if [t.name] == [source.name for source in t.sources]]
    if request.names != AS_STORED and len(unrenamed_tensors) == len(written):
        yield f"--names {request.names} changes no name"
    copies = [t for t in tensors if t.related and t.related.is_copy and not t.dropped]
    if copies and request.dtype is not None:
        pattern = copies_pattern(copies)
        yield (
            f"{summarize_names([copy.name for copy in copies], 2)} repeat other tensors' names and "
            f"shapes and keep their type; --cast-states {quote(pattern)} casts them too"
        )


def _compositions(source: Source, derivation: OperationChain) -> tuple[list[str], list[str]]:
    """Return what adapters are added to and maps applied to, and what is doubtful in that."""
    notices, doubts = list[str](), list[str]()
    for operation in derivation.compositions:
        if hasattr(operation, "remarks"):
            text, operation_doubts = operation.remarks(
                [p.name for p in source.require_catalog().parameters]
            )
            notices += [text] if text else []
            doubts += operation_doubts
    return notices, doubts


def _remarks(
    request: Request, source: Source, selection: Selection, operation: OperationInputs
) -> Iterator[str]:
    """Yield what to know of the source's patterns, and of what the destination's form lacks."""
    catalog = source.require_catalog()
    by_pattern = sharded_by_pattern(selection.sources(catalog), catalog)
    if by_pattern:
        yield f"{catalog.declared_by} shards {summarize_names(by_pattern)}"
    yield from training_notices(
        request, source, [parameter.name for parameter in selection.parameters]
    )
    form = FORMS[request.dst_form or DEFAULT_FORM]
    mapped = operation.table is not None
    if form.configured and not source.form.configured and CONFIG not in operation.companions:
        names = "" if mapped else "tensors keep their names, and "
        yield (
            f"{names}the destination gets no config.json; for a model that Transformers reads, "
            f"give {'' if mapped else '--map and '}--like"
        )


def check_absent_weights(
    request: Request, source: Source, derivation: OperationChain
) -> Iterator[Finding]:
    """Yield which weights are listed and in no file. Raises CheckpointError if one is not accepted.

    Optimizer states, counters, and what MindFormers never saves, are no weights. An adapter's files
    alone are what `save_trainable_only` leaves. Raises CheckpointError.
    """
    catalog, strategy = source.require_catalog(), source.require_catalog().strategy
    if strategy is None or catalog.is_whole:
        return
    schemas = {id(index.schema): index.schema for index in source.indexes.values()}
    present_names = {name for schema in schemas.values() for name in schema.names}
    states = catalog.states
    absent = [
        name
        for name, stages in strategy.stages_of.items()
        if name not in present_names
        and states.is_weight(name)
        and not is_never_saved(name)
        and any(catalog.groups[stage] for stage in stages)
        and not derivation.drops(name)
    ]
    if not absent:
        return
    weights = [name for name in strategy.stages_of if states.is_weight(name)]
    count = f"{len(absent)} of {len(weights)} weights"
    if present_names and all(_ADAPTER in n or not states.is_weight(n) for n in present_names):
        text = (
            f"{source.where.path}: holds an adapter alone, and {count} that {strategy.label} lists"
        )
        yield as_notice(f"{text} are in no file", PLAN)
        return
    refused = [name for name in absent if not request.accepts(ACCEPT_ABSENT, name)]
    stages = sorted({stage for name in refused or absent for stage in strategy.stages_of[name]})
    ranks = format_ranges([rank for stage in stages for rank in strategy.ranks_in(stage)])
    text = (
        f"{source.where.path}: no file holds {summarize_names(refused or absent, 3)}, which "
        f"{strategy.label} lists on ranks {ranks} ({count})"
    )
    if refused:
        raise CheckpointError(
            f"{text}",
            "bring the files that do",
            "leave them out (--exclude)",
            "say --accept absent if they are to be missing",
        )
    yield as_warning(text, PLAN)


def check_naming(
    request: Request, operation: OperationInputs, source: Source, derivation: OperationChain
) -> None:
    """Refuse to give a Hugging Face folder other names than Hugging Face's. Raises UsageError."""
    form, mapping = FORMS[request.dst_form or DEFAULT_FORM], map_operation(operation, derivation)
    if mapping is None or not form.configured:
        return
    from rankxform.formats.map_table import HUGGINGFACE

    names = [p.name for p in source.require_catalog().parameters if p.state is None]
    if mapping.knows(names) and mapping.naming_of(names) == HUGGINGFACE:
        raise UsageError(
            f"{source.where.path} has Hugging Face's names already, and "
            f"{mapping.table.label} would give it MindFormers' in a {form.title} folder",
            "leave out --map",
        )


def check_shapes(source: Source, selection: Selection, dst: Strategy) -> None:
    """Refuse a destination's strategy that states other full shapes than the tensors have."""
    statements = (
        fact
        for name, parameter in selection.sharded.items()
        if name in dst.shapes
        for fact in (
            Statement(SHAPE, name, parameter.shape, HEADER, source.where.path),
            Statement(SHAPE, name, dst.shapes[name], STRATEGY, dst.label),
        )
    )
    for contradiction in contradictions(statements):
        raise RequestError.of_parts(contradiction.finding.message)


def iteration_statements(
    source: Source, training: Mapping[str, Any], arrangement: DestinationFiles
) -> Iterator[Statement]:
    """Yield how far the training was, by the source, and by the number that is written."""
    step = training_step(training)
    if arrangement.mark is None or step is None:
        return
    yield Statement(ITERATION, "", frozenset({step}), SCALAR, source.where.path)
    number = int(arrangement.mark[1])
    yield Statement(ITERATION, "", frozenset({number}), OPTION, f"--iteration {number}")


def _matchless_types(request: Request, tensors: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    """Yield patterns of types that match nothing of which the type would change or stay."""
    written = [tensor.name for tensor in tensors if not tensor.dropped]
    states = [t.name for t in tensors if not t.dropped and (t.related or not t.is_weight)]
    for option, names, kind_text in (
        ("keep_dtype", written, "parameter"),
        ("cast_states", states, "optimizer state or counter"),
    ):
        for pattern in patterns_without_match(getattr(request, option), names):
            yield option, f"{flag_of(option)} {pattern!r} matches no {kind_text}"


def _matchless(
    request: Request, catalog: Catalog, derivation: OperationChain, tensors: Sequence[Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield options, and texts on their patterns that match no parameter of files or strategy."""
    yield from _matchless_types(request, tensors)
    if not (request.rename or request.include or request.exclude):
        return
    src_names = [parameter.name for parameter in catalog.parameters]
    src_names += catalog.strategy.stages_of if catalog.strategy is not None else ()
    names = set(map(derivation.name_of, src_names))
    if derivation.renames:  # a source tensor that is left out keeps its name
        names = {tensor.name for tensor in tensors}
    states = catalog.states
    for rule in rules_without_match(request.rename, map(states.base_name, src_names)):
        yield (
            "rename",
            f"--rename {rule!r} renames nothing: no parameter matches it (an optimizer state is "
            "matched without its prefix, such as adam_m.)",
        )
    names |= {CONSUMED, *(tensor.name for tensor in tensors if is_added(tensor))}
    for option in ("include", "exclude"):
        for pattern in patterns_without_match(getattr(request, option), names):
            yield option, f"--{option} {pattern!r} matches no parameter"


# A guess never goes before a fact that it may hide, and is looked for only where a check fails.
# Ranks beyond the strategy make it likelier than the check's own words, and it is said first;
# fewer ranks may be lost ones, and it is said last.

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
        return _find_suggestion(request, source, dst)
    return None


def _find_suggestion(request: Request, source: Source, dst: object) -> _Suggestion | None:
    """Return what may be meant."""
    if request.map is not None and (suggestion := _other_map(request, source)) is not None:
        return suggestion
    if request.map is None and (suggestion := _missing_map(request, source, dst)) is not None:
        return suggestion
    src = source.where.strategy if request.src_strategy is not None else None
    unreadable = any(error.file is not None for error in source.errors[:1])
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
    names = [parameter.name for parameter in source.require_catalog().parameters]
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
    from rankxform.storage import user_files

    tensors = [Tensor.of(p.name, p.src_dtype, p.shape) for p in source.require_catalog().parameters]
    fitting_names = []
    for name in filter(None, (request.map, *user_files.map_names())):
        with suppress(RankxformError):
            map_request = replace(request, map=name)
            mapping = name_map(map_request, read_operation_inputs(map_request, source.where.path))
            composed_tensors = mapping.compose(tensors) if mapping is not None else []
            if any(dst is None or tensor.name in dst for tensor in composed_tensors):
                fitting_names.append(name)
    return list(dict.fromkeys(fitting_names))


def _fits(strategy: Strategy, source: Source) -> bool:
    """Tell whether the headers of a source's files fit a strategy."""
    schemas = {
        file: index.schema for file, index in {**source.indexes, **source.extra_rank_index}.items()
    }
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
