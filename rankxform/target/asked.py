"""What process 0 reads of a request first: strategies, and what operations need."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, Selected, Where
from rankxform.errors import FormatError, RequestError, UsageError
from rankxform.formats.base import Index, Schema
from rankxform.formats.base import suffixes as checkpoint_suffixes
from rankxform.formats.shapes import parse as parse_shapes
from rankxform.geometry.box import Shape
from rankxform.layout.layout import whole
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.ops.base import Derivation
from rankxform.planning.description import Description
from rankxform.planning.selection import REPLICATE
from rankxform.planning.stages import check_ranks, needed_stages
from rankxform.planning.table import catalog_of
from rankxform.planning.visibility import Visibility
from rankxform.request import Request
from rankxform.source.opening import Narrow, Source, open_source
from rankxform.storage import strategies
from rankxform.storage.index import index
from rankxform.storage.posix import read_bytes
from rankxform.transport import Team
from rankxform.values import dataclass

from .operation_inputs import OperationInputs, derivation_of, read_operation_inputs

if TYPE_CHECKING:
    from rankxform.derivation.request import DeriveRequest


@dataclass(frozen=True)
class Asked:
    """A request, with what the files that it names say.

    request: with absolute paths. operation: what operations need. src: the source's strategy, if
    one is stated. dst: the destination's, or what it is to be derived from. shapes: full shapes and
    types in the place of a source.
    """

    request: Request
    operation: OperationInputs
    src: Strategy | None
    dst: Strategy | DeriveRequest
    shapes: dict[str, tuple[Shape, str]] | None = None

    @property
    def where(self) -> Where:
        return where_of(self.request, self.src)


def where_of(request: Request, strategy: Strategy | None) -> Where:
    """Return the source that a request names."""
    return Where(
        request.src, request.src_form, request.src_pattern, request.step, request.suffix,
        request.files, strategy,
    )  # fmt: skip


def read_asked(request: Request) -> Asked:
    """Read strategies, and what operations need; process 0 alone does this."""
    where = Path(request.src).absolute()
    operation = read_operation_inputs(request, where)
    src = strategies.load(request.src_strategy)
    dst = _question(request) or strategies.load(request.dst_strategy)
    if request.shapes is not None:
        return Asked(request, operation, src, dst, read_shapes(Path(request.shapes)))
    if request.dst and not where.exists() and Path(request.dst).exists():
        raise UsageError(
            f"exchange SRC and DST? {where}: no such checkpoint file or folder, and {request.dst} "
            "is there"
        )
    stated = src if request.src_strategy is not None else None
    return Asked(_absolute(request, where), operation, stated, dst)


def _absolute(request: Request, where: Path) -> Request:
    paths = {
        "dst": request.dst,
        "config": request.config,
        "lora": request.lora,
        "like": request.like,
    }
    if request.map is not None and request.map.endswith(".toml"):
        paths["map"] = request.map
    known: dict[str, Any] = {
        name: path and str(Path(path).absolute()) for name, path in paths.items()
    }
    return replace(request, src=str(where), **known)


def _question(request: Request) -> DeriveRequest | None:
    """Return what the destination's strategy is to be derived from, if it is."""
    if not request.derives:
        request.check_derives()
        return None
    from rankxform.derivation.asked import derive_request

    if request.dst_strategy is not None:
        which = "--dst-config" if request.dst_parallel is None else "--dst-parallel"
        raise UsageError(
            f"--dst-strategy and {which}: the strategy is given, or it is derived; leave one out"
        )
    return derive_request(request)


# -- the source that is asked for -----------------------------------------------------------------


def source_of(asked: Asked, team: Team) -> Source:
    """Open the source that a request names, as far as it is needed. Collective."""
    if asked.shapes is not None:
        return team.agree(lambda: _imagined(asked, asked.shapes or {}, team))
    return open_source(asked.where, team, narrow_of(asked))


def narrow_of(asked: Asked) -> Narrow:
    """Return what of the source is needed."""
    drops = derivation_of(asked.request, asked.operation).drops
    return Narrow(lambda src: _needed_ranks(src, asked.dst, asked.request), drops)


def _needed_ranks(
    src: Strategy, dst: Strategy | DeriveRequest, request: Request
) -> list[int] | None:
    """Return the source ranks of the stages that the wanted destination ranks draw on.

    With `unmatched` "replicate" these are all ranks: any file may hold a parameter that no source
    stage lists. So are they where the destination's strategy has to be derived first, and where
    names at the destination are not those of the source.
    """
    if isinstance(src, WholeStrategy):
        return None
    all_names = request.map is not None or request.masters
    if request.unmatched == REPLICATE or not isinstance(dst, Strategy) or all_names:
        return list(range(src.ranks))
    derivation = Derivation.of(vars(request))
    derivation.check_names(src.stages_of)
    name_of = derivation.name_of
    stages = {dst.stage_of(rank) for rank in check_ranks(request.ranks, dst)}
    needed = {s for stage in stages for s in needed_stages(src, dst, stage, name_of)}
    return [rank for stage in sorted(needed) for rank in src.ranks_in(stage)]


def _imagined(asked: Asked, known: dict[str, tuple[Shape, str]], team: Team) -> Source:
    """Imagine the checkpoint that a strategy makes of parameters with the given full shapes."""
    src, shapes = asked.src or WholeStrategy(), Path(asked.request.shapes or "")
    if isinstance(src, PatternStrategy):
        src = src.over({name: shape for name, (shape, _) in known.items()}, states=True)
    indexes: dict[int, Index] = {}
    for stage in range(len(src.stages)):
        names = [n for n in known if n not in src or stage in src.stages_of.get(n, (0,))]
        sliced = []
        for name in names:
            shape, _ = known[name]
            try:
                layout = src.layout(name, stage, len(shape)) if name in src else whole(len(shape))
                layout = layout.fold(shape, slices=False)
                sliced.append(layout.grid(shape).box(layout.cell(0)).shape)
            except RequestError as error:
                raise RequestError(f"{shapes}: {name!r} in {src.label}: {error}") from error
        types = tuple(known[name][1] for name in names)
        schema = Schema(tuple(names), types, tuple(sliced))
        indexes.update((rank, Index(schema, array("q"), {}, 0)) for rank in src.ranks_in(stage))
    names_of = {rank: f"rank_{rank}/{shapes.name}" for rank in indexes}
    schemas = {rank: one.schema for rank, one in indexes.items()}
    catalog = catalog_of(Description(src.label, src), schemas, names_of, tuple(indexes))
    return Source(
        asked.where, FORMS[DEFAULT_FORM], Selected(names_of),
        {rank: Path(name) for rank, name in names_of.items()}, indexes, {}, catalog,
        Visibility.full(team.nodes.of, indexes), tuple(indexes),
    )  # fmt: skip


def read_shapes(path: Path) -> dict[str, tuple[Shape, str]]:
    """Return the shape and type of each parameter of a JSON file, or of a checkpoint file.

    Raises UsageError, CheckpointError.
    """
    if path.suffix in checkpoint_suffixes():
        schema = index(path).schema
        return dict(zip(schema.names, zip(schema.shapes, schema.dtypes)))
    if path.is_dir():
        raise UsageError(f"{path}: name one complete checkpoint file, or JSON; this is a folder")
    try:
        return parse_shapes(read_bytes(path))
    except FormatError as error:
        raise UsageError(f"{path}: {error}") from error
