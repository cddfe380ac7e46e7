"""A destination that exists, in whatever files: opened, and compared with what a target puts there.

A destination that says itself what its files hold is opened before the source: its form and its
strategy complete the request. Rank folders are opened by the target's strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from posixpath import dirname, relpath

from rankxform.checkpoints.base import DEFAULT_PATTERN, FORMS, CheckpointRef
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.engine.checksum import IntegrityChecker
from rankxform.engine.pipeline import Traffic, WorkInputs, execute
from rankxform.engine.sinks import COMPARED_BYTES, ComparingSink, ExpectedSlice
from rankxform.errors import CheckpointError, StorageError, UsageError
from rankxform.formats.container import Index, Schema
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Cell
from rankxform.layout.names import TRAINING_FACTS
from rankxform.layout.strategy import WholeStrategy
from rankxform.planning.assign import Writers, assignment_of
from rankxform.planning.catalog import Description
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import FileContent, Planner
from rankxform.publish.files import changed_model_files, means, wrong_companions
from rankxform.publish.folder_records import MANIFEST_NAME, read_manifest
from rankxform.request import Request
from rankxform.source import checks
from rankxform.source.checks import schemas_without_repeats
from rankxform.source.open import open_source
from rankxform.source.place import form_at
from rankxform.source.source import Source, SourceNeed
from rankxform.statements import (
    HEADERS,
    NAMES,
    Finding,
    Where,
    as_difference,
    as_notice,
    errors_of,
    require,
    run_rules,
)
from rankxform.storage.checkpoint2_metadata import is_in_metadata
from rankxform.storage.identity import inode, is_same_file
from rankxform.storage.source_reader import SourceReader, container_of_path, describe_wrong_crc
from rankxform.storage.store import absolute, address_of, store_at
from rankxform.storage.user_files import CONFIG
from rankxform.target.destination import Destination
from rankxform.target.folder import foreign_files
from rankxform.target.model_files import of_another, own_config
from rankxform.target.target import Conversion, Target
from rankxform.transport import Team
from rankxform.transport.team import OnProgress, show_nothing


class ExistingDestination(Destination):
    """A destination that exists, in whatever files: its content is compared with what is put."""

    existing: Source  # the files, opened; its indexes have only what is to be compared
    checker: IntegrityChecker | None = None  # takes fingerprints of what the files should hold
    differences: Sequence[Finding] = ()  # by file and tensor, once they are published
    ranks: Mapping[str, int]  # address of a file in a rank folder -> its rank

    def prepare(self, request: Request, team: Team) -> Request:
        request, self._described = open_described(request, team)
        return request

    @contextmanager
    def claim(self, conversion: Conversion, team: Team) -> Iterator[Conversion]:
        self._asked, described = conversion, self._described
        self.existing, target = open_existing_files(conversion.target, described, team)
        self.differences, self.ranks = self.existing.findings, {}
        if described is None:
            dst = target.planner.dst
            extra = team.bcast(lambda: _extra_ranks(target.planner, self.existing))
            numbers = f"ranks 0 to {dst.ranks - 1}" if dst.ranks > 1 else "rank 0"
            text = f"should not be here: {dst.label} has {numbers} only"
            self.differences = [*self.differences, *(as_difference(text, p) for p in extra)]
            self.ranks = {path: rank for rank, path in self.existing.paths.items()} | extra
        check_apart(conversion.source, self.existing, team)
        self.left = [[] for _ in self.existing.reach.node]
        if self.existing.indexes:
            files, writers = list(self.existing.indexes), Writers(self.existing.reach)
            self.left = team.agree(lambda: assignment_of(target.planner, files, writers))
        self._expected = {
            slice_range.file: expected_of_file(target.planner, slice_range.file)
            for slice_range in self.left[team.rank]
        }
        yield conversion._replace(target=target)

    def fill(self, work: WorkPlan, inputs: WorkInputs, on_progress: OnProgress) -> Traffic:
        indexes = self.existing.indexes
        with SourceReader(self.existing.paths, indexes) as files:
            block = memoryview(bytearray(COMPARED_BYTES))
            paths = self.existing.paths
            sinks = {
                file: ComparingSink(file, paths[file], files, indexes[file], expected, block)
                for file, expected in self._expected.items()
            }
            traffic = execute(work, inputs, sinks, on_progress, self.checker)
            files.check_unchanged()
        self._differing = [finding for sink in sinks.values() for finding in sink.findings]
        return traffic

    def publish(self, team: Team) -> None:
        """Compare the checksums that files carry, and what lies beside them; gather differences."""
        paths, indexes = self.existing.paths, self.existing.indexes
        local_files = self.existing.reach.partition(indexes)[team.rank]
        required = self._asked.request.crc
        self._differing += team.work(
            lambda tick: wrong_checksums(paths, indexes, local_files, tick, required), show_nothing
        )
        by_process = team.allgather(lambda: self._differing)
        lacking, self._notices = team.bcast(lambda: _compare_companions(self._asked, self.existing))
        differences = [*self.differences, *lacking, *chain.from_iterable(by_process)]
        once_each = {
            (d.file or "", d.elements.tensor if d.elements else "", d.text): d for d in differences
        }
        self.differences = [once_each[key] for key in sorted(once_each)]

    def findings(self, team: Team) -> Sequence[Finding]:
        described = self._described
        notices = (*(described.notices if described else ()), *self._notices)
        whole_files = (d.file for d in self.differences if d.file and d.elements is None)
        named = [*self.existing.paths.values(), *whole_files]
        foreign = foreign_files(self._asked.target, named, team)
        return [*map(as_notice, notices), *foreign]


def expected_of_file(planner: Planner, file: int) -> Mapping[str, ExpectedSlice]:
    """Return type and box of what a file should hold, by name."""
    layouts = planner.layouts_of_file(file).values()
    return {
        p.name: ExpectedSlice(p.dtype, layout.grid(p.shape).box(planner.cell(layout, file)))
        for (p, _), layout in zip(planner.slices(file), layouts)
    }


def wrong_checksums(
    paths: Mapping[int, str],
    indexes: Mapping[int, Index],
    files: Sequence[int],
    on_progress: OnProgress,
    required: bool = False,
) -> list[Finding]:
    """Compare `files` with the checksums that they carry, and that may be required."""
    wrong = {file: describe_wrong_crc(paths[file], indexes[file], on_progress) for file in files}
    for file in files:
        if required and container_of_path(paths[file]).alone and not indexes[file].has_checksum:
            wrong[file] = "carries no checksum (--crc)"
    return [as_difference(reason, paths[file]) for file, reason in wrong.items() if reason]


_AS_WHOLE = "convert both to whole tensors and compare these"


def open_described(request: Request, team: Team) -> tuple[Request, Source | None]:
    """Open a destination that says itself what its files hold; None of one that does not.

    The request is returned with its form, and with the strategy that the destination itself says,
    if none was given. Collective.
    """
    where = team.bcast(lambda: CheckpointRef(absolute(request.dst or ""), request.dst_form))
    form = FORMS[team.bcast(lambda: form_at(where, "--dst-form").name)]
    if not form.is_written:
        raise UsageError(
            f"is {form.name}, which is read as a source alone", _AS_WHOLE, where=request.dst
        )
    request = replace(request, dst_form=form.name)
    if not form.described:
        return request, None
    step = None if request.iteration is None else str(request.iteration)
    dst_source = open_source(replace(where, form=form.name, step=step), team, uses_manifest=False)
    team.agree(lambda: _require_files(dst_source))
    description = dst_source.selected.description
    assert description is not None
    if request.dst_strategy is None and not request.derives:
        request = replace(request, dst_strategy=description.strategy)
    options = form.stated_options(dst_source.description)
    request = replace(request, **{n: v for n, v in options.items() if not getattr(request, n)})
    if request.iteration is None:
        if dst_source.selected.step and form.tracker is not None:
            request = replace(request, iteration=dst_source.selected.step[0])
        elif form.training is not None and not form.counters:
            request = replace(request, iteration=0)
    return request, dst_source


def open_existing_files(
    target: Target, described: Source | None, team: Team
) -> tuple[Source, Target]:
    """Return the destination that is there, and what of the target its files hold. Collective.

    Only what is to be compared is left in its indexes, and what is wrong with the files as such in
    its findings.
    """
    dst_source = described or _open_ranks(target, team)
    needed_paths = {f: p for f, p in dst_source.paths.items() if f in dst_source.needed_files}
    dst_source = replace(dst_source, paths=needed_paths)
    present_paths = {*needed_paths.values()}
    differences = [
        as_difference(f"cannot be read: {error.text}", error.file)
        for error in dst_source.errors
        if error.file in present_paths
    ]
    dst_source = replace(dst_source, findings=tuple(differences))
    if described is None:
        return dst_source, target
    return team.agree(lambda: _match_files(target, dst_source))


def check_apart(source: Source, dst_source: Source, team: Team) -> None:
    """Refuse to compare files with themselves, under whatever names. Collective.

    Raises UsageError.
    """

    def compare_inodes() -> None:
        paths_by_inode = {inode(Path(path)): path for path in source.paths.values()}
        paths_by_inode.pop(None, None)
        src_paths = {*source.paths.values()}
        for file in dst_source.reach.partition(dst_source.indexes)[team.rank]:
            path = dst_source.paths[file]
            src_path = path if path in src_paths else paths_by_inode.get(inode(Path(path)))
            if src_path is not None:
                raise UsageError(
                    f"is the same file as {src_path}, and compared with itself it proves nothing",
                    "name another folder as DST",
                    where=dst_source.paths[file],
                )

    team.agree(compare_inodes)


def _match_files(target: Target, dst_source: Source) -> tuple[Source, Target]:
    """Compare which files a self-describing destination has, and what they hold; pure."""
    indexes = dict(dst_source.indexes)
    description = dst_source.selected.description
    assert description is not None
    if description.ranks and description.is_whole:  # how ranks cut it, the headers told
        description = dst_source.description
    if not description.is_whole and description.boxes:
        indexes = {file: index.unplaced() for file, index in indexes.items()}
        description = replace(description, ranks=_ranks_of(target.planner, description))
    schemas = schemas_without_repeats(description, indexes)
    for file, schema in schemas.items():
        if schema is not indexes[file].schema:
            indexes[file] = indexes[file].with_schema(schema)
    planner, faults = _compare(target, dst_source, description, schemas)
    findings = (*dst_source.findings, *faults)
    dst_source = replace(dst_source, indexes=indexes, findings=findings)
    return dst_source, replace(target, planner=planner, files=tuple(indexes))


def _ranks_of(planner: Planner, description: Description) -> dict[int, int]:
    """Return whose slices each file of boxes holds, by a strategy; a file of another's holds rank
    0's. Raises UsageError for files with several boxes of a tensor, which no rank has."""
    boxes_by_file: dict[int, dict[str, Box]] = {}
    for name, boxes in description.boxes.items():
        for file_box in boxes:
            if (
                file_box.box.size
                and boxes_by_file.setdefault(file_box.file, {}).setdefault(name, file_box.box)
                != file_box.box
            ):
                raise UsageError(
                    f"a file has several boxes of {name}, as no rank of {planner.dst.label} has",
                    _AS_WHOLE,
                    where=description.source,
                )
    ours = store_at(dirname(description.source)).has(MANIFEST_NAME)  # which knows the options
    if isinstance(planner.dst, WholeStrategy) and not ours:
        for name, boxes in description.boxes.items():
            if len({file_box.box for file_box in boxes if file_box.box.size}) > 1:
                raise UsageError(
                    f"shards {name}, and no --dst-strategy says how",
                    "--dst-strategy FILE or FOLDER of the job that wrote it",
                    _AS_WHOLE,
                    where=description.source,
                )
    box_cache: dict[tuple[int, str], Box | None] = {}

    def box_of(rank: int, name: str) -> Box | None:
        if (rank, name) not in box_cache:
            layout = planner.layouts_of_rank(rank).get(name)
            shape = planner.parameter(name).shape if layout is not None else ()
            local = rank % planner.dst.stage_size
            box_cache[rank, name] = layout.grid(shape).box(layout.cell(local)) if layout else None
        return box_cache[rank, name]

    def is_held(rank: int, boxes: Mapping[str, Box]) -> bool:
        return all(box_of(rank, name) == box for name, box in boxes.items())

    ranks = range(planner.dst.ranks)
    return {
        f: next((rank for rank in ranks if is_held(rank, b)), 0) for f, b in boxes_by_file.items()
    }


