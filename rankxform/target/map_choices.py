"""What a map takes that no file records: told by names and forms, and compared with a reference's.

No file records whether q, k and v lie in groups, nor whether gate and up are interleaved. A model
that was trained on from a published one is still close to it: taken apart in the right way, its
tensors correlate with the published ones, and in any other way they do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.engine.copier import correlation, read_as_float64
from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.container import FLOATS
from rankxform.formats.map_table import HUGGINGFACE, MINDFORMERS
from rankxform.geometry.box import Box
from rankxform.layout.names import first_texts, natural_sort_key, pattern_of
from rankxform.layout.strategy import Strategy
from rankxform.operations.base import OPERATIONS, OperationChain, Tensor
from rankxform.operations.map import NameMap, requested_variants
from rankxform.options import flag_of
from rankxform.planning.catalog import Catalog, Parameter
from rankxform.planning.selection import ParameterFactory, apply_operations
from rankxform.request import Request
from rankxform.statements import ACCEPT_CONTRADICTIONS, quote
from rankxform.storage.source_reader import SourceReader
from rankxform.transport import Team

from .inputs import ResolvedRequest

if TYPE_CHECKING:
    from rankxform.source.source import Source

    from .target import Conversion


def settle_map(resolved: ResolvedRequest, source: Source) -> Request:
    """Return the request with what names and forms tell of a map: variants, and how tensors join.

    Variants are told by the names that are there: the source's, or those that the destination's
    strategy lists. Joining is told by the form whose tensors are joined, the source's or the
    destination's: MindFormers joins them as its defaults say, Megatron otherwise, and other forms
    may be anybody's. Raises UsageError where no form tells.
    """
    request, table = resolved.request, resolved.inputs["map"].table
    description = source.description
    if description.unmappable:
        text = f"{description.unmappable}, which {table.label} does not take"
        raise CheckpointError(text, "leave out --map", where=description.source)
    if not (table.variants or table.choices):
        return request
    try:
        tensors = _tensors_before_a_map(request, source)
        if table.variants:
            request = replace(request, variant=_told_variants(resolved, tensors))
        mapping = _map_of(resolved, variant=request.variant)
        names = [tensor.name for tensor in tensors if tensor.is_weight]
        is_source = mapping.naming_of(names) == MINDFORMERS
    except (RequestError, CheckpointError):
        return request  # what is wrong with the names, the map says
    if request.like is not None and is_source:
        return request  # the reference decides
    form = source.form if is_source else FORMS[request.dst_form or DEFAULT_FORM]
    unsaid = [name for name in mapping.choices if getattr(request, name) is None]
    if not unsaid or (form.configured and not is_source):
        return request  # what has Hugging Face's names gets no others in such a folder
    if form.joins is not None:
        joins: dict[str, Any] = {n: form.joins[n] for n in unsaid if n in form.joins}
        return replace(request, **joins)
    tries = [
        " ".join(f"{flag_of(name)} {[*table.choices[name]][number]}" for name in unsaid)
        for number in (0, 1)
    ]
    where = source.where.path if is_source else f"--dst-form {form.name}"
    raise UsageError(
        f"{table.label} joins tensors, and a {form.title} checkpoint does not say how",
        f"{tries[0]}, as MindFormers joins them",
        f"{tries[1]}, as most others do",
        where=where,
    )


def _told_variants(resolved: ResolvedRequest, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    axes = {tensor.name: len(tensor.shape) for tensor in tensors}
    for layouts in resolved.dst.stages if isinstance(resolved.dst, Strategy) else ():
        axes |= {n: len(d.tensor_map) for n, d in layouts.items() if not d.may_be_nested}
    form, table = FORMS[resolved.request.dst_form or DEFAULT_FORM], resolved.inputs["map"].table
    ways = {
        **{name: way for name, way in form.variants.items() if way in table.variants.get(name, ())},
        **_map_of(resolved).variants_by_names(axes),
        **requested_variants(vars(resolved.request)),
    }
    return tuple(f"{name}={way}" for name, way in ways.items())


def _map_of(resolved: ResolvedRequest, **choices: Any) -> NameMap:
    """Return the map that is asked for, with other choices than asked for."""
    return NameMap.of({**vars(resolved.request), **choices}, resolved.inputs["map"])


def _tensors_before_a_map(request: Request, source: Source) -> list[Tensor]:
    """Return the source's tensors as a map takes them. Raises RequestError."""
    earlier_factories = takewhile(
        lambda item: item[0] not in ("dequantize", "map"), OPERATIONS.items()
    )
    operation_of_each = (make(vars(request)) for _, make in earlier_factories)
    catalog = source.require_catalog()
    operations = OperationChain(
        (operation for operation in operation_of_each if operation is not None), catalog.states
    )
    return [tensor for tensor in apply_operations(catalog, operations) if not tensor.dropped]


