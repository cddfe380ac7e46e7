"""What PyTorch itself saves and loads; run by the Python of an environment that has it.

``python torch_jobs.py save KIND FOLDER SEED`` saves a checkpoint of KIND (items, safetensors, hf,
trained) made of random tensors on a random mesh, and FOLDER.expected.safetensors beside it.
``load FOLDER EXPECTED`` loads a checkpoint and compares every tensor. ``resume FOLDER EXPECTED``
has AdamW load a model and its states, compares them, and takes a step.
"""

import os
import random
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


def values(generator, shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def in_a_job(rank, world, port, work, arguments):
    """Do `work` as one rank of a job on this machine."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    work(rank, world, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def job(world, work, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_a_job, (world, port, work, arguments), nprocs=world)


def random_tensors(mesh, seed, *, most_axes, replicas_may_vary=True):
    """Return tensors spread over a mesh at random, and the whole ones."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    state, full = {}, {}
    for number in range(rng.randint(4, 9)):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, most_axes)))
        name = f"layers.{number}.weight" if number % 2 else f"tensor_{number}"
        full[name] = values(generator, shape, rng.choice(TYPES))
        axes = rng.sample(range(len(shape)), len(shape))
        places = [
            Shard(axes.pop()) if axes and rng.random() < 0.7 else Replicate()
            for _ in range(mesh.ndim)
        ]
        state[name] = distribute_tensor(full[name], mesh, places)
    if replicas_may_vary:
        full["scale"] = state["scale"] = torch.tensor(1.5)
        full["plain"] = state["plain"] = values(generator, (4, 4), torch.float32)
    return state, full


def save_random(rank, world, kind, folder, seed):
    rng = random.Random(seed)
    sizes = (world,) if world < 4 or rng.random() < 0.5 else (2, world // 2)
    mesh = init_device_mesh("cpu", sizes)
    state, full = random_tensors(
        mesh, seed, most_axes=3 if kind == "items" else 2, replicas_may_vary=kind == "items"
    )
    if kind == "hf":
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    else:
        options = {"thread_count": rng.randint(1, 2), "sync_files": False}
        if kind == "safetensors":
            options["serialization_format"] = SerializationFormat.SAFETENSORS
        else:
            options["single_file_per_rank"] = rng.random() < 0.7
            state |= {"lr": 0.125, "note": {"sizes": [1, 2]}}
        writer = FileSystemWriter(folder, **options)
    dcp.save(state, storage_writer=writer)
    if rank == 0:
        keep(full, folder)


class Block(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = torch.nn.Linear(hidden, 6, bias=False)
        self.norm = torch.nn.LayerNorm(hidden)
        self.down = torch.nn.Linear(6, hidden, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def save_trained(rank, world, kind, folder, seed):
    """Save what FSDP2 and AdamW have after one step."""
    from torch.distributed.fsdp import fully_shard

    rng = random.Random(seed)
    torch.manual_seed(seed)
    hidden = rng.randint(3, 11)
    blocks = [Block(hidden) for _ in range(rng.randint(1, 3))]
    net = torch.nn.Sequential(torch.nn.Embedding(7, hidden), *blocks, torch.nn.Linear(hidden, 2))
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.arange(7).repeat(2, 1)).pow(2).sum().backward()
    optimizer.step()
    model, states = get_state_dict(net, optimizer)
    state = {"model": model, "optimizer": states, "rng": torch.get_rng_state()}
    dcp.save(state, storage_writer=FileSystemWriter(folder, sync_files=False))
    full = flat(state)
    if rank == 0:
        keep(full, folder)


def flat(tree, path=()):
    """Return the whole tensors of nested dicts by their dotted names. Collective."""
    if isinstance(tree, dict):
        found = {}
        for key, value in tree.items():
            found |= flat(value, (*path, str(key)))
        return found
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    return {".".join(path): tree} if isinstance(tree, torch.Tensor) else {}


def keep(full, folder):
    tensors = {name: one.detach().contiguous().clone() for name, one in full.items()}
    save_file(tensors, folder + ".expected.safetensors")


def load(folder, expected):
    """Return the names of tensors that are not loaded as expected."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    want = load_file(expected)
    state = {name: torch.zeros_like(one) for name, one in want.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)
    return unequal(state, want)


def unequal(found, want):
    def as_bytes(one):
        return one.contiguous().reshape(-1).view(torch.uint8)

    return [
        name
        for name, one in want.items()
        if found[name].shape != one.shape or not torch.equal(as_bytes(found[name]), as_bytes(one))
    ]


def resume(folder, expected):
    """Have AdamW load parameters and states; return the names of those that are not as expected."""
    want = load_file(expected)
    net = torch.nn.Module()
    for name in want:
        if name.startswith("model."):
            *path, last = name.removeprefix("model.").split(".")
            at = net
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, torch.nn.Module())
                at = getattr(at, part)
            at.register_parameter(last, torch.nn.Parameter(torch.zeros_like(want[name])))
    optimizer = torch.optim.AdamW(net.parameters())
    model, states = get_state_dict(net, optimizer)  # which makes the states
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # param_groups are the job's own
    loaded = {"model": model, "optimizer": states}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)
    set_state_dict(
        net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    model, states = get_state_dict(net, optimizer)
    wrong = unequal(flat({"model": model, "optimizer": states}), want)
    sum(one.sum() for one in net.parameters()).backward()
    optimizer.step()
    return wrong


if __name__ == "__main__":
    if sys.argv[1] == "save":
        kind, folder, seed = sys.argv[2], sys.argv[3], int(sys.argv[4])
        job(seed % 4 + 1, save_trained if kind == "trained" else save_random, kind, folder, seed)
    else:
        wrong = {"load": load, "resume": resume}[sys.argv[1]](*sys.argv[2:4])
        sys.exit(f"not as expected: {wrong[:3]}" if wrong else 0)