def _extra_ranks(planner: Planner, dst_source: Source) -> dict[str, int]:
    """Return the files in rank folders beyond the destination's ranks: address -> rank."""
    listing = dst_source.listing
    if listing is None:
        return {}
    return {
        listing.at(name): rank
        for rank, names in by_rank(listing, DEFAULT_PATTERN).items()
        for name in names
        if rank >= planner.dst.ranks
    }


def _open_ranks(target: Target, team: Team) -> Source:
    """Open the rank folders of a destination. Raises CheckpointError if a file is missing."""
    dst, ranks = target.planner.dst, target.ranks
    names = {file: target.arrangement.names[file] for file in target.files}
    where = CheckpointRef(target.place, target.form.name, strategy=dst)
    need = SourceNeed((*ranks,), preferred=names)
    dst_source = open_source(where, team, need, uses_manifest=False)

    def check() -> None:
        missing = [rank for rank in ranks if rank not in dst_source.selected.names]
        if missing and dst_source.selected.names:
            raise CheckpointError(
                f"{target.place}: has no file of destination rank {missing[0]}"
                + (f" and of {len(missing) - 1} more" if missing[1:] else "")
                + f"{dst_source.searched}; {dst.label} has ranks 0 to {dst.ranks - 1}"
            )
        _require_files(dst_source)

    team.agree(check)
    return dst_source


