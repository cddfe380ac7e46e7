"""Operations where two things meet: refused with both named, or right to the byte."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import rankxform
from rankxform.checkpoints.base import FORMS
from rankxform.cli.main import main
from rankxform.errors import CheckpointError, RankxformError, UsageError
from rankxform.operations.base import OPERATIONS
from rankxform.planning import budget
from tests import reference, reference_forms
from tests.mpi.test_maps import options_of
from tests.place import Place, contents
from tests.reference_maps import KINDS, Model, random_strategy
from tests.reference_values import adapter_of, values, words
from tests.toy_alias import Alias

BITS = np.random.default_rng(11)


def random_words(dtype, *shape):
    return words(BITS.normal(0, 1, shape), dtype)


def folder(path, tensors, config=None):
    reference_forms.write_huggingface(path, tensors)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def found(path):
    return {n: w for n, (_, w) in reference_forms.read_huggingface(path).items()}


def lora_options(tmp_path, shapes):
    lora = adapter_of("mcore", shapes, "Float32", 2, BITS)
    folder(tmp_path / "lora", {n: ("Float32", a) for n, a in lora.items()})
    return lora, {"lora": str(tmp_path / "lora"), "lora_alpha": 4, "lora_rank": 2}


@pytest.mark.filterwarnings("ignore:.*has pairs for 1 of 3:rankxform.RankxformWarning")
def test_an_adapter_on_some_layers_leaves_the_others_as_they_are(tmp_path):
    """Tensors of one shape share a schedule only if the same is done to them."""
    model = Model("llama", 4, "Float32")
    layers = model.config["num_hidden_layers"] = 3
    model.hf, model.mf = {}, {}
    for _ in model.decoder():
        pass
    for layer in range(layers):
        model.dense(f"model.layers.{layer}", f"decoder.layers.{layer}")
    for name, array in list(model.hf.items()):
        model.hf[name] = random_words("Float32", *array.shape)
    src = folder(tmp_path / "src", model.tensors("hf"), model.config)
    name = "model.layers.1.self_attn.q_proj"
    lora, options = lora_options(tmp_path, {name: model.hf[f"{name}.weight"].shape})
    for dtype in (None, "bf16"):
        dst = tmp_path / str(dtype)
        more = {"dtype": dtype, "dst_form": "unified", "map": "llama", "verify": True}
        rankxform.transform(src, dst, **options, **more)
        made = {n: w for n, (_, w) in reference_forms.read_unified(dst).items()}
        for layer in range(layers):
            p, q = f"model.layers.{layer}.self_attn.", f"decoder.layers.{layer}.self_attention."
            parts = [model.hf[f"{p}{x}_proj.weight"] for x in "qkv"]
            if layer == 1:
                a, b = (values(lora[f"{name}.lora_{x}.weight"], "Float32") for x in "AB")
                parts[0] = words(values(parts[0], "Float32") + 2.0 * (b @ a), "Float32")
            want = words(model.join_qkv(*parts).view("<f4"), "BFloat16" if dtype else "Float32")
            have = made[q + "linear_qkv.weight"]
            kind = "BFloat16" if dtype else "Float32"
            if layer == 1:
                assert np.allclose(values(have, kind), values(want, kind), rtol=2**-7, atol=1e-6)
            else:
                assert have.tobytes() == want.tobytes(), (dtype, layer)


@pytest.mark.parametrize("step", ["lora", "fp8"])
@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe experts=axis", "deepseek_v3 experts=axis"])
def test_steps_and_a_map_may_be_taken_one_after_the_other(kind, step, tmp_path, monkeypatch):
    """However a map turns, joins and stacks matrices, products and factors go with them."""
    kind, *variant = kind.split()
    model = Model(kind, 6, "Float32", variants=2 * len(variant))
    tensors, options = model.tensors("hf"), options_of(model, tmp_path / "src")
    weights = [
        name for name, (_, array) in tensors.items() if array.ndim == 2 and ".weight" in name
    ]
    names = [name for name in weights if not re.search(r"embed|head|output", name)]
    tensors |= {n: ("Float32", random_words("Float32", *tensors[n][1].shape)) for n in names}
    if step == "lora":
        shapes = {name.removesuffix(".weight"): tensors[name][1].shape for name in names}
        _, changes = lora_options(tmp_path, shapes)
    else:
        changes = {"dtype": "fp32"}
        for name in names:
            shape = tensors[name][1].shape
            tensors[name] = "F8_E4M3", BITS.integers(0x30, 0x50, shape).astype("u1")
            factors = tuple(-(-n // size) for n, size in zip(shape, (128, 128)))
            tensors[name + "_scale_inv"] = "Float32", random_words("Float32", *factors)
    src = folder(tmp_path / "src", tensors, model.config)
    b = reference.write_stage_files(tmp_path / "b", random_strategy(model.params("mf"), 4, 1, 3))
    mapped = {"dst_strategy": b, "format": "safetensors", "variant": variant, **options}
    rankxform.transform(src, tmp_path / "step", dst_form="huggingface", **changes)
    rankxform.transform(tmp_path / "step", tmp_path / "map", **mapped)
    monkeypatch.setattr(budget, "_LARGEST_ARENA", 4096)
    rankxform.transform(src, tmp_path / "both", **mapped, **changes)
    assert contents(tmp_path / "both") == contents(tmp_path / "map")


def test_tensors_of_two_stored_types_are_not_joined(tmp_path):
    model = Model("llama", 4, "BFloat16")
    tensors = model.tensors("hf")
    name = "model.layers.0.self_attn.k_proj.weight"
    shape = tensors[name][1].shape
    tensors[name] = "F8_E4M3", np.ones(shape, "u1")
    tensors[name + "_scale_inv"] = "Float32", np.ones((1, 1), "<f4").view("<u4")
    src = folder(tmp_path / "src", tensors, model.config)
    with pytest.raises(CheckpointError, match=r"stored as F8_E4M3.*become one tensor"):
        rankxform.transform(src, tmp_path / "dst", map="llama", dst_form="unified")


def test_an_adapter_in_the_source_is_of_the_same_step(tmp_path):
    own = {}
    for step in (5, 9):
        lora = adapter_of("mcore", {"m": (4, 6)}, "Float32", 2, BITS)
        own[step] = {"m.weight": random_words("Float32", 4, 6)} | lora
        reference.write_safetensors(
            tmp_path / "src" / "rank_0" / f"net-1_{step}.safetensors",
            {n: ("Float32", a) for n, a in own[step].items()},
        )
    options = {"lora": str(tmp_path / "src"), "lora_alpha": 2, "lora_rank": 2, "step": "1_5"}
    rankxform.transform(
        tmp_path / "src", tmp_path / "dst", "none", dst_form="huggingface", **options
    )
    part = {n: values(a, "Float32") for n, a in own[5].items()}
    want = part["m.weight"] + part["m.lora_B.weight"] @ part["m.lora_A.weight"]
    have = values(found(tmp_path / "dst")["m.weight"], "Float32")
    assert np.allclose(have, want, rtol=2**-22, atol=1e-7)


def test_a_changed_table_is_another_conversion(tmp_path):
    table = "[[rules]]\nmindformers='p'\nhuggingface={{'{0}'=['4','4']}}\n"
    src = folder(tmp_path / "src", {n: ("Float32", random_words("Float32", 4, 4)) for n in "pq"})
    (tmp_path / "c.json").write_text('{"model_type": "own"}')
    path = tmp_path / "own.toml"
    rules = table.format("a") + table.format("b").replace("'p'", "'q'")
    path.write_text(rules)
    options = {"map": str(path), "config": str(tmp_path / "c.json"), "dst_form": "huggingface"}
    rankxform.transform(src, tmp_path / "dst", **options)
    path.write_text(rules.replace("'a'", "'x'").replace("'b'", "'a'").replace("'x'", "'b'"))
    with pytest.raises(RankxformError, match="composed otherwise"):
        rankxform.transform(src, tmp_path / "dst", **options)
    assert not rankxform.verify(src, tmp_path / "dst", **options).same


def test_the_size_of_a_block_is_the_configurations(tmp_path):
    codes = BITS.integers(0, 100, (200, 200)).astype("u1")
    scales = BITS.uniform(1, 2, (2, 2)).astype("<f4")
    tensors = {"m": ("F8_E4M3", codes), "m_scale_inv": ("Float32", scales.view("<u4"))}
    src = folder(
        tmp_path / "src", tensors, {"quantization_config": {"weight_block_size": [100, 100]}}
    )
    rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", dtype="fp32")
    have = values(found(tmp_path / "dst")["m"], "Float32")
    plain = have / np.repeat(np.repeat(scales, 100, 0), 100, 1)
    codes_of = {}
    for code, value in zip(codes.reshape(-1), np.round(plain, 9).reshape(-1)):
        assert abs(codes_of.setdefault(code, value) - value) < 1e-5 * max(1, abs(value))
    (src / "config.json").write_text('{"quantization_config": {"weight_block_size": [0, 0]}}')
    with pytest.raises(UsageError, match="weight_block_size"):
        rankxform.transform(src, tmp_path / "no", dst_form="huggingface", dtype="fp32")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["one", "one 2d", "rows", "column", "blocks"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("factor", ["Float32", "BFloat16", "F8_E8M0"])
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv", "scale"])
def test_8_bit_floats_become_numbers_by_any_factors(kind, dtype, factor, suffix, tmp_path):
    shape = {"one": (1,), "one 2d": (1, 1), "rows": (6,), "column": (6, 1), "blocks": (2, 3)}[kind]
    codes = BITS.integers(0, 256, (6, 12)).astype("u1")
    codes[(codes & 124 == 124) | (codes & 127 == 127)] = 3  # neither infinite nor no number
    if dtype == "F8_E5M2":  # the upper half of a Float16
        exact = (codes.astype("<u2") << 8).view("<f2").astype("f8")
    else:
        sign, power, rest = codes >> 7, (codes >> 3 & 15).astype(int), codes & 7
        exact = np.where(power, (8 + rest) * 2.0 ** (power - 10), rest * 2.0**-9) * (1 - 2.0 * sign)
    words = BITS.integers(120, 134, shape)
    scales = 2.0 ** (words - 127.0)
    stored = {
        "Float32": scales.astype("<f4").view("<u4"), "F8_E8M0": words.astype("u1"),
        "BFloat16": (scales.astype("<f4").view("<u4") >> 16).astype("<u2"),
    }[factor]  # fmt: skip
    tensors = {"l.weight": (dtype, codes), f"l.{suffix}": (factor, stored)}
    tensors["l.input_scale"] = "Float32", np.ones(1, "<u4")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 4]}}
    src = folder(tmp_path / "src", tensors, config)
    rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", dtype="fp32")
    have = found(tmp_path / "dst")
    if kind == "blocks":
        factors = np.repeat(np.repeat(scales, 3, 0), 4, 1)
    else:
        factors = scales.reshape(-1, 1)
    assert [*have] == ["l.weight"]
    np.testing.assert_array_equal(
        values(have["l.weight"], "Float32"), (exact * factors).astype("f4")
    )
    tensors["l.scale" if suffix != "scale" else "l.weight_scale"] = "Float32", np.ones(1, "<u4")
    two = folder(tmp_path / "two", tensors, config)
    with pytest.raises(CheckpointError, match="2 tensors of factors"):
        rankxform.transform(two, tmp_path / "no", dst_form="huggingface", dtype="fp32")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "huggingface={a=['2','3'],b=['2','4']}\nsteps=['concat']",
            "differ in the first axis only",
        ),
        ("huggingface={'a{e}'=['2']}\nfor={e=['0','2']}\nsteps=['stack(f)']", "no variable of"),
        ("huggingface={'a{e}'=['2']}\nfor={e=['0','9*9*9*9*9*9*9']}", "no model has so many"),
        ("huggingface={a=['2']}\nsteps=['transpose']", "no two axes"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rule, said, tmp_path):
    (tmp_path / "own.toml").write_text(f"[[rules]]\nmindformers='m'\n{rule}\n")
    (tmp_path / "c.json").write_text("{}")
    src = folder(tmp_path / "src", {"a": ("Float32", random_words("Float32", 2, 3))})
    options = {"map": str(tmp_path / "own.toml"), "config": str(tmp_path / "c.json")}
    with pytest.raises(UsageError, match=said):
        rankxform.transform(src, tmp_path / "dst", **options)


def test_a_master_without_its_parameter_is_refused(tmp_path):
    for other, said in (({}, "not in the checkpoint"), ({"w": (3, 4)}, r"of shape \[3, 4\]")):
        tensors = {n: ("BFloat16", random_words("BFloat16", *s)) for n, s in other.items()}
        tensors["main_param.w"] = "Float32", random_words("Float32", 2, 6)
        src = folder(tmp_path / f"src{len(other)}", tensors)
        with pytest.raises(CheckpointError, match=said):
            rankxform.transform(src, tmp_path / "dst", masters=True)


def test_what_is_no_pair_of_an_adapter_is_not_ignored(tmp_path):
    src = folder(tmp_path / "src", {"m.weight": ("Float32", random_words("Float32", 4, 6))})
    lora, options = lora_options(tmp_path, {"m": (4, 6)})
    more = {"embed.weight": ("Float32", random_words("Float32", 4, 6))}
    second = adapter_of("pynative", {"m": (4, 6)}, "Float32", 2, BITS)
    for extra, said in ((more, "embed.weight"), (second, "two pairs for 'm.weight'")):
        every = {n: ("Float32", a) for n, a in lora.items()}
        every |= {n: a if isinstance(a, tuple) else ("Float32", a) for n, a in extra.items()}
        folder(tmp_path / "lora", every)
        with pytest.raises(CheckpointError, match=said):
            rankxform.transform(src, tmp_path / "dst", **options)
    for alpha in (float("nan"), float("inf"), 0.0):
        with pytest.raises(UsageError):
            rankxform.transform(src, tmp_path / "dst", **{**options, "lora_alpha": alpha})


def test_inputs_are_never_destinations(tmp_path):
    model = Model("llama", 4, "BFloat16")
    hub = folder(tmp_path / "hub", model.tensors("hf"), model.config)
    reference_forms.write_unified(tmp_path / "src", model.tensors("mf"), {})
    with pytest.raises(UsageError, match="is the folder of --like"):
        rankxform.transform(
            tmp_path / "src", hub, map="llama", like=str(hub), dst_form="huggingface",
            overwrite=True, qkv="grouped", gate_up="interleaved",
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*infinite or no numbers")
def test_a_tied_head_that_differs_is_refused(tmp_path):
    model = Model("llama", 4, "BFloat16")
    model.config["tie_word_embeddings"] = True
    model.hf["lm_head.weight"] = model.hf["model.embed_tokens.weight"].copy()
    model.mf.pop("output_layer.weight", None)
    src = folder(tmp_path / "src", model.tensors("hf"), model.config)
    done = rankxform.transform(src, tmp_path / "dst", map="llama", dst_form="unified")
    assert [left.names for left in done.left_out] == [("lm_head.weight",)]
    model.hf["lm_head.weight"][-1] ^= 1
    folder(tmp_path / "src", model.tensors("hf"))
    with pytest.raises(CheckpointError, match="should be the same as 'model.embed_tokens.weight'"):
        rankxform.transform(src, tmp_path / "no", map="llama", dst_form="unified")


@pytest.mark.parametrize("side", ["hf", "mf"])
def test_states_take_a_map_and_a_type_with_their_parameters(side, tmp_path):
    """A state of what repeats another tensor repeats that one's state."""
    model = Model("deepseek_v3", 2, "Float32")
    assert model.config["num_nextn_predict_layers"] and not model.config["tie_word_embeddings"]
    tensors = model.tensors(side)
    states = {f"adam_m.{name}": ("Float32", array + 1) for name, (_, array) in tensors.items()}
    reference.write_ckpt(tmp_path / "src/rank_0/c.ckpt", tensors | states)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    options = options_of(model, tmp_path) | {"variant": ("bias=router",), "dtype": "bf16"}
    for cast_states, dtype in ((), "Float32"), ("adam", "BFloat16"):
        loaded = rankxform.load(tmp_path / "src", cast_states=cast_states, **options)
        of_states = {name: loaded.dtypes[name] for name in loaded if name.startswith("adam_m.")}
        assert len(of_states) == len(loaded) / 2
        routers = {name for name in of_states if name.endswith("bias")}
        assert {of_states[name] for name in of_states.keys() - routers} == {dtype}


