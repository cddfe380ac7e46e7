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
from rankxform.publish import companions
from rankxform.publish.target import MANIFEST_NAME, manifest
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage import maps
from rankxform.storage.posix import read_bytes
from rankxform.storage.store import is_path, scheme_of

from .target import Target

_EMBEDDING = re.compile(r"(?P<parent>(?:.*\.)?)(?:embed_tokens|wte|word_embeddings)\.weight")
_OTHER_WIDTH = ("word_embed_proj_dim", "embedding_size")
"""Keys of models whose embedding is not as wide as their layers."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def check_model_files(request: Request, source: Source, target: Target) -> list[str]:
    """Refuse to write tensors beside another model's config.json; return what to know.

    Files that an earlier run copied there are not looked at: they go with its tensors. Raises
    StorageError.
    """
    if request.dst is None or scheme_of(request.dst) or not target.form.configured:
        return []
    folder = target.folder
    others = [n for n in maps.companion_names(folder) if n not in target.companions]
    ours = _copied(folder)
    others = [name for name in others if name not in ours]
    if maps.CONFIG in others:
        shapes = {one.name: one.shape for one in target.planner.selection.parameters}
        is_part = bool(request.include or request.exclude)
        why = of_another(folder, own_config(request, source, target), shapes, is_part=is_part)
        if why:
            raise StorageError(
                f"is of another model than what is written here: {why}",
                "remove it",
                "choose another folder",
                "--like MODEL and --overwrite, which replaces it",
                where=folder / maps.CONFIG,
            )
    names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    return [f"{folder}: {names} lay there already, and stay as they are"] if others else []


def _copied(folder: Path) -> frozenset[str]:
    """Return the small files that an earlier run copied into a folder, and nobody has changed."""
    with suppress(StorageError):
        if (folder / MANIFEST_NAME).is_file():
            return companions.copied(folder, manifest(folder))
    return frozenset()


def own_config(request: Request, source: Source, target: Target) -> tuple[Mapping[str, Any], str]:
    """Return the configuration of the model that is converted, and where it is; {} if none is."""
    with suppress(RankxformError):
        if maps.CONFIG in target.companions:
            label = request.config or f"{request.like}/{maps.CONFIG}"
            return maps.parsed_config(target.companions[maps.CONFIG], label), label
        path = Path(source.where.path) / maps.CONFIG
        if source.form.configured and request.map is None and is_path(source.where.path):
            return maps.parsed_config(read_bytes(path), str(path)), str(path)
    return {}, ""


def of_another(
    folder: Path,
    own: tuple[Mapping[str, Any], str],
    shapes: Mapping[str, Shape],
    *,
    is_part: bool = False,
) -> str:
    """Return why a folder's config.json is not of some tensors, in words; "" if it may be.

    own: the configuration that the tensors should have, and where it is. is_part: the tensors are
    not all that the model has.
    """
    path = folder / maps.CONFIG
    try:
        there = maps.parsed_config(read_bytes(path), str(path))
    except RankxformError as error:
        return error.parts.what
    config, label = own
    for key in ("architectures", "model_type"):
        if there.get(key) and config.get(key) and there[key] != config[key]:
            return f"{key} is {there[key]!r}, and {config[key]!r} in {label}"
    return refuted(there, shapes, is_part=is_part)


def refuted(config: Mapping[str, Any], shapes: Mapping[str, Shape], *, is_part: bool) -> str:
    """Return which size of a configuration some tensors refute, in words; "" if none.

    >>> refuted({"vocab_size": 8}, {"model.embed_tokens.weight": (16, 4)}, is_part=False)
    "vocab_size is 8, and 'model.embed_tokens.weight' has shape [16, 4]"
    """
    inner = config.get("text_config")
    stated = inner if isinstance(inner, Mapping) else config
    for name, shape in shapes.items():
        match = _EMBEDDING.fullmatch(name)
        if not match or len(shape) != 2:
            continue
        keys = (
            ("vocab_size",) if any(map(stated.get, _OTHER_WIDTH)) else ("vocab_size", "hidden_size")
        )
        for key, size in zip(keys, shape):
            if isinstance(stated.get(key), int) and stated[key] != size:
                return f"{key} is {stated[key]}, and {name!r} has shape {list(shape)}"
        layer = re.compile(re.escape(match["parent"]) + r"(?:layers|h|blocks)\.(\d+)\.")
        found = {number[1] for other in shapes if (number := layer.match(other))}
        key = next((key for key in _LAYERS if isinstance(stated.get(key), int)), "")
        more = stated.get("num_nextn_predict_layers")
        most = stated[key] + (more if isinstance(more, int) else 0) if key else 0
        if found and key and (len(found) > most or (len(found) < stated[key] and not is_part)):
            return f"{key} is {stated[key]}, and there are {len(found)} layers"
    return ""
