"""A small model on the ranks of a job: who holds what of it, worked out without MindFormers."""

from __future__ import annotations

import re
import zlib
from functools import cached_property

import numpy as np

HIDDEN, INNER, WORDS, LAYERS = 16, 32, 48, 4
STEP = 100
WHOLE, GROUP = "whole", "group"
"""Layouts that are not over the ranks of a stage: none, or one tensor-parallel group's."""


class Sizes:
    """A job: its sizes, its model, and who holds what. kind: as mindformers_client.py has it."""

    def __init__(self, sizes, optimizer, kind):
        self.dp, self.mp, self.pp = sizes
        self.optimizer, self.kind = optimizer, frozenset(kind)
        self.stage_ranks = self.dp * self.mp
        self.ranks = self.stage_ranks * self.pp

    @property
    def is_pynative(self):
        return "pynative" in self.kind

    @cached_property
    def parameters(self):
        """Return {name: (shape, the axis that tensor parallelism cuts, or another layout)}."""
        found = {"embedding.word_embeddings.weight": ((WORDS, HIDDEN), 0)}
        for layer in range(LAYERS):
            name = f"decoder.layers.{layer}.{{}}".format
            found[name("input_layernorm.weight")] = (HIDDEN,), None
            found[name("self_attention.linear_qkv.weight")] = (3 * HIDDEN, HIDDEN), 0
            found[name("self_attention.linear_proj.weight")] = (HIDDEN, HIDDEN), 1
            found[name("mlp.linear_fc1.weight")] = (2 * INNER, HIDDEN), 0
            found[name("mlp.linear_fc2.weight")] = (HIDDEN, INNER), 1
            if "adapter" in self.kind:
                found[name("self_attention.linear_qkv.lora_a")] = (4, HIDDEN), None
                found[name("self_attention.linear_qkv.lora_b")] = (3 * HIDDEN, 4), 0
            if "group" in self.kind:
                found[name("mlp.expert_bias")] = (8,), GROUP
        if "plain" in self.kind:
            found[f"decoder.layers.{LAYERS - 1}.mlp.router.tid2eid"] = (6, 4), WHOLE
        found["decoder.final_layernorm.weight"] = (HIDDEN,), None
        return {**found, "output_layer.weight": ((WORDS, HIDDEN), 0)}

    @cached_property
    def states(self):
        """Return the optimizer's, likewise."""
        found = {}
        for name, (shape, cut) in self.parameters.items():
            if cut in (WHOLE, GROUP) or ("adapter" in self.kind and "lora" not in name):
                continue
            by_muon = "muon" in self.kind and len(shape) == 2 and name.startswith("decoder")
            kinds = ["muon_m."] if by_muon else ["adam_m.", "adam_v."]
            kinds += ["main_param."] if self.is_pynative else []
            found.update({kind + name: (shape, cut) for kind in kinds})
        return found

    @cached_property
    def every(self):
        return {**self.parameters, **self.states}

    def stage_of(self, name):
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer:
            return int(layer[1]) * self.pp // LAYERS
        return self.pp - 1 if re.search("final_layernorm|output_layer", name) else 0

    def is_here(self, name, rank):
        return self.stage_of(name) == rank // self.stage_ranks

    def part(self, name, rank):
        """Return what a rank holds of a parameter, worked out here and not by MindFormers."""
        shape, cut = self.every[name]
        data, model = rank % self.stage_ranks // self.mp, rank % self.mp
        pieces = [(1, 0)] * len(shape)
        if cut not in (WHOLE, GROUP):
            if cut is not None:
                pieces[cut] = self.mp, model
            if self.optimizer:
                count, number = pieces[0]
                pieces[0] = count * self.dp, number * self.dp + data
        index = tuple(
            slice(number * n // count, (number + 1) * n // count)
            for n, (count, number) in zip(shape, pieces)
        )
        return np.ascontiguousarray(whole(name, shape)[index])


def type_of(name):
    """Return a tensor's type: states and vectors are Float32, and the rest Float16.

    In the jobs themselves that is BFloat16, of which MindSpore makes no array on a CPU.
    """
    if "tid2eid" in name:
        return "Int32"
    is_short = name.startswith(("decoder", "embedding", "output")) and "norm" not in name
    return "Float16" if is_short and not name.endswith("bias") else "Float32"


def whole(name, shape):
    """Return a full tensor, of the values that its type can hold."""
    found = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype("f4")
    if type_of(name) == "Float16":
        return found.astype("f2")
    return (found * 1000).astype(np.int32) if type_of(name) == "Int32" else found


def stored(name, shape):
    """Return a full tensor as safetensors have it: type, shape and bytes."""
    return type_of(name), tuple(shape), whole(name, shape).tobytes()