@pytest.mark.parametrize("names", ["torch", "hyperparallel"])
@pytest.mark.parametrize(
    "form",
    [name for name in FORMS if FORMS[name].is_written and name not in ("vllm", "torch_dist")],
)
def test_every_form_keeps_the_steps_of_a_framework(form, names, tmp_path):
    """They are single values of states, which some forms list nowhere; two have weights alone."""
    tensors = {n: ("Float32", random_words("Float32", 8, 4)) for n in ("w", "adam_m.w", "adam_v.w")}
    tensors |= {n: ("Float32", random_words("Float32")) for n in ("s", "adam_m.s", "adam_v.s")}
    tensors["global_step"] = "Int32", np.array([7], "<u4")
    reference.write_ckpt(tmp_path / "src/rank_0/c.ckpt", tensors)
    options = {"dst_form": form, "names": names, "dtype": "fp32"}
    rankxform.transform(tmp_path / "src", tmp_path / "dst", **options)
    assert rankxform.verify(tmp_path / "src", tmp_path / "dst", **options).same
    loaded = rankxform.load(tmp_path / "dst", names="mindspore")
    assert {n: loaded[n].tobytes() for n in loaded} == {
        n: a.tobytes() for n, (_, a) in tensors.items()
    }


def test_copies_of_the_vocabulary_around_an_mtp_layer_get_rows_too(tmp_path):
    names = ["model.embed_tokens", "lm_head", "model.layers.3.embed_tokens"]
    names = [f"{name}.weight" for name in (*names, "model.layers.3.shared_head.head")]
    tensors = {name: ("Float32", random_words("Float32", 6, 4)) for name in names}
    src = folder(tmp_path / "src", tensors)
    with pytest.warns(rankxform.RankxformWarning, match="2 rows .* are zeros"):
        rankxform.transform(src, tmp_path / "dst", vocab=8, dst_form="huggingface")
    assert {array.shape for array in found(tmp_path / "dst").values()} == {(8, 4)}


