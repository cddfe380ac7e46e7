"""What a config.json states of a model, beside the tensors that lie with it.

A folder that was cut lists in its index what it still has: its configuration alone tells what it
lacks. Where a mapping table is for the architecture, each tensor has the shape that its rules make
of the configuration's sizes; of other models what `refuted` judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rankxform.errors import RankxformError
from rankxform.formats.container import FLOAT8
from rankxform.geometry.box import Shape
from rankxform.operations.options import TYPES, WRITTEN_OUT
from rankxform.operations.vocabulary import MTP_LAYERS, is_padding
from rankxform.planning.catalog import Catalog
from rankxform.statements import Finding, as_notice, as_warning
from rankxform.values import NamedTuple, pattern_on_use

if TYPE_CHECKING:
    from rankxform.operations.map import ModelSizes, NameMap

EMBEDDING = pattern_on_use(r"(?P<parent>(?:.*\.)?)(?:embed_tokens|wte|word_embeddings)\.weight")
_OTHER_WIDTH = ("word_embed_proj_dim", "embedding_size")
"""Keys of models whose embedding is not as wide as their layers."""
_MANY_WORDS = 1000
"""Of fewer words no vocabulary is padded."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys that give how many experts a layer has."""
_MOST_TIMES = 16
"""How many layers may be stated for each tensor that is there."""
_EXPERT = pattern_on_use(r"\.experts\.(\d+)\.")
_LAYER = pattern_on_use(r"model\.layers\.(\d+)\.")


class StatedModel(NamedTuple):
    """What lies beside a source's tensors."""

    config: Mapping[str, Any]
    label: str  # where it is
    sizes: ModelSizes | None  # of the table for its architecture; None: there is none


def findings_of(model: StatedModel, catalog: Catalog) -> Iterator[Finding]:
    """Yield what a folder's weights are otherwise than its configuration states."""
    config, label, sizes = model
    weights = [p for p in catalog.parameters if p.is_weight]
    shapes = {parameter.name: parameter.shape for parameter in weights}
    mapping: NameMap | None = None
    if sizes is not None:
        from rankxform.operations.map import NameMap

        with suppress(RankxformError):  # a size is of another type
            ranges = [block.range for block in sizes.table.blocks.values()]
            ranges += [r for rule in sizes.table.rules for r in rule.ranges]
            largest = max(sizes.number(size_range.stop, {}) for size_range in ranges)
            if largest > _MOST_TIMES * len(shapes):  # names are not worked out for each
                text = f"states {largest:,} layers or experts, beside {len(shapes):,} tensors"
                yield as_warning(f"{label}: {text}")
                return
            mapping = NameMap(sizes, {})
    is_quantized = False
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        from rankxform.operations.dequantize import find_quantized

        entries = {p.name: (p.dtype, p.shape) for p in catalog.parameters}
        is_quantized = bool(find_quantized(entries)) or any(p.dtype in FLOAT8 for p in weights)
        other_schemes = ("kv_cache_scheme", "sparsity_config")  # of what is no weight
        is_of_weights = not (
            isinstance(quantization, dict) and any(map(quantization.get, other_schemes))
        )
        is_left_over = not any(
            "scale" in name or "Int" in dtype for name, (dtype, _) in entries.items()
        )
        if is_of_weights and is_left_over and not is_quantized:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else ""
            yield as_warning(
                f"{label}: states quantization_config{f' ({method})' if method else ''}, and all "
                "matrices are floating; left over from before a merge?"
            )
    if is_quantized:  # its matrices have other names, and other shapes
        pass
    elif mapping is not None and mapping.knows(shapes):
        yield from map(as_warning, mapping.contradictions_of(shapes))
    elif text := refuted(config, shapes, is_part=False) or _unlike_heads(config, shapes):
        yield as_warning(f"{label}: {text}")
    dtype, types = config.get("torch_dtype", config.get("dtype")), {p.dtype for p in weights}
    stored = TYPES.get(WRITTEN_OUT.get(dtype, "")) if isinstance(dtype, str) else None
    if stored is not None and len(types) == 1 and types <= {*TYPES.values()} - {stored}:
        yield as_notice(f"{label}: states {dtype}, and all weights are {min(types)}")
    numbers = (_LAYER().match(name) for name in shapes)
    layers = {int(number[1]) for number in numbers if number}
    count, layer_count = config.get(MTP_LAYERS), config.get("num_hidden_layers")
    is_stated = type(count) is type(layer_count) is int and count and layers
    if is_stated and not any(number >= (layer_count or 0) for number in layers):
        text = f"states {MTP_LAYERS} {count}, and the checkpoint has none of these layers"
        yield as_notice(f"{label}: {text}, as Transformers saves it")


