"""The verb ``transform``."""

from __future__ import annotations

from functools import partial

from rankxform.cli import plan
from rankxform.transport import Team

from .options import Parsed
from .screen import Screen, profile, summary, verify_command


def run(options: Parsed, team: Team) -> int:
    if options.dry_run:
        return plan.run(options, team)
    from rankxform.verbs.transform import transform

    screen = Screen(options, team)
    request = screen.request()
    transform_report = transform(request, team, screen.begin_writing)
    verify = partial(verify_command, screen.begun, team.size)
    text = partial(summary, transform_report, verify, screen.is_verbose, screen.is_quiet)
    screen.done("transform", transform_report.as_dict, text)
    if options.profile:
        screen.say(profile(transform_report))
    screen.page_of_work(done=transform_report)
    return 0
