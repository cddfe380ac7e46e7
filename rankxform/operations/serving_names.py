"""What versions of vLLM, and its plugin for Ascend, call the tensors of a sharded_state folder.

A tensor has the name of the smallest path of modules by which vLLM reaches it, and paths move with
its releases; what is in a tensor does not. Names of 0.24 to 0.33 are made first, and here become
those of others. Established with vLLM's own classes of 0.13.0, 0.14.1, 0.16.0, 0.18.1, 0.20.0,
0.23.0 and 0.26.0 to 0.33.0; Ascend's are read in its source of August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rankxform.errors import UsageError

ASCEND = "ascend"
_FIRST_WITH_SCALARS, _NEWEST = 14, 33
NEWEST = f"0.{_NEWEST}"
_RANGES = ((11, 13), (14, 14), (16, 18), (20, 20), (23, 23), (24, _NEWEST))
"""First and last minor versions that call everything alike; others were not looked at."""
_VERSION = re.compile(r"0\.([1-9]\d{0,2})(?:\.\d{1,3})?")

_OF_EXPERTS = re.compile(r"\.(mlp|block_sparse_moe)\.(experts|gate)\.|\.mla_attn\.")
_ROUTED = re.compile(r"\bexperts\.routed_experts\.(w13_weight|w2_weight)$")
_SHARED = "mlp.experts._shared_experts._layer."
_ROUTER = "mlp.experts.gate.weight"
_CORRECTION = "mlp.experts.gate.e_score_correction_bias"
_CORRECTION_OF_GLM = "mlp.experts.routed_experts.e_score_correction_bias"
_LATENT = re.compile(r"\bmla_attn\.(q_a_layernorm|q_b_proj|q_proj|o_proj)\.weight$")


def check_version(text: str, platform: str | None) -> int:
    """Return the minor version that `--vllm-version` names. Raises UsageError."""
    match = _VERSION.fullmatch(text)
    number = int(match[1]) if match else 0
    if not _RANGES[0][0] <= number <= _NEWEST:
        raise UsageError(
            f"--vllm-version {text}: names are known of 0.{_RANGES[0][0]} to 0.{_NEWEST}",
            f"--vllm-version 0.{_NEWEST}, and a start that says what it misses",
            "--dst-form huggingface, which vLLM reads of any version",
        )
    if platform == ASCEND and number < _RANGES[-1][0]:
        raise UsageError(
            f"--vllm-version {text}: Ascend's names are known from 0.{_RANGES[-1][0]} on",
            "--dst-form huggingface, which vLLM reads of any version",
        )
    return number


def naming_of(version: int, platform: str | None, architecture: str) -> Callable[[str], str | None]:
    """Return what makes the newest name of a tensor that of a version; None: it has no such tensor.

    Raises UsageError for a name that versions move and this one was not looked at for.
    """
    first_alike = next((first for first, last in _RANGES if first <= version <= last), None)

    def name_in_version(name: str) -> str | None:
        if name.endswith("_scale") and version < _FIRST_WITH_SCALARS:
            return None
        if not _OF_EXPERTS.search(name):
            return name
        if first_alike is None:
            raise UsageError(
                f"what vLLM 0.{version} calls {name!r} is not known, and its neighbours differ",
                f"--vllm-version 0.{_NEWEST}",
                "--dst-form huggingface, which vLLM reads of any version",
            )
        if first_alike == _RANGES[-1][0]:
            return _on_ascend(name) if platform == ASCEND else name
        return _of_earlier(name, first_alike, architecture)

    return name_in_version


def _on_ascend(name: str) -> str:
    name = _LATENT.sub(r"\1.weight", name)
    for newest in (_ROUTER, _CORRECTION):
        if name.endswith(newest):
            return name.replace("experts.gate.", "experts._gate.")
    return name


def _of_earlier(name: str, version: int, architecture: str) -> str:
    """Return the name before 0.24. version: the first of those that call everything alike."""
    name = _ROUTED.sub(r"experts.\1", name)
    is_qwen = architecture.startswith("Qwen")
    has_alias = version == 16 if is_qwen else version < 20
    if name.endswith(_ROUTER):
        router = "mlp.experts.runner.gate" if version == 23 else "mlp.gate"
        return name.replace("mlp.experts.gate", "mlp.experts._gate" if has_alias else router)
    if name.endswith(_CORRECTION):
        return name.replace("experts.gate.", "experts._gate." if has_alias else "experts.")
    if name.endswith(_CORRECTION_OF_GLM):
        return name.replace("experts.routed_experts.", "experts.")
    if _SHARED in name:
        before = "mlp.experts._shared_experts." if version < 20 else "mlp.shared_experts."
        return name.replace(_SHARED, before)
    return name
