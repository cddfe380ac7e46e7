"""A slow second truth of whole checkpoints in every form, written and read without the package.

Checkpoint 2.0 is read by the rules of MindFormers' loaders, the old one's (to 1.8), which looks
slices up by the rank that stores them, and the new one's (from 1.9), which looks through
`rank_group`; its layouts are made from strategies by trying which state the same.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np

from tests import reference, reference_dcp

STATES = ("adam_m.", "adam_v.")
COMMON = ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"]


# -- layouts ----------------------------------------------------------------------------------


def cells(matrix, tensor_map, ranks):
    """Return by rank which part of each axis it holds: the digits of its coordinates."""
    found = []
    for rank in range(ranks):
        where = reference.coordinates(rank % int(np.prod(matrix)), matrix)
        cell = []
        for entry in tensor_map:
            number = 0
            for axis in reference.axes_of(entry):
                at = len(matrix) - 1 - axis
                number = number * matrix[at] + where[at]
            cell.append(number)
        found.append(tuple(cell))
    return found


def counts(matrix, tensor_map):
    return [
        int(np.prod([matrix[len(matrix) - 1 - a] for a in reference.axes_of(e)] or [1]))
        for e in tensor_map
    ]


def actual_cells(shape, layout, ranks):
    """Return by rank which part it holds, by sharding a tensor of its own indexes."""
    starts = [np.arange(n) for n in shape]
    found = []
    full = np.stack(np.meshgrid(*starts, indexing="ij"), -1) if shape else np.zeros((0,))
    for rank in range(ranks):
        part = reference.shard(full, (*layout[:2], *layout[2:]), rank)
        first = part.reshape(-1, len(shape))[0]
        found.append(tuple(int(f) // n for f, n in zip(first, part.shape[:-1])))
    return found


def folded(shape, layout, ranks):
    """Return (device matrix, tensor map) of `ranks` that say the same without an optimizer shard.

    None if there are none: every way to append device axes to axis 0 was tried, one of them split.
    """
    matrix, tensor_map = list(layout[0]), [reference.axes_of(e) for e in layout[1]]
    actual = actual_cells(shape, layout, ranks)
    candidates = [(matrix, tensor_map)]
    for axis in range(len(matrix)):
        size = matrix[len(matrix) - 1 - axis]
        for part in range(2, size):
            if size % part == 0:
                at = len(matrix) - 1 - axis
                split = [*matrix[:at], size // part, part, *matrix[at + 1 :]]
                candidates.append((split, [[a + (a > axis) for a in some] for some in tensor_map]))
    for device, axes in candidates:
        used = {a for some in axes for a in some}
        free = [a for a in range(len(device) - 1, -1, -1) if a not in used]
        for count in range(len(free) + 1):
            for more in combinations(free, count):
                mapped = [[*some] for some in axes]
                if more and mapped:
                    mapped[0] += more
                if cells(device, mapped, ranks) == actual:
                    device = list(device)
                    if int(np.prod(device)) < ranks:
                        device.insert(0, ranks // int(np.prod(device)))
                    return device, [-1 if not a else a[0] if len(a) == 1 else a for a in mapped]
    return None


# -- Checkpoint 2.0 ---------------------------------------------------------------------------


def write_checkpoint2(root, stages, params, extras, *, dedup=False, prefix="llm", iteration=100,
                      rank_group=True, make=reference.full_tensor):  # fmt: skip
    """Write an iteration of what `stages` shard; with `dedup` the lowest rank has a slice."""
    folder = Path(root) / f"iteration_{iteration:08}"
    folder.mkdir(parents=True)
    size = reference.stage_size(stages)
    total = size * len(stages)
    parameters, storage, entries = {}, {}, {}
    for rank in range(total):
        stage, local = divmod(rank, size)
        for name, layout in stages[stage].items():
            shape, dtype = params[name]
            matrix, tensor_map = folded(shape, layout, size)
            where = cells(matrix, tensor_map, size)
            fragments = counts(matrix, tensor_map)
            number = int(np.ravel_multi_index(where[local], fragments)) if shape else 0
            stated = {
                "properties": {"dtype": dtype, "replica_id": [0] * size,
                               "allow_shape_mismatch": False, "allow_to_save": True},
                "global_shape": list(shape), "axis_fragmentations": fragments,
                "layout": {"device_matrix": matrix, "tensor_map": tensor_map,
                           "interleaved_parallel": False,
                           "alias_name": [chr(97 + i) for i in range(len(matrix))],
                           "rank_list": list(range(stage * size, stage * size + size))},
                "chunk": [],
            }  # fmt: skip
            stated = parameters.setdefault(name, stated)
            chunk = {"global_offset": [number],
                     "local_shape": [n // f for n, f in zip(shape, fragments)]}  # fmt: skip
            if chunk not in stated["chunk"]:
                stated["chunk"].append(chunk)
            kind = "opt" if name.startswith(STATES) else "model"
            file = f"{prefix + '-' if prefix else ''}{kind}-{rank:07}-{total:07}.safetensors"
            key = str((name, (number,)))
            group = [s * size + r for s, some in enumerate(stages) if name in some
                     for r, cell in enumerate(where) if cell == where[local]]  # fmt: skip
            if dedup and key in storage:
                continue
            entry = {"file_name": file, "storage_rank": rank}
            storage.setdefault(key, []).append(
                {**entry, "rank_group": group} if rank_group else entry
            )
            words = reference.shard(make(name, shape, dtype), layout, local)
            entries.setdefault(file, {})[name] = (dtype, words)
        if not dedup:
            file = f"{prefix + '-' if prefix else ''}opt-{rank:07}-{total:07}.safetensors"
            entries.setdefault(file, {}).update(extras)
    for file, some in entries.items():
        reference.write_safetensors(folder / file, some)
    document = {"state_dict_metadata": parameters, "storage_data": storage}
    (folder / "metadata.json").write_text(json.dumps(document, indent=4))
    step = int(extras["global_step"][1][0]) if "global_step" in extras else iteration
    facts = dict.fromkeys(COMMON) | {"global_step": step, "step_num": iteration}
    (folder / "common.json").write_text(json.dumps(facts, indent=4))
    (Path(root) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def read_checkpoint2(root, new):
    """Load every parameter whole, by the rules of a loader of before or since version 1.9.

    Return ``{name: (dtype, words)}``, with what is listed nowhere, by rank 0's files.
    """
    number = (Path(root) / "latest_checkpointed_iteration.txt").read_text()
    folder = Path(root) / f"iteration_{int(number):08}"
    document = json.loads((folder / "metadata.json").read_text())
    common = json.loads((folder / "common.json").read_text())
    assert list(common) == COMMON, "another key is a TypeError in some versions"
    every = [one for some in document["storage_data"].values() for one in some]
    files = {path.name: reference.read_safetensors(path) for path in folder.glob("*.safetensors")}
    assert {one["file_name"] for one in every} <= set(files), "verify_ckpt_valid"
    found = {}
    for name, facts in document["state_dict_metadata"].items():
        layout, fragments = facts["layout"], facts["axis_fragmentations"]
        assert list(layout) == [
            "device_matrix", "tensor_map", "interleaved_parallel", "alias_name", "rank_list",
        ]  # fmt: skip
        ranks = layout["rank_list"]
        where = cells(layout["device_matrix"], layout["tensor_map"], len(ranks))
        assert counts(layout["device_matrix"], layout["tensor_map"]) == fragments
        dtype, shape = facts["properties"]["dtype"], facts["global_shape"]
        local = [n // f for n, f in zip(shape, fragments)]
        kind = reference.WORD[reference.ITEM[dtype]]
        full = np.zeros(shape, kind)
        seen = {tuple(chunk["global_offset"]) for chunk in facts["chunk"]}
        for slice_number in range(int(np.prod(fragments))):
            assert (slice_number,) in seen
            cell = np.unravel_index(slice_number, fragments)
            lowest = ranks[where.index(tuple(int(c) for c in cell))]
            entries = document["storage_data"][str((name, (slice_number,)))]
            if new:
                entry = next(e for e in entries if lowest in e["rank_group"])
            else:
                entry = next(e for e in entries if e["storage_rank"] == lowest)
            if name.startswith("accu_grads."):
                break
            have = files[entry["file_name"]][name]
            assert have[:2] == (dtype, tuple(local))
            box = tuple(slice(int(c) * n, int(c) * n + n) for c, n in zip(cell, local))
            full[box] = np.frombuffer(have[2], kind).reshape(local)
        else:
            found[name] = (dtype, full)
    for name in sorted(files):
        for key, (dtype, shape, data) in files[name].items():
            if key not in document["state_dict_metadata"]:
                words = np.frombuffer(data, reference.WORD[reference.ITEM[dtype]]).reshape(shape)
                found.setdefault(key, (dtype, words))
    return found


# -- whole tensors ----------------------------------------------------------------------------


def write_huggingface(folder, tensors, files=1):
    """Write ``{name: (dtype, words)}`` as one file, or as shards with their index."""
    folder = Path(folder)
    names = sorted(tensors)
    files = min(files, len(names))
    if files == 1:
        reference.write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        return folder
    shards = {f"model-{i + 1:05}-of-{files:05}.safetensors": names[i::files] for i in range(files)}
    for file, some in shards.items():
        reference.write_safetensors(folder / file, {n: tensors[n] for n in some}, {"format": "pt"})
    total = sum(words.nbytes for _, words in tensors.values())
    weight_map = {n: file for file, some in shards.items() for n in some}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def write_unified(folder, tensors, loose, parts=2):
    folder = Path(folder)
    names = sorted(tensors)
    parts = min(parts, len(names))
    for i in range(parts):
        some = {n: tensors[n] for n in names[i::parts]}
        reference.write_safetensors(folder / f"part{i}.safetensors", some)
    weight_map = {n: f"part{i}.safetensors" for i in range(parts) for n in names[i::parts]}
    total = sum(words.nbytes for _, words in tensors.values())
    (folder / "param_name_map.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=4)
    )
    if loose:
        reference.write_safetensors(folder / "hyper_param.safetensors", loose)
    return folder


def tensors_in(path):
    """Return {name: (type, words)} of a safetensors file."""
    return {
        name: (dtype, np.frombuffer(data, reference.WORD[reference.ITEM[dtype]]).reshape(shape))
        for name, (dtype, shape, data) in reference.read_safetensors(path).items()
    }


def _mapped(folder, index):
    document = json.loads(index.read_text())
    found = {}
    for file in dict.fromkeys(document["weight_map"].values()):
        held = tensors_in(folder / file)
        assert set(held) == {n for n, f in document["weight_map"].items() if f == file}
        found |= held
    total = sum(words.nbytes for _, words in found.values())
    assert document["metadata"] == {"total_size": total}
    return found


def read_huggingface(folder):
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
        return tensors_in(folder / "model.safetensors")
    return _mapped(folder, index)


def read_unified(folder):
    folder = Path(folder)
    found = _mapped(folder, folder / "param_name_map.json")
    loose = folder / "hyper_param.safetensors"
    extra = tensors_in(loose) if loose.exists() else {}
    assert not set(extra) & set(found)
    return found | extra


# -- any form ---------------------------------------------------------------------------------

FORMS = ("ranks", "checkpoint2", "unified", "huggingface", "dcp", "hyperparallel")
SHARDED = ("checkpoint2", "dcp", "hyperparallel")
"""Those whose destinations a strategy may shard, and which say how themselves."""


def full(case, make=reference.full_tensor):
    return {n: (d, make(n, s, d)) for n, (s, d) in case.params.items()}


def can_be_2(stages, params):
    """Tell whether metadata can state all layouts of a strategy."""
    size = reference.stage_size(stages)
    return all(folded(params[n][0], one, size) for some in stages for n, one in some.items())


def write_any(form, folder, case, seed=0):
    """Write a case's source in a form."""
    if form == "ranks":
        reference.write_checkpoint(folder, case.src, case.params, case.extras, "safetensors")
    elif form == "checkpoint2":
        extras = case.extras
        write_checkpoint2(folder, case.src, case.params, extras, dedup=seed % 3 == 0,
                          prefix=("llm", "")[seed % 2], rank_group=seed % 4 < 2)  # fmt: skip
    elif form == "unified":
        write_unified(folder, full(case), case.extras, parts=1 + seed % 3)
    elif form == "huggingface":
        write_huggingface(folder, {**full(case), **case.extras}, files=1 + seed % 4)
    else:
        write = {
            "dcp": reference_dcp.write_dcp, "hyperparallel": reference_dcp.write_hyperparallel
        }  # fmt: skip
        write[form](folder, {**full(case), **case.extras}, ranks=1 + seed % 4, seed=seed)
    return folder