def _require_files(dst_source: Source) -> None:
    """Raise the first error of which files there are; what they hold is to be compared."""
    require(
        [finding for finding in dst_source.findings if finding.need == NAMES],
        is_counted=dst_source.form.described,
    )


def _compare(
    target: Target, dst_source: Source, description: Description, schemas: Mapping[int, Schema]
) -> tuple[Planner, list[Finding]]:
    planner, source = target.planner, description.source
    described = replace(dst_source, description=replace(description, refused={}), schemas=schemas)
    differences = [
        as_difference(finding.message.line, source, rule=finding.rule)
        for finding in errors_of(run_rules(HEADERS, [checks], described))
    ]
    differences += (
        as_difference(f"is missing, though {Path(source).name} lists it", path)
        for path in description.missing_files.values()
    )
    training = address_of(dst_source.folder, target.form.training or "")
    differences += (as_difference(t, training) for t in _training_faults(target, description))
    parts: dict[int, FileContent] = {}
    ranks = set(target.ranks)
    shared_names: dict[frozenset[str], frozenset[str]] = {}
    present_cells: set[tuple[str, Cell]] = set()
    for file, schema in schemas.items():
        rank = description.ranks.get(file, 0)
        if rank >= planner.dst.ranks:
            reason = f"is rank {rank}'s, and {planner.dst.label} has {planner.dst.ranks}"
            differences.append(as_difference(reason, dst_source.paths[file]))
            parts[file] = FileContent(0, frozenset())
            continue
        names = frozenset(schema.names)
        parts[file] = FileContent(rank, shared_names.setdefault(names, names))
        layouts_by_name = planner.layouts_of_rank(rank)
        differences += [
            as_difference("should not be here", dst_source.paths[file], Where(name))
            for name in schema.names
            if name not in layouts_by_name
        ]
    dst_planner = planner.with_parts(parts)
    for file in schemas:
        present_cells |= {
            (name, dst_planner.cell(file_layout, file))
            for name, file_layout in dst_planner.layouts_of_file(file).items()
        }
    missing: dict[str, None] = {}
    for rank in ranks:
        local = rank % planner.dst.stage_size
        for name, layout in planner.layouts_of_rank(rank).items():
            cell = layout.cell(local)
            if (name, cell) in present_cells:
                continue
            if layout.split_rows and not layout.grid(planner.parameter(name).shape).box(cell).size:
                continue  # some forms store no slice without elements
            missing[name] = None
    text = "is missing, or some of its slices are"
    differences += [as_difference(text, None, Where(name)) for name in missing]
    if description.strategy is not None:
        differences += _find_misstated(planner, description, missing)
    return dst_planner, differences


