"""What an error advises is tried: the same error does not return.

A try that begins with options is applied to the command line that failed, and the command runs
again. It ends well, or with an error about something else. Placeholders (FILE) and tries in words
are left to the reader.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rankxform.cli.main import main
from tests.corpus import SOURCES, STRATEGIES, write_wrong
from tests.tries import FILES, TESTS, flags_of, takes_value

CASES = Path(__file__).parents[1] / "data" / "cases"
OPTIONS = (
    "--step 7", "--step 1_1", "--exclude .", "--rename x", "--dtype fp16", "--ranks 5",
    "--dst-form checkpoint2", "--dst-form unified", "--vocab 3", "--masters", "--suffix _x",
    "--src-form checkpoint2", "--dst-parallel dp=2", "--check-crc", "--memory 5", "--lora-rank 2",
    "--dst-form huggingface --like b", "--keep-dtype w", "--qkv grouped", "--vocab-cut",
    "--src-pattern x_{rank}/*", "--max-part 1GB", "--iteration 5", "--cast-states w",
)  # fmt: skip
FEWEST = {"provoked": 330, "tried": 100}
"""How many errors were provoked, and how many tries carried out; these may not become fewer."""


def refused(words, dst, capfd):
    """Return the error of a command as --json has it; None if it succeeds."""
    shutil.rmtree(dst, ignore_errors=True)
    code = main([*words, "--no-fsync", "--json"])
    out, _ = capfd.readouterr()
    document = json.loads(out)
    assert code != 70, document
    return None if code == 0 else document


def with_flags(words, flags):
    """Return a command with more options; those that are given once replace the earlier."""
    words = [*words]
    for flag in flags:
        if flag.startswith("--") and flag in words and takes_value(flag):
            place = words.index(flag)
            if flag not in ("--exclude", "--include", "--rename", "--accept"):
                del words[place : place + 2]
    return [*words, *flags]


def commands(tmp_path):
    """Yield command lines that fail, or may."""
    for src, (a, b) in product(SOURCES, product(STRATEGIES, STRATEGIES[1:4])):
        given = ["--src-strategy", a] if a else []
        yield ["transform", src, "dst", *given, "--dst-strategy", b]
    for src, text in product(("src_a", "steps", "lost"), OPTIONS):
        yield ["transform", src, "dst", "--src-strategy", "a", *shlex.split(text)]
    names = {"q.qweight": np.ones((2, 2), "i4"), "q.scales": np.ones((1, 2), "f2")}
    copies = {n: np.ones((2, 2), "f4") for n in ("w", "ema.w", "adam_m.w", "main_param.w")}
    numbers = {n: np.ones((2, 2), "f4") for n in ("w", "adam_m.0")}
    for name, arrays in (("ints", names), ("copies", copies), ("numbers", numbers)):
        (tmp_path / name).mkdir()
        save_file(arrays, tmp_path / name / "model.safetensors")
        for text in ("--dtype bf16", "--weights-only", "--dst-form dcp --names torch", "--masters"):
            more = [] if "dst-form" in text else ["--dst-form", "huggingface"]
            yield ["transform", name, "dst", *more, *shlex.split(text)]
    for name in ("odd_vocab", "quantized_base", "mcore_to_hf"):
        words = [sys.executable, str(CASES / f"{name}.py"), str(tmp_path / name), sys.executable]
        subprocess.run(words, check=True, capture_output=True)
    for kind in ("untied", "tied"):
        for text in (
            "--map qwen3",
            "--map llama",
            "--map qwen3 --vocab 40",
            "--vocab 5",
            "--names torch",
        ):
            yield ["transform", f"odd_vocab/{kind}", "dst", "--dst-form", "dcp", *shlex.split(text)]
    config = ["--map", "qwen3", "--config", "mcore_to_hf/config.json", "--dst-form", "huggingface"]
    yield ["transform", "mcore_to_hf/mcore", "dst", *config]
    yield ["transform", "mcore_to_hf/tmp", "dst", *config]


@pytest.mark.filterwarnings("ignore")
def test_the_tests_whose_tries_are_tried_are_there():
    """A file that was renamed would be left out without a word."""
    assert [name for name in FILES if not (TESTS / name).is_file()] == []


def test_no_try_leads_to_the_same_error_again(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_wrong(tmp_path)
    dst, provoked, tried, wrong = tmp_path / "dst", 0, 0, []
    for words in commands(tmp_path):
        error = refused(words, dst, capfd)
        if error is None:
            continue
        provoked += 1
        for text in error["tries"]:
            flags = flags_of(text)
            if not flags:
                continue
            tried += 1
            again = refused(with_flags(words, flags), dst, capfd)
            if again is not None and (again["what"], again["where"]) == (
                error["what"],
                error["where"],
            ):
                wrong.append((shlex.join(words), text, error["what"]))
    assert not wrong, f"{len(wrong)} of {tried} tries:\n" + "\n".join(map(str, wrong[:20]))
    assert provoked >= FEWEST["provoked"] and tried >= FEWEST["tried"], (provoked, tried)
