"""Whose bytes are taken where ranks hold replicas of a tensor, and these differ.

A norm that drifted apart is another on each rank, and so are its moments: what belongs together is
taken of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from rankxform.engine.scan import largest_difference
from rankxform.geometry.tiling import Cell
from rankxform.layout.names import format_ranges, summarize_names
from rankxform.planning.catalog import Catalog, Holders, Parameter, Sharding
from rankxform.planning.evidence import Evidence
from rankxform.source.source import Source
from rankxform.statements import WARNING, Finding
from rankxform.storage.source_reader import read_samples_of
from rankxform.transport import Team

Contents = Mapping[int, Mapping[str, bytes]]
"""Sampled bytes, by file and entry."""


def choose_replicas(source: Source, evidence: Evidence, team: Team) -> Evidence:
    """Return evidence that says too whose replicas are taken, of what lies as those that differ.

    Collective.

    All holders of what differs are sampled. The largest group of ranks that agree gives all that it
    holds, if every process can read one of them.
    """
    catalog = source.require_catalog()
    by_placement: dict[Holders, list[Parameter]] = {}
    for name in evidence.differing:
        parameter = catalog.declared[name]
        if isinstance(parameter.sharding, Sharding):
            by_placement.setdefault(parameter.sharding.placement, []).append(parameter)
    entries_by_file: dict[int, list[str]] = {}
    for placement, parameters in by_placement.items():
        for cell, holders in placement.files.items():
            for file in holders:
                entries = (parameter.entry(cell, file) for parameter in parameters)
                entries_by_file.setdefault(file, []).extend(entries)

    def read() -> dict[int, dict[str, bytes]]:
        files = source.reach.partition(entries_by_file)[team.rank]
        return {
            file: read_samples_of(source.paths[file], source.indexes[file], entries_by_file[file])
            for file in files
        }

    contents = dict(chain.from_iterable(part.items() for part in team.allgather(read)))
    texts, files_by_name = list[str](), dict[str, frozenset[int]]()
    for placement, parameters in by_placement.items():
        names = [parameter.src_name for parameter in parameters]
        files = _agreeing_files(placement, parameters, contents, catalog)
        is_readable = all(
            source.reach.sees(process, [f for f in holders if f in files])
            for process in range(team.size)
            for holders in placement.files.values()
            if len(holders) > 1
        )
        largest = max(
            largest_difference([contents[f][p.entry(cell, f)] for f in holders], p.src_dtype)
            for p in parameters
            for cell, holders in placement.files.items()
        )
        spread = f" (by up to {largest:.3g} in the samples)" if largest else ""
        ranks = format_ranges(sorted(catalog.rank_of(file) for file in files))
        if is_readable:
            files_by_name[names[0]] = files
            takes = f"taken of rank {ranks}, with all that lies as they do"
        else:
            takes = "each process takes those that it can read"
        others = {
            p.name
            for p in catalog.declared.values()
            if p.state is not None
            and p.base_name in names
            and getattr(p.sharding, "placement", placement) is not placement
        }
        if others:
            takes += f"; {summarize_names(sorted(others), 2)} are of several ranks"
        texts.append(f"{summarize_names(names, 3)}{spread}: {takes}")

    findings = list[Finding]()
    for finding in evidence.findings:
        if (finding.rule, finding.severity) == ("replicas_are_equal", WARNING):
            text = "; ".join((finding.message.what, *texts))
            finding = finding._replace(message=finding.message._replace(what=text))
        findings.append(finding)
    return replace(evidence, findings=tuple(findings), taken_from=files_by_name)


def _agreeing_files(
    placement: Holders, parameters: Sequence[Parameter], contents: Contents, catalog: Catalog
) -> frozenset[int]:
    """Return of files that hold the same cells the largest group that agrees; of equal ones that of
    the lowest rank."""
    cells_by_holders: dict[tuple[int, ...], list[Cell]] = {}
    for cell, holders in placement.files.items():
        if len(holders) > 1:
            cells_by_holders.setdefault(holders, []).append(cell)
    chosen_files = set[int]()
    for holders, cells in cells_by_holders.items():
        groups: dict[tuple[bytes, ...], list[int]] = {}
        for file in holders:
            entries = (p.entry(cell, file) for p in parameters for cell in cells)
            groups.setdefault(tuple(contents[file][e] for e in entries), []).append(file)
        best = min(groups.values(), key=lambda group: (-len(group), catalog.rank_of(min(group))))
        chosen_files.update(best)
    return frozenset(chosen_files)
