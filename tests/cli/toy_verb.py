"""A verb of its own: an item of the table, a class of options, and a result with its sections."""

from __future__ import annotations

from rankxform.cli.options import Json
from rankxform.cli.parser import COMMANDS, Command, Place
from rankxform.cli.screen import Screen
from rankxform.options import GROUP_COMMAND, TYPE_FLAG, choice_of, option
from rankxform.results import NORMAL, Drawing, Result, Table, lines
from rankxform.values import dataclass


class TallyOptions(Json):
    twice = option(False, GROUP_COMMAND, "count every file twice", kind=TYPE_FLAG)
    unit = option("files", GROUP_COMMAND, "what is counted", kind=choice_of(("files", "heaps")))


@dataclass(frozen=True, repr=False)
class Tally(Result):
    """How many files there are."""

    files: int
    processes: int
    unit: str = "files"
    warnings: tuple[str, ...] = ()

    def in_short(self):
        return f"{self.files} {self.unit}, {self.processes} processes"

    def sections(self, level=NORMAL):
        yield lines("", self.in_short())
        if level > NORMAL:
            yield Table(("files", "processes"), [(self.files, self.processes)])
        yield Drawing("layers", [])


def register():
    COMMANDS["tally"] = Command(
        "tally", "Count the files of a checkpoint.", "rankxform tally output/checkpoint",
        (Place("path", "PATH", "a checkpoint"),), takes=(TallyOptions,), module=__name__,
    )  # fmt: skip


def run(options, team):
    from rankxform.checkpoints.base import CheckpointRef
    from rankxform.source.open import open_source

    source = open_source(CheckpointRef(options.path), team)
    number = len(source.paths) * (2 if options.twice else 1)
    return Screen(options, team).show("tally", lambda: Tally(number, team.size, options.unit))
