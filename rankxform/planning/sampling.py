"""Samples of what files hold: which tensors are read, and what follows for the declared strategy.

A strategy that was given for another job is found by its bytes. Slices that should differ and are
equal show that ranks hold whole tensors, or that files were copied; replicas that should be equal
and differ show that ranks are numbered in another way. A few kilobytes of every file are compared
both ways.

1. Which samples are read is a fixed rule, the same for any number of processes.
2. Bytes that are all equal, such as an optimizer state of zeros, prove nothing, and are not
   counted.
3. A finding is an error only if it cannot be meant: some tensors differ between ranks by design
   (statistics, counters), and some slices are equal by design (repeated heads of keys and values).
4. What was compared is stated as a share of the source's bytes: kinds of tensors that no sample
   belongs to have not been checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import islice

from rankxform.errors import Message, RequestError
from rankxform.formats.container import Index, Schema, content_bytes
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Cell
from rankxform.layout.names import first_texts, format_ranges, pattern_of, summarize_names
from rankxform.statements import (
    ACCEPT_CONTRADICTIONS,
    ACCEPT_EQUAL_SLICES,
    SAMPLES,
    Finding,
    as_accepted,
    as_notice,
    as_warning,
    rule,
)
from rankxform.values import NamedTuple, dataclass, pattern_on_use

from .build_catalog import layout_with_uneven_rows
from .catalog import Catalog, Parameter
from .evidence import ALLOW_EQUAL, ContentDigest, DigestsByFile, Evidence, is_small

_RIGHT_STRATEGY = "give the strategy that this checkpoint was saved with"
_READS = 4096
"""Samples of all files together, where that is more than `_OF_FILE` of each."""
_OF_FILE, _MOST_OF_FILE = 4, 32
_OF_KIND = 4
"""Tensors of each kind of sharding, spread over the model."""
_MOST_KNOWN, _FEW_KNOWN, _ALL_KNOWN = 512, 1 << 11, 1 << 16
"""Tensors of a file by whose samples it is known again; of all files together, however small these
are, and however large."""
_BYTES_KNOWN = 2 << 20
"""For so many bytes of a file there may be one, so that looking takes little beside reading."""
_LEAST_SAMPLE = 64
_CELLS, _HOLDERS = 2, 2
"""Of tensors that not all of its files are looked at for: different boxes, and holders of each."""
_SHOWN = 3
_FEW = 4


class SampledTensor(NamedTuple):
    """A tensor that is looked at: in which files, by the box that they hold.

    kind: tensors of one kind lie in the same files in the same way. weighty: each holder has the
    same for sure; a small tensor that no optimizer has states of may be a rank's own.
    """

    parameter: Parameter
    files: Mapping[Cell, tuple[int, ...]]
    kind: int
    weighty: bool

    @property
    def name(self) -> str:
        return self.parameter.name

    def samples(
        self, digests_by_file: DigestsByFile
    ) -> Iterator[tuple[Cell, list[tuple[int, ContentDigest]]]]:
        """Yield what was seen of each box, by file."""
        for cell, files in self.files.items():
            file_samples = (
                (file, digests_by_file[file].get(self.parameter.entry(cell, file)))
                for file in files
                if file in digests_by_file
            )
            yield cell, [(file, sample) for file, sample in file_samples if sample is not None]


@dataclass(frozen=True)
class SampledSource:
    """What was read of a source's tensors, and why; the subject of rules over samples."""

    catalog: Catalog
    sizes: Mapping[int, Index]  # index of each file
    extra_paths: Mapping[int, str]  # file id -> path of a file beyond the strategy's ranks
    accepts: Callable[..., bool]  # tells whether a doubt does not refuse the source
    take_one: bool  # one rank's values are taken of what no strategy lists
    name_of: Callable[[str], str]  # source name -> the name at the destination
    tensors: Sequence[SampledTensor]  # those whose samples are compared
    pattern_names: Sequence[str]  # parameters that a pattern shards
    # Parameters that are compared whole: those that no strategy lists, and those that one lists and
    # of which each rank may have values of its own.
    undeclared_names: frozenset[str]
    per_rank_names: frozenset[str]
    whole: DigestsByFile  # of all bytes
    samples: DigestsByFile


