"""PyTorch's distributed checkpoints (DCP): files of items, and a table of boxes.

::

    .metadata                  every tensor's boxes, and where each lies; written last
    __0_0.distcp ...           items as `torch.save` writes them, of rank 0, file 0
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rankxform.checkpoints.boxes import DEFAULT_BYTES, box_table, describe_boxes, parts_of, table_of
from rankxform.errors import CheckpointError, FormatError
from rankxform.formats.base import BLOCK
from rankxform.formats.torch_metadata import (
    TORCH_FLAVOR,
    DcpMetadata,
    StoredItem,
    format_dcp_metadata,
    parse_dcp_metadata,
)
from rankxform.planning.description import Description
from rankxform.planning.plan import Planner
from rankxform.storage.store import FOLDER, Listing, Store

from . import folder
from .base import CheckpointRef, DestinationFiles, FileNaming, RankFilter, SelectedFiles
from .boxes import DCP_METADATA

DISTCP_SUFFIX = ".distcp"
BACKEND = "metadata.json"
_FILE = re.compile(r"__([0-9]{1,9})_0\.distcp")


class DcpForm:
    """A folder of PyTorch's DCP (`checkpoints.base.Form`)."""

    name = "dcp"
    title = "PyTorch DCP"
    options: tuple[str, ...] = ("max_part",)
    container: str | None = "distcp"
    described = True
    training: str | None = None
    counters = False
    configured = False
    items = "torch"
    is_written = True

    def pattern(self, where: CheckpointRef) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER or is_megatrons(listing, store):
            return None
        if begins_with(store, DCP_METADATA, b"torch.distributed"):
            return DCP_METADATA
        return next((name for name in listing.entries if name.endswith(DISTCP_SUFFIX)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folder.check_no_step(self.name, where)
        table = read_table(listing, store, DCP_METADATA)
        base_description = Description(listing.at(DCP_METADATA), items=self.items)
        names, description = describe_boxes(
            listing, box_table(table), entry_of, (DISTCP_SUFFIX,), "", base_description
        )
        return SelectedFiles(names, description=description)

    def arrange(self, planner: Planner, naming: FileNaming) -> DestinationFiles:
        parts = parts_of(planner, naming.options["max_part"] or DEFAULT_BYTES)
        names = {number: f"__{number}_0{DISTCP_SUFFIX}" for number in range(len(parts))}
        return DestinationFiles(names, dict(enumerate(parts)))

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    def owns(self, name: str, file: int) -> bool:
        match = _FILE.fullmatch(name)
        return match is not None and int(match[1]) == file

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return (DCP_METADATA,)

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        table = table_of(planner, arrangement.names, places=True)
        return {DCP_METADATA: format_dcp_metadata(table, TORCH_FLAVOR)}

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        return folder.foreign_files(listing, dst_names, (DISTCP_SUFFIX,))


def is_megatrons(listing: Listing, store: Store) -> bool:
    """Tell whether a folder is Megatron-Core's, which has a file on its backend beside the items.

    `listing` has what lies in it.
    """
    return BACKEND in listing.entries and begins_with(store, BACKEND, b"sharded_backend")


def begins_with(store: Store, name: str, words: bytes) -> bool:
    """Tell whether words are among the first bytes of a file, if it is there."""
    if not store.has(name):
        return False
    with store.open(name) as file:
        return words in file.read_at(0, BLOCK)


def entry_of(item: StoredItem, nbytes: int) -> str:
    """Return what a ``.distcp`` calls an item: its first byte, and its key in a safetensors file.

    Such a file, at the end, has all tensors, and what is stated are a tensor's own bytes.
    """
    return f"{item.offset}/{item.key}" if item.nbytes == nbytes else str(item.offset)


def read_table(listing: Listing, store: Store, name: str) -> DcpMetadata:
    """Read a ``.metadata``. Raises CheckpointError."""
    on_another_node = name in listing.entries or name in listing.files
    if not store.has(name) and not on_another_node:
        interrupted = name + ".tmp"
        reason = (
            f"; {interrupted} lies there, of a save that was interrupted"
            if interrupted in listing.entries or store.has(interrupted)
            else ""
        )
        raise CheckpointError(
            f"is not there{listing.searched}, and without it nothing says where each "
            f"tensor lies{reason}",
            "take another step",
            "save again",
            where=listing.at(name),
        )
    try:
        return parse_dcp_metadata(store.read(name, listing.searched))
    except FormatError as error:
        raise CheckpointError(f"{DCP_METADATA} {error}", where=listing.at(name)) from error
