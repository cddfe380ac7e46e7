"""Bytes that are compared before a conversion.

A strategy is believed as far as the files bear it out. Before anything is written a little of what
several ranks hold is compared, and parameters that no strategy lists are compared whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from posixpath import basename
from typing import Any

from rankxform.display.text import format_count
from rankxform.engine.cast import BFLOAT16, FLOAT16, cast_function
from rankxform.engine.copier import read_box
from rankxform.errors import DifferenceError, Message, RankxformError, UsageError
from rankxform.formats.container import BOX_MARK, content_bytes
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Grid
from rankxform.layout.names import STEPS, first_texts, pattern_of, summarize_names
from rankxform.layout.strategy import WholeStrategy
from rankxform.operations.rename import STEP_OF_ONE
from rankxform.operations.select import is_master
from rankxform.planning import evidence as planning_evidence
from rankxform.planning import sampling
from rankxform.planning.catalog import Parameter
from rankxform.planning.evidence import (
    ContentDigest,
    DigestsByFile,
    Evidence,
    extra_to_sample,
    per_rank_candidates,
    sharded_by_pattern,
    undeclared_to_compare,
)
from rankxform.planning.sampling import (
    SampledSource,
    choose_samples,
    entries_of_holders,
    entries_to_read,
    to_know_again,
)
from rankxform.planning.selection import sources_of
from rankxform.request import Request
from rankxform.source.hints import short_path, siblings_of
from rankxform.source.source import Source
from rankxform.statements import (
    ACCEPT_CONTRADICTIONS,
    ACCEPT_EQUAL_SLICES,
    ACCEPT_EXTRA_RANKS,
    ACCEPT_STEP,
    ERROR,
    NAMED_STEP,
    SAMPLES,
    STEP,
    WARNING,
    Finding,
    Statement,
    as_notice,
    as_warning,
    contradictions,
    quote,
    require,
    rule,
    run_rules,
)
from rankxform.storage.source_reader import (
    SAMPLE,
    SourceReader,
    check_crc,
    digest_all,
    digest_samples,
    ends_in_zeros,
    find_holes,
    index_file,
)
from rankxform.storage.store import address_of, storage_of
from rankxform.target.destination import open_work_inputs
from rankxform.target.findings import adding_suggestions
from rankxform.target.target import Conversion, Target
from rankxform.transport import Team
from rankxform.transport.team import OnProgress, ShowProgress, show_nothing
from rankxform.values import dataclass, pattern_on_use

RULE_MODULES = sys.modules[__name__], sampling, planning_evidence
"""Modules of rules over samples, in the order in which they are run."""


_ROWS, _COLUMNS = 64, 8192
"""Rows that are looked at at once, and columns of masters."""
_PLACES, _BLOCK = 64, 16
"""Places where rows of large tensors are compared, and rows at each."""
_ALL, _AT_ONCE = 64 << 20, 4 << 20
"""Bytes of two tensors all of whose rows are compared, and of rows that are read at once."""
_FEW_MASTERS = 4
_MOST_UNLIKE = 0.5
"""Part of the values that stochastic rounding may round otherwise."""


def _find_lost_values(conversion: Conversion) -> Iterator[Finding]:
    target, is_full = conversion.target, conversion.source.reach.is_full
    with open_work_inputs(conversion) as inputs:
        if target.truncated_vocab:
            yield from _find_lost_rows(conversion, inputs.sources)
        if target.tied_duplicates and is_full:
            yield from _find_differing_ties(conversion, inputs.sources)
        if is_full:
            yield from _find_unlike_masters(_masters(target), inputs.sources)


def _masters(target: Target) -> list[tuple[Parameter, Parameter]]:
    """Return some masters of a longer type, spread over the model, each with its parameter."""
    parameters_by_name = {p.name: p for p in target.planner.catalog.parameters}
    pairs = [
        (parameter, parameters_by_name[parameter.base_name])
        for name, parameter in parameters_by_name.items()
        if is_master(parameter.state)
        and parameter.base_name in parameters_by_name
        and parameter.shape == parameters_by_name[parameter.base_name].shape
        and len(parameter.shape) > 1
        and parameters_by_name[parameter.base_name].src_dtype in (FLOAT16, BFLOAT16)
    ]
    return pairs[:: max(1, len(pairs) // _FEW_MASTERS)][:_FEW_MASTERS]


def _find_unlike_masters(
    pairs: Sequence[tuple[Parameter, Parameter]], sources: SourceReader
) -> Iterator[Finding]:
    """Yield, as a warning, masters that do not round to their parameters."""
    wrong = []
    for master, parameter in pairs:
        inner = min(master.shape[-2], _ROWS), min(master.shape[-1], _COLUMNS)
        box = Box((0,) * len(master.shape), (1,) * (len(master.shape) - 2) + inner)
        values, words = (read_box(tensor, box, sources) for tensor in (master, parameter))
        rounded = words.copy()
        cast_function(master.src_dtype, parameter.src_dtype)(rounded, values)
        if (rounded.view("<u2") != words.view("<u2")).mean() > _MOST_UNLIKE:
            wrong.append(master.name)
    if wrong:
        count = f"{len(wrong)} of {len(pairs)} masters looked at"
        text = (
            f"{summarize_names(wrong, 2)}: {count} do not round to their parameters; are they of "
        )
        yield as_warning(f"{text}another step, or of another rank?", SAMPLES)


def _find_differing_ties(conversion: Conversion, sources: SourceReader) -> Iterator[Finding]:
    """Yield tensors that are left out as the same as another, and of which some rows differ.

    Steps of single parameters differ if these were trained later; with --accept step the first is
    taken for all.
    """
    request, source, target = conversion.request, conversion.source, conversion.target
    parameters_by_name = {p.src_name: p for p in source.require_catalog().parameters}
    for name, original in target.tied_duplicates:
        a, b = parameters_by_name[name], parameters_by_name.get(original)
        if b is None:
            continue
        rows = min(a.shape[:1] + b.shape[:1], default=1)  # a number is one row
        is_equal = (a.shape, a.src_dtype) == (b.shape, b.src_dtype)
        is_small = sum(content_bytes(p.src_dtype, p.shape) for p in (a, b)) <= _ALL
        row_bytes = content_bytes(a.src_dtype, a.shape[1:])
        many = max(2, _AT_ONCE // max(1, row_bytes)) if is_small else _BLOCK
        stride = many if is_small else max(many, rows // _PLACES)
        for first in range(0, rows, stride) if is_equal else ():
            duplicate_rows, original_rows = (
                _rows(parameter, sources, first, min(first + many, rows)) for parameter in (a, b)
            )
            is_equal = is_equal and duplicate_rows.tobytes() == original_rows.tobytes()
        if not is_equal and a.state is not None and a.state.kind == STEP_OF_ONE:
            if request.accepts(ACCEPT_STEP, name):
                continue
            text = f"{name!r} and {original!r} differ, and the destination has one step for all"
            takes = "--accept step takes the first of them for all"
            leaves = f"--exclude {quote('^global_step$')} leaves the step out"
            yield Finding(Message(text, (takes, leaves)), need=SAMPLES)
        elif not is_equal:
            words = target.map_in_words or "--names"
            text = f"{name!r} should be the same as {original!r} by {words}, and is not"
            gives = "give this model's configuration, if it is another's"
            leaves = f"--exclude {quote(f'^{re.escape(name)}$')} leaves it out"
            yield Finding(Message(text, (gives, leaves)), need=SAMPLES)


def _find_lost_rows(conversion: Conversion, sources: SourceReader) -> Iterator[Finding]:
    """Yield vocabularies that would lose rows that are no padding, unless they are to."""
    request, source, target = conversion.request, conversion.source, conversion.target
    rows = request.vocab
    if request.vocab_cut or rows is None:
        return
    if not source.reach.is_full:
        text = (
            "--vocab: which rows are padding, one process looks up, and it does not see all files"
        )
        yield Finding(Message(text, ("say --vocab-cut if they are",)), error=UsageError)
        return
    parameters_by_name = {p.src_name: p for p in source.require_catalog().parameters}
    for name in target.truncated_vocab:
        parameter, n_rows = parameters_by_name[name], parameters_by_name[name].shape[0]
        for first in range(rows, n_rows, _ROWS):
            last_row = _rows(parameter, sources, rows - 1, rows)
            dst_rows = _rows(parameter, sources, first, min(first + _ROWS, n_rows))
            if dst_rows.any() and not (dst_rows == last_row).all():
                text = f"rows {rows} to {n_rows - 1} are not padding (zeros, or the last row again)"
                tries = (f"give --vocab {n_rows}", "say --vocab-cut to lose them")
                yield Finding(Message(text, tries, f"{name!r}"), need=SAMPLES)
                break


def _rows(parameter: Parameter, sources: SourceReader, first: int, stop: int) -> Any:
    shape = parameter.shape
    box = Box((first, *(0 for _ in shape[1:])), (stop, *shape[1:])) if shape else Box((), ())
    return read_box(parameter, box, sources)


_SHOWN = 3
_ACCEPTED = 2  # tensors that are sampled to say what is accepted
_SECOND = 8
_LITTLE_PERCENT = 50
"""Of a hundred bytes; where less is of kinds that were compared, it is said."""


def examine(conversion: Conversion, team: Team) -> Evidence:
    """Compare what ranks hold of the same elements, and of different ones. Collective.

    What contradicts what is said of the source, or of an adapter, is an error among its findings.
    """
    if conversion.resolved.shapes is not None:  # there are no files
        return Evidence()
    request, source, target = conversion.request, conversion.source, conversion.target
    selection, adapter = target.planner.selection, target.adapter
    is_named = len(source.paths) == 1 and request.files is None
    if is_named and not request.accepts(ACCEPT_CONTRADICTIONS):
        findings = team.bcast(lambda: (*find_other_rank(source),))
        if findings:
            return Evidence(findings=findings)
    catalog = source.require_catalog()
    src_parameters = sources_of(selection.parameters, catalog)
    name_of = selection.name_of
    evidence = _compare(request, source, src_parameters, name_of, team)
    if adapter is not None:
        adapter_parameters = adapter.require_catalog().parameters
        evidence += replace(
            _compare(request, adapter, adapter_parameters, name_of, team, is_adapter=True),
            per_rank_tensors=frozenset(),
            digests_by_file={},
            steps=(),
        )
    if evidence.errors:
        return evidence
    if evidence.differing:
        from .differing_replicas import choose_replicas

        evidence = choose_replicas(source, evidence, team)
    # How much of what is converted is of kinds that were compared, by bytes.
    kinds = {pattern_of(catalog.states.base_name(name)) for name in evidence.sampled}
    sizes = [(pattern_of(p.base_name), content_bytes(p.dtype, p.shape)) for p in src_parameters]
    compared_bytes = sum(nbytes for kind, nbytes in sizes if kind in kinds)
    percent = 100 * compared_bytes // max(1, sum(nbytes for _, nbytes in sizes))
    evidence = replace(evidence, percent=percent)
    if 0 < percent < _LITTLE_PERCENT and catalog.strategy is not None and not source.form.described:
        few_text = (
            f"{catalog.declared_by}: was compared with samples of kinds that hold {percent} % of "
            "the bytes; of the others there was nothing to compare"
        )
        evidence += Evidence(findings=(as_notice(few_text, SAMPLES),))
    target = conversion.target  # what is said of values: rows that are left out, and masters
    if target.truncated_vocab or target.tied_duplicates or _masters(target):
        lost_values = team.bcast(lambda: tuple(_find_lost_values(conversion)))
        evidence += Evidence(findings=lost_values)
    return evidence


def with_evidence(
    conversion: Conversion, team: Team, evidence: Evidence | None = None
) -> Conversion:
    """Return a conversion with evidence, if None with what `examine` finds. Collective.

    Raises the first error.
    """
    evidence = evidence or examine(conversion, team)
    require_evidence(conversion, evidence, team)
    place_of = conversion.source.place_of
    target = conversion.target.with_evidence(evidence, place_of=place_of)
    return conversion._replace(target=target)


def require_evidence(conversion: Conversion, evidence: Evidence, team: Team) -> None:
    """Raise the first error of what `examine` found, with what else may be meant. Collective."""
    with adding_suggestions(conversion.resolved, conversion.source, team):
        require(evidence.findings, is_counted=False)


@dataclass(frozen=True)
class SourceSamples(SampledSource):
    """The same, with the source."""

    source: Source
    holes: Mapping[int, Mapping[str, int]]  # by file the tensors with long unwritten parts -> bytes
    zero_ends: Sequence[str]  # of what a pattern shards, weights whose last row is zero
    # By file how many tensors an index lists in others, and whether samples of these are equal.
    passed_over: Mapping[str, tuple[int, bool]]
    is_crc_checked: bool  # files are compared with the checksums that they carry
    is_adapter: bool


def _compare(
    request: Request,
    source: Source,
    parameters: Sequence[Parameter],
    name_of: Callable[[str], str],
    team: Team,
    *,
    is_adapter: bool = False,
) -> Evidence:
    """Read what is compared of `parameters`, and judge it by all rules. Collective."""
    catalog, extra_indexes = source.require_catalog(), source.extra_rank_index
    all_indexes = {**source.indexes, **extra_indexes}
    steps = {file: [n for n in STEPS if n in index] for file, index in source.indexes.items()}
    few = _ACCEPTED if request.accepts(ACCEPT_EQUAL_SLICES) else None
    pattern_names = sharded_by_pattern(parameters, catalog)[:few]
    pattern_entries: dict[int, list[str]] = {}
    for name in pattern_names:
        for file, file_entries in entries_of_holders(catalog.declared[name]).items():
            pattern_entries.setdefault(file, []).extend(file_entries)
    sampled_tensors = choose_samples(parameters, catalog, source.indexes)
    entries = entries_to_read(sampled_tensors)
    if request.dst is not None:  # whose records say what was read
        versioned_files = {
            file
            for file, index in source.indexes.items()
            if index.inode and storage_of(source.paths[file]).has_versions
        }
        entries = to_know_again(source.indexes, entries, versioned_files)
    few = _ACCEPTED if request.accepts(ACCEPT_EXTRA_RANKS) else None
    extra_names = extra_to_sample(catalog, extra_indexes)[:few]
    undeclared_names = undeclared_to_compare(parameters, catalog)
    per_rank_names = per_rank_candidates(parameters, catalog)
    compared_names = [*undeclared_names, *per_rank_names]
    values = dict.fromkeys(source.indexes, compared_names)
    b_matrices = {
        file: [name for name in index.schema.names if _is_second(name)][:_SECOND]
        for file, index in (source.indexes.items() if is_adapter else ())
    }
    extra_entries = dict.fromkeys(all_indexes, extra_names)
    samples, holes = read_samples(
        source,
        [steps, values],
        [pattern_entries, entries, extra_entries, b_matrices],
        team,
        crc=request.check_crc,
    )
    zero_ends = _find_zero_ends(source, parameters, pattern_names, team) if pattern_names else ()

    passed_over = dict[str, tuple[int, bool]]()
    if source.description.passed_over:
        passed_over = team.bcast(lambda: dict(_compare_passed_over(source)))

    def judge_all() -> Evidence:
        sampled = samples[False]
        sizes = [
            min(SAMPLE, all_indexes[file].nbytes(name))
            for file, file_digests in sampled.items()
            for name in file_digests
        ]
        subject = SourceSamples(
            catalog, all_indexes, {file: source.paths[file] for file in extra_indexes},
            request.accepts, request.unlisted == "take-one", name_of, sampled_tensors,
            pattern_names, frozenset(undeclared_names), frozenset(per_rank_names),
            samples[True], sampled, source, holes, zero_ends, passed_over,
            request.check_crc, is_adapter,
        )  # fmt: skip
        evidence = Evidence(reads=len(sizes), bytes_read=sum(sizes), digests_by_file=sampled)
        for noticed in run_rules(SAMPLES, RULE_MODULES, subject, request.accepts):
            evidence += Evidence(findings=(noticed,)) if isinstance(noticed, Finding) else noticed
        return evidence

    return team.agree(judge_all)


def _compare_passed_over(source: Source) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield of each file how many of its tensors an index lists elsewhere, and whether samples of
    all are equal there."""
    for file, files_by_name in source.description.passed_over.items():
        names_by_file: dict[str, list[str]] = {}
        for name, other_file in files_by_name.items():
            names_by_file.setdefault(other_file, []).append(name)
        is_equal = False  # if one cannot be read
        with suppress(RankxformError, OSError):
            index = index_file(path := address_of(source.where.path, file))
            is_equal = all(
                digest_samples(path, index, names)
                == digest_samples(other_path, index_file(other_path), names)
                for other_file, names in names_by_file.items()
                for other_path in [address_of(source.where.path, other_file)]
            )
        if files_by_name:
            yield file, (len(files_by_name), is_equal)


