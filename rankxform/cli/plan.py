"""The verb ``plan``, for the running processes or for a simulated cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankxform.errors import UsageError
from rankxform.transport import Team

from .options import Parsed
from .screen import Screen, header

if TYPE_CHECKING:
    from rankxform.request import Request


def run(options: Parsed, team: Team) -> int:
    """Plan; of ``transform --dry-run`` too, which predicts how long it takes."""
    from rankxform.verbs.picture import in_words
    from rankxform.verbs.plan import Plan, plan

    screen = Screen(options, team)
    request = screen.request()
    if getattr(options, "simulate", None):
        return _simulate(request, options, team, screen)
    if getattr(options, "nodes", None) or getattr(options, "src_placement", None):
        raise UsageError("--nodes and --src-placement are for --simulate P")
    processes, is_dry_run = getattr(options, "processes", None), options.verb == "transform"
    conversion, planned = plan(
        request, team, processes, timed=is_dry_run, proves=getattr(options, "prove", False)
    )
    screen.page(conversion, planned)

    def with_words() -> Plan:
        if options.json:
            return planned
        commands: tuple[str, ...] = ()
        if conversion.target.dst and conversion.source.paths and not planned.is_short:
            timed = "with --dry-run: how long that would take, measured"
            is_timed = planned.predicted_seconds is not None or planned.upload is not None
            command = screen.command("transform", without=("--dry-run",))
            commands = (command, *(() if is_timed else (timed,)))
        return replace(in_words(planned, conversion.target), next=commands)

    return screen.show(
        "plan", with_words, lambda: [header(conversion, planned.processes), *screen.defaults()]
    )


def _simulate(request: Request, options: Parsed, team: Team, screen: Screen) -> int:
    from rankxform.target.node_folders import PLACEMENT_SHARED
    from rankxform.verbs.plan import Cluster, simulate, summarize

    processes = options.simulate
    nodes = options.nodes or -(-processes // 8)
    cluster = Cluster(processes, nodes, options.src_placement or PLACEMENT_SHARED)
    conversion, work, outcome = simulate(request, team, cluster, proves=options.prove)
    if options.report:
        plan = team.bcast(lambda: summarize(conversion, work))
        screen.page(conversion, plan, simulated=outcome)
    return screen.show("simulation", lambda: outcome, lambda: [header(conversion, processes)])
