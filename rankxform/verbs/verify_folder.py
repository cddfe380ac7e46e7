"""`verify DST`: a destination compared with its own manifest.

Each process reads its share of the files (`rankxform.source.written`); what all have read is
gathered, and the rules over it are run on every process. Collective, in this order: process 0 looks
where the manifest is; each node says which manifest it has; process 0 reads the form's own table;
the first process of each manifest looks for what it does not list (all three gathered or
broadcast); all read; all that was read is gathered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain
from pathlib import Path
from posixpath import dirname
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, DEFAULT_PATTERN, FORMS, CheckpointRef
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.errors import CheckpointError, RankxformError, StorageError, UsageError
from rankxform.formats.container import DeclaredFile
from rankxform.publish.files import changed_model_files, wrong_companions
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME, MANIFEST_NAME, read_manifest
from rankxform.publish.options import SUMS
from rankxform.source import written
from rankxform.source.copies import reach_of_storage
from rankxform.source.place import form_at, list_and_select, listing_at
from rankxform.source.written import (
    CHECKED,
    FINGERPRINTS,
    WrittenRead,
    declared_files_of,
    read_listed_file,
)
from rankxform.statements import ERROR, WARNING, WRITTEN, Finding, quote, run_rules
from rankxform.storage.identity import sampled_bytes
from rankxform.storage.store import (
    FILE,
    FOLDER,
    NOTHING,
    absolute,
    address_of,
    storage_of,
    store_at,
)
from rankxform.target.existing import wrong_tracker
from rankxform.target.manifest import verify_command
from rankxform.transport import Team
from rankxform.transport.team import Begin, begin_silently, show_nothing
from rankxform.values import NamedTuple, blake2b

from .repair import repair_command
from .verdict import Verdict

_JOB = f"{FOLDER_NAME}/{JOB_NAME}"


class ManifestPlace(NamedTuple):
    """Where the records of a destination are: in it, or with the files that readers find."""

    folder: str
    warnings: tuple[Finding, ...] = ()  # what may be wrong with the way there
    tracker: tuple[tuple[str, str], ...] = ()  # address of a tracker -> what is wrong with it


def folder_with_manifest(folder: str) -> ManifestPlace:
    """Return where a destination's manifest is, and what is wrong with the way there."""
    folder = absolute(folder)
    store = store_at(folder)
    if store.has(MANIFEST_NAME) or store.list("*").kind != FOLDER:
        return ManifestPlace(folder)
    where = CheckpointRef(folder)
    form = form_at(where, "--dst-form")
    if not form.described:
        return ManifestPlace(folder)
    where = replace(where, form=form.name)
    try:
        selected = list_and_select(where).selected
        has_files = bool(selected.names)
    except CheckpointError:
        has_files = False
    if not has_files:  # files that a manifest lists may be missing, which a rule says
        below = map(dirname, store.list(f"*/{MANIFEST_NAME}").files)
        names = [
            f"{part}/{name}"
            for part in below
            for name in read_manifest(address_of(folder, part))["files"]
        ]
        selected = list_and_select(where, missing_names=names).selected
    assert selected.description is not None
    if not selected.names:
        return ManifestPlace(folder)
    record_folder = dirname(address_of(folder, next(iter(selected.names.values()))))
    if record_folder == folder:
        return ManifestPlace(folder)
    warnings = (f for f in selected.description.findings if f.severity == WARNING)
    place = ManifestPlace(record_folder, (*warnings,))
    if form.tracker is None or selected.step is None:
        return place
    wrong = wrong_tracker(folder, form.tracker, str(selected.step[0]).encode(), record_folder)
    return place._replace(tracker=(*wrong.items(),))


_MOST_DIGITS = 10

FileShare = tuple[int, int]
"""Which of how many shares of files; the first is 1."""


def share_of_files(text: str) -> FileShare:
    """Return the share that "3/10" is. Raises UsageError."""
    number, _, count = text.partition("/")
    is_number = all(part.isdecimal() and len(part) < _MOST_DIGITS for part in (number, count))
    if not is_number or not 0 < int(number) <= int(count):
        raise UsageError(f"--subset {text}: expected a share from 1/N to N/N, such as 3/10")
    return int(number), int(count)


