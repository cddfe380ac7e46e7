"""Conversions with operations on the way, against the plain copy of their output.

``python -m benchmarks.operations {export,import,experts,experts-import,cast} [--repeat 5] [--processes 2]
[--today]`` runs, in turn, rankxform and the fastest plain copy of what it wrote
(`benchmarks.limit`), warm and without fsync, and prints medians, ratios and peak memory. The floor
reads once what is needed, writes, and casts or exchanges axes at the speed of memory in the cache.

export: a Qwen3-shaped model of 2 GiB in BFloat16, 8 ranks (mp4 dp2), to a Hugging Face folder.
import: back. experts, experts-import: a Qwen3-MoE-shaped model likewise. cast: mixed-1g to BFloat16.
``--today`` compares export, of Float32 tensors (MindSpore 2.10 does not read BFloat16 with numpy 2),
with MindSpore's unified_safetensors and a script of whole tensors in numpy, as users have it today
(MindSpore must be installed).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.cases import make, mixed
from benchmarks.memory import BARE, watch
from benchmarks.move import ONCE, floor_options, limit, prepare, rankxform
from tests import reference
from tests.mpi_launch import environment, mpirun

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "num_hidden_layers": 18,
    "vocab_size": 32768, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 32, "moe_intermediate_size": 768,
    "num_hidden_layers": 5,
}  # fmt: skip


def model(config, dtype="BFloat16"):
    """Return the parameters under MindFormers' names, and their layouts: mp4 dp2."""
    h, d = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    rows, columns, whole = [0, -1], [-1, 0], [-1]
    shapes = {"embedding.word_embeddings.weight": ((config["vocab_size"], h), rows)}
    for layer in range(config["num_hidden_layers"]):
        p = f"decoder.layers.{layer}."
        shapes[p + "input_layernorm.weight"] = (h,), whole
        shapes[p + "self_attention.linear_qkv.weight"] = (q + 2 * kv, h), rows
        shapes[p + "self_attention.q_layernorm.weight"] = (d,), whole
        shapes[p + "self_attention.k_layernorm.weight"] = (d,), whole
        shapes[p + "self_attention.linear_proj.weight"] = (h, q), columns
        shapes[p + "pre_mlp_layernorm.weight"] = (h,), whole
        if "num_experts" in config:
            e, f = config["num_experts"], config["moe_intermediate_size"]
            shapes[p + "mlp.router.weight"] = (e, h), [-1, -1]
            shapes[p + "mlp.experts.weight1"] = (e * h, 2 * f), rows
            shapes[p + "mlp.experts.weight2"] = (e * f, h), rows
        else:
            f = config["intermediate_size"]
            shapes[p + "mlp.linear_fc1.weight"] = (2 * f, h), rows
            shapes[p + "mlp.linear_fc2.weight"] = (h, f), columns
    shapes["decoder.final_layernorm.weight"] = (h,), whole
    shapes["output_layer.weight"] = (config["vocab_size"], h), rows
    params = {name: (shape, dtype) for name, (shape, _) in shapes.items()}
    return params, [{name: ([2, 4], m, 0, 0) for name, (_, m) in shapes.items()}]


def made(folder, name, config, dtype):
    """Make a checkpoint of 8 ranks once; return its folder and strategy."""
    here = Path(folder) / name
    params, stages = model(config, dtype)
    if not (here / "config.json").exists():
        kind = reference.WORD[reference.ITEM[dtype]]
        words = np.random.default_rng(0).integers(0, 1 << 14, 1 << 26).astype(kind)
        here.mkdir(parents=True)
        reference.write_strategy(here / "strategy.ckpt", stages)
        reference.write_checkpoint(
            here / "src", stages, params, None, "safetensors",
            make=lambda n, s, d: np.resize(words[len(n) :], s),
        )  # fmt: skip
        (here / "config.json").write_text(json.dumps(config))
    return here, here / "src", here / "strategy.ckpt"


def case(kind, folder, today=False):
    """Return (source, options) of a conversion, and where it is made."""
    if kind == "cast":
        _, src, a, b = make("mixed-1g", folder)
        return Path(src).parent, src, (a, b), ["--dtype", "bf16"]
    of_experts = kind.startswith("experts")
    name, table = ("qwen3-moe", "qwen3_moe") if of_experts else ("qwen3", "qwen3")
    if today:
        here, src, a = made(folder, "qwen3-f32", {**DENSE, "num_hidden_layers": 9}, "Float32")
    else:
        here, src, a = made(folder, name, EXPERTS if of_experts else DENSE, "BFloat16")
    options = ["--map", table, "--config", str(here / "config.json")]
    export = [*options, "--dst-form", "huggingface", "--max-shard", "600MB"]
    if not kind.endswith("import"):
        return here, str(src), (str(a), None), export
    if not (here / "hf").exists():
        rankxform(str(src), str(here / "hf"), str(a), None, 2, *export)
    return here, str(here / "hf"), (None, str(a)), options


