"""Rules about what a request makes of a source, and what else may be meant where one is broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.display.text import from_here
from rankxform.errors import (
    CheckpointError,
    Message,
    RankxformError,
    RequestError,
    StrategyError,
    UsageError,
)
from rankxform.formats.container import Schema
from rankxform.layout.names import CONSUMED, format_ranges, summarize_names
from rankxform.layout.states import COUNTERS, UNLISTED_BY_COMPILERS, is_never_saved, state_of_name
from rankxform.layout.strategy import SHARD_PREFIX, Strategy, WholeStrategy
from rankxform.operations.base import BlockScale, OperationChain, ScaledRows, Tensor
from rankxform.operations.rename import AS_STORED, rules_without_match
from rankxform.operations.select import (
    NOT_WEIGHTS,
    copies_pattern,
    is_added,
    patterns_without_match,
)
from rankxform.options import flag_of
from rankxform.planning.catalog import Catalog
from rankxform.planning.evidence import sharded_by_pattern
from rankxform.planning.sampling import first_box
from rankxform.planning.selection import ERROR, Selection, types_by_file, unusual_tensors
from rankxform.request import Request
from rankxform.source.choose import a_strategy_is_given
from rankxform.source.hints import option_for, short_path
from rankxform.source.place import list_and_select, rank_files_at, ranks_at
from rankxform.source.source import Source
from rankxform.statements import (
    ACCEPT_ABSENT,
    ACCEPT_CONTRADICTIONS,
    ACCEPT_EXTRA_RANKS,
    ACCEPT_NEW,
    PLAN,
    SHAPE,
    Finding,
    Statement,
    as_accepted,
    as_notice,
    as_warning,
    contradictions,
    quote,
    rule,
)
from rankxform.storage.source_reader import index_file
from rankxform.storage.store import absolute, address_of, storage_of
from rankxform.storage.user_files import (
    CONFIG,
    load_readable,
    path_of,
    read_strategy_file,
    strategies_near,
)
from rankxform.transport import Team
from rankxform.values import NamedTuple, pattern_on_use

from .inputs import ResolvedRequest, derive_command
from .model_files import RequestContext, configuration_doubts
from .training import training_notices

_ADAPTER = "lora"
"""What is in the names of an adapter's tensors."""


class TargetDraft(NamedTuple):
    """What becomes of a source's tensors, before files are planned."""

    resolved: ResolvedRequest
    source: Source
    operations: OperationChain
    tensors: Sequence[Tensor]  # what the operations make of the source's
    selection: Selection
    dst: Strategy
    adapter: Source | None = None  # that is added

    @property
    def request(self) -> Request:
        return self.resolved.request

    @property
    def catalog(self) -> Catalog:
        return self.source.require_catalog()

    @property
    def tensors_written(self) -> list[Tensor]:
        """The tensors that are not dropped."""
        return [tensor for tensor in self.tensors if not tensor.dropped]


@rule(PLAN)
def naming_is_another(draft: TargetDraft) -> Iterator[Finding]:
    """A map gives a Hugging Face folder no other names than Hugging Face's."""
    form = FORMS[draft.request.dst_form or DEFAULT_FORM]
    if draft.request.map is None or not form.configured:
        return
    from rankxform.formats.map_table import HUGGINGFACE
    from rankxform.operations.map import NameMap

    (mapping,) = (o for o in draft.operations.compositions if isinstance(o, NameMap))
    names = [p.name for p in draft.catalog.parameters if p.state is None]
    if mapping.knows(names) and mapping.naming_of(names) == HUGGINGFACE:
        text = (
            f"{draft.source.where.path} has Hugging Face's names already, and "
            f"{mapping.table.label} would give it MindFormers' in a {form.title} folder"
        )
        yield Finding(Message(text, ("leave out --map",)), error=UsageError)


@rule(PLAN)
def loose_values_stay_whole(draft: TargetDraft) -> Iterator[Finding]:
    """What lies among loose values is not sharded: it may be one rank's slice already."""
    source, dst, untracked = draft.source, draft.dst, draft.source.description.untracked
    if untracked is None or isinstance(dst, WholeStrategy):
        return
    names = [
        n
        for n, p in draft.selection.sharded.items()
        if n in dst and p.src_name in source.indexes[untracked] and p.holders == (untracked,)
    ]
    if names:
        text = (
            f"holds {summarize_names(names, 3)}, which {dst.label} shards: MindSpore leaves one "
            "rank's slices there"
        )
        tries = ("leave them out (--exclude)", "convert the checkpoint that they come from")
        yield Finding(Message(text, tries, where=source.paths[untracked]), error=RequestError)


