"""Files of ranks that lie where another rank's should be, as samples of replicas show it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from rankxform.layout.names import format_ranges

from .catalog import Catalog
from .evidence import DigestsByFile
from .sampling import SampledTensor, compare_different_slices

_MOST_FILES, _MOST_TENSORS, _MOST_PAIRS = 64, 8, 2

_Cells = list[dict[int, bytes]]
"""By cell of a tensor what each file holds of it."""


def misplaced_files(
    catalog: Catalog,
    tensors: Sequence[SampledTensor],
    differing: Sequence[SampledTensor],
    digests_by_file: DigestsByFile,
) -> list[str]:
    """Return what would put files right, of which one is a copy of another, or two are exchanged.

    tensors: all that were sampled. differing: those of which replicas differ.
    """
    cells_by_tensor: list[_Cells] = [
        [{f: s.digest for f, s in file_samples} for _, file_samples in t.samples(digests_by_file)]
        for t in differing[:_MOST_TENSORS]
    ]
    pairs = _exchanged_pairs(cells_by_tensor)
    texts = [format_ranges(sorted(map(catalog.rank_of, pair))) for pair in pairs]
    texts = [text.replace("-", " and ").replace(", ", " and ") for text in texts]
    if len(texts) == 1:
        return [f"exchange the files of ranks {texts[0]}: each has the other's slices"]
    if 0 < len(texts) <= _MOST_PAIRS:
        ranks, either = " and ".join(texts), ", or of ".join(texts)
        return [
            f"compare the files of ranks {ranks} with a copy of the checkpoint: either those of "
            f"{either} were exchanged, and samples do not tell"
        ]
    for file, holders in _copies(cells_by_tensor).items():
        ranks = " or ".join(str(catalog.rank_of(holder)) for holder in holders)
        return [f"copy {catalog.paths[file]} again: it has the slices of rank {ranks}"]
    _, _, copied_pairs, _ = compare_different_slices(tensors, digests_by_file)
    paths = [catalog.paths[file] for pair in copied_pairs[:1] for file in pair]
    return [f"copy {' or '.join(paths)} again: one is a copy of the other"] if paths else []


def _exchanged_pairs(cells_by_tensor: Sequence[_Cells]) -> list[tuple[int, int]]:
    """Return the pairs of files by whose exchange all replicas would be equal."""
    cells = [cell for tensor_cells in cells_by_tensor for cell in tensor_cells]
    files = {file for cell in cells if len({*cell.values()}) > 1 for file in cell}
    if len(files) > _MOST_FILES:
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


def _copies(cells_by_tensor: Sequence[_Cells]) -> dict[int, list[int]]:
    """Return, by the files of which all that differs is what other cells' files agree on, these."""
    sources: dict[int, set[int]] = {}
    for tensor_cells in cells_by_tensor:
        agreed_digests = {
            digest: {*cell}
            for cell in tensor_cells
            for digest in {*cell.values()}
            if len({*cell.values()}) == 1 and len(cell) > 1
        }
        for cell in tensor_cells:
            for file, digest in cell.items() if len({*cell.values()}) > 1 else ():
                holders = agreed_digests.get(digest, set())
                sources[file] = sources.get(file, holders) & holders
    return {file: sorted(holders) for file, holders in sources.items() if holders}
