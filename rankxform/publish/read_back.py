"""What one node wrote, read back by another: a file system may lose bytes, or show old ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rankxform.errors import StorageError
from rankxform.storage.identity import sample_digest
from rankxform.storage.posix import remove
from rankxform.transport.nodes import Nodes

from .facts import FileStat, stat_or_none

_SECONDS, _PAUSE = 60.0, 0.2
"""How long a node may see what was there before: as long as NFS keeps attributes."""


def files_to_read_back(
    written: Sequence[Mapping[Path, FileStat]], processes: Sequence[int], process: int, nodes: Nodes
) -> Iterator[tuple[Path, FileStat, str]]:
    """Yield the files that `process` reads back, with the name of the node that wrote each.

    written: by process the files that it wrote, with size and sample ("" if they need not be
    compared); processes: those that share
    their folder. Files that no other node sees are read back by none.
    """
    elsewhere: dict[int, list[int]] = {}
    for writer in processes:
        node = nodes.node_of[writer]
        if written[writer] and node not in elsewhere:
            elsewhere[node] = [reader for reader in processes if nodes.node_of[reader] != node]
        readers = elsewhere.get(node, [])
        for number, (path, facts) in enumerate(written[writer].items()):
            if readers and readers[number % len(readers)] == process:
                yield path, facts, nodes.names[node]


def read_back(
    path: Path, facts: FileStat, writer: str, clock: Callable[[], float] = time.monotonic
) -> None:
    """See that a file is here what `writer` says of it: its size, and samples if they are known.

    Caches of this node are waited for. Raises StorageError.
    """
    deadline = clock() + _SECONDS
    while (wrong := _wrong(path, facts)) is not None:
        if clock() > deadline:
            remove(path)  # or a run that goes on would take it for complete
            raise StorageError(
                f"{wrong}, {facts['size']:,} bytes were written on {writer}; it was removed",
                "run again with --writers node",
                "run again with processes of one node",
                "choose a folder elsewhere",
                where=path,
                details="the file system loses what nodes write, or shows other nodes something "
                "else",
            )
        time.sleep(_PAUSE)


def _wrong(path: Path, facts: FileStat) -> str | None:
    local_stat = stat_or_none(path)
    if local_stat is None:
        return "is not seen on another node"
    if local_stat["size"] != facts["size"]:
        return f"has {local_stat['size']:,} bytes as another node sees it"
    if not facts["sample"]:
        return None
    try:
        return None if sample_digest(path) == facts["sample"] else "has other bytes on another node"
    except StorageError as error:
        return f"cannot be read on another node ({error})"
