"""Megatron-LM's files of ranks: what they say of themselves, and how their tensors are cut."""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections import OrderedDict

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference
from tests import reference_torch as torch
from tests.checkpoints import DATA
from tests.checkpoints.test_dcp import transformed, whole
from tests.checkpoints.test_megatron_names import options_of

MODELS = "llama", "qwen2_tied", "qwen3", "qwen3_moe", "mixtral"
H, F = 4, 6


def words(*shape, first=0):
    return np.arange(first, first + int(np.prod(shape)), dtype="<f4").reshape(shape)


def write(root, models, *, more=None, **args):
    """Write {(tensor, stage, expert): {name: words}}, or a list of these of a virtual pipeline."""
    sizes = [1 + max(key[axis] for key in models) for axis in range(3)]
    degrees = ("tensor", "pipeline", "expert")
    stated = {f"{n}_model_parallel_size": size for n, size in zip(degrees, sizes)}
    stated |= {"swiglu": True, "hidden_size": H, "params_dtype": "x", **args}
    for (tensor, stage, expert), model in models.items():
        folder = root / "iter_0000007" / (
            f"mp_rank_{tensor:02}"
            + (f"_{stage:03}" if sizes[1] > 1 else "")
            + (f"_{expert:03}" if sizes[2] > 1 else "")
        )  # fmt: skip
        folder.mkdir(parents=True)
        numbers, storages = itertools.count(), {}
        parts = model if isinstance(model, list) else [model]
        saved = {"args": argparse.Namespace(**stated), "checkpoint_version": 3.0, "iteration": 7}
        for chunk, tensors in enumerate(parts):
            made = OrderedDict()
            for name, its_words in tensors.items():
                number = next(numbers)
                made[name] = torch.tensor(number, "Float32", its_words.shape)
                storages[number] = np.ascontiguousarray(its_words).tobytes()
            saved[f"model{chunk}" if isinstance(model, list) else "model"] = made
        torch.archive(folder / "model_optim_rng.pt", {**saved, **(more or {})}, storages)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def check(src, dst, expected, **options):
    transformed(src, dst, dst_form="huggingface", **options)
    made = whole(dst)
    assert made == {n: ("Float32", w.shape, w.tobytes()) for n, w in expected.items()}


@pytest.mark.parametrize("model", MODELS)
def test_both_forms_of_one_model_become_the_same(model, tmp_path):
    options = options_of(model)
    transformed(DATA / "megatron" / model / "legacy", tmp_path / "hf", **options)
    expected = reference.read_safetensors(DATA / "megatron" / model / "expected.safetensors")
    assert whole(tmp_path / "hf") == expected
    for form in ("legacy", "torch_dist"):
        src = DATA / "megatron" / model / form
        transformed(src, tmp_path / form, dst_form="dcp", exclude=["^output_layer"])
    first, second = (rankxform.load(tmp_path / form) for form in ("legacy", "torch_dist"))
    assert {*first} == {*second}
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_a_tied_head_that_is_no_copy_is_refused(tmp_path):
    """The last stage has a copy of the embedding, which the map leaves out."""
    src = tmp_path / "src"
    shutil.copytree(DATA / "megatron/qwen2_tied/legacy", src)
    path = src / "iter_0000005/mp_rank_00_001/model_optim_rng.pt"
    words_of = rankxform.load(DATA / "megatron/qwen2_tied/legacy")["output_layer.weight"]
    data, row = path.read_bytes(), words_of[3].tobytes()
    assert data.count(row) == 1
    path.write_bytes(data.replace(row, row[::-1]))
    with pytest.raises(RankxformError, match="output_layer.weight"):
        transformed(src, tmp_path / "hf", **options_of("qwen2_tied"))