def _find_zero_ends(
    source: Source, parameters: Sequence[Parameter], names: Collection[str], team: Team
) -> list[str]:
    """Return the weights of `names` whose last slice ends in a row of zeros. Collective.

    Not those of a vocabulary, which has rows of no word.
    """
    from rankxform.planning.zeros import is_vocabulary_name

    names_by_file: dict[int, list[str]] = {}
    for parameter in parameters:
        name, grid = parameter.name, parameter.grid
        is_plain = parameter.is_weight and isinstance(grid, Grid) and parameter.shape != ()
        if name not in names or not is_plain or is_vocabulary_name(name):
            continue
        file = parameter.sharding.files[max(parameter.sharding.files)][0]
        if name in source.indexes[file]:  # not under the names of parts
            names_by_file.setdefault(file, []).append(name)

    def read() -> list[str]:
        return [
            name
            for file in source.reach.partition(names_by_file)[team.rank]
            for path, index in [(source.paths[file], source.indexes[file])]
            for name in ends_in_zeros(path, index, names_by_file[file])
        ]

    return [name for part in team.allgather(read) for name in part]


def read_samples(
    source: Source,
    whole: Sequence[Mapping[int, Sequence[str]]],
    sampled: Sequence[Mapping[int, Sequence[str]]],
    team: Team,
    show: ShowProgress = show_nothing,
    *,
    crc: bool = False,
) -> tuple[Mapping[bool, DigestsByFile], Mapping[int, Mapping[str, int]]]:
    """Return what files hold of tensors, whole (True) or in samples (False); and by file the
    tensors of which long parts were never written, with their bytes. Collective.

    whole, sampled: names by file. Each file is read by one process. With `crc`, files are compared
    with the checksums that they carry.
    """
    all_indexes = {**source.indexes, **source.extra_rank_index}
    holes: dict[int, dict[str, int]] = {}
    local_digests: dict[bool, dict[int, dict[str, ContentDigest]]] = {True: {}, False: {}}
    local_files = source.reach.partition(all_indexes)[team.rank]

    def digest_files(on_progress: OnProgress, files: Sequence[int] = local_files) -> None:
        for file in files:
            path, index = source.paths[file], all_indexes[file]
            if crc:
                check_crc(path, index, on_progress)
            if file_holes := find_holes(path, index):
                holes[file] = file_holes
            for is_whole, names_by_file, read in (
                (True, whole, digest_all),
                (False, sampled, digest_samples),
            ):
                names = dict.fromkeys(n for names in names_by_file for n in names.get(file, ()))
                if names:
                    local_digests[is_whole][file] = read(path, index, names, on_progress)
            on_progress(0)

    read_each = storage_of(source.where.path).read_each
    team.work(partial(read_each, local_files, digest_files) if read_each else digest_files, show)
    by_process = team.allgather(lambda: (local_digests, holes))
    all_whole, all_sampled, all_holes = (
        dict(sorted((file, content) for by_file in parts for file, content in by_file.items()))
        for parts in zip(*((digests[True], digests[False], holes) for digests, holes in by_process))
    )
    return {True: all_whole, False: all_sampled}, all_holes


