"""What lies where a checkpoint was expected: other tools' files, by their first bytes or names.

One table for all forms: a file that cannot be indexed and a folder that holds no checkpoint are
looked up here, so that a message says what is there instead of what is not.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Signature(NamedTuple):
    """What something is, as "is ..." or "holds ..." is followed by it, and what can be done."""

    title: str
    tries: tuple[str, ...]


_LFS, _PAGE = b"version https://git-lfs", (b"<!doctype html", b"<html")
FIRST_BYTES = 64
"""Bytes of a file that tell what it is."""

_PULL = Signature("a git-lfs pointer in place of the file", ("git lfs pull, in its folder",))
_EMPTY = Signature("empty: 0 bytes", ("copy the file again",))
_HTML = Signature("an HTML page, as a failed download leaves it", ("download the file again",))
_TORCH = Signature(
    "a PyTorch pickle (torch.save), which rankxform does not read",
    ("save it again as safetensors; for HyperParallel, with a version after March 2026",),
)
_SAVE = ("save it with save_pretrained(..., safe_serialization=True), as safetensors",)


def file_signature(first_bytes: bytes) -> Signature | None:
    """Return what a file is by its first bytes; None if that is not known.

    >>> file_signature(b"version https://git-lfs.github.com/spec/v1").title
    'a git-lfs pointer in place of the file'
    """
    if not first_bytes:
        return _EMPTY
    if first_bytes.startswith(_LFS):
        return _PULL
    if first_bytes.lstrip().lower().startswith(_PAGE):
        return _HTML
    if first_bytes.startswith(b"GGUF"):
        return Signature("a GGUF file of llama.cpp", ("convert the model it was made of",))
    if first_bytes.startswith((b"PK\3\4", b"\x80\x02", b"\x80\x04")):
        return _TORCH
    return None


_BY_NAME: tuple[tuple[str, Signature], ...] = (
    (
        r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt",
        Signature(
            "a checkpoint of verl (FSDP)",
            ("python -m verl.model_merger merge --backend fsdp, and convert what it writes",),
        ),
    ),
    (
        r"(bf16_|fp16_)?zero_pp_rank_\d+.*\.pt|mp_rank_\d+_model_states\.pt|global_step\d+"
        r"|zero_to_fp32\.py|latest_universal",
        Signature(
            "a checkpoint of DeepSpeed",
            ("python zero_to_fp32.py . OUT --safe_serialization, and convert OUT",),
        ),
    ),
    (
        r"mp_rank_\d+(_\d+)*|model_optim_rng\.pt",
        Signature(
            "a legacy checkpoint of Megatron (mp_rank_NN)",
            ("save it with --ckpt-format torch_dist, which Megatron reads and writes",),
        ),
    ),
    (
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_METADATA",
        Signature("a checkpoint of Orbax", ("export it as safetensors, by the job that wrote it",)),
    ),
    (
        r"common\.pt",
        Signature(
            "a checkpoint of Megatron in zarr", ("save it with --ckpt-format torch_dist",)
        ),
    ),
    (
        r"\.zarray|\.zgroup|zarr\.json|.*\.zarr",
        Signature("zarr arrays", ("save the checkpoint with --ckpt-format torch_dist",)),
    ),
    (r".*\.gguf", Signature("GGUF files of llama.cpp", ("convert the model they were made of",))),
    (
        r".*\.(pdparams|pdopt)",
        Signature("a checkpoint of Paddle", ("export it as safetensors",)),
    ),
    (r".*\.npz", Signature("arrays of NumPy", ("save them with safetensors.numpy.save_file",))),
    (
        r"consolidated\.\d+\.pth|.*\.(bin|pt|pth)",
        Signature("PyTorch pickles (torch.save), which rankxform does not read", _SAVE),
    ),
    (
        r".*\.(h5|keras|msgpack|onnx|data-\d+-of-\d+)",
        Signature("weights of another framework", ("export them as safetensors",)),
    ),
)  # fmt: skip
"""Names of files and folders, and what a folder with one of them holds; the first one counts."""


def folder_signature(names: Collection[str]) -> tuple[str, Signature] | None:
    """Return a name in a folder, and what the folder holds by it; None if not known.

    >>> folder_signature(["config.json", "model.gguf"])[1].title
    'GGUF files of llama.cpp'
    """
    for pattern, signature in _BY_NAME:
        for name in sorted(names):
            if re.fullmatch(pattern, name):
                return name, signature
    return None
