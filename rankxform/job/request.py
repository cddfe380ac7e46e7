"""What to convert, and how: the one table of options.

An option is a field of `Request` with its help, and what depends on it. The command line, the
keywords of the API, the identity of a job, the command that verifies its result and docs/cli.md
are made of this table; no option is stated twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from rankxform.checkpoints.base import DEFAULT_PATTERN, FORMS
from rankxform.engine.pipeline import DEFAULT_MEMORY
from rankxform.errors import UsageError
from rankxform.formats.base import FORMATS
from rankxform.layout.strategy import Strategy
from rankxform.planning.cost_model import Costs
from rankxform.planning.read_method import AUTO, READ_METHODS
from rankxform.planning.selection import ERROR, UNMATCHED
from rankxform.publish.links import LINKS, REFLINK
from rankxform.values import dataclass

from .operations import Operations
from .option import (
    BYTES,
    COMPARE,
    DERIVED,
    FIT,
    GROUPS,
    IO,
    LOAD,
    OUTPUT,
    RUN,
    SOURCE,
    WHAT,
    WRITERS,
    flag_of,
    option,
)


@dataclass(frozen=True)
class Request(Operations):
    """What to convert, and how. Paths are resolved by process 0.

    src, dst: source folder or file; destination folder (None: nothing is written).
    files: the source file of each rank, in place of those that are found in `src`.
    src_strategy, dst_strategy: a file, a folder of stage files, "none" for whole tensors,
        ``shard:REGEX=AXIS@RANKS``; or a Strategy, as it comes from a network. None: none was given,
        which means whole tensors, but is an error where the source holds files of several ranks.
    The other fields are options; see their help. Raises UsageError for what they cannot be.
    """

    src: str
    dst: str | None
    src_strategy: str | Strategy | None = None
    dst_strategy: str | Strategy | None = None
    files: Mapping[int, str] | None = None

    ranks: tuple[int, ...] = option(
        (), WHAT, "destination ranks (default: all)", FIT, kind="ranks", metavar="N,N-N"
    )
    include: tuple[str, ...] = option(
        (), WHAT, "convert only parameters whose name matches; repeatable",
        BYTES, COMPARE, FIT, LOAD, kind="repeated", metavar="REGEX",
    )  # fmt: skip
    exclude: tuple[str, ...] = option(
        (), WHAT, "drop parameters whose name matches; repeatable",
        BYTES, COMPARE, FIT, LOAD, kind="repeated", metavar="REGEX",
    )  # fmt: skip
    rename: tuple[str, ...] = option(
        (), WHAT, "rename parameters, and their optimizer states; repeatable, applied in order",
        BYTES, COMPARE, FIT, LOAD, kind="repeated", metavar="REGEX=REPLACEMENT",
    )  # fmt: skip
    unmatched: str = option(
        ERROR, WHAT, "parameters that only one strategy lists: drop them, or treat them as "
        "replicated on the other side (default: error)",
        BYTES, COMPARE, FIT, LOAD, choices=UNMATCHED,
    )  # fmt: skip
    unlisted: str = option(
        ERROR, WHAT, "parameters in no strategy that differ between ranks: take one rank's "
        "(default: error)", BYTES, COMPARE, LOAD, choices=(ERROR, "take-one"),
    )  # fmt: skip
    dst_parallel: str | None = option(
        None, DERIVED, "sizes of the destination job (dp, mp, pp, cp, ep); vocab_emb_dp and "
        "use_seq_parallel are true or false; same keeps the source's sizes within a stage, and "
        "same,pp=2 changes pp alone",
        LOAD, metavar="dp=2,mp=4,..",
    )  # fmt: skip
    dst_config: str | None = option(
        None, DERIVED, "sizes of the destination job, from a MindFormers configuration (YAML)",
        LOAD, metavar="FILE",
    )  # fmt: skip
    src_parallel: str | None = option(
        None, DERIVED, "sizes of the source job, by which its strategy is understood", LOAD,
        metavar="dp=8,mp=1,..",
    )  # fmt: skip
    src_config: str | None = option(
        None, DERIVED, "sizes of the source job, from a MindFormers configuration (YAML)",
        LOAD, metavar="FILE",
    )  # fmt: skip
    preset: str | None = option(
        None, DERIVED, "what shards the parameters of a known network (llama, deepseek_v3, ...), "
        "or a rules file (*.toml)", LOAD, metavar="NAME",
    )  # fmt: skip
    unproven: bool = option(
        False, DERIVED, "accept a preset that no compiled strategy file has confirmed", LOAD,
        kind="flag",
    )  # fmt: skip
    rule: tuple[str, ...] = option(
        (), DERIVED, "what shards the parameters whose name matches, such as 'wq=(tp, None)'; "
        "repeatable, tried before a preset", LOAD, kind="repeated", metavar="REGEX=(tp, None)",
    )  # fmt: skip
    predict: bool = option(
        False, DERIVED, "the destination job is inference: no optimizer states", LOAD,
        kind="flag",
    )  # fmt: skip
    optimizer_shard: str | None = option(
        None, DERIVED, "whether the destination's optimizer shards parameters: on, off, or into "
        "how many shards (optimizer_weight_shard_size)", LOAD, metavar="on|off|N",
    )  # fmt: skip
    opt_on: tuple[str, ...] = option(
        (), DERIVED, "parameters that the optimizer shards; repeatable", LOAD, kind="repeated",
        metavar="REGEX",
    )  # fmt: skip
    opt_off: tuple[str, ...] = option(
        (), DERIVED, "parameters that it does not shard (parallel_optimizer=False); repeatable",
        LOAD,
        kind="repeated", metavar="REGEX",
    )  # fmt: skip
    threshold: int | None = option(
        None, DERIVED, "size from which the optimizer shards a parameter (default: 64)",
        LOAD,
        kind="number", metavar="KIB",
    )  # fmt: skip
    src_threshold: int | None = option(
        None, DERIVED, "the threshold of the source job (default: 64)", LOAD, kind="number",
        metavar="KIB",
    )  # fmt: skip
    layers: str | None = option(
        None, DERIVED, "the numbered list that pipeline stages divide, such as model.layers", LOAD,
        metavar="PREFIX",
    )  # fmt: skip
    layers_per_stage: tuple[int, ...] = option(
        (), DERIVED, "layers of each pipeline stage", LOAD, kind="numbers", metavar="N,N,..",
    )  # fmt: skip
    offset: tuple[int, ...] = option(
        (), DERIVED, "extra layers of each stage, as in MindFormers", LOAD,
        kind="numbers", metavar="N,N,..",
    )  # fmt: skip
    interleave: int | None = option(
        None, DERIVED, "rounds in which stages get layers (pp_interleave_num; default: 1)", LOAD,
        kind="number", metavar="N",
    )  # fmt: skip
    first: tuple[str, ...] = option(
        (), DERIVED, "parameters outside the list on the first stage; repeatable", LOAD,
        kind="repeated", metavar="REGEX",
    )  # fmt: skip
    last: tuple[str, ...] = option(
        (), DERIVED, "parameters outside the list on the last stage; repeatable", LOAD,
        kind="repeated", metavar="REGEX",
    )  # fmt: skip
    shared: tuple[str, ...] = option(
        (), DERIVED, "parameters on the first and the last stage (tied); repeatable", LOAD,
        kind="repeated",
        metavar="REGEX",
    )  # fmt: skip
    unsharded: str | None = option(
        None, DERIVED, "cp: context parallel shards no parameter of the network", LOAD,
        choices=("cp",),
    )  # fmt: skip

    src_form: str | None = option(
        None, SOURCE, "form of SRC: rank folders (ranks), Checkpoint 2.0, unified safetensors, or "
        "Hugging Face (default: recognized)", FIT, COMPARE, LOAD,
        choices=FORMS,
    )  # fmt: skip
    src_pattern: str = option(
        DEFAULT_PATTERN, SOURCE, "where rank files lie in SRC (default: %(default)s)", COMPARE, FIT,
        LOAD, metavar="PATTERN",
    )  # fmt: skip
    step: str | None = option(
        None, SOURCE, "epoch and step to take, such as 10_73, or a step alone, or an iteration of "
        "Checkpoint 2.0; latest: the newest, an error if a rank lacks it (default: the newest that "
        "all ranks have; of launch: latest)", FIT, LOAD, metavar="STEP",
    )  # fmt: skip
    suffix: str | None = option(
        None, SOURCE, "end of the files' names before .ckpt, such as _breakpoint",
        COMPARE, FIT, LOAD, metavar="TEXT",
    )  # fmt: skip
    check_crc: bool = option(
        False, SOURCE, "compare source files with the checksums they carry", LOAD, kind="flag"
    )
    allow_extra_ranks: bool = option(
        False, SOURCE, "ignore ranks beyond the strategy's, whatever they hold", COMPARE, LOAD,
        kind="flag",
    )  # fmt: skip
    allow_equal_slices: bool = option(
        False, SOURCE, "accept that every rank holds the same bytes of sharded parameters",
        COMPARE, LOAD, kind="flag",
    )  # fmt: skip

    dst_form: str | None = option(
        None, OUTPUT, "form of DST (default: ranks; of verify: recognized)", BYTES, COMPARE, FIT,
        choices=FORMS,
    )  # fmt: skip
    prefix: str | None = option(
        None, OUTPUT, "start of each file's name (default: checkpoint_ in rank folders)", BYTES,
        COMPARE,
    )  # fmt: skip
    max_part: int | None = option(
        None, OUTPUT, "most bytes of a part of unified safetensors (default: 3GiB)", BYTES,
        kind="limit", metavar="SIZE",
    )  # fmt: skip
    max_shard: int | None = option(
        None, OUTPUT, "most bytes of a Hugging Face shard (default: 5GB, of 10^9 bytes)", BYTES,
        kind="limit", metavar="SIZE",
    )  # fmt: skip
    dedup: bool = option(
        False, OUTPUT, "store each slice of a Checkpoint 2.0 once", BYTES, kind="flag"
    )
    iteration: int | None = option(
        None, OUTPUT, "iteration of the Checkpoint 2.0 that is written (default: the source's "
        "global_step)", BYTES, kind="number", metavar="N",
    )  # fmt: skip
    format: str | None = option(
        None, OUTPUT, "container of the files (default: the source's)", COMPARE, choices=FORMATS
    )
    link: str = option(
        REFLINK, OUTPUT, "how to store identical files: reflink, hard link, or full copies "
        "(default: reflink where the file system has it)", choices=LINKS,
    )  # fmt: skip
    dst_placement: str = option(
        "auto", OUTPUT, "with processes on several nodes: shared, if DST must be one folder for "
        "all; node, for a folder of each node; or a hostfile or rank table that says which ranks "
        "belong on which node (default: auto, finds out)", metavar="WHERE",
    )  # fmt: skip

    read_method: str = option(
        AUTO, IO, "how source files are read: the wanted ranges; whole rows, then pick (sieving); "
        "or each byte by one process that sends it to the others (two-phase); auto: what costs "
        "least, two-phase for files that a node does not have", LOAD, choices=READ_METHODS,
    )  # fmt: skip
    costs: Costs | None = option(
        None, IO, "cost model: bandwidths (read, write, network, copy), latencies (read_latency, "
        "latency), and the overlap of reading and sending (0-1), such as read=2G,latency=30us "
        "(default: measured; if some are given, 1G, 1G, 10G, 5G, 100us, 30us, 1 for the others)",
        LOAD, kind="costs", metavar="WHAT=VALUE,..",
    )  # fmt: skip
    memory: int = option(
        DEFAULT_MEMORY, IO, "buffers on each process (default: 64M)", LOAD, kind="size",
        metavar="SIZE",
    )  # fmt: skip
    shapes: str | None = option(
        None, IO, 'plan without SRC, from full shapes: a complete checkpoint file, what `inspect '
        '--json` prints of one, or JSON {name: {"shape": [...], "dtype": "Float32"}}',
        metavar="FILE", verbs=("plan",),
    )  # fmt: skip

    overwrite: bool = option(False, RUN, "replace destination files", kind="flag", verbs=WRITERS)
    fsync: bool = option(
        True, RUN, "do not wait for the device before a file gets its name", kind="off",
        verbs=WRITERS, flag="--no-fsync",
    )  # fmt: skip
    crc: bool = option(
        False, RUN, "write the checksum that MindSpore's crc_check expects", BYTES, FIT,
        kind="flag", verbs=("transform",),
    )  # fmt: skip
    verify: bool = option(
        False, RUN, "compare fingerprints of what is read with those of what is written, and keep "
        "the latter for `verify DST`", BYTES, kind="flag", verbs=("transform",),
    )  # fmt: skip
    check_replicas: str = option(
        "no", RUN, "read all source replicas first; warn, or refuse, where they differ",
        choices=("no", "warn", "error"), verbs=("transform",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        for one in OPTIONS:
            value, choices = getattr(self, one.name), one.metadata["choices"]
            _check_kind(one, value)
            if choices and value not in choices and not (value is None is one.default):
                known = " or ".join(map(str, choices))
                raise UsageError(f"{one.name} is {value!r}; expected {known}")
        for name, given in vars(self).items():
            for text in given if isinstance(given, tuple) else (given,):
                if isinstance(text, str) and "\0" in text:
                    raise UsageError(f"{name} {text!r}: holds a NUL, which no name can have")
                if isinstance(given, tuple) and isinstance(text, str):
                    _check_text(name, text)
        if self.prefix is not None and ("/" in self.prefix or self.prefix.startswith(".")):
            raise UsageError(f"prefix {self.prefix!r} must be the start of a file's name")
        if self.prefix is not None and not self.prefix.isprintable():
            raise UsageError(f"prefix {self.prefix!r} has characters that no file's name should")
        if self.memory < 1 << 20:
            raise UsageError(f"memory of {self.memory} bytes is too little; 1 MiB is the least")

    @property
    def derives(self) -> bool:
        """Whether the destination's strategy is to be derived."""
        return self.dst_parallel is not None or self.dst_config is not None

    def check_derives(self) -> None:
        """Raise UsageError for options of a derivation where none is asked for."""
        for name in in_group(DERIVED):
            if not is_default(self, name):
                flag = flag_of(name)
                raise UsageError(f"{flag} is for --dst-parallel or --dst-config; give one of them")


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} {text!r}: is not UTF-8, which every name is") from error


