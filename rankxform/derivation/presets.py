"""The rules of known networks, which come with rankxform, and users' own rules files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rankxform.errors import UsageError, nearest
from rankxform.storage.posix import read_bytes

from . import rules_toml
from .rules import Preset

FOLDER = Path(__file__).resolve().parent.parent / "presets"


def names() -> list[str]:
    """Return the names of the presets that come with rankxform."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def fitting(parameters: Collection[str]) -> list[str]:
    """Return the presets that come with rankxform and have a rule for each of these parameters."""
    return [
        name
        for name in (names() if parameters else ())
        for rules in [load(name).rules]
        if all(any(rule.names.search(parameter) for rule in rules) for parameter in parameters)
    ]


def load(name: str) -> Preset:
    """Return the preset of that name, or of a file whose name ends in ``.toml``."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UsageError("no such rules file", where=path)
        return rules_toml.parse(read_bytes(path), str(path), load)
    if name not in names():
        raise UsageError(
            f"there is no preset {name!r}{nearest(name, names())}",
            details=f"there are {', '.join(names())}, and your own rules files (*.toml)",
        )
    return rules_toml.parse(read_bytes(FOLDER / f"{name}.toml"), f"preset {name}")
