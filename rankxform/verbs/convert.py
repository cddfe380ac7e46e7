"""A conversion into any destination: what every verb that moves bytes does.

For what processes wait, step by step, by kind of destination; the last entry of a line is that of
all kinds behind it. `look` is what `source.place.look_at` calls for, `open` what `open_place` does;
files that exist may be described by themselves. Several nodes, measurements for a read method, some
operations, files that lie in a folder already, `--crc` and `--verify` ask for more.

step          | folder                    | one file  | arrays    | existing | described
prepare       | -                         | -         | allgather | 2 bcast  | 2 bcast, open, agree
resolve       | bcast, look, open, 2 agree
check_free    | agree, 2 allgather, bcast | -
with_evidence | work, allgather, agree
claim         | 2 allgather, 2 agree | -         | agree | open, agree, bcast, 2 agree | 3 agree
plan_work     | 3 agree, allgather
begin         | agree, 2 allgather, agree | -         | agree     | -
move          | work
publish| 2 allgather, 2 agree, 2 allgather, 2 agree, bcast | - | agree | work, allgather, bcast
sum_up        | allgather, bcast, allgather | allgather | allgather | allgather, bcast, allgather
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from rankxform.engine.copier import ValueStats
from rankxform.engine.pipeline import Traffic
from rankxform.errors import UsageError
from rankxform.layout.names import summarize_names
from rankxform.planning.evidence import Evidence
from rankxform.planning.exchange import WorkPlan
from rankxform.process import Phases, peak_memory, throttled
from rankxform.request import Request
from rankxform.source.source import Source
from rankxform.statements import Finding, HasFindings, as_notice, as_warning
from rankxform.target.destination import Destination, open_work_inputs
from rankxform.target.findings import adding_suggestions
from rankxform.target.resolve import resolve
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.transport.team import OnProgress, ShowProgress, show_nothing
from rankxform.values import NamedTuple, dataclass

from .evidence import with_evidence
from .work import plan_work

OnStart = Callable[[Conversion, int], ShowProgress]
"""Called with what was asked for, and the bytes to move, before the first is; returns the function
that is shown the progress. Process 0's is shown it."""


def start_silently(conversion: Conversion, nbytes: int) -> ShowProgress:
    """Show nothing."""
    return show_nothing


class ProcessOutcome(NamedTuple):
    """What one process did."""

    traffic: Traffic
    peak_memory: int  # bytes
    phases: Mapping[str, float]  # phase -> seconds
    bytes_fetched: int | None  # that storage gave it; None: the system does not count it


@dataclass(frozen=True)
class Outcome(HasFindings):
    """What a conversion did. The same on every process but for the destination."""

    conversion: Conversion  # as the destination made it: an existing one has its own files
    destination: Destination
    processes: tuple[ProcessOutcome, ...]
    findings: tuple[Finding, ...]  # the target's, the destination's, the engine's
    seconds: float  # of the whole call
    move_seconds: float  # from the finished plan to the last file's name

    @property
    def bytes_written(self) -> int:
        """Content of tensors that all processes put."""
        return sum(process.traffic.written for process in self.processes)


class Prepared(NamedTuple):
    """What is known of a conversion before it begins; the rest is found out."""

    source: Source | None = None  # the source, open
    conversion: Conversion | None = None  # of an open source, without evidence
    evidence: Evidence | None = None  # what samples of the source say; None: they are read
    work: WorkPlan | None = None  # what this process has to do
    per_rank_tensors: frozenset[str] = frozenset()  # for which the work was planned

    def work_for(self, conversion: Conversion) -> WorkPlan | None:
        """Return the work of this process. Raises UsageError if it was planned for others."""
        names = conversion.target.evidence.per_rank_tensors
        if self.work is not None and names ^ self.per_rank_tensors:  # the same on all processes
            raise UsageError(
                "replicas differ in other parameters than those of the plan",
                "plan_reshard for these slices",
            )
        return self.work


