"""Models under another naming, on the way between strategies and forms: every built-in table."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import rankxform
from tests import reference, reference_forms
from tests.mpi_launch import world
from tests.reference_maps import KINDS, Model, random_strategy

MODELS, FEWER = 6, 2
"""With one process, and with several; RANKXFORM_MODELS is for all."""

STATES = ("adam_m.", "adam_v.")

# Values are random bits, of which some are no numbers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no numbers|.*value is zero:rankxform.RankxformWarning"
)


def seeds():
    return range(int(os.environ.get("RANKXFORM_MODELS", MODELS if world().size == 1 else FEWER)))


def model_of(kind, seed):
    return Model(
        kind, seed, ("BFloat16", "Float32")[seed % 2], ("grouped", "contiguous")[seed % 3 == 2],
        ("interleaved", "contiguous")[seed % 5 == 4], seed % 8,
    )  # fmt: skip


def options_of(model, folder):
    found = {"map": model.kind, "config": str(folder / "config.json")}
    if model.qkv != "grouped" and model.kind not in ("deepseek_v3", "deepseek_v4", "llama_legacy"):
        found["qkv"] = model.qkv
    if model.gate_up != "interleaved" and model.kind not in ("qwen3_moe", "glm4", "llama_legacy"):
        found["gate_up"] = model.gate_up
    return found


def write_ranks(folder, model, side, ranks, stages, seed, states=False):
    """Write rank folders and their strategy, with optimizer states if asked for."""
    params, arrays = model.params(side), dict(getattr(model, side))
    layouts = random_strategy(params, ranks, min(stages, len(params)), seed)
    for state in STATES if states else ():
        for some in layouts:
            some.update({state + n: one for n, one in some.items() if not n.startswith(STATES)})
        for name in getattr(model, side):
            params[state + name], arrays[state + name] = params[name], arrays[name]
    reference.write_stage_files(folder / "strategy", layouts)
    reference.write_checkpoint(
        folder / "src", layouts, params, None, "safetensors", make=lambda n, s, d: arrays[n]
    )


@pytest.mark.sampled
@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_checkpoint_becomes_a_hugging_face_folder(kind, tmp):
    for seed in seeds():
        model, here = model_of(kind, seed), tmp / str(seed)
        if world().rank == 0:
            write_ranks(here, model, "mf", (1, 2, 8)[seed % 3], 1 + seed % 2, seed, states=True)
            (here / "config.json").write_text(json.dumps(model.config))
        world().Barrier()
        options = {
            **options_of(model, here), "weights_only": True, "comm": world(),
            "read_method": ("auto", "two-phase", "ranges")[seed % 3],
        }  # fmt: skip
        a = str(here / "strategy")
        rankxform.transform(
            here / "src", here / "hf", a, dst_form="huggingface", fsync=False, verify=True,
            max_shard=(1 << 30, 9000)[seed % 2], memory=(64 << 20, 1 << 20)[seed % 2], **options,
        )  # fmt: skip
        if world().rank == 0:
            found = reference_forms.read_huggingface(here / "hf")
            assert_same(found, model.tensors("hf"), seed)
        assert rankxform.verify(here / "hf", comm=world()).same
        assert rankxform.verify(here / "src", here / "hf", a, **options).same


@pytest.mark.sampled
@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_hugging_face_folder_becomes_a_training_checkpoint(kind, tmp):
    for seed in seeds():
        model, here = model_of(kind, seed), tmp / str(seed)
        params = model.params("mf")
        ranks, stages = (8, 2, 1, 3)[seed % 4], min(1 + seed % 2, len(params))
        layouts = random_strategy(params, ranks, stages, seed)
        if world().rank == 0:
            reference_forms.write_huggingface(here / "hf", model.tensors("hf"), files=1 + seed % 4)
            (here / "hf" / "config.json").write_text(json.dumps(model.config))
            reference.write_stage_files(here / "strategy", layouts)
        world().Barrier()
        options = options_of(model, here / "hf")
        if seed % 2:
            del options["config"]  # it lies in the source
        options |= {"read_method": ("auto", "two-phase")[seed % 2], "comm": world()}
        b = str(here / "strategy")
        rankxform.transform(
            here / "hf", here / "dst", None, b, fsync=False, verify=True, format="safetensors",
            memory=(64 << 20, 1 << 20)[seed % 2], **options,
        )  # fmt: skip
        wrong = []
        if world().rank == 0:
            wrong = reference.wrong_slices(
                here / "dst",
                layouts,
                params,
                "safetensors",
                make=lambda n, s, d, own=model.mf: own[n],
            )
        assert world().bcast(wrong) == [], seed
        assert rankxform.verify(here / "dst", comm=world()).same
        assert rankxform.verify(here / "hf", here / "dst", None, b, **options).same


def assert_same(found, wanted, seed):
    assert set(found) == set(wanted), seed
    for name, (dtype, words) in wanted.items():
        have = found[name]
        assert (have[0], have[1].shape) == (dtype, words.shape), (seed, name)
        assert have[1].tobytes() == words.tobytes(), (seed, name)


@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("transposed", [False, True])
def test_many_parts_are_picked_out_of_one_tensor(transposed, tmp):
    """What lies between their rows is read too, and has room in every process's buffers."""
    count, rows, columns = 6, 384, 512
    bits = np.random.default_rng(6)
    parts = {f"p{i}": bits.integers(0, 1 << 16, (rows, columns), "<u2") for i in range(count)}
    whole = np.stack(list(parts.values()), 1).reshape(-1, columns)
    whole = np.ascontiguousarray(whole.T) if transposed else whole
    if world().rank == 0:
        shapes = ", ".join(f'{name} = ["{rows}", "{columns}"]' for name in parts)
        steps = '["interleave", "transpose"]' if transposed else '["interleave"]'
        (tmp / "own.toml").write_text(
            f'[[rules]]\nmindformers = "w"\nsteps = {steps}\nhuggingface = {{ {shapes} }}\n'
        )
        (tmp / "config.json").write_text("{}")
        layouts = {n: [{k: ([2], [0, -1], 0, 0) for k in names}]
                   for n, names in (("a", ["w"]), ("b", list(parts)))}  # fmt: skip
        for name, some in layouts.items():
            reference.write_stage_files(tmp / name, some)
        reference.write_checkpoint(
            tmp / "src", layouts["a"], {"w": (whole.shape, "BFloat16")}, None, "safetensors",
            make=lambda n, s, d: whole,
        )  # fmt: skip
    world().Barrier()
    rankxform.transform(
        tmp / "src", tmp / "dst", tmp / "a", tmp / "b", map=str(tmp / "own.toml"), verify=True,
        config=str(tmp / "config.json"), read_method="two-phase", memory=1 << 20, comm=world(),
        format="safetensors",
    )  # fmt: skip
    if world().rank == 0:
        params = {name: (one.shape, "BFloat16") for name, one in parts.items()}
        layouts = [{name: ([2], [0, -1], 0, 0) for name in parts}]
        wrong = reference.wrong_slices(
            tmp / "dst", layouts, params, "safetensors", make=lambda n, s, d: parts[n]
        )
        assert wrong == []
