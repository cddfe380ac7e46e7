"""The names of Megatron-Core's tensors, of whichever specification and kind of file, as one.

A layer's norms and its two matrices are called otherwise where Transformer Engine fuses them with a
matrix, and otherwise again by its fuser of operations; a torch_dist folder has Transformer Engine's
names even of a job without it. Here all have those of the local specification, which MindFormers
shares (megatron-core 0.16.1, `models/gpt/gpt_layer_specs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rankxform.errors import CheckpointError
from rankxform.storage.store import Store
from rankxform.values import pattern_on_use

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = pattern_on_use(r"iter_([0-9]{7,18})")
RANK_FILES = "model_optim_rng.pt", "model_rng.pt"
_FIRST_RANKS = "mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000"
MEGATRONS_JOINING = MappingProxyType({"qkv": "grouped", "gate_up": "contiguous"})
"""q, k and v of a group together, gate before up, as a `Form` says it."""
MEGATRONS_VARIANTS = MappingProxyType({"experts": "megatron", "mla": "apart", "bias": "router"})
"""Which of a map's ways are Megatron's."""

_SPELLED_OTHERWISE = (
    (r"\bself_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"\bmlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"\blinear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r"\1_layernorm.\2"),
    (r"\bmlp\.0\.(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"\bmlp\.1\.basic_ops\.0\.(weight|bias)$", r"mlp.linear_fc1.\1"),
    (r"\bmlp\.3\.basic_ops\.0\.(weight|bias)$", r"mlp.linear_fc2.\1"),
)
_EITHER = pattern_on_use("|".join(f"(?:{pattern})" for pattern, _ in _SPELLED_OTHERWISE))
_MTP = "mtp_model_layer.", "transformer_layer."
"""What newer files of ranks call the layer of a multi-token prediction."""


def local_name(name: str) -> str:
    """Return what the local specification calls a tensor.

    >>> local_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'decoder.layers.0.pre_mlp_layernorm.weight'
    """
    name = name.replace(*_MTP)
    if _EITHER().search(name):
        for pattern, replacement in _SPELLED_OTHERWISE:
            name = re.sub(pattern, replacement, name)
    return name


def local_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Return by stored name what the local specification calls it.

    Raises CheckpointError where two are one.
    """
    stored_by_name: dict[str, str] = {}
    for stored in names:
        first_stored = stored_by_name.setdefault(local_name(stored), stored)
        if first_stored != stored:
            text = f"{first_stored} and {stored} are two names of one tensor, {local_name(stored)}"
            raise CheckpointError(text, "save the checkpoint again", where=source)
    return {stored: name for name, stored in stored_by_name.items()}


def holds_rank_files(iteration: str, store: Store) -> bool:
    """Tell whether a folder holds the file of the first rank, by any of its names."""
    return any(store.has(f"{iteration}/{rank}/{n}") for rank in _FIRST_RANKS for n in RANK_FILES)


def unmappable(training: Mapping[str, Any]) -> str:
    """Return why tensors of a training are not as a map takes them; "" if they are."""
    if training.get("apply_layernorm_1p"):
        return "norms are stored less 1 (--apply-layernorm-1p)"
    if training.get("attention_output_gate"):
        return "linear_qkv holds a gate of the attention's output (--attention-output-gate)"
    return ""
