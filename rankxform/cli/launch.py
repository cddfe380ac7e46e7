"""The verb ``launch``: make the checkpoint fit, then become the training program.

The program takes this process's place (exec), with its environment and its number under the
launcher: MPI is finalized before. Starting it beside this process would not do, for MPICH's
launcher refuses a second MPI process. That launcher must also be told whether the program
initializes MPI anew: if it does not, this process has to take its leave; if it does, it must not.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from rankxform import job
from rankxform.errors import UsageError
from rankxform.execution import strategies
from rankxform.execution.files import make_folder, read_bytes, write_small
from rankxform.transport import Team
from rankxform.transport.launcher import leave_hydra, local_rank, workers

CHECKPOINT, STRATEGY = "transformed_checkpoint", "strategy"


@dataclass(frozen=True)
class Program:
    """What a process becomes: a command, its environment, and whether it initializes MPI."""

    command: list[str]
    environment: Mapping[str, str]
    uses_mpi: bool = False

    def start(self) -> NoReturn:
        """Take this process's place. Raises OSError where that fails."""
        if not self.uses_mpi:
            leave_hydra()
        os.execvpe(self.command[0], self.command, dict(self.environment))


def launch(
    options: argparse.Namespace,
    request: job.Request,
    team: Team,
    begin: Callable[..., Any],
    tell: Callable[[str], None],
) -> tuple[job.Report | None, Program]:
    """Convert the checkpoint if it does not fit; return the report and the program to become."""
    team.share(lambda: _check(options, team))
    output = Path(options.output).absolute()
    conversion = job.prepare(replace(request, dst=None), team)
    if job.fits(conversion):
        where = conversion.request.src
        if team.rank == 0:
            tell(f"{where}: is cut as {conversion.dst.label} wants it; nothing is converted")
        return None, program(options, where, team)
    where = str(output / CHECKPOINT)
    report = job.transform(replace(request, dst=where), team, begin)
    team.share(lambda: _keep_strategy(request, output / STRATEGY))
    return report, program(options, where, team)


def program(options: argparse.Namespace, checkpoint: str, team: Team) -> Program:
    """Return the program of this process, told where its checkpoint is and who it is."""
    told = {
        "LOAD_CHECKPOINT": checkpoint,
        "RANK_ID": str(team.rank),
        "RANK_SIZE": str(team.size),
        "DEVICE_ID": str(local_rank()),
    }
    environment = {**told, **os.environ, "LOAD_CHECKPOINT": checkpoint}
    words = {"{checkpoint}": checkpoint, "{rank}": environment["RANK_ID"]}
    filled = []
    for part in options.program:
        for word, value in words.items():
            part = part.replace(word, value)
        filled.append(part)
    return Program(filled, environment, options.uses_mpi)


def _check(options: argparse.Namespace, team: Team) -> None:
    if not options.program:
        raise UsageError("launch: which program? launch --load CKPT ... -- python train.py ...")
    if shutil.which(options.program[0]) is None:
        raise UsageError(f"launch: there is no program {options.program[0]!r} in PATH")
    if team.size == 1 and workers() > 1:
        raise UsageError(
            f"launch: {workers()} workers were started without MPI, as by msrun, and they would "
            "convert the same folder; start them by mpirun or srun, or let the program call "
            "rankxform.load or rankxform.mindspore.load_into"
        )


def _keep_strategy(request: job.Request, folder: Path) -> None:
    """Copy the strategy that the result is cut by: the next job's source strategy."""
    if not isinstance(request.dst_strategy, str) or not Path(request.dst_strategy).exists():
        return
    make_folder(folder)
    for path in strategies.files(Path(request.dst_strategy)):
        if path.resolve().parent != folder.resolve():
            write_small(folder / path.name, read_bytes(path))
