"""The parameters of MindFormers' real networks become a Hugging Face folder, and come back.

MindFormers is installed with all it asks for (`make .venv-mindformers/installed`, 3.5 GB); the
networks are made, and not run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference

HERE = Path(__file__).parent
PYTHON = Path(
    os.environ.get("RANKXFORM_MINDFORMERS_PYTHON", HERE.parents[1] / ".venv-mindformers/bin/python")
)
WORDS = {"Float32": "<u4", "BFloat16": "<u2", "Float16": "<u2", "Int32": "<u4"}
MODEL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128, "intermediate_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "qk_layernorm": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SPARSE = {
    **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "q_lora_rank": 16, "o_lora_rank": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "o_groups": 2, "index_n_heads": 4,
    "index_head_dim": 16, "index_topk": 8, "num_hash_layers": 1, "hc_mult": 4,
    "compress_ratios": [0, 4, 128, 0], "sliding_window": 128, "num_nextn_predict_layers": 1,
    "num_key_value_heads": 1, "qk_layernorm": True,
}  # fmt: skip
JOB = {
    "seq_length": 32, "max_position_embeddings": 64, "offset": 0, "params_dtype": "float32",
    "compute_dtype": "bfloat16", "use_flash_attention": True, "moe_grouped_gemm": True,
}  # fmt: skip
MOE = {**EXPERTS, "num_experts": 4, "mlp_only_layers": [], "decoder_sparse_step": 1}
FIXED = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
"""What TeleChat3's network takes, whatever its configuration states."""
V3 = "deepseek3", "DeepseekV3"

NETWORKS = {  # by map and mode: folder, class, sizes
    ("qwen3", "graph"): ("qwen3", "Qwen3", {}),
    ("qwen3", "pynative"): ("qwen3", "Qwen3", {}),
    ("qwen3_moe", "graph"): ("qwen3_moe", "Qwen3Moe", MOE),
    ("deepseek_v3", "graph"): (*V3, LATENT),
    ("deepseek_v3", "pynative"): (*V3, LATENT),
    ("deepseek_v4", "pynative"): ("deepseek4", "DeepseekV4", SPARSE),
    ("telechat3", "graph"): ("telechat3", "TeleChat3", {}),
    ("telechat3_moe", "graph"): ("telechat3_moe", "TeleChat3Moe", {**LATENT, **FIXED}),
}
NO_WEIGHTS = {
    "fi_accu", "expert_load", "tokens_per_expert", "global_tokens_per_expert", "ga_steps",
    "q_rms_gamma", "rms_weight",
}  # fmt: skip

pytestmark = [
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no MindFormers: make .venv-mindformers/installed"
    ),
    pytest.mark.filterwarnings("ignore:.*no numbers"),  # random bits
]


def parameters(folder, name, mode, sizes, here):
    (here / "job.json").write_text(json.dumps({**MODEL, **sizes, **JOB}))
    line = [str(PYTHON), str(HERE / "mindformers_networks.py"), folder, name, mode, "job.json"]
    found = subprocess.run(line, capture_output=True, text=True, cwd=here, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize(("map_name", "mode"), NETWORKS)
def test_a_real_network_and_back(map_name, mode, tmp_path):
    folder, name, sizes = NETWORKS[map_name, mode]
    bits, net = np.random.default_rng(3), {}
    for one, (shape, dtype) in parameters(folder, name, mode, sizes, tmp_path).items():
        net[one] = dtype, bits.integers(0, 1 << 15, shape).astype(WORDS[dtype])
    reference.write_safetensors(tmp_path / "src/rank_0/net.safetensors", net)
    stated = {**MODEL, **sizes, "model_type": map_name}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    options = {"map": map_name, "config": str(tmp_path / "config.json")}
    to_hf = rankxform.transform(
        tmp_path / "src", tmp_path / "hf", dst_form="huggingface", src_strategy="none", **options
    )
    left = {one for some in to_hf.left_out for one in some.names}
    assert {one.rpartition(".")[2] for one in left} <= NO_WEIGHTS
    ways = ("experts=axis", "bias=layer", "mla=concat") if mode == "pynative" else ()
    ways = () if map_name in ("qwen3", "deepseek_v4") else ways
    rankxform.transform(tmp_path / "hf", tmp_path / "back", variant=ways, **options)
    (path,) = (tmp_path / "back").glob("rank_0/*")
    found = reference.read_safetensors(path)
    copy = found.pop("mtp.output_layer.weight", None)  # which networks may have or share
    assert copy in (None, found["output_layer.weight"])
    assert found.keys() == net.keys() - left
    assert {n: (d, data) for n, (d, _, data) in found.items()} == {
        n: (d, words.tobytes()) for n, (d, words) in net.items() if n not in left
    }