def files_of_share(entries: Mapping[str, Mapping[str, Any]], share: FileShare) -> set[str]:
    """Return the names of the files of a share; shares are about as large, and each file is of
    one."""
    number, count = share
    sizes, names = [(0, n) for n in range(1, min(count, len(entries)) + 1)], set[str]()
    for name in sorted(entries, key=lambda name: (-entries[name]["size"], name)):
        size, smallest = heappop(sizes)
        heappush(sizes, (size + entries[name]["size"], smallest))
        if smallest == number:
            names.add(name)
    return names


def look_beside(
    place: str, record: Mapping[str, Any] | None
) -> tuple[Mapping[str, int], Mapping[str, str], Mapping[str, tuple[str, str]]]:
    """Return what lies beside a manifest's files: checkpoint files that it does not list, by
    address with their ranks; what is wrong with indexes and the like, by address; and the digests
    that a document states, kind and digest by name. Nothing without a manifest."""
    if record is None:
        return {}, {}, {}
    strays, documents = _find_strays(place, record), {*record.get("companions", {})}
    digests: Mapping[str, tuple[str, str]] = {}
    if not documents.isdisjoint(SUMS.values()):
        from rankxform.publish.digests import stated_at

        digests = stated_at(place, [name for name in SUMS.values() if name in documents]).by_name
    return strays, wrong_companions(place, record), digests


ListedFile = tuple[str, Mapping[str, Any]]
"""A file's name, and the manifest that lists it."""


def files_of_process(
    manifests: Sequence[Mapping[str, Any]], leaders: Sequence[Sequence[int]], process: int
) -> tuple[list[ListedFile], Mapping[str, Any] | None]:
    """Return the files that a process reads, and the manifest of which it is the first process, if
    any. leaders: by manifest the processes that have it."""
    files, led = list[ListedFile](), None
    for record, processes in zip(manifests, leaders):
        names = sorted(record["files"], key=lambda name, r=record: r["files"][name]["id"])  # type: ignore[misc]
        if process in processes:
            files += [(n, record) for n in names[processes.index(process) :: len(processes)]]
        if process == processes[0]:
            led = record
    return files, led


def verify_folder(
    folder: str, team: Team, begin: Begin = begin_silently, share: FileShare | None = None
) -> Verdict:
    """Compare a destination with its own manifest: sizes, headers, samples, and fingerprints, or
    digests, if it has them. Collective.

    Where nodes have folders of their own, each is compared with its own manifest. share: of which
    files every byte is read; of others samples.
    """
    began = time.monotonic()
    place = team.bcast(lambda: folder_with_manifest(folder))
    where = place.folder
    manifests, leaders = manifests_of_nodes(where, team)
    is_begun = team.bcast(lambda: store_at(where).has(_JOB))
    refuse_begun(where, is_begun, StorageError)
    form = FORMS[manifests[0].get("form", DEFAULT_FORM)]
    declared_by_name: Mapping[str, DeclaredFile] | None = {}
    if form.has_table:  # others' files say all of themselves
        declared_by_name = team.bcast(lambda: declared_files_of(where, manifests[0]))
    local_files, led = files_of_process(manifests, leaders, team.rank)
    beside_files = team.allgather(lambda: look_beside(where, led))
    merged = merge_manifests(manifests)
    sums = {name: digest for *_, part in beside_files for name, digest in part.items()}
    read_names = {*merged["files"]} if share is None else files_of_share(merged["files"], share)
    entries = [entry for name, entry in merged["files"].items() if name in read_names]
    bytes_to_read = sum(entry["size"] for entry in entries if "digest" in entry or sums)
    show = begin("compare", bytes_to_read) if team.rank == 0 else show_nothing
    local_reads = team.work(
        lambda on_progress: [
            read_listed_file(
                where,
                name,
                record,
                declared_by_name,
                on_progress,
                sums.get(name),
                is_sampled=name not in read_names,
            )
            for name, record in local_files
        ],
        show,
    )
    reads = [*chain.from_iterable(team.allgather(lambda: local_reads))]
    strays = {path: rank for part, *_ in beside_files for path, rank in part.items()}
    companions = {path: text for _, part, _ in beside_files for path, text in part.items()}
    model_files = team.bcast(lambda: changed_model_files(where, manifests[0]))
    read = WrittenRead(
        merged, sorted(reads, key=lambda r: r.path), sorted(strays), companions, place.tracker,
        model_files,
    )  # fmt: skip
    findings = (*run_rules(WRITTEN, [written], read), *place.warnings)
    errors = [finding for finding in findings if finding.severity == ERROR]
    source = merged["identity"].get("source")
    has_source = source is None or not storage_of(source).has_folders
    has_source = team.bcast(lambda: has_source or Path(source).exists())
    ranks = {} if form.described else {r.path: r.entry["id"] for r in reads} | strays
    return Verdict(
        None,
        where,
        min(
            (r.compared for r in reads if not r.is_sampled),
            key=CHECKED.index,
            default=None if share is None else FINGERPRINTS,
        ),
        findings,
        ranks,
        files_compared=len(entries),
        bytes_compared=sum(r.size or 0 for r in reads if r.fingerprint or r.digests),
        bytes_sampled=sum(sampled_bytes(r.size or 0) for r in reads if r.samples is not None),
        total_bytes=sum(entry["size"] for entry in merged["files"].values()),
        seconds=time.monotonic() - began,
        processes=team.size,
        command=f"{verify_command(merged, folder)} --keep-fingerprints" if has_source else None,
        repair=repair_command(where, merged, errors) if errors else None,
        proof=merged.get("proof"),
        subset=None if share is None else f"{share[0]}/{share[1]}",
    )


