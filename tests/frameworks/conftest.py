"""What runs in another environment is not looked at for tests."""

collect_ignore = [
    "torch_jobs.py",
    "megatron_jobs.py",
    "transformers_jobs.py",
    "vllm_jobs.py",
    "mindformers_client.py",
    "mindformers_model.py",
]
