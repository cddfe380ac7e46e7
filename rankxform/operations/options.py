"""What is done to tensors on their way: options."""

from __future__ import annotations

from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    AFFECTS_FIT,
    AFFECTS_LOAD,
    GROUP_OPERATIONS,
    GROUP_SELECTION,
    TYPE_DECIMAL,
    TYPE_FLAG,
    TYPE_NUMBER,
    TYPE_REPEATED,
    choice_of,
    option,
)
from rankxform.values import dataclass

from .rename import AS_STORED, NAMINGS_OF_FRAMEWORKS

TYPES = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}
WRITTEN_OUT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""What numpy, PyTorch and config.json call them."""

ZEROS, REPEAT_LAST = VOCABULARY_FILLS = ("zeros", "repeat-last")
_ALL = (AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD)


@dataclass(frozen=True, kw_only=True)
class OperationOptions:
    """What is done to tensors on their way. See the help of each."""

    include: tuple[str, ...] = option(
        (), GROUP_SELECTION, "convert only parameters whose name matches; repeatable",
        AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD, kind=TYPE_REPEATED,
        metavar="REGEX",
    )  # fmt: skip
    exclude: tuple[str, ...] = option(
        (), GROUP_SELECTION, "drop parameters whose name matches; repeatable", AFFECTS_BYTES,
        AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD, kind=TYPE_REPEATED, metavar="REGEX",
    )  # fmt: skip
    rename: tuple[str, ...] = option(
        (), GROUP_SELECTION, "rename parameters, and their optimizer states; repeatable, applied "
        "in order", AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD,
        kind=TYPE_REPEATED, metavar="REGEX=REPLACEMENT",
    )  # fmt: skip
    map: str | None = option(
        None, GROUP_OPERATIONS, "another naming of the same model: a mapping table that comes with "
        "rankxform (`rankxform maps` lists them), or a file (*.toml)", *_ALL, metavar="NAME",
    )  # fmt: skip
    names: str = option(
        AS_STORED, GROUP_OPERATIONS, "what parameters and optimizer states are called: as "
        "MindSpore, PyTorch or HyperParallel does (default: as they are stored)", *_ALL,
        kind=choice_of(NAMINGS_OF_FRAMEWORKS),
    )  # fmt: skip
    config: str | None = option(
        None, GROUP_OPERATIONS, "the model's config.json, whose sizes the map needs, and which "
        "goes to a Hugging Face DST (default: of --like, or of SRC)", *_ALL, metavar="FILE",
    )  # fmt: skip
    like: str | None = option(
        None, GROUP_OPERATIONS, "a published Hugging Face folder of the model: its config.json is "
        "taken, and copied to a Hugging Face DST with the tokenizer's files; with --map some "
        "tensors are compared, and a wrong --qkv or --gate-up is refused", *_ALL, metavar="FOLDER",
    )  # fmt: skip
    qkv: str | None = option(
        None, GROUP_OPERATIONS, "how q, k and v are joined, which no file records: by groups of "
        "heads, or one after another (default: grouped, as in MindFormers)", *_ALL,
        kind=choice_of(("grouped", "contiguous")),
    )  # fmt: skip
    gate_up: str | None = option(
        None, GROUP_OPERATIONS, "how gate and up are joined, which no file records (default: "
        "interleaved, as in MindFormers)", *_ALL, kind=choice_of(("interleaved", "contiguous")),
    )  # fmt: skip
    variant: tuple[str, ...] = option(
        (), GROUP_OPERATIONS, "in which of several ways MindFormers has what a map knows, such as "
        "mla=apart; repeatable (default: as the names that are there tell, or the destination's "
        "strategy, else as MindFormers' configurations have it)", *_ALL, kind=TYPE_REPEATED,
        metavar="NAME=WAY",
    )  # fmt: skip
    experts: str | None = option(
        None, GROUP_OPERATIONS, "how experts of Hugging Face's names lie in the destination: one "
        "by one; stacked in gate_up_proj [E, 2F, H] and down_proj [E, H, F], as Transformers 5 "
        "holds them; or so with the last two axes exchanged (default: with --map one by one, else "
        "as they are)", *_ALL, kind=choice_of(("apart", "stacked", "transposed")),
    )  # fmt: skip
    towers: str | None = option(
        None, GROUP_OPERATIONS, "with --map, what is beside the language model of a larger one, as "
        "its vision tower is: carried under its names, or left out", *_ALL,
        kind=choice_of(("keep", "drop")),
    )  # fmt: skip
    weights_only: bool = option(
        False, GROUP_OPERATIONS, "leave out optimizer states and counters", *_ALL, kind=TYPE_FLAG,
        flags=("--weights-only", "--no-optimizer"),
    )  # fmt: skip
    masters: bool = option(
        False, GROUP_OPERATIONS, "take the Float32 masters (main_param.*) in the place of "
        "parameters", *_ALL, kind=TYPE_FLAG,
    )  # fmt: skip
    dtype: str | None = option(
        None, GROUP_OPERATIONS, "type of floating parameters at the destination; not of optimizer "
        "states", *_ALL, kind=choice_of(TYPES, also=WRITTEN_OUT),
    )  # fmt: skip
    keep_dtype: tuple[str, ...] = option(
        (), GROUP_OPERATIONS, "parameters that keep their type; repeatable", *_ALL,
        kind=TYPE_REPEATED, metavar="REGEX",
    )  # fmt: skip
    cast_states: tuple[str, ...] = option(
        (), GROUP_OPERATIONS, "optimizer states and counters that get the type too; repeatable",
        *_ALL, kind=TYPE_REPEATED, metavar="REGEX",
    )  # fmt: skip
    lora: str | None = option(
        None, GROUP_OPERATIONS, "add a LoRA adapter to the matrices that it is for: a folder or "
        "file, which may be SRC itself", *_ALL, metavar="FOLDER",
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, GROUP_OPERATIONS, "alpha of the adapter, where it has no adapter_config.json", *_ALL,
        kind=TYPE_DECIMAL, metavar="A",
    )  # fmt: skip
    lora_rank: int | None = option(
        None,
        GROUP_OPERATIONS,
        "rank of the adapter, likewise",
        *_ALL,
        kind=TYPE_NUMBER,
        metavar="R",
    )
    lora_strategy: str | None = option(
        None, GROUP_OPERATIONS, "how the adapter is sharded, if it is in folders of several ranks "
        "(default: as SRC)", *_ALL, metavar="STRATEGY",
    )  # fmt: skip
    vocab: int | None = option(
        None, GROUP_OPERATIONS, "rows of the vocabulary at the destination: adds padding, or "
        "takes it away", *_ALL, kind=TYPE_NUMBER, metavar="N",
    )  # fmt: skip
    vocab_fill: str | None = option(
        None, GROUP_OPERATIONS, "what added rows hold (default: zeros; optimizer states always do)",
        *_ALL, kind=choice_of(VOCABULARY_FILLS),
    )  # fmt: skip
    vocab_cut: bool = option(
        False, GROUP_OPERATIONS, "take away rows that are no padding too", *_ALL, kind=TYPE_FLAG
    )
