"""vLLM starts from a folder and writes greedy tokens; run by the Python of an environment that has it.

``python vllm_jobs.py make MODEL FOLDER`` saves a tiny random model of transformers;
``serve FOLDER LOAD_FORMAT RANKS`` starts vLLM on that many CPU ranks and prints its tokens.
"""

import json
import os
import sys

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip


def make(name, folder):
    import torch
    import transformers

    more = {"pad_token_id": 0} if name == "Glm4" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)


def serve(folder, load_format, ranks):
    cores = "0" if ranks == "1" else "0|1"
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder, load_format=load_format, tensor_parallel_size=int(ranks),
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16",
        max_num_seqs=2, max_num_batched_tokens=64,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [1, 5, 9, 33, 77]}, {"prompt_token_ids": [2, 900, 11]}]
    greedy = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    tokens = [list(one.outputs[0].token_ids) for one in engine.generate(prompts, greedy)]
    print("TOKENS", json.dumps(tokens))


if __name__ == "__main__":
    {"make": make, "serve": serve}[sys.argv[1]](*sys.argv[2:])
