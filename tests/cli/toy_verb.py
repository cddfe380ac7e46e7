"""A verb of its own: one module, and one line in the table."""

from __future__ import annotations

from functools import partial

from rankxform.cli.options import add_json
from rankxform.cli.screen import Screen

SUMMARY = "Count the files of a checkpoint."
EXAMPLE = "rankxform tally output/checkpoint"


def add_options(verb):
    verb.add_argument("path", metavar="PATH", help="a checkpoint")
    verb.add_argument("--twice", action="store_true", help="count every file twice")
    add_json(verb)


def run(options, team):
    from rankxform.checkpoints.base import CheckpointRef
    from rankxform.source.open import open_source

    source = open_source(CheckpointRef(options.path), team)
    number = len(source.paths) * (2 if options.twice else 1)
    text = partial("{} files, {} processes".format, number, team.size)
    Screen(options, team).result("tally", lambda: {"files": number}, text)
    return 0
