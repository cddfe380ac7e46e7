"""How a description and the headers of files become a catalog: `catalog_of`, which alone makes
boxes.

A strategy knows no shapes, and headers know no sharding. Only both together say which box of which
parameter a file holds, so this is where a checkpoint that does not fit its strategy is found,
before a byte is written. A form that declares boxes (metadata, an index) gets the same table of
them.

What always holds of a catalog:

1. Each parameter's boxes tile it, without gaps and without overlaps, whatever declared them.
2. Files that hold one cell declare the same type and the shape of that cell.
3. Parameters that are stored alike share one `Sharding`; what is planned for one is found again by
   its identity. A model has thousands of parameters and a dozen shardings.

A strategy may list less than the files hold. Patterns (`shard:REGEX=AXIS@RANKS`) are written out,
and an optimizer state that no strategy lists follows its parameter; later modules need not
distinguish them. A parameter whose files are missing is kept, with the ranks that would hold it, so
that the error can name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from types import MappingProxyType

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.container import BYTES, Schema, content_bytes
from rankxform.geometry.box import Shape
from rankxform.geometry.tiling import BoxTiling, Cell, Grid, build_tiling
from rankxform.layout.layout import Layout, whole_layout
from rankxform.layout.names import option_to_exclude, pattern_of, summarize_names
from rankxform.layout.states import NEVER_SAVED, States, find_states
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.statements import (
    ALL_TENSORS,
    BIAS_LENGTH,
    LAYER_SHAPE,
    SHAPE,
    TOTAL_BYTES,
    TYPE,
    Statement,
)
from rankxform.values import no_garbage_collection

from .catalog import (
    Catalog,
    DeclaredBox,
    Description,
    FileGroup,
    Holders,
    IdentityDict,
    Parameter,
    Sharding,
)

_MOST_LAYERS = 0.7
"""Share of the layers that are of one shape where others are doubted."""

_FEW_TIED = 2
"""Parameters that pipeline stages usually share: an embedding, and one more."""


def catalog_of(
    description: Description,
    schemas: Mapping[int, Schema],
    paths: Mapping[int, str],
    needed_files: Iterable[int],
    searched: str = "",
    elsewhere: Mapping[int, Schema] = MappingProxyType({}),
    dropped: Callable[[str], bool] | None = None,
) -> Catalog:
    """Return the catalog of a source whose files hold `schemas`, by id.

    Files of ranks beyond the strategy's must have been left out by the caller; `needed_files` are
    the ids of files that were looked for, found or not. elsewhere: what files of other pipeline
    stages hold, of which nothing is read. dropped: tells what is not converted. Raises
    CheckpointError where types or shapes differ between ranks that should agree, or where boxes do
    not tile their tensor, unless that is dropped.
    """
    if description.boxes:
        with no_garbage_collection():
            return _of_boxes(description, schemas, paths, searched, dropped)
    strategy = description.strategy
    if strategy is None:  # an id stands for a rank that holds what it holds whole
        strategy = WholeStrategy(stage_size=max(schemas, default=0) + 1)
    return _RankCatalogBuilder(description, strategy, schemas, paths, elsewhere).catalog(
        frozenset(needed_files), searched
    )


def catalog_statements(catalog: Catalog) -> Iterator[Statement]:
    """Yield the full shapes that a strategy states, and shapes and types by headers."""
    strategy = catalog.strategy
    if any(statement.kind == TOTAL_BYTES for statement in catalog.description.statements):
        listed = {name for names in catalog.description.listed.values() for name in names}
        listed_parameters = (p for p in catalog.parameters if p.name in listed)
        total = sum(content_bytes(p.dtype, p.shape) for p in listed_parameters)
        yield Statement(TOTAL_BYTES, ALL_TENSORS, total, "the files' headers")
    for name, shape in strategy.shapes.items() if strategy is not None else ():
        parameter = catalog.declared.get(name)
        if parameter is not None and parameter.holders:
            slices = f"its slices, as in {catalog.paths[parameter.holders[0]]}"
            yield Statement(SHAPE, name, shape, catalog.declared_by)
            yield Statement(SHAPE, name, parameter.shape, slices)
            yield Statement(TYPE, name, parameter.dtype, slices)
    if not catalog.is_whole and strategy is not None:
        yield from _shape_statements(catalog)
    for name, parameter in catalog.declared.items() if not catalog.is_whole else ():
        base = catalog.declared.get(
            strategy.states.base_name(name) if strategy else name, parameter
        )
        if len(base.shape) != len(parameter.shape) or parameter.shape == (1,):
            continue  # of an optimizer that keeps sums of rows and columns
        if base.shape != parameter.shape and base.holders and parameter.holders:
            slices = f"its slices and {catalog.declared_by}"
            yield Statement(SHAPE, base.name, base.shape, slices)
            yield Statement(SHAPE, base.name, parameter.shape, f"those of its state {name!r}")


def _shape_statements(catalog: Catalog) -> Iterator[Statement]:
    """Yield full shapes that a network's parts share: those of one kind, and a bias and its weight.

    Layers may differ by design, and their slices then differ as well. Where slices of one shape
    make one full shape in most layers and another in a few, these are rather sharded otherwise than
    the strategy says.
    """
    shapes_by_kind: dict[tuple[str, Shape], dict[Shape, list[str]]] = {}
    for name, parameter in catalog.declared.items():
        if (
            not parameter.holders
            or parameter.state is not None
            or 0 in parameter.shape
            or not parameter.shape
        ):
            continue
        local = (
            parameter.grid.box((0,) * len(parameter.shape)).shape
            if isinstance(parameter.grid, Grid)
            else ()
        )
        of_kind = shapes_by_kind.setdefault((pattern_of(name), local), {})
        of_kind.setdefault(parameter.shape, []).append(name)
        weight = catalog.declared.get(name.removesuffix("bias") + "weight")
        if name.endswith(".bias") and weight and weight.holders and len(parameter.shape) == 1:
            yield Statement(BIAS_LENGTH, weight.name, weight.shape, catalog.declared_by)
            yield Statement(BIAS_LENGTH, weight.name, parameter.shape, "its bias")
    for (kind, _), shapes in shapes_by_kind.items():
        usual, *other_shapes = sorted(shapes, key=lambda shape: -len(shapes[shape]))
        if other_shapes and len(shapes[usual]) > _MOST_LAYERS * sum(map(len, shapes.values())):
            yield Statement(LAYER_SHAPE, kind, usual, catalog.declared_by)
            yield Statement(
                LAYER_SHAPE, kind, other_shapes[0], f"those of {shapes[other_shapes[0]][0]!r}"
            )


def expand_patterns(
    strategy: Strategy, schemas: Iterable[Schema], *, states: bool = False
) -> Strategy:
    """Return a strategy that lists what its pattern means among the tensors of files.

    Any other strategy is returned as it is. states: list the optimizer states too.
    """
    if not isinstance(strategy, PatternStrategy):
        return strategy
    shapes = {
        name: shape
        for schema in dict.fromkeys(schemas)
        for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes)
        if dtype != BYTES  # what is no tensor has no axis to cut
    }
    return strategy.over(shapes, states=states)


def layout_with_uneven_rows(strategy: Strategy, name: str, stage: int, ndim: int) -> Layout:
    """Return the layout of `name`, an optimizer state's uneven rows taken from its parameter.

    The compiler states `param_split_shape` for an embedding and not for its moments, which it
    shards alike.
    """
    layout = strategy.layout(name, stage, ndim)
    base = strategy.stages[stage].get(strategy.states.base_name(name), layout)
    is_same_layout = (base.device_matrix, base.tensor_map) == (
        layout.device_matrix,
        layout.tensor_map,
    )
    if base.split_rows and not layout.split_rows and is_same_layout:
        return replace(layout, split_rows=base.split_rows, split_offsets=base.split_offsets)
    return layout


def with_uneven_states(strategy: Strategy) -> Strategy:
    """Return a strategy whose optimizer states have the uneven rows of their parameters."""
    if not any(layout.split_rows for layouts in strategy.stages for layout in layouts.values()):
        return strategy
    stages = []
    for stage, layouts in enumerate(strategy.stages):
        axes = {name: len(layout.tensor_map) for name, layout in layouts.items()}
        stages.append(
            {n: layout_with_uneven_rows(strategy, n, stage, ndim) for n, ndim in axes.items()}
        )
    return replace(strategy, stages=tuple(stages))


# -- boxes that are stated ------------------------------------------------------------------------


def _of_boxes(
    description: Description,
    schemas: Mapping[int, Schema],
    paths: Mapping[int, str],
    searched: str,
    dropped: Callable[[str], bool] | None,
) -> Catalog:
    """Return the catalog of a checkpoint whose boxes are stated one by one."""
    declared: dict[str, Parameter] = {}
    tilings_by_key: dict[object, tuple[Grid | BoxTiling, Holders]] = {}
    shardings: dict[tuple[int, int], Sharding] = {}
    for name, boxes in description.boxes.items():
        dtype, shape = description.declared[name]
        for declared_box in boxes:
            if declared_box.file in schemas:
                _check_entry(
                    name, declared_box, dtype, schemas[declared_box.file], paths[declared_box.file]
                )
        key = shape, boxes
        if key not in tilings_by_key:
            try:
                sharding_of_boxes = _build_sharding(name, shape, boxes, schemas, description.source)
            except CheckpointError:
                if dropped is not None and dropped(name):
                    continue
                raise
            tilings_by_key[key] = sharding_of_boxes
        tiling, placement = tilings_by_key[key]
        sharding = shardings.setdefault((id(tiling), id(placement)), Sharding(tiling, placement))
        declared[name] = Parameter(name, dtype, sharding, name, dtype)
    entries = {
        declared_box.file: set[str]()
        for boxes in description.boxes.values()
        for declared_box in boxes
    }
    for name, boxes in description.boxes.items():
        for declared_box in boxes:
            entries[declared_box.file].add(name + declared_box.suffix)
    holders: dict[str, list[int]] = {}
    for file, schema in schemas.items():
        for name in schema.names:
            if name not in entries.get(file, ()) and name not in declared:
                holders.setdefault(name, []).append(file)
    undeclared = {name: _undeclared(name, files, schemas, paths) for name, files in holders.items()}
    return with_related(Catalog(description, None, paths, (), declared, undeclared, {}, searched))


def with_related(
    catalog: Catalog, elsewhere: Mapping[str, Shape | None] = MappingProxyType({})
) -> Catalog:
    """Return a catalog whose parameters know what they are to others: decided here, once.

    By all names of files and strategy, and by full shapes; of a tensor that no strategy lists the
    full shape is not known. elsewhere: those in files that are not read.
    """
    listed = catalog.strategy.stages_of if catalog.strategy is not None else ()
    shapes: dict[str, Shape | None] = {**dict.fromkeys(listed), **elsewhere}
    shapes |= {name: parameter.shape for name, parameter in catalog.declared.items()}
    is_known = catalog.is_whole or catalog.strategy is None
    for name, parameter in catalog.undeclared.items():
        shapes[name] = parameter.shape if is_known else None
    states = find_states(shapes)
    if not states.related and not states.counters:
        return replace(catalog, states=states)
    declared, undeclared = (
        {
            n: replace(p, related=states.related.get(n), is_weight=states.is_weight(n))
            if n in states.related or n in states.counters
            else p
            for n, p in parameters.items()
        }
        for parameters in (catalog.declared, catalog.undeclared)
    )
    return replace(catalog, states=states, declared=declared, undeclared=undeclared)


def _check_entry(
    name: str, declared_box: DeclaredBox, dtype: str, schema: Schema, path: str
) -> None:
    """Refuse a header that contradicts what is stated of an entry. Raises CheckpointError."""
    position = schema.position.get(name + declared_box.suffix)
    if position is None:
        raise CheckpointError(
            f"does not hold {name + declared_box.suffix!r}, which is stated to be box "
            f"{declared_box.box} of {name!r}",
            "copy the file again",
            where=path,
        )
    if (schema.dtypes[position], schema.shapes[position]) != (dtype, declared_box.box.shape):
        raise CheckpointError(
            f"{name + declared_box.suffix!r} is {schema.dtypes[position]} "
            f"{list(schema.shapes[position])}, and {dtype} {list(declared_box.box.shape)} is "
            "stated; the files are not of one checkpoint",
            where=path,
        )


def _build_sharding(
    name: str,
    shape: Shape,
    boxes: tuple[DeclaredBox, ...],
    schemas: Mapping[int, Schema],
    source: str,
) -> tuple[Grid | BoxTiling, Holders]:
    try:
        tiling, cells = build_tiling(shape, [declared_box.box for declared_box in boxes])
    except ValueError as error:
        leave = f"{option_to_exclude([name])} leaves it out"
        raise CheckpointError(f"{name}: {error}", leave, "save again", where=source) from error
    files: dict[Cell, dict[int, None]] = {}
    suffixes: dict[tuple[Cell, int], str] = {}
    for declared_box, cell in zip(boxes, cells):
        if cell or not shape:
            cell_files = files.setdefault(cell, {})
            if declared_box.file in schemas:
                cell_files[declared_box.file] = None
                suffixes[cell, declared_box.file] = declared_box.suffix
    files_by_cell = IdentityDict(
        {cell: tuple(sorted(cell_files)) for cell, cell_files in files.items() if cell_files}
    )
    lacking = {
        cell: tuple(sorted({b.file for b, c in zip(boxes, cells) if c == cell}))
        for cell, cell_files in files.items()
        if not cell_files
    }
    return tiling, Holders(files_by_cell, suffixes if any(suffixes.values()) else {}, lacking)


def _undeclared(
    name: str, files: list[int], schemas: Mapping[int, Schema], paths: Mapping[int, str]
) -> Parameter:
    groups = [FileGroup(schemas[file], (file,), (file,)) for file in sorted(files)]
    dtype = _one_dtype(name, groups, paths)
    shape = _slice_shape(name, groups[0])
    cell = (0,) * len(shape)
    placement = Holders(IdentityDict({cell: tuple(sorted(files))}), is_per_rank=True)
    sharding = Sharding(whole_layout(len(shape)).grid(shape), placement, is_declared=False)
    return Parameter(name, dtype, sharding, name, dtype)


# -- ranks' files under a strategy ----------------------------------------------------------------


class _RankCatalogBuilder:
    """Makes the catalog of files that are ranks', under a strategy."""

    def __init__(
        self,
        description: Description,
        strategy: Strategy,
        schemas: Mapping[int, Schema],
        paths: Mapping[int, str],
        elsewhere: Mapping[int, Schema],
    ) -> None:
        self._description, self._paths, self._elsewhere = description, paths, elsewhere
        self._schemas, self._ranks = schemas, description.ranks
        strategy = expand_patterns(strategy, schemas.values())
        self._follows = _following(strategy, schemas, description)
        self._strategy = add_followers(strategy, self._follows) if self._follows else strategy
        self._shardings: dict[object, Sharding] = {}
        self._placements: dict[object, Holders] = {}

    def catalog(self, needed_files: frozenset[int], searched: str) -> Catalog:
        strategy, groups = self._strategy, self._groups()
        lists_files = self._description.lists_files
        groups_by_name: dict[str, list[tuple[int, FileGroup]]] = {}
        for stage, stage_groups in enumerate(groups):
            for group in stage_groups:
                for name in group.schema.names:
                    groups_by_name.setdefault(name, []).append((stage, group))
        for stage, stage_groups in enumerate(groups):
            for group in stage_groups:
                self._check_stage(stage, group)
        declared: dict[str, Parameter] = {}
        undeclared: dict[str, Parameter] = {}
        for name, places in groups_by_name.items():
            listing = next((s for s, _ in places if _lists(strategy, name, s)), None)
            if listing is None and name in strategy:
                continue  # a copy outside the stages that list it, such as a tied embedding
            # Where files say themselves what they hold, all stages that list a tensor serve it.
            serving_groups = [group for s, group in places if listing in (None, s) or lists_files]
            dtype = _one_dtype(name, serving_groups, self._paths)
            if listing is None:
                sharding = self._undeclared(name, serving_groups)
            else:
                sharding = self._declared(name, listing, serving_groups)
            to = undeclared if listing is None else declared
            follows = self._follows.get(name)
            to[name] = Parameter(name, dtype, sharding, name, dtype, follows=follows)
        states = strategy.states
        saved = {states.kind(name) for name in groups_by_name}
        absent = [
            name
            for name in strategy.stages_of
            if name not in declared and (states.kind(name) != NEVER_SAVED or NEVER_SAVED in saved)
        ]
        missing = {self._ranks.get(file, file) for file in needed_files - frozenset(self._schemas)}
        ranks_by_name = _unreachable(strategy, absent, frozenset(missing))
        return with_related(
            Catalog(
                self._description, strategy, self._paths, groups, declared, undeclared,
                ranks_by_name, searched,
            ),
            self._shapes_elsewhere(),
        )  # fmt: skip

    def _groups(self) -> tuple[tuple[FileGroup, ...], ...]:
        """Return the groups of each stage, those with the highest ranks first."""
        strategy, schemas = self._strategy, self._schemas
        pairs_by_stage: tuple[dict[Schema, list[tuple[int, int]]], ...] = tuple(
            {} for _ in strategy.stages
        )
        for rank, file in sorted((self._ranks.get(file, file), file) for file in schemas):
            pairs_by_stage[strategy.stage_of(rank)].setdefault(schemas[file], []).append(
                (rank, file)
            )
        stages = (
            [FileGroup(s, tuple(f for _, f in p), tuple(r for r, _ in p)) for s, p in stage.items()]
            for stage in pairs_by_stage
        )
        return tuple(
            tuple(sorted(g, key=lambda group: (group.ranks[-1], group.files[-1]), reverse=True))
            for g in stages
        )

    def _check_stage(self, stage: int, group: FileGroup) -> None:
        """Refuse files that hold much of what the strategy places in other pipeline stages.

        A copy of a tied embedding is usual; a quarter of the parameters is another strategy's file.
        """
        strategy, states = self._strategy, self._strategy.states
        base_names = {states.base_name(name) for name in group.schema.names}
        foreign = {
            base
            for name in group.schema.names
            if (base := states.base_name(name)) in strategy.stages_of
            and not _lists(strategy, base, stage)
        }
        if len(foreign) > _FEW_TIED and 4 * len(foreign) >= len(base_names):
            raise CheckpointError(
                f"holds {len(foreign)} parameters that {strategy.label} places in other "
                f"pipeline stages than its {stage}, such as {summarize_names(foreign, 2)}",
                where=self._paths[group.files[0]],
                details="the strategy is not this checkpoint's",
            )

    def _undeclared(self, name: str, groups: list[FileGroup]) -> Sharding:
        """Return the sharding of a tensor that every file of `groups` holds whole."""
        shape = _slice_shape(name, groups[0])
        return self._sharding(shape, whole_layout(len(shape)), None, groups)

    def _declared(self, name: str, stage: int, groups: list[FileGroup]) -> Sharding:
        """Return how `stage` shards a tensor. Raises CheckpointError where slices do not fit."""
        slice_shape, strategy = _slice_shape(name, groups[0]), self._strategy
        layout = layout_with_uneven_rows(strategy, name, stage, len(slice_shape))
        try:
            layout = layout.fold(slice_shape, slices=True)
            if groups[1:]:
                layout = self._with_chunked_rows(name, layout, strategy.ranks_in(stage), groups)
            shape = layout.full_shape(slice_shape)
            if layout.expanded_shape is not None:
                layout = replace(layout, expanded_shape=None)
            sharding = self._sharding(shape, layout, strategy.ranks_in(stage), groups)
        except RequestError as error:
            raise CheckpointError(
                f"{name!r} does not fit {strategy.label}: {error}",
                where=self._paths[groups[0].files[0]],
            ) from error
        even = not layout.split_rows
        for group in groups:
            self._check_slices(name, sharding, group, even)
        return sharding

    def _with_chunked_rows(
        self, name: str, layout: Layout, ranks: range, groups: Sequence[FileGroup]
    ) -> Layout:
        """Return a layout with the rows that each slice has, where these are torch.chunk's.

        That gives the first ranks equal rows, one what is left, and the others none. Raises
        CheckpointError for others that are unlike.
        """
        if layout.split_rows or prod(layout.counts) != (*layout.counts, 1)[0]:
            return layout
        rows_by_rank = {
            rank: _slice_shape(name, group)[0] for group in groups for rank in group.ranks
        } if layout.counts else {}  # fmt: skip
        if len({*rows_by_rank.values()}) < 2:
            return layout
        by_cell = dict[int, set[int]]()
        for rank, rows in rows_by_rank.items():
            by_cell.setdefault(layout.cell(rank - ranks.start)[0], set()).add(rows)
        counts = tuple(min(by_cell[cell]) for cell in sorted(by_cell))
        largest, total = max(counts), sum(counts)
        chunks = tuple(max(0, min(largest, total - largest * n)) for n in range(layout.counts[0]))
        is_plain = all(len(rows) == 1 for rows in by_cell.values()) and counts == chunks
        if is_plain and largest == -(-total // layout.counts[0]):
            return replace(layout, split_rows=counts)
        shown = ", ".join(
            f"{rows_by_rank[rank]} on rank {rank}" for rank in sorted(rows_by_rank)[:8]
        )
        raise CheckpointError(
            f"slices of {name!r} have unlike rows: {shown}",
            "a strategy with param_split_shape, which says each slice's rows",
            details=f"{self._strategy.label} makes them equal, and torch.chunk's differ otherwise",
        )

    def _shapes_elsewhere(self) -> dict[str, Shape | None]:
        """Return full shapes in stages of which nothing is read; None where one is not known."""
        shapes: dict[str, Shape | None] = {}
        follows = _following(self._strategy, self._elsewhere, self._description)
        strategy = add_followers(self._strategy, follows) if follows else self._strategy
        for file, schema in self._elsewhere.items():
            stage = strategy.stage_of(self._ranks.get(file, file))
            for name, slice_shape in zip(schema.names, schema.shapes):
                shapes.setdefault(name, None)
                if _lists(strategy, name, stage):
                    layout = layout_with_uneven_rows(strategy, name, stage, len(slice_shape))
                    with suppress(RequestError):
                        folded = layout.fold(slice_shape, slices=True)
                        shapes[name] = folded.full_shape(slice_shape)
        return shapes

    def _sharding(
        self, shape: Shape, layout: Layout, ranks: range | None, groups: list[FileGroup]
    ) -> Sharding:
        """Return a sharding, one object for all tensors that are stored alike.

        ranks: the global ranks of the stage that lists them; None if none does.
        """
        placed = layout, ranks, tuple(map(id, groups))
        if (shape, placed) not in self._shardings:
            placement = self._placement(placed, groups)
            sharding = Sharding(layout.grid(shape), placement, is_declared=ranks is not None)
            self._shardings[shape, placed] = sharding
        return self._shardings[shape, placed]

    def _placement(
        self, placed: tuple[Layout, range | None, object], groups: list[FileGroup]
    ) -> Holders:
        """Return which files of `groups` hold which cells, one object for all shapes.

        Groups that differ only in what else their files hold have one, too.
        """
        if placed not in self._placements:
            layout, ranks, _ = placed
            pairs = sorted(pair for group in groups for pair in zip(group.files, group.ranks))
            key = layout, ranks, tuple(pairs)
            if key not in self._placements:
                self._placements[key] = _find_holders(layout, ranks, pairs)
            self._placements[placed] = self._placements[key]
        return self._placements[placed]

    def _check_slices(self, name: str, sharding: Sharding, group: FileGroup, even: bool) -> None:
        """Check that the ranks of a group hold slices of the shape that the layout gives them."""
        have, cells_of = _slice_shape(name, group), sharding.placement.cells_of
        for file in group.files[:1] if even else group.files:
            (cell,) = cells_of[file]
            want = sharding.grid.box(cell).shape
            if have != want:
                raise CheckpointError(
                    f"the slice of {name!r} has shape {list(have)}, expected {list(want)}",
                    where=self._paths[file],
                    details="the ranks' files are not of one checkpoint, or the strategy is "
                    "another's",
                )


def _find_holders(layout: Layout, ranks: range | None, pairs: Iterable[tuple[int, int]]) -> Holders:
    """Return which files hold which cells. `pairs` are (file, global rank)."""
    files: dict[Cell, list[int]] = {}
    for file, rank in pairs:
        cell = (0,) * len(layout.tensor_map) if ranks is None else layout.cell(rank - ranks.start)
        files.setdefault(cell, []).append(file)
    files_by_cell = IdentityDict({cell: tuple(cell_files) for cell, cell_files in files.items()})
    if ranks is None:
        return Holders(files_by_cell, is_per_rank=True)
    lacking = {
        cell: tuple(ranks.start + local for local in local_ranks)
        for cell, local_ranks in layout.holders.items()
        if cell not in files
    }
    return Holders(files_by_cell, lacking=lacking)


# -- what a strategy leaves out -------------------------------------------------------------------


def _following(
    strategy: Strategy, schemas: Mapping[int, Schema], description: Description
) -> dict[str, str]:
    """Return the states that a strategy does not list and that follow a parameter, with that.

    A state follows its parameter if its slices have the shape of the parameter's: jobs that shard
    by pattern list no states, and MindFormers' metadata not those of Muon.
    """
    if isinstance(strategy, WholeStrategy):
        return {}
    bases_by_name: dict[str, str] = {}
    checked_schemas: set[tuple[int, Schema]] = set()
    states = None
    if description.declared:  # parameters and states may be in different files
        names = (name for schema in dict.fromkeys(schemas.values()) for name in schema.names)
        states = find_states(dict.fromkeys([*description.declared, *names]))
    for file, schema in schemas.items():
        stage = strategy.stage_of(description.ranks.get(file, file))
        if stage < len(strategy.stages) and (stage, schema) not in checked_schemas:
            checked_schemas.add((stage, schema))
            if not strategy.stages_of.keys() >= schema.position.keys():
                file_states = states or find_states(dict(zip(schema.names, schema.shapes)))
                layouts = strategy.stages[stage]
                bases_by_name.update(following(schema, layouts, file_states, description.declared))
    return {name: base for name, base in bases_by_name.items() if name not in strategy}


def following(
    schema: Schema,
    layouts: Mapping[str, Layout],
    states: States,
    declared: Mapping[str, tuple[str, Shape]],
) -> Iterator[tuple[str, str]]:
    """Yield the states and copies of one file that follow a parameter, and that parameter.

    layouts: of the file's stage. declared: types and full shapes of parameters that may be in
    another file of the rank.
    """
    for name, shape in zip(schema.names, schema.shapes):
        state = states.related.get(name)
        base = name if state is None else state.parameter
        if base == name or base not in layouts or name in layouts:
            continue
        if base in schema.position:
            expected_shape = schema.shapes[schema.position[base]]
        elif base in declared:
            expected_shape = tuple(n // c for n, c in zip(declared[base][1], layouts[base].counts))
        else:
            continue
        if shape == expected_shape:
            yield name, base


def add_followers(strategy: Strategy, follows: Mapping[str, str]) -> Strategy:
    """Return a strategy that lists states like the parameters that they follow."""
    if isinstance(strategy, WholeStrategy):
        return strategy
    return replace(
        strategy,
        stages=tuple(
            {**layouts, **{n: layouts[base] for n, base in follows.items() if base in layouts}}
            for layouts in strategy.stages
        ),
    )


def _unreachable(
    strategy: Strategy, absent: Iterable[str], missing: frozenset[int]
) -> dict[str, tuple[int, ...]]:
    """Return the `absent` names that missing files may hold, each with the missing ranks.

    A name is certainly not in the checkpoint if all ranks with one of its boxes are there and
    none has it (with remove_redundancy one of them would).
    """
    ranks_by_name: dict[str, tuple[int, ...]] = {}
    missing_holders: dict[tuple[Layout, int], tuple[int, ...]] = {}
    for name in absent:
        stage = strategy.stages_of[name][0]
        layout = strategy.stages[stage][name]
        if (layout, stage) not in missing_holders:
            missing_holders[layout, stage] = _missing_holders(
                layout, strategy.ranks_in(stage), missing
            )
        if missing_holders[layout, stage]:
            ranks_by_name[name] = missing_holders[layout, stage]
    return ranks_by_name


def _missing_holders(layout: Layout, ranks: range, missing: frozenset[int]) -> tuple[int, ...]:
    missing_ranks = tuple(rank for rank in ranks if rank in missing)
    incomplete = {layout.cell(rank - ranks.start) for rank in missing_ranks}
    return missing_ranks if len(incomplete) == len(layout.holders) else ()


def _lists(strategy: Strategy, name: str, stage: int) -> bool:
    return name in strategy and stage in strategy.stages_of.get(name, (0,))


def _one_dtype(name: str, groups: list[FileGroup], paths: Mapping[int, str]) -> str:
    types = {group.schema.dtypes[group.schema.position[name]]: group.files[0] for group in groups}
    if len(types) > 1:
        (a, rank_a), (b, rank_b), *_ = sorted(types.items())
        raise CheckpointError(
            f"{name!r} is {a} in {paths[rank_a]} and {b} in {paths[rank_b]}; "
            "these files are not of one checkpoint"
        )
    return next(iter(types))


def _slice_shape(name: str, group: FileGroup) -> Shape:
    return group.schema.shapes[group.schema.position[name]]