def test_states_of_another_shape_than_their_parameters_get_no_rows(tmp_path):
    tensors = {"lm_head.weight": ("Float32", random_words("Float32", 6, 4))}
    tensors["exp_avg_sq_col.lm_head.weight"] = "Float32", random_words("Float32", 4)
    src = folder(tmp_path / "src", tensors)
    with pytest.raises(CheckpointError, match="leave states out"):
        rankxform.transform(src, tmp_path / "dst", vocab=8, dst_form="huggingface")
    options = {"vocab": 8, "dtype": "bf16", "weights_only": True}
    with pytest.warns(rankxform.RankxformWarning, match="2 rows of 'lm_head.weight' are zeros"):
        rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", verify=True, **options)
    want = np.zeros((8, 4), "<u2")
    want[:6] = words(tensors["lm_head.weight"][1].view("<f4"), "BFloat16")
    assert found(tmp_path / "dst")["lm_head.weight"].tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["BFloat16", "Float32"])
def test_values_beyond_the_range_of_a_type_are_refused(dtype, tmp_path):
    numbers = np.array([[1.0, -65536.0], [np.inf, np.nan]])
    options = {"dtype": "fp16"}
    with pytest.raises(CheckpointError, match=r"(?s)'w': .*65504.*--keep-dtype"):
        rankxform.transform(
            folder(tmp_path / "a", {"w": (dtype, words(numbers, dtype))}), tmp_path / "b", **options
        )
    assert not list((tmp_path / "b").glob("*.safetensors"))
    numbers[0, 1] = -65504.0 if dtype == "Float32" else -65280.0
    src = folder(tmp_path / "c", {"w": (dtype, words(numbers, dtype))})
    with pytest.warns(rankxform.RankxformWarning, match="infinite or no numbers"):
        rankxform.transform(src, tmp_path / "d", dst_form="huggingface", **options)
    assert np.array_equal(found(tmp_path / "d")["w"].view("<f2"), numbers, equal_nan=True)
    with pytest.warns(rankxform.RankxformWarning, match="infinite or no numbers"):
        assert rankxform.verify(src, tmp_path / "d", dst_form="huggingface", **options).same


