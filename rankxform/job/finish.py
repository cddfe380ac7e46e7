"""The end of a conversion: complete part files get their names, and the manifests appear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rankxform.engine.checksum import MODULUS
from rankxform.engine.file_sink import Output, part_of
from rankxform.errors import StorageError
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.transfers import SliceRange
from rankxform.publish.facts import Facts, facts_of, known_facts
from rankxform.publish.journal import Journal
from rankxform.publish.links import HARD, link_all
from rankxform.publish.state import State
from rankxform.publish.target import TargetFolder
from rankxform.request import Request
from rankxform.storage.posix import publish, remove
from rankxform.target.aim import Conversion
from rankxform.target.placement import NodeFolder
from rankxform.target.strategy_file import keep_beside
from rankxform.transport import Team
from rankxform.values import dataclass

from .manifest import contents, verify_options

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What one process does: its outputs, and the plan for the part of them that is not done yet.

    everything: all slices that are left, of all processes. groups: ranks whose files are equal,
    by the one whose file is written. root: the folder that the process writes to.
    """

    conversion: Conversion
    state: State
    plan: WorkPlan
    outputs: Mapping[int, Output]
    everything: Sequence[SliceRange]
    groups: Mapping[int, Sequence[int]]
    root: NodeFolder

    @property
    def request(self) -> Request:
        return self.conversion.request

    @property
    def linked(self) -> int:
        return sum(len(ranks) - 1 for ranks in self.groups.values())

    def in_root(self, found: Sequence[Mapping[Path, T]]) -> dict[Path, T]:
        """Return what the processes of this folder found; `found` is by process."""
        mine = [found[process] for process in self.root.processes]
        return {path: one for some in mine for path, one in some.items()}

    @property
    def owned(self) -> dict[int, Output]:
        """The outputs that this process creates, finishes and publishes."""
        return {rank: output for rank, output in self.outputs.items() if output.owned}


def publish_all(
    work: Work,
    team: Team,
    folder: TargetFolder | None,
    journal: Journal,
    sums: Sequence[Mapping[int, int]],
) -> None:
    """Note which files are complete, rename them, and write the manifests, process 0's last."""
    seen = _seen(work, team)
    facts = team.allgather(lambda: _link(work, journal, seen))
    team.agree(
        lambda: _complete(work, folder, work.in_root(facts), sums) if folder is not None else None
    )
    now = _seen(work, team)
    team.agree(lambda: _rename(work, facts[team.rank], now))
    team.agree(lambda: _finish(work, folder) if folder is not None and team.rank != 0 else None)
    team.bcast(lambda: _finish(work, folder))


def _seen(work: Work, team: Team) -> dict[int, Facts]:
    """Return size and time of the part files, by rank, as the last to write has them. Collective.

    In bytes and nanoseconds; a file that no process sees is left out.

    On a network file system a node may not know yet what another has written to the same file: it
    sees it shorter, and older.
    """

    def mine() -> dict[int, Facts]:
        found = {rank: known_facts(output.part) for rank, output in work.outputs.items()}
        return {rank: facts for rank, facts in found.items() if facts is not None}

    seen: dict[int, Facts] = {}
    for one in team.allgather(mine):
        for rank, facts in one.items():
            known = seen.setdefault(rank, {"size": 0, "modified": 0})
            known.update((key, max(known[key], facts[key])) for key in known)
    return seen


def _known(work: Work, output: Output, final: Path, seen: Facts) -> Facts:
    """Return the facts of the part file of `final`; `seen` are those of the output's own file."""
    own = final == output.final or work.request.link == HARD
    return {**facts_of(part_of(final)), **(seen if own else {})}


def _link(work: Work, journal: Journal, seen: Mapping[int, Facts]) -> dict[Path, Facts]:
    """Make part files for equal files too; return the facts of each complete part file.

    Raises StorageError where a part file is not the one that was made, or not of its size.
    """
    request, found = work.request, {}
    for rank, output in work.owned.items():
        nbytes = output.layout.size
        facts = {**facts_of(output.part), **seen[rank]}
        _check_part(output.part, facts, journal.parts[rank].inode, nbytes)
        link_all(output.part, output.equal, request.link, durable=request.fsync)
        for final in output.output_paths:
            found[final] = facts = _known(work, output, final, seen[rank])
            _check_part(part_of(final), facts, facts["inode"], nbytes)
    return found


def _rename(work: Work, facts: Mapping[Path, Facts], seen: Mapping[int, Facts]) -> None:
    """Give every complete part file its final name, if it still is what was noted."""
    for rank, output in work.owned.items():
        for final in output.output_paths:
            found, noted = _known(work, output, final, seen[rank]), facts[final]
            _check_part(part_of(final), found, noted["inode"], noted["size"])
            publish(part_of(final), final, durable=work.request.fsync)


def _check_part(part: Path, found: Facts, inode: int, nbytes: int) -> None:
    """Raise StorageError for a part file that was changed; it is removed, to be made anew."""
    if (found["inode"], found["size"]) != (inode, nbytes):
        remove(part)
        raise StorageError(
            f"{part}: something else has changed or replaced it ({found['size']:,} bytes, "
            f"{nbytes:,} were written); it was removed, to be made anew"
        )


def _complete(
    work: Work,
    folder: TargetFolder,
    facts: Mapping[Path, Facts],
    sums: Sequence[Mapping[int, int]],
) -> None:
    """Note which files are complete, with the fingerprints of all processes and runs added up.

    On the first process of a folder.
    """
    every = [work.state.completed.sums, *sums]
    digests = {
        work.conversion.target.path(
            rank
        ): f"{sum(one.get(first, 0) for one in every) % MODULUS:016x}"
        for first, ranks in work.groups.items()
        for rank in ranks
        if work.request.verify and rank in work.root.ranks
    }
    folder.complete(facts, digests)


def _finish(work: Work, folder: TargetFolder | None) -> None:
    """Write a folder's manifest, on its first process; process 0's is the last.

    A derived strategy comes before it, when the files that it describes have their names.
    """
    assert folder is not None
    conversion = work.conversion
    planner, target = conversion.planner, conversion.target
    kept = contents(planner, conversion.output_files) if work.request.verify else {}
    options = verify_options(conversion.request, conversion.source)
    keep_beside(conversion)
    names = target.arrangement.names
    folder.finish(
        {**kept, "ranks": len(names), "verify": options},
        names.values(),
        lambda: target.form.companions(planner, target.arrangement, conversion.common),
    )