@rule(PLAN)
def shapes_agree(draft: TargetDraft) -> Iterator[Finding]:
    """The destination's strategy declares the full shapes that the tensors have."""
    dst, where = draft.dst, draft.source.where.path
    statements = (
        statement
        for name, parameter in draft.selection.sharded.items()
        if name in dst.shapes
        for statement in (
            Statement(SHAPE, name, parameter.shape, where),
            Statement(SHAPE, name, dst.shapes[name], dst.label),
        )
    )
    src, request, tries = draft.catalog.strategy, draft.request, []
    # The shapes that slices make are wrong where an option says in the wrong way how.
    if src is not None and src.label.startswith(SHARD_PREFIX):
        tries = [f"correct --src-strategy {quote(src.label)}"]
    elif isinstance(src, WholeStrategy) and len(draft.catalog.paths) > 1:
        tries = [f"{_OF_JOB}; none says that slices are whole"]
    elif request.rule and request.src_strategy is None:
        tries = [f"correct {' or '.join(f'--rule {quote(text)}' for text in request.rule)}"]
    for contradiction in contradictions(statements):
        message = contradiction.finding.message
        message = message._replace(tries=(*tries, *message.tries))
        yield contradiction.finding._replace(error=RequestError, message=message)


_OF_JOB = "--src-strategy FILE of the job that wrote them"


@rule(PLAN)
def weights_are_there(draft: TargetDraft) -> Iterator[Finding]:
    """A weight that the strategy lists is in a file, unless --accept absent names it.

    Optimizer states, counters, and what MindFormers never saves, are no weights. An adapter's files
    alone are what `save_trainable_only` leaves.
    """
    source, catalog, strategy = draft.source, draft.catalog, draft.catalog.strategy
    if strategy is None or catalog.is_whole:
        return
    schemas = {id(index.schema): index.schema for index in source.indexes.values()}
    present_names = {name for schema in schemas.values() for name in schema.names}
    states = catalog.states
    absent = [
        name
        for name, stages in strategy.stages_of.items()
        if name not in present_names
        and states.is_weight(name)
        and not is_never_saved(name)
        and any(catalog.groups[stage] for stage in stages)
        and not draft.operations.drops(name)
    ]
    if not absent:
        return
    weights = [name for name in strategy.stages_of if states.is_weight(name)]
    count = f"{len(absent)} of {len(weights)} weights"
    if present_names and all(_ADAPTER in n or not states.is_weight(n) for n in present_names):
        text = (
            f"{source.where.path}: holds an adapter alone, and {count} that {strategy.label} lists"
        )
        yield as_notice(f"{text} are in no file")
        return
    refused = [name for name in absent if not draft.request.accepts(ACCEPT_ABSENT, name)]
    stages = sorted({stage for name in refused or absent for stage in strategy.stages_of[name]})
    ranks = format_ranges([rank for stage in stages for rank in strategy.ranks_in(stage)])
    text = (
        f"{source.where.path}: no file holds {summarize_names(refused or absent, 3)}, which "
        f"{strategy.label} lists on ranks {ranks} ({count})"
    )
    tries = (
        "bring the files that do",
        "leave them out (--exclude)",
        "say --accept absent if they are to be missing",
    )
    yield Finding(Message(text, tries)) if refused else as_warning(text)


