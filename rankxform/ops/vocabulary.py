"""``--vocab N``: more rows, or fewer, in the tensors whose rows are the vocabulary's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import CheckpointError, UsageError

from .base import Composition, Tensor

NAMES = frozenset((
    "embedding.word_embeddings.weight", "output_layer.weight", "mtp.output_layer.weight",
    "model.tok_embeddings.embedding_weight", "model.embed_tokens.weight", "lm_head.weight",
))  # fmt: skip
"""The tensors of models whose rows are the vocabulary's, where no map says which they are."""

ZEROS, REPEAT_LAST = FILLS = ("zeros", "repeat-last")


def is_vocabulary(tensor: Tensor) -> bool:
    """Tell whether a tensor's rows are the vocabulary's, by its name or by a map."""
    return tensor.vocabulary or tensor.name in NAMES


class Vocabulary(Composition):
    """Gives tensors of the vocabulary, and their optimizer states, a number of rows."""

    renames = False

    def __init__(self, rows: int, fill: str = ZEROS) -> None:
        self.rows, self._fill = rows, fill

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        own = {one.name for one in tensors if not one.dropped and is_vocabulary(one)}
        if not own:
            raise CheckpointError(
                "--vocab: no tensor of the checkpoint is known to have the vocabulary's rows; "
                f"known are {', '.join(sorted(NAMES))}"
            )
        shapes = {one.name: one.shape for one in tensors}
        found = []
        for one in tensors:
            parameter = one.base_name
            if parameter in own and not one.dropped:
                if not one.shape or not one.shape[0]:
                    raise CheckpointError(f"{one.name!r} has shape {list(one.shape)}: no rows")
                if one.shape != shapes[parameter]:
                    raise CheckpointError(
                        f"{one.name!r} has shape {list(one.shape)}, unlike {parameter!r}, and how "
                        "its rows change is not known",
                        "leave states out (--weights-only)",
                    )
                one = self._resized(one)
            found.append(one)
        return found

    def _resized(self, one: Tensor) -> Tensor:
        have = one.shape[0]
        if have == self.rows:
            return one
        if have > self.rows:
            made = one.made_of.rows(0, self.rows)
        else:
            repeat = self._fill == REPEAT_LAST and one.state is None
            made = one.made_of.resized_rows(self.rows, repeat_last=repeat)
        return replace(one, shape=made.shape, assembly=made)

    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of derived tensors that lost rows."""
        return [
            one
            for one in tensors
            if not one.dropped
            and is_vocabulary(one)
            and one.shape[:1] == (self.rows,)
            and one.assembly is not None
            and len(one.sources) == 1
            and one.sources[0].shape[0] > self.rows
            and one.state is None
        ]


def vocabulary(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation that is asked for, if one is. Raises UsageError."""
    rows = options.get("vocab")
    if rows is None:
        for name in ("vocab_fill", "vocab_cut"):
            if options.get(name):
                raise UsageError(f"--{name.replace('_', '-')} is for --vocab", "give both")
        return None
    if rows < 1:
        raise UsageError(f"--vocab {rows}: expected a number of rows from 1 on")
    return Vocabulary(rows, options.get("vocab_fill") or ZEROS)
