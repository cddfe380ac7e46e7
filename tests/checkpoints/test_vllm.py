"""Folders that vLLM starts from: names, shapes and types as its own code saved them, values by slicing."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference, reference_forms
from tests.checkpoints import DATA

SAMPLES = DATA / "vllm"
CASES = sorted(path.stem for path in SAMPLES.glob("*.json"))
CODES = {"BF16": ("BFloat16", "<u2"), "F32": ("Float32", "<u4")}
TYPES = {dtype: code for code, (dtype, _) in CODES.items()}


class Sample:
    """A model of random bits that a case is about, and what vLLM's own code made of such a one."""

    def __init__(self, case, tmp):
        self.stated = json.loads((SAMPLES / f"{case}.json").read_text())
        self.config, self.files = self.stated["config"], self.stated["files"]
        rng = np.random.default_rng(7)
        self.hf = {}
        for name, (code, shape) in self.stated["source"].items():
            dtype, words = CODES[code]
            bits = rng.integers(0, 0x7F00, shape).astype("<u2")  # finite, of BFloat16
            self.hf[name] = dtype, bits if words == "<u2" else bits.astype("<u4") << 16
        self.src = reference_forms.write_huggingface(tmp / "hf", self.hf, 1)
        (self.src / "config.json").write_text(json.dumps(self.config))
        self.options = {
            name: self.stated[name]
            for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")
        }

    def convert(self, src, dst, **options):
        rankxform.transform(src, dst, dst_form="vllm", fsync=False, **self.options, **options)
        return {path.name: reference.read_safetensors(path) for path in dst.glob("*.safetensors")}

    # -- what a rank holds, by slicing alone; the rules are those of vLLM's layers -----------------

    def value(self, key, rank):
        """Return the bits of a tensor of a rank."""
        count, whole_experts = self.options["tensor_parallel"], self.options["expert_parallel"]
        if re.search(r"\._([kvq]|prob)_scale$", key):
            return np.array(1, "<f4").view("<u4")
        name = key.replace(".mla_attn.", ".").replace(".experts.gate.", ".gate.")
        name = name.replace(".experts._shared_experts._layer.", ".shared_experts.")
        name = name.replace(".experts.routed_experts.e_score", ".gate.e_score")
        words = {n: w for n, (_, w) in self.hf.items()}
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            stored = words.get(name, words["model.embed_tokens.weight"])
            rows = -(-len(stored) // 64) * 64
            padded = np.zeros((rows, stored.shape[1]), stored.dtype)
            padded[: len(stored)] = stored
            return np.split(padded, count)[rank]
        module, leaf = name.rsplit(".", 1)
        if module.endswith("qkv_proj") and "fused" not in module:
            parts = [words[f"{module.replace('qkv', x)}.{leaf}"] for x in "qkv"]
            heads = self.config["num_key_value_heads"]
            shared = [
                np.split(part, min(heads, count))[rank * min(heads, count) // count]
                for part in parts[1:]
            ]
            return np.concatenate([np.split(parts[0], count)[rank], *shared])
        if module.endswith("fused_qkv_a_proj"):
            names = "q_a_proj", "kv_a_proj_with_mqa"
            parts = [words[f"{module.replace('fused_qkv_a_proj', n)}.weight"] for n in names]
            return np.concatenate(parts)
        if module.endswith("gate_up_proj"):
            if name in words:
                halves = np.split(words[name], 2)
            else:
                names = (module.replace("gate_up", half) for half in ("gate", "up"))
                halves = [words[f"{n}.{leaf}"] for n in names]
            return np.concatenate([np.split(half, count)[rank] for half in halves])
        if leaf in ("w13_weight", "w2_weight"):
            return self.experts(words, module.replace(".routed_experts", ""), leaf, rank, count,
                                whole_experts)  # fmt: skip
        if leaf == "weight" and re.search(r"(o_proj|down_proj)$", module):
            return np.split(words[name], count, axis=1)[rank]
        if re.search(r"(q_b_proj|kv_b_proj|\bq_proj)$", module):
            return np.split(words[name], count)[rank]
        return words[name]

    def experts(self, words, module, leaf, rank, count, whole_experts):
        is_mixtral = "block_sparse_moe" in module
        gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        numbers = sorted(
            {
                int(match[1])
                for name in words
                if (match := re.match(re.escape(module) + r"\.(\d+)\.", name))
            }
        )
        if whole_experts:
            numbers, rank, count = np.array_split(numbers, count)[rank], 0, 1
        if leaf == "w2_weight":
            downs = (words[f"{module}.{e}.{down}.weight"] for e in numbers)
            return np.stack([np.split(w, count, axis=1)[rank] for w in downs])
        pairs = ([words[f"{module}.{e}.{n}.weight"] for n in (gate, up)] for e in numbers)
        return np.stack(
            [np.concatenate([np.split(w, count)[rank] for w in pair]) for pair in pairs]
        )


@pytest.fixture
def sample(tmp_path, request):
    return Sample(request.param, tmp_path)


@pytest.mark.parametrize("sample", CASES, indirect=True)
def test_files_are_those_that_vllm_loads(sample, tmp_path):
    made = sample.convert(sample.src, tmp_path / "dst")
    named = {
        file: {n: [TYPES[d], list(s)] for n, (d, s, _) in tensors.items()}
        for file, tensors in made.items()
    }
    assert named == sample.files
    for file, tensors in made.items():
        rank = int(re.search(r"(?:rank|tp)-(\d+)", file)[1])
        for key, (dtype, shape, data) in tensors.items():
            expected = sample.value(key, rank)
            if dtype == "Float32" and expected.dtype == "<u2":  # what vLLM keeps in Float32
                expected = expected.astype("<u4") << 16
            assert expected.shape == shape and expected.tobytes() == data, key
    config = json.loads((tmp_path / "dst/config.json").read_text())
    assert config == sample.config
    told = {"dst_form": "vllm", **sample.options}
    assert rankxform.verify(sample.src, tmp_path / "dst", **told).same
    assert rankxform.verify(sample.src, tmp_path / "dst").same, "the folder says the rest itself"


@pytest.mark.parametrize("sample", ["llama", "qwen3_moe"], indirect=True)
def test_parts_by_size_and_damage(sample, tmp_path):
    dst = tmp_path / "dst"
    made = sample.convert(sample.src, dst, max_shard=40000)
    assert {re.sub(r"part-\d+", "part", name) for name in made} == {
        f"model-rank-{rank}-part.safetensors" for rank in range(2)
    }
    assert len(made) > 4
    together = {}
    for name, tensors in made.items():
        held = together.setdefault(name.split("-part")[0], {})
        assert not held.keys() & tensors.keys()
        held |= tensors
    assert {rank: len(held) for rank, held in together.items()} == {
        name.split("-part")[0]: len(held) for name, held in sample.files.items()
    }
    told = {"dst_form": "vllm", **sample.options}
    assert rankxform.verify(sample.src, dst, **told).same
    path = min(dst.glob("*rank-1*"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert rankxform.verify(sample.src, dst, **told).same is False
    path.unlink()
    assert rankxform.verify(sample.src, dst, **told).same is False


@pytest.mark.parametrize("sample", ["llama"], indirect=True)
class TestRefusals:
    def refused(self, sample, tmp, text, **options):
        with pytest.raises(RankxformError, match=text) as raised:
            rankxform.transform(sample.src, tmp / "dst", dst_form="vllm", **options)
        assert raised.value.tries and not (tmp / "dst").exists()

    def change(self, sample, **entries):
        (sample.src / "config.json").write_text(json.dumps({**sample.config, **entries}))

    def test_a_number_of_ranks_is_needed(self, sample, tmp_path):
        self.refused(sample, tmp_path, "cut for a number of ranks")

    def test_ranks_that_do_not_divide(self, sample, tmp_path):
        self.refused(sample, tmp_path, "--tensor-parallel 3", tensor_parallel=3)

    def test_a_strategy_beside_them(self, sample, tmp_path):
        told = {"tensor_parallel": 2, "dst_strategy": "shard:q_proj=0@2"}
        self.refused(sample, tmp_path, "cut as its ranks are", **told)

    def test_another_architecture(self, sample, tmp_path):
        self.change(sample, architectures=["GptOssForCausalLM"])
        self.refused(sample, tmp_path, "is of a GptOssForCausalLM", tensor_parallel=2)

    def test_a_quantized_model(self, sample, tmp_path):
        self.change(sample, quantization_config={"quant_method": "fp8"})
        self.refused(sample, tmp_path, "quantized", tensor_parallel=2)

    def test_a_model_without_its_head(self, sample, tmp_path):
        del sample.hf["lm_head.weight"]
        reference_forms.write_huggingface(tmp_path / "other", sample.hf, 1)
        (tmp_path / "other/model.safetensors").replace(sample.src / "model.safetensors")
        self.refused(sample, tmp_path, "holds no 'lm_head.weight'", tensor_parallel=2)

    def test_a_tensor_that_vllm_does_not_have(self, sample, tmp_path):
        sample.hf["model.layers.0.self_attn.sinks"] = "BFloat16", np.zeros(4, "<u2")
        reference_forms.write_huggingface(tmp_path / "other", sample.hf, 1)
        (tmp_path / "other/model.safetensors").replace(sample.src / "model.safetensors")
        self.refused(sample, tmp_path, "has no .*sinks", tensor_parallel=2)

    def test_more_layers_than_there_are(self, sample, tmp_path):
        self.change(sample, num_hidden_layers=3)
        self.refused(sample, tmp_path, "nothing of layer 2", tensor_parallel=2)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("model.norm.weight", "holds no 'model.norm.weight'"),
            ("model.layers.1.input_layernorm.weight", r"layers\.1\.input_layernorm"),
            ("model.layers.0.self_attn.k_proj.weight", r"layers\.0\.self_attn\.qkv_proj"),
            ("model.layers.0.mlp.up_proj.weight", r"layers\.0\.mlp\.gate_up_proj"),
            ("model.layers.1.mlp.down_proj.weight", r"layers\.1\.mlp\.down_proj"),
        ],
    )
    def test_a_tensor_that_lacks(self, name, text, sample, tmp_path):
        self.refused(sample, tmp_path, text, tensor_parallel=2, exclude=[f"^{name}$"])

    def test_heads_that_ranks_do_not_divide(self, sample, tmp_path):
        self.refused(sample, tmp_path, "4 heads .* cannot be divided", tensor_parallel=8)

    def test_heads_of_another_configuration(self, sample, tmp_path):
        self.change(sample, num_key_value_heads=4)
        self.refused(sample, tmp_path, "32 rows, and .* makes them 64 and 64", tensor_parallel=2)

    def test_experts_that_are_not_there_or_stacked(self, sample, tmp_path):
        told = {"tensor_parallel": 2}
        self.refused(sample, tmp_path, "has no experts", expert_parallel=True, **told)
        self.refused(sample, tmp_path, "of its own", experts="stacked", **told)

    @pytest.mark.parametrize("rows", [100, 128, 150])
    def test_rows_of_words_are_not_lost_unsaid(self, rows, sample, tmp_path):
        """Whether or not vLLM pads what is left."""
        self.refused(sample, tmp_path, "--vocab-cut|not padding", tensor_parallel=2, vocab=rows)

    def test_what_is_served_is_not_converted(self, sample, tmp_path):
        sample.convert(sample.src, tmp_path / "served")
        for form in ("huggingface", "dcp", "ranks"):
            with pytest.raises(RankxformError, match="starts from, whose tensors"):
                rankxform.transform(tmp_path / "served", tmp_path / "dst", dst_form=form)
        with pytest.warns(rankxform.RankxformWarning, match="vocab_size is 200"):  # so few words
            assert "lm_head.weight" in rankxform.load(tmp_path / "served")

    def test_a_table_of_frequencies_is_no_weight(self, sample, tmp_path):
        expected = sample.convert(sample.src, tmp_path / "a")
        sample.hf["model.layers.0.self_attn.rotary_emb.inv_freq"] = "BFloat16", np.zeros(4, "<u2")
        src = reference_forms.write_huggingface(tmp_path / "other", sample.hf, 1)
        (src / "config.json").write_text(json.dumps(sample.config))
        assert sample.convert(src, tmp_path / "b") == expected

    def test_the_option_of_another_form(self, sample, tmp_path):
        with pytest.raises(RankxformError, match="--tensor-parallel is for --dst-form vllm"):
            rankxform.transform(
                sample.src, tmp_path / "dst", dst_form="huggingface", tensor_parallel=2
            )


@pytest.mark.parametrize("sample", ["qwen3_moe", "mixtral"], indirect=True)
def test_stacked_experts_become_the_same(sample, tmp_path):
    expected = sample.convert(sample.src, tmp_path / "a")
    stacked = tmp_path / "stacked"
    rankxform.transform(sample.src, stacked, dst_form="huggingface", experts="stacked")
    assert sample.convert(stacked, tmp_path / "b") == expected


@pytest.mark.parametrize("sample", ["qwen3", "qwen2_tied", "mixtral", "glm4"], indirect=True)
@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_of_a_training_become_the_same(sample, axis, tmp_path):
    """From ranks of MindFormers' names (Megatron's, of Mixtral), by two strategies."""
    kind = sample.config["model_type"]
    expected = sample.convert(sample.src, tmp_path / "a")
    named = {"map": kind, "config": str(sample.src / "config.json")}
    joins_gate = kind.startswith("qwen")
    dense = {"qkv": "grouped"} | ({"gate_up": "interleaved"} if joins_gate else {})
    rankxform.transform(
        sample.src, tmp_path / "ranks", dst_strategy=f"shard:linear_proj={axis}@2",
        unmatched="replicate", format="safetensors", **named, **dense,
    )  # fmt: skip
    strategy = {"src_strategy": f"shard:linear_proj={axis}@2"}
    made = sample.convert(tmp_path / "ranks", tmp_path / "b", **strategy, **named, **dense)
    assert made == expected


@pytest.mark.parametrize("sample", ["llama"], indirect=True)
@pytest.mark.parametrize("memory", [1 << 20, 64 << 20])
def test_rows_that_alternate_are_read_once(sample, memory, tmp_path):
    """Each half of gate_up takes every second row of linear_fc1, of several tiles."""
    rng = np.random.default_rng(5)
    rows, hidden = 8192, sample.config["hidden_size"]
    for name, (dtype, words) in sample.hf.items():
        if "gate_proj" in name or "up_proj" in name:
            sample.hf[name] = dtype, rng.integers(0, 0x7F00, (rows, hidden)).astype("<u2")
        elif "down_proj" in name:
            sample.hf[name] = dtype, rng.integers(0, 0x7F00, (len(words), rows)).astype("<u2")
    sample.config["intermediate_size"] = rows
    src = reference_forms.write_huggingface(tmp_path / "wide", sample.hf, 1)
    (src / "config.json").write_text(json.dumps(sample.config))
    expected = sample.convert(src, tmp_path / "a")
    read = {}
    for order in ("interleaved", "contiguous"):
        named = {"map": "llama", "config": src / "config.json", "gate_up": order}
        cut = {"dst_strategy": "shard:linear_fc2=1@4", "unmatched": "replicate"}
        ranks = tmp_path / f"ranks_{order}"
        rankxform.transform(src, ranks, format="safetensors", qkv="grouped", **cut, **named)
        told = {"src_strategy": cut["dst_strategy"], "qkv": "grouped", **named, **sample.options}
        told |= {"dst_form": "vllm", "memory": memory, "verify": True}
        dst = tmp_path / f"b_{order}"
        read[order] = rankxform.transform(ranks, dst, **told).bytes_read
        made = {path.name: reference.read_safetensors(path) for path in dst.glob("*.safetensors")}
        assert made == expected
    assert read["interleaved"] == read["contiguous"]


@pytest.mark.parametrize("model", ["llama", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_megatrons_folders_become_the_same(model, form, tmp_path):
    """Their vocabulary is padded with rows that are not zero, which are taken away first."""
    sample = DATA / "megatron" / model
    hf = reference_forms.tensors_in(sample / "expected.safetensors")
    src = reference_forms.write_huggingface(tmp_path / "hf", hf, 1)
    (src / "config.json").write_text((sample / "config.json").read_text())
    told = {"dst_form": "vllm", "tensor_parallel": 2, "fsync": False}
    rankxform.transform(src, tmp_path / "a", **told)
    told |= {"map": model, "config": str(sample / "config.json"), "vocab": 20, "vocab_cut": True}
    rankxform.transform(sample / form, tmp_path / "b", **told)
    for rank in range(2):
        first, second = (tmp_path / f"{x}/model-rank-{rank}-part-0.safetensors" for x in "ab")
        assert reference.read_safetensors(first) == reference.read_safetensors(second)


NAMES = json.loads((DATA / "vllm_names.json").read_text())
"""By version and case what vLLM's own code called a rank's tensors."""


@pytest.mark.parametrize(
    ("sample", "version"), [(case, v) for v in NAMES for case in NAMES[v]], indirect=["sample"]
)
def test_earlier_versions_call_the_same_tensors_otherwise(sample, version, tmp_path):
    newest = sample.convert(sample.src, tmp_path / "newest")
    made = sample.convert(sample.src, tmp_path / "dst", vllm_version=version)
    case = next(c for c in CASES if stated_of(c) == sample.stated)
    for file, tensors in made.items():
        assert sorted(tensors) == NAMES[version][case]
        contents = sorted(d for n, (_, _, d) in newest[file].items() if "_scale" not in n)
        assert contents == sorted(d for n, (_, _, d) in tensors.items() if "_scale" not in n)
    assert rankxform.verify(sample.src, tmp_path / "dst", vllm_version=version).same
    assert rankxform.verify(sample.src, tmp_path / "dst").same, "names tell the version"


def stated_of(case):
    return json.loads((SAMPLES / f"{case}.json").read_text())


@pytest.mark.parametrize("sample", ["deepseek_v3", "deepseek_v3_ep"], indirect=True)
def test_ascend_calls_routers_and_latent_attention_otherwise(sample, tmp_path):
    made = sample.convert(sample.src, tmp_path / "dst", platform="ascend")
    names = next(iter(made.values()))
    assert "model.layers.1.mlp.experts._gate.weight" in names
    assert "model.layers.1.mlp.experts._gate.e_score_correction_bias" in names
    assert "model.layers.0.self_attn.q_b_proj.weight" in names
    assert not any("mla_attn.q_b_proj" in name for name in names)
    assert rankxform.verify(sample.src, tmp_path / "dst", platform="ascend").same
    assert rankxform.verify(sample.src, tmp_path / "dst").same


@pytest.mark.parametrize(
    "sample", ["qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe"], indirect=True
)
def test_a_version_is_told_by_its_names(sample, tmp_path):
    for version in ("0.11", "0.14", "0.16", "0.20", "0.23", "0.24"):
        dst = tmp_path / version
        sample.convert(sample.src, dst, vllm_version=version)
        assert rankxform.verify(sample.src, dst).same, version


@pytest.mark.parametrize("sample", ["llama", "qwen3_moe"], indirect=True)
def test_versions_that_nobody_looked_at(sample, tmp_path):
    def refused(text, **options):
        with pytest.raises(RankxformError, match=text):
            sample.convert(sample.src, tmp_path / "x", **options)

    refused("names are known of", vllm_version="0.34.1")
    refused("names are known of", vllm_version="newest")
    refused("Ascend's names", vllm_version="0.20", platform="ascend")
    if "mlp.experts" in str(sample.files):
        refused("vLLM 0.21 calls .* is not known", vllm_version="0.21")
    else:
        assert sample.convert(sample.src, tmp_path / "a", vllm_version="0.21.0") == sample.convert(
            sample.src, tmp_path / "b"
        )
