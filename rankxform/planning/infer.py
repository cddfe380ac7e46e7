"""Strategies that say less than the checkpoint holds: patterns, and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from rankxform.formats.base import Schema
from rankxform.layout.layout import Layout
from rankxform.layout.names import parameter_of
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy


def resolve(strategy: Strategy, files: Mapping[int, Schema], *, states: bool = False) -> Strategy:
    """Return a strategy that lists what its pattern means among the tensors of `files`, by rank.

    Any other strategy is returned as it is. states: list the optimizer states too.
    """
    if not isinstance(strategy, PatternStrategy):
        return strategy
    shapes = {
        name: shape
        for schema in dict.fromkeys(files.values())
        for name, shape in zip(schema.names, schema.shapes)
    }
    return strategy.over(shapes, states=states)


def complete(
    src: Strategy,
    dst: Strategy,
    files: Mapping[int, Schema],
    ranks: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Strategy, Strategy]:
    """Return both strategies with the optimizer states that the source files hold.

    `files` are by id, `ranks` those of files whose id is not their rank.

    A state that neither strategy lists follows its parameter on both sides, if its slices have the
    shape of the parameter's: jobs that shard by pattern list no states. Patterns in `dst` are
    resolved.
    """
    whole = isinstance(src, WholeStrategy)  # it lists the states too; a destination must then
    dst = resolve(dst, files, states=whole)
    if isinstance(src, WholeStrategy):
        return src, dst
    stages = [dict(layouts) for layouts in src.stages]
    following: dict[str, str] = {}
    alike: set[tuple[int, Schema]] = set()
    for rank, schema in files.items():
        stage = src.stage_of(ranks.get(rank, rank))
        if stage < len(stages) and (stage, schema) not in alike:
            alike.add((stage, schema))
            for name, base in _states(schema, stages[stage], (src, dst)):
                stages[stage][name] = stages[stage][base]
                following[name] = base
    if not following:
        return src, dst
    return replace(src, stages=tuple(stages)), _with_states(dst, following)


def _states(
    schema: Schema, layouts: Mapping[str, Layout], listing: Iterable[Strategy]
) -> list[tuple[str, str]]:
    """Return the states of one file that follow a parameter, and that parameter."""
    found = []
    for name, shape in zip(schema.names, schema.shapes):
        base = parameter_of(name)
        if base == name or base not in layouts or base not in schema.position:
            continue
        if any(name in one for one in listing if not isinstance(one, WholeStrategy)):
            continue
        if schema.shapes[schema.position[base]] == shape:
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
