"""Whether a checkpoint joins its tensors as it is said to, by comparing a few with a reference's.

No file records whether q, k and v lie in groups, nor whether gate and up are interleaved. A model
that was trained on from a published one is still close to it: taken apart in the right way, its
tensors correlate with the published ones, and in any other way they do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.engine.copier import correlation, read_as_float64
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import FLOATS
from rankxform.formats.map_table import HUGGINGFACE
from rankxform.geometry.box import Box
from rankxform.layout.names import first_texts, natural_sort_key, pattern_of
from rankxform.operations.base import Tensor
from rankxform.operations.map import NameMap
from rankxform.options import flag_of
from rankxform.planning.catalog import Catalog, Parameter
from rankxform.planning.selection import ParameterFactory
from rankxform.request import Request
from rankxform.statements import ACCEPT_CONTRADICTIONS
from rankxform.storage.source_reader import SourceReader
from rankxform.transport import Team

from .operation_inputs import OperationInputs, name_map

if TYPE_CHECKING:
    from rankxform.source.open import Source

    from .target import Conversion

_ROWS, _SHOWN = 64, 3
_ALIKE, _CLEARLY = 0.5, 0.5
"""A right way correlates at least so much, and others at most so many times as much as it."""


def check_joining(
    request: Request, operation: OperationInputs, source: Source, reference: Source, team: Team
) -> None:
    """Refuse an arrangement of joined tensors that a reference contradicts. Collective.

    Raises UsageError, which names the options; and where a reference does not tell, and none is
    given.
    """
    team.bcast(lambda: _check(request, operation, source, reference))


def _check(request: Request, operation: OperationInputs, source: Source, reference: Source) -> None:
    if not source.reach.is_full or not reference.reach.is_full:
        raise UsageError("it needs files that all nodes see", "leave out --like (give --config)")
    mapping, catalog = name_map(request, operation), source.require_catalog()
    assert mapping is not None
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
                        _as_joined(request, operation, name, choice), name, catalog,
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
            f"joined as {as_given}, the checkpoint does not correlate with "
            f"{reference.where.path}, and so it does (such as {example!r})",
            f"give {flags}",
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


def _as_joined(
    request: Request, operation: OperationInputs, name: str, choice: str
) -> NameMap | None:
    changed: Any = {name: choice}
    return name_map(replace(request, **changed), operation)


def _score(
    mapping: NameMap | None,
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
            f"give {flag}",
        )
    return best
