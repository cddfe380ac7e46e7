"""The verb ``launch``: make the checkpoint fit, then become the training program.

The program replaces this process (exec), and keeps its environment and its number under the
launcher; MPI is finalized first. It cannot be a child of this process, because MPICH's launcher
refuses a second MPI process. If the program does not initialize MPI again, this process has to sign
off from that launcher; if the program does, it must not.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rankxform.checkpoints.rank_folders import LATEST
from rankxform.errors import StorageError, UsageError
from rankxform.layout.strategy import Strategy
from rankxform.options import DERIVED
from rankxform.request import Request, in_group
from rankxform.storage import strategies
from rankxform.storage.posix import inode, is_same, read_bytes, remove, write_small
from rankxform.transport import Team
from rankxform.transport.launcher import leave_hydra, local_rank, workers
from rankxform.values import dataclass

from .options import option
from .terminal import warn
from .units import count

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived
    from rankxform.job.report import Report
    from rankxform.job.transform import Begin

CHECKPOINT, STRATEGY = "transformed_checkpoint", "strategy"
MERGED = "merged_ckpt_strategy"


@dataclass(frozen=True)
class Program:
    """What a process becomes: a command, its environment, the checkpoint that it is to load, and
    whether it initializes MPI."""

    command: list[str]
    environment: Mapping[str, str]
    checkpoint: str
    uses_mpi: bool = False

    def start(self) -> NoReturn:
        """Take this process's place. Raises OSError where that fails."""
        if not self.uses_mpi:
            leave_hydra()
        os.execvpe(self.command[0], self.command, dict(self.environment))


def launch(
    options: argparse.Namespace,
    request: Request,
    team: Team,
    begin: Begin,
    tell: Callable[[str], None],
) -> tuple[Report | None, Program]:
    """Convert the checkpoint if it does not fit; return the report and the program to become.

    A step older than the newest is never taken, because training would continue from it.
    """
    from rankxform.job.fit import already_fits
    from rankxform.job.transform import transform

    from .strategy_report import derived_table

    team.bcast(lambda: _check(options, team))
    request = replace(request, step=request.step or LATEST)
    output = Path(options.output).absolute()
    folder = output / STRATEGY
    fits, derived, ranks = already_fits(replace(request, dst=None), team)
    if team.rank == 0 and ranks > 1 < team.size != ranks:
        warn(f"{team.size} processes start, and the destination has {count(ranks, 'rank')}")
    if derived is not None:
        request = _with_derived(request, derived, folder)
        if team.rank == 0:
            tell(derived_table(derived))
    if fits:
        where = str(Path(request.src).absolute())
        if team.rank == 0:
            given = request.dst_strategy
            name = given.label if isinstance(given, Strategy) else given or "none"
            tell(f"{where}: is sharded as {name} wants it; nothing is converted")
        return None, program(options, where, team)
    where = str(output / CHECKPOINT)
    wanted = team.bcast(lambda: _strategies(request, folder))
    team.bcast(lambda: _check_source(request, folder, wanted))
    leader = team.nodes.is_leader(team.rank)
    if_other = leader and wanted and not request.overwrite
    given = request.dst_strategy
    name = given.label if isinstance(given, Strategy) else str(given)
    team.agree(lambda: _check_strategies(folder, wanted, name) if if_other else None)
    report = transform(replace(request, dst=where), team, begin)
    team.bcast(lambda: _keep(folder, wanted))
    # where the folder is process 0's, all is there now
    team.agree(lambda: _keep(folder, wanted) if leader and team.rank != 0 else None)
    return report, program(options, where, team)


def program(options: argparse.Namespace, checkpoint: str, team: Team) -> Program:
    """Return the program for this process, with its checkpoint and its rank filled in."""
    who = {
        "RANK_ID": str(team.rank),
        "RANK_SIZE": str(team.size),
        "DEVICE_ID": str(local_rank()),
    }
    environment = {**who, **os.environ, **(who if team.size > 1 else {})}
    environment["LOAD_CHECKPOINT"] = checkpoint
    words = {"{checkpoint}": checkpoint, "{rank}": environment["RANK_ID"]}
    filled = []
    for part in options.program:
        for word, value in words.items():
            part = part.replace(word, value)
        filled.append(part)
    return Program(filled, environment, checkpoint, options.uses_mpi)


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


def _strategies(request: Request, folder: Path) -> dict[Path, bytes]:
    """Return what belongs in the folder of strategies, if it is not there already.

    That is the strategy that the result is sharded by: the next job's source strategy. Stage files
    are merged too, as MindFormers does.
    """
    strategy = request.dst_strategy
    if isinstance(strategy, Strategy) and strategy.derived:
        return strategies.encoded(strategy, Path(strategy.label))
    given = strategies.path_of(strategy)
    if given is None:
        return {}
    paths = strategies.files(given)
    if is_same(paths[0].parent, folder):
        return {}
    found = {folder / path.name: read_bytes(path) for path in paths}
    stages = [strategies.read(path) for path in paths]
    several = len({one.stage for one in stages}) > 1 and not any(one.merged for one in stages)
    kinds = {one.json for one in stages}
    if several and len(kinds) == 1:
        merged = folder / (MERGED + (".json" if kinds.pop() else ".ckpt"))
        found[merged] = strategies.merged(given, merged)[1]
    return found


def _with_derived(request: Request, derived: Derived, folder: Path) -> Request:
    """Return a request with a derived strategy, which is to be kept in the folder of strategies."""
    plain: dict[str, Any] = {name: option(name).default for name in in_group(DERIVED)}
    name = MERGED if len(derived.strategy.stages) > 1 else "ckpt_strategy_rank_0"
    strategy = replace(derived.strategy, label=str(folder / f"{name}.ckpt"))
    return replace(request, **plain, dst_strategy=strategy)


def _check_source(request: Request, folder: Path, wanted: Mapping[Path, bytes]) -> None:
    """Refuse a folder in which the source's own strategy would be replaced by another."""
    given = strategies.path_of(request.src_strategy)
    if not wanted or given is None:
        return
    own = {inode(path) for path in strategies.files(given)}
    for old in _others(folder, wanted):
        if inode(old) in own:
            raise StorageError(
                f"{old}: is the source's strategy, and another belongs in {folder} now; choose "
                "another --output"
            )


def _check_strategies(folder: Path, wanted: Mapping[Path, bytes], strategy: str) -> None:
    """Raise StorageError where the folder holds another strategy than what is wanted there."""
    for old in _others(folder, wanted):
        raise StorageError(
            f"{old}: is of another strategy than {strategy}, which belongs here now; remove it, "
            "choose another --output, or say --overwrite"
        )


def _others(folder: Path, wanted: Mapping[Path, bytes]) -> list[Path]:
    there = strategies.in_folder(folder) if folder.is_dir() else []
    found = [path for path in there if strategies.is_strategy(path)]
    return [old for old in found if read_bytes(old) != wanted.get(old)]


def _keep(folder: Path, wanted: Mapping[Path, bytes]) -> None:
    """Write the wanted strategy files into the folder, and remove other strategies from it."""
    if not wanted:
        return
    if folder.is_symlink():
        raise StorageError(f"{folder}: is a link, through which nothing is removed; remove it")
    for old in _others(folder, wanted):
        remove(old)
    for path, data in wanted.items():
        if not path.exists():
            write_small(path, data, shared=True)
