"""A source, two strategies and a destination in one folder: where most conversions are tested."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference


class Place:
    """`src` and `dst` are strategies as `tests.reference` writes them, by stage."""

    def __init__(self, tmp, src, dst, params, kind="ckpt", **checkpoint):
        self.tmp, self.kind = tmp, kind
        self.dst_stages, self.params = dst, params
        self.src = Path(
            reference.write_checkpoint(tmp / "src", src, params, kind=kind, **checkpoint)
        )
        self.a = reference.write_strategy(tmp / "a.ckpt", src)
        self.b = reference.write_strategy(tmp / "b.ckpt", dst)
        self.dst = tmp / "dst"
        self.strategies = ["--src-strategy", self.a, "--dst-strategy", self.b]

    def transform(self, **options):
        return rankxform.transform(self.src, self.dst, self.a, self.b, **options)

    def verify(self, **options):
        return rankxform.verify(self.src, self.dst, self.a, self.b, **options)

    def shard(self, rank):
        """Return the path of a source rank's file."""
        return self.src / f"rank_{rank}" / f"checkpoint_{rank}.{self.kind}"

    def final(self, rank):
        """Return the path of a destination rank's file."""
        return self.dst / f"rank_{rank}" / f"checkpoint_{rank}.{self.kind}"

    @property
    def good(self):
        """Whether every element of the destination is where the strategy wants it."""
        return reference.wrong_slices(self.dst, self.dst_stages, self.params, self.kind) == []

    @property
    def manifest(self):
        return json.loads((self.dst / "rankxform.json").read_text())


def punch(path, start, nbytes):
    """Write a file anew, with a hole; skip the test where there are none."""
    data = path.read_bytes()
    path.unlink()
    with open(path, "wb") as file:
        file.write(data[:start])
        file.seek(start + nbytes)
        file.write(data[start + nbytes :])
        file.truncate(len(data))
    if path.stat().st_blocks * 512 >= len(data):
        pytest.skip("this file system has no holes")


def of_another_step(path, *, keep_time=True):
    """Write a file of the same size and headers under the name, as `cp -p` of another step does."""
    status, data = path.stat(), path.read_bytes()
    fresh = path.with_name(path.name + ".new")
    if path.suffix == ".safetensors":
        start = 8 + int.from_bytes(data[:8], "little")
        content = np.frombuffer(data[start:], "u1")
        fresh.write_bytes(data[:start] + (content ^ 1).tobytes())
    else:
        entries = reference.read_ckpt(path)
        changed = {
            name: (dtype, np.frombuffer(held, reference.WORD[reference.ITEM[dtype]]) ^ 1)
            for name, (dtype, _, held) in entries.items()
        }
        shapes = {name: shape for name, (_, shape, _) in entries.items()}
        reference.write_ckpt(
            fresh, {n: (d, words.reshape(shapes[n])) for n, (d, words) in changed.items()}
        )
    assert fresh.stat().st_size == status.st_size
    if keep_time:
        os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(fresh, path)


def contents(folder):
    """Return the bytes of all files by name, but for the manifest's, which holds times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name != "rankxform.json"
    }