@rule(PLAN)
def new_weights_are_meant(draft: TargetDraft) -> Iterator[Finding]:
    """A weight that the destination's strategy alone lists is in a file, unless --accept new names
    it, or it is an adapter's, with which a fine-tuning job begins."""
    catalog, dst, name_of = draft.catalog, draft.dst, draft.operations.name_of
    if draft.request.unmatched != ERROR or isinstance(dst, WholeStrategy):
        return
    listed = catalog.strategy.stages_of if catalog.strategy is not None else ()
    known_names = {tensor.name for tensor in draft.tensors}.union(map(name_of, listed))
    absent = [
        name
        for name in dst.stages_of
        if name not in known_names
        and dst.states.is_weight(name)
        and not is_never_saved(name)
        and _ADAPTER not in name
        and not draft.operations.drops(name)
    ]
    refused = [name for name in absent if not draft.request.accepts(ACCEPT_NEW, name)]
    if absent:
        names = summarize_names(refused or absent, 3)
        text = f"no file holds {names}, which {dst.label} alone lists"
        tries = ("--dst-strategy of this network", "say --accept new if a job begins with them")
        yield Finding(Message(text, tries)) if refused else as_warning(text)


@rule(PLAN)
def states_are_no_weights(draft: TargetDraft) -> Iterator[Finding]:
    """With --weights-only no state is taken for a weight because its name has a number alone."""
    states = draft.catalog.states
    names = [tensor.name for tensor in draft.tensors_written if tensor.name in states.numbered]
    weights = [name for name in names if states.is_weight(name)]
    if draft.request.weights_only and weights:
        family_patterns = dict.fromkeys(map(_family_expression, weights))
        text = (
            f"{summarize_names(weights, 2)} are named like optimizer states, by numbers that are "
            "no parameter's name"
        )
        tries = (f"--exclude {quote('|'.join(family_patterns))} to leave them out",)
        yield Finding(Message(text, tries), error=RequestError)


def _family_expression(name: str) -> str:
    """Return an expression for all numbered states that have a state's prefix or suffix."""
    state = state_of_name(name)
    assert state is not None
    return rf"^{re.escape(state.before)}\d+{re.escape(state.after)}$"


@rule(PLAN)
def patterns_shard(draft: TargetDraft) -> Iterator[Finding]:
    """Which parameters an expression shards is said."""
    by_pattern = sharded_by_pattern(draft.selection.sources(draft.catalog), draft.catalog)
    if by_pattern:
        yield as_notice(f"{draft.catalog.declared_by} shards {summarize_names(by_pattern)}")


_FUSED = pattern_on_use(
    r"(?:^|\.)(?:qkv_proj|c_attn|Wqkv|gate_up_proj|in_proj|linear_fc1)(?:[._](?:weight|bias))?$"
)
"""Names of several matrices in one, which lie one after another and not by group of heads."""


@rule(PLAN)
def fused_rows_are_stated(draft: TargetDraft) -> Iterator[Finding]:
    """Of several matrices in one tensor, which ranks hold part by part, the parts are stated."""
    by_pattern = sharded_by_pattern(draft.selection.sources(draft.catalog), draft.catalog)
    declared, names = draft.catalog.declared, []
    for name in filter(_FUSED().search, by_pattern):
        parameter, unit = declared[name], declared.get(name.replace("linear_fc1", "linear_fc2"))
        lengths = first_box(parameter).shape
        is_split = lengths[0] < parameter.shape[0] or "c_attn" in name
        if "linear_fc1" in name:  # of MindFormers, or not gated, it is one matrix
            rows = (*unit.shape, 0)[1] if unit is not None else 0
            is_split = is_split and parameter.shape[0] == 2 * rows and not COUNTERS & {*declared}
        has_parts = len(parameter.sharding.files) > draft.catalog.ranks
        if parameter.is_weight and is_split and not has_parts:
            names.append(name)
    columns = [n for n in names if first_box(declared[n]).shape[0] == declared[n].shape[0]]
    for some_names, remedy in (
        ([n for n in names if n not in columns],
         "say their rows (shard:REGEX=0:ROWS/ROWS@N, or 1/1 if they are equal)"),
        (columns, "their columns cannot be stated here: bring the tensors whole"),
    ):  # fmt: skip
        if some_names:
            text = f"{summarize_names(some_names, 2)}: {draft.catalog.declared_by} joins slices "
            yield as_warning(f"{text}rank by rank; if each is several parts, {remedy}")


@rule(PLAN)
def training_facts_have_a_place(draft: TargetDraft) -> Iterator[Finding]:
    """What the source says of the training has a place at the destination."""
    names = [parameter.name for parameter in draft.selection.parameters]
    yield from map(as_notice, training_notices(draft.request, draft.source, names))