def _training_faults(target: Target, description: Description) -> Iterator[str]:
    """Yield what is wrong with the facts on the training, of a form that states some."""
    if target.form.training is None:
        return
    if not description.training and not target.form.counters:
        yield "is missing; a training job knows its step by it"
    for name in TRAINING_FACTS:
        want, have = (training.get(name) for training in (target.training, description.training))
        must = name == "global_step" and not target.form.counters and description.training
        if want is not None and have != want and (have is not None or must):
            yield f"states {name} {have}, and the source's is {want}"


def _find_misstated(
    planner: Planner, description: Description, missing: Mapping[str, None]
) -> Iterator[Finding]:
    """Yield parameters that metadata does not state, or states otherwise: loaders believe it."""
    assert description.strategy is not None
    declared_strategy, source = description.strategy, description.source
    for stage in range(len(planner.dst.stages)):
        for name, layout in planner.layouts_of_rank(stage * planner.dst.stage_size).items():
            shape = planner.parameter(name).shape
            if name in missing or not shape or not is_in_metadata(planner, name):
                continue
            if name not in declared_strategy.stages_of:
                yield as_difference(f"is not stated in {Path(source).name}", source, Where(name))
                continue
            declared = declared_strategy.stages[declared_strategy.stages_of[name][0]][name]
            ranks = range(planner.dst.stage_size)
            if description.declared[name][1] != shape or any(
                declared.grid(shape).box(declared.cell(r)) != layout.grid(shape).box(layout.cell(r))
                for r in ranks
            ):
                text = f"is stated otherwise in {Path(source).name}"
                yield as_difference(text, source, Where(name))