@pytest.mark.parametrize("sign", [1, -1])
def test_values_beyond_bfloat16_are_refused_too(tmp_path, sign):
    """The last 32,767 Float32 values round up to infinity."""
    largest, last = 3.3895313892515355e38, np.finfo("<f4").max
    for value, fits in ((largest, True), (last, False)):
        words = np.array([1, sign * value], "<f4").view("<u4")
        src = folder(tmp_path / str(fits), {"w": ("Float32", words)})
        if fits:
            rankxform.transform(src, tmp_path / "dst", dtype="bf16", dst_form="huggingface")
        else:
            with pytest.raises(CheckpointError, match=r"beyond BFloat16's largest"):
                rankxform.transform(src, tmp_path / "no", dtype="bf16", dst_form="huggingface")


def test_a_tensor_that_becomes_zero_is_a_warning(tmp_path):
    tensors = {
        "small": ("Float32", np.full(4, 1e-9, "<f4").view("<u4")),
        "zero": ("Float32", np.zeros(4, "<u4")),
        "some": ("Float32", np.array([1e-9, 1, 0, 0], "<f4").view("<u4")),
    }
    src = folder(tmp_path / "src", tensors)
    with pytest.warns(rankxform.RankxformWarning, match=r"^small: every value is zero"):
        rankxform.transform(src, tmp_path / "dst", dtype="fp16", dst_form="huggingface")
    with pytest.warns(rankxform.RankxformWarning, match=r"^small: every value is zero"):
        found = rankxform.load(src, dtype="fp16")
    assert found.warnings


