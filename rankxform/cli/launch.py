"""The verb ``launch``: make the checkpoint fit, then become the training program.

The program replaces this process (exec), and keeps its environment and its number under the
launcher; MPI is finalized first. It cannot be a child of this process, because MPICH's launcher
refuses a second MPI process. If the program does not initialize MPI again, this process has to sign
off from that launcher; if the program does, it must not.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rankxform.display.text import as_text, format_count, warn, warning_lines
from rankxform.errors import UsageError, did_you_mean
from rankxform.request import Request
from rankxform.results import QUIET, DictResult
from rankxform.statements import join
from rankxform.storage.posix import FILE_LIMITS
from rankxform.storage.store import absolute
from rankxform.transport import Team
from rankxform.transport.launcher import leave_hydra, local_rank, msrun_workers
from rankxform.values import dataclass

from .options import Parsed
from .screen import Screen, notice_lines

if TYPE_CHECKING:
    from rankxform.target.target import Target


_FILLED_IN = ("rank", "checkpoint")


def run(options: Parsed, team: Team) -> Program:
    from rankxform.storage.user_files import output_path
    from rankxform.verbs.launch import launch

    screen = Screen(options, team)
    team.bcast(lambda: _check(options, team))
    request = screen.request()

    transform_report, checkpoint = launch(
        request,
        output_path(options.output).absolute(),
        team,
        partial(_announce, options, request, team, screen),
        screen.begin_writing,
    )
    facts = {
        "checkpoint": checkpoint,
        "transform": transform_report.as_dict() if transform_report else None,
    }
    if options.json:
        screen.show_done("launch", DictResult(facts, ()))
    elif transform_report is not None:
        screen.say(as_text(transform_report, screen.level))
    return _program(options, checkpoint, team)


def _announce(
    options: Parsed, request: Request, team: Team, screen: Screen, target: Target, fits: bool
) -> None:
    """Say how the strategy was derived, and whether anything is converted."""
    ranks = target.planner.dst.ranks
    if ranks > 1 and team.size != ranks:
        text = (
            f"the destination has {format_count(ranks, 'rank')}, and the program is started by "
            f"another number of processes: {team.size}"
        )
        if not options.any_world_size:
            program = (
                "rankxform" if Path(sys.argv[0]).name == "rankxform" else "python -m rankxform"
            )
            launcher = "srun" if "SLURM_STEP_ID" in os.environ else "mpirun"
            raise UsageError(
                text,
                f"{launcher} -n {ranks} {program} {join(sys.argv[1:])}",
                "--any-world-size, if the program starts others itself",
            )
        if team.rank == 0 and team.size > 1:
            warn(text)
    if target.derived is not None:
        screen.say(as_text(target.derived))
    if fits:
        doubts = warning_lines(target.warnings)
        notice_texts = [] if screen.level == QUIET else notice_lines(target.notices)
        where, strategy_label = absolute(request.src), target.planner.dst.label
        verdict = f"{where}: is sharded as {strategy_label} wants it; nothing is converted"
        screen.say("\n".join([*doubts, *notice_texts, verdict, *doubts]))


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
        # As this process was started, which Python and reading of many files have changed.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_NOFILE, FILE_LIMITS)
        os.execvpe(self.command[0], self.command, dict(self.environment))


def _program(options: Parsed, checkpoint: str, team: Team) -> Program:
    """Return the program for this process, with its checkpoint and its rank filled in."""
    who = {"RANK_ID": str(team.rank), "RANK_SIZE": str(team.size), "DEVICE_ID": str(local_rank())}
    environment = {**who, **os.environ, **(who if team.size > 1 else {})}
    environment["LOAD_CHECKPOINT"] = checkpoint
    values = environment["RANK_ID"], checkpoint  # which may hold {rank}
    filled = []
    for part in options.program:
        for word, value in zip(_FILLED_IN, values):
            part = part.replace(f"{{{word}}}", value)
        filled.append(part)
    return Program(filled, environment, checkpoint, options.uses_mpi)


def _check(options: Parsed, team: Team) -> None:
    if not options.program:
        raise UsageError("launch: which program? launch --load CKPT ... -- python train.py ...")
    if shutil.which(options.program[0]) is None:
        raise UsageError(f"launch: there is no program {options.program[0]!r} in PATH")
    words = re.findall(r"\{(\w+)\}", " ".join(options.program))
    for word in words:
        # Its variables RANK_ID and LOAD_CHECKPOINT have the same in other words.
        near = word.lower().removesuffix("_id").removeprefix("load_")
        suggestion = "" if word in _FILLED_IN else did_you_mean(near, _FILLED_IN)
        if suggestion:
            suggestion = re.sub(r"(\w+)\?", r"{\1}?", suggestion)
            raise UsageError(f"launch: {{{word}}} is not filled in{suggestion}")
    if unknown_words := [word for word in words if word not in _FILLED_IN]:
        filled_in = " and ".join(f"{{{word}}}" for word in _FILLED_IN)
        warn(f"the program gets {{{unknown_words[0]}}} as it is; {filled_in} are filled in")
    if team.size == 1 and msrun_workers() > 1:
        raise UsageError(
            f"launch: {msrun_workers()} workers were started without MPI, as by msrun, and "
            "they would convert the same folder",
            "start them by mpirun or srun",
            "let the program call rankxform.load or rankxform.mindspore.load_into",
        )
