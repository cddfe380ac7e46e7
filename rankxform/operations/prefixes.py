"""Language models inside others: what stands before their names, and the towers beside them.

A vision-language model holds the tensors of a language model under a prefix of its own, which
depends on the version that saved it, and towers for images beside them. A map is for the language
model, under the prefix ``model.``; one that was saved without its head has none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rankxform.errors import CheckpointError
from rankxform.layout.names import first_texts
from rankxform.layout.states import MODEL

from .base import Tensor

KEEP, DROP = TOWERS = ("keep", "drop")
_HEAD = "lm_head.weight"
_TEXT = "language_model."


class Prefixes(NamedTuple):
    """Where a model of some architecture may have the names of its language model."""

    architecture: str
    before_names: tuple[str, ...]  # what stands there instead of `model.`; the published one first

    @property
    def has_head(self) -> bool:
        return "" not in self.before_names

    def told_by(self, names: Collection[str], known_names: Collection[str]) -> str | None:
        """Return what stands before most names that a map knows; None where it knows none."""
        counts = {
            prefix: sum(
                name.startswith(prefix) and MODEL + name[len(prefix) :] in known_names
                for name in names
            )
            for prefix in self.before_names
        }
        best = max(counts, key=lambda prefix: counts[prefix])
        return best if counts[best] else None


def text_sizes(config: Mapping[str, Any], prefixes: Prefixes | None) -> Mapping[str, Any]:
    """Return what a configuration states of its language model.

    A model without a head counts as one whose head is its embedding.
    """
    text = config.get("text_config")
    if prefixes is None:
        return config
    inner = text if isinstance(text, dict) else {}
    sizes = {**config, **inner}
    if "tie_word_embeddings" in config:
        sizes["tie_word_embeddings"] = config["tie_word_embeddings"]
    return sizes if prefixes.has_head else {**sizes, "tie_word_embeddings": True}


def language_name(name: str, prefix: str) -> str | None:
    """Return what the language model alone calls a tensor; None of a tower's.

    >>> language_name("model.language_model.norm.weight", "model.language_model.")
    'model.norm.weight'
    """
    head = _TEXT + _HEAD if prefix.startswith(_TEXT) else _HEAD
    if name == head:
        return _HEAD
    return MODEL + name[len(prefix) :] if name.startswith(prefix) else None


def whole_name(name: str, prefix: str) -> str:
    """Return what the whole model calls a tensor of its language model."""
    if name == _HEAD:
        return _TEXT + _HEAD if prefix.startswith(_TEXT) else _HEAD
    return prefix + name.removeprefix(MODEL) if name.startswith(MODEL) else name


def treat_towers(towers: Sequence[Tensor], choice: str | None, architecture: str) -> list[Tensor]:
    """Return the tensors of towers, kept or dropped. Raises CheckpointError if nobody says it."""
    if choice == DROP:
        return [replace(tower, dropped="of a tower (--towers drop)") for tower in towers]
    if choice is None and towers:
        names = first_texts([tower.name for tower in towers], 2)
        raise CheckpointError(
            f"beside its language model a {architecture} has towers, which no map is for: {names}",
            "--towers drop leaves them out",
            "--towers keep carries them under their names",
        )
    return [*towers]
