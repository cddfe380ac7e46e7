"""What is doubtful in what a request makes of a source, and what to know of it.

Pure, and the same on every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, DestinationFiles
from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.facts import (
    HEADER,
    ITERATION,
    OPTION,
    SCALAR,
    SHAPE,
    STRATEGY,
    Statement,
    contradictions,
)
from rankxform.formats.checkpoint2 import CONSUMED
from rankxform.layout.names import format_ranges, summarize_names
from rankxform.layout.states import States, is_never_saved, state_of_name
from rankxform.layout.strategy import Strategy
from rankxform.ops.base import OperationChain, Tensor
from rankxform.ops.counters import is_added
from rankxform.ops.drop import patterns_without_match
from rankxform.ops.naming import AS_STORED
from rankxform.ops.rename import rules_without_match
from rankxform.ops.weights import NOT_WEIGHTS, copies_pattern
from rankxform.options import flag_of
from rankxform.planning.catalog import Catalog
from rankxform.planning.consistency import Evidence, sharded_by_pattern
from rankxform.planning.selection import Selection
from rankxform.planning.unusual import types_by_file, unusual_tensors
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.source.options import ACCEPT_ABSENT
from rankxform.storage.maps import CONFIG

from .asked import ResolvedRequest
from .operation_inputs import OperationInputs, assumptions, map_operation
from .training import training_notices, training_step

_ADAPTER = "lora"
"""What is in the names of an adapter's tensors."""


def target_findings(
    resolved: ResolvedRequest,
    source: Source,
    selection: Selection,
    derivation: OperationChain,
    tensors: Sequence[Tensor],
) -> Evidence:
    """Return what to know, and patterns that match nothing."""
    request, operation = resolved.request, resolved.operation
    matchless = [*_matchless(request, source.table, derivation, tensors)]
    _check_numbered(request, tensors, source.table.states)
    added, doubts = _compositions(source, derivation)
    return Evidence(
        notices=(
            *_remarks(request, source, selection, operation),
            *_without_effect(request, tensors),
            *assumptions(request, operation, derivation),
            *(text for option, text in matchless if option == "exclude"),
            *added,
        ),
        warnings=(
            *(text for option, text in matchless if option != "exclude"),
            *doubts,
            *_like_states(source.table.states, tensors),
            *_unusual(source.table, tensors),
            *resolved.doubts,
        ),
    )


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
            text, operation_doubts = operation.remarks([p.name for p in source.table.parameters])
            notices += [text] if text else []
            doubts += operation_doubts
    return notices, doubts


def _remarks(
    request: Request, source: Source, selection: Selection, operation: OperationInputs
) -> Iterator[str]:
    """Yield what to know of the source's patterns, and of what the destination's form lacks."""
    by_pattern = sharded_by_pattern(selection.sources(source.table), source.table)
    if by_pattern:
        yield f"{source.table.label} shards {summarize_names(by_pattern)}"
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


def check_absent_weights(request: Request, source: Source, derivation: OperationChain) -> Evidence:
    """Refuse a source of which a weight is listed and in no file.

    Optimizer states, counters, and what MindFormers never saves, are no weights. An adapter's files
    alone are what `save_trainable_only` leaves. Raises CheckpointError.
    """
    catalog, strategy = source.table, source.table.strategy
    if strategy is None or catalog.is_whole:
        return Evidence()
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
        return Evidence()
    weights = [name for name in strategy.stages_of if states.is_weight(name)]
    count = f"{len(absent)} of {len(weights)} weights"
    if present_names and all(_ADAPTER in n or not states.is_weight(n) for n in present_names):
        text = (
            f"{source.where.path}: holds an adapter alone, and {count} that {strategy.label} lists"
        )
        return Evidence(notices=(f"{text} are in no file",))
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
    return Evidence(warnings=(text,))


def check_naming(
    request: Request, operation: OperationInputs, source: Source, derivation: OperationChain
) -> None:
    """Refuse to give a Hugging Face folder other names than Hugging Face's. Raises UsageError."""
    form, mapping = FORMS[request.dst_form or DEFAULT_FORM], map_operation(operation, derivation)
    if mapping is None or not form.configured:
        return
    from rankxform.formats.map_toml import HUGGINGFACE

    names = [p.name for p in source.table.parameters if p.state is None]
    if mapping.knows(names) and mapping.side_of(names) == HUGGINGFACE:
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
        raise RequestError.of_parts(contradiction.parts)


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
