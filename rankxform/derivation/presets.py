"""The rules of known networks, which come with rankxform, and users' own rules files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rankxform.derivation.rules_toml import parse_rules
from rankxform.errors import UsageError, did_you_mean
from rankxform.storage.posix import read_bytes

from .rules import Preset

FOLDER = Path(__file__).resolve().parent.parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets that come with rankxform."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def matching_presets(parameters: Collection[str]) -> list[str]:
    """Return the presets that come with rankxform and have a rule for each of these parameters."""
    return [
        name
        for name in (preset_names() if parameters else ())
        for rules in [load_preset(name).rules]
        if all(any(rule.names.search(parameter) for rule in rules) for parameter in parameters)
    ]


def load_preset(name: str) -> Preset:
    """Return the preset of that name, or of a file whose name ends in ``.toml``."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UsageError("no such rules file", where=path)
        return parse_rules(read_bytes(path), str(path), load_preset)
    if name not in preset_names():
        raise UsageError(
            f"there is no preset {name!r}{did_you_mean(name, preset_names())}",
            details=f"there are {', '.join(preset_names())}, and your own rules files (*.toml)",
        )
    return parse_rules(read_bytes(FOLDER / f"{name}.toml"), f"preset {name}")
