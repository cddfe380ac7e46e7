"""Files of ranks that lie where another rank's should be, as samples of replicas show it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from rankxform.layout.names import format_ranges

from .catalog import Catalog
from .evidence import DigestsByFile
from .sampling import SampledTensor, compare_different_slices

_MOST_FILES, _MOST_TENSORS, _MOST_PAIRS = 64, 8, 2


def misplaced_files(
    catalog: Catalog,
    tensors: Sequence[SampledTensor],
    differing: Sequence[SampledTensor],
    digests_by_file: DigestsByFile,
) -> list[str]:
    """Return what would put files right, of which one is a copy of another, or two are exchanged.

    tensors: all that were sampled. differing: those of which replicas differ.
    """
    pairs = _exchanged_pairs(differing[:_MOST_TENSORS], digests_by_file)
    texts = [format_ranges(sorted(map(catalog.rank_of, pair))) for pair in pairs]
    texts = [text.replace("-", " and ").replace(", ", " and ") for text in texts]
    if 0 < len(texts) <= _MOST_PAIRS:
        return [
            f"exchange the files of ranks {', or of '.join(texts)}: each has the other's slices"
        ]
    _, _, copied_pairs, _ = compare_different_slices(tensors, digests_by_file)
    paths = [catalog.paths[file] for pair in copied_pairs[:1] for file in pair]
    return [f"copy {' or '.join(paths)} again: one is a copy of the other"] if paths else []


def _exchanged_pairs(
    tensors: Sequence[SampledTensor], digests_by_file: DigestsByFile
) -> list[tuple[int, int]]:
    """Return the pairs of files by whose exchange all replicas would be equal."""
    cells_by_tensor = [
        [{f: s.digest for f, s in file_samples} for _, file_samples in t.samples(digests_by_file)]
        for t in tensors
    ]
    cells = [cell for tensor_cells in cells_by_tensor for cell in tensor_cells]
    files = {file for cell in cells if len({*cell.values()}) > 1 for file in cell}
    if not tensors or len(files) > _MOST_FILES:
        return []
    pairs = []
    for a, b in combinations(sorted(files), 2):
        exchanged = {a: b, b: a}
        for tensor_cells in cells_by_tensor:
            digests = {file: digest for cell in tensor_cells for file, digest in cell.items()}
            is_same = digests.get(a) == digests.get(b)
            if is_same or any(
                len({digests.get(exchanged.get(file, file)) for file in cell}) > 1
                for cell in tensor_cells
            ):
                break
        else:
            pairs.append((a, b))
    return pairs
