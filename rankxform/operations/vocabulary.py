"""``--vocab N``: more rows, or fewer, in the tensors whose rows are the vocabulary's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import CheckpointError, UsageError
from rankxform.layout.names import summarize_names
from rankxform.statements import Finding, as_notice, as_warning
from rankxform.values import pattern_on_use

from .base import ModelOperation, Tensor
from .options import REPEAT_LAST, ZEROS

NAMES = frozenset((
    "embedding.word_embeddings.weight", "output_layer.weight", "mtp.output_layer.weight",
    "model.tok_embeddings.embedding_weight", "model.embed_tokens.weight", "lm_head.weight",
))  # fmt: skip
"""The tensors of models whose rows are the vocabulary's, where no map says which they are."""
MTP_LAYERS = "num_nextn_predict_layers"
"""What a config.json calls the number of layers that predict further words."""
MOST_PADDING, PADDED_SHARE = 1024, 8
"""Rows that a vocabulary may lack, and of how many rows it is one at most: `is_padding`."""
_OF_MTP = pattern_on_use(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")


def is_vocabulary(tensor: Tensor) -> bool:
    """Tell whether a tensor's rows are the vocabulary's, by its name or by a map."""
    return tensor.vocabulary or tensor.name in NAMES or bool(_OF_MTP().fullmatch(tensor.name))


def is_padding(rows: int, words: int) -> bool:
    """Tell whether a vocabulary of `words` may have these rows without a loss: more, or a few less.

    >>> is_padding(151936, 152064), is_padding(10, 40)
    (True, False)
    """
    lacking = words - rows
    return -words < lacking <= MOST_PADDING and PADDED_SHARE * lacking < words


class ResizeVocabulary(ModelOperation):
    """Gives tensors of the vocabulary, and their optimizer states, a number of rows."""

    renames = False

    def __init__(self, rows: int, fill: str = ZEROS, elsewhere: Collection[str] = ()) -> None:
        """elsewhere: tensors of the vocabulary that are not read, for they lie in other stages."""
        self.rows, self._fill, self._elsewhere = rows, fill, elsewhere
        self._unchanged: list[str] = []  # weights of the shape of one that is changed
        self._added: dict[str, int] = {}  # weights that get rows -> how many they have

    def findings(self, names: Sequence[str]) -> Iterator[Finding]:
        if self._unchanged:
            shown = summarize_names(self._unchanged, 2)
            text = f"{shown}: the shape is that of the vocabulary's tensors, and stays as it is"
            yield as_warning(f"--vocab: {text}")
        if self._added:
            name, rows = max(self._added.items(), key=lambda item: self.rows - item[1])
            fill = "copies of the last one" if self._fill == REPEAT_LAST else "zeros"
            text = f"--vocab {self.rows}: {self.rows - rows:,} rows of {name!r} are {fill}"
            text += f" ({len(self._added)} tensors)" if len(self._added) > 1 else ""
            if PADDED_SHARE * (self.rows - rows) > rows:
                yield as_warning(f"{text}, beside {rows:,} that it has: is it one rank's slice?")
            else:
                yield as_notice(text)

    def without(self, tensors: Sequence[Tensor]) -> ResizeVocabulary:
        elsewhere = {tensor.name for tensor in tensors if is_vocabulary(tensor)}
        return ResizeVocabulary(self.rows, self._fill, elsewhere)

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        vocabulary_names = {t.name for t in tensors if not t.dropped and is_vocabulary(t)}
        if not vocabulary_names and not self._elsewhere:
            raise CheckpointError(
                "--vocab: no tensor of the checkpoint is known to have the vocabulary's rows; "
                f"known are {', '.join(sorted(NAMES))}"
            )
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        changed_shapes = {
            shapes[name] for name in vocabulary_names if shapes[name][:1] != (self.rows,)
        }
        is_mapped = any(tensor.vocabulary for tensor in tensors)  # and so all of them are known
        weights = [t for t in tensors if t.is_weight and not (t.dropped or is_vocabulary(t))]
        self._unchanged = [t.name for t in weights if t.shape in changed_shapes and not is_mapped]
        new_tensors = []
        for tensor in tensors:
            parameter = tensor.base_name
            if parameter in vocabulary_names and not tensor.dropped:
                if not tensor.shape or not tensor.shape[0]:
                    raise CheckpointError(
                        f"{tensor.name!r} has shape {list(tensor.shape)}: no rows"
                    )
                if tensor.shape != shapes[parameter]:
                    raise CheckpointError(
                        f"{tensor.name!r} has shape {list(tensor.shape)}, unlike {parameter!r}, "
                        "and how its rows change is not known",
                        "leave states out (--weights-only)",
                    )
                tensor = self._resized(tensor)
            elif parameter in self._elsewhere and not tensor.dropped:
                raise CheckpointError(
                    f"{tensor.name!r} is a state of {parameter!r}, which is not read",
                    "leave out --ranks",
                    "--weights-only",
                    details="it lies in another pipeline stage",
                )
            new_tensors.append(tensor)
        return new_tensors

    def _resized(self, tensor: Tensor) -> Tensor:
        have = tensor.shape[0]
        if have == self.rows:
            return tensor
        if have > self.rows:
            assembly = tensor.made_of.rows(0, self.rows)
        else:
            if tensor.state is None:
                self._added[tensor.name] = have
            repeat = self._fill == REPEAT_LAST and tensor.state is None
            assembly = tensor.made_of.resized_rows(self.rows, repeat_last=repeat)
        return replace(tensor, shape=assembly.shape, assembly=assembly)

    def truncated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor
            for tensor in tensors
            if not tensor.dropped
            and is_vocabulary(tensor)
            and tensor.shape[0] >= self.rows  # more where it is padded for an engine
            and tensor.assembly is not None
            and len(tensor.sources) == 1
            and tensor.sources[0].shape[0] > self.rows
            and tensor.state is None
        ]


def make(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation that is asked for, if one is. Raises UsageError."""
    rows = options.get("vocab")
    if rows is None:
        for name in ("vocab_fill", "vocab_cut"):
            if options.get(name):
                raise UsageError(f"--{name.replace('_', '-')} is for --vocab", "give both")
        return None
    if rows < 1:
        raise UsageError(f"--vocab {rows}: expected a number of rows from 1 on")
    return ResizeVocabulary(rows, options.get("vocab_fill") or ZEROS)