def convert(
    request: Request,
    destination: Destination,
    team: Team,
    on_start: OnStart = start_silently,
    prepared: Prepared | None = None,
) -> Outcome:
    """Move what `request` makes of its source into `destination`. Collective.

    prepared: what is known before; the same on every process but for its work.
    """
    phases = Phases("plan")
    given_request, request = request, destination.prepare(request, team)
    conversion = prepared.conversion if prepared else None
    if conversion is None:
        source = prepared.source if prepared else None
        conversion = resolve(request, team, phases.enter, source)
    else:
        assert request is given_request, "what is resolved already is not asked for anew"
    phases.enter("compare")
    conversion = conversion.with_findings(destination.check_free(conversion, team))
    evidence = prepared.evidence if prepared else None
    conversion = requested = with_evidence(conversion, team, evidence)
    phases.enter("plan")
    work = prepared.work_for(conversion) if prepared else None
    with destination.claim(conversion, team) as conversion:
        work = work or plan_moves(conversion, destination, team)
        show = on_start(requested, work.nbytes)
        phases.enter("move")
        destination.begin(team)
        traffic = move(work, conversion, destination, team, show)
        phases.enter("publish")
        destination.publish(team)
    phases.enter("wait")
    return sum_up(conversion, destination, traffic, phases, team)


def plan_moves(conversion: Conversion, destination: Destination, team: Team) -> WorkPlan:
    """Return what this process has to do for a destination that is claimed. Collective.

    With `--verify` the plan is proved, where all that is to be put is known.
    """
    with adding_suggestions(conversion.resolved, conversion.source, team):
        at_once = 1 if destination.is_ascending else destination.files_at_once
        work = plan_work(
            conversion, destination.left, team, at_once, is_ascending=destination.is_ascending,
            in_memory=destination.is_memory,
        )  # fmt: skip
    if conversion.request.verify and destination.due is not None:
        from .proof import prove_plan

        destination.proof = prove_plan(conversion, destination.due, destination.left, work, team)
    return work


def move(
    work: WorkPlan, conversion: Conversion, destination: Destination, team: Team, show: ShowProgress
) -> Traffic:
    """Read, exchange, assemble and put what every process has to. Collective."""
    messenger = team.p2p() if work.exchanges else None
    throttle = conversion.request.throttle

    def fill(on_progress: OnProgress) -> Traffic:
        with ExitStack() as stack:
            if throttle is not None:
                on_progress = stack.enter_context(throttled(on_progress, throttle / team.size))
            opening = open_work_inputs(conversion, work, messenger, on_progress)
            return destination.fill(work, stack.enter_context(opening), on_progress)

    return team.work(fill, show)


def sum_up(
    conversion: Conversion, destination: Destination, traffic: Traffic, phases: Phases, team: Team
) -> Outcome:
    """Gather what all processes did. Collective."""
    of_destination = destination.findings(team)
    passed = phases.seconds
    seconds, move_seconds = time.monotonic() - phases.began, passed.pop("move") + passed["publish"]
    for name, phase_seconds in traffic.seconds.items():
        passed[name] += phase_seconds
    passed["wait"] += passed["start"] + seconds - sum(passed.values())
    processes = team.allgather(
        lambda: ProcessOutcome(traffic, peak_memory(), passed, phases.bytes_fetched())
    )
    traffics = [process.traffic for process in processes]
    notices = dict.fromkeys(text for traffic in traffics for text in traffic.notices)
    of_engine = [*map(as_notice, notices), *lost_values(traffics)]
    findings = (*conversion.target.findings, *of_destination, *of_engine)
    return Outcome(conversion, destination, tuple(processes), findings, seconds, move_seconds)


def lost_values(traffic_by_process: Iterable[Traffic]) -> list[Finding]:
    """Return which parameters are zero, or no numbers, since they were changed."""
    values_by_name: dict[str, ValueStats] = {}
    for traffic in traffic_by_process:
        for name, values in traffic.values.items():
            values_by_name[name] = values_by_name.get(name, ValueStats()) + values
    zero = [n for n, v in values_by_name.items() if v.had_values and not v.has_values]
    wrong = [name for name, tensor_values in values_by_name.items() if tensor_values.not_finite]
    warnings = []
    if zero:
        warnings.append(
            f"{summarize_names(zero, 3)}: every value is zero in the new type, and was not before"
        )
    if wrong:
        warnings.append(
            f"{summarize_names(wrong, 3)}: holds values that are infinite or no numbers"
        )
    return [as_warning(text) for text in warnings]
