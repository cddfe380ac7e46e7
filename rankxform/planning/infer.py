"""Strategies that say less than the checkpoint holds: cuts by hand, and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rankxform.formats.base import Contents
from rankxform.layout.layout import Layout
from rankxform.layout.names import followed
from rankxform.layout.strategy import HandCut, Strategy, WholeStrategy


def complete(
    src: Strategy, dst: Strategy, files: Mapping[int, Contents]
) -> tuple[Strategy, Strategy]:
    """Return both strategies with what follows from the source files, by global rank.

    A cut by hand is spelled out for the names that it means. An optimizer state that neither
    strategy lists follows its parameter on both sides, if its slices have the shape of the
    parameter's: jobs that cut by hand list no states.
    """
    shapes = {
        name: shape
        for contents in dict.fromkeys(files.values())
        for name, shape in zip(contents.names, contents.shapes)
    }
    whole = isinstance(src, WholeStrategy)  # it lists the states too; a destination must then
    src, dst = (
        one.over(shapes, followed, states=whole) if isinstance(one, HandCut) else one
        for one in (src, dst)
    )
    if isinstance(src, WholeStrategy):
        return src, dst
    stages = [dict(layouts) for layouts in src.stages]
    following: dict[str, str] = {}
    alike: set[tuple[int, Contents]] = set()
    for rank, contents in files.items():
        stage = src.stage_of(rank)
        if stage < len(stages) and (stage, contents) not in alike:
            alike.add((stage, contents))
            for name, base in _states(contents, stages[stage], (src, dst)):
                stages[stage][name] = stages[stage][base]
                following[name] = base
    if not following:
        return src, dst
    return replace(src, stages=tuple(stages)), _with_states(dst, following)


def _states(
    contents: Contents, layouts: Mapping[str, Layout], listing: Iterable[Strategy]
) -> list[tuple[str, str]]:
    """Return the states of one file that follow a parameter, and that parameter."""
    found = []
    for name, shape in zip(contents.names, contents.shapes):
        base = followed(name)
        if base == name or base not in layouts or base not in contents.position:
            continue
        if any(name in one for one in listing if not isinstance(one, WholeStrategy)):
            continue
        if contents.shapes[contents.position[base]] == shape:
            found.append((name, base))
    return found


def _with_states(dst: Strategy, following: Mapping[str, str]) -> Strategy:
    if isinstance(dst, WholeStrategy):
        return dst
    return replace(
        dst,
        stages=tuple(
            {**layouts, **{n: layouts[base] for n, base in following.items() if base in layouts}}
            for layouts in dst.stages
        ),
    )
