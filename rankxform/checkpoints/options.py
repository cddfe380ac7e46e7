"""How a destination's files are made: options."""

from __future__ import annotations

from rankxform.formats.base import FORMATS
from rankxform.options import BYTES, COMPARE, FIT, FLAG, LIMIT, NUMBER, OUTPUT, one_of, option
from rankxform.values import dataclass

from .base import FORMS


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """How a destination's files are made. See the help of each."""

    dst_form: str | None = option(
        None, OUTPUT, "form of DST (default: ranks; of verify: recognized)", BYTES, COMPARE, FIT,
        kind=one_of(FORMS, lambda form: form.is_written, {"hf": "huggingface"}),
    )  # fmt: skip
    prefix: str | None = option(
        None, OUTPUT, "start of each file's name (default: checkpoint_ in rank folders)", BYTES,
        COMPARE,
    )  # fmt: skip
    max_part: int | None = option(
        None, OUTPUT, "most bytes of a part of unified safetensors (default: 3GiB)", BYTES,
        kind=LIMIT, metavar="SIZE",
    )  # fmt: skip
    max_shard: int | None = option(
        None, OUTPUT, "most bytes of a Hugging Face shard (default: 5GB, of 10^9 bytes)", BYTES,
        kind=LIMIT, metavar="SIZE",
    )  # fmt: skip
    dedup: bool = option(
        False, OUTPUT, "store each slice of a Checkpoint 2.0 once", BYTES, kind=FLAG
    )
    iteration: int | None = option(
        None, OUTPUT, "iteration of the Checkpoint 2.0 that is written (default: the source's "
        "global_step)", BYTES, kind=NUMBER, metavar="N",
    )  # fmt: skip
    format: str | None = option(
        None, OUTPUT, "container of the files (default: the source's if MindSpore loads it, else "
        "safetensors)", COMPARE,
        kind=one_of(FORMATS, lambda container: container.alone),
    )  # fmt: skip
