"""The part of a MindFormers configuration that says how a job is sharded, and what it loads.

Only keys that can change a layout are read: ``use_parallel``, ``run_mode``, ``parallel_config``,
``parallel``, some of ``model.model_config``, and where checkpoints are. Values that would mean a
strategy of another kind are refused. PyYAML is imported here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr
from typing import Any

from rankxform.errors import UsageError
from rankxform.values import dataclass

from .mesh import Parallel

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
    "optimizer_shard", "use_seq_parallel", "virtual_pipeline_model_parallel_size", "vocab_emb_dp",
)  # fmt: skip
"""Keys of MindFormers that are no sizes, and are spelt much like one."""
_LIKENESS = 0.88
_SEMI_AUTO = (1, "1", "semi", "semi_auto", "semi_auto_parallel")


@dataclass(frozen=True)
class JobConfig:
    """What a configuration says of a job.

    predict: it trains nothing. offset, interleave: of its layers over pipeline stages.
    load_checkpoint, src_strategy: what it loads, and that checkpoint's strategy. auto_trans:
    whether MindFormers is to convert it. output_dir: where MindFormers puts what it writes.
    """

    parallel: Parallel
    predict: bool
    offset: tuple[int, ...] = ()
    interleave: int = 1
    load_checkpoint: str | None = None
    src_strategy: str | None = None
    auto_trans: bool = False
    output_dir: str = "./output"


def parse_job_config(data: bytes, label: str) -> JobConfig:
    """Read a configuration; `label` is its name in messages. Raises UsageError."""
    document = _document(data, label)
    sizes, config = _table(document, "parallel_config", label), _table(document, "parallel", label)
    model = _table(_table(document, "model", label), "model_config", label)
    _refuse_other_modes(document, sizes, config, label)
    _refuse_misspelt(sizes, label)
    for key, usual in _SYNONYMS.items():
        for table in (sizes, model):
            value = table.get(key)
            if value is not None and sizes.setdefault(usual, value) != value:
                raise UsageError(
                    f"{key} is {repr(value)}, {usual} is {sizes[usual]!r}", where=label
                )
    sizes_by_field = {f: sizes[key] for key, f in _SIZES.items() if sizes.get(key) is not None}
    for key, value in sizes_by_field.items():
        if type(value) is not int:
            raise UsageError(f"{key} is {repr(value)}; expected a number", where=label)
    if document.get("use_parallel") is False:
        sizes_by_field = {}
    optimizer = _table(config, "parallel_optimizer_config", label)
    return JobConfig(
        Parallel(
            **sizes_by_field,
            vocab_emb_dp=_flag(sizes, "vocab_emb_dp", True, label),
            use_seq_parallel=_flag(sizes, "use_seq_parallel", False, label),
            optimizer_shard=_optimizer_shard(config, optimizer, label),
            threshold=_number(optimizer, "parallel_optimizer_threshold", 64, label),
        ),
        predict=str(document.get("run_mode", "")).startswith("predict"),
        offset=_offset(model, label),
        interleave=_interleave(config, model, label),
        load_checkpoint=_text(document, "load_checkpoint", label),
        src_strategy=_text(document, "src_strategy_path_or_dir", label),
        auto_trans=_flag(document, "auto_trans_ckpt", False, label),
        output_dir=_text(document, "output_dir", label) or "./output",
    )


def _document(data: bytes, label: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            "PyYAML reads it, and is not installed",
            "pip install 'rankxform[yaml]'",
            "--src-parallel and --dst-parallel, such as dp=2,mp=4,pp=2",
            where=label,
        ) from None
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(f"not YAML: {error}", where=label) from None
    if not isinstance(document, dict) or "parallel_config" not in document:
        raise UsageError(
            "has no parallel_config; expected a MindFormers configuration", where=label
        )
    return document


def _refuse_other_modes(
    document: Mapping[str, Any],
    sizes: Mapping[str, Any],
    config: Mapping[str, Any],
    label: str,
) -> None:
    """Refuse what makes a strategy that is not derived from sizes."""
    mode = config.get("parallel_mode", 1)
    if document.get("use_parallel") is not False and mode not in _SEMI_AUTO:
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


def _refuse_misspelt(sizes: Mapping[str, Any], label: str) -> None:
    """Refuse a size under a key that MindFormers does not know, and would ignore."""
    from difflib import get_close_matches

    known_keys = (*_SIZES, *_SYNONYMS, *_OTHERS)
    for key in sizes:
        matches = (
            get_close_matches(str(key), known_keys, 1, _LIKENESS) if key not in known_keys else []
        )
        if matches and matches[0] not in _OTHERS:
            raise UsageError(
                f"parallel_config.{key} is no key of MindFormers",
                f"{matches[0]}: {sizes[key]!r}, if that was meant",
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
