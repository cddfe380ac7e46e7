"""Matrices of zeros where others of their kind have numbers: weights that were never written.

Much is zero by design and is not judged: rows that pad a vocabulary, an adapter's second factor
before it is trained, moments of what is frozen or idle. A matrix that ends a residual branch is
zero in a block that was added to a trained model, whose other matrices are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from rankxform.formats.container import FLOATS
from rankxform.layout.names import first_texts, pattern_of
from rankxform.values import NamedTuple, pattern_on_use

_ADAPTER = pattern_on_use(r"lora|adapter", re.IGNORECASE)
_VOCABULARY = pattern_on_use(
    r"(?:^|\.)(?:\w*embed(?:dings?|_tokens|_in|_out)?|wte|shared|lm_head|head|output|output_layer)"
    r"\.(?:embedding_)?weight"
)
_NO_MATRIX = pattern_on_use(r"(?:bias|mask|table|cached|freqs?|cos|sin)$")
"""Ends of names of what has two axes or more and is no matrix: masks, biases of experts, tables."""
_ENDS_BRANCH = (
    "o_proj", "down_proj", "linear_proj", "linear_fc2", "wo", "w2", "c_proj", "out_proj",
    "dense", "dense_4h_to_h", "fc2", "fc_out", "proj",
)  # fmt: skip
"""Modules whose matrix ends a residual branch."""


def is_judged(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """Tell whether a weight that is zero everywhere may be one that was never written."""
    is_matrix = dtype in FLOATS and len(shape) > 1 and not _NO_MATRIX().search(name)
    return is_matrix and not (_ADAPTER().search(name) or is_vocabulary_name(name))


def is_vocabulary_name(name: str) -> bool:
    """Tell whether a tensor's rows are a vocabulary's, some of which may be of no word."""
    return bool(_VOCABULARY().search(name))


class StoredZeros(NamedTuple):
    """Matrices that are zero, though most of what is like them is not."""

    files: Mapping[int, int]  # those of which all matrices are zero, and how many these are
    names: tuple[str, ...]  # in other files
    compared: int  # how many matrices of all files were looked at

    def in_words(self, paths: Mapping[int, str]) -> Iterator[str]:
        """Yield what is doubtful, each in a sentence."""
        for file, number in self.files.items():
            text = f"all {number} matrices looked at are zero, and those of other files are not"
            yield f"{paths[file]}: {text}"
        if self.names:
            count = f"{len(self.names):,} of {self.compared:,} matrices looked at"
            text = f"{count} are zero, and others of their kind are not"
            yield f"{text}: {first_texts(self.names, 2)}"


def find_stored_zeros(
    zeros_by_file: Mapping[int, Mapping[str, bool]], names: Collection[str], *, is_full: bool
) -> StoredZeros:
    """Return what is zero among the matrices that were looked at.

    zeros_by_file: for each file whether the matrices looked at in it are zero, by name.
    names: of all matrices of the source. is_full: all were looked at, whole.
    """
    matrices = [
        (f, name, zero) for f, zeros in zeros_by_file.items() for name, zero in zeros.items()
    ]
    zero_by_name: dict[str, bool] = {}
    for _, name, zero in matrices:
        zero_by_name[name] = zero and zero_by_name.get(name, True)
    of_zeros = {f for f, zeros in zeros_by_file.items() if len(zeros) > 1 and all(zeros.values())}
    if 2 * len(of_zeros) > sum(map(bool, zeros_by_file.values())):
        of_zeros = set()
    totals = Counter(pattern_of(name) for _, name, _ in matrices)
    zeros_of_kind = Counter(pattern_of(name) for _, name, zero in matrices if zero)
    names_by_block: dict[str, list[str]] = {}
    for name in names if zeros_of_kind else ():
        names_by_block.setdefault(_block_of(name), []).append(name)
    doubted = dict[str, None]()
    peers = Counter((_layer_of(name), pattern_of(name)) for name in zero_by_name)
    zero_peers = Counter((_layer_of(n), pattern_of(n)) for n, zero in zero_by_name.items() if zero)
    for file, name, zero in matrices:
        kind = pattern_of(name)
        nonzero = totals[kind] - zeros_of_kind[kind]
        if not zero or file in of_zeros or not nonzero or 2 * nonzero < totals[kind] - 1:
            continue
        if any(part in _ENDS_BRANCH for part in name.split(".")[-2:]):
            block_names = [n for n in names_by_block.get(_block_of(name), ()) if n != name]
            zeros_of_block = [zero_by_name[n] for n in block_names if n in zero_by_name]
            place = _layer_of(name), kind
            is_lone = is_full and zero_peers[place] < peers[place]  # one expert of a layer
            is_seen = not block_names or zeros_of_block
            if not is_lone and not (is_seen and all(zeros_of_block)):
                continue
        doubted[name] = None
    files = {file: len(zeros_by_file[file]) for file in zeros_by_file if file in of_zeros}
    return StoredZeros(files, tuple(doubted), len(matrices))


def _block_of(name: str) -> str:
    """Return the module whose branch a matrix is of.

    >>> _block_of("layers.0.mlp.down_proj.weight"), _block_of("layers.0.w2")
    ('layers.0.mlp', 'layers.0')
    """
    module = name.removesuffix(".weight")
    return module.rpartition(".")[0]


def equal_matrices(first_of: Mapping[str, str], zeros: Collection[str]) -> dict[str, str]:
    """Return which of a file's matrices hold the bytes of another of their kind, and should not.

    first_of: all of them, each with the first that has its bytes. zeros: those of zeros; a block
    whose branches end in them was made of another. So were experts all of which are equal, and a
    layer all of whose matrices are another's; what all layers have alike is no weight.
    """
    made_of_others = {_layer_of(name) for name in zeros}
    originals: dict[str, set[str]] = {}
    kinds: dict[str, list[str]] = {}
    for name, first in first_of.items():
        originals.setdefault(_layer_of(name), set()).add(_layer_of(first))
        kinds.setdefault(pattern_of(name), []).append(first)
    made_of_others |= {
        layer for layer, layers in originals.items() if len(layers) == 1 and layer not in layers
    }
    contents: dict[tuple[str, str], list[str]] = {}
    for name, first in first_of.items():
        contents.setdefault((_layer_of(name), pattern_of(name)), []).append(first)
    return {
        name: first
        for name, first in first_of.items()
        for peers in [contents[_layer_of(name), pattern_of(name)]]
        if name != first
        and not made_of_others.intersection((_layer_of(name), _layer_of(first)))
        and (len(peers) == 1 or len({*peers}) > 1)
        and len({*kinds[pattern_of(name)]}) > 1
    }


def _layer_of(name: str) -> str:
    match = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return match[0] if match else ""
