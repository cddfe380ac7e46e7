"""The converters of MindFormers' models, of an unpacked wheel, applied to models' tensors.

    mindformers_converters.py WHEEL MODEL=FOLDER...

reads Hugging Face's tensors, FOLDER/hf.npz with FOLDER/config.json, and writes MindFormers',
FOLDER/mf.npz, as its `weight_converters` make them; the tensors that these make of MindFormers' again
are compared with what was read. A line of the output says of each model what became of it. The list is
taken out of ``models/MODEL/utils.py``, whose imports are not run; `TransformerConfig` is replaced.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
import types
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")

import numpy as np


def operations(wheel):
    """Import convert_op.py without the packages around it."""
    root = Path(wheel) / "mindformers"
    for name in ("", ".checkpoint", ".checkpoint.converter", ".parallel_core"):
        module = types.ModuleType("mindformers" + name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[module.__name__] = module
    config = types.ModuleType("mindformers.parallel_core.transformer_config")
    config.TransformerConfig = object
    sys.modules[config.__name__] = config
    return importlib.import_module("mindformers.checkpoint.converter.convert_op")


def converters(wheel, model, operations):
    text = (Path(wheel) / "mindformers" / "models" / model / "utils.py").read_text()
    (found,) = (
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", "") == "weight_converters"
    )
    return eval(compile(ast.Expression(found), model, "eval"), vars(operations))


class Config(types.SimpleNamespace):
    """A model's configuration as the converters ask for it, on one device."""

    def __init__(self, stated):
        super().__init__(
            num_attention_heads=stated["num_attention_heads"],
            num_query_groups=stated["num_key_value_heads"],
            kv_channels=stated["head_dim"],
            hidden_size=stated["hidden_size"],
            num_moe_experts=stated.get("n_routed_experts") or stated.get("num_experts"),
            moe_ffn_hidden_size=stated.get("moe_intermediate_size"),
            expert_model_parallel_size=1,
            tensor_model_parallel_size=1,
            use_interleaved_weight_layout_mlp=True,
        )


def layers(names, tensors):
    """Return by layer, as a text or "", whether the first of `names` is there."""
    pattern = re.escape(names[0]).replace(r"\{\}", "([0-9]+)", 1).replace(r"\{\}", "0")
    matches = (re.fullmatch(pattern, name) for name in tensors)
    return [match[1] if match.groups() else None for match in matches if match]


def converted(converter, layer, hf, experts):
    """Return MindFormers' tensors of one layer."""
    values = [] if layer is None else [layer]
    names = [name.format(*values, "{}") for name in converter.hf_names]
    if any("{}" in name for name in names):  # of experts, one after another
        parts = [np.stack([hf[name.format(e)] for e in range(experts)]) for name in names]
    else:
        parts = [hf[name] for name in names]
    made = converter._hf_to_mf(parts)
    made = made if isinstance(made, list) else [made]
    return dict(zip((name.format(*values) for name in converter.mf_names), made))


def convert(weight_converters, folder):
    hf = dict(np.load(folder / "hf.npz"))
    sizes, mf, back = Config(json.loads((folder / "config.json").read_text())), {}, {}
    refused = set()
    for converter in weight_converters:
        if hasattr(converter, "set_model_config"):
            converter.set_model_config(sizes)
        converter.optimizer_parallel_size = 1  # MindSpore says -1 of a job without parallelism
        for layer in layers(converter.hf_names, hf):
            made = converted(converter, layer, hf, sizes.num_moe_experts)
            mf.update(made)
            try:
                back.update(converter.mf_to_hf(made))
            except (ValueError, IndexError) as error:  # before 2.1.0, of what they do not do
                refused.add(str(error))
    wrong = [name for name, words in back.items() if not np.array_equal(words, hf[name])]
    np.savez(folder / "mf.npz", **mf)
    print(json.dumps({"back": len(back), "wrong": wrong, "refused": sorted(refused)}))


def main(wheel, *models):
    module = operations(wheel)
    for model, _, folder in (word.partition("=") for word in models):
        convert(converters(wheel, model, module), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