@rule(PLAN)
def a_model_has_its_configuration(draft: TargetDraft) -> Iterator[Finding]:
    """A Hugging Face folder gets a config.json."""
    form, mapped = FORMS[draft.request.dst_form or DEFAULT_FORM], draft.request.map is not None
    companions = draft.resolved.companions, *(draft.resolved.own_companions or ())
    if form.configured and not any(CONFIG in contents for contents in companions):
        is_own = mapped or draft.source.form.configured  # the names are a published model's
        names = "" if is_own else "tensors keep their names, and "
        yield as_notice(
            f"{names}the destination gets no config.json; for a model that Transformers reads, "
            f"give {'' if is_own else '--map and '}--like"
        )


@rule(PLAN)
def options_have_an_effect(draft: TargetDraft) -> Iterator[Finding]:
    """Options change something, and leave no copy alone that they seem to mean."""
    request, written = draft.request, draft.tensors_written
    if request.weights_only and not any(t.dropped == NOT_WEIGHTS for t in draft.tensors):
        yield as_notice(
            "--weights-only leaves nothing out: there is no optimizer state and no counter"
        )
    unrenamed_tensors = [t for t in written if [t.name] == [source.name for source in t.sources]]
    if request.names != AS_STORED and len(unrenamed_tensors) == len(written):
        yield as_notice(f"--names {request.names} changes no name")
    copies = [t for t in written if t.related and t.related.is_copy]
    if copies and request.dtype is not None:
        yield as_notice(
            f"{summarize_names([copy.name for copy in copies], 2)} repeat other tensors' names and "
            "shapes and keep their type; "
            f"--cast-states {quote(copies_pattern(copies))} casts them too"
        )


@rule(PLAN)
def configurations_state_tensors(draft: TargetDraft) -> Iterator[Finding]:
    """The configuration that goes with tensors states what they are."""
    yield from configuration_doubts(draft)


@rule(PLAN)
def tensors_are_as_the_model_states(draft: TargetDraft) -> Iterator[Finding]:
    """The tensors of a Hugging Face folder are those that its config.json states."""
    if draft.resolved.stated_model is not None:
        from .stated_model import findings_of

        yield from findings_of(draft.resolved.stated_model, draft.catalog)


@rule(PLAN)
def patterns_match(draft: TargetDraft) -> Iterator[Finding]:
    """Each pattern of an option matches a parameter of files or strategy."""
    for option, text in _matchless(draft):
        yield as_notice(text) if option == "exclude" else as_warning(text)


def _matchless(draft: TargetDraft) -> Iterator[tuple[str, str]]:
    """Yield options, and texts on their patterns that match nothing."""
    request, catalog, operations = draft.request, draft.catalog, draft.operations
    if request.keep_dtype or request.cast_states:
        unread_names = [*map(operations.name_of, catalog.unread_names)]
        names_written = [*(tensor.name for tensor in draft.tensors_written), *unread_names]
        states = [t.name for t in draft.tensors_written if t.related or not t.is_weight]
        states += [name for name in unread_names if not catalog.states.is_weight(name)]
        for option, names, kind_text in (
            ("keep_dtype", names_written, "parameter"),
            ("cast_states", states, "optimizer state or counter"),
        ):
            for pattern in patterns_without_match(getattr(request, option), names):
                yield option, f"{flag_of(option)} {pattern!r} matches no {kind_text}"
    if not (request.rename or request.include or request.exclude):
        return
    src_names = [parameter.name for parameter in catalog.parameters]
    src_names += catalog.strategy.stages_of if catalog.strategy is not None else ()
    known_names = set(map(operations.name_of, src_names))
    if operations.renames:  # a source tensor that is left out keeps its name
        known_names = {tensor.name for tensor in draft.tensors}
    for rule_text in rules_without_match(request.rename, map(catalog.states.base_name, src_names)):
        yield (
            "rename",
            f"--rename {rule_text!r} renames nothing: no parameter matches it (an optimizer state "
            "is matched without its prefix, such as adam_m.)",
        )
    known_names |= {CONSUMED, *(tensor.name for tensor in draft.tensors if is_added(tensor))}
    for option in ("include", "exclude"):
        for pattern in patterns_without_match(getattr(request, option), known_names):
            yield option, f"--{option} {pattern!r} matches no parameter"


