"""What to convert, and how: the options of a conversion, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankxform.checkpoints.rank_folders import DEFAULT_PATTERN
from rankxform.engine.pipeline import DEFAULT_MEMORY
from rankxform.errors import UsageError
from rankxform.layout.strategy import Strategy
from rankxform.planning.cost_model import AUTO, READINGS, Costs
from rankxform.planning.plan import REPLICAS
from rankxform.planning.selection import ONE_SIDED
from rankxform.publish.links import LINKS, REFLINK
from rankxform.storage.index import FORMATS


@dataclass(frozen=True)
class Request:
    """What to convert, and how. Paths are resolved by process 0.

    src, dst: source folder or file; destination folder (None: only plan).
    files: the source file of each rank, in place of those that are found in `src`.
    src_strategy, dst_strategy: a file, a folder of stage files, "none" for whole tensors; or a
        Strategy, as it comes from a network. None: none was given, which means whole tensors, but
        is an error where the source holds files of several ranks.
    prefix, format: destination files are ``DST/rank_N/<prefix>N.<format>``; None: the source's.
    ranks: destination ranks to make; empty: all.
    src_pattern, step, suffix: which source files are meant.
    include, exclude: regular expressions that choose parameters.
    one_sided: "error", "leave-out" or "whole", for parameters that only one strategy lists.
    unlisted: "error" or "take-one", for unlisted parameters that differ between source ranks.
    allow_equal_slices, allow_extra_ranks: accept what otherwise shows a strategy that is not the
        checkpoint's.
    check_crc: compare source files with the checksums they carry; crc: write such checksums.
    link: how destination files with equal bytes are made of one: "reflink" where the file system
        can share blocks (else each is written), "hard" links, or "none".
    overwrite: replace destination files. fsync: wait for the device before a file gets its name.
    replicas: "spread" reads each distinct box once; "mindspore" takes MindSpore's choice.
    costs: what bytes and calls cost, for the choice among ways of reading; None: measured.
    dst_placement: where processes are on several nodes: "auto"; "shared", if `dst` must be one
        folder for all; "node", for a folder of each node; or a hostfile or rank table that says on
        which node which ranks belong.
    memory: bytes of buffers on each process.
    reading: "auto"; or one way for all parameters: the wanted "ranges", the "rows" that hold them,
        or "exchange", which reads each byte on one process and sends it to those that want it.
    verify: compare fingerprints of what is read and what is written, and keep them.
    check_replicas: "warn" or "error" where source ranks that should hold the same bytes do not;
        "no" does not read them.
    shapes: a JSON file of full shapes, for a plan where there is no checkpoint in `src`.
    """

    src: str
    dst: str | None
    src_strategy: str | Strategy | None = None
    dst_strategy: str | Strategy | None = None
    files: Mapping[int, str] | None = None
    prefix: str = "checkpoint_"
    format: str | None = None
    ranks: tuple[int, ...] = ()
    src_pattern: str = DEFAULT_PATTERN
    step: str | None = None
    suffix: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    one_sided: str = "error"
    unlisted: str = "error"
    replicas: str = "spread"
    allow_equal_slices: bool = False
    allow_extra_ranks: bool = False
    check_crc: bool = False
    crc: bool = False
    overwrite: bool = False
    fsync: bool = True
    link: str = REFLINK
    costs: Costs | None = None
    dst_placement: str = "auto"
    memory: int = DEFAULT_MEMORY
    reading: str = AUTO
    shapes: str | None = None
    verify: bool = False
    check_replicas: str = "no"

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("one_sided", self.one_sided, ONE_SIDED),
            ("unlisted", self.unlisted, ("error", "take-one")),
            ("replicas", self.replicas, REPLICAS),
            ("link", self.link, LINKS),
            ("reading", self.reading, READINGS),
            ("check_replicas", self.check_replicas, ("no", "warn", "error")),
            ("format", self.format, (None, *FORMATS)),
        ):
            if value not in allowed:
                raise UsageError(
                    f"{option} is {value!r}; {' or '.join(map(str, allowed))} is wanted"
                )
        if not isinstance(self.memory, int) or not all(isinstance(r, int) for r in self.ranks):
            raise UsageError("memory is a number of bytes, ranks are numbers")
        for name, given in vars(self).items():
            for text in given if isinstance(given, tuple) else (given,):
                if isinstance(text, str) and "\0" in text:
                    raise UsageError(f"{name} {text!r}: holds a NUL, which no name can have")
        if "/" in self.prefix or self.prefix.startswith("."):
            raise UsageError(f"prefix {self.prefix!r} must be the start of a file's name")
        if self.memory < 1 << 20:
            raise UsageError(f"memory of {self.memory} bytes is too little; 1 MiB is the least")
