"""Demand: what must cross between processes, and who could read it.

What all nodes see is read by each, unless an exchange is asked for or cheaper; what a process does
not see is asked of those who do. Drafts say so; who reads is not chosen yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rankxform.formats.dtype import item_size
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import CALL_BYTES
from rankxform.layout.layout import Layout

from .catalog import Parameter
from .cost_model import Choice, Reading, reading_of
from .plan import Planner
from .transfers import Portion, copies_of
from .visibility import Processes, Sight

Servers = Mapping[Cell, Mapping[int, "tuple[int, ...]"]]
"""By destination cell the processes that put it into files, each with its global ranks."""

Senders = Mapping[Cell, Mapping[int, "tuple[int, int]"]]
"""By source cell, for each process that wants of it: (process that reads it, source rank)."""


@dataclass(frozen=True)
class Asked:
    """Of a source cell: who wants it, of which ranks' files, and who could read one of these."""

    by: tuple[int, ...]
    ranks: tuple[int, ...]
    able: Processes


@dataclass(frozen=True)
class Kind:
    """What trades have in common that are cut alike.

    served: by all processes, and needs: by source cell, who wants of it; servers: those that
    cannot do without a trade; own: what these read for themselves.
    """

    served: Servers
    needs: Mapping[Cell, Mapping[int, None]]
    held: Mapping[Cell, tuple[int, ...]]
    servers: Servers
    own: Senders
    asked: Mapping[Cell, Asked]


@dataclass(frozen=True)
class Draft:
    """A trade before readers are chosen. turn: which of equal copies is read."""

    parameter: Parameter
    layout: Layout
    turn: int
    kind: Kind

    def nbytes(self, cell: Cell) -> int:
        parameter = self.parameter
        return prod(parameter.grid.box(cell).shape) * item_size(parameter.dtype)


def demand(
    planner: Planner, shares: Sequence[Sequence[Portion]], sight: Sight, choice: Choice
) -> list[Draft]:
    """Return what is to be traded in a conversion in which process p serves ``shares[p]``.

    A process takes part as a receiver where it needs a file that it does not see; and, if the
    `choice` weighs costs, where an exchange is cheaper than that all nodes read a file that all of
    them see. If it says always, each distinct byte is read by one process for all. Raises
    CheckpointError where nobody has what is needed.
    """
    if len(shares) == 1 or (sight.is_full and not choice.always and not choice.weighed):
        return []
    return list(_drafts(planner, shares, sight, choice))


def freedom(drafts: Iterable[Draft], sight: Sight) -> float:
    """Return the bytes to be sent that processes of more than one node could read."""
    amounts = amounts_of(drafts)
    return sum(nbytes for able, nbytes in amounts.items() if len({sight.node[p] for p in able}) > 1)


def amounts_of(drafts: Iterable[Draft]) -> dict[Processes, float]:
    """Return the bytes that are asked for, by who could read them."""
    amounts: dict[Processes, float] = {}
    for draft in drafts:
        for cell, asked in draft.kind.asked.items():
            amounts[asked.able] = amounts.get(asked.able, 0.0) + draft.nbytes(cell)
    return amounts


def both_ways(
    planner: Planner,
    shares: Sequence[Sequence[Portion]],
    sight: Sight,
    call: float = CALL_BYTES,
) -> Reading:
    """Return what it comes to if every node reads for itself, and if each byte is read once.

    `call` is what a read of little costs, in bytes.
    """
    known: dict[object, Reading] = {}
    total = Reading()
    for (name, layout), pairs in planner.wanted(shares).items():
        parameter = planner.parameter(name)
        key = parameter.layout, parameter.shape, parameter.dtype, parameter.listed, layout, pairs
        if key not in known:
            served = _served(planner, layout, pairs)
            known[key] = reading_of(parameter, layout, served, sight.node, call)
        total += known[key]
    return total


def _drafts(
    planner: Planner,
    shares: Sequence[Sequence[Portion]],
    sight: Sight,
    choice: Choice,
) -> Iterator[Draft]:
    known: dict[object, Kind | None] = {}
    for (name, layout), every in planner.wanted(shares).items():
        parameter = planner.parameter(name)
        turn = planner.turn(parameter)
        for held, pairs in planner.held_alike(parameter, layout, every):
            key = (
                parameter.layout, parameter.shape, parameter.listed, item_size(parameter.dtype),
                layout, id(held), pairs, turn,
            )  # fmt: skip
            if key not in known:
                served = _served(planner, layout, pairs)
                needs = _needs(parameter, layout, served)
                for cell in needs:
                    if not held.get(cell):
                        planner.nobody(parameter, cell)
                together = choice.always
                if choice.weighed and choice.costs and not together:
                    reading = reading_of(parameter, layout, served, sight.node, choice.call)
                    together = reading.exchanges(choice.costs, len(sight.node), len(sight.seen))
                known[key] = _kind(served, needs, held, turn, sight, together)
            kind = known[key]
            if kind is not None:
                yield Draft(parameter, layout, turn, kind)


def _served(
    planner: Planner, layout: Layout, pairs: tuple[tuple[int, int], ...]
) -> dict[Cell, dict[int, tuple[int, ...]]]:
    served: dict[Cell, dict[int, tuple[int, ...]]] = {}
    for process, rank in pairs:
        by = served.setdefault(planner.cell(layout, rank), {})
        by[process] = (*by.get(process, ()), rank)
    return served


def _needs(parameter: Parameter, layout: Layout, served: Servers) -> dict[Cell, dict[int, None]]:
    """Return by source cell the processes that need of it."""
    needs: dict[Cell, dict[int, None]] = {}
    for cell, by in served.items():
        for at, _ in copies_of(parameter, layout, cell):
            needs.setdefault(at, {}).update(dict.fromkeys(by))
    return needs


def _kind(
    served: Servers,
    needs: Mapping[Cell, Mapping[int, None]],
    held: Mapping[Cell, tuple[int, ...]],
    turn: int,
    sight: Sight,
    always: bool,
) -> Kind | None:
    """Sort out who serves, who reads for itself, and what is asked of others."""
    members = {process for by in served.values() for process in by}
    if not always:
        members = {p for at, by in needs.items() for p in by if sight.of(p).isdisjoint(held[at])}
    if not members:
        return None
    servers = {
        cell: mine
        for cell, by in served.items()
        if (mine := {process: ranks for process, ranks in by.items() if process in members})
    }
    own: dict[Cell, dict[int, tuple[int, int]]] = {}
    asked: dict[Cell, Asked] = {}
    for at, by in needs.items():
        wanting = [process for process in by if process in members]
        near = {p: [r for r in held[at] if r in sight.of(p)] for p in wanting}
        if not always:
            own[at] = {p: (p, ranks[turn % len(ranks)]) for p, ranks in near.items() if ranks}
            wanting = [p for p in wanting if not near[p]]
        if wanting:
            able = tuple(sorted(p for p in wanting if near[p])) or sight.seers(held[at])
            asked[at] = Asked(tuple(wanting), held[at], able)
    return Kind(served, needs, held, servers, own, asked)