OPTIONS: tuple[Field[Any], ...] = tuple(
    sorted(
        (one for one in fields(Request) if one.metadata),
        key=lambda one: GROUPS.index(one.metadata["group"]),
    )
)

SEVERAL = ("ranks", "numbers", "repeated")
"""The kinds of options that have several values: numbers, and texts."""

_TYPES: dict[str, tuple[type, str]] = {
    "text": (str, "a text"),
    "flag": (bool, "true or false"),
    "off": (bool, "true or false"),
    "size": (int, "a number of bytes"),
    "limit": (int, "a number of bytes"),
    "costs": (Costs, "rankxform.Costs"),
    "number": (int, "a number"),
    "decimal": (float, "a number"),
}


def _check_kind(one: Field[Any], value: Any) -> None:
    kind = one.metadata["kind"]
    if kind in SEVERAL:
        item, what = (str, "texts") if kind == "repeated" else (int, "numbers")
        good = isinstance(value, tuple) and all(type(v) is item for v in value)
    else:
        expected, what = _TYPES[kind]
        good = value is None is one.default or isinstance(value, expected)
        good = good or (expected is float and type(value) is int)
        good = good and (expected is not int or not isinstance(value, bool))
    if not good:
        raise UsageError(f"{one.name} is {value!r}; expected {what}")


def in_group(title: str) -> list[str]:
    """Return the names of the options of a group."""
    return [one.name for one in OPTIONS if one.metadata["group"] == title]


def affecting(what: str) -> list[str]:
    """Return the names of the options on which something depends."""
    return [one.name for one in OPTIONS if what in one.metadata["affects"]]


def is_default(request: Request, name: str) -> bool:
    """Tell whether an option was left as it is."""
    known = next(one for one in OPTIONS if one.name == name)
    return bool(getattr(request, name) == known.default)
