"""Derive, explain and compare strategies without a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import CheckpointRef
from rankxform.derivation.derive import derive, format_layout
from rankxform.derivation.explain import Refusals, explain, parameters_of, rule_for, sizes_fit
from rankxform.derivation.inputs import (
    check_mesh_exists,
    complete_request,
    full_extents,
    read_config,
    whole_extents,
)
from rankxform.derivation.mesh import LAYOUT, MeshSpec, Parallel, parse_parallel, validate_spec
from rankxform.derivation.request import Derived, DeriveRequest, Extent, ShardingRow, stage_groups
from rankxform.derivation.rules import ShardingRule, load_preset, parse_rule
from rankxform.display.text import shown_path, width, wrap_text
from rankxform.errors import CheckpointError, DerivationError, UsageError
from rankxform.formats.container import Schema, content_bytes
from rankxform.layout.layout import Layout
from rankxform.layout.names import compile_regex, pattern_of, summarize_names
from rankxform.layout.states import NEVER_SAVED
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy, describe_layout
from rankxform.request import Request
from rankxform.results import Section, Table, lines
from rankxform.source.place import list_and_select
from rankxform.storage.source_reader import Indexer
from rankxform.storage.user_files import check_folded, fold_nested_maps
from rankxform.target.inputs import read_shapes
from rankxform.target.slices import derived_of


def derive_strategy(request: DeriveRequest, source: Strategy, shapes: str | None) -> Derived:
    """Derive a strategy from another one; `shapes` is what `extents_at` reads.

    Raises DerivationError, UsageError.
    """
    if isinstance(source, PatternStrategy):
        raise UsageError(
            "which names it means, a checkpoint tells; transform it", where=f"{source.label!r}"
        )
    if isinstance(source, WholeStrategy) and shapes is None:
        raise UsageError(
            "neither a source strategy nor full shapes are given",
            "--from STRATEGY",
            "--shapes CHECKPOINT or FILE.json, and --preset or --rule",
        )
    if isinstance(source, WholeStrategy) and shapes is not None:
        check_mesh_exists(request)
        derived = _of_ranks(request, shapes)
        if derived is not None:
            return derived
    extents = extents_at(shapes, source) if shapes is not None else {}
    if isinstance(source, WholeStrategy):
        return derive(replace(request, extents=extents), f"derived from {shapes}")
    return derive(complete_request(request, source, extents), f"derived from {source.label}")


def _of_ranks(request: DeriveRequest, where: str) -> Derived | None:
    """Derive how the files of a job's ranks are sharded; None of one file."""
    path = Path(where)
    if path.suffix == ".json" or not path.is_dir():
        return None
    place = list_and_select(CheckpointRef(str(path.absolute())))
    form, selected = place.form, place.selected
    if form.described or selected.ranks or selected.rank_count < 2:
        return None
    paths = {rank: str(path / name) for rank, name in selected.names.items()}
    return derived_of(request, paths, where, f"derived from the slices of {where}")


def extents_at(where: str, source: Strategy) -> dict[str, Extent]:
    """Return the full shapes and sizes of parameters.

    `where` is a JSON file of full shapes, a checkpoint file or folder; `source` says how the
    checkpoint is sharded. Of a folder no more files are opened than needed to see every name.
    Raises UsageError, CheckpointError.
    """
    path = Path(where)
    if path.suffix == ".json":
        if not path.is_file():
            raise UsageError("no such file of shapes", where=path)
        shapes_by_name = read_shapes(path)
        return {
            name: Extent(shape, content_bytes(d, shape))
            for name, (shape, d) in shapes_by_name.items()
        }
    schemas = _schemas(path, source)
    if isinstance(source, WholeStrategy):
        return whole_extents(schemas.values())
    return full_extents(source, schemas)


def _schemas(path: Path, source: Strategy) -> dict[int, Schema]:
    """Index files, by rank, until every listed name of each stage was seen in one."""
    selected = list_and_select(CheckpointRef(str(path.absolute()))).selected
    paths = {file: path / name for file, name in sorted(selected.names.items())}
    indexer = Indexer()
    if isinstance(source, WholeStrategy):
        if len(paths) > 1:
            raise UsageError(
                f"holds the files of {len(paths)} ranks",
                "give --from, the strategy by which they are sharded",
                where=path,
            )
        return {rank: indexer.index(file).schema for rank, file in paths.items()}
    kind = source.states.kind
    missing = [{n for n in layouts if kind(n) != NEVER_SAVED} for layouts in source.stages]
    schemas = {}
    for rank, file in paths.items():
        stage = source.stage_of(rank)
        if stage < len(missing) and missing[stage]:
            schemas[rank] = indexer.index(file).schema
            missing[stage] -= set(schemas[rank].names)
    if not schemas:
        raise CheckpointError(f"holds no file of the ranks of {source.label}", where=path)
    return schemas


def with_stated_sizes(
    request: DeriveRequest, sizes: Sequence[Parallel | None], rules: Any
) -> DeriveRequest:
    """Return a question with rules and the sizes of both jobs as a program gives them.

    Raises UsageError.
    """
    src, dst = sizes
    if request.keep_mesh and (src is not None or rules):
        raise UsageError("src and rules change nothing with dst='same'", "leave them out")
    pairs = list(rules) if isinstance(rules, Iterable) and not isinstance(rules, str) else [rules]
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UsageError(f"rules: {pair!r}: expected a regular expression and a spec")
    return replace(
        request,
        src=request.src if src is None else src,
        dst=request.dst if dst is None else dst,
        rules=(*request.rules, *(_rule(names, spec) for names, spec in pairs)),
    ).with_threshold()