@rule(SAMPLES)
def files_carry_checksums(sample: SourceSamples) -> Iterator[Finding]:
    """Files carry checksums if they are to be compared with these."""
    source = sample.source
    if sample.is_adapter:
        return
    unchecked_paths = [
        source.paths[f] for f, index in source.indexes.items() if not index.has_checksum
    ]
    count = len(source.indexes) - len(unchecked_paths)
    if count and not sample.is_crc_checked:
        yield as_notice(f"{source.where.path}: {count} files carry checksums; --check-crc compares")
    elif sample.is_crc_checked and not count:
        text = f"{source.where.path}: no file carries a checksum, so nothing would be compared"
        yield Finding(Message(text, ("leave out --check-crc",)), error=DifferenceError)
    elif sample.is_crc_checked and unchecked_paths:
        paths_text = f"as {len(unchecked_paths)} of the files do not"
        yield as_warning(f"{unchecked_paths[0]}: carries no checksum, {paths_text}")


@rule(SAMPLES)
def content_was_written(sample: SourceSamples) -> Iterator[Finding]:
    """Something was written of each file's weights; it is said where much was not.

    A weight that is zero everywhere may lie on a file system that stores no zeros.
    """
    source, digests = sample.source, sample.samples
    telling = {
        pattern_of(name)
        for file_digests in digests.values()
        for name, digest in file_digests.items()
        if not digest.constant
    }
    warnings = []
    for file, file_holes in sample.holes.items():
        weights = [name for name in file_holes if source.require_catalog().states.is_weight(name)]
        file_digests = digests.get(file, {})
        if (
            weights
            and file_digests
            and all(digest.is_zero for digest in file_digests.values())
            and telling
        ):
            text = (
                f"nothing was ever written of what was looked at ({sum(file_holes.values()):,} "
                "bytes are holes)"
            )
            yield Finding(Message(text, ("copy the file again",), source.paths[file]))
        doubted = [name for name in weights if pattern_of(name) in telling]
        if doubted:
            warnings.append(
                f"{source.paths[file]}: of {summarize_names(doubted, 2)} long parts were never "
                f"written ({sum(file_holes[name] for name in doubted):,} bytes are holes)"
            )
    yield from map(as_warning, warnings[:_SHOWN])


