"""What process 0 reads of a request first: strategies, and what operations need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import CheckpointRef
from rankxform.errors import FormatError, RankxformError, UsageError
from rankxform.formats.container import Schema
from rankxform.formats.container import container_suffixes as checkpoint_suffixes
from rankxform.geometry.box import Shape
from rankxform.layout.strategy import PatternStrategy, Strategy
from rankxform.operations.base import read_inputs
from rankxform.publish.folder_records import FOLDER_NAME, MANIFEST_NAME
from rankxform.request import Request
from rankxform.source.hints import holds_checkpoint
from rankxform.statements import Finding, as_warning, join, quote
from rankxform.storage.posix import read_bytes, suggest_similar_path
from rankxform.storage.source_reader import index_file
from rankxform.storage.store import absolute, scheme_of, storage_of
from rankxform.storage.user_files import (
    is_strategy,
    load_strategy,
    metadata_at,
    path_of,
    read_strategy_file,
    strategy_candidates,
)
from rankxform.transport import Team
from rankxform.values import dataclass

from .destination import check_scheme
from .model_files import ModelConfig, RequestContext, read_companions

if TYPE_CHECKING:
    from rankxform.derivation.request import DeriveRequest

    from .own_companions import OwnCompanions
    from .stated_model import StatedModel


@dataclass(frozen=True)
class ResolvedRequest:
    """A request, with what the files that it names say."""

    request: Request  # with absolute paths
    src: Strategy | None  # the source's strategy, if one is stated
    dst: Strategy | DeriveRequest  # the destination's, or what it is to be derived from
    # Full shapes and types in the place of a source.
    shapes: dict[str, tuple[Shape, str]] | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)  # what operations read, by their names
    config: ModelConfig | None = None  # the model's, if operations use one
    # What lies beside the source's tensors, where no map compares it.
    stated_model: StatedModel | None = None
    # Small files that belong to the model and go with the destination.
    companions: Mapping[str, bytes] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()  # what may not be what was meant
    # Small files of the source that go with the destination too, as far as these are fit.
    own_companions: OwnCompanions | None = None

    @property
    def where(self) -> CheckpointRef:
        return source_ref(self.request, self.src)


def source_ref(request: Request, strategy: Strategy | None) -> CheckpointRef:
    """Return the source that a request names."""
    return CheckpointRef(
        request.src, request.src_form, request.src_pattern, request.step, request.suffix,
        request.files, strategy, request.fallback,
    )  # fmt: skip


def source_ref_with_strategy(request: Request) -> CheckpointRef:
    """Return the source that a request names, with the strategy that it names, if it does."""
    src_strategy = request.src_strategy
    path = Path(request.src)
    if path.is_file() and is_strategy(path):
        look = f"rankxform inspect {quote(request.src)}"
        raise UsageError("is a strategy, and no checkpoint", look, where=path)
    return source_ref(request, None if src_strategy is None else load_strategy(src_strategy))


def resolve_request(request: Request, team: Team) -> ResolvedRequest:
    """Read strategies, and what operations need, on process 0. Collective."""
    return team.bcast(lambda: _read(request))


def _read(request: Request) -> ResolvedRequest:
    where = absolute(request.src)
    context = RequestContext(request, where)
    inputs = read_inputs(context)
    config = context.config if inputs.keys() & {"dequantize", "map"} else None
    companions, findings = read_companions(context, inputs.get("map"), config)
    facts: dict[str, Any] = {"inputs": inputs, "config": config, "companions": companions}
    src, is_derived = load_strategy(request.src_strategy), False
    places = (where, *map(absolute, request.fallback))
    has_source = any(not storage_of(p).has_folders or Path(p).exists() for p in places)
    alone = request.src_strategy is None and request.src_config is not None
    if alone and request.fallback:
        raise UsageError(
            "--fallback: --src-config alone says how one place is sharded", "give --src-strategy"
        )
    if alone and has_source and request.shapes is None:
        from rankxform.derivation.slices import BY_RULE_ALONE

        from .slices import derive_from_slices

        place = source_ref(replace(request, src=where), None)
        derived = derive_from_slices(place, request, request.exclude)
        src, is_derived = (src, False) if derived is None else (derived.strategy, True)
        doubts = derived.assumptions if derived is not None else ()
        texts = (text for text in doubts if text.startswith(BY_RULE_ALONE))
        findings += (*(as_warning(f"{text} Compare them with the network's.") for text in texts),)
    is_read = has_source and request.shapes is None
    is_own = is_derived or (alone and not is_read)  # --src-config says how SRC is sharded
    dst_request = None if is_own and not request.derives else _question(request)
    dst = dst_request or load_strategy(request.dst_strategy)
    if isinstance(dst, PatternStrategy) and dst.has_parts:
        text = "parts of rows say how a source was sharded, and no destination is written so"
        raise UsageError(text, where=f"--dst-strategy {dst.label}")
    if request.shapes is not None:
        if isinstance(src, PatternStrategy) and src.has_parts:
            raise UsageError("--shapes plans slices, and no parts of rows", where=src.label)
        shapes = read_shapes(Path(request.shapes))
        if request.src_strategy is None:
            src = _derive_from_shapes(request, shapes) or src
        return ResolvedRequest(request, src, dst, shapes, **facts)
    if request.dst and not has_source and Path(request.dst).exists():
        folder = Path(request.dst)  # what rankxform wrote was made of SRC, which is gone
        is_written = any((folder / name).exists() for name in (FOLDER_NAME, MANIFEST_NAME))
        is_source = not is_written and holds_checkpoint(folder)
        raise UsageError(
            "no such checkpoint file or folder"
            + (f", and {request.dst} is there" if is_source else ""),
            *suggest_similar_path(Path(where), holds_checkpoint),
            *(["exchange SRC and DST"] if is_source else []),
            where=where,
        )
    declared_src = src if is_derived or request.src_strategy is not None else None
    findings += _part_of_a_job(request.src_strategy)
    if is_derived:
        findings += (*_by_configuration_alone(request.src_config or ""),)
    request = _absolute(request, where)
    return ResolvedRequest(request, declared_src, dst, findings=(*findings,), **facts)


def _derive_from_shapes(
    request: Request, shapes: Mapping[str, tuple[Shape, str]]
) -> Strategy | None:
    """Derive how a source of full shapes is sharded; None if it is one whole checkpoint."""
    if request.src_parallel is not None:
        raise UsageError(
            "--src-parallel has the sizes of the source's job, and nothing says how it is sharded",
            f"{derive_command(request, request.shapes or '')}, and --src-strategy FILE",
            "--src-strategy FILE or FOLDER",
            "--src-config FILE --preset NAME",
            "leave out --src-parallel if the source is one whole checkpoint",
            where=f"--shapes {request.shapes}",
        )
    if request.src_config is None:
        return None
    from rankxform.derivation.derive import derive
    from rankxform.derivation.inputs import source_request, whole_extents

    full_shapes, dtypes = zip(*shapes.values()) if shapes else ((), ())
    extents = whole_extents([Schema(tuple(shapes), dtypes, full_shapes)])
    label = f"derived from {request.src_config}"
    return derive(replace(source_request(request), extents=extents), label).strategy


def derive_command(request: Request, shapes: str) -> str:
    """Return the command that derives the strategy of a source of these sizes, with what else is
    said of it."""
    from .manifest import option_words

    names = ["preset", "unproven", "rule", "opt_on", "opt_off", "unsharded"]
    names += [] if request.derives else ["optimizer_shard"]  # the destination's, if that is derived
    threshold = request.src_threshold
    words = [*option_words(request, names)]
    words += [] if threshold is None else ["--threshold", str(threshold)]
    sizes = "--dst-parallel", request.src_parallel or "SIZES"
    return join(
        ["rankxform", "strategy", "derive", "--shapes", shapes, *sizes, *words, "-o", "FILE"]
    )


def _by_configuration_alone(path: str) -> Iterator[Finding]:
    """Yield what of a source's strategy nothing but its job's configuration says."""
    from rankxform.derivation.inputs import read_config

    sizes = read_config(path).parallel
    if sizes.ep > 1:
        yield as_warning(
            f"{path}: that ep={sizes.ep} is taken from it alone; slices of experts look alike in "
            "any order"
        )


def _part_of_a_job(src_strategy: str | Strategy | None) -> Iterator[Finding]:
    """Yield that a strategy is one pipeline stage's, and the others lie beside it."""
    path = path_of(src_strategy)
    if path is None or not path.is_file():
        return
    named = re.sub(r"[0-9]+", "*", path.name)
    siblings = [
        candidate
        for candidate in strategy_candidates(path.parent)
        if candidate != path and re.sub(r"[0-9]+", "*", candidate.name) == named
    ]
    if not siblings or metadata_at(path) is not None:
        return
    record = read_strategy_file(path)
    with suppress(RankxformError):  # what lies there need be no strategy
        # One file of each rank is many.
        for sibling in (siblings[0], siblings[len(siblings) // 2], siblings[-1]):
            is_other = is_strategy(sibling) and not record.merged
            if is_other and read_strategy_file(sibling).stage != record.stage:
                yield as_warning(
                    f"{path}: is pipeline stage {record.stage}'s alone, and others' lie beside it, "
                    f"as {sibling.name}: is a part of the model meant?"
                )
                return


def _absolute(request: Request, where: str) -> Request:
    dst = request.dst
    if dst is not None:
        check_scheme(dst)
        dst = dst if scheme_of(dst) else absolute(dst)
    paths = {"config": request.config, "lora": request.lora, "like": request.like}
    if request.map is not None and request.map.endswith(".toml"):
        paths["map"] = request.map
    absolute_paths: dict[str, Any] = {n: p and absolute(p) for n, p in paths.items()}
    fallback = tuple(map(absolute, request.fallback))
    return replace(request, src=where, dst=dst, fallback=fallback, **absolute_paths)


def _question(request: Request) -> DeriveRequest | None:
    """Return what the destination's strategy is to be derived from, if it is."""
    if not request.derives:
        request.check_derives()
        return None
    from rankxform.derivation.inputs import derive_request

    if request.dst_strategy is not None:
        flag = "--dst-config" if request.dst_parallel is None else "--dst-parallel"
        raise UsageError(
            f"--dst-strategy and {flag}: the strategy is given, or it is derived", "leave one out"
        )
    return derive_request(request)


def read_shapes(path: Path) -> dict[str, tuple[Shape, str]]:
    """Return the shape and type of each parameter of a JSON file, or of a checkpoint file.

    Raises UsageError, CheckpointError.
    """
    if path.suffix in checkpoint_suffixes():
        schema = index_file(path).schema
        return dict(zip(schema.names, zip(schema.shapes, schema.dtypes)))
    if path.is_dir():
        raise UsageError(
            "is a folder", "name one complete checkpoint file", "a JSON file", where=path
        )
    try:
        from rankxform.formats.documents import parse_shapes

        return parse_shapes(read_bytes(path))
    except FormatError as error:
        raise UsageError.of_parts(error.at(path)) from error