def _rule(names: str, spec: Any) -> ShardingRule:
    """Make a rule of a pattern and its spec.

    The spec is a text as --rule takes it; names by tensor axis, such as ``("mp", None)`` or a JAX
    PartitionSpec; or a `mindspore.parallel.Layout` that was called with its axes.
    """
    if isinstance(spec, str):
        return parse_rule(f"{names}={spec}", "rules")
    where, mesh = f"rules: {names}={spec}", None
    if hasattr(spec, "to_dict"):
        facts = spec.to_dict()
        if facts.get("interleaved_parallel"):
            raise UsageError("an interleaved layout is not derived", where=where)
        aliases = facts["alias_name"][::-1]
        axes = [a if isinstance(a, tuple) else (a,) for a in facts["tensor_map"]]
        spec = [tuple(aliases[axis] for axis in mesh_axes if axis != -1) for mesh_axes in axes]
        mesh = None if any(name in ("ep", "edp") for name in aliases) else LAYOUT
    elif isinstance(spec, Iterable):
        spec = list(spec)
    return ShardingRule(
        compile_regex(names, "rules"), where, mesh=mesh, spec=validate_spec(spec, where)
    )


# -- explained ------------------------------------------------------------------------------------


def sizes_of(request: Request) -> Parallel:
    """Return the source's sizes, from --src-parallel or --src-config. Raises UsageError."""
    if request.src_config is not None and request.src_parallel is None:
        return read_config(request.src_config).parallel
    if request.src_parallel is None or request.src_config is not None:
        raise UsageError(
            "the sizes of the source's job are not given, or twice",
            "--src-parallel, such as dp=8,mp=4,pp=2",
            "--src-config FILE",
        )
    return parse_parallel(request.src_parallel, "--src-parallel")


def explain_strategy(
    source: Strategy, sizes: Parallel, preset: str | None, shapes: str | None
) -> tuple[ShardingRow, ...]:
    """Return which mesh axes shard the parameters of a strategy, as rows of a table.

    Raises DerivationError where the sizes do not explain it.
    """
    if isinstance(source, (WholeStrategy, PatternStrategy)):
        raise UsageError("expected a strategy file or folder", where=f"{source.label!r}")
    extents = extents_at(shapes, source) if shapes is not None else {}
    full = {name: extent.shape for name, extent in extents.items()}
    source = fold_nested_maps(source, full)
    check_folded(source)
    refusals = Refusals()
    parameters = parameters_of(source, refusals)
    rules = load_preset(preset).rules if preset else ()
    specs_by_name: Mapping[str, tuple[MeshSpec, ...]] = {}
    if sizes_fit(source, sizes, refusals):
        specs_by_name = explain(parameters, sizes, rules, full, refusals)
    unknown = [name for name in parameters if preset and rule_for(rules, name, "spec") is None]
    if unknown:
        refusals.add(f"preset {preset} has no rule for it", "Choose the network's preset", *unknown)
    if refusals:
        raise DerivationError.of(refusals.texts(), "the strategy cannot be explained")
    rows: dict[tuple[str, str, str, Layout], int] = {}
    for name, parameter in parameters.items():
        assert parameter.layout is not None
        shard = "yes" if parameter.layout.opt_shards > 1 else "no"
        row = pattern_of(name), " or ".join(map(str, specs_by_name[name])), shard, parameter.layout
        rows[row] = rows.get(row, 0) + 1
    return tuple(
        ShardingRow(
            pattern, number, spec, shard, format_layout(layout), "", describe_layout(layout), ""
        )
        for (pattern, spec, shard, layout), number in rows.items()
    )


def strategy_sections(path: str, strategy: Strategy, is_raw: bool = False) -> Iterator[Section]:
    """Yield what is shown of a strategy: its stages, and how many parameters are sharded how.

    is_raw: with device matrices, tensor maps and optimizer shards, as MindSpore has them.
    """
    mark = ", derived by rankxform" if strategy.derived else ""
    all_names = [name for layouts in strategy.stages for name in layouts]
    kinds = [kind for name in all_names if (kind := strategy.states.kind(name)) is not None]
    gradients = kinds.count(NEVER_SAVED)
    states = len(kinds) - gradients
    counted = f"{len(all_names) - states - gradients:,} parameters, {states:,} optimizer states"
    if gradients:
        counted += f", {gradients:,} gradients that no checkpoint holds"
    heads = [f"{shown_path(path)}: strategy, {strategy.extent}{mark}", counted]
    yield from (lines("", *wrap_text(line, width(), 4).splitlines()) for line in heads)
    yield from stage_groups(strategy)
    rows: list[tuple[object, ...]] = []
    names_by_words: dict[tuple[str, ...], list[str]] = {}
    for layout, layout_names in _by_layout(strategy).items():
        words = (describe_layout(layout), *((str(format_layout(layout)),) if is_raw else ()))
        names_by_words.setdefault(words, []).extend(layout_names)
    for words, names in sorted(names_by_words.items(), key=lambda group: -len(group[1])):
        rows.append((len(names), *words, summarize_names(names, 1)))
    columns = ("parameters", "each rank holds", *(("layout",) if is_raw else ()), "such as")
    yield Table(columns, rows, "")


def _by_layout(strategy: Strategy) -> Mapping[Layout, list[str]]:
    names_by_layout: dict[Layout, list[str]] = {}
    for layouts in strategy.stages:
        for name, layout in layouts.items():
            if strategy.states.of(name) is None:
                names_by_layout.setdefault(layout, []).append(name)
    return names_by_layout


def strategy_facts(path: str, strategy: Strategy) -> dict[str, Any]:
    """Return what `strategy_sections` shows, for JSON."""
    return {
        "path": path,
        **strategy.facts,
        "kinds": [
            {"layout": format_layout(layout), "holds": describe_layout(layout), "names": names}
            for layout, names in _by_layout(strategy).items()
        ],
    }