def test_the_command_line_has_options_from_outside(tmp_path, capsys, monkeypatch):
    params = {"a": ((48, 42), "Int32")}
    src, dst = [{"a": ([4], [0, -1], 0, 0)}], [{"one": ([6], [-1, 0], 0, 0)}]
    place = Place(tmp_path, src, dst, params)
    (tmp_path / "names.json").write_text('{"a": "one"}')
    words = [place.src, tmp_path / "dst", *place.strategies]
    with monkeypatch.context() as patched:
        patched.setitem(OPERATIONS, "alias", Alias())
        assert main(["transform", *map(str, words), "--alias", str(tmp_path / "names.json")]) == 0
        assert main(["verify", *map(str, words), "--alias", str(tmp_path / "names.json")]) == 0
        assert main(["transform", "--help-all"]) == 0
        assert "--alias ALIAS" in capsys.readouterr().out
    assert main(["transform", *map(str, words), "--alias", "names.json"]) == 2
    manifest = json.loads((tmp_path / "dst" / "rankxform.json").read_text())
    assert manifest["verify"][-2:] == ["--alias", str(tmp_path / "names.json")]


EXPERTS = {
    "l.experts.weight1": (6, 8, 12), "l.experts.weight2": (6, 12, 8), "l.proj.weight": (8, 8),
}  # fmt: skip


