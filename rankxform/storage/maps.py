"""The mapping tables that come with rankxform, users' own, and models' configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.errors import UsageError, did_you_mean

from .posix import read_bytes

if TYPE_CHECKING:
    from rankxform.formats.map_toml import MapTable

FOLDER = Path(__file__).resolve().parent.parent / "maps"
CONFIG = "config.json"
_MOST_BASES = 8
"""Tables that extend each other in a row."""


def map_names() -> list[str]:
    """Return the names of the tables that come with rankxform."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if not path.name.startswith("_"))


def load_map_table(name: str) -> MapTable:
    """Return the table of that name, or of a file whose name ends in ``.toml``.

    Raises UsageError.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UsageError("no such mapping table", where=path)
        return _load(path, str(path), ())
    if name not in map_names():
        raise UsageError(
            f"there is no map {name!r}{did_you_mean(name, map_names())}",
            details=f"there are {', '.join(map_names())}, and your own tables (*.toml)",
        )
    return _load(FOLDER / f"{name}.toml", f"map {name}", ())


def _load(path: Path, label: str, above: tuple[str, ...]) -> MapTable:
    from rankxform.formats.map_toml import parse_extends, parse_map_table

    data = read_bytes(path)
    bases = []
    for name in dict.fromkeys(parse_extends(data, label)):
        base = path.parent / f"{name}.toml"
        base = base if base.is_file() else FOLDER / f"{name}.toml"
        here = (*above, str(path.resolve()))
        if not base.is_file() or str(base.resolve()) in here or len(here) > _MOST_BASES:
            raise UsageError(f"extends {name!r}, which is no table beside it", where=label)
        bases.append(_load(base, label, here))
    return parse_map_table(data, label, tuple(bases))


_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "spiece.model",
    "sentencepiece*", "LICENSE*",
)  # fmt: skip
"""Files of a Hugging Face folder that belong to a model beside its tensors."""


def companions(folder: Path) -> dict[str, bytes]:
    """Return the small files that belong to a published model, by name. Raises UsageError."""
    contents = {name: read_bytes(folder / name) for name in companion_names(folder)}
    if CONFIG not in contents:
        raise UsageError(f"has no {CONFIG}", "give --like a published model", where=folder)
    return contents


def companion_names(folder: Path) -> list[str]:
    """Return the names of a model's small files in a folder."""
    paths = sorted({path for pattern in _COMPANIONS for path in folder.glob(pattern)})
    return [path.name for path in paths if path.is_file()]


def read_config_bytes(path: Path) -> bytes:
    """Return a model's configuration as it is. Raises UsageError."""
    if path.is_dir():
        path = path / CONFIG
    if not path.is_file():
        raise UsageError("no such configuration", where=path)
    return read_bytes(path)


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's configuration. Raises UsageError."""
    return parse_config(read_config_bytes(path), str(path))


def parse_config(data: bytes, path: str) -> dict[str, Any]:
    """Return a model's configuration, which `path` holds. Raises UsageError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}", where=path) from None
    if not isinstance(document, dict):
        raise UsageError("expected an object, as in a model's config.json", where=path)
    return document
