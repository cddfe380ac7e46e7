"""Strategies of a DeepSeek-V3-like model at any number of ranks: what training would save.

``python -m benchmarks.deepseek FOLDER`` writes those of 8,192 ranks (64 data x 4 tensor x 32
pipeline, 64 expert parallel) and of 3,072 (64 x 4 x 12, 32 expert parallel), and ``shapes.json``.
Names, shapes, and which axis is sharded by what are those of the compiler's files in
tests/data/models/deepseek_v3; the optimizer's states are sharded over the data-parallel ranks where
the first axis divides, as there.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

from tests import reference

HIDDEN, VOCABULARY, HEADS, EXPERTS, EXPERT_WIDTH = 7168, 129280, 128, 256, 2048
LAYERS, DENSE_LAYERS = 61, 3
Q_RANK, KV_RANK, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128
ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"


def layer(number):
    """Yield (name, shape, sharded, by experts) of one decoder layer's parameters."""
    prefix, width = f"decoder.layers.{number}.", 18432
    attention = prefix + "self_attention."
    yield prefix + "input_layernorm.weight", (HIDDEN,), WHOLE, False
    yield attention + "linear_qkv.weight", (Q_RANK + KV_RANK + ROPE, HIDDEN), WHOLE, False
    yield attention + "q_layernorm.weight", (Q_RANK,), WHOLE, False
    yield attention + "k_layernorm.weight", (KV_RANK,), WHOLE, False
    yield attention + "linear_qb.weight", (HEADS * (NOPE + ROPE), Q_RANK), ROWS, False
    yield attention + "linear_kvb.weight", (HEADS * (NOPE + VALUE), KV_RANK), ROWS, False
    yield attention + "linear_proj.weight", (HIDDEN, HEADS * VALUE), COLUMNS, False
    yield prefix + "pre_mlp_layernorm.weight", (HIDDEN,), WHOLE, False
    mlp = prefix + "mlp."
    if number < DENSE_LAYERS:
        yield mlp + "linear_fc1.weight", (2 * width, HIDDEN), ROWS, False
        yield mlp + "linear_fc2.weight", (HIDDEN, width), COLUMNS, False
        return
    yield mlp + "router.weight", (EXPERTS, HIDDEN), WHOLE, True
    yield mlp + "router.expert_bias", (EXPERTS,), WHOLE, True
    yield mlp + "experts.weight1", (EXPERTS * HIDDEN, 2 * EXPERT_WIDTH), ROWS, True
    yield mlp + "experts.weight2", (EXPERTS * EXPERT_WIDTH, HIDDEN), ROWS, True
    yield mlp + "shared_experts.linear_fc1.weight", (2 * EXPERT_WIDTH, HIDDEN), WHOLE, False
    yield mlp + "shared_experts.linear_fc2.weight", (HIDDEN, EXPERT_WIDTH), WHOLE, False


def stages(count):
    """Return the parameters of every pipeline stage."""
    found = [[] for _ in range(count)]
    found[0].append(("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), ROWS, False))
    for number in range(LAYERS):
        found[number * count // LAYERS] += layer(number)
    found[-1].append(("decoder.final_layernorm.weight", (HIDDEN,), WHOLE, False))
    found[-1].append(("output_layer.weight", (VOCABULARY, HIDDEN), ROWS, False))
    return found


def layout(shape, sharded, by_experts, data, tensor, expert):
    """Return (device matrix, tensor map, optimizer step, optimizer size)."""
    matrix = [data * tensor // expert, expert] if by_experts else [data, tensor]
    axis = {ROWS: 0, COLUMNS: 1, WHOLE: None}[sharded]
    tensor_map = [0 if j == axis else -1 for j in range(len(shape))]
    copies = matrix[0] if axis is not None else prod(matrix)
    held = shape[0] // (matrix[1] if axis == 0 else 1)
    if len(shape) < 2 or copies == 1 or held % copies:
        return matrix, tensor_map, 0, 0
    return matrix, tensor_map, matrix[1] if axis is not None else 1, -1


def strategy(data, tensor, pipeline, expert):
    """Return the layouts of every stage, by name, with the states of Adam."""
    return [
        {
            state + name: layout(shape, sharded, by_experts, data, tensor, expert)
            for name, shape, sharded, by_experts in stage
            for state in ("", "adam_m.", "adam_v.")
        }
        for stage in stages(pipeline)
    ]


def main(folder):
    folder = Path(folder)
    reference.write_stage_files(folder / "src_8192", strategy(64, 4, 32, 64))
    reference.write_stage_files(folder / "dst_3072", strategy(64, 4, 12, 32))
    shapes = {
        state + name: {"shape": list(shape)}
        for stage in stages(1)
        for name, shape, _, _ in stage
        for state in ("", "adam_m.", "adam_v.")
    }
    (folder / "shapes.json").write_text(json.dumps(shapes))


if __name__ == "__main__":
    main(sys.argv[1])
