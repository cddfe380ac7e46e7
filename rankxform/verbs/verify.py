"""`verify`: a destination compared with its source, or with its manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from posixpath import basename
from shlex import quote
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, DEFAULT_PATTERN, FORMS, CheckpointRef
from rankxform.checkpoints.folders import tensor_files
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.engine.checksum import Fingerprint, file_fingerprint
from rankxform.engine.pipeline import execute
from rankxform.engine.sinks import ComparingSink, Difference, ExpectedSlice, header_differences
from rankxform.errors import CheckpointError, FormatError, StorageError, UsageError
from rankxform.formats.container import DeclaredFile, EntryView
from rankxform.planning.assign import Assignment, assign_within_nodes
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.publish.files import changed_model_files, wrong_companions
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME, MANIFEST_NAME, read_manifest
from rankxform.publish.records import expected_slices
from rankxform.request import Request
from rankxform.source.choose import list_and_select, listing_at
from rankxform.source.open import Source
from rankxform.storage.identity import file_digest, sample_digest
from rankxform.storage.posix import OnProgress
from rankxform.storage.source_reader import Indexer, SourceReader
from rankxform.target.destination import foreign_warnings, open_work_inputs
from rankxform.target.manifest import verify_command, verify_options
from rankxform.target.resolve import prepare
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing

from .evidence import examine
from .transform import OnStart, start_silently
from .verdict import (
    Verdict,
    check_apart,
    compare_beside,
    find_record_folder,
    open_described,
    open_existing_files,
    unreadable_file,
    wrong_checksums,
)
from .work import plan_work

_MOST_FILES = 1 << 24


def verify_alone(
    folder: str, team: Team, begin: Callable[[int], ShowProgress] = lambda total: show_nothing
) -> Verdict:
    """Compare a destination with its own manifest: sizes and headers, and fingerprints if kept.

    Where nodes have folders of their own, each is compared with its own manifest. Checkpoint files
    in rank folders that no manifest lists are differences.
    """
    began = time.monotonic()
    where = team.bcast(lambda: find_record_folder(Path(folder).absolute()))
    manifests, leaders = _manifests(where, team)
    declared_by_name = team.bcast(lambda: _declared_files(where, manifests[0]))
    facts_of_all = [facts for record in manifests for facts in record["files"].values()]
    with_digests = all("digest" in facts for facts in facts_of_all)
    local_files = []
    listed_by: Mapping[str, Any] | None = None  # of the first process that has this manifest
    for record, processes in zip(manifests, leaders):
        files = sorted(record["files"].items(), key=lambda item: item[1]["rank"])
        if team.rank in processes:
            process_files = files[processes.index(team.rank) :: len(processes)]
            local_files += [(name, facts, record) for name, facts in process_files]
        if team.rank == processes[0]:
            listed_by = record
    strange = team.allgather(lambda: [] if listed_by is None else _not_listed(where, listed_by))[
        team.rank
    ]
    total = sum(facts["size"] for facts in facts_of_all) if with_digests else 0
    show = begin(total) if team.rank == 0 else show_nothing
    differences: list[Difference] = []

    def check(on_progress: OnProgress) -> int:
        compared_bytes = 0
        for name, facts, record in local_files:
            wrong, nbytes = _check_file(
                where / name, facts, record, declared_by_name.get(name), on_progress
            )
            differences.extend(wrong)
            compared_bytes += nbytes
        return compared_bytes

    compared = team.work(check, show)
    by_process = team.allgather(lambda: (compared, differences + strange))
    return Verdict(
        None,
        str(where),
        tuple(sorted(chain.from_iterable(d for _, d in by_process), key=lambda d: d.rank)),
        len(facts_of_all),
        sum(nbytes for nbytes, _ in by_process),
        time.monotonic() - began,
        team.size,
        (),
        by_manifest=True,
        sizes_only=not with_digests,
        command=verify_command(_merge_manifests(manifests), folder),
        names=_names(manifests[0]),
        warnings=(
            *_incomplete(_merge_manifests(manifests)),
            *team.bcast(lambda: changed_model_files(where, manifests[0])),
        ),
    )


def _declared_files(folder: Path, record: Mapping[str, Any]) -> dict[str, DeclaredFile]:
    """Return what a destination's own table says of its files, of a form that has one.

    Each of them has one box of a tensor at most, which the manifest calls as the tensor.
    """
    form = FORMS[record.get("form", DEFAULT_FORM)]
    if not form.items:
        return {}
    with suppress(CheckpointError, UsageError):  # that it was changed, its digest tells
        _, _, selected = list_and_select(CheckpointRef(str(folder), form.name))
        assert selected.description is not None
        return {
            selected.names[f]: d._replace(views=tuple(map(EntryView.unplaced, d.views)))
            for f, d in selected.description.declared_files.items()
        }
    return {}


def _incomplete(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return that not all files of a destination were made, as a warning."""
    total, file_count = record.get("ranks"), len(record["files"])
    if not isinstance(total, int) or not file_count < total < _MOST_FILES:
        return ()
    unit = "files" if FORMS[record.get("form", DEFAULT_FORM)].described else "ranks"
    return (f"{file_count} of {total} {unit} were made; what was compared is these",)