def choose_samples(
    parameters: Sequence[Parameter], catalog: Catalog, files: Iterable[int]
) -> tuple[SampledTensor, ...]:
    """Return which tensors are looked at, and in which of `files`.

    Of every kind of sharding some, spread over the model. With many ranks only the first kinds are
    looked at in all files, and the others in two holders of two boxes each.
    """
    all_files = frozenset(files)
    if len(all_files) < 2:
        return ()
    sample_limit = min(_MOST_OF_FILE, max(_OF_FILE, _READS // len(all_files)))
    kinds = _kinds(parameters, catalog)
    of_file = Counter(file for kind in kinds for file in kind[0].holders)
    room, sample_counts = dict.fromkeys(all_files, sample_limit), Counter[int]()
    for file, count in of_file.items():
        # One sample is left for the kinds that not every file is asked about.
        if count > sample_limit:
            room[file] = sample_limit - 1
    # Of which tensors each rank may have values of its own: running statistics and counters of
    # experts' load are small, and no optimizer has states of them. Where no states are there at
    # all, a bias cannot be told from them.
    with_states = {p.base_name for p in catalog.declared.values() if p.state is not None}
    owned = {
        p.name
        for p in parameters
        if p.base_name not in with_states and (len(p.shape) < 2 or (with_states and is_small(p)))
    }
    sampled_tensors = []
    for number, parameter in _in_turn(kinds):
        files_by_cell = {
            cell: readable_files
            for cell, cell_files in parameter.sharding.files.items()
            if (readable_files := tuple(file for file in cell_files if file in all_files))
        }
        sampled_files = {file for cell_files in files_by_cell.values() for file in cell_files}
        if any(sample_counts[file] >= room[file] for file in sampled_files):
            files_by_cell = _few(files_by_cell, sample_counts, sample_limit, number)
            sampled_files = {file for cell_files in files_by_cell.values() for file in cell_files}
        if len(sampled_files) > 1:
            sample_counts.update(sampled_files)
            sampled_tensors.append(
                SampledTensor(parameter, files_by_cell, number, parameter.name not in owned)
            )
    sampled_tensors += _find_tied(parameters, catalog, all_files, len(kinds), owned)
    return tuple(sampled_tensors)


def _find_tied(
    parameters: Sequence[Parameter],
    catalog: Catalog,
    all_files: Collection[int],
    kind: int,
    owned: Collection[str],
) -> Iterator[SampledTensor]:
    """Yield tensors that files of several pipeline stages hold, such as a tied embedding.

    One stage's are read for all, so that the others' must be the same, where they lie alike.
    """
    strategy = catalog.strategy
    if (
        strategy is None
        or catalog.is_whole
        or catalog.stages == 1
        or catalog.description.lists_files
    ):
        return
    stages: dict[str, list[int]] = {}
    for stage, groups in enumerate(catalog.groups):
        for name in {name for group in groups for name in group.schema.names}:
            stages.setdefault(name, []).append(stage)
    for parameter in parameters:
        holding_stages = stages.get(parameter.name, ())
        large = content_bytes(parameter.src_dtype, parameter.shape) >= _LEAST_SAMPLE
        if (
            len(holding_stages) < 2
            or not parameter.is_declared
            or not large
            or not parameter.is_weight
        ):
            continue
        declared_stage = strategy.stages_of[parameter.name][0]
        files_by_cell: dict[Cell, list[int]] = {}
        for stage in holding_stages:
            listed = stage in strategy.stages_of[parameter.name]
            try:
                layout = layout_with_uneven_rows(
                    strategy,
                    parameter.name,
                    stage if listed else declared_stage,
                    len(parameter.shape),
                ).fold(parameter.shape, slices=False)
                if layout.grid(parameter.shape) != parameter.grid:
                    continue
            except RequestError:  # shapes that it does not divide
                continue
            first = strategy.ranks_in(stage).start
            for group in catalog.groups[stage]:
                position = group.schema.position.get(parameter.name)
                for file, rank in zip(group.files, group.ranks) if position is not None else ():
                    cell = layout.cell(rank - first)
                    has_same_shape = (
                        parameter.grid.box(cell).shape == group.schema.shapes[position or 0]
                    )
                    if has_same_shape and file in all_files:
                        files_by_cell.setdefault(cell, []).append(file)
        cells = {cell: tuple(sorted(cell_files)) for cell, cell_files in files_by_cell.items()}
        yield SampledTensor(parameter, cells, kind, weighty=parameter.name not in owned)


def _kinds(parameters: Sequence[Parameter], catalog: Catalog) -> list[list[Parameter]]:
    """Return the tensors that several files hold by how they lie in them, the most telling first.

    Weights apart from optimizer states.
    """
    kinds_by_key: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        large = content_bytes(parameter.src_dtype, parameter.shape) >= _LEAST_SAMPLE
        if parameter.is_declared and large and len(parameter.holders) > 1 and not catalog.is_whole:
            key = id(parameter.sharding.files), parameter.state is not None
            kinds_by_key.setdefault(key, []).append(parameter)

    def telling(kind: list[Parameter]) -> tuple[bool, bool, bool]:
        files = kind[0].sharding.files
        replicated = any(len(cell_files) > 1 for cell_files in files.values())
        return kind[0].state is not None, not replicated, len(files) < 2

    return sorted(kinds_by_key.values(), key=telling)


def _in_turn(kinds: Sequence[Sequence[Parameter]]) -> Iterator[tuple[int, Parameter]]:
    """Yield one tensor of every kind, then another of every kind, and so on: first and last, and
    those between."""
    counts = map(len, kinds)
    places = [list(dict.fromkeys((0, n - 1, n // 2, n // 4))) for n in counts]
    for turn in range(_OF_KIND):
        for number, (kind, positions) in enumerate(zip(kinds, places)):
            if turn < len(positions):
                yield number, kind[positions[turn]]


def _few(
    files_by_cell: Mapping[Cell, tuple[int, ...]],
    sample_counts: Counter[int],
    sample_limit: int,
    turn: int,
) -> dict[Cell, tuple[int, ...]]:
    """Return a few holders of a few boxes, of those files of which not enough was looked at."""
    cells = list(files_by_cell)
    first = turn * _CELLS % len(cells)
    sampled_by_cell: dict[Cell, tuple[int, ...]] = {}
    for cell in (*cells[first:], *cells[:first]):
        free = tuple(file for file in files_by_cell[cell] if sample_counts[file] < sample_limit)[
            :_HOLDERS
        ]
        if free:
            sampled_by_cell[cell] = free
        if len(sampled_by_cell) == _CELLS:
            break
    return sampled_by_cell


def entries_of_holders(parameter: Parameter) -> dict[int, list[str]]:
    """Return by file the entries of a tensor that files hold each for itself."""
    entries_by_file: dict[int, list[str]] = {}
    files_by_cell = parameter.sharding.files
    for cell in sorted(files_by_cell):
        files = files_by_cell[cell]
        for file in files if len(files) == 1 or len(files_by_cell) == 1 else ():
            entries_by_file.setdefault(file, []).append(parameter.entry(cell, file))
    return entries_by_file


def entries_to_read(tensors: Iterable[SampledTensor]) -> dict[int, list[str]]:
    """Return what is read: by file the entries that are looked at."""
    entries_by_file: dict[int, dict[str, None]] = {}
    for tensor in tensors:
        for cell, files in tensor.files.items():
            for file in files:
                entries_by_file.setdefault(file, {})[tensor.parameter.entry(cell, file)] = None
    return {file: list(names) for file, names in entries_by_file.items()}


def to_know_again(
    indexes: Mapping[int, Index],
    entries: Mapping[int, Sequence[str]],
    versioned_files: Collection[int] = (),
) -> dict[int, list[str]]:
    """Return by file the entries that are looked at, and others, to know the file again by them.

    All, while there is room: whatever is done to a model may change few of its tensors. Else of
    every kind one; and few of files that have versions, by which they are known.
    """
    count = max(1, len(indexes))
    lower_limit = max(_OF_FILE, min(_MOST_KNOWN, _FEW_KNOWN // count))
    upper_limit = min(_MOST_KNOWN, _ALL_KNOWN // count)
    kinds: dict[Schema, list[str]] = {}
    entries_by_file = {}
    for file, index in indexes.items():
        schema, file_entries = index.schema, entries.get(file, ())
        entry_limit = max(
            lower_limit, len(file_entries), min(upper_limit, index.size // _BYTES_KNOWN)
        )
        if file in versioned_files:
            entry_limit = max(_OF_FILE, len(file_entries))
        if len(schema.names) > entry_limit and schema not in kinds:
            kinds[schema] = _one_of_each(schema)
        other_entries = kinds[schema] if len(schema.names) > entry_limit else schema.names
        entries_by_file[file] = [
            *islice(dict.fromkeys([*file_entries, *other_entries]), entry_limit)
        ]
    return entries_by_file


def _one_of_each(schema: Schema) -> list[str]:
    """Return a tensor of every kind that a file holds."""
    kinds: dict[str, list[str]] = {}
    for name, nbytes in zip(schema.names, map(content_bytes, schema.dtypes, schema.shapes)):
        if nbytes >= _LEAST_SAMPLE:
            kinds.setdefault(pattern_of(name), []).append(name)
    return [names[len(names) // 2] for names in kinds.values()]


_MATRIX = 2
_EXPERTS = pattern_on_use("expert|moe", re.IGNORECASE)
_REPEATED = pattern_on_use(
    r"expert|moe|grouped|ffn\.|kv|attn|mask|rope|rotary|freqs|(?<![a-z])(key|value)(?!_head)"
    r"|(?<![a-z0-9])w?[kv](?![a-z0-9])",
    re.IGNORECASE,
)


def may_repeat(name: str, axes: int, *, is_weight: bool = True) -> bool:
    """Tell whether slices of a tensor may be equal, by its name and how many axes it has.

    Of experts that are made of one, which may be stacked, and of heads of keys and values, which
    are repeated where there are fewer than ranks; of vectors, tables, and optimizer states.
    """
    return axes != _MATRIX or not is_weight or bool(_REPEATED().search(name))


# -- what samples say -----------------------------------------------------------------------------


class ReplicaContradiction(NamedTuple):
    """Two files that should hold the same of a tensor, and do not."""

    tensor: SampledTensor
    cell: Cell
    files: tuple[int, int]


@dataclass(frozen=True)
class ReplicaAgreement:
    """What samples of replicas say."""

    compared: list[SampledTensor] = field(default_factory=list)  # how many tensors were
    # Of these, one contradiction each.
    differing: list[ReplicaContradiction] = field(default_factory=list)
    # Files of which every sample differs from other holders', and there are several.
    doubted: tuple[int, ...] = ()

    @property
    def is_refuted(self) -> bool:
        """Whether half contradict, or all of a file or of a kind, of which there are several."""
        if self.doubted or (self.differing and 2 * len(self.differing) >= len(self.compared)):
            return True
        kinds = Counter(tensor.kind for tensor in self.compared)
        wrong = Counter(contradiction.tensor.kind for contradiction in self.differing)
        return any(count == kinds[kind] > 1 for kind, count in wrong.items())


def replicas_agree(
    tensors: Iterable[SampledTensor], digests_by_file: DigestsByFile
) -> ReplicaAgreement:
    """Compare what files hold of the same boxes."""
    compared, differing = list[SampledTensor](), list[ReplicaContradiction]()
    comparison_counts, wrong = Counter[int](), Counter[int]()
    for tensor in tensors:
        first: ReplicaContradiction | None = None
        telling = False
        for cell, file_samples in tensor.samples(digests_by_file):
            digests = Counter(sample.digest for _, sample in file_samples)
            if len(file_samples) < 2 or (len(digests) == 1 and file_samples[0][1].constant):
                continue
            telling = True
            comparison_counts.update(file for file, _ in file_samples)
            if len(digests) == 1:
                continue
            (digest, majority_count), (_, second) = digests.most_common(2)
            minority = [
                f for f, s in file_samples if s.digest != digest or majority_count == second
            ]
            wrong.update(minority)
            if first is None:
                majority_file = next(f for f, s in file_samples if s.digest == digest)
                minority_file = next(f for f, s in file_samples if s.digest != digest)
                first = ReplicaContradiction(
                    tensor,
                    cell,
                    (min(majority_file, minority_file), max(majority_file, minority_file)),
                )
        if telling:
            compared.append(tensor)
        if first is not None:
            differing.append(first)
    doubted = tuple(
        sorted(file for file, count in wrong.items() if count == comparison_counts[file] > 1)
    )
    return ReplicaAgreement(compared, differing, doubted)


def compare_different_slices(
    tensors: Iterable[SampledTensor], digests_by_file: DigestsByFile
) -> tuple[list[SampledTensor], list[SampledTensor], list[tuple[int, int]], list[str]]:
    """Compare what files hold of different boxes.

    Returns the tensors of which all boxes hold the same; those of which each box holds the same as
    some other; pairs of files that hold the same of everything else of which they should hold
    different boxes; and the tensors that were compared.
    """
    equal, copied, compared = list[SampledTensor](), list[SampledTensor](), list[str]()
    counts_by_pair = Counter[tuple[int, int]]()
    boxes: list[dict[int, tuple[Cell, bytes]]] = []
    for tensor in tensors:
        contents_by_file: dict[int, tuple[Cell, bytes]] = {
            file: (cell, sample.digest)
            for cell, file_samples in tensor.samples(digests_by_file)
            for file, sample in file_samples
            if not sample.constant
        }
        cells = {cell for cell, _ in contents_by_file.values()}
        if len(cells) < 2:
            continue
        compared.append(tensor.name)
        by_digest: dict[bytes, list[int]] = {}
        for file, (_, digest) in contents_by_file.items():
            by_digest.setdefault(digest, []).append(file)
        if len(by_digest) == 1:
            equal.append(tensor)
            continue
        if all(len({contents_by_file[file][0] for file in f}) > 1 for f in by_digest.values()):
            copied.append(tensor)  # along an axis, as heads are, and experts that are made of one
            continue
        boxes.append(contents_by_file)
        for files in by_digest.values():
            first = files[0]
            counts_by_pair.update(
                (first, file)
                for file in files[1:]
                if contents_by_file[file][0] != contents_by_file[first][0]
            )
    pairs = [
        (a, b)
        for (a, b), count in counts_by_pair.items()  # wherever their boxes differ, all are equal
        if count == sum(a in c and b in c and c[a][0] != c[b][0] for c in boxes) > 1
    ]
    return equal, copied, sorted(pairs), compared


def _tries(catalog: Catalog) -> tuple[str, str]:
    """Return what to do about equal slices: a derived strategy may have taken replicas for them."""
    correct = "correct the sizes that it was derived for (mp, vocab_emb_dp)"
    return _RIGHT_STRATEGY, correct if _is_derived(catalog) else ALLOW_EQUAL


def _is_derived(catalog: Catalog) -> bool:
    """Whether no compiler wrote the strategy, so that nothing but bytes bears it out."""
    return catalog.strategy is not None and catalog.strategy.derived


@rule(SAMPLES, ACCEPT_EQUAL_SLICES)
def pattern_slices_differ(sample: SampledSource) -> Iterator[Finding]:
    """A pattern shards no parameter of which all ranks hold the same bytes.

    A parameter whose elements are all equal, such as a moment of zeros, proves nothing.
    """
    equal: dict[bool, list[str]] = {False: [], True: []}  # by whether it is accepted
    for name in sample.pattern_names:
        parameter = sample.catalog.declared[name]
        entries = entries_of_holders(parameter)  # of a tensor in parts several of each holder
        digests = [
            [digests_of_file[entry] for entry in file_entries if entry in digests_of_file]
            for file, file_entries in entries.items()
            for digests_of_file in [sample.samples.get(file, {})]
        ]
        contents = {tuple(d.digest for d in of_file) for of_file in digests if of_file}
        is_equal = len(contents) == 1 < len(digests) and all(map(len, digests))
        if is_equal and not all(digest.constant for digest in digests[0]):
            equal[sample.accepts(ACCEPT_EQUAL_SLICES, name)].append(repr(name))
    for is_accepted, names in equal.items():
        if names:
            names_text, label = first_texts(names, 1), sample.catalog.declared_by
            text = f"{label!r} shards {names_text}, and all ranks hold the same bytes of it"
            tries = ("let the expression match fewer names", ALLOW_EQUAL)
            finding = Finding(Message(text, tries))
            yield as_accepted(finding) if is_accepted else finding


def _exchangeable(catalog: Catalog, compared: Iterable[SampledTensor]) -> int:
    """Return how many ranks could be exchanged with another of their pipeline stage, and replicas
    would agree as before.

    Two can if each slice that was compared with others is on both, or on neither.
    """
    slices, replicas = dict[int, list[object]](), dict[int, list[object]]()
    for files in {id(p.sharding.files): p.sharding.files for p in catalog.parameters}.values():
        for cell, holders in files.items():
            for rank in map(catalog.rank_of, holders):
                slices.setdefault(rank, []).append((id(files), cell))
    for cell_files in {id(tensor.files): tensor.files for tensor in compared}.values():
        for cell, holders in cell_files.items():
            for rank in map(catalog.rank_of, holders if holders[1:] else ()):
                replicas.setdefault(rank, []).append((id(cell_files), cell))
    ranks_by_replicas: dict[object, list[int]] = {}
    for rank in slices:
        stage = catalog.strategy.stage_of(rank) if catalog.strategy else 0
        ranks_by_replicas.setdefault((stage, *replicas.get(rank, ())), []).append(rank)
    groups = ranks_by_replicas.values()
    return sum(len(ranks) for ranks in groups if len({(*slices[r],) for r in ranks}) > 1)


@rule(SAMPLES)
def replicas_are_equal(sample: SampledSource) -> Iterator[Finding | Evidence]:
    """Most replicas are equal, and some of each file and kind.

    A few that differ are a warning, and so are those that are accepted, whatever they are. Values
    that may be ranks' own are none.
    """
    catalog, tensors = sample.catalog, sample.tensors
    agreement = replicas_agree((tensor for tensor in tensors if tensor.weighty), sample.samples)
    per_rank_agreement = replicas_agree(
        (tensor for tensor in tensors if not tensor.weighty), sample.samples
    )
    compared = [tensor.name for tensor in (*agreement.compared, *per_rank_agreement.compared)]
    patterns = {pattern_of(c.tensor.name) for c in per_rank_agreement.differing}
    all_differ = len(per_rank_agreement.differing) == len(per_rank_agreement.compared)
    if not agreement.compared and all_differ and len(patterns) > 1:
        agreement, per_rank_agreement = per_rank_agreement, ReplicaAgreement()
    refused = [
        contradiction
        for contradiction in agreement.differing
        if not sample.accepts(ACCEPT_CONTRADICTIONS, contradiction.tensor.name)
    ]
    yield Evidence(samples=len(compared), sampled=frozenset(compared))
    if catalog.strategy is not None and any(len(t.files) > 1 for t in tensors if t.weighty):
        number = sum(len(tensor.files) > 1 for tensor in agreement.compared)
        yield Evidence(ordered=number, exchangeable=_exchangeable(catalog, agreement.compared))
    if (agreement.is_refuted or _is_derived(catalog)) and refused:
        zeros = sorted(_files_of_zeros(refused, sample.samples))
        suffix = f"; so have {len(zeros) - 1} more files" if zeros[1:] else ""
        again = [
            f"copy {catalog.paths[file]} again: it has zeros where replicas have numbers{suffix}"
            for file in zeros[:1]
        ]
        from .misplaced import misplaced_files

        differing = [contradiction.tensor for contradiction in refused]
        misplaced = misplaced_files(catalog, tensors, differing, sample.samples)
        order = [*misplaced, _RIGHT_STRATEGY]
        if catalog.ranks <= _FEW:  # another order of the mesh looks like two that were exchanged
            order = order[::-1]
        accept = (
            "--accept contradictions converts it, and takes what differs of the ranks that agree; "
            "what one rank alone holds is taken as it is"
        )
        # A file that is another's lacks its own slices, which are nowhere.
        tries = (*(*again, *order, "copy its files again")[:2], *([] if misplaced else [accept]))
        details = _describe_observed(catalog, agreement, sample.samples)
        yield Finding(Message(_in_words(catalog, agreement), tries, details=details))
    elif agreement.differing:
        yield as_warning(_in_words(catalog, agreement))
        yield Evidence(differing=tuple(c.tensor.name for c in agreement.differing))


@rule(SAMPLES, ACCEPT_EQUAL_SLICES)
def slices_differ(sample: SampledSource) -> Iterator[Finding | Evidence]:
    """Files do not hold the same bytes of whatever they should hold different boxes of.

    All of them, or two, or files that hold one tensor which nobody repeats. Experts that were made
    of one, and heads of keys and values, are a notice; the latter not where rankxform derived the
    strategy, which may have taken replicas for slices.
    """
    judged_names = {*sample.pattern_names} if sample.accepts(ACCEPT_EQUAL_SLICES) else ()
    tensors = [tensor for tensor in sample.tensors if tensor.name not in judged_names]
    accepted_names = {t.name for t in tensors if sample.accepts(ACCEPT_EQUAL_SLICES, t.name)}
    for is_accepted in (False, True):
        judged_tensors = [t for t in tensors if (t.name in accepted_names) == is_accepted]
        noticed = _judge_slices(sample, judged_tensors)
        yield from map(as_accepted, noticed) if is_accepted else noticed


def _judge_slices(
    sample: SampledSource, tensors: Sequence[SampledTensor]
) -> Iterator[Finding | Evidence]:
    catalog = sample.catalog
    equal, copied, pairs, compared = compare_different_slices(tensors, sample.samples)
    yield Evidence(samples=len(compared), sampled=frozenset(compared))
    if compared and len(equal) == len(compared):
        yield _all_equal(catalog, equal)
        return  # what follows would say it again
    if pairs:
        a, b = pairs[0]
        suffix = f", and so for {len(pairs) - 1} more" if pairs[1:] else ""
        text = (
            f"{catalog.paths[a]} and {catalog.paths[b]}: hold the same bytes of all that was "
            f"looked at, and by {catalog.declared_by} they hold different slices{suffix}"
        )
        tries = ("copy the files again: one is a copy of the other", *_tries(catalog))
        yield Finding(Message(text, tries))
    refused_names = [
        t.name
        for t in (*equal, *copied)
        if not may_repeat(t.name, len(t.parameter.shape), is_weight=t.parameter.is_weight)
        or (_is_derived(catalog) and not _EXPERTS().search(t.name) and t.parameter.is_weight)
    ]
    if refused_names:
        text = (
            f"{catalog.declared_by} shards {summarize_names(refused_names, 2)}, and files hold the "
            "same bytes of different slices"
        )
        yield Finding(Message(text, _tries(catalog)))
    elif equal:
        names = summarize_names([tensor.name for tensor in equal], 2)
        yield as_notice(
            f"{names}: every rank holds the same bytes, though {catalog.declared_by} shards "
            f"{'them' if equal[1:] else 'it'}"
        )


def _all_equal(catalog: Catalog, equal: Sequence[SampledTensor]) -> Finding:
    parameter = min((tensor.parameter for tensor in equal), key=lambda candidate: candidate.name)
    box = first_box(parameter)
    counts = " x ".join(str(n // s if s else 1) for n, s in zip(parameter.shape, box.shape))
    text = (
        f"{catalog.declared_by} shards {parameter.name!r} into {counts} slices of "
        f"{list(box.shape)}, but every rank holds the same bytes"
    )
    complete = "give one of the files as SRC, with --src-strategy none: they seem to be complete"
    where, details = catalog.paths[parameter.holders[0]], f"{len(equal)} parameters looked at"
    tries = (complete, _tries(catalog)[-1])
    return Finding(Message(text, tries, where, f"so it is with all {details}"))


def first_box(parameter: Parameter) -> Box:
    """Return the region that the first holder of a parameter has."""
    files, first = parameter.sharding.files, parameter.holders[0]
    cell = next(cell for cell, cell_files in files.items() if first in cell_files)
    return parameter.grid.box(cell)


def _in_words(catalog: Catalog, agreement: ReplicaAgreement) -> str:
    shown = agreement.differing[:_SHOWN]
    texts = [
        f"{_who(catalog, contradiction.files)} hold replicas of {contradiction.tensor.name!r} by "
        f"{catalog.declared_by}, and hold different bytes"
        for contradiction in shown[:1]
    ]
    texts += [
        f"and so {_who(catalog, contradiction.files)} of {contradiction.tensor.name!r}"
        for contradiction in shown[1:]
    ]
    count = f"{len(agreement.differing)} of {len(agreement.compared)} tensors compared contradict"
    return f"{', '.join(texts)} ({count})"


def _who(catalog: Catalog, files: Sequence[int]) -> str:
    if catalog.strategy is None:
        return " and ".join(catalog.paths[file] for file in files)
    return "ranks " + " and ".join(str(catalog.rank_of(file)) for file in files)


def _files_of_zeros(
    contradictions: Sequence[ReplicaContradiction], digests_by_file: DigestsByFile
) -> set[int]:
    """Return files with zeros where as many replicas hold numbers: what a crash leaves."""
    return {
        file
        for contradiction in contradictions
        for _, file_samples in contradiction.tensor.samples(digests_by_file)
        if 2 * sum(sample.is_zero for _, sample in file_samples) <= len(file_samples)
        for file, sample in file_samples
        if sample.is_zero
    }


def _describe_observed(
    catalog: Catalog, agreement: ReplicaAgreement, digests_by_file: DigestsByFile
) -> str:
    """Say which ranks do hold the same of the first tensor that contradicts."""
    if len(agreement.doubted) == 1:
        return (
            f"{catalog.paths[agreement.doubted[0]]} differs from every other holder, in all samples"
        )
    tensor = agreement.differing[0].tensor
    groups: dict[bytes, list[int]] = {}
    for _, file_samples in tensor.samples(digests_by_file):
        for file, sample in file_samples:
            groups.setdefault(sample.digest, []).append(catalog.rank_of(file))
    rank_groups = [sorted(ranks) for ranks in groups.values() if len(ranks) > 1]
    if not rank_groups:
        return f"no two files hold the same of {tensor.name!r}"
    shown = " and ".join(f"({format_ranges(ranks)})" for ranks in sorted(rank_groups)[:_SHOWN])
    return f"of {tensor.name!r} the same bytes are on ranks {shown}"
