"""The verb ``merge``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rankxform.display.text import labelled_lines
from rankxform.transport import Team

from .options import add_json
from .screen import Screen

if TYPE_CHECKING:
    from rankxform.layout.strategy import Strategy

SUMMARY = "Write the strategy files of all stages as one that MindSpore reads."
EXAMPLE = "rankxform merge output/strategy merged.ckpt"


def add_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "folder", metavar="FOLDER", help="the stages' strategy files, all protobuf or all JSON"
    )
    verb.add_argument("target", metavar="FILE", help="the merged file; .json for JSON stages")
    verb.add_argument("--overwrite", action="store_true", help="replace FILE")
    add_json(verb)


def run(options: argparse.Namespace, team: Team) -> int:
    from rankxform.storage.user_files import merge_stage_files

    target = Path(options.target)

    def merge() -> Strategy:
        return merge_stage_files(Path(options.folder), target, overwrite=options.overwrite)

    merged = team.bcast(merge)
    facts = {"files": [str(target)], **merged.facts}
    Screen(options, team).result("merge", lambda: facts, partial(_text, target, merged))
    return 0


def _text(target: Path, strategy: Strategy) -> str:
    """Say what was merged, and what MindSpore will make of it."""
    text = labelled_lines("done", f"{target}: {strategy.extent}")
    dashes = [name for name in strategy.stages_of if "-" in name]
    if dashes:
        text += "\n" + labelled_lines(
            "note",
            "MindSpore's own reader does not take names with a dash, such as "
            f"{dashes[0]!r}; rankxform does",
        )
    return text