@rule(SAMPLES, group="values")
def content_is_usual(sample: SourceSamples) -> Iterator[Finding]:
    """Not all weights are zero, and no values are infinite or no numbers."""
    source, sampled = sample.source, sample.samples
    is_weight = source.require_catalog().states.is_weight
    weights = [(n, d[n]) for d in sampled.values() for n in d if is_weight(n)]
    count = len({name for name, _ in weights})
    if count > 1 and all(digest.is_zero for _, digest in weights):
        yield as_warning(
            f"{source.where.path}: all {count} sampled weights are zero, as before they are loaded"
        )
    wrong = {
        name
        for file_digests in sampled.values()
        for name, digest in file_digests.items()
        if not digest.is_finite
    }
    if wrong:
        yield as_warning(
            f"{source.where.path}: {summarize_names(sorted(wrong), 2)} hold values that are "
            "infinite or no numbers"
        )


@rule(SAMPLES)
def matrices_were_filled(sample: SourceSamples) -> Iterator[Finding]:
    """No matrix is zero where most of its kind are not, and no file where others' are not.

    What has holes was said already.
    """
    if not any(d.holds_zeros for digests in sample.samples.values() for d in digests.values()):
        return
    from rankxform.planning.zeros import find_stored_zeros, is_judged

    source, is_weight = sample.source, sample.source.require_catalog().states.is_weight
    zeros_by_file: dict[int, dict[str, bool]] = {}
    for file, digests in sample.samples.items():
        schema, holes = sample.sizes[file].schema, sample.holes.get(file, {})
        for entry, digest in digests.items():
            number, name = schema.position[entry], entry.partition(BOX_MARK)[0]
            is_whole = entry not in holes and is_weight(name)
            if is_whole and is_judged(name, schema.dtypes[number], schema.shapes[number]):
                zeros = zeros_by_file.setdefault(file, {})
                zeros[name] = digest.holds_zeros and zeros.get(name, True)
    names = [p.name for p in source.require_catalog().parameters if len(p.shape) > 1]
    stored_zeros = find_stored_zeros(zeros_by_file, names, is_full=False)
    for text in stored_zeros.in_words(source.paths):
        yield as_warning(f"{text}; inspect --check --full looks at all")