def _find_strays(folder: str, record: Mapping[str, Any]) -> dict[str, int]:
    """Return the checkpoint files that a manifest does not list: address -> rank, if any."""
    form = FORMS[record.get("form", DEFAULT_FORM)]
    listing = listing_at(folder, form)
    ranked = {} if form.described else by_rank(listing, DEFAULT_PATTERN)
    ranks = {name: rank for rank, names in ranked.items() for name in names}
    suffixes = tuple({Path(name).suffix for name in record["files"]})
    for name in {*listing.entries} - listing.folders:
        if name.endswith(suffixes) and "/" not in name:
            ranks.setdefault(name, 0)
    return {address_of(folder, n): rank for n, rank in ranks.items() if n not in record["files"]}


def merge_manifests(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first of the manifests that nodes have, with the files of all."""
    files = {name: entry for record in manifests for name, entry in record["files"].items()}
    return {**manifests[0], "files": files}


def refuse_begun(folder: str, is_begun: bool, kind: type[RankxformError]) -> None:
    """Raise an error of a kind for a folder in which a conversion is begun."""
    if is_begun:
        raise kind(
            "a conversion into this folder was stopped, or is at work",
            "run its command again to complete it, unless it is at work",
            where=folder,
        )


def manifests_of_nodes(folder: str, team: Team) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the manifests that nodes have, and for each the processes that have it."""
    nodes, store = team.nodes, store_at(folder)
    looks = nodes.is_leader(team.rank)
    if storage_of(folder).is_shared:
        reach, _ = reach_of_storage(team, folder, (0,))
        looks = looks and reach.sees(team.rank, (0,))
    digests_by_process = team.allgather(
        lambda: (
            blake2b(store.read(MANIFEST_NAME)).digest()
            if looks and store.has(MANIFEST_NAME)
            else b""
        )
    )
    groups: dict[bytes, list[int]] = {}
    for node, processes in enumerate(nodes.processes):
        if digests_by_process[processes[0]]:
            groups.setdefault(digests_by_process[processes[0]], []).append(node)
    node_groups = list(groups.values())
    if not node_groups:
        kinds = team.allgather(lambda: store.list("*").kind if looks else NOTHING)
        if FOLDER not in kinds:
            if FILE in kinds:
                look = f"rankxform inspect --check {quote(folder)}"
                raise UsageError("is a file, not a folder that rankxform wrote", look, where=folder)
            raise UsageError("no such folder", where=folder)
        is_begun = any(team.allgather(lambda: looks and store.has(_JOB)))
        refuse_begun(folder, is_begun, UsageError)
        below = team.bcast(lambda: sorted(map(dirname, store.list(f"*/{MANIFEST_NAME}").files)))
        if below:
            text = f"has destinations of rankxform in it, such as {below[-1]}"
            inside = quote(address_of(folder, below[-1]))
            raise UsageError(text, f"rankxform verify {inside}", where=folder)
        raise UsageError(
            "there is no manifest; this is no finished destination of rankxform",
            "verify SRC DST --src-strategy A --dst-strategy B, which compares it with its source",
            where=address_of(folder, MANIFEST_NAME),
        )
    leaders = [[p for node in group for p in nodes.processes[node]] for group in node_groups]
    firsts = {processes[0] for processes in leaders}
    records = team.allgather(lambda: read_manifest(folder) if team.rank in firsts else None)
    return [record for record in records if record is not None], sorted(leaders)
