"""The keywords of the API, for type checkers: the options of `rankxform.job.request` by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from rankxform.planning.cost_model import Costs


class DeriveOptions(TypedDict, total=False):
    """Keywords of `rankxform.derive`: the options of the destination's strategy but the sizes."""

    unproven: bool
    predict: bool
    opt_on: str | Sequence[str]
    opt_off: str | Sequence[str]
    layers: str | None
    layers_per_stage: Sequence[int]
    offset: Sequence[int]
    interleave: int | None
    first: str | Sequence[str]
    last: str | Sequence[str]
    shared: str | Sequence[str]
    unsharded: str | None


class LoadOptions(DeriveOptions, total=False):
    """Keywords of `rankxform.load`: the options that concern no files of a destination."""

    include: str | Sequence[str]
    exclude: str | Sequence[str]
    rename: str | Sequence[str]
    map: str | None
    config: str | None
    like: str | None
    qkv: str | None
    gate_up: str | None
    weights_only: bool
    masters: bool
    dtype: str | None
    keep_dtype: str | Sequence[str]
    cast_states: str | Sequence[str]
    lora: str | None
    lora_alpha: float | None
    lora_rank: int | None
    lora_strategy: str | None
    vocab: int | None
    vocab_fill: str | None
    vocab_cut: bool
    unmatched: str
    unlisted: str
    dst_parallel: str | None
    dst_config: str | None
    src_parallel: str | None
    src_config: str | None
    preset: str | None
    rule: str | Sequence[str]
    optimizer_shard: str | None
    threshold: int | None
    src_threshold: int | None
    src_form: str | None
    src_pattern: str
    step: str | None
    suffix: str | None
    check_crc: bool
    allow_extra_ranks: bool
    allow_equal_slices: bool
    read_method: str
    costs: Costs | None
    memory: int
    files: Mapping[int, str] | None


class Options(LoadOptions, total=False):
    """Keywords of `rankxform.transform`, `verify` and `plan`: all options."""

    ranks: Sequence[int]
    dst_form: str | None
    prefix: str | None
    max_part: int | None
    max_shard: int | None
    dedup: bool
    iteration: int | None
    format: str | None
    link: str
    dst_placement: str
    shapes: str | None
    overwrite: bool
    fsync: bool
    crc: bool
    verify: bool
    check_replicas: str