def read_distributed(folder):
    """Read a distributed checkpoint, or the only step of one, by its table."""
    (table,) = Path(folder).rglob(".metadata")
    return reference_dcp.read_items(table.parent)[0]


def counters(case, lost=(), iteration=100):
    """Return the tensors that become of common.json, as `write_any` writes it."""
    if not any(name.startswith("adam") for name in case.params):
        return {}
    facts = {"step_num": np.array(iteration, "<i8"), "loss_scale": np.array(1, "<i8")}
    found = {name: ("Int64", value) for name, value in facts.items()}
    return {**found, **({"global_step": case.extras["global_step"]} if lost else {})}


READERS = {
    "unified": [read_unified],
    "huggingface": [read_huggingface],
    "dcp": [read_distributed],
    "hyperparallel": [read_distributed],
    "checkpoint2": [lambda f: read_checkpoint2(f, True), lambda f: read_checkpoint2(f, False)],
}
"""Of each form, from its folder to `{name: (type, words)}`; loaders of all versions."""


def wrong_in(form, folder, case, lost=(), more=()):
    """Return what is wrong in a destination, of the case's parameters and extras, and of more."""
    if form == "ranks":
        return reference.wrong_slices(folder, case.dst, case.params, "safetensors")
    wanted = {n: one for n, one in {**full(case), **case.extras}.items() if n not in lost}
    return wrong_tensors(form, folder, {**wanted, **dict(more)})


def wrong_tensors(form, folder, wanted):
    """Return what any loader of a form reads otherwise than `wanted`, {name: (type, words)}."""
    wrong = []
    for read in READERS[form]:
        found = read(folder)
        wrong += [f"{n} is missing" for n in wanted if n not in found]
        wrong += [f"{n} should not be here" for n in found if n not in wanted]
        for name, (dtype, words) in wanted.items():
            have = found.get(name)
            if have and (have[0], have[1].shape, have[1].tobytes()) != (
                dtype, words.shape, np.ascontiguousarray(words).tobytes(),
            ):  # fmt: skip
                wrong.append(f"{name} differs")
    return wrong