@rule(PLAN)
def tensors_are_not_of_an_engine(draft: TargetDraft) -> Iterator[Finding]:
    """Nothing is made of a folder that an engine starts from."""
    source = draft.source
    if source.form.is_served and draft.request.dst is not None:
        text = f"is a folder that {source.form.title} starts from, whose tensors are cut and named"
        tries = ("make DST of what this was made of",)
        yield Finding(Message(f"{text} for it alone", tries, where=source.where.path))


_GATED = "linear_fc1.weight", "linear_fc1.bias"


@rule(PLAN)
def gate_and_up_lie_as_jobs_have_them(draft: TargetDraft) -> Iterator[Finding]:
    """A matrix of gate and up is not handed to jobs that join them otherwise, with equal shapes."""
    request, source = draft.request, draft.source
    form = FORMS[request.dst_form or DEFAULT_FORM]
    names = [tensor.name for tensor in draft.tensors_written if tensor.name.endswith(_GATED)]
    if request.dst is None or request.map is not None or not names or form.joins is None:
        return
    if {*form.joins.items()}.difference((source.form.joins or {}).items()):
        text = f"{summarize_names(names, 1)}: {form.title} has gate before up, and in "
        tries = (
            "--dst-form huggingface --map MODEL first, and --map MODEL from there",
            f"--accept {ACCEPT_CONTRADICTIONS}, if they lie so",
        )
        finding = Finding(Message(f"{text}{source.form.title} they may lie otherwise", tries))
        yield as_accepted(finding) if request.accepts(ACCEPT_CONTRADICTIONS) else finding
    elif source.form.joins and not form.joins:
        yield as_notice(
            f"{summarize_names(names, 1)}: gate lies before up, as {source.form.title} has them; "
            "MindFormers takes them row by row (--map makes Hugging Face's names, and its own)"
        )


@rule(PLAN)
def operations_fit(draft: TargetDraft) -> Iterator[Finding]:
    """Adapters and maps fit what they are applied to."""
    places = [draft.source] if draft.adapter is None else [draft.source, draft.adapter]
    sources = [part for tensor in draft.tensors_written for part in tensor.sources]
    if not all(place.reach.is_full for place in places):
        if any(isinstance(part.step, ScaledRows) for part in sources):
            both = " and the adapter" if draft.adapter is not None else ""
            text = (
                "--lora: DoRA needs whole rows, and not every process sees all files of the source"
            )
            yield Finding(Message(text + both, ("merge this adapter with PEFT",)))
        elif draft.adapter is not None and any(isinstance(p.step, BlockScale) for p in sources):
            text = "--lora: the source has scales of its blocks, and not every process sees all "
            try_ = "put the source and the adapter where all nodes see them"
            yield Finding(Message(f"{text}files of both", (try_,)))
    names = [*dict.fromkeys(part.name for part in sources)]
    for operation in draft.operations.compositions:
        yield from operation.findings(names)


@rule(PLAN)
def states_belong_to_parameters(draft: TargetDraft) -> Iterator[Finding]:
    """Tensors that are named like states belong to parameters."""
    states = draft.catalog.states
    src_names = {source.name for tensor in draft.tensors_written for source in tensor.sources}
    for family, names in states.unrelated.items():
        unrelated_names = [name for name in names if name in src_names]
        if unrelated_names:
            yield as_warning(
                f"{summarize_names(unrelated_names, 2)}: named like the states {family}, but "
                "belong to no parameter of their shape; converting them as weights"
            )
    numbered = [name for name in states.numbered if name in src_names]
    if numbered:
        yield as_warning(
            f"{summarize_names(numbered, 2)}: states by number, which name no parameter; they keep "
            "these names and are sharded by them alone"
        )


@rule(PLAN)
def states_have_a_place(draft: TargetDraft) -> Iterator[Finding]:
    """No states are left out because no compiler lists them."""
    kinds = {n: state.kind for n, state in draft.catalog.states.related.items()}
    for omitted in draft.selection.left_out:
        names = [n for n in omitted.families if kinds.get(n) in UNLISTED_BY_COMPILERS]
        if names and not any(map(draft.dst.states.of, draft.dst.stages_of)):
            text = f"{summarize_names(names, 2)}: left out, for {draft.dst.label} lists no state"
            yield as_warning(f"{text}; a training that goes on begins these at zero")