# -- a reference -----------------------------------------------------------------------------------

_ROWS, _SHOWN = 64, 3
_ALIKE, _CLEARLY = 0.5, 0.5
"""A right way correlates at least so much, and others at most so many times as much as it."""


def check_joining(resolved: ResolvedRequest, source: Source, reference: Source, team: Team) -> None:
    """Refuse an arrangement of joined tensors that a reference contradicts. Collective.

    Raises UsageError, which names the options; and where a reference does not tell, and none is
    given.
    """
    team.bcast(lambda: _check(resolved, source, reference))


def _check(resolved: ResolvedRequest, source: Source, reference: Source) -> None:
    if not source.reach.is_full or not reference.reach.is_full:
        raise UsageError("it needs files that all nodes see", "leave out --like (give --config)")
    request, catalog = resolved.request, source.require_catalog()
    mapping = _map_of(resolved)
    names = {parameter.name for parameter in catalog.parameters}
    if mapping.naming_of(names) == HUGGINGFACE:
        return
    if request.dst is not None and not FORMS[request.dst_form or DEFAULT_FORM].configured:
        raise UsageError(
            f"with --like, the destination is a folder such as {request.like}",
            "add --dst-form huggingface",
        )
    joined = {link.whole_name for link in mapping.links}  # neither states nor counters
    joined_parameters = (p for p in catalog.parameters if p.name in joined)
    # Shapes fit.
    mapping.compose([Tensor.of(p.name, p.src_dtype, p.shape) for p in joined_parameters])
    wrong: dict[str, str] = {}
    example = ""
    with (
        SourceReader(source.paths, source.indexes) as sources,
        SourceReader(reference.paths, reference.indexes) as reference_reader,
    ):
        for name, choices in mapping.table.choices.items():
            try:
                scores = {
                    choice: _score(
                        _map_of(resolved, **{name: choice}), name, catalog,
                        sources, reference.require_catalog(), reference_reader,
                    )
                    for choice in choices
                }  # fmt: skip
                best_choice = _decide(name, scores, reference.where.path)
            except UsageError:
                if getattr(request, name) is None:
                    raise
                continue  # it does not tell, and the user says it
            if scores[best_choice][0] > scores[mapping.choices[name]][0]:
                wrong[name], example = best_choice, example or scores[best_choice][1]
    if wrong:
        flags = " ".join(f"{flag_of(name)} {choice}" for name, choice in wrong.items())
        as_given = " and ".join(mapping.choices[name] for name in wrong)
        raise UsageError(
            f"the checkpoint is like {reference.where.path} if it is read with {flags} (such as "
            f"{example!r}), and it was read as {as_given}",
            flags,
        )


# -- all that is made ------------------------------------------------------------------------------


