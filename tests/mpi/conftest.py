"""What the tests under mpirun begin with: a folder and a checkpoint that all processes see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import reference


def world():
    """Return MPI's world; only tests that run under mpirun may ask."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def tmp(tmp_path):
    """A folder that all processes see, made by process 0."""
    return Path(world().bcast(str(tmp_path)))


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
