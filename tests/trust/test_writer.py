"""A program writes the source while it is converted, loaded or verified: no mixture, ever.

RANKXFORM_WRITERS is the number of runs (40 at night).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests import reference
from tests.mpi_launch import environment, mpirun, own_tmp, run
from tests.trust.test_unchanged import append, truncate

ROOT = Path(__file__).parents[2]
RUNS = int(os.environ.get("RANKXFORM_WRITERS", "10"))
NAMES = [f"w{i}" for i in range(24)]
SRC = [dict.fromkeys(NAMES, ([4], [0, -1], 0, 0))]
DST = [dict.fromkeys(NAMES, ([3], [-1, 0], 0, 0))]
PARAMS = dict.fromkeys(NAMES, ((48, 384), "Float32"))
LOAD = """
import hashlib, os, sys, rankxform
found = rankxform.load(sys.argv[1], sys.argv[2], "none")
every = b"".join(found[name].tobytes() for name in sorted(found) if name != "global_step")
os.write(1, f"digest {hashlib.sha1(every).hexdigest()}\\n".encode())
"""


def write(folder, seed, step):
    """Write a whole checkpoint as training does: one file after the other, in place."""
    steps = {"global_step": ("Int32", np.array([step], "<i4"))}
    made = reference.write_checkpoint(
        folder, SRC, PARAMS, steps, make=lambda *what: reference.full_tensor(*what) ^ seed
    )
    return Path(made)


def full(src):
    """Return the tensors of a checkpoint, as one text of bytes."""
    files = [reference.read_ckpt(path) for path in sorted(src.glob("rank_*/*.ckpt"))]
    return b"".join(
        np.concatenate([np.frombuffer(f[n][2], "<u4").reshape(f[n][1]) for f in files]).tobytes()
        for n in sorted(NAMES)
    )


def made(dst):
    """Return the tensors of a destination."""
    files = [reference.read_ckpt(path) for path in sorted(dst.glob("rank_*/*.ckpt"))]
    return b"".join(
        np.concatenate(
            [np.frombuffer(f[n][2], "<u4").reshape(f[n][1]) for f in files], axis=1
        ).tobytes()
        for n in sorted(NAMES)
    )


def whole_in_place(src, other):
    for path in sorted(src.glob("rank_*/*.ckpt")):
        data = (other / path.relative_to(src)).read_bytes()
        with open(path, "r+b") as file:
            for at in range(0, len(data), 1 << 17):
                file.write(data[at : at + (1 << 17)])
                time.sleep(0.002)


def whole_by_rename(src, other):
    for path in sorted(src.glob("rank_*/*.ckpt")):
        fresh = path.with_suffix(".new")
        fresh.write_bytes((other / path.relative_to(src)).read_bytes())
        os.replace(fresh, path)
        time.sleep(0.02)


def block(path):
    """Change bytes in the middle of a tensor."""
    content = reference.read_ckpt(path)["w7"][2]
    with open(path, "r+b") as file:
        file.seek(path.read_bytes().index(content) + len(content) // 2)
        file.write(np.arange(64, dtype="<u4").tobytes())


def one_file(change):
    return lambda src, other: change(src / "rank_2" / "checkpoint_2.ckpt")


WRITERS = {
    "whole files in place": whole_in_place,
    "replaced by rename": whole_by_rename,
    "one block": one_file(block),
    "appended": one_file(append),
    "truncated": one_file(truncate),
    "nothing": lambda src, other: None,
}
VERBS = list(itertools.product(("transform", "load", "verify"), (1, 3)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("writer")
    reference.write_strategy(tmp / "a.ckpt", SRC)
    reference.write_strategy(tmp / "b.ckpt", DST)
    first, second = write(tmp / "first", 0, 100), write(tmp / "second", 1, 200)
    return tmp, first, second


def command(tmp, verb, processes, src, dst):
    words = [*(mpirun(processes) if processes > 1 else []), sys.executable]
    if verb == "load":
        return [*words, "-c", LOAD, str(src), str(tmp / "a.ckpt")]
    return [
        *words, "-m", "tests.trust.slow", verb, str(src), str(dst), "--src-strategy",
        str(tmp / "a.ckpt"), "--dst-strategy", str(tmp / "b.ckpt"), "--memory", "1M",
    ]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(RUNS))
def test_no_mixture(number, place, tmp_path):
    tmp, first, second = place
    rng = random.Random(number)
    kind = list(WRITERS)[number % len(WRITERS)]
    verb, processes = VERBS[(number + number // len(WRITERS)) % len(VERBS)]
    src, dst = write(tmp_path / "src", 0, 100), tmp_path / "dst"
    before = full(first)
    if verb == "verify":
        assert run(command(tmp, "transform", 1, src, dst), 60, env=settings(tmp), cwd=ROOT)[0] == 0
    writer = threading.Timer(rng.uniform(0.2, 1.2), WRITERS[kind], (src, second))
    with own_tmp() as short:
        writer.start()
        code, output = run(
            command(tmp, verb, processes, src, dst), 60, env=settings(short), cwd=ROOT
        )
        writer.join()
    after = before if kind in ("appended", "truncated") else full(src)
    if code:
        assert kind != "nothing", output
        told = verb == "load" and "CheckpointError" in output
        differs = verb == "verify" and code == 6 and before != after  # all was written before
        assert code == 3 or told or differs, (kind, output)
        assert verb != "transform" or not list(dst.glob("rank_*/*.ckpt"))
    elif verb == "transform":
        assert made(dst) in (before, after), kind
    elif verb == "load":
        right = {hashlib.sha1(one).hexdigest() for one in (before, after)}
        found = {line.split()[1] for line in output.splitlines() if line.startswith("digest")}
        assert found and found <= right and len(found) == 1, kind


def settings(tmp):
    return environment(TMPDIR=str(tmp), SLOW_SECONDS="0.01")
