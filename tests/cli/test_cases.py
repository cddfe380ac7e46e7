"""Inputs after public bug reports (tests/data/cases), by one process and by three: the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import reference
from tests.forked import run_forked
from tests.test_cases import PATTERNS, made

__all__ = ["made"]

RANKS = {"q.weight": ([2], [0, -1], 0, 0), "o.weight": ([2], [-1, 0], 0, 0)}
JOINED = "--map qwen3 --config config.json"
COMMANDS = {
    "ms_optimizers": [
        f"{kind} DST --src-strategy {kind}.json {more}"
        for kind in ("adam", "lamb", "ftrl")
        for more in ("--weights-only", "--dtype fp16")
    ],
    "mcore_chained": ["mcore DST --weights-only", "mcore DST --dtype fp16"],
    "state_like_weights": [". DST --weights-only"],
    "zero3_empty": ["checkpoint-10 DST", ". DST"],
    "rank_in_name": [
        f"{kind} DST --src-strategy A " + (f"--src-pattern {pattern}" if pattern else "")
        for kind, pattern in PATTERNS.items()
        if len(kind) == 1
    ],
    "vllm_sharded": [
        "ckpt DST --src-strategy V --src-pattern model-rank-{rank}-part-*", "ckpt DST",
    ],
    "litter": ["index DST", "single DST"],
    "st_headers": ["null DST", "dup DST", "onlymeta DST"],
    "stale_index": [". DST"],
    "other_formats": ["bin DST", "verl DST", "zarr DST"],
    "hf_cache": [". DST"],
    "stray_file": ["quantized DST", "same DST"],
    "mcore_to_hf": [f"mcore DST {JOINED}", f"mcore DST {JOINED} --vocab 40 --vocab-cut"],
    "quantized_base": [
        "base-w8a8 DST", "base-gptq DST --dtype bf16", "base-bnb DST --lora lora",
    ],
    "odd_names": ["both DST", "both DST --dtype bf16"],
    "peft_configs": ["base DST --lora patterns", "base DST --lora pissa"],
    "lora_into_ranks": ["hf DST --map qwen3 --lora lora"],
    "many_tensors": ["hf DST --map qwen3_moe --config hf/config.json --dst-form unified"],
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("case", COMMANDS)
def test_three_processes_do_what_one_does(case, made, tmp_path):
    reference.write_strategy(tmp_path / "A", [RANKS])
    reference.write_strategy(tmp_path / "V", [{**RANKS, "norm.weight": ([2], [-1], 0, 0)}])
    for command in COMMANDS[case]:
        alone = done(command, made(case), tmp_path, tmp_path / "dst", 1)
        assert done(command, made(case), tmp_path, tmp_path / "dst", 3) == alone, command
        assert alone[0] in (0, 2, 3, 4, 6)


def done(command, case, strategies, dst, processes):
    """Return the exit code of a command, what is said that is wrong or doubted, and its files."""
    form = [] if "--dst-form" in command else ["--dst-form", "huggingface"]
    places = {"DST": str(dst), "A": str(strategies / "A"), "V": str(strategies / "V")}
    words = ["transform", *(places.get(word, word) for word in command.split()), *form]
    found = run_forked([*words, "--no-fsync", "--json"], processes, case)
    document = json.loads(found.stdout)
    said = {key: document.get(key) for key in ("what", "where", "tries", "warnings", "left_out")}
    files = {
        path.relative_to(dst): path.read_bytes()
        for path in sorted(Path(dst).rglob("*"))
        if path.is_file() and path.name != "rankxform.json"
    }
    shutil.rmtree(dst, ignore_errors=True)
    return found.code, said, files
