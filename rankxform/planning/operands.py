"""Operands of steps: tensors that a process needs before it changes others.

Where every process sees their files, each reads the boxes that it needs. Where one does not,
operands are moved first, whole, as if each process were to write them for the one rank of a
destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rankxform.layout.strategy import WholeStrategy

from .assign import Assignment, runs_of
from .catalog import Catalog
from .cost_model import ReadPolicy
from .exchange import assign_readers, find_exchanges
from .plan import Planner
from .reach import Reach
from .read_method import ReadMethod
from .selection import Selection
from .transfers import Exchange


class OperandPlan(NamedTuple):
    """What is moved first: what each process gets of `planner`, and what crosses between them."""

    planner: Planner
    assignment: Assignment
    exchanges: Sequence[Exchange]


def operand_moves(
    planner: Planner,
    assignment: Assignment,
    catalog: Catalog,
    reach: Reach,
    method: ReadMethod,
) -> OperandPlan | None:
    """Return how processes get the operands that they need if process p writes ``assignment[p]``.

    None: every process sees the files, or no tensor needs an operand. `catalog`, `reach`: of the
    checkpoint that holds the operands. Raises CheckpointError if no file has a needed operand.
    """
    if reach.is_full or not any(any(parameter.steps) for parameter in planner.selection.parameters):
        return None
    names_by_process: list[set[str]] = [set() for _ in assignment]
    for (name, _), pairs in planner.wanted(assignment).items():
        steps = (step for step in planner.parameter(name).steps if step is not None)
        operands = [operand for step in steps for operand in step.operands]
        for process, _ in pairs if operands else ():
            names_by_process[process].update(operands)
    needed_names = set().union(*names_by_process)
    if not needed_names:
        return None
    parameters_by_name = {p.src_name: p for p in catalog.parameters if p.src_name in needed_names}
    selection = Selection(
        parameters_by_name, {}, (), (), {name: (name,) for name in parameters_by_name}
    )
    operand_planner = Planner(catalog, WholeStrategy(), selection)
    positions = {name: position for position, name in enumerate(operand_planner.names(0))}
    runs = [runs_of(0, sorted(positions[name] for name in names)) for names in names_by_process]
    requests = find_exchanges(operand_planner, runs, reach, ReadPolicy(method))
    return OperandPlan(operand_planner, runs, assign_readers(requests, reach))
