"""What a plan is, in ten lines, and the planner beside it."""

from __future__ import annotations

import pytest

from tests.cases import random_case
from tests.planning.test_plan import planner, slices


def specified(src, dst, shape, rank):
    """Every overlap of `rank`'s box with a source box, one replica each: {box: holders}."""
    mine = dst.grid(shape).box(dst.cell(rank))
    found = {}
    for holder in range(src.ranks):
        common = src.grid(shape).box(src.cell(holder)).intersect(mine)
        if common is not None:
            found.setdefault(common, set()).add(holder)
    return found


@pytest.mark.parametrize("seed", range(120))
def test_a_plan_is_every_overlap_from_one_replica_each(seed, tmp_path):
    case = random_case(seed, mindspore_agrees=False, whole=False)
    plan = planner(tmp_path, case.src, case.dst, case.params)
    src, dst = plan.catalog.strategy, plan.dst
    for rank in range(dst.ranks):
        stage = dst.stage_of(rank)
        for name, _, copies in slices(plan, rank):
            shape = plan.parameter(name).shape
            held = src.stages_of[name][0]
            first = src.ranks_in(held).start
            layouts = src.stages[held][name], dst.stages[stage][name]
            wanted = specified(*layouts, shape, rank % dst.stage_size)
            assert {box for _, box in copies} == set(wanted)
            assert len(copies) == len(wanted)
            for src_rank, box in copies:
                size = layouts[0].ranks
                assert (src_rank - first) % size in wanted[box]
