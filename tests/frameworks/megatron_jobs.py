"""Megatron-Core itself loads a torch_dist folder; run by the Python of an environment that has it.

``python megatron_jobs.py MODEL TENSOR STAGES EXPERTS FOLDER EXPECTED VOCABULARY`` builds MODEL on
that many ranks (local specification, gloo), loads an iteration's FOLDER at the default strictness,
and compares every parameter with what it loads of EXPECTED, a folder that Megatron-Core saved. Of
an embedding and a head the first VOCABULARY rows are compared: those behind them are padding.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *device: None
    torch.Tensor.cuda = lambda tensor, *arguments, **options: tensor

LAYERS, HIDDEN, FFN, HEADS, GROUPS, CHANNELS, ROWS, EXPERTS = 2, 8, 12, 4, 2, 2, 24, 4


def model(kind, sizes):
    """Return a model of this rank, of the sizes of tests/data/formats/megatron."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    tensor, stages, experts = sizes
    has_norms = kind in ("qwen3", "qwen3_moe")
    count = EXPERTS if kind in ("qwen3_moe", "mixtral") else None
    sparse = {"num_moe_experts": count, "moe_ffn_hidden_size": 6, "moe_router_topk": 2}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, kv_channels=CHANNELS, tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages, expert_model_parallel_size=experts,
        use_cpu_initialization=True, params_dtype=torch.float32, pipeline_dtype=torch.float32,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        add_qkv_bias=kind == "qwen2", normalization="RMSNorm", qk_layernorm=has_norms,
        bias_activation_fusion=False, gradient_accumulation_fusion=False,
        **(sparse if count else {}),
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(
        num_experts=count, moe_grouped_gemm=False, qk_layernorm=has_norms
    )
    return GPTModel(
        config, layer, vocab_size=ROWS, max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=kind == "qwen2", position_embedding_type="rope",
    )  # fmt: skip


def loaded(kind, sizes, folder):
    """Return this rank's parameters as Megatron-Core loads them, by name."""
    from megatron.core import dist_checkpointing

    net = model(kind, sizes)
    for parameter in net.parameters():
        parameter.data.fill_(float("nan"))
    state = dist_checkpointing.load({"model": net.sharded_state_dict()}, folder)
    net.load_state_dict(state["model"])
    return dict(net.named_parameters())


def work(rank, world, port, kind, sizes, folder, expected, vocabulary):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes[0], pipeline_model_parallel_size=sizes[1],
        expert_model_parallel_size=sizes[2],
    )  # fmt: skip
    first, second = (loaded(kind, sizes, place) for place in (folder, expected))
    assert first.keys() == second.keys() and first
    for name, words in first.items():
        compared = slice(None)
        if name.startswith(("embedding", "output_layer")):
            rows = ROWS // sizes[0]
            start = parallel_state.get_tensor_model_parallel_rank() * rows
            compared = slice(max(0, min(rows, vocabulary - start)))
        assert torch.equal(words[compared], second[name][compared]), (rank, name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    kind, *sizes, folder, expected, vocabulary = sys.argv[1:]
    sys.argv = sys.argv[:1]
    sizes = [int(size) for size in sizes]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = sizes[0] * sizes[1] * sizes[2]
    arguments = world, port, kind, sizes, folder, expected, int(vocabulary)
    torch.multiprocessing.spawn(work, arguments, nprocs=world)