def check_resemblance(conversion: Conversion, reference: Source) -> str | None:
    """Compare some rows of what is made with the reference's tensors of the same names.

    Of every kind of matrix the first, one in the middle and the last. A kind that does not resemble
    the reference, where others do, was exchanged, permuted or taken apart in a wrong way: raises
    CheckpointError. Returns, as a warning, that nothing resembles it. On process 0.
    """
    request, source = conversion.request, conversion.source
    if not source.reach.is_full or not reference.reach.is_full:
        return None
    reference_by_name = {p.name: p for p in reference.require_catalog().parameters}
    kinds: dict[str, list[Parameter]] = {}
    for parameter in conversion.planner.selection.parameters:
        if parameter.name in reference_by_name and _are_comparable(
            parameter, reference_by_name[parameter.name]
        ):
            kinds.setdefault(pattern_of(parameter.name), []).append(parameter)
    scores: dict[str, list[tuple[float, str]]] = {}
    with (
        SourceReader(source.paths, source.indexes) as sources,
        SourceReader(reference.paths, reference.indexes) as reference_reader,
    ):
        for kind, matrices in kinds.items():
            matrices.sort(key=lambda matrix: natural_sort_key(matrix.name))
            for parameter in {
                matrices[p].name: matrices[p] for p in (0, len(matrices) // 2, -1)
            }.values():
                box = Box((0, 0), (min(_ROWS, parameter.shape[0]), parameter.shape[1]))
                rows, reference_rows = (
                    read_as_float64(parameter, box, sources),
                    read_as_float64(reference_by_name[parameter.name], box, reference_reader),
                )
                if rows.any() and reference_rows.any():  # zeros resemble nothing
                    scores.setdefault(kind, []).append(
                        (correlation(rows, reference_rows), parameter.name)
                    )
    return _resemblance(request, scores, reference.where.path)


def _are_comparable(parameter: Parameter, reference: Parameter) -> bool:
    is_same_kind = parameter.shape == reference.shape and {parameter.dtype, reference.dtype} <= {
        *FLOATS
    }
    return (
        is_same_kind
        and len(parameter.shape) == 2
        and min(parameter.shape) > 1
        and not any(parameter.steps)
    )


def _resemblance(
    request: Request, scores: Mapping[str, Sequence[tuple[float, str]]], reference: str
) -> str | None:
    all_scores = [pair for kind_scores in scores.values() for pair in kind_scores]
    unlike = [pair for pair in all_scores if pair[0] < _ALIKE]
    if not unlike:
        return None
    if 2 * len(unlike) > len(all_scores):
        return (
            f"nothing that is made resembles {reference} (such as {unlike[0][1]!r}: correlation "
            f"{unlike[0][0]:.2f}); its config.json and tokenizer are copied nonetheless"
        )
    refused = [pair for pair in unlike if not request.accepts(ACCEPT_CONTRADICTIONS, pair[1])]
    names = first_texts([f"{name!r} ({score:.2f})" for score, name in refused or unlike])
    text = f"{names} would not resemble {reference}, and {len(all_scores) - len(unlike)} others do"
    if not refused:
        return text
    refuted = dict.fromkeys(pattern_of(name) for _, name in refused)
    kinds = "|".join(re.escape(kind).replace(r"\*", r"\d+") for kind in refuted)
    raise CheckpointError(
        text,
        f"--accept {quote(f'contradictions:^({kinds})$')} if they were trained anew",
        details="the checkpoint holds them in another order, or under other names, than the map "
        "takes it to",
    )


def _score(
    mapping: NameMap,
    name: str,
    catalog: Catalog,
    sources: SourceReader,
    reference: Catalog,
    reference_reader: SourceReader,
) -> tuple[float, str]:
    """Return how one tensor, taken apart in one way, correlates with the reference's; and which."""
    assert mapping is not None
    parameters_by_name = {parameter.name: parameter for parameter in catalog.parameters}
    reference_by_name = {parameter.name: parameter for parameter in reference.parameters}
    for link in mapping.links:
        steps = {step for step, _ in link.rule.steps}
        is_matrix = len(link.parts) > 1 and len(link.shapes[1]) == 2
        if name in steps and link.whole_name in parameters_by_name and is_matrix:
            part = link.parts[1]
            if part not in reference_by_name:
                continue
            tensors = mapping.split_group(link, parameters_by_name[link.whole_name].dtype)
            parameter = ParameterFactory(catalog).parameter(tensors[1])
            rows = min(_ROWS, parameter.shape[0])
            box = Box((0, 0), (rows, parameter.shape[1]))
            if reference_by_name[part].shape != parameter.shape:
                raise CheckpointError(
                    f"{part!r} has shape {list(reference_by_name[part].shape)} in the reference, "
                    f"and {list(parameter.shape)} here; it is another model's"
                )
            part_rows = read_as_float64(parameter, box, sources)
            return correlation(
                part_rows, read_as_float64(reference_by_name[part], box, reference_reader)
            ), part
    raise UsageError("the reference has none of those tensors", f"give {flag_of(name)}")


def _decide(name: str, scores: Mapping[str, tuple[float, str]], reference: str) -> str:
    ordered = sorted(scores, key=lambda choice: -scores[choice][0])
    best, second = ordered[0], ordered[1]
    high, low = scores[best][0], scores[second][0]
    if high == low and high >= _ALIKE:
        return next(iter(scores))  # both ways make the same tensor
    if not high >= _ALIKE or low > _CLEARLY * high:
        flag = flag_of(name)
        scores_text = ", ".join(f"{choice} correlates {scores[choice][0]:.2f}" for choice in scores)
        raise UsageError(
            f"{scores[best][1]!r} of {reference} does not tell how the checkpoint joins "
            f"it ({scores_text})",
            f"give {flag} {' or '.join(scores)}",
        )
    return best
