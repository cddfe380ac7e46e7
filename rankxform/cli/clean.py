"""The verb ``clean``."""

from __future__ import annotations

from rankxform.transport import Team

from .options import Parsed
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    from rankxform.verbs.clean import clean

    return Screen(options, team).show("clean", lambda: clean(options.dst))