@rule(PLAN)
def weights_are_usual(draft: TargetDraft) -> Iterator[Finding]:
    """Weights have the shapes and types of weights."""
    written = [tensor for tensor in draft.tensors_written if tensor.is_weight]
    sources = {source.name for tensor in written for source in tensor.sources}
    parameters = draft.catalog.parameters
    shapes = {p.name: p.shape for p in parameters if p.name in sources and p.is_weight}
    yield from map(as_warning, unusual_tensors(shapes, [tensor.name for tensor in written]))
    yield from map(as_warning, types_by_file(draft.catalog))


@rule(PLAN)
def the_request_is_meant(draft: TargetDraft) -> Iterator[Finding]:
    """What was doubtful when the request was read is said."""
    yield from draft.resolved.findings


# A guess never goes before a fact that it may hide, and is looked for only where a check fails.
# Ranks beyond the strategy make it likelier than the check's own words, and it is said first;
# fewer ranks may be lost ones, and it is said last.

_MOST_STEPS = 3
_LOOKED_AT = 100
"""Files of a folder that are looked at for another strategy."""


@contextmanager
def adding_suggestions(resolved: ResolvedRequest, source: Source, team: Team) -> Iterator[None]:
    """Where a check fails, say what else than the given strategies may be meant, if anything.

    Around what fails on every process alike; process 0 looks for other strategies only then.
    """
    try:
        yield
    except UsageError as error:
        request = resolved.request
        if error.rule == a_strategy_is_given.__name__ and request.src_parallel is not None:
            command = f"{derive_command(request, request.src)}, and --src-strategy FILE"
            error.say(error.parts._replace(tries=(command, *error.parts.tries)))
        raise
    except (CheckpointError, StrategyError, RequestError) as error:
        suggestion = team.bcast(lambda: _meant_if_readable(resolved.request, source, resolved.dst))
        if suggestion is not None:
            error.say(suggestion.added_to(error.parts))
        raise


class _Suggestion(NamedTuple):
    """What may be meant: what was found ("": nothing more), what to try, and whether that is
    likelier than what the error says."""

    message: str
    tries: tuple[str, ...]
    first: bool = True

    def added_to(self, parts: Message) -> Message:
        """Return what an error says with this."""
        if self.first and self.message:
            return Message(self.message, self.tries, details=str(parts._replace(details="")))
        if self.first:
            return parts._replace(tries=(*self.tries, *parts.tries))
        details = "\n".join(filter(None, (parts.details, self.message)))
        return parts._replace(tries=(*parts.tries, *self.tries), details=details)


def _meant_if_readable(request: Request, source: Source, dst: object) -> _Suggestion | None:
    with suppress(RankxformError, OSError):  # the check's own error is what counts
        return _find_suggestion(request, source, dst)
    return None


def _find_suggestion(request: Request, source: Source, dst: object) -> _Suggestion | None:
    """Return what may be meant."""
    if request.map is not None and (suggestion := _other_map(request, source)) is not None:
        return suggestion
    if request.map is None and (suggestion := _missing_map(request, source, dst)) is not None:
        return suggestion
    src = source.where.strategy if request.src_strategy is not None else None
    unreadable = any(error.file is not None for error in source.errors[:1])
    if unreadable and (tries := _tries_without(request, source)):
        return _Suggestion("", tries, False)
    if source.form.described or request.files is not None or not source.paths or unreadable:
        return None
    if src is None:
        src = WholeStrategy()
    ranks = source.selected.rank_count
    if (suggestion := _other_numbers(request, src)) is not None:
        return suggestion
    src_path = path_of(request.src_strategy)
    fits = ranks == src.ranks or (request.accepts(ACCEPT_EXTRA_RANKS) and ranks > src.ranks)
    if src_path is not None and not fits:
        suggestion = _other_strategy(request, source, src_path, src, dst)
        if suggestion is not None:  # fewer ranks may be lost ones as well
            return suggestion._replace(first=ranks > src.ranks)
    return _stage_file(request.dst_strategy, "--dst-strategy")