class TestHowRanksHoldTensors:
    LAYER = "decoder.layers.0."

    def halves(self, degree):
        """Return gate and up of a layer, and what each rank has of them."""
        fc1 = words(2 * F, H)
        gate, up = np.split(fc1, 2)
        pairs = zip(np.split(gate, degree), np.split(up, degree))
        return fc1, [np.concatenate(pair) for pair in pairs]

    @pytest.mark.parametrize("gating", ["swiglu", "quick_geglu"])
    def test_a_gated_unit_by_halves(self, gating, tmp_path):
        fc1, parts = self.halves(2)
        name = f"{self.LAYER}mlp.linear_fc1.weight"
        models = {(t, 0, 0): {name: part} for t, part in enumerate(parts)}
        src = write(tmp_path / "src", models, **{"swiglu": False, gating: True})
        check(src, tmp_path / "dst", {name: fc1})

    def test_another_unit_by_rows(self, tmp_path):
        fc1 = words(2 * F, H)
        name = f"{self.LAYER}mlp.linear_fc1.weight"
        models = {(t, 0, 0): {name: part} for t, part in enumerate(np.split(fc1, 2))}
        check(write(tmp_path / "src", models, swiglu=False), tmp_path / "dst", {name: fc1})

    @pytest.mark.parametrize(
        "spelling", ["local_experts.{}.linear_fc1.weight", "linear_fc1.weight{}"]
    )
    def test_experts_by_number_and_rank(self, spelling, tmp_path):
        """Two tensor parallel ranks, and three of experts with two experts each."""
        experts = words(6, 2 * F, H)
        models = {}
        for tensor, expert in itertools.product(range(2), range(3)):
            models[tensor, 0, expert] = {
                self.LAYER + "mlp.experts." + spelling.format(local): np.concatenate(
                    [np.split(half, 2)[tensor] for half in np.split(experts[2 * expert + local], 2)]
                )
                for local in range(2)
            }
        expected = {f"{self.LAYER}mlp.experts.experts.linear_fc1.weight": experts}
        check(write(tmp_path / "src", models, num_experts=6), tmp_path / "dst", expected)

    def test_grouped_experts_are_transposed_in_memory(self, tmp_path):
        """They get the names and shapes of MindFormers' experts along an axis."""
        first, second = words(4, H, 2 * F), words(4, F, H)
        models = {
            (0, 0, rank): {
                f"{self.LAYER}mlp.experts.weight1": first[own].reshape(H, -1),
                f"{self.LAYER}mlp.experts.weight2": second[own].reshape(-1, H),
            }
            for rank, own in enumerate((slice(0, 2), slice(2, 4)))
        }
        expected = {
            f"{self.LAYER}mlp.experts.weight1": first,
            f"{self.LAYER}mlp.experts.weight2": second,
        }
        check(write(tmp_path / "src", models, num_experts=4), tmp_path / "dst", expected)

    @pytest.mark.parametrize("cut", [True, False])
    @pytest.mark.parametrize("fused", [True, False])
    def test_down_projections_are_cut_or_whole(self, cut, fused, tmp_path):
        q, kv = words(4, H), words(6, H, first=100)
        attention = f"{self.LAYER}self_attention."
        names = [f"{attention}linear_{n}_down_proj.weight" for n in ("q", "kv")]
        models = {}
        for tensor in range(2):
            parts = [np.split(w, 2)[tensor] if cut else w for w in (q, kv)]
            of_rank = dict(zip(names, parts))
            if fused:
                of_rank = {f"{attention}linear_qkv_down_proj.weight": np.concatenate(parts)}
            models[tensor, 0, 0] = of_rank
        sizes = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_pos_emb_head_dim": 2}
        src = write(tmp_path / "src", models, **sizes)
        check(src, tmp_path / "dst", dict(zip(names, (q, kv))))

    def test_layers_are_counted_over_uneven_stages_and_virtual_ones(self, tmp_path):
        """Of chunks 0 of all stages come the first layers, whatever their numbers."""
        counts = {(0, 0): 2, (1, 0): 1, (0, 1): 1, (1, 1): 3}  # (stage, chunk)
        expected, first, chunks = {}, 0, {}
        for chunk, stage in itertools.product(range(2), range(2)):
            chunks[stage, chunk] = {}
            for local in range(counts[stage, chunk]):
                one = words(H, first=100 * first)
                chunks[stage, chunk][f"decoder.layers.{local}.input_layernorm.weight"] = one
                expected[f"decoder.layers.{first}.input_layernorm.weight"] = one
                first += 1
        models = {(0, stage, 0): [chunks[stage, 0], chunks[stage, 1]] for stage in range(2)}
        check(write(tmp_path / "src", models, num_layers=7), tmp_path / "dst", expected)

    def test_names_of_transformer_engine_and_of_newer_predictions(self, tmp_path):
        model = {
            f"{self.LAYER}mlp.linear_fc1.layer_norm_weight": words(H),
            "mtp.layers.0.mtp_model_layer.pre_mlp_layernorm.weight": words(H, first=9),
        }
        expected = {
            f"{self.LAYER}pre_mlp_layernorm.weight": words(H),
            "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight": words(H, first=9),
        }
        check(write(tmp_path / "src", {(0, 0, 0): model}), tmp_path / "dst", expected)


