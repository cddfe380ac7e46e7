"""Whether a destination holds the same model as the source, whatever tool wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import FORMS, USUAL, Listing, Shards, Wish
from rankxform.checkpoints.folder import tensor_files
from rankxform.engine.checksum import Fingerprint, sum_of_file
from rankxform.engine.compare_sink import Comparison, Difference, Expected, mismatches
from rankxform.engine.pipeline import Messenger, Traffic, carry
from rankxform.errors import CheckpointError, StorageError, UsageError
from rankxform.formats.base import Index
from rankxform.planning.assign import Assignment, assign_visible
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange, bytes_to_write
from rankxform.planning.visibility import Visibility
from rankxform.publish import companions
from rankxform.publish.target import MANIFEST_NAME, manifest
from rankxform.storage import samples
from rankxform.storage.identity import digest
from rankxform.storage.index import Indexer
from rankxform.storage.posix import OnProgress
from rankxform.storage.sources import Sources
from rankxform.transport import Team
from rankxform.transport.team import Show, quiet
from rankxform.values import dataclass

from .checks import compare_ranks, strangers, warn_of
from .manifest import expected, verify_command
from .measure import plan_work
from .opened import opened
from .prepare import Conversion, prepare
from .request import Request
from .standing import compare_files, record_folder, standing_files
from .visibility import searched_nodes, visibility_of


@dataclass(frozen=True)
class Verdict:
    """What a verification found, over all processes.

    differences: by parameter and rank. files, compared: how many destination files, and how many
    bytes of them, were compared. by_manifest: differences are of files, not of parameters; with
    `sizes_only` no byte but the headers was compared, and `command` is what would. step: of the
    source, if its files' names state one. names: of destination files by id, where a difference's
    rank is the id of a file (in rank folders it is a rank). warnings: what may not be what was
    meant; notices: what to know.
    """

    differences: tuple[Difference, ...]
    files: int
    compared: int
    seconds: float
    processes: int
    notices: tuple[str, ...]
    by_manifest: bool = False
    sizes_only: bool = False
    warnings: tuple[str, ...] = ()
    command: str | None = None
    step: str | None = None
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def checked(self) -> str:
        """What was compared: "bytes" with the source, "fingerprints" or "sizes" with a manifest."""
        return "sizes" if self.sizes_only else "fingerprints" if self.by_manifest else "bytes"

    @property
    def same(self) -> bool | None:
        """Whether both sides hold the same; None where no difference was found and no byte of
        content compared."""
        if self.differences:
            return False
        return None if self.sizes_only else True


def verify(
    request: Request,
    team: Team,
    begin: Callable[[Conversion, int], Show] = lambda conversion, nbytes: quiet,
) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written.
    """
    began = time.monotonic()
    request, standing, as_first = standing_files(request, team)
    conversion = prepare(request, team)
    files, planner, target = conversion.files, conversion.planner, conversion.target
    _, notices = compare_ranks(conversion, team)
    there, searched = standing.there, searched_nodes(team)
    paths = (standing.shards or team.bcast(lambda: _choose(conversion, there, searched))).paths
    visibility, _ = visibility_of(team, paths, as_first)
    indexes, found = _indexes(paths, team, visibility)
    if standing.shards is not None:
        planner, faults = compare_files(conversion, standing.shards, indexes, team)
        conversion = replace(conversion, planner=planner, made=tuple(indexes))
        found += faults
    nothing: Assignment = [[] for _ in range(team.size)]
    assignment = team.agree(
        lambda: assign_visible(planner, list(indexes), visibility) if indexes else nothing
    )
    plan = plan_work(request, files, planner, assignment, team)
    p2p = team.p2p() if plan.exchanges else None
    total = sum(team.allgather(lambda: bytes_to_write(plan.transfers)))
    show = begin(conversion, total) if team.rank == 0 else quiet

    def compare(on_progress: OnProgress) -> tuple[Traffic, list[Difference]]:
        with Sources(paths, indexes) as destination:
            sinks = _sinks(planner, destination, indexes, assignment[team.rank])
            memory = request.memory // 2
            traffic = _compare(conversion, plan, sinks, memory, on_progress, p2p)
        return traffic, [one for sink in sinks.values() for one in sink.differences.values()]

    traffic, differing = team.work(compare, show)
    checked = visibility.partition(indexes)[team.rank]
    found += differing
    found += team.work(lambda tick: _checksums(paths, indexes, checked, tick), quiet)
    every = team.allgather(lambda: (traffic.written, found))
    extra = _extra_ranks(planner, there) if standing.shards is None else []
    everything = (one for some in (*(some for _, some in every), extra) for one in some)
    differences = {(one.name, one.rank): one for one in everything}
    if differences:
        notices += _made_with(standing.folder, team)
    return Verdict(
        tuple(sorted(differences.values(), key=lambda one: (one.name, one.rank))),
        len(indexes),
        sum(nbytes for nbytes, _ in every),
        time.monotonic() - began,
        team.size,
        (*conversion.notices, *notices, *standing.notices),
        warnings=(*conversion.warnings, *warn_of(strangers(target.form, paths.values(), team))),
        step=files.shards.step_name,
        names=standing.names,
    )