def _other_numbers(request: Request, src: Strategy) -> _Suggestion | None:
    """Return what to do where rank folders are as many as a strategy's ranks, from another number
    on."""
    files_by_rank: dict[int, list[str]] = {}
    with suppress(RankxformError, OSError):  # links cannot be made at an address
        files_by_rank = rank_files_at(Path(request.src))
    ranks = sorted(files_by_rank)
    if not ranks or not ranks[0] or ranks != [*range(ranks[0], ranks[0] + src.ranks)]:
        return None
    tries = ["the strategy of the whole job, if these are a part of it"]
    if all(len(files) == 1 for files in files_by_rank.values()):
        folder = quote(from_here(absolute(request.src)))
        suffix = Path(files_by_rank[ranks[0]][0]).suffix
        link = f"ln -sr {folder}/rank_$((n + {ranks[0]}))/*{suffix} {folder}-0/rank_$n/net{suffix}"
        loop = f"for n in $(seq 0 {src.ranks - 1}); do mkdir -p {folder}-0/rank_$n && {link}; done"
        tries.insert(0, f"{loop} and name {folder}-0")
    return _Suggestion(
        f"{request.src} has {src.ranks} ranks, {format_ranges(ranks)}, and {src.label} is of ranks "
        f"{format_ranges(range(src.ranks))}",
        tuple(tries),
    )


def _tries_without(request: Request, source: Source) -> tuple[str, ...]:
    """Return what can be done where the first file that is in error cannot be read."""
    step = _older_step(request, source)
    older = [f"--step {step} takes an older one, whose files can be read"] if step else []
    tries, path = list[str](), str(source.errors[0].file)
    file = next((file for file, name in source.paths.items() if name == path), None)
    known_tries = source.errors[0].message.tries
    is_torn = not known_tries or any("copy" in text for text in known_tries)  # or of another kind
    if file is None or file in source.indexes or request.files is not None or not is_torn:
        return (*older,)
    if not known_tries:
        tries.append("copy the file again")
    src, rank = source.where.strategy, source.selected.rank_of(file)
    in_folder = storage_of(path).has_folders
    if src is not None and rank < src.ranks and in_folder and len(source.errors) == 1:
        place = rank % src.stage_size
        layouts = src.stages[src.stage_of(rank)].values()
        if all(len(layout.holders[layout.cell(place)]) > 1 for layout in layouts):
            move = f"mv {quote(path)} {quote(f'{path}.torn')}"
            tries.append(f"{move}, and ranks that hold the same slices serve")
    takes_fallback = not request.fallback and (request.src_strategy or not request.src_config)
    if takes_fallback and not source.form.described and in_folder:
        tries.append("--fallback PLACE, where a copy of it is")
    return (*tries, *older)


def _older_step(request: Request, source: Source) -> str:
    """Return the newest step before the one that was chosen all of whose files can be read; ""."""
    selected, where = source.selected, source.where
    if selected.step is None or request.step is not None or request.files is not None:
        return ""
    older = [s for s in selected.skipped_steps if s < (selected.step or ())]
    for step in sorted(older, reverse=True)[:_MOST_STEPS]:
        name = "_".join(map(str, step))
        with suppress(RankxformError, OSError):
            candidate = list_and_select(replace(where, step=name)).selected
            for file in [*candidate.names.values()][:_LOOKED_AT]:
                index_file(address_of(where.path, file))
            if not candidate.missing_ranks:
                return name
    return ""


def _other_map(request: Request, source: Source) -> _Suggestion | None:
    """Return which maps fit the source's tensors, where the given one does not."""
    if source.catalog is None or request.map in (fitting := _fitting_maps(request, source)):
        return None
    return _Suggestion("", tuple(f"--map {name}" for name in fitting)) if fitting else None


def _missing_map(request: Request, source: Source, dst: object) -> _Suggestion | None:
    """Return which maps give the source's tensors names of the destination, where it has none."""
    if source.catalog is None or not isinstance(dst, Strategy) or isinstance(dst, WholeStrategy):
        return None
    if request.rename:
        return None
    names = [parameter.name for parameter in source.require_catalog().parameters]
    if any(name in dst for name in names):
        return None
    fitting = tuple(f"--map {name}" for name in _fitting_maps(request, source, dst))
    if not fitting:
        return None
    example_text = f"such as {names[0]}"
    return _Suggestion(
        f"none of the {len(names)} names of SRC is in {dst.label} ({example_text})", fitting
    )


