"""What a derivation needs, from options and from a YAML.

Process 0 reads what the options name (`derive_request`); the derivation itself is pure, and the
same on every process.

Only keys that can change a layout are read: ``use_parallel``, ``run_mode``, ``parallel_config``,
``parallel``, some of ``model.model_config``, and where checkpoints are. Values that would mean a
strategy of another kind are refused. PyYAML is imported here alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from reprlib import repr
from typing import Any

from rankxform.errors import CheckpointError, RequestError, UsageError, did_you_mean
from rankxform.formats.container import Schema, content_bytes
from rankxform.layout.names import compile_regex, format_ranges, summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.options import flag_of, is_default
from rankxform.storage.posix import read_bytes
from rankxform.storage.user_files import check_folded, fold_nested_maps
from rankxform.values import MOST_VALUES, check_plain, dataclass

from .derive import derive
from .mesh import DST_SIZES, SRC_SIZES, Parallel, override_sizes, parse_parallel
from .options import DeriveOptions
from .request import Derived, DeriveRequest, Extent
from .rules import Preset, load_preset, parse_rule
from .stages import StageLayers

_SIZES = {
    "data_parallel": "dp", "model_parallel": "mp", "pipeline_stage": "pp",
    "context_parallel": "cp", "expert_parallel": "ep",
}  # fmt: skip
_SYNONYMS = {
    "tensor_model_parallel_size": "model_parallel",
    "pipeline_model_parallel_size": "pipeline_stage",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "data_parallel_size": "data_parallel",
}  # fmt: skip
_OTHERS = (
    "context_parallel_algo", "expert_model_parallel", "expert_tensor_parallel_size",
    "optimizer_shard", "virtual_pipeline_model_parallel_size",
)  # fmt: skip
"""Keys of MindFormers that are no sizes, and are spelt much like one."""
_KNOWN_KEYS = {
    "": ("parallel", "parallel_config", "use_parallel", "run_mode"),
    "parallel": ("parallel_mode", "enable_parallel_optimizer", "parallel_optimizer_config"),
    "parallel.parallel_optimizer_config": (
        "parallel_optimizer_threshold",
        "optimizer_weight_shard_size",
        "gradient_accumulation_shard",
    ),
    "parallel_config": (*_SIZES, *_SYNONYMS, *_OTHERS, "use_seq_parallel", "vocab_emb_dp"),
}
"""Keys by which a strategy is derived, by the table that they stand in."""
_THRESHOLD = "parallel_optimizer_threshold"
_RUN_MODES = ("train", "finetune", "predict", "predict_with_train_model", "eval", "export")
_LIKENESS = 0.88
_SEMI_AUTO = (1, "1", "semi", "semi_auto", "semi_auto_parallel")


@dataclass(frozen=True)
class JobConfig:
    """What a configuration says of a job."""

    parallel: Parallel
    predict: bool  # it trains nothing
    # offset, interleave: of its layers over pipeline stages.
    offset: tuple[int, ...] = ()
    interleave: int = 1
    # load_checkpoint, src_strategy: what it loads, and that checkpoint's strategy.
    load_checkpoint: str | None = None
    src_strategy: str | None = None
    auto_trans: bool = False  # whether MindFormers is to convert it
    output_dir: str = "./output"  # where MindFormers puts what it writes


def parse_job_config(data: bytes, label: str) -> JobConfig:
    """Read a configuration; `label` is its name in messages. Raises UsageError."""
    document = _document(data, label)
    sizes, config = _table(document, "parallel_config", label), _table(document, "parallel", label)
    model = _table(_table(document, "model", label), "model_config", label)
    is_parallel = _flag(document, "use_parallel", True, label)
    _refuse_other_modes(is_parallel, sizes, config, label)
    optimizer = _table(config, "parallel_optimizer_config", label)
    tables = zip(_KNOWN_KEYS, (document, config, optimizer, sizes))
    for title, table in tables:
        _refuse_misspelt(title, table, label)
    for key, usual in _SYNONYMS.items():
        for table in (sizes, model):
            value = table.get(key)
            if value is not None and sizes.setdefault(usual, value) != value:
                raise UsageError(
                    f"{key} is {repr(value)}, {usual} is {sizes[usual]!r}", where=label
                )
    is_threshold_stated = optimizer.get(_THRESHOLD) is not None
    sizes_by_field = {f: sizes[key] for key, f in _SIZES.items() if sizes.get(key) is not None}
    for key, value in sizes_by_field.items():
        if type(value) is not int:
            raise UsageError(f"{key} is {repr(value)}; expected a number", where=label)
    if not is_parallel:
        sizes_by_field = {}
    return JobConfig(
        Parallel(
            **sizes_by_field,
            vocab_emb_dp=_flag(sizes, "vocab_emb_dp", True, label),
            use_seq_parallel=_flag(sizes, "use_seq_parallel", False, label),
            optimizer_shard=_optimizer_shard(config, optimizer, label),
            threshold=_number(optimizer, _THRESHOLD, 0, label) if is_threshold_stated else None,
        ),
        predict=_run_mode(document, label).startswith("predict"),
        offset=_offset(model, label),
        interleave=_interleave(config, model, label),
        load_checkpoint=_text(document, "load_checkpoint", label),
        src_strategy=_text(document, "src_strategy_path_or_dir", label),
        auto_trans=_flag(document, "auto_trans_ckpt", False, label),
        output_dir=_text(document, "output_dir", label) or "./output",
    )


def _run_mode(document: dict[str, Any], label: str) -> str:
    mode = str(document.get("run_mode", ""))
    if mode not in _RUN_MODES and (suggestion := did_you_mean(mode, _RUN_MODES)):
        raise UsageError(f"run_mode is {mode!r}{suggestion}", where=label)
    return mode


def _document(data: bytes, label: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            "PyYAML reads it, and is not installed",
            "pip install 'rankxform[yaml]'",
            "--dst-parallel, such as dp=2,mp=4,pp=2, in place of --dst-config",
            "for --src-config: rankxform strategy derive --shapes SRC --dst-parallel SIZES of its "
            "job -o A.ckpt, and --src-strategy A.ckpt",
            where=label,
        ) from None
    try:
        document = yaml.safe_load(data)
        check_plain(document, MOST_VALUES)
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:
        raise UsageError(f"not YAML: {error}", where=label) from None
    if not isinstance(document, dict) or "parallel_config" not in document:
        raise UsageError(
            "has no parallel_config; expected a MindFormers configuration", where=label
        )
    return document


def _refuse_other_modes(
    is_parallel: bool, sizes: Mapping[str, Any], config: Mapping[str, Any], label: str
) -> None:
    """Refuse what makes a strategy that is not derived from sizes."""
    mode = config.get("parallel_mode", 1)
    if is_parallel and mode not in _SEMI_AUTO:
        raise UsageError(
            f"parallel_mode is {mode!r}; a strategy can be derived for 1 (semi_auto_parallel) only",
            "compile the network, and give its strategy",
            where=label,
        )
    if sizes.get("expert_model_parallel", 1) not in (1, None):
        raise UsageError(
            f"expert_model_parallel is {sizes['expert_model_parallel']!r}, and experts that are "
            "sharded over two axes are not derived",
            "compile the network, and give its strategy",
            where=label,
        )
    if sizes.get("optimizer_shard") is True and config.get("enable_parallel_optimizer") is not True:
        raise UsageError(
            "parallel_config.optimizer_shard is true, parallel.enable_parallel_optimizer is not",
            "make them agree",
            where=label,
        )


def _refuse_misspelt(title: str, table: Mapping[str, Any], label: str) -> None:
    """Refuse what stands under a key that MindFormers does not know, and would ignore."""
    from difflib import get_close_matches

    known_keys = _KNOWN_KEYS[title]
    for key in table:
        matches = (
            get_close_matches(str(key), known_keys, 1, _LIKENESS) if key not in known_keys else []
        )
        if matches and matches[0] not in _OTHERS:
            raise UsageError(
                f"{title}{title and '.'}{key} is no key of MindFormers",
                f"{matches[0]}: {table[key]!r}, if that was meant",
                where=label,
            )


def _optimizer_shard(
    config: Mapping[str, Any], optimizer: Mapping[str, Any], label: str
) -> bool | int:
    if not _flag(config, "enable_parallel_optimizer", False, label):
        return False
    key = "optimizer_weight_shard_size"
    sizes = {_number(table, key, -1, label) for table in (config, optimizer) if key in table}
    if len(sizes) > 1:
        sizes_text = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"{key} is {sizes_text}", "leave one out", where=label)
    size = next(iter(sizes), -1)
    return size if size > 1 else True  # MindSpore ignores 1


def _interleave(config: Mapping[str, Any], model: Mapping[str, Any], label: str) -> int:
    """Return in how many rounds stages get layers; 1 unless interleaving is switched on."""
    number = _number(model, "pp_interleave_num", 1, label)
    if not 1 <= number <= 1 << 10:
        raise UsageError(f"pp_interleave_num is {number}; expected 1 to 1,024", where=label)
    pipeline = _table(config, "pipeline_config", label)
    return number if _flag(pipeline, "pipeline_interleave", False, label) else 1


def _offset(model: Mapping[str, Any], label: str) -> tuple[int, ...]:
    """Return the layers that stages have beyond an even share, round after round."""
    offset = model.get("offset")
    if offset in (None, 0):
        return ()
    rows = offset if isinstance(offset, list) else [offset]
    if any(isinstance(n, list) for row in rows if isinstance(row, list) for n in row):
        raise UsageError(f"offset is {repr(offset)}; expected a list of numbers", where=label)
    flat = [n for row in rows for n in (row if isinstance(row, list) else [row])]
    if not isinstance(offset, list) or not all(type(n) is int for n in flat):
        raise UsageError(f"offset is {repr(offset)}; expected a list of numbers", where=label)
    return tuple(flat) if any(flat) else ()


def _table(document: Mapping[str, Any], key: str, label: str) -> dict[str, Any]:
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{key} is {repr(value)}; expected a table", where=label)
    return dict(value)


def _flag(table: Mapping[str, Any], key: str, default: bool, label: str) -> bool:
    value = table.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{key} is {repr(value)}; expected True or False", where=label)
    return value


def _number(table: Mapping[str, Any], key: str, default: int, label: str) -> int:
    value = table.get(key)
    if value is None:
        return default
    if type(value) is not int:
        raise UsageError(f"{key} is {repr(value)}; expected a number", where=label)
    return value


def _text(table: Mapping[str, Any], key: str, label: str) -> str | None:
    value = table.get(key)
    if value in (None, ""):
        return None
    if not isinstance(value, str):
        raise UsageError(f"{key} is {repr(value)}; expected a path", where=label)
    return value


SAME = "same"


def derive_request(options: DeriveOptions) -> DeriveRequest | None:
    """Read what a derivation needs besides the source; None if none is asked for.

    Raises UsageError.
    """
    if not options.derives:
        return None
    src_config = _config("src", options)
    dst_config = _config("dst", options)
    src, dst, keep_mesh = _sizes(options, src_config, dst_config)
    preset = _preset(options)
    request = DeriveRequest(
        source=None,
        src=src,
        dst=dst,
        keep_mesh=keep_mesh,
        keep_stages=options.dst_parallel == SAME,
        preset=preset,
        rules=tuple(parse_rule(text) for text in options.rule),
        opt_on=_expressions(options, "opt_on"),
        opt_off=_expressions(options, "opt_off"),
        unsharded=frozenset([options.unsharded] if options.unsharded else []),
        predict=options.predict or (dst_config is not None and dst_config.predict),
        places=_places(options, preset, dst_config),
        src_flag="--src-config" if options.src_parallel is None and src_config else SRC_SIZES,
        dst_flag="--dst-config" if dst_config else DST_SIZES,
    ).with_threshold()
    if src is None or src_config is None:
        return request
    return replace(request, src=replace(src, threshold=src.threshold_bytes // 1024))


def source_request(options: DeriveOptions) -> DeriveRequest:
    """Read what the strategy of a source is derived from, of which --src-config has the sizes.

    Raises UsageError.
    """
    assert options.src_config is not None
    config, preset = _config("src", options), _preset(options)
    assert config is not None
    return DeriveRequest(
        source=None,
        dst=override_sizes(config.parallel, {"threshold": options.src_threshold}),
        preset=preset,
        rules=tuple(parse_rule(text) for text in options.rule),
        opt_on=_expressions(options, "opt_on"),
        opt_off=_expressions(options, "opt_off"),
        unsharded=frozenset([options.unsharded] if options.unsharded else []),
        places=_places(replace(options, layers_per_stage=()), preset, config),
        src_flag="--src-config",
        dst_flag="--src-config",
    )


def _config(side: str, options: DeriveOptions) -> JobConfig | None:
    path, sizes = getattr(options, f"{side}_config"), getattr(options, f"{side}_parallel")
    if path is None:
        return None
    if sizes is not None:
        raise UsageError(f"--{side}-config and --{side}-parallel: give one of them")
    return read_config(path)


def read_config(path: str) -> JobConfig:
    """Read a MindFormers configuration. Raises UsageError."""
    if not Path(path).is_file():
        raise UsageError("no such configuration file", where=path)
    return parse_job_config(read_bytes(Path(path)), path)


def _sizes(
    options: DeriveOptions, src_config: JobConfig | None, dst_config: JobConfig | None
) -> tuple[Parallel | None, Parallel, bool]:
    """Return the sizes of both jobs, and whether the mesh of a stage stays as it is."""
    src = src_config.parallel if src_config else None
    if options.src_parallel is not None:
        src = parse_parallel(options.src_parallel, "--src-parallel")
    if options.src_threshold is not None:
        src = replace(src or Parallel(), threshold=options.src_threshold)
    text = options.dst_parallel or ""
    keep_mesh = text == SAME or text.startswith(SAME + ",")
    if dst_config:
        dst = dst_config.parallel
    elif keep_mesh:
        dst = parse_parallel(text[len(SAME) + 1 :], "--dst-parallel")
        if dst != Parallel(pp=dst.pp):
            raise UsageError(f"--dst-parallel {text!r}: with same, only pp may change")
        _check_same(options)
    else:
        dst = parse_parallel(text, "--dst-parallel")
    overrides = {"optimizer_shard": _shard(options.optimizer_shard), "threshold": options.threshold}
    return src, override_sizes(dst, overrides), keep_mesh


def _check_same(options: DeriveOptions) -> None:
    """Refuse options that say nothing where the mesh stays as it is."""
    idle = ["rule", "unsharded", "src_parallel"]
    if options.optimizer_shard is None:
        idle += ["threshold", "src_threshold", "opt_on", "opt_off"]
    if options.dst_parallel == SAME:
        idle += ["layers_per_stage"]
        idle += ["preset", "unproven"] if options.optimizer_shard is None else []
    for name in idle:
        if not is_default(options, name):
            flag = flag_of(name)
            raise UsageError(f"{flag} changes nothing with --dst-parallel same", "leave it out")


def _shard(text: str | None) -> bool | int | None:
    shards_by_word = {None: None, "on": True, "off": False}
    if text in shards_by_word:
        return shards_by_word[text]
    if text is None or not text.isdecimal() or not 2 <= int(text[:9]) <= 1 << 20:
        raise UsageError(
            f"--optimizer-shard {text!r}: expected on, off, or a number from 2 on (MindSpore "
            "ignores 1)"
        )
    return int(text)


def _preset(options: DeriveOptions) -> Preset | None:
    if options.preset is None:
        return None
    preset = load_preset(options.preset)
    if not preset.proven and not options.unproven:
        raise UsageError(
            f"no compiled strategy has confirmed it ({preset.evidence})",
            "--unproven, which uses it; compare the result with a compiled strategy",
            where=f"--preset {options.preset}",
        )
    return preset


def _expressions(options: DeriveOptions, name: str) -> tuple[re.Pattern[str], ...]:
    flag = flag_of(name)
    return tuple(compile_regex(text, flag) for text in getattr(options, name))


def _places(options: DeriveOptions, preset: Preset | None, config: JobConfig | None) -> StageLayers:
    """Return what is said of the pipeline: by an option, a rules file, or a configuration."""
    offset, interleave = (preset.offset, preset.interleave) if preset else ((), 0)
    if preset and options.layers_per_stage and (offset or interleave):
        raise UsageError(f"--layers-per-stage goes without offset and interleave in {preset.label}")
    if config and not options.layers_per_stage:
        offset, interleave = offset or config.offset, interleave or config.interleave
    return StageLayers(
        None,
        options.layers_per_stage,
        offset,
        interleave or 1,
        config is not None,
        preset.stage_rules if preset else (),
    )


def derive_from(request: DeriveRequest, source: Strategy, schemas: Mapping[int, Schema]) -> Derived:
    """Derive the destination's strategy; `schemas` are the source files', by global rank.

    Raises DerivationError, UsageError.
    """
    label = "derived from "
    if isinstance(source, WholeStrategy):
        check_mesh_exists(request)
        return derive(
            replace(request, extents=whole_extents(schemas.values())),
            f"{label}the checkpoint, for {request.dst} of {request.dst_flag}",
        )
    extents = full_extents(source, schemas)
    source, absent = _present(source, extents, schemas)
    label += f"{source.label.removeprefix(label)}, for {request.dst} of {request.dst_flag}"
    derived = derive(complete_request(request, source, extents), label)
    if not absent:
        return derived
    assumption = f"Left out, because no file holds them: {summarize_names(absent, 4)}."
    return replace(derived, assumptions=(*derived.assumptions, assumption))


def check_mesh_exists(request: DeriveRequest) -> None:
    """Refuse to keep the mesh of a source that has none. Raises UsageError."""
    if request.keep_mesh:
        raise UsageError(
            "--dst-parallel same: there is no source strategy whose mesh could stay",
            "give the source's strategy, or the sizes, such as dp=2,mp=4",
        )


def _present(
    source: Strategy, extents: Mapping[str, Extent], files: Collection[int]
) -> tuple[Strategy, list[str]]:
    """Return a strategy of the parameters that files hold, and the names of the others.

    What no file holds cannot be converted, and its shape is not known. `files` are the ranks whose
    files were seen. Raises CheckpointError where a whole stage is missing.
    """
    missing = [[r for r in source.ranks_in(s) if r not in files] for s in range(len(source.stages))]
    for stage, ranks in enumerate(missing):
        if len(ranks) == source.stage_size:
            raise CheckpointError(
                f"no rank of pipeline stage {stage} of {source.label} (ranks "
                f"{format_ranges(ranks)}) has a file",
                "bring the missing rank folders",
            )
    absent = [
        name
        for name, stages in source.stages_of.items()
        if source.states.base_name(name) not in extents
        and name not in extents
        and not any(missing[stage] for stage in stages)
    ]
    if not absent or len(absent) == len(source.stages_of):
        return source, []
    absent_names = set(absent)
    stages = tuple(
        {n: layout for n, layout in layouts.items() if n not in absent_names}
        for layouts in source.stages
    )
    return replace(source, stages=stages), absent


def complete_request(
    request: DeriveRequest, source: Strategy, extents: Mapping[str, Extent]
) -> DeriveRequest:
    """Return a question with its source and the full extents that are known.

    Raises UsageError where the sizes of the source's job are missing.
    """
    if request.src is None and not request.keep_mesh:
        raise UsageError(
            "the sizes of the source's job are not given, and explain its strategy",
            "--src-parallel, such as dp=8,mp=4,pp=2",
            "--src-config FILE",
            "--dst-parallel same"
            + (f" in the place of {request.dst_flag}" if request.dst_flag != DST_SIZES else "")
            + ", if the mesh of a stage stays as it is",
            where=source.label,
        )
    source = fold_nested_maps(source, {name: extent.shape for name, extent in extents.items()})
    check_folded(source)
    dst = request.dst
    if request.keep_mesh:
        pp = len(source.stages) if request.keep_stages else dst.pp
        dst = replace(dst, dp=source.stage_size, pp=pp)
    return replace(request, source=source, extents=extents, dst=dst)


def whole_extents(schemas: Iterable[Schema]) -> dict[str, Extent]:
    """Return the extents of whole parameters, as the files have them."""
    return {
        name: Extent(shape, content_bytes(dtype, shape))
        for schema in dict.fromkeys(schemas)
        for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes)
    }


def full_extents(source: Strategy, schemas: Mapping[int, Schema]) -> dict[str, Extent]:
    """Return the full extents of listed parameters, from the slices in the files."""
    extents: dict[str, Extent] = {}
    handled_schemas: set[tuple[int, Schema]] = set()
    for rank, schema in schemas.items():
        stage = source.stage_of(rank)
        if stage >= len(source.stages) or (stage, schema) in handled_schemas:
            continue
        handled_schemas.add((stage, schema))
        for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes):
            layout = source.stages[stage].get(name)
            if layout is None or name in extents:
                continue
            try:
                full = layout.fold(shape, slices=True).full_shape(shape)
            except RequestError as error:
                raise RequestError(f"{name!r}: {error}", where=source.label) from error
            extents[name] = Extent(full, content_bytes(dtype, full))
    return extents
