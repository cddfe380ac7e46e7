"""The verb ``follow``."""

from __future__ import annotations

from rankxform.transport import Team

from .options import Parsed
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    from rankxform.verbs.follow import FollowSettings, follow

    screen = Screen(options, team)
    settings = FollowSettings(options.watch, options.settle, options.keep)
    request = screen.request()
    outcome = follow(request, settings, team, screen.begin_writing, screen.say)
    screen.show_done("follow", outcome)
    return 0