W = {"decoder.layers.0.input_layernorm.weight": words(H)}
BOTH = {(0, 0, 0): W, (1, 0, 0): W}
REFUSED = {
    "an unknown matrix": (
        {(t, 0, 0): {"decoder.layers.0.mixer.in_proj.weight": words(H, H)} for t in range(2)}, {},
        "how 2 ranks hold decoder.layers.0.mixer.in_proj.weight is not known",
    ),
    "an old order": (BOTH, {"more": {"checkpoint_version": 1.0}}, "checkpoint_version 1.0"),
    "old names": (
        {(0, 0, 0): {"language_model.encoder.layers.0.input_layernorm.weight": words(H)}}, {},
        "before its Core",
    ),
    "layers that lack": (BOTH, {"num_layers": 2}, "have 1 layers, and num_layers is 2"),
    "experts that lack": (
        {(0, 0, 0): {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": words(2, H)}},
        {"num_experts": 2}, "has 1 experts of each layer, and num_experts is 2",
    ),
    "grouped experts by columns": (
        {(t, 0, 0): {"decoder.layers.0.mlp.experts.weight1": words(H, 2 * F)} for t in range(2)},
        {"num_experts": 2}, "cut by columns within each expert",
    ),
    "experts cut by other ranks": (
        {(0, 0, 0): W, (1, 0, 0): W, (0, 0, 1): W, (1, 0, 1): W},
        {"expert_tensor_parallel_size": 1}, "experts are cut by 1 ranks, and other tensors by 2",
    ),
    "rows that are neither": (
        {(t, 0, 0): {"decoder.layers.0.self_attention.linear_q_down_proj.weight": words(3, H)}
         for t in range(2)}, {"q_lora_rank": 4}, "has 3 rows, and q_lora_rank make 4",
    ),
    "two names of one tensor": (
        {(0, 0, 0): {**W, "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": words(H)}},
        {}, "two names of one tensor",
    ),
    "a lack of arguments": (BOTH, {"more": {"args": None}}, "states no arguments of its training"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_known_is_refused_by_name(why, tmp_path):
    models, args, text = REFUSED[why]
    with pytest.raises(RankxformError, match=text) as raised:
        rankxform.load(write(tmp_path / "src", models, **args))
    assert raised.value.tries and "bug" not in str(raised.value)


def test_a_rank_that_lacks_and_one_too_many_are_named(tmp_path):
    models = {(t, s, 0): W for t, s in itertools.product(range(2), range(2))}
    src = write(tmp_path / "src", models)
    folder = src / "iter_0000007/mp_rank_01_001"
    folder.rename(src / "iter_0000007/mp_rank_02_001")
    with pytest.raises(RankxformError, match="mp_rank_01_001/model_optim_rng.pt"):
        rankxform.load(src)


def test_files_of_two_jobs_are_refused(tmp_path):
    src = write(tmp_path / "src", BOTH)
    write(tmp_path / "other", BOTH, hidden_size=99)
    name = "iter_0000007/mp_rank_01/model_optim_rng.pt"
    (tmp_path / "other" / name).replace(src / name)
    with pytest.raises(RankxformError, match="hidden_size is 99, and 4 in .*not of one job"):
        rankxform.load(src)


def test_an_optimizer_is_left_out_if_weights_are_asked_for(tmp_path):
    src = write(tmp_path / "src", BOTH, more={"optimizer": {"state": argparse.Namespace(a=1)}})
    with pytest.raises(RankxformError, match="say --weights-only"):
        transformed(src, tmp_path / "dst", dst_form="huggingface")
    check(src, tmp_path / "dst", W, weights_only=True)


@pytest.mark.parametrize(
    ("argument", "text"),
    [("apply_layernorm_1p", "stored less 1"), ("attention_output_gate", "holds a gate")],
)
def test_arrangements_that_no_map_has_are_refused_with_one(argument, text, tmp_path):
    src = write(tmp_path / "src", {(0, 0, 0): W}, **{argument: True})
    with pytest.raises(RankxformError, match=text):
        transformed(src, tmp_path / "hf", **options_of("llama"))
    check(src, tmp_path / "dst", W)


def test_one_ranks_file_alone_is_no_model():
    path = DATA / "megatron/llama/legacy/iter_0000005/mp_rank_00_000/model_optim_rng.pt"
    with pytest.raises(RankxformError, match="name the folder of all ranks"):
        rankxform.load(path)


def test_norms_that_differ_between_ranks_are_refused(tmp_path):
    """They are of two jobs."""
    name = "decoder.final_layernorm.weight"
    models = {(0, 0, 0): {name: words(H)}, (1, 0, 0): {name: words(H, first=1)}}
    with pytest.raises(RankxformError, match="final_layernorm.weight' is not the same") as raised:
        rankxform.transform(write(tmp_path / "src", models), tmp_path / "dst")
    assert raised.value.tries and not (tmp_path / "dst").exists()


@pytest.mark.parametrize("value", ["x", 2.0, float("inf"), -1, 0, 2**31, 2**70, True])
@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_a_degree_that_is_no_number_of_ranks(name, value, tmp_path):
    write(tmp_path / "src", {(0, 0, 0): {"w": words(2, 2)}}, **{name: value})
    with pytest.raises(RankxformError, match=f"{name} is .*, and expected is a number of ranks"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", dst_form="huggingface")


def test_degrees_whose_product_is_no_number_of_ranks(tmp_path):
    sizes = {f"{n}_model_parallel_size": 1 << 15 for n in ("tensor", "pipeline", "expert")}
    write(tmp_path / "src", {(0, 0, 0): {"w": words(2, 2)}}, **sizes)
    with pytest.raises(RankxformError, match="its training states 32768 x 32768 x 32768 ranks"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", dst_form="huggingface")


@pytest.mark.parametrize("gone", ["iteration", "checkpoint_version"])
def test_what_need_not_be_said(gone, tmp_path, monkeypatch):
    real = torch.archive

    def archive(path, saved, storages):
        saved["args"].__dict__[(1,)] = 2
        real(path, {name: value for name, value in saved.items() if name != gone}, storages)

    monkeypatch.setattr(torch, "archive", archive)
    write(tmp_path / "src", {(0, 0, 0): {"w": words(2, 2)}})
    assert rankxform.inspect(tmp_path / "src")