@rule(SAMPLES)
def an_index_decides(sample: SourceSamples) -> Iterator[Finding]:
    """Of several files with one tensor, that is read which the index lists; others are equal."""
    description = sample.source.description
    for file, (count, is_equal) in sample.passed_over.items():
        text = f"{file}: {format_count(count, 'tensor')} that {basename(description.source)} lists"
        if is_equal:
            yield as_notice(f"{text} in other files have equal samples there; it was not used")
        else:
            first = "; Transformers reads this file first" * (file == "model.safetensors")
            yield as_warning(f"{text} in other files are passed over, and differ from these{first}")


@rule(SAMPLES)
def slices_end_in_numbers(sample: SourceSamples) -> Iterator[Finding]:
    """Tensors of unlike length that a pattern shards do not all end in rows of zeros: padding."""
    parameters = {p.name: p for p in sample.catalog.parameters}
    lengths = {parameters[name].shape[0] for name in sample.zero_ends}
    if len(lengths) > 1:
        texts = [f"{name} {list(parameters[name].shape)}" for name in sample.zero_ends]
        yield as_warning(
            f"{sample.catalog.declared_by}: the last rows of {first_texts(texts, 2)} are zeros, as "
            "where slices were padded to equal rows; a map, or --vocab, knows how many are meant"
        )


