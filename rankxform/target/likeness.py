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
from rankxform.engine.operands import correlation, read_made
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.dtype import FLOATS
from rankxform.formats.map_toml import HUGGINGFACE
from rankxform.geometry.box import Box
from rankxform.layout.names import natural_sort_key, pattern_of
from rankxform.ops.base import Tensor
from rankxform.ops.mapping import Link, NameMap
from rankxform.options import flag_of
from rankxform.planning.catalog import Catalog, Parameter
from rankxform.planning.derived import TensorMaker
from rankxform.request import Request
from rankxform.source.options import CONTRADICTIONS
from rankxform.storage.sources import Sources
from rankxform.transport import Team

from .operation_inputs import OperationInputs, name_map

if TYPE_CHECKING:
    from rankxform.source.opening import Source

    from .target import Target

_ROWS, _SHOWN = 64, 3
_ALIKE, _CLEARLY = 0.5, 0.5
"""A right way correlates at least so much, and others at most so many times as much as it."""


def check_arrangement(
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
    taken, catalog = name_map(request, operation), source.table
    assert taken is not None
    names = {parameter.name for parameter in catalog.parameters}
    if taken.side_of(names) == HUGGINGFACE:
        return
    if request.dst is not None and not FORMS[request.dst_form or DEFAULT_FORM].configured:
        raise UsageError(
            f"with --like, the destination is a folder such as {request.like}",
            "add --dst-form huggingface",
        )
    joined = {link.whole for link in taken.links}  # neither states nor counters
    every = (p for p in catalog.parameters if p.name in joined)
    taken.compose([Tensor.of(p.name, p.src_dtype, p.shape) for p in every])  # shapes fit
    wrong: dict[str, str] = {}
    by = ""
    with (
        Sources(source.paths, source.indexes) as sources,
        Sources(reference.paths, reference.indexes) as others,
    ):
        for name, ways in taken.table.choices.items():
            try:
                scores = {
                    way: _score(
                        _as_joined(request, operation, name, way), name, catalog,
                        sources, reference.table, others,
                    )
                    for way in ways
                }  # fmt: skip
                told = _decided(name, scores, reference.where.path)
            except UsageError:
                if getattr(request, name) is None:
                    raise
                continue  # it does not tell, and the user says it
            if scores[told][0] > scores[taken.choices[name]][0]:
                wrong[name], by = told, by or scores[told][1]
    if wrong:
        flags = " ".join(f"{flag_of(name)} {way}" for name, way in wrong.items())
        as_given = " and ".join(taken.choices[name] for name in wrong)
        raise UsageError(
            f"joined as {as_given}, the checkpoint does not correlate with "
            f"{reference.where.path}, and so it does (such as {by!r})",
            f"give {flags}",
        )


# -- all that is made ------------------------------------------------------------------------------


def check_alike(request: Request, source: Source, target: Target, reference: Source) -> str | None:
    """Compare some rows of what is made with the reference's tensors of the same names.

    Of every kind of matrix the first, one in the middle and the last. A kind that does not resemble
    the reference, where others do, was exchanged, permuted or taken apart in a wrong way: raises
    CheckpointError. Returns, as a warning, that nothing resembles it. On process 0.
    """
    if not source.reach.is_full or not reference.reach.is_full:
        return None
    known = {p.name: p for p in reference.table.parameters}
    kinds: dict[str, list[Parameter]] = {}
    for one in target.planner.selection.parameters:
        if one.name in known and _are_comparable(one, known[one.name]):
            kinds.setdefault(pattern_of(one.name), []).append(one)
    scores: dict[str, list[tuple[float, str]]] = {}
    with (
        Sources(source.paths, source.indexes) as sources,
        Sources(reference.paths, reference.indexes) as others,
    ):
        for kind, some in kinds.items():
            some.sort(key=lambda one: natural_sort_key(one.name))
            for one in {some[at].name: some[at] for at in (0, len(some) // 2, -1)}.values():
                box = Box((0, 0), (min(_ROWS, one.shape[0]), one.shape[1]))
                own, wanted = read_made(one, box, sources), read_made(known[one.name], box, others)
                if own.any() and wanted.any():  # zeros resemble nothing
                    scores.setdefault(kind, []).append((correlation(own, wanted), one.name))
    return _resemblance(request, scores, reference.where.path)


def _are_comparable(one: Parameter, other: Parameter) -> bool:
    alike = one.shape == other.shape and {one.dtype, other.dtype} <= {*FLOATS}
    return alike and len(one.shape) == 2 and min(one.shape) > 1 and not any(one.steps)


def _resemblance(
    request: Request, scores: Mapping[str, Sequence[tuple[float, str]]], reference: str
) -> str | None:
    every = [one for some in scores.values() for one in some]
    unlike = [one for one in every if one[0] < _ALIKE]
    if not unlike:
        return None
    if 2 * len(unlike) > len(every):
        return (
            f"nothing that is made resembles {reference} (such as {unlike[0][1]!r}: correlation "
            f"{unlike[0][0]:.2f}); its config.json and tokenizer are copied nonetheless"
        )
    refused = [one for one in unlike if not request.accepts(CONTRADICTIONS, one[1])]
    names = ", ".join(f"{name!r} ({score:.2f})" for score, name in (refused or unlike)[:_SHOWN])
    more = f" and {len(refused) - _SHOWN} more" if refused[_SHOWN:] else ""
    text = f"{names}{more} would not resemble {reference}, and {len(every) - len(unlike)} others do"
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


def _as_joined(request: Request, operation: OperationInputs, name: str, way: str) -> NameMap | None:
    changed: Any = {name: way}
    return name_map(replace(request, **changed), operation)


def _score(
    made: NameMap | None,
    name: str,
    catalog: Catalog,
    sources: Sources,
    reference: Catalog,
    others: Sources,
) -> tuple[float, str]:
    """Return how one tensor, taken apart in one way, correlates with the reference's; and which."""
    assert made is not None
    there = {parameter.name: parameter for parameter in catalog.parameters}
    known = {parameter.name: parameter for parameter in reference.parameters}
    for link in made.links:
        steps = {step for step, _ in link.rule.steps}
        if name in steps and link.whole in there and _two_axes(link):
            part = link.parts[1]
            if part not in known:
                continue
            tensors = made.taken_apart(link, there[link.whole].dtype)
            parameter = TensorMaker(catalog).parameter(tensors[1])
            rows = min(_ROWS, parameter.shape[0])
            box = Box((0, 0), (rows, parameter.shape[1]))
            if known[part].shape != parameter.shape:
                raise CheckpointError(
                    f"{part!r} has shape {list(known[part].shape)} in the reference, and "
                    f"{list(parameter.shape)} here; it is another model's"
                )
            own = read_made(parameter, box, sources)
            return correlation(own, read_made(known[part], box, others)), part
    raise UsageError("the reference has none of those tensors", f"give {flag_of(name)}")


def _two_axes(link: Link) -> bool:
    return len(link.parts) > 1 and len(link.shapes[1]) == 2


def _decided(name: str, scores: Mapping[str, tuple[float, str]], reference: str) -> str:
    ordered = sorted(scores, key=lambda way: -scores[way][0])
    best, second = ordered[0], ordered[1]
    high, low = scores[best][0], scores[second][0]
    if high == low and high >= _ALIKE:
        return next(iter(scores))  # both ways make the same tensor
    if not high >= _ALIKE or low > _CLEARLY * high:
        flag = flag_of(name)
        told = ", ".join(f"{way} correlates {scores[way][0]:.2f}" for way in scores)
        raise UsageError(
            f"{scores[best][1]!r} of {reference} does not tell how the checkpoint joins "
            f"it ({told})",
            f"give {flag}",
        )
    return best
