"""Random conversions: networks, two strategies, and what they are made of.

`mindspore_agrees` keeps to the layouts for which MindSpore neither refuses nor errs; without it
anything that the closed form covers may come: any numbers of ranks, odd sizes, axes of size 1.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod

import numpy as np

DTYPES = (
    "Float32", "Float16", "BFloat16", "Float64", "Int8", "UInt8", "Int16", "Int32", "Int64", "Bool",
    "UInt16", "UInt32", "UInt64",
)  # fmt: skip


@dataclass
class Case:
    params: dict
    src: list | None
    dst: list | None
    extras: dict = field(default_factory=dict)


def _factors(n, rng):
    found = []
    p = 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    rng.shuffle(found)
    while len(found) > 1 and rng.random() < 0.4:
        found.append(found.pop() * found.pop())
    return found or [1]


def _layout(ndim, ranks, rng, mindspore_agrees, nested):
    """Return a random layout of `ranks` for a tensor of `ndim` axes."""
    matrix = _factors(ranks, rng)
    if not mindspore_agrees and rng.random() < 0.2:
        matrix.insert(rng.randrange(len(matrix) + 1), 1)
    k = len(matrix)
    homes = [rng.randrange(-1, ndim) if ndim else -1 for _ in matrix]
    per_axis = [[] for _ in range(ndim)]
    order = list(range(k))
    rng.shuffle(order)
    for position in order:
        if homes[position] >= 0 and (nested or not per_axis[homes[position]]):
            per_axis[homes[position]].append(k - 1 - position)
    tensor_map = [-1 if not a else a[0] if len(a) == 1 else a for a in per_axis]
    used = {k - 1 - a for axes in per_axis for a in axes}
    free = [p for p in range(k) if p not in used]
    copies = prod(matrix[p] for p in free)
    step = size = 0
    if ndim and copies > 1 and rng.random() < 0.6:
        step, size = _shard(matrix, tensor_map, free, copies, rng, mindspore_agrees)
    return matrix, tensor_map, step, size


def _shard(matrix, tensor_map, free, copies, rng, mindspore_agrees):
    nested = any(isinstance(e, list) for e in tensor_map)
    sharded = [e for e in tensor_map if e != -1]
    step = prod(matrix[free[-1] + 1 :]) if len(free) == 1 else 1
    if mindspore_agrees:
        leftmost = free == [0] or not sharded
        if leftmost and not nested and sharded != sorted(sharded, reverse=True):
            return 0, 0  # item 1 of docs/mindspore.md: MindSpore permutes the data
        if len(free) > 1 and sharded:
            return step, -1
    divisors = [d for d in range(2, copies + 1) if copies % d == 0]
    return step, rng.choice([-1, *divisors])


def _spread(names, stages, rng):
    """Deal names to stages, none of them empty."""
    assigned = [[] for _ in range(stages)]
    for i, name in enumerate(names):
        assigned[i % stages if i < stages else rng.randrange(stages)].append(name)
    return assigned


STAGES = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4))


def random_case(
    seed, mindspore_agrees=True, ranks=None, dtypes=DTYPES, whole=True, stages=STAGES, nested=True
):
    """Make a case; `ranks` fixes (source ranks, destination ranks) of a stage."""
    rng = random.Random(seed)
    if ranks:
        sizes, src_stages, dst_stages = ranks, 1, 1
    else:
        src_stages, dst_stages = rng.choice(stages)
        sizes = rng.choice([2, 4, 8]), rng.choice([2, 4, 8])
    unit = 16 if not ranks else int(np.lcm(*sizes)) * 2
    names = [f"net.layer{i}.weight" for i in range(rng.randint(max(src_stages, dst_stages), 6))]
    params = {}
    for name in names:
        ndim = rng.choice([1, 1, 2, 2, 2, 3])
        shape = [unit * rng.choice([1, 1, 2]) for _ in range(ndim)]
        if ndim == 3:
            shape[rng.randrange(3)] = unit
        params[name] = (tuple(shape), rng.choice(dtypes))
    src = _strategy(params, names, src_stages, sizes[0], rng, mindspore_agrees, nested)
    dst = _strategy(params, names, dst_stages, sizes[1], rng, mindspore_agrees, nested)
    draw = rng.random() if whole else 1.0
    case = Case(params, None if draw < 0.12 else src, None if 0.12 <= draw < 0.24 else dst)
    case.extras = {
        "global_step": ("Int32", np.array([seed], "<i4")),
        "learning_rate": ("Float32", np.array(0.125, "<f4")),
    }
    return case


def unevenly_sharded(case, seed):
    """Return `case` with every second parameter sharded into rows of any number, none too, by rank."""
    rng = random.Random(seed)
    for stage in [*(case.src or ()), *(case.dst or ())]:
        for name, (device_matrix, *_) in stage.items():
            rows, *others = case.params[name][0]
            if rng.random() < 0.5:
                ranks = int(np.prod(device_matrix))
                ends = sorted(rng.choices(range(rows + 1), k=ranks - 1))
                parts = np.diff([0, *ends, rows]).tolist()
                stage[name] = ([ranks], [0, *(-1 for _ in others)], 0, 0, parts)
    return case


def _strategy(params, names, stages, size, rng, mindspore_agrees, nested):
    order = list(names)
    rng.shuffle(order)
    return [
        {n: _layout(len(params[n][0]), size, rng, mindspore_agrees, nested) for n in sorted(part)}
        for part in _spread(order, stages, rng)
    ]