@rule(SAMPLES)
def files_are_of_one_step(sample: SourceSamples) -> Iterator[Finding | Evidence]:
    """Files are of one step of a training, by what they say of it."""
    source = sample.source
    step = source.selected.step or ()
    declared_steps = (
        *source.description.statements,
        *(source.manifest.statements if source.manifest is not None else ()),
    )
    step_statements = [statement for statement in declared_steps if statement.kind == STEP]
    for file, file_digests in sample.whole.items():
        schema = source.indexes[file].schema
        counters = {
            name: int.from_bytes(file_digests[name].content, "little")
            for name in STEPS
            if name in file_digests
            and file_digests[name].content
            and "Int" in schema.dtypes[schema.position[name]]
        }
        path = source.paths[file]
        step_statements += (Statement(STEP, name, value, path) for name, value in counters.items())
        if len(step) > 1 and {"epoch_num", "step_num"} <= {*counters}:
            subject = f"epoch and step of {basename(path)}"
            declared_steps = counters["epoch_num"], counters["step_num"]
            step_statements.append(Statement(NAMED_STEP, subject, step, path))
            step_statements.append(Statement(NAMED_STEP, subject, declared_steps, "what it holds"))
    findings = list[Finding]()
    for contradiction in contradictions(step_statements):
        finding, subject = contradiction.finding, contradiction.first.subject
        if finding.severity == ERROR and not sample.accepts(ACCEPT_STEP, subject):
            tries = (*finding.message.tries, "--accept step converts them as they are")
            yield finding._replace(message=finding.message._replace(tries=tries))
        else:
            findings.append(finding._replace(severity=WARNING))
    steps = {
        statement.subject: statement for statement in step_statements if statement.kind == STEP
    }
    yield from findings[:1]
    yield Evidence(steps=tuple(steps.values()))


