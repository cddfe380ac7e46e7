"""What process 0 finds before headers are read: strategies, forms, and which files are meant."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import (
    FORMS,
    USUAL,
    Form,
    Listing,
    Shards,
    Wish,
    form_of,
)
from rankxform.checkpoints.rank_folders import DEFAULT_PATTERN
from rankxform.errors import CheckpointError, FormatError, RequestError, UsageError
from rankxform.formats.base import Index, Schema
from rankxform.formats.base import suffixes as checkpoint_suffixes
from rankxform.formats.shapes import parse as parse_shapes
from rankxform.geometry.box import Shape
from rankxform.layout.layout import whole
from rankxform.layout.names import ranges
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.ops.base import Derivation
from rankxform.planning.selection import REPLICATE
from rankxform.planning.stages import check_ranks, needed_stages
from rankxform.publish.target import FOLDER_NAME, JOB_NAME
from rankxform.storage import strategies
from rankxform.storage.index import index
from rankxform.storage.posix import read_bytes
from rankxform.values import dataclass

from .described import check_described
from .operation_inputs import OperationInputs, read_operation_inputs
from .request import Request
from .which_strategy import check_stated

if TYPE_CHECKING:
    from rankxform.derivation.request import DeriveRequest


@dataclass(frozen=True)
class Inputs:
    """What process 0 finds before headers are read; `wanted` are the source ranks to look at.

    dst: the destination's strategy, or what it is to be derived from.
    """

    request: Request
    src: Strategy
    dst: Strategy | DeriveRequest
    form: str
    shards: Shards
    wanted: tuple[int, ...]
    notices: list[str]
    imagined: Mapping[int, Index] = field(default_factory=dict)
    operation: OperationInputs = field(default_factory=OperationInputs)


def inputs(request: Request, there: Listing | None, searched: str) -> Inputs:
    """Read strategies and folders, and what operations need; process 0 alone does this.

    `there` is what all nodes have; `searched` says which they are, if there are several.
    """
    operation = read_operation_inputs(request, Path(request.src).absolute())
    return replace(_inputs(request, there, searched), operation=operation)


def _inputs(request: Request, there: Listing | None, searched: str) -> Inputs:
    src = strategies.load(request.src_strategy)
    dst = _question(request) or strategies.load(request.dst_strategy)
    if request.shapes is not None:
        return _imagined(request, src, dst, Path(request.shapes))
    where = Path(request.src).absolute()
    if request.dst and not where.exists() and Path(request.dst).exists():
        raise UsageError(
            f"exchange SRC and DST? {where}: no such checkpoint file or folder, and {request.dst} "
            "is there"
        )
    form = source_form(request, where)
    if form.described:
        return _described(request, form, where, src, dst, there, searched)
    is_whole = isinstance(src, WholeStrategy)
    wanted = None if is_whole else _needed_ranks(src, dst, request)
    among = None if is_whole else range(src.ranks)
    shards = _shards(request, form, where, wanted, there, searched, among)
    check_stated(request, where, shards)
    if wanted is None:
        wanted = sorted(shards.paths)
    elif not any(rank in shards.paths for rank in wanted):
        raise CheckpointError(f"{where}: none of the ranks {ranges(wanted)} is there{searched}")
    outside = [] if is_whole else [rank for rank in shards.paths if rank >= src.ranks]
    keep = {*wanted, *outside[-1:]}  # of the ranks beyond the strategy's, one is looked at
    kept = {rank: path for rank, path in sorted(shards.paths.items()) if rank in keep}
    return Inputs(
        _absolute(request, where),
        src,
        dst,
        form.name,
        replace(shards, paths=kept),
        tuple(wanted),
        list(_notices(where, src, shards, wanted, outside, searched)),
    )


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


def check_finished(folder: Path) -> None:
    """Refuse a folder in which a run of rankxform was stopped, whatever it holds."""
    if (folder / FOLDER_NAME / JOB_NAME).exists():
        raise CheckpointError(
            f"{folder}: a conversion into this folder was stopped; run its command again to "
            "complete it"
        )


def source_form(request: Request, where: Path) -> Form:
    """Return the form of the source. Raises UsageError where two are recognized."""
    if request.src_form is None and (
        request.files is not None or request.src_pattern != DEFAULT_PATTERN
    ):
        return FORMS[USUAL]
    return form_of(where, request.src_form)


def _described(
    request: Request,
    form: Form,
    where: Path,
    given: Strategy,
    dst: Strategy | DeriveRequest,
    there: Listing | None,
    searched: str,
) -> Inputs:
    """Return the files of a checkpoint that says itself how it is sharded."""
    if request.files is not None or request.src_pattern != DEFAULT_PATTERN:
        raise UsageError(f"--src-pattern and files are for rank folders; {where} is {form.name}")
    asked = wish(request)
    shards = form.choose(where, there or form.look(where, asked), None, asked, searched)
    said = shards.said
    assert said is not None
    check_finished(next((path.parent for path in shards.paths.values()), where))
    src = said.strategy or WholeStrategy(stage_size=max(shards.paths) + 1)
    if request.src_strategy is not None:
        check_described(said, given)
    wanted: set[int] = {*shards.paths, *said.ranks}
    if said.strategy is not None:
        ranks = set(_needed_ranks(src, dst, request))
        wanted = {file for file in wanted if said.ranks[file] in ranks}
    kept = {file: path for file, path in sorted(shards.paths.items()) if file in wanted}
    if not kept:
        raise CheckpointError(f"{where}: none of the files that are needed is there{searched}")
    return Inputs(
        _absolute(request, where),
        src,
        dst,
        form.name,
        replace(shards, paths=kept),
        tuple(sorted(wanted)),
        list(said.notices),
    )


def _question(request: Request) -> DeriveRequest | None:
    """Return what the destination's strategy is to be derived from, if it is."""
    if not request.derives:
        request.check_derives()
        return None
    from .derived import question

    return question(request)


