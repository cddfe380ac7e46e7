"""The verb ``transform``."""

from __future__ import annotations

from rankxform.transport import Team

from .options import Parsed
from .screen import Screen, profile


def run(options: Parsed, team: Team) -> int:
    if options.dry_run:
        from . import plan

        return plan.run(options, team)
    from rankxform.verbs.transform import transform

    screen = Screen(options, team)
    request = screen.request()
    transform_report = transform(request, team, screen.begin_writing)
    screen.show_done("transform", transform_report)
    if options.profile:
        screen.say(profile(transform_report))
    screen.page_of_work(done=transform_report)
    return 0