def refuted(config: Mapping[str, Any], shapes: Mapping[str, Shape], *, is_part: bool) -> str:
    """Return which size of a configuration some tensors refute, in words; "" if none.

    Models of several parts, such as an encoder, have sizes of which it is not known here what they
    mean, and are not judged.

    >>> refuted({"vocab_size": 8}, {"model.embed_tokens.weight": (16, 4)}, is_part=False)
    "vocab_size is 8, and 'model.embed_tokens.weight' has shape [16, 4]"
    """
    inner = config.get("text_config")
    text_config = inner if isinstance(inner, Mapping) else config
    embeddings = {name: shape for name, shape in shapes.items() if EMBEDDING().fullmatch(name)}
    if _has_parts(config) or len({*embeddings.values()}) != 1:
        return ""
    name, shape = next(iter(embeddings.items()))
    if len(shape) != 2:
        return ""
    rows, columns = shape
    words, width = text_config.get("vocab_size"), text_config.get("hidden_size")
    if (
        type(words) is int
        and words != rows
        and not (rows < words and is_padding(rows, words))
        and not _is_padded(words, rows, text_config)
    ):
        return f"vocab_size is {words}, and {name!r} has shape {list(shape)}"
    if type(width) is int and width != columns and not any(map(text_config.get, _OTHER_WIDTH)):
        return f"hidden_size is {width}, and {name!r} has shape {list(shape)}"
    match = EMBEDDING().fullmatch(name)
    assert match is not None
    layer = re.compile(re.escape(match["parent"]) + r"(?:layers|h|blocks)\.(\d+)\.")
    layer_numbers = {number[1] for tensor_name in shapes if (number := layer.match(tensor_name))}
    key = next((key for key in _LAYERS if type(text_config.get(key)) is int), "")
    extra_layer_count = text_config.get("num_nextn_predict_layers")
    max_layer_count = (
        text_config[key] + (extra_layer_count if isinstance(extra_layer_count, int) else 0)
        if key
        else 0
    )
    if (
        layer_numbers
        and key
        and (
            len(layer_numbers) > max_layer_count
            or (len(layer_numbers) < text_config[key] and not is_part)
        )
    ):
        extra_text = f" and {MTP_LAYERS} {extra_layer_count}" if extra_layer_count else ""
        return f"{key} is {text_config[key]}{extra_text}, and there are {len(layer_numbers)} layers"
    architectures = config.get("architectures")
    if (
        not is_part
        and text_config.get("tie_word_embeddings") is False
        and isinstance(architectures, list)
    ):
        is_causal = any(str(name).endswith("ForCausalLM") for name in architectures)
        has_head = any("lm_head" in n or not n.startswith("model.") for n in shapes)
        if is_causal and not has_head:
            return f"tie_word_embeddings is false, and there is no head beside {name!r}"
    counts = [(k, text_config[k]) for k in _EXPERTS if type(text_config.get(k)) is int]
    experts_by_layer: dict[str, set[str]] = {}
    for tensor_name in shapes if len(counts) == 1 else ():
        if expert := _EXPERT().search(tensor_name):
            experts_by_layer.setdefault(tensor_name[: expert.start()], set()).add(expert[1])
    for layer_name, experts in experts_by_layer.items():
        expert_key, count = counts[0]
        if len(experts) > count or (len(experts) < count and not is_part):
            return f"{expert_key} is {count}, and {layer_name!r} has {len(experts)} experts"
    return ""


def _unlike_heads(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str:
    """Return which keys have other rows than the values, or do not divide the queries'."""
    for name, shape in shapes.items() if "v_head_dim" not in config else ():
        if not name.endswith("k_proj.weight") or len(shape) != 2:
            continue
        module = name.removesuffix("k_proj.weight")
        queries, values = (shapes.get(f"{module}{kind}_proj.weight", shape) for kind in "qv")
        if values[:1] != shape[:1] or (shape[0] and queries[0] % shape[0]):
            return (
                f"{name!r} has {shape[0]} rows, the values {values[0]} and the queries {queries[0]}"
            )
    return ""


def _has_parts(config: Mapping[str, Any]) -> bool:
    """Tell whether a model has an encoder, or towers beside the text's."""
    towers = (key for key, value in config.items() if key.endswith("_config") and value)
    plain = ("text_config", "quantization_config", "generation_config")
    kinds = ("encoder_layers", "decoder_layers", "is_encoder_decoder", "encoder")
    return any(map(config.get, kinds)) or any(key not in plain for key in towers)


def _is_padded(words: int, rows: int, text_config: Mapping[str, Any]) -> bool:
    """Tell whether an embedding has rows of no word: up to a multiple, or a few special ones."""
    extra_rows = rows - words
    if rows == text_config.get("embedding_size"):
        return True
    return (
        words > _MANY_WORDS and 0 < extra_rows < _MANY_WORDS and (extra_rows <= 8 or rows % 64 == 0)
    )
