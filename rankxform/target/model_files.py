"""A model's small files, its config.json and tokenizer: whether they are of the tensors there.

People write them by hand, copy them from elsewhere and change them, so that another content alone
proves nothing. They are another model's where architectures differ, or a size that tensors refute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankxform.errors import RankxformError, StorageError
from rankxform.geometry.box import Shape
from rankxform.layout.names import first_texts
from rankxform.publish import files
from rankxform.publish.folder_records import MANIFEST_NAME, read_manifest
from rankxform.statements import ACCEPT_CONTRADICTIONS
from rankxform.storage.posix import read_bytes
from rankxform.storage.store import is_path, scheme_of
from rankxform.storage.user_files import CONFIG, companion_names, parse_config
from rankxform.target.target import Conversion
from rankxform.values import pattern_on_use

_EMBEDDING = pattern_on_use(r"(?P<parent>(?:.*\.)?)(?:embed_tokens|wte|word_embeddings)\.weight")
_OTHER_WIDTH = ("word_embed_proj_dim", "embedding_size")
"""Keys of models whose embedding is not as wide as their layers."""
_MANY_WORDS = 1000
"""Of fewer words no vocabulary is padded."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def check_model_files(conversion: Conversion) -> list[str]:
    """Refuse to write tensors beside another model's config.json; return what to know.

    Files that an earlier run copied there go with its tensors (`publish.files`). Raises
    StorageError.
    """
    request, target = conversion.request, conversion.target
    if request.dst is None or scheme_of(request.dst) or not target.form.configured:
        return []
    folder = target.folder
    existing_names = [n for n in companion_names(folder) if n not in target.companions]
    shapes = {parameter.name: parameter.shape for parameter in target.planner.selection.parameters}
    model_config = own_config(conversion)
    is_part = bool(request.include or request.exclude)
    copied = [name for name in existing_names if name in _unchanged_copies(folder)]
    if copied and request.overwrite and not is_of(folder, model_config, shapes):
        return [f"{folder}: {first_texts(copied)} go with the tensors for which they were copied"]
    existing_names = [name for name in existing_names if name not in copied]
    if CONFIG in existing_names and not request.accepts(ACCEPT_CONTRADICTIONS, CONFIG):
        reason = of_another(folder, model_config, shapes, is_part=is_part)
        if reason:
            raise StorageError(
                f"is of another model than what is written here: {reason}",
                "remove it",
                "choose another folder",
                f"--accept {ACCEPT_CONTRADICTIONS}:config.json keeps it",
                where=folder / CONFIG,
            )
    return (
        [f"{folder}: {first_texts(existing_names)} lay there already, and stay as they are"]
        if existing_names
        else []
    )


def stale(conversion: Conversion) -> frozenset[str]:
    """Return the small files of an earlier model that are to be removed with its tensors."""
    request, target = conversion.request, conversion.target
    if request.dst is None or not target.form.configured or not request.overwrite:
        return frozenset()
    shapes = {parameter.name: parameter.shape for parameter in target.planner.selection.parameters}
    if is_of(target.folder, own_config(conversion), shapes):
        return frozenset()
    return _unchanged_copies(target.folder)


def _unchanged_copies(folder: Path) -> frozenset[str]:
    """Return the small files that an earlier run copied into a folder, and nobody has changed."""
    with suppress(StorageError):
        if (folder / MANIFEST_NAME).is_file():
            return files.copied(folder, read_manifest(folder))
    return frozenset()


def is_of(
    folder: Path, model_config: tuple[Mapping[str, Any], str], shapes: Mapping[str, Shape]
) -> bool:
    """Tell whether a folder's config.json is of some tensors for sure: of the same architecture, or
    of the size of their embedding."""
    if not (folder / CONFIG).is_file() or of_another(folder, model_config, shapes, is_part=True):
        return False
    return bool(model_config[0]) or any(_EMBEDDING().fullmatch(name) for name in shapes)


def own_config(conversion: Conversion) -> tuple[Mapping[str, Any], str]:
    """Return the configuration of the model that is converted, and where it is; {} if none is."""
    request, source, target = conversion.request, conversion.source, conversion.target
    with suppress(RankxformError):
        if CONFIG in target.companions:
            label = request.config or f"{request.like}/{CONFIG}"
            return parse_config(target.companions[CONFIG], label), label
        path = Path(source.where.path) / CONFIG
        if source.form.configured and request.map is None and is_path(source.where.path):
            return parse_config(read_bytes(path), str(path)), str(path)
    return {}, ""


def of_another(
    folder: Path,
    model_config: tuple[Mapping[str, Any], str],
    shapes: Mapping[str, Shape],
    *,
    is_part: bool = False,
) -> str:
    """Return why a folder's config.json is not of some tensors, in words; "" if it may be.

    model_config: the configuration that the tensors should have, and where it is. is_part: the
    tensors are not all that the model has.
    """
    path = folder / CONFIG
    try:
        folder_config = parse_config(read_bytes(path), str(path))
    except RankxformError as error:
        return error.parts.what
    config, label = model_config
    for key in ("architectures", "model_type"):
        if folder_config.get(key) and config.get(key) and folder_config[key] != config[key]:
            return f"{key} is {folder_config[key]!r}, and {config[key]!r} in {label}"
    return "" if folder_config == config else refuted(folder_config, shapes, is_part=is_part)


def refuted(config: Mapping[str, Any], shapes: Mapping[str, Shape], *, is_part: bool) -> str:
    """Return which size of a configuration some tensors refute, in words; "" if none.

    Models of several parts, such as an encoder, have sizes of which it is not known here what they
    mean, and are not judged.

    >>> refuted({"vocab_size": 8}, {"model.embed_tokens.weight": (16, 4)}, is_part=False)
    "vocab_size is 8, and 'model.embed_tokens.weight' has shape [16, 4]"
    """
    inner = config.get("text_config")
    text_config = inner if isinstance(inner, Mapping) else config
    embeddings = {name: shape for name, shape in shapes.items() if _EMBEDDING().fullmatch(name)}
    if _has_parts(config) or len({*embeddings.values()}) != 1:
        return ""
    name, shape = next(iter(embeddings.items()))
    if len(shape) != 2:
        return ""
    rows, columns = shape
    words, width = text_config.get("vocab_size"), text_config.get("hidden_size")
    if isinstance(words, int) and words != rows and not _is_padded(words, rows, text_config):
        return f"vocab_size is {words}, and {name!r} has shape {list(shape)}"
    if isinstance(width, int) and width != columns and not any(map(text_config.get, _OTHER_WIDTH)):
        return f"hidden_size is {width}, and {name!r} has shape {list(shape)}"
    match = _EMBEDDING().fullmatch(name)
    assert match is not None
    layer = re.compile(re.escape(match["parent"]) + r"(?:layers|h|blocks)\.(\d+)\.")
    layer_numbers = {number[1] for tensor_name in shapes if (number := layer.match(tensor_name))}
    key = next((key for key in _LAYERS if isinstance(text_config.get(key), int)), "")
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
        return f"{key} is {text_config[key]}, and there are {len(layer_numbers)} layers"
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