def _compare_companions(
    conversion: Conversion, dst_source: Source
) -> tuple[list[Finding], list[str]]:
    """Compare what a destination consists of beside its tensors; return differences, and notices.

    What another tool wrote is asked for what its form needs, and no more.
    """
    request, target = conversion.request, conversion.target
    if not target.form.described:
        return [], []
    folder, record, notices = dst_source.folder, None, list[str]()
    store = store_at(folder)
    with suppress(StorageError):
        record = read_manifest(folder) if store.has(MANIFEST_NAME) else None
    if record is not None and record.get("form") == target.form.name:
        wrong = wrong_companions(folder, record)
        if target.arrangement.mark is not None and target.dst is not None:
            wrong |= wrong_tracker(target.dst, *target.arrangement.mark, folder)
        notices += changed_model_files(folder, record)
    else:
        wrong = dict(_without_record(target, dst_source, folder))
    if target.form.configured:
        shapes = {
            name: shape
            for index in dst_source.indexes.values()
            for name, shape in zip(index.schema.names, index.schema.shapes)
        }
        config = address_of(folder, CONFIG)
        if store.has(CONFIG):
            model_config = own_config(conversion)
            is_part = bool(request.include or request.exclude)
            mismatch = of_another(folder, model_config, shapes, is_part=is_part)
            wrong |= {config: f"is of another model: {mismatch}"} if mismatch else {}
        for name, content in target.companions.items():
            path, is_there = address_of(folder, name), store.has(name)
            if path not in wrong and not (is_there and store.read(name) == content):
                state = "is not what it would be" if is_there else "is not there"
                by = "SRC's own" if name in target.own_companions else "--like or --config"
                notices.append(f"{path}: {state}, by {by}")
    return [as_difference(text, path) for path, text in wrong.items()], notices


def _without_record(target: Target, dst_source: Source, folder: str) -> Iterator[tuple[str, str]]:
    """Yield the companions without which no reader finds a destination's files.

    Those that readers can do without are not asked for; others, the opening of it has asked for.
    """
    names = [relpath(path, folder) for path in dst_source.paths.values()]
    if target.form.configured and len(names) > 1:
        for name in target.form.companion_names(names):
            if not store_at(folder).has(name):
                yield address_of(folder, name), "is missing, and readers find the files by it"


def wrong_tracker(root: str, name: str, content: bytes, step_folder: str) -> dict[str, str]:
    """Return what is wrong with the file by which readers find a destination, by its address: it is
    missing, or means another.

    content: what it would say; nothing is asked of it where the step's folder was named itself.
    """
    path, store = address_of(root, name), store_at(root)
    if step_folder == root or is_same_file(Path(step_folder), Path(root)):
        return {}
    if not store.has(name):
        return {path: "is missing, and readers find the newest checkpoint by it"}
    if means(store.read(name), content, step_folder):
        return {}
    step = content.decode().strip()
    return {path: f"does not say {step}, and readers find the newest by it"}