def notice_of_other_options(
    request: Request, source: Source, target: Target, team: Team
) -> list[str]:
    """Return, as a notice, the command with the options that a destination was made with, if they
    are known and are not those of `request`.

    Collective; what it does not find or cannot read, no process does.
    """
    folder = target.folder
    with suppress(StorageError, UsageError):
        merged = _merge_manifests(_manifests(folder, team)[0])
        src = None if request.files is not None else source.where.path
        request_options = [src, *verify_options(request, source, target)]
        was = [merged["identity"].get("source"), *(merged.get("verify") or ())]
        if _normal(was) == _normal(request_options):
            return []
        command = verify_command(merged, str(folder))
        return [f"{folder} was made with other options; compare it with: {command}"]
    return []


def _merge_manifests(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first of the manifests that nodes have, with the files of all."""
    files = {name: facts for record in manifests for name, facts in record["files"].items()}
    return {**manifests[0], "files": files}


def _normal(words: Iterable[str | None]) -> list[str]:
    """Return a source and options without defaults and links, so that equal ones are equal."""
    pairs = [str(Path(word).resolve()) if word[0] == "/" else word for word in words if word]
    for default in (["--dst-form", "ranks"], ["--dst-strategy", "none"]):
        for position in range(len(pairs) - 1):
            if pairs[position : position + 2] == default:
                del pairs[position : position + 2]
                break
    return pairs


def _names(record: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of files by id, of a form whose ids are no ranks."""
    if not FORMS[record.get("form", DEFAULT_FORM)].described:
        return {}
    return {facts["rank"]: name for name, facts in record["files"].items()}


def _not_listed(folder: Path, record: Mapping[str, Any]) -> list[Difference]:
    """Return the checkpoint files of a destination that its manifest does not know."""
    form = FORMS[record.get("form", DEFAULT_FORM)]
    listing = listing_at(folder, form)
    ranked = {} if form.described else by_rank(listing, DEFAULT_PATTERN)
    names = [(name, rank) for rank, file_names in ranked.items() for name in file_names]
    names += [(name, 0) for name in tensor_files({*listing.entries} - listing.folders)]
    differences = [
        Difference(name, rank, "is not listed in the manifest", whole_file=True)
        for name, rank in names
        if name not in record["files"]
    ]
    wrong = wrong_companions(folder, record)
    return differences + [Difference(n, 0, r, whole_file=True) for n, r in wrong.items()]


def _manifests(folder: Path, team: Team) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the manifests that nodes have, and for each the processes that have it."""
    nodes, path = team.nodes, folder / MANIFEST_NAME
    has_manifest = team.allgather(lambda: nodes.is_leader(team.rank) and path.is_file())
    digests_by_process = team.allgather(
        lambda: file_digest(path) if has_manifest[team.rank] else b""
    )
    groups: dict[bytes, list[int]] = {}
    for node, processes in enumerate(nodes.processes):
        if digests_by_process[processes[0]]:
            groups.setdefault(digests_by_process[processes[0]], []).append(node)
    node_groups = list(groups.values())
    if not node_groups:
        if not any(team.allgather(folder.is_dir)):
            if any(team.allgather(folder.exists)):
                look = f"rankxform inspect --check {quote(str(folder))}"
                raise UsageError("is a file, not a folder that rankxform wrote", look, where=folder)
            raise UsageError("no such folder", where=folder)
        if any(team.allgather((folder / FOLDER_NAME / JOB_NAME).is_file)):
            raise UsageError(
                "a conversion into this folder was stopped, or is at work",
                "run its command again to complete it, unless it is at work",
                where=folder,
            )
        raise UsageError(
            "there is no manifest; this is no finished destination of rankxform",
            "verify SRC DST --src-strategy A --dst-strategy B, which compares it with its source",
            where=path,
        )
    leaders = [[p for node in group for p in nodes.processes[node]] for group in node_groups]
    firsts = {processes[0] for processes in leaders}
    records = team.allgather(lambda: read_manifest(folder) if team.rank in firsts else None)
    return [record for record in records if record is not None], sorted(leaders)


def _check_file(
    path: Path,
    facts: Mapping[str, Any],
    record: Mapping[str, Any],
    declared: DeclaredFile | None,
    on_progress: OnProgress,
) -> tuple[list[Difference], int]:
    """Compare one file with what the manifest says of it; return also the bytes compared."""
    rank = facts["rank"]
    if not path.is_file():
        return [Difference(path.name, rank, "is missing")], 0
    if path.stat().st_size != facts["size"]:
        return [Difference(path.name, rank, f"is not of the {facts['size']} bytes written")], 0
    try:
        index = Indexer().index(path, declared or DeclaredFile())
    except CheckpointError as error:
        return [unreadable_file(str(path), rank, str(error))], 0
    slices = _expected_by(record, rank, path)
    if slices is None:
        return [], 0
    wrong = header_differences(
        index, rank, {name: expected_slice for name, (_, expected_slice) in slices.items()}
    )
    if (
        not wrong
        and "digest" not in facts
        and facts.get("sample") not in (None, sample_digest(path))
    ):
        wrong = [Difference(path.name, rank, "was changed since it was written", whole_file=True)]
    if wrong or "digest" not in facts:
        return wrong, 0
    with SourceReader({rank: str(path)}, {rank: index}) as sources:
        total = file_fingerprint(Fingerprint(record["seed"]), sources, rank, slices, on_progress)
    if f"{total:016x}" != facts["digest"]:
        return [Difference(path.name, rank, "was changed since it was written")], facts["size"]
    return wrong_checksums({rank: str(path)}, {rank: index}, [rank], on_progress), facts["size"]


def _expected_by(record: Mapping[str, Any], rank: int, path: Path) -> Any:
    try:
        return expected_slices(record, rank)
    except FormatError as error:
        raise StorageError(
            f"damaged: {path}: {error}",
            "compare with the source instead (verify SRC DST)",
            where=MANIFEST_NAME,
        ) from error


def verify(request: Request, team: Team, begin: OnStart = start_silently) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written. Collective.
    """
    began = time.monotonic()
    request, described = open_described(request, team)
    resolved, source, target = prepare(request, team)
    evidence = examine(resolved, source, target, team)
    target = target.with_evidence(evidence)
    dst_source, files_of, faults = open_existing_files(target, described, team)
    check_apart(source, dst_source, team)
    assignment = _share_out(files_of, dst_source, team)
    work = plan_work(resolved.request, source, files_of, assignment, team)
    show = begin(source, target, work.nbytes)
    differing, nbytes = compare(work, source, files_of, dst_source, assignment, team, show)
    lacking, notices = compare_beside(resolved.request, source, target, dst_source, team)
    differences = _each_once([*faults, *lacking, *differing])
    named = [*dst_source.paths.values(), *(d.name for d in differences if d.whole_file)]
    if differences:
        notices += notice_of_other_options(resolved.request, source, target, team)
    return Verdict(
        src=request.src,
        dst=str(target.folder),
        differences=differences,
        files_compared=len(dst_source.indexes),
        bytes_compared=nbytes,
        seconds=time.monotonic() - began,
        processes=team.size,
        notices=(*target.notices, *(dst_source.notices if described else ()), *notices),
        warnings=(*target.warnings, *foreign_warnings(target, named, team)),
        step=source.selected.step_name,
        evidence=evidence.facts,
        names={file: basename(p) for file, p in dst_source.paths.items()} if described else {},
    )


def _each_once(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return one difference for each name and rank, in their order."""
    differences_by_key = {(d.name, d.rank): d for d in differences}
    return tuple(differences_by_key[key] for key in sorted(differences_by_key))


def _share_out(target: Target, dst_source: Source, team: Team) -> Assignment:
    """Say which process compares what of the files that are there. Collective."""
    if not dst_source.indexes:
        return [[] for _ in dst_source.reach.node]
    return team.agree(
        lambda: assign_within_nodes(target.planner, list(dst_source.indexes), dst_source.reach)
    )


def compare(
    work: WorkPlan,
    source: Source,
    target: Target,
    dst_source: Source,
    assignment: Assignment,
    team: Team,
    show: ShowProgress,
) -> tuple[list[Difference], int]:
    """Compare files, and the checksums that they carry; return differences, and bytes.

    Collective.
    """
    messenger = team.p2p() if work.exchanges else None
    local_files = dict.fromkeys(slice_range.rank for slice_range in assignment[team.rank])

    def own(on_progress: OnProgress) -> tuple[int, list[Difference]]:
        with SourceReader(dst_source.paths, dst_source.indexes) as destination:
            sinks = {
                file: ComparingSink(
                    file,
                    destination,
                    dst_source.indexes[file],
                    _expected_of_file(target.planner, file),
                )
                for file in local_files
            }
            with open_work_inputs(source, target, work, messenger, on_progress) as inputs:
                traffic = execute(work, inputs, sinks, on_progress)
            destination.check_unchanged()
        return traffic.written, [d for s in sinks.values() for d in s.differences.values()]

    nbytes, differing = team.work(own, show)
    carrying = dst_source.reach.partition(dst_source.indexes)[team.rank]
    differing += team.work(
        lambda tick: wrong_checksums(dst_source.paths, dst_source.indexes, carrying, tick),
        show_nothing,
    )
    by_process = team.allgather(lambda: (nbytes, differing))
    return [difference for _, differences in by_process for difference in differences], sum(
        nbytes for nbytes, _ in by_process
    )


def _expected_of_file(planner: Planner, file: int) -> Mapping[str, ExpectedSlice]:
    layouts = planner.names(file).values()
    return {
        p.name: ExpectedSlice(p.dtype, layout.grid(p.shape).box(planner.cell(layout, file)))
        for (p, _), layout in zip(planner.slices(file), layouts)
    }