def _imagined(
    request: Request, src: Strategy, dst: Strategy | DeriveRequest, shapes: Path
) -> Inputs:
    """Imagine the checkpoint that `src` makes of parameters with the given full shapes."""
    known = read_shapes(shapes)
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
    paths = {rank: Path(f"rank_{rank}/{shapes.name}") for rank in indexes}
    return Inputs(request, src, dst, USUAL, Shards(paths), tuple(indexes), [], indexes)


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


def wish(request: Request) -> Wish:
    return Wish(request.src_pattern, request.step, request.suffix)


def _shards(
    request: Request,
    form: Form,
    where: Path,
    wanted: Sequence[int] | None,
    there: Listing | None,
    searched: str,
    among: range | None,
) -> Shards:
    if request.files is None:
        asked = wish(request)
        return form.choose(where, there or form.look(where, asked), wanted, asked, searched, among)
    paths = {rank: Path(path).absolute() for rank, path in request.files.items()}
    for rank, path in paths.items():
        if not path.is_file() and not searched:
            raise UsageError(f"{path}: there is no such file, which is to be rank {rank}'s")
    return Shards(paths)


def _needed_ranks(src: Strategy, dst: Strategy | DeriveRequest, request: Request) -> list[int]:
    """Return the source ranks of the stages that the wanted destination ranks draw on.

    With `unmatched` "replicate" these are all ranks: any file may hold a parameter that no source
    stage lists. So are they where the destination's strategy has to be derived first, and where
    names at the destination are not those of the source.
    """
    all_names = request.map is not None or request.masters
    if request.unmatched == REPLICATE or not isinstance(dst, Strategy) or all_names:
        return list(range(src.ranks))
    derivation = Derivation.of(vars(request))
    derivation.check_names(src.stages_of)
    name_of = derivation.name_of
    stages = {dst.stage_of(rank) for rank in check_ranks(request.ranks, dst)}
    needed = {s for stage in stages for s in needed_stages(src, dst, stage, name_of)}
    return [rank for stage in sorted(needed) for rank in src.ranks_in(stage)]


def _notices(
    where: Path,
    src: Strategy,
    shards: Shards,
    wanted: Sequence[int],
    outside: Sequence[int],
    searched: str,
) -> Iterator[str]:
    if outside:
        yield (
            f"{where}: {len(outside)} ranks from {min(outside)} on are beyond the {src.ranks} of "
            f"{src.label} and were not used"
        )
    missing = [rank for rank in wanted if rank not in shards.paths]
    if missing:
        yield f"{where}: no file of rank {ranges(missing)}{searched}; copies on other ranks serve"
