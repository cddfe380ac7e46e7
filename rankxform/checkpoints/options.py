"""How a destination's files are made: options."""

from __future__ import annotations

from rankxform.formats.container import CONTAINERS
from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    AFFECTS_FIT,
    GROUP_DESTINATION,
    TYPE_FLAG,
    TYPE_LIMIT,
    TYPE_NUMBER,
    choice_of,
    option,
)
from rankxform.values import dataclass

from .base import FORMS


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """How a destination's files are made. See the help of each."""

    dst_form: str | None = option(
        None, GROUP_DESTINATION, "form of DST (default: ranks; of verify: recognized)",
        AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT,
        kind=choice_of(FORMS, "is_written", {"hf": "huggingface"}),
    )  # fmt: skip
    prefix: str | None = option(
        None, GROUP_DESTINATION, "start of each file's name (default: checkpoint_ in rank folders)",
        AFFECTS_BYTES, AFFECTS_COMPARISON,
    )  # fmt: skip
    max_part: int | None = option(
        None, GROUP_DESTINATION, "most bytes of a part of unified safetensors (default: 3GiB)",
        AFFECTS_BYTES, kind=TYPE_LIMIT, metavar="SIZE",
    )  # fmt: skip
    max_shard: int | None = option(
        None, GROUP_DESTINATION, "most bytes of a Hugging Face shard, or of a vLLM part (default: "
        "5GB, of 10^9 bytes)",
        AFFECTS_BYTES, kind=TYPE_LIMIT, metavar="SIZE",
    )  # fmt: skip
    tensor_parallel: int | None = option(
        None, GROUP_DESTINATION, "ranks that a vLLM folder is cut for (--tensor-parallel-size)",
        AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT, kind=TYPE_NUMBER, metavar="T",
    )  # fmt: skip
    pipeline_parallel: int | None = option(
        None, GROUP_DESTINATION, "pipeline stages of a vLLM folder (default: 1)", AFFECTS_BYTES,
        AFFECTS_COMPARISON, AFFECTS_FIT, kind=TYPE_NUMBER, metavar="P",
    )  # fmt: skip
    expert_parallel: bool = option(
        False, GROUP_DESTINATION, "each of vLLM's ranks has whole experts, one range after another "
        "(--enable-expert-parallel)", AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT,
        kind=TYPE_FLAG,
    )  # fmt: skip
    vllm_version: str | None = option(
        None, GROUP_DESTINATION, "version of vLLM that a folder is for (default: the newest known)",
        AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT,
    )  # fmt: skip
    platform: str | None = option(
        None, GROUP_DESTINATION, "where vLLM runs (cuda, ascend; default: cuda)", AFFECTS_BYTES,
        AFFECTS_COMPARISON, AFFECTS_FIT, kind=choice_of(("cuda", "ascend")),
    )  # fmt: skip
    transformer_impl: str | None = option(
        None, GROUP_DESTINATION, "layers of the Megatron job that a torch_dist folder is for "
        "(transformer_engine, local)", AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT,
        kind=choice_of(("transformer_engine", "local")),
    )  # fmt: skip
    dedup: bool = option(
        False,
        GROUP_DESTINATION,
        "store each slice of a Checkpoint 2.0 once",
        AFFECTS_BYTES,
        kind=TYPE_FLAG,
    )
    iteration: int | None = option(
        None, GROUP_DESTINATION, "iteration of the Checkpoint 2.0 that is written (default: the "
        "source's global_step)", AFFECTS_BYTES, kind=TYPE_NUMBER, metavar="N",
    )  # fmt: skip
    format: str | None = option(
        None, GROUP_DESTINATION, "container of the files (default: the source's if MindSpore "
        "loads it, else safetensors)", AFFECTS_COMPARISON,
        kind=choice_of(CONTAINERS, "alone"),
    )  # fmt: skip