class TestAdaptersOfExperts:
    """PyNative's: every expert of a stack has a product, ``A[e] @ B[e]``, of matrices as (in, out)."""

    @pytest.fixture
    def place(self, tmp_path):
        base = {name: np.float32(BITS.uniform(-1, 1, shape)) for name, shape in EXPERTS.items()}
        pairs, merged = {}, {}
        for name, array in base.items():
            if array.ndim == 3:
                count, rows, columns = array.shape
                a = np.float32(BITS.uniform(-1, 1, (count, rows, 2)))
                b = np.float32(BITS.uniform(-1, 1, (count, 2, columns)))
                pairs |= {f"{name}_lora_a": a, f"{name}_lora_b": b}
                product = a.astype("f8") @ b
            else:
                a = np.float32(BITS.uniform(-1, 1, (2, 8)))
                b = np.float32(BITS.uniform(-1, 1, (8, 2)))
                pairs |= {"l.proj.lora_a": a, "l.proj.lora_b": b}
                product = b.astype("f8") @ a
            merged[name] = np.float32(array + 3 * product)
        folder(tmp_path / "src", {n: ("Float32", one.view("<u4")) for n, one in base.items()})
        folder(tmp_path / "lora", {n: ("Float32", one.view("<u4")) for n, one in pairs.items()})
        options = {"lora": str(tmp_path / "lora"), "lora_alpha": 6, "lora_rank": 2}
        return tmp_path, merged, options

    def test_into_whole_tensors(self, place):
        tmp_path, merged, options = place
        rankxform.transform(tmp_path / "src", tmp_path / "dst", dst_form="huggingface", **options)
        made = found(tmp_path / "dst")
        for name, array in merged.items():
            np.testing.assert_array_equal(made[name].view("f4"), array)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_into_ranks(self, axis, place):
        tmp_path, merged, options = place
        cut = [0 if n == axis else -1 for n in range(3)]
        stage = {name: ([2], cut, 0, 0) for name in ("l.experts.weight1", "l.experts.weight2")}
        b = reference.write_strategy(
            tmp_path / "b.ckpt", [{**stage, "l.proj.weight": ([2], [-1, -1], 0, 0)}]
        )
        rankxform.transform(tmp_path / "src", tmp_path / "dst", None, b, format="ckpt", **options)
        params = {name: (shape, "Float32") for name, shape in EXPERTS.items()}
        layouts = [{**stage, "l.proj.weight": ([2], [-1, -1], 0, 0)}]
        wrong = reference.wrong_slices(
            tmp_path / "dst", layouts, params, make=lambda name, *_: merged[name].view("<u4")
        )
        assert wrong == []

    def test_through_a_map(self, tmp_path):
        model = Model("qwen3_moe", 4, "Float32", variants=2)
        names = [name for name in model.mf if "experts.weight" in name]
        pairs = {}
        for name, array in list(model.mf.items()):
            model.mf[name] = np.float32(BITS.uniform(-1, 1, array.shape)).view("<u4")
        folder(tmp_path / "src", model.tensors("mf"), model.config)
        added = dict(model.mf)
        for name in names:
            array = model.mf[name].view("f4")
            count, rows, columns = array.shape
            a = np.float32(BITS.uniform(-1, 1, (count, rows, 2)))
            b = np.float32(BITS.uniform(-1, 1, (count, 2, columns)))
            pairs |= {
                f"{name}_lora_a": ("Float32", a.view("<u4")),
                f"{name}_lora_b": ("Float32", b.view("<u4")),
            }
            added[name] = np.float32(array + 2 * (a.astype("f8") @ b)).view("<u4")
        folder(tmp_path / "lora", pairs)
        model.mf = added
        folder(tmp_path / "added", model.tensors("mf"), model.config)
        options = {"map": "qwen3_moe", "dst_form": "huggingface", "qkv": "grouped"}
        rankxform.transform(tmp_path / "added", tmp_path / "want", **options)
        options |= {"lora": str(tmp_path / "lora"), "lora_alpha": 4, "lora_rank": 2}
        rankxform.transform(tmp_path / "src", tmp_path / "dst", **options)
        made, want = found(tmp_path / "dst"), found(tmp_path / "want")
        assert {*made} == {*want}
        for name, array in want.items():
            np.testing.assert_array_equal(made[name], array, name)

    def test_of_another_rank_is_refused(self, place):
        tmp_path, _, options = place
        with pytest.raises(CheckpointError, match=r"\(E, in, 3\) and \(E, 3, out\)"):
            rankxform.transform(tmp_path / "src", tmp_path / "dst", **{**options, "lora_rank": 3})