SCRIPT = """
import sys, json, glob, os
import numpy as np
from safetensors.numpy import load_file, save_file
src, dst, config = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
os.makedirs(dst)
full = {}
for file in sorted(glob.glob(src + "/part*.safetensors")):
    full.update(load_file(file))
g = config["num_key_value_heads"]
r, d = config["num_attention_heads"] // g, config["head_dim"]
layers, index = config["num_hidden_layers"], {}
for layer in range(layers):
    p, q, out = f"decoder.layers.{layer}.", f"model.layers.{layer}.", {}
    qkv = full[p + "self_attention.linear_qkv.weight"].reshape(g, r + 2, d, -1)
    for name, part in zip("qkv", (qkv[:, :r], qkv[:, r : r + 1], qkv[:, r + 1 :])):
        out[q + f"self_attn.{name}_proj.weight"] = part.reshape(-1, qkv.shape[-1])
    fc1 = full[p + "mlp.linear_fc1.weight"].reshape(-1, 2, qkv.shape[-1])
    out[q + "mlp.gate_proj.weight"], out[q + "mlp.up_proj.weight"] = fc1[:, 0], fc1[:, 1]
    for a, b in (("self_attention.linear_proj", "self_attn.o_proj"), ("mlp.linear_fc2", "mlp.down_proj"),
                 ("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm"),
                 ("self_attention.q_layernorm", "self_attn.q_norm"),
                 ("self_attention.k_layernorm", "self_attn.k_norm")):
        out[q + b + ".weight"] = full[p + a + ".weight"]
    if layer == layers - 1:
        out["model.embed_tokens.weight"] = full["embedding.word_embeddings.weight"]
        out["model.norm.weight"] = full["decoder.final_layernorm.weight"]
        out["lm_head.weight"] = full["output_layer.weight"]
    file = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
    save_file({n: np.ascontiguousarray(a) for n, a in out.items()}, dst + "/" + file)
    index.update(dict.fromkeys(out, file))
json.dump({"metadata": {}, "weight_map": index}, open(dst + "/model.safetensors.index.json", "w"))
"""

UNIFY = """
import sys, mindspore
mindspore.unified_safetensors(sys.argv[1], sys.argv[2], sys.argv[3])
"""


def today(here, src, strategy):
    """Return seconds and peak memory of the way by unified safetensors and a script."""
    unified, dst = here / "unified", here / "by-script"
    for folder in (unified, dst):
        shutil.rmtree(folder, ignore_errors=True)
    script = here / "script.py"
    script.write_text(SCRIPT)
    (here / "unify.py").write_text(UNIFY)
    lines = (
        [here / "unify.py", src, strategy, unified],
        [script, unified, dst, here / "config.json"],
    )
    seconds, peaks = [], []
    for line in lines:
        words = [sys.executable, *map(str, line)]
        began = time.perf_counter()
        subprocess.run(words, env=environment(), check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
        shutil.rmtree(line[-1] if line is lines[0] else dst, ignore_errors=True)
        if line is lines[0]:
            subprocess.run(words, env=environment(), check=True, capture_output=True)
    shutil.rmtree(unified, ignore_errors=True)
    peaks = [max(watch([sys.executable, *map(str, line)], here.name.encode())) for line in lines]
    return {"unify": seconds[0], "script": seconds[1], "peak": max(peaks)}


def work_of(kind):
    """Return what else no conversion of a case can do without."""
    if kind == "cast":
        return "--cast", str(sum(int(np.prod(shape)) for shape, _ in mixed(1).params.values()))
    params, _ = model(EXPERTS) if kind.startswith("experts") else ({}, [])
    matrices = [2 * int(np.prod(s)) for name, (s, _) in params.items() if ".experts." in name]
    return "--exchange", str(sum(matrices))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=("export", "import", "experts", "experts-import", "cast"))
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--today", action="store_true")
    told = parser.parse_args()
    here, src, (a, b), options = case(told.case, told.folder, told.today)
    dst, n = str(here / "dst"), told.processes
    moves, wholes, limits, floors = [], [], [], []
    for run in range(told.repeat + 1):  # the first is not counted
        for old in (dst, here / "copy"):  # else the device is still busy with it in the next run
            shutil.rmtree(old, ignore_errors=True)
        prepare(cold=False)
        move, whole, output = rankxform(src, dst, a, b, n, *options, "--no-fsync")
        once = (*floor_options(src, output), *work_of(told.case))
        copies = limit(dst, str(here / "copy"), n, *once)
        floor = copies.pop(ONCE)
        found = min(copies.values())
        text = f"# move {move:.3f} whole {whole:.3f} copy {found:.3f} floor {floor:.3f}"
        print(text, file=sys.stderr)
        if run:
            moves.append(move)
            wholes.append(whole)
            limits.append(found)
            floors.append(floor)
    shutil.rmtree(here / "copy", ignore_errors=True)
    shutil.rmtree(dst, ignore_errors=True)
    bare = watch([*mpirun(n), sys.executable, "-c", BARE], b"time.sleep(0.5)")[-1]
    line = [*mpirun(n), sys.executable, "-m", "rankxform", "transform", src, dst, "--no-fsync"]
    line += [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ()), *options]
    peak = max(watch(line, b"rankxform\0transform")) - bare
    shutil.rmtree(dst, ignore_errors=True)
    found = {
        "case": told.case, "processes": n, "move": statistics.median(moves),
        "whole": statistics.median(wholes), "copy": statistics.median(limits),
        "of_copy": statistics.median(limits) / statistics.median(moves),
        "floor": min(floors),
        "of_floor": min(floors) / statistics.median(moves),
        "peak_above_bare": peak,
    }  # fmt: skip
    if told.today:
        found["today"] = today(here, src, a)
        found["times"] = (found["today"]["unify"] + found["today"]["script"]) / found["whole"]
    print(json.dumps(found, indent=1))
    print(output, file=sys.stderr)


if __name__ == "__main__":
    main()
