"""How a destination comes into being: options."""

from __future__ import annotations

from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    AFFECTS_FIT,
    GROUP_DESTINATION,
    GROUP_RUN,
    TYPE_FLAG,
    TYPE_OFF,
    WRITERS,
    choice_of,
    option,
)
from rankxform.values import dataclass

SUMS = {"sha256": "SHA256SUMS", "xxh3": "XXH3SUMS"}
"""Documents of digests that other programs check, by what `--digests` calls them."""
LINK_NONE, LINK_REFLINK, LINK_HARD = "none", "reflink", "hard"
WRITERS_NODE, WRITERS_ANY = "node", "any"
"""Whose processes may write one file."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """How a destination comes into being. See the help of each."""

    link: str = option(
        LINK_REFLINK, GROUP_DESTINATION, "how to store identical files: reflink, hard link, or "
        "full copies (default: reflink where the file system has it)",
        kind=choice_of((LINK_REFLINK, LINK_HARD, LINK_NONE)),
    )  # fmt: skip
    dst_placement: str = option(
        "auto", GROUP_DESTINATION, "with processes on several nodes: shared, if DST must be one "
        "folder for all; node, for a folder of each node; or a hostfile or rank table that says "
        "which ranks belong on which node (default: auto, finds out)", metavar="WHERE",
    )  # fmt: skip
    writers: str = option(
        "auto", GROUP_DESTINATION, "whose processes may write one file of a folder that several "
        "nodes share: those of one node, or of any (default: auto, any where nodes' caches are "
        "known to be coherent: local disks, Lustre, GPFS, BeeGFS, CephFS)",
        kind=choice_of(("auto", WRITERS_NODE, WRITERS_ANY)),
    )  # fmt: skip
    overwrite: bool = option(
        False, GROUP_RUN, "replace destination files", kind=TYPE_FLAG, verbs=WRITERS
    )
    no_lock: bool = option(
        False, GROUP_RUN, "in object storage, let other runs and uploads be: nobody else writes to "
        "DST", kind=TYPE_FLAG, verbs=("transform",),
    )  # fmt: skip
    fsync: bool = option(
        True, GROUP_RUN, "do not wait for the device before a file gets its name", kind=TYPE_OFF,
        verbs=WRITERS,
    )  # fmt: skip
    crc: bool = option(
        False, GROUP_RUN, "write the checksum that MindSpore's crc_check expects; verify: every "
        "file has to have one", AFFECTS_BYTES, AFFECTS_FIT, AFFECTS_COMPARISON, kind=TYPE_FLAG,
        verbs=("transform", "verify"),
    )  # fmt: skip
    verify: bool = option(
        False, GROUP_RUN, "compare fingerprints of what is read with those of what is written, "
        "and keep the latter for `verify DST`", AFFECTS_BYTES, kind=TYPE_FLAG, verbs=("transform",),
    )  # fmt: skip
    digests: str | None = option(
        None, GROUP_RUN, "write SHA256SUMS or XXH3SUMS beside the manifest, which sha256sum -c or "
        "xxhsum -c check; reads back what is not written in order", kind=choice_of(tuple(SUMS)),
        verbs=("transform",),
    )  # fmt: skip
    keep_fingerprints: bool = option(
        False, GROUP_RUN, "if every byte is the same, keep fingerprints in DST's manifest, as "
        "transform --verify does, for `verify DST`", kind=TYPE_FLAG, verbs=("verify",),
    )  # fmt: skip
