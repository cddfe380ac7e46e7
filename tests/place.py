"""A source, two strategies and a destination in one folder: where most conversions are tested."""

from __future__ import annotations

import json
from pathlib import Path

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
