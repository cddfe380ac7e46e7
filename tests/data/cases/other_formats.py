"""Folders of forms that rankxform does not read, as their owners would hand them over: Megatron's zarr and legacy torch (mp_rank_00; RLinf #322, Pai-Megatron-Patch #590),
fsdp_dtensor (Megatron-LM #5895), verl's model_world_size_2_rank_0.pt (verl #2252 #903), DeepSpeed's universal folder, PyTorch .bin shards with an index, Orbax/OCDBT (goodfire-ai/spd #681),
GGUF, .pth of Meta (consolidated.00.pth), Paddle's .pdparams, NumPy .npz. Usage: this program OUT. Right: exit 3, the form named, and what to do (save or convert as ...)."""
import json, os, sys
def put(kind, files):
    for n, b in files.items():
        p = f"{sys.argv[1]}/{kind}/{n}"; os.makedirs(os.path.dirname(p), exist_ok=True); open(p, "wb").write(b if isinstance(b, bytes) else json.dumps(b).encode())
Z = b"PK\x03\x04" + b"\0" * 60
put("zarr", {"metadata.json": {"sharded_backend": "zarr", "sharded_backend_version": 1}, "model.decoder.weight/.zarray": {"shape": [2, 2]}, "model.decoder.weight/0.0": b"\0" * 16, "common.pt": Z})
put("legacy", {"latest_checkpointed_iteration.txt": b"10", "iter_0000010/mp_rank_00/model_optim_rng.pt": Z, "iter_0000010/mp_rank_01/model_optim_rng.pt": Z})
put("fsdp_dtensor", {"metadata.json": {"sharded_backend": "fsdp_dtensor", "sharded_backend_version": 1}, ".metadata": b"\x80\x04.", "__0_0.distcp": Z})
put("verl", {f"model_world_size_2_rank_{r}.pt": Z for r in (0, 1)} | {"fsdp_config.json": {"FSDP_version": 2, "world_size": 2}})
put("universal", {"latest_universal": b"global_step1_universal", "global_step1_universal/zero/model.w/fp32.pt": Z, "global_step1_universal/mp_rank_00_model_states.pt": Z})
put("bin", {"pytorch_model-00001-of-00001.bin": Z, "pytorch_model.bin.index.json": {"metadata": {}, "weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}, "config.json": {}})
put("orbax", {"_CHECKPOINT_METADATA": {"item_handlers": {}}, "default/_METADATA": {}, "default/manifest.ocdbt": b"\0" * 8, "default/d/abc": b"\0"})
put("gguf", {"model-q4.gguf": b"GGUF" + b"\0" * 60}); put("meta", {"consolidated.00.pth": Z, "params.json": {}}); put("paddle", {"model_state.pdparams": Z}); put("npz", {"weights.npz": Z})
