"""Which parameters are converted, which are left out and why.

A strategy file lists what the compiler cut. What only one of the two files lists is either
optimizer state that the destination has no use for, or a question that the user must answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.dtype import content_bytes
from rankxform.layout.layout import Layout, whole
from rankxform.layout.names import followed, in_few_words
from rankxform.layout.strategy import Strategy, WholeStrategy

from .catalog import Parameter, Source, effective_layout
from .losses import losses_message

_STATE = "optimizer state that the destination strategy does not list"
_ALONE = "only one of the two strategies lists it"
NOT_CHOSEN = "not chosen by --include and --exclude"
ONE_SIDED = ("error", "leave-out", "whole")


@dataclass(frozen=True)
class LeftOut:
    """Parameters that are not written, and the reason."""

    reason: str
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Selection:
    """The parameters to convert.

    cut: converted from the source's layout to the destination's.
    everywhere: whole on every destination rank, as one source rank holds it.
    left_out: what stays behind.
    absent: names that the strategies list and no file holds.
    """

    cut: Mapping[str, Parameter]
    everywhere: Mapping[str, Parameter]
    left_out: tuple[LeftOut, ...]
    absent: tuple[str, ...]


def select(
    source: Source,
    dst: Strategy,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    one_sided: str = "error",
    ranks: Iterable[int] = (),
) -> Selection:
    """Decide for every parameter of the source what becomes of it.

    `ranks` are the destination ranks to make (default: all); what is lost for others is no error.
    `include` and `exclude` are regular expressions, searched in the name. `one_sided` says what
    happens to a parameter that only one strategy lists: "error"; "leave-out"; or "whole", which
    takes the side that does not list it to hold it whole on every rank.
    Raises RequestError for one-sided names, UsageError where nothing is left to convert.
    """
    wanted = _filter(include, exclude)
    cut: dict[str, Parameter] = {}
    everywhere: dict[str, Parameter] = {}
    state, alone, filtered = [], [], []
    for parameter in [*source.listed.values(), *source.unlisted.values()]:
        name = parameter.name
        here = parameter.listed and not isinstance(source.strategy, WholeStrategy)
        there = name in dst and not isinstance(dst, WholeStrategy)
        if not wanted(name):
            filtered.append(parameter)
        elif name in dst and parameter.listed:
            cut[name] = parameter
        elif parameter.listed and followed(name) in dst:
            state.append(parameter)
        elif not here and not there:
            everywhere[name] = parameter
        elif one_sided == "whole":
            (cut if there else everywhere)[name] = parameter
        else:
            alone.append(parameter)
    if not cut and alone and one_sided == "error":
        raise RequestError(
            f"{source.strategy.label} and {dst.label} share none of the checkpoint's parameters, "
            f"such as {in_few_words([p.name for p in alone], 3)}; one of them is another network's"
        )
    lost = _lost(source, dst, ranks, wanted)
    if lost:
        raise CheckpointError(losses_message(source, cut.values(), lost))
    if alone and one_sided == "error":
        raise RequestError(_one_sided_message(alone, source, dst))
    if not cut and not everywhere:
        raise UsageError("no parameter is left to convert; check --include and --exclude")
    if not source.listed:
        raise RequestError(
            f"{source.strategy.label} lists none of the parameters in {_first(source.paths)}; "
            "it is the strategy of another network, or of another stage"
        )
    reasons = {_STATE: state, _ALONE: alone, NOT_CHOSEN: filtered}
    left_out = tuple(_left_out(reason, some) for reason, some in reasons.items() if some)
    known = {*source.strategy.stages_of, *dst.stages_of}
    absent = tuple(sorted(known - set(source.listed) - set(source.unlisted)))
    return Selection(cut, everywhere, left_out, absent)


def destination_layout(selection: Selection, dst: Strategy, name: str, stage: int) -> Layout | None:
    """Return how ranks of destination `stage` cut `name`, or None where they do not hold it."""
    if name in selection.everywhere:
        return whole(len(selection.everywhere[name].shape))
    parameter = selection.cut[name]
    if name not in dst or stage not in dst.stages_of.get(name, (0,)):
        return None
    return effective_layout(dst, name, stage, len(parameter.shape))


def _filter(include: Iterable[str], exclude: Iterable[str]) -> Callable[[str], bool]:
    try:
        keep = [re.compile(pattern) for pattern in include]
        drop = [re.compile(pattern) for pattern in exclude]
    except re.error as error:
        raise UsageError(f"--include or --exclude: {error.pattern!r}: {error}") from error

    def wanted(name: str) -> bool:
        return (not keep or any(p.search(name) for p in keep)) and not any(
            p.search(name) for p in drop
        )

    return wanted


def _lost(
    source: Source, dst: Strategy, ranks: Iterable[int], wanted: Callable[[str], bool]
) -> dict[str, tuple[int, ...]]:
    """Return the names that `ranks` (none: all) should get and that no file holds."""
    made = {dst.stage_of(rank) for rank in ranks} or set(range(len(dst.stages)))
    return {
        name: missing
        for name, missing in source.unreachable.items()
        if name in dst and wanted(name) and made.intersection(dst.stages_of.get(name, made))
    }


def _left_out(reason: str, parameters: list[Parameter]) -> LeftOut:
    nbytes = sum(content_bytes(p.dtype, p.shape) for p in parameters)
    return LeftOut(reason, tuple(p.name for p in parameters), nbytes)


def _one_sided_message(alone: list[Parameter], source: Source, dst: Strategy) -> str:
    parts = []
    for label, names in (
        (source.strategy.label, [p.name for p in alone if p.listed]),
        (dst.label, [p.name for p in alone if not p.listed]),
    ):
        if names:
            parts.append(f"only {label} lists {in_few_words(names)}")
    return (
        "; ".join(parts) + ". Say what to do: --one-sided leave-out, or --one-sided whole if "
        "every rank of the side that does not list them holds them whole"
    )


def _first(paths: Mapping[int, str]) -> str:
    return paths[min(paths)] if paths else "the source"
