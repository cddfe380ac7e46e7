"""What the tests under mpirun begin with: a checkpoint that all processes see, and nodes."""

from __future__ import annotations

import random
from importlib import import_module

from rankxform.planning.transfers import Reach
from tests import reference
from tests.mpi_launch import world


def prepare(case, tmp, kind="ckpt"):
    """Write a case's checkpoint and strategies on process 0; return (src, strategies)."""
    if world().rank == 0:
        reference.write_checkpoint(tmp / "src", case.src, case.params, case.extras, kind)
        for side, stages in (("src", case.src), ("dst", case.dst)):
            if stages:
                reference.write_stage_files(tmp / f"{side}_strategy", stages)
    world().Barrier()
    return tmp / "src", *(
        tmp / f"{side}_strategy" if stages else None
        for side, stages in (("src", case.src), ("dst", case.dst))
    )


def as_nodes(monkeypatch, nodes, seed):
    """Let processes be on `nodes` nodes, each of which sees some of the source files at random."""
    own, processes = world().rank, world().size
    node = tuple(process * nodes // processes for process in range(processes))
    transport, copies = map(import_module, ("rankxform.transport.mpi", "rankxform.source.copies"))
    monkeypatch.setattr(transport, "this_node", lambda host: (f"n{node[own]}", ""))

    def reach_of(team, paths, declared_files, same_as_node0=frozenset()):
        rng = random.Random(seed)
        home = {rank: rng.randrange(nodes) for rank in paths}
        seen = (
            frozenset(r for r in home if home[r] == n or rng.random() < 0.2) for n in range(nodes)
        )
        return Reach(node, tuple(seen)), []

    monkeypatch.setattr(copies, "find_reach", reach_of)
