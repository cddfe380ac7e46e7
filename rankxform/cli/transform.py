"""The verb ``transform``."""

from __future__ import annotations

import argparse
from functools import partial

from rankxform.cli import plan
from rankxform.options import GROUP_RUN
from rankxform.transport import Team

from .arguments import IGNORED
from .options import STRATEGIES_EXAMPLE, add_folders, add_number, add_report, add_table, add_work
from .screen import Screen, profile, summary, verify_command

SUMMARY = "Convert a checkpoint."
EXAMPLE = f"rankxform transform -n 8 output/checkpoint new_ckpt \\\n      {STRATEGIES_EXAMPLE}"


def add_options(verb: argparse.ArgumentParser) -> None:
    add_folders(verb)
    run = add_table(verb, "transform")[GROUP_RUN]
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the predicted time, convert nothing; to measure, each process "
        "writes a file of 64 MiB in DST and removes it",
    )
    run.add_argument("--profile", action="store_true", help="print where each process's time went")
    add_work(verb, run)
    add_number(verb)
    add_report(verb)
    for ignored in IGNORED:
        verb.add_argument(ignored, help=argparse.SUPPRESS)


def run(options: argparse.Namespace, team: Team) -> int:
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