@rule(SAMPLES)
def an_adapter_is_trained(sample: SourceSamples) -> Iterator[Finding]:
    """Not each of an adapter's B matrices is constant, as before its training."""
    matrices = [
        digest
        for digests in sample.samples.values()
        for name, digest in digests.items()
        if sample.is_adapter and _is_second(name)
    ]
    if matrices and all(matrix.constant for matrix in matrices):
        yield as_warning(
            f"{sample.source.where.path}: each of {len(matrices)} B matrices looked at is "
            "constant, as before the training: nothing may be added"
        )


def _is_second(name: str) -> bool:
    return "lora_b" in name.lower()


# -- rows of whole tensors ------------------------------------------------------------------------


_LOOKED_AT = 32
_COUNTER = 8
"""Bytes of a counter, which may be a rank's own."""
_STEP = pattern_on_use(r"-\d+_\d+(?=\.\w+$)")


def find_other_rank(source: Source) -> Iterator[Finding]:
    """Yield that one rank's file was taken as complete, and that another rank's differs.

    Ranks of a data-parallel job hold the same, but for statistics of their own.
    """
    [(file, path)] = source.paths.items()
    catalog = source.require_catalog()
    if not isinstance(catalog.strategy, WholeStrategy):
        return
    file_index = source.indexes[file]
    try:
        peer = _neighbour(Path(path))
        if peer is None:
            return
        theirs = index_file(peer)
        is_weight = catalog.states.is_weight
        names = [n for n in file_index.schema.names if n in theirs and is_weight(n)]
        names = [n for n in names if file_index.nbytes(n) > _COUNTER]
        names = sorted(names, key=file_index.nbytes, reverse=True)[:_LOOKED_AT]
        peer_digests = digest_samples(str(peer), theirs, names)
    except (RankxformError, OSError):
        return  # what cannot be read says nothing
    digests = digest_samples(path, file_index, names)
    telling_names = [n for n in names if not (digests[n].constant and peer_digests[n].constant)]
    differing = [n for n in telling_names if digests[n].digest != peer_digests[n].digest]
    if 2 * len(differing) > len(telling_names):
        folder = short_path(peer.parent.parent)
        text = f"is one rank's file, and {peer.parent.name}'s holds other bytes of {differing[0]!r}"
        tries = (
            f"name the folder of all ranks, {folder}, with --src-strategy",
            "--accept contradictions takes the file for a complete checkpoint",
        )
        details = f"so it is with {len(differing)} of {len(telling_names)} tensors looked at"
        yield Finding(Message(text, tries, path, details), need=SAMPLES)


def _neighbour(path: Path) -> Path | None:
    """Return the file of another rank that goes with a rank folder's, if it is plain which."""
    ranks = siblings_of(path)
    rank_digits = path.resolve().parent.name.removeprefix("rank_")
    for rank in ranks:
        if str(rank) != rank_digits:
            folder = path.resolve().parent.parent / f"rank_{rank}"
            step = _STEP().search(path.name)
            matches = [
                candidate
                for candidate in folder.iterdir()
                if candidate.suffix == path.suffix and candidate.is_file()
                and ((theirs := _STEP().search(candidate.name)) and theirs[0]) == (step and step[0])
            ]  # fmt: skip
            return matches[0] if len(matches) == 1 else None
    return None
