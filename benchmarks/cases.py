"""The checkpoints that are measured: names, shapes, two strategies, and files of random bytes.

A case is made once under a folder and reused. Layouts are those of `tests.reference`:
``(device_matrix, tensor_map, step, size)``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests import reference

MIB = 1 << 20


@dataclass
class Case:
    """One conversion. `src` or `dst` None is a complete file; `output` the bytes it writes."""

    name: str
    about: str
    params: dict
    src: list | None
    dst: list | None

    @property
    def output(self):
        total = 0
        for stage in self.dst or [None]:
            for name, (shape, dtype) in self.params.items():
                nbytes = int(np.prod(shape)) * reference.ITEM[dtype]
                if stage is None:
                    total += nbytes
                elif name in stage:
                    layout = stage[name]
                    total += copies(layout) * nbytes
        return total


def copies(layout):
    """Return how many ranks hold each element."""
    matrix, tensor_map, step, size = layout
    ranks = int(np.prod(matrix))
    sharded = [a for entry in tensor_map for a in reference.axes_of(entry)]
    free = ranks // int(np.prod([matrix[len(matrix) - 1 - a] for a in sharded], dtype=int))
    return free // (size if step and size > 0 else free if step and size else 1)


def mixed(gigabytes):
    """8 to 4 ranks, mp4 dp2 to mp2 dp2; every fifth parameter is sharded on its last axis."""
    count = gigabytes * 1024 // 2 // 16
    params = {f"layers.{i}.weight": ((2048, 2048), "Float32") for i in range(count)}
    maps = {name: [-1, 0] if i % 5 == 4 else [0, -1] for i, name in enumerate(params)}
    src = [{name: ([2, 4], m, 0, 0) for name, m in maps.items()}]
    dst = [{name: ([2, 2], m, 0, 0) for name, m in maps.items()}]
    about = f"8 to 4 ranks, mp4 dp2 to mp2 dp2, {gigabytes} GiB written"
    return Case(f"mixed-{gigabytes}g", about, params, src, dst)


def inner(merge):
    """1 to 8 ranks, or back, sharded on the last axis in runs of 256 bytes."""
    params = {f"w{i}": ((1 << 16, 512), "Float32") for i in range(4)}
    sharded = [dict.fromkeys(params, ([8], [-1, 0], 0, 0))]
    if merge:
        return Case("inner-8to1", "8 to 1, last axis, 256-byte runs", params, sharded, None)
    return Case("inner-1to8", "1 to 8, last axis, 256-byte runs", params, None, sharded)


def restage():
    """2 pipeline stages to 1, sharding unchanged."""
    params = {f"layers.{i}.weight": ((2048, 2048), "Float32") for i in range(64)}
    layout = ([2], [0, -1], 0, 0)
    names = list(params)
    src = [dict.fromkeys(names[:32], layout), dict.fromkeys(names[32:], layout)]
    return Case(
        "restage",
        "pipeline 2 x 2 to 1 x 2, sharding unchanged",
        params,
        src,
        [dict.fromkeys(names, layout)],
    )


def replicas():
    """Data parallel without optimizer shard, 8 to 8 ranks: four equal files of each slice."""
    params = {f"layers.{i}.weight": ((2048, 2048), "Float32") for i in range(16)}
    src = [dict.fromkeys(params, ([2, 4], [0, -1], 0, 0))]
    dst = [dict.fromkeys(params, ([4, 2], [0, -1], 0, 0))]
    return Case("replicas", "mp4 dp2 to mp2 dp4, 8 to 8 ranks", params, src, dst)


def llama70b(case="small", scale=64):
    """Llama-2 70B's parameters and Adam states, dims over `scale`: dp2 mp4 pp8 to dp2 mp8 pp4, or,
    as the case "many", to dp8 mp16 pp8 without optimizer parallel."""
    h, ffn, kv, vocabulary, layers = (
        8192 // scale,
        28672 // scale,
        1024 // scale,
        32768 // scale,
        80,
    )
    column, row, whole = [0, -1], [-1, 0], [-1]
    weights = {"model.tok_embeddings.embedding_weight": ((vocabulary, h), column, False)}
    for i in range(layers):
        p = f"model.layers.{i}."
        for name, shape, tensor_map, shard in (
            ("attention_norm.weight", (h,), whole, False),
            ("attention.wq.weight", (h, h), column, True),
            ("attention.wk.weight", (kv, h), column, True),
            ("attention.wv.weight", (kv, h), column, True),
            ("attention.wo.weight", (h, h), row, True),
            ("ffn_norm.weight", (h,), whole, False),
            ("feed_forward.w1.weight", (ffn, h), column, True),
            ("feed_forward.w2.weight", (h, ffn), row, True),
            ("feed_forward.w3.weight", (ffn, h), column, True),
        ):
            weights[p + name] = shape, tensor_map, shard
    weights["model.norm_out.weight"] = (h,), whole, False
    weights["lm_head.weight"] = (vocabulary, h), column, True
    params = {}
    for name, (shape, _, _) in weights.items():
        params[name] = shape, "Float16" if len(shape) > 1 else "Float32"
        params |= {f"{state}.{name}": (shape, "Float32") for state in ("adam_m", "adam_v")}

    def stages(mp, pp, dp=2):
        found = [{} for _ in range(pp)]
        for name, (_, tensor_map, shard) in weights.items():
            layer = name.split(".")[2] if ".layers." in name else None
            stage = (
                int(layer) * pp // layers
                if layer
                else pp - 1
                if name[0] == "l" or "norm_out" in name
                else 0
            )
            layout = [dp, mp], tensor_map, *((mp, 2) if shard and dp == 2 else (0, 0))
            for state in ("", "adam_m.", "adam_v."):
                found[stage][state + name] = layout
        return found

    dst = stages(8, 4) if case == "small" else stages(16, 8, 8)
    ranks = 64 if case == "small" else 1024
    about = f"64 to {ranks:,} ranks, {len(params):,} parameters of a 70B model, dims/{scale}"
    return Case(case, about, params, stages(4, 8), dst)


def one_large():
    """One parameter of 4 GiB, rows to columns."""
    params = {"experts.weight": ((1 << 15, 1 << 15), "Float32")}
    src, dst = ([{"experts.weight": ([4], m, 0, 0)}] for m in ([0, -1], [-1, 0]))
    return Case(
        "large", "one parameter of 4 GiB, 4 row slices to 4 column slices", params, src, dst
    )


CASES = {
    "mixed-1g": lambda: mixed(1),
    "mixed-4g": lambda: mixed(4),
    "inner-1to8": lambda: inner(False),
    "inner-8to1": lambda: inner(True),
    "restage": restage,
    "replicas": replicas,
    "small": llama70b,
    "many": lambda: llama70b("many"),
    "large": one_large,
}


def make(name, folder, kind="ckpt"):
    """Make the case's files under `folder` unless they are there; return it and its paths."""
    case = CASES[name]()
    root = Path(folder) / f"{name}-{kind}"
    paths = {"src": root / "src", "a": root / "a.ckpt", "b": root / "b.ckpt"}
    if not (root / "complete").exists():
        root.mkdir(parents=True, exist_ok=True)
        for side, stages in (("a", case.src), ("b", case.dst)):
            if stages:
                reference.write_strategy(paths[side], stages)
        reference.write_checkpoint(paths["src"], case.src, case.params, kind=kind, make=noise)
        (root / "complete").touch()
    strategies = [
        str(paths[s]) if stages else None for s, stages in (("a", case.src), ("b", case.dst))
    ]
    return case, str(paths["src"]), *strategies


_BLOCK = np.random.default_rng(0).integers(0, 1 << 32, 1 << 24, dtype="<u4")
_BLOCK &= 0xBFFFFFFF  # below 2 as Float32, so that they may be cast


def noise(name, shape, dtype):
    """Return words that are no constant, quickly: parts of one block of random bytes."""
    item = reference.ITEM[dtype]
    count = int(np.prod(shape))
    words = _BLOCK.view(reference.WORD[item])
    start = zlib.crc32(name.encode()) % (len(words) // 2)
    return np.resize(words[start:], count).reshape(shape)