def _made_with(folder: Path, team: Team) -> list[str]:
    """Return, as a notice, the command with the options that a folder was made with, if known.

    Collective; what it does not find or cannot read, no process does.
    """
    with suppress(StorageError, UsageError):
        command = verify_command(_merged(_manifests(folder, team)[0]), str(folder))
        return [f"{folder}: by its manifest, the command that compares it is: {command}"]
    return []


def _merged(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first of the manifests that nodes have, with the files of all."""
    files = {name: facts for record in manifests for name, facts in record["files"].items()}
    return {**manifests[0], "files": files}


def _extra_ranks(planner: Planner, there: Listing) -> list[Difference]:
    """Return what is wrong with rank folders beyond the destination's ranks."""
    last = planner.dst.ranks - 1
    why = f"should not be here: {planner.dst.label} has rank{f's 0 to {last}' if last else ' 0'}"
    return [
        Difference(str(path), rank, f"{why} only", whole_file=True)
        for rank, paths in there.files.items()
        for path in paths
        if rank > last
    ]


def _sinks(
    planner: Planner,
    destination: Sources,
    indexes: Mapping[int, Index],
    mine: Sequence[SliceRange],
) -> dict[int, Comparison]:
    ranks = dict.fromkeys(one.rank for one in mine)
    return {
        rank: Comparison(rank, destination, indexes[rank], _expected(planner, rank))
        for rank in ranks
    }


def _compare(
    conversion: Conversion,
    plan: WorkPlan,
    sinks: Mapping[int, Comparison],
    memory: int,
    on_progress: OnProgress,
    p2p: Messenger | None,
) -> Traffic:
    with opened(conversion) as (sources, operands):
        return carry(plan, sinks, sources, memory, on_progress, p2p=p2p, operands=operands)


def _expected(planner: Planner, rank: int) -> dict[str, Expected]:
    layouts = planner.names(rank).values()
    return {
        p.name: Expected(p.dtype, layout.grid(p.shape).box(planner.cell(layout, rank)))
        for (p, _), layout in zip(planner.slices(rank), layouts)
    }


def _choose(conversion: Conversion, there: Listing, searched: str) -> Shards:
    """Return the files to compare, of what is there. Raises CheckpointError if one is missing."""
    target, dst, ranks = conversion.target, conversion.planner.dst, conversion.ranks
    own = conversion.finals
    if all(path in there.files.get(rank, ()) for rank, path in own.items()):
        return Shards(own)
    found = target.form.choose(target.folder, there, ranks, Wish(), searched)
    missing = [rank for rank in ranks if rank not in found.paths]
    if missing:
        raise CheckpointError(
            f"{target.folder}: has no file of destination rank {missing[0]}"
            + (f" and of {len(missing) - 1} more" if missing[1:] else "")
            + f"{searched}; {dst.label} has ranks 0 to {dst.ranks - 1}"
        )
    return replace(found, paths={rank: found.paths[rank] for rank in ranks})


def _checksums(
    paths: Mapping[int, Path],
    indexes: Mapping[int, Index],
    ranks: Sequence[int],
    on_progress: OnProgress,
) -> list[Difference]:
    """Compare the files of `ranks` with the checksums that they carry."""
    wrong = {rank: samples.wrong_crc(paths[rank], indexes[rank], on_progress) for rank in ranks}
    return [
        Difference(paths[rank].name, rank, why, whole_file=True)
        for rank, why in wrong.items()
        if why
    ]


def verify_alone(
    folder: str, team: Team, begin: Callable[[int], Show] = lambda total: quiet
) -> Verdict:
    """Compare a destination with its own manifest: sizes and headers, and fingerprints if kept.

    Where nodes have folders of their own, each is compared with its own manifest. Checkpoint files
    in rank folders that no manifest lists are differences.
    """
    began = time.monotonic()
    where = team.bcast(lambda: record_folder(Path(folder).absolute()))
    manifests, leaders = _manifests(where, team)
    facts_of_all = [facts for record in manifests for facts in record["files"].values()]
    with_digests = all("digest" in facts for facts in facts_of_all)
    mine = []
    strange: list[Difference] = []
    for record, processes in zip(manifests, leaders):
        files = sorted(record["files"].items(), key=lambda item: item[1]["rank"])
        if team.rank in processes:
            own = files[processes.index(team.rank) :: len(processes)]
            mine += [(name, facts, record) for name, facts in own]
        if team.rank == processes[0]:
            strange += _not_listed(where, record)
    total = sum(facts["size"] for facts in facts_of_all) if with_digests else 0
    show = begin(total) if team.rank == 0 else quiet
    found: list[Difference] = []

    def check(on_progress: OnProgress) -> int:
        done = 0
        for name, facts, record in mine:
            wrong, nbytes = _check_file(where / name, facts, record, on_progress)
            found.extend(wrong)
            done += nbytes
        return done

    compared = team.work(check, show)
    every = team.allgather(lambda: (compared, found + strange))
    return Verdict(
        tuple(sorted((one for _, some in every for one in some), key=lambda one: one.rank)),
        len(facts_of_all),
        sum(nbytes for nbytes, _ in every),
        time.monotonic() - began,
        team.size,
        (),
        by_manifest=True,
        sizes_only=not with_digests,
        command=verify_command(_merged(manifests), folder),
        names=_names(manifests[0]),
    )


def _names(record: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of files by id, of a form whose ids are no ranks."""
    if not FORMS[record.get("form", USUAL)].described:
        return {}
    return {facts["rank"]: name for name, facts in record["files"].items()}


def _not_listed(folder: Path, record: Mapping[str, Any]) -> list[Difference]:
    """Return the checkpoint files of a destination that its manifest does not know."""
    there = FORMS[record.get("form", USUAL)].look(folder, Wish())
    found = [
        Difference(name, rank, "is in no manifest of this folder", whole_file=True)
        for rank, paths in there.files.items()
        for path in paths
        if (name := str(path.relative_to(folder))) not in record["files"]
    ]
    found += [
        Difference(name, 0, "is in no manifest of this folder", whole_file=True)
        for name in tensor_files(there.named)
        if name not in record["files"]
    ]
    wrong = companions.faults(folder, record)
    return found + [Difference(name, 0, why, whole_file=True) for name, why in wrong.items()]


def _manifests(folder: Path, team: Team) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the manifests that nodes have, and for each the processes that have it."""
    nodes, path = team.nodes, folder / MANIFEST_NAME
    there = team.allgather(lambda: nodes.is_leader(team.rank) and path.is_file())
    known = team.allgather(lambda: digest(path) if there[team.rank] else b"")
    groups: dict[bytes, list[int]] = {}
    for node, processes in enumerate(nodes.processes):
        if known[processes[0]]:
            groups.setdefault(known[processes[0]], []).append(node)
    alike = list(groups.values())
    if not alike:
        raise UsageError(
            f"{path}: there is no manifest; this is no finished destination of rankxform. "
            "Compare it with its source: verify SRC DST --src-strategy A --dst-strategy B"
        )
    leaders = [[p for node in group for p in nodes.processes[node]] for group in alike]
    firsts = {processes[0] for processes in leaders}
    records = team.allgather(lambda: manifest(folder) if team.rank in firsts else None)
    return [one for one in records if one is not None], sorted(leaders)


def _check_file(
    path: Path, facts: Mapping[str, Any], record: Mapping[str, Any], on_progress: OnProgress
) -> tuple[list[Difference], int]:
    """Compare one file with what the manifest says of it; return also the bytes compared."""
    rank = facts["rank"]
    if not path.is_file():
        return [Difference(path.name, rank, "is missing")], 0
    if path.stat().st_size != facts["size"]:
        return [Difference(path.name, rank, f"is not of the {facts['size']} bytes written")], 0
    try:
        index = Indexer().index(path)
    except CheckpointError as error:
        return [_unreadable(path, rank, error)], 0
    if "digest" not in facts:
        return [], 0
    slices = _expected_by(record, rank, path)
    wrong = mismatches(index, rank, {name: one for name, (_, one) in slices.items()})
    if wrong:
        return wrong, 0
    with Sources({rank: path}, {rank: index}) as sources:
        total = sum_of_file(Fingerprint(record["seed"]), sources, rank, slices, on_progress)
    if f"{total:016x}" != facts["digest"]:
        return [Difference(path.name, rank, "was changed since it was written")], facts["size"]
    return _checksums({rank: path}, {rank: index}, [rank], on_progress), facts["size"]


def _indexes(
    paths: Mapping[int, Path], team: Team, visibility: Visibility
) -> tuple[dict[int, Index], list[Difference]]:
    """Return the indexes of all destination files, and the files that this process cannot read."""
    wrong: dict[int, Difference] = {}

    def look() -> dict[int, Index]:
        found, indexer = {}, Indexer()
        for rank in visibility.partition(paths)[team.rank]:
            try:
                found[rank] = indexer.index(paths[rank])
            except CheckpointError as error:
                wrong[rank] = _unreadable(paths[rank], rank, error)
        return found

    every = team.allgather(look)
    return dict(sorted(one for some in every for one in some.items())), list(wrong.values())


def _unreadable(path: Path, rank: int, error: CheckpointError) -> Difference:
    return Difference(path.name, rank, f"cannot be read: {error}", whole_file=True)


def _expected_by(record: Mapping[str, Any], rank: int, path: Path) -> Any:
    try:
        return expected(record, rank)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StorageError(
            f"{MANIFEST_NAME}: damaged: what it says of {path} makes no sense ({error!r}); compare "
            "with the source instead (verify SRC DST)"
        ) from error
