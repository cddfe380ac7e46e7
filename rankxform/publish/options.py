"""How a destination comes into being: options."""

from __future__ import annotations

from rankxform.options import BYTES, FIT, FLAG, OFF, OUTPUT, RUN, WRITERS, one_of, option
from rankxform.values import dataclass

from .links import LINKS, REFLINK

NODE, ANY = "node", "any"
"""Whose processes may write one file."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """How a destination comes into being. See the help of each."""

    link: str = option(
        REFLINK, OUTPUT, "how to store identical files: reflink, hard link, or full copies "
        "(default: reflink where the file system has it)", kind=one_of(LINKS),
    )  # fmt: skip
    dst_placement: str = option(
        "auto", OUTPUT, "with processes on several nodes: shared, if DST must be one folder for "
        "all; node, for a folder of each node; or a hostfile or rank table that says which ranks "
        "belong on which node (default: auto, finds out)", metavar="WHERE",
    )  # fmt: skip
    writers: str = option(
        "auto", OUTPUT, "whose processes may write one file of a folder that several nodes share: "
        "those of one node, or of any (default: auto, any where nodes' caches are known to be "
        "coherent: local disks, Lustre, GPFS, BeeGFS, CephFS)", kind=one_of(("auto", NODE, ANY)),
    )  # fmt: skip
    overwrite: bool = option(False, RUN, "replace destination files", kind=FLAG, verbs=WRITERS)
    fsync: bool = option(
        True, RUN, "do not wait for the device before a file gets its name", kind=OFF,
        verbs=WRITERS,
    )  # fmt: skip
    crc: bool = option(
        False, RUN, "write the checksum that MindSpore's crc_check expects", BYTES, FIT,
        kind=FLAG, verbs=("transform",),
    )  # fmt: skip
    verify: bool = option(
        False, RUN, "compare fingerprints of what is read with those of what is written, and keep "
        "the latter for `verify DST`", BYTES, kind=FLAG, verbs=("transform",),
    )  # fmt: skip