def _fitting_maps(request: Request, source: Source, dst: Strategy | None = None) -> list[str]:
    """Return the maps that fit all of the source's tensors, and make some that `dst` lists."""
    from rankxform.operations.map import NameMap
    from rankxform.operations.map import read as read_sizes
    from rankxform.storage import user_files

    tensors = [Tensor.of(p.name, p.src_dtype, p.shape) for p in source.require_catalog().parameters]
    fitting_names = []
    for name in filter(None, (request.map, *user_files.map_names())):
        with suppress(RankxformError):
            context = RequestContext(replace(request, map=name), source.where.path)
            sizes = read_sizes(context)
            composed_tensors = NameMap.of(context.options, sizes).compose(tensors) if sizes else []
            if any(dst is None or tensor.name in dst for tensor in composed_tensors):
                fitting_names.append(name)
    return list(dict.fromkeys(fitting_names))


def _other_strategy(
    request: Request, source: Source, src_path: Path, src: Strategy, dst: object
) -> _Suggestion | None:
    selected = source.selected  # of several steps one may be torn
    ranks = max(selected.rank_count, _ranks_in(Path(request.src)) if selected.skipped_steps else 0)
    counts = f"{src.label} is of {src.ranks} ranks, and the checkpoint has {ranks}"
    is_alike = (
        isinstance(dst, Strategy) and dst.ranks == src.ranks
    )  # then DST's number tells nothing
    if request.dst is not None and not is_alike and _ranks_in(Path(request.dst)) == src.ranks:
        tries = ["exchange SRC and DST"]
        if isinstance(dst, Strategy) and dst.ranks == ranks:  # either pair may be meant
            tries.insert(0, "exchange --src-strategy and --dst-strategy")
        return _Suggestion(f"{counts}; {request.dst} has {src.ranks}", tuple(tries))
    around = load_readable([src_path.parent]) if src_path.is_file() else []
    schemas = {rank: source.indexes[rank].schema for rank in sorted(source.indexes)[:_LOOKED_AT]}
    stages = [candidate for candidate in around if _fits(candidate[1], ranks, schemas)]
    if stages:
        return _Suggestion(counts, (option_for(*stages[0]),))
    if isinstance(dst, Strategy) and dst.ranks == ranks:
        exchange_text = "exchange --src-strategy and --dst-strategy"
        return _Suggestion(f"{counts}, as many as {dst.label} is of", (exchange_text,))
    candidates = strategies_near(Path(request.src), ranks)
    if not candidates:  # under any name where the given one lies
        candidates = load_readable(sorted(src_path.parent.iterdir())[:_LOOKED_AT])
    candidates = [candidate for candidate in candidates if _fits(candidate[1], ranks, schemas)]
    if candidates:
        return _Suggestion(counts, (option_for(*candidates[0]),))
    if ranks > src.ranks:
        advice_text = f"give the strategy of all {ranks} ranks, such as a folder of all stages"
        return _Suggestion(counts, (advice_text,))
    return None


def _fits(strategy: Strategy, ranks: int, schemas: Mapping[int, Schema]) -> bool:
    """Tell whether a strategy is of so many ranks, and places names where files hold them."""
    return strategy.ranks == ranks and not any(
        name in strategy.stages_of and name not in strategy.stages[strategy.stage_of(rank)]
        for rank, schema in schemas.items()
        for name in schema.names
    )


def _stage_file(strategy: str | Strategy | None, flag: str) -> _Suggestion | None:
    """Return what to do if a strategy's file is of one pipeline stage of several; else None."""
    path = path_of(strategy)
    if path is None or not path.is_file() or (record := read_strategy_file(path)).merged:
        return None
    for folder, job_strategy in load_readable([path.parent]):
        if len(job_strategy.stages) > 1:
            return _Suggestion(
                f"{path} is of pipeline stage {record.stage} alone",
                (f"{flag} {quote(short_path(folder))} (found there: {job_strategy.extent})",),
            )
    return None


def _ranks_in(folder: Path) -> int:
    """Return how many ranks the rank folders there are of; 0 if there are none."""
    with suppress(RankxformError, OSError):
        return ranks_at(folder)
    return 0
