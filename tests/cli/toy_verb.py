"""A verb of its own: one module, and one line in the table."""

from __future__ import annotations

from functools import partial

from rankxform.cli.options import Json
from rankxform.cli.parser import COMMANDS, Command, Place
from rankxform.cli.screen import Screen
from rankxform.options import GROUP_COMMAND, TYPE_FLAG, option


class TallyOptions(Json):
    twice = option(False, GROUP_COMMAND, "count every file twice", kind=TYPE_FLAG)


def register():
    COMMANDS["tally"] = Command(
        "tally", "Count the files of a checkpoint.", "rankxform tally output/checkpoint",
        (Place("path", "PATH", "a checkpoint"),), own=(TallyOptions,), module=__name__,
    )  # fmt: skip


def run(options, team):
    from rankxform.checkpoints.base import CheckpointRef
    from rankxform.source.open import open_source

    source = open_source(CheckpointRef(options.path), team)
    number = len(source.paths) * (2 if options.twice else 1)
    text = partial("{} files, {} processes".format, number, team.size)
    Screen(options, team).result("tally", lambda: {"files": number}, text)
    return 0
