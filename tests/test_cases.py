"""Inputs after public bug reports (tests/data/cases): what is written, or what a message names."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rankxform
from rankxform.cli.main import main
from rankxform.engine import piece_schedule
from tests import reference, reference_forms
from tests.reference_maps import Model
from tests.reported import convert, dst, made, put, refused, same, tensors

__all__ = ["dst", "made"]


# -- names of files ---------------------------------------------------------------------------------

PATTERNS = {
    "a": "tp{rank}_model.safetensors", "b": "model-rank-{rank}-part-0.safetensors",
    "c": "model_{rank}of2.safetensors", "d": "shard.{rank}.safetensors", "g": None, "i": None,
    "e": "rank{rank}-net.safetensors", "f": "consolidated.{rank}.safetensors", "j": None, "k": None,
    "h": "ckpt_{rank}/*.safetensors", "i named": "rank_{rank}/net_rank_{rank}.safetensors",
    "h named": "ckpt_{rank}/net_rank{rank}.safetensors", "c open": "*_{rank}of*",
    "j named": "rank_{rank}/net_rank_{rank}-1_5.*",
}  # fmt: skip


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_ranks_number_stands_anywhere(kind, made, dst, tmp_path):
    folder, pattern = made("rank_in_name"), PATTERNS[kind]
    rows = [{"q.weight": ([2], [0, -1], 0, 0), "o.weight": ([2], [-1, 0], 0, 0)}]
    a = reference.write_strategy(tmp_path / "a.ckpt", rows)
    options = {} if pattern is None else {"src_pattern": pattern}
    found = convert(folder / kind[0], dst, a, **options)[1]
    same(found, load_file(folder / "expect.safetensors"))


def test_a_rank_of_vllm_has_several_files(made, dst, tmp_path):
    folder = made("vllm_sharded")
    rows = {"q.weight": ([2], [0, -1], 0, 0), "o.weight": ([2], [-1, 0], 0, 0)}
    a = reference.write_strategy(tmp_path / "a.ckpt", [{**rows, "norm.weight": ([2], [-1], 0, 0)}])
    for strategy in (None, a):
        parts = refused(folder / "ckpt", dst, strategy)
        flag, pattern = parts.tries[0].split(" if ")[0].split()
        assert flag == "--src-pattern"
    for one in (pattern.strip("'"), "model-rank-{rank}-part-*"):
        found = convert(folder / "ckpt", dst, a, src_pattern=one)[1]
        same(found, load_file(folder / "expect.safetensors"))


def test_two_files_of_one_rank_by_other_spellings_are_refused(tmp_path, dst):
    for name in ("rank_1", "rank_01", "rank_0"):
        (tmp_path / "src" / name).mkdir(parents=True)
        save_file({"w": np.ones(2, "f4")}, tmp_path / "src" / name / "net.safetensors")
    assert "both rank 1's" in refused(tmp_path / "src", dst, "none").what


@pytest.mark.parametrize("kind", ["index", "single", "noindex", "ranks", "link"])
def test_what_copying_leaves_is_nobodys_weights(kind, made, dst, tmp_path):
    a = None
    if kind in ("ranks", "link"):
        a = reference.write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0], 0, 0)}])
    report, found = convert(made("litter") / kind, dst, a)
    if a is None:
        assert all((one == np.arange(4)).all() for one in found.values())
    else:
        parts = [load_file(made("litter") / kind / f"rank_{r}" / "net-1_5.safetensors")["w"]
                 for r in (0, 1)]  # fmt: skip
        np.testing.assert_array_equal(found["w"], np.concatenate(parts))
    assert not report.warnings


def test_a_link_to_another_ranks_file_is_a_replica(tmp_path, dst):
    (tmp_path / "src").mkdir()
    save_file({"w": np.arange(4, dtype="f4")}, tmp_path / "src" / "shard.0.safetensors")
    (tmp_path / "src" / "shard.1.safetensors").symlink_to("shard.0.safetensors")
    a = reference.write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [-1], 0, 0)}])
    report, found = convert(tmp_path / "src", dst, a, src_pattern="shard.{rank}.safetensors")
    assert report.src_ranks == 2 and found["w"].tolist() == [0, 1, 2, 3]


# -- headers, indexes, and what lies there instead --------------------------------------------------


@pytest.mark.parametrize("spelling", ["./{}", "sub/{}", "{}"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_spellings_of_an_index(spelling, mark, tmp_path, dst):
    src = tmp_path / "src"
    (src / "sub").mkdir(parents=True)
    names = {f"w{i}": spelling.format(f"model-0000{i}-of-00002.safetensors") for i in (1, 2)}
    for name, file in names.items():
        save_file({name: np.ones((2, 2), "f4")}, src / file)
    text = json.dumps({"metadata": {"total_size": 32}, "weight_map": names}).encode()
    (src / "model.safetensors.index.json").write_bytes(mark + text)
    assert {*convert(src, dst)[1]} == {*names}


@pytest.mark.filterwarnings("ignore:1 of 4 matrices looked at are zero")  # as they are made
def test_an_index_of_an_earlier_split(made, dst):
    src = made("stale_index")
    parts = refused(src, dst)
    assert "model-00001-of-00002.safetensors" in parts.details and "is missing" in parts.what
    program, *words = parts.tries[0].split()
    subprocess.run([program, *words], check=True)
    assert len(convert(src, dst)[1]) == 4


THERE_INSTEAD = {
    "not_weights/lfs": "git-lfs", "not_weights/lfsindex": "git-lfs", "not_weights/html": "HTML",
    "not_weights/empty": "0 bytes", "not_weights/lfsnoindex": "git-lfs",
    "other_formats/bin": "as torch.save leaves it", "other_formats/verl": "no end of a ZIP, as torch.save", "other_formats/gguf": "GGUF",
    "other_formats/orbax": "Orbax", "other_formats/legacy": "no end of a ZIP", "other_formats/zarr": "zarr",
    "other_formats/universal": "DeepSpeed", "other_formats/paddle": "Paddle",
    "other_formats/npz": "NumPy", "other_formats/meta": "no end of a ZIP",
}  # fmt: skip


@pytest.mark.parametrize("kind", THERE_INSTEAD)
def test_what_lies_there_is_named(kind, made, dst):
    name, _, inside = kind.partition("/")
    parts = refused(made(name) / inside, dst)
    assert THERE_INSTEAD[kind] in parts.what and parts.tries


def test_a_byte_order_mark(made, dst):
    assert convert(made("not_weights") / "bom", dst)[1]


@pytest.mark.parametrize(
    ("case", "first"),
    [("zero3_empty", "checkpoint-10"), ("variants/sub", "vae"), ("hf_cache", "snapshots/")],
)
def test_a_folder_above_checkpoints_lists_them(case, first, made, dst):
    name, _, inside = case.partition("/")
    folder = made(name) / inside
    parts = refused(folder, dst)
    assert parts.tries[0].startswith("name ") and first in parts.tries[0]
    assert Path(parts.tries[0].split()[1]).is_dir()


def test_the_newest_step_is_named_first(tmp_path, dst):
    for step in (9, 10, 100):
        folder = tmp_path / "src" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": np.ones(2, "f4")}, folder / "model.safetensors")
    tries = refused(tmp_path / "src", dst).tries
    assert [one.rpartition("-")[2] for one in tries] == ["100", "10", "9"]
    (tmp_path / "models--a--b" / "refs").mkdir(parents=True)
    for commit in ("aaa", "bbb"):
        shutil.copytree(
            tmp_path / "src/checkpoint-9", tmp_path / f"models--a--b/snapshots/{commit}"
        )
    (tmp_path / "models--a--b/refs/main").write_text("bbb")
    assert "snapshots/bbb" in refused(tmp_path / "models--a--b", dst).tries[0]


@pytest.mark.filterwarnings("ignore:1 of 4 matrices looked at are zero")  # as they are made
def test_files_that_an_index_does_not_name_are_ignored(made, dst):
    for kind, text in (("same", "have equal samples there"), ("other", "does not list it")):
        report, found = convert(made("stray_file") / kind, dst)
        assert len(found) == 4 and any(text in notice for notice in report.notices)
    with pytest.warns(rankxform.RankxformWarning, match="4 tensors .* are passed over, and differ"):
        assert len(convert(made("stray_file") / "quantized", dst)[1]) == 4


def test_an_export_over_an_earlier_one(made, dst, capfd):
    src = made("stale_output")
    convert(src / "src", dst, max_shard=100)
    options = ["--dst-form", "huggingface", "--overwrite", "--no-fsync"]
    assert main(["transform", str(src / "src2"), str(dst), *options]) == 0
    assert [path.name for path in dst.glob("*.safetensors*")] == ["model.safetensors"]
    same(tensors(dst), tensors(src / "src2"))


# -- arrangements, and quantized folders ------------------------------------------------------------


def test_megatrons_fused_matrices(made, dst):
    folder = made("mcore_to_hf")
    expected = load_file(folder / "expect.safetensors")
    options = {"map": "qwen3", "config": str(folder / "config.json")}
    parts = refused(folder / "mcore", dst, **options)
    assert parts.tries[0] == "--vocab 40"
    same(convert(folder / "mcore", dst, vocab=40, vocab_cut=True, **options)[1], expected)


def test_fused_matrices_of_no_known_framework(made, dst):
    folder = made("mcore_to_hf")
    plain = dst.parent / "plain"
    convert(folder / "mcore", plain)  # a folder with Megatron's names
    options = {"map": "qwen3", "config": str(folder / "config.json"), "vocab": 40}
    parts = refused(plain, dst, vocab_cut=True, **options)
    assert "does not say how" in parts.what and "--gate-up contiguous" in parts.tries[1]
    found = convert(
        plain, dst, vocab_cut=True, qkv="grouped", gate_up="contiguous", **options
    )[1]  # fmt: skip
    same(found, load_file(folder / "expect.safetensors"))


@pytest.mark.parametrize("kind", ["base-w8a8", "base-gptq", "base-bnb"])
def test_a_quantized_folder_is_copied_or_refused(kind, made, dst):
    src = made("quantized_base") / kind
    same(convert(src, dst)[1], tensors(src))
    scheme = json.loads((src / "config.json").read_text())["quantization_config"]["quant_method"]
    parts = refused(src, dst / "none", dtype="bf16")
    assert scheme in parts.what and parts.tries == ("leave out --dtype; a copy is exact",)
    parts = refused(src, dst / "none", lora=str(made("quantized_base") / "lora"))
    assert scheme in parts.what


def test_a_vocabulary_that_no_tensor_parallel_size_divides(made, dst, tmp_path):
    folder = made("odd_vocab") / "untied"
    shapes = {n: one.shape for n, one in tensors(folder).items()}
    rows = {n: ([4], [0] + [-1] * (len(s) - 1), 0, 0) for n, s in shapes.items() if "norm" not in n}
    whole = {n: ([4], [-1] * len(s), 0, 0) for n, s in shapes.items() if n not in rows}
    b = reference.write_strategy(tmp_path / "b.ckpt", [{**rows, **whole}])
    options = {"dst_form": "ranks", "format": "safetensors"}
    parts = refused(folder, dst, None, b, **options)
    assert parts.tries[0] == "--vocab 40"
    convert(folder, dst, None, b, vocab=40, **options)
    found = convert(dst, tmp_path / "back", vocab=37, vocab_cut=True)[1]
    same(found, tensors(folder))


# -- steps, adapters, joined files ------------------------------------------------------------------


def test_steps_that_differ_between_parameters(tmp_path, dst):
    """A parameter that was unfrozen later: each keeps its step where the destination has it."""
    (tmp_path / "plain").mkdir()
    arrays = {f"model.{n}": np.full((2, 2), k, "f4") for k, n in enumerate("ab")}
    arrays |= {f"optimizer.state.{n}.exp_avg": np.ones((2, 2), "f4") for n in "ab"}
    arrays |= {f"optimizer.state.{n}.step": np.array(k + 5, "f4") for k, n in enumerate("ab")}
    save_file(arrays, tmp_path / "plain" / "model.safetensors")
    src = tmp_path / "src"
    convert(tmp_path / "plain", src, dst_form="dcp")
    for names in ("as-stored", "torch"):
        convert(src, dst, dst_form="dcp", names=names)
        same(convert(dst, tmp_path / "back")[1], arrays)
    parts = refused(src, tmp_path / "none", names="mindspore")
    assert parts.tries[0].startswith("--accept step ")
    with_step = convert(src, dst, names="mindspore", accept=("step",))[1]
    assert {*with_step} == {"a", "b", "adam_m.a", "adam_m.b", "global_step"}
    assert with_step["global_step"] == 5
    assert "global_step" not in convert(src, dst, names="mindspore", exclude=("^global_step$",))[1]


def test_two_files_that_were_joined_are_refused(tmp_path, dst):
    one = reference.write_checkpoint(
        tmp_path / "src", None, {"a": ((2,), "Float32"), "b": ((2,), "Float32")}
    )
    (path,) = Path(one).rglob("*.ckpt")
    path.write_bytes(path.read_bytes() * 2)
    assert "'a' twice" in refused(path, dst, dst_form="ranks").what


MERGED = ("default", "gaussian", "eva", "rslora", "dropout", "patterns", "caret", "layers")
NOT_MERGED = {
    "pissa": "init_lora_weights", "pissa16": "init_lora_weights", "olora": "init_lora_weights",
    "corda": "init_lora_weights", "loftq": "loftq_config", "dora": "use_dora", "other": "LOHA",
    "lora_bias": "lora_bias", "target_parameters": "target_parameters", "named": "lora_A.other",
    "token_indices": "trainable_token_indices", "replication": "layer_replication",
    "alora": "alora_invocation_tokens", "qalora": "use_qalora",
}  # fmt: skip


@pytest.mark.parametrize("kind", MERGED)
def test_adapters_of_peft(kind, made, dst):
    folder = made("peft_configs")
    found = convert(folder / "base", dst, lora=str(folder / kind))[1]
    for name, array in load_file(folder / f"expect-{kind}.safetensors").items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", NOT_MERGED)
def test_adapters_that_are_more_than_a_product(kind, made, dst):
    folder = made("peft_configs")
    assert NOT_MERGED[kind] in refused(folder / "base", dst, lora=str(folder / kind)).what


def test_an_adapter_into_tensor_parallel_ranks(made, dst, tmp_path):
    folder = made("lora_into_ranks")
    wanted = [load_file(folder / f"expect/rank_{rank}.safetensors") for rank in (0, 1)]
    columns = ("linear_proj.weight", "linear_fc2.weight")
    rows = {
        name: ([2], [-1] if one.ndim == 1 else [-1, 0] if name.endswith(columns) else [0, -1], 0, 0)
        for name, one in wanted[0].items()
    }
    b = reference.write_strategy(tmp_path / "b.ckpt", [rows])
    options = {"map": "qwen3", "vocab": 40, "dtype": "bf16", "format": "safetensors"}
    lora = str(folder / "lora")
    rankxform.transform(folder / "hf", dst, None, b, lora=lora, fsync=False, **options)
    for rank, expected in enumerate(wanted):
        (path,) = (dst / f"rank_{rank}").iterdir()
        found = reference.read_safetensors(path)
        assert {*found} == {*expected}
        for name, array in expected.items():
            np.testing.assert_array_equal(np.frombuffer(found[name][2], "u2"), array.ravel(), name)


def test_many_small_tensors_there_and_back(made, dst, tmp_path, monkeypatch):
    folder = made("many_tensors")
    options = {"map": "qwen3_moe", "config": str(folder / "hf/config.json")}
    stacked = convert(folder / "hf", dst, dst_form="unified", **options)[1]
    assert len(stacked) == 30  # of 66: experts of a layer are in two
    schedules = []

    class Counted(piece_schedule.PieceSchedule):
        def __init__(self, *given, **options):
            schedules.append(self)
            super().__init__(*given, **options)

    monkeypatch.setattr(piece_schedule, "PieceSchedule", Counted)
    same(convert(dst, tmp_path / "back", **options)[1], tensors(folder / "hf"))
    assert 3 <= len(schedules) <= 8  # each kind of slice has one, and not each of 66 tensors


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(made, dst):
    for kind in ("unreadable", "closed"):
        assert kind in refused(made("modes") / kind, dst).where


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_what_is_written_obeys_the_umask(mask, mode, made, dst):
    before = os.umask(mask)
    try:
        convert(made("modes") / "private", dst)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in dst.glob("*.*")} == {mode}


def test_an_adapter_as_the_source_is_told(made, dst):
    with pytest.warns(rankxform.RankxformWarning, match="--lora merges it") as told:
        convert(made("quantized_base") / "lora", dst)
    assert len(told) == 1


def test_an_option_that_names_what_is_read_is_given_once(capfd):
    for flag in ("--step", "--map", "--src-strategy", "--like"):
        assert main(["transform", "a", "b", flag, "x", flag, "y", "--json"]) == 2
        assert json.loads(capfd.readouterr().out)["what"].startswith(f"{flag} is given twice")
    assert main(["transform", "a", "b", "--step", "x", "--step", "x", "--json"]) == 2
    assert "twice" not in json.loads(capfd.readouterr().out)["what"]


@pytest.mark.parametrize("kind", ["its weight", "other layers", "whole", "values"])
def test_a_bias_of_zeros_that_no_strategy_lists(kind, tmp_path, dst):
    """It is the same on all ranks, whole or sharded: its own weight may tell; other layers do not."""
    params = {"l.0.weight": ((8, 4), "Float32"), "l.0.bias": ((8,), "Float32")}
    params |= {"l.1.weight": ((8, 4), "Float32"), "l.1.bias": ((8,), "Float32")}
    rows = {n: ([2], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in params.items()}
    if kind == "whole":
        rows["l.1.bias"] = [2], [-1], 0, 0
    if kind == "other layers":
        rows["l.1.weight"] = [2], [-1, -1], 0, 0

    def make(name, shape, dtype):
        if name == "l.1.bias":
            return np.tile(np.arange(4, dtype="<f4"), 2).view("<u4") * (kind == "values")
        return np.random.default_rng(len(name)).uniform(1, 2, shape).astype("<f4").view("<u4")

    reference.write_checkpoint(tmp_path / "src", [rows], params, make=make)
    listed = {n: one for n, one in rows.items() if n != "l.1.bias"}
    a = reference.write_strategy(tmp_path / "a.ckpt", [listed])
    if kind == "its weight":
        with pytest.warns(rankxform.RankxformWarning, match="4 of 8 rows; is it one rank's slice"):
            rankxform.transform(tmp_path / "src", dst, a, fsync=False)
        assert "l.1.bias" not in convert(tmp_path / "src", dst, a, exclude=(r"^l\.1\.bias$",))[1]
        assert convert(tmp_path / "src", dst, a, unlisted="take-one")[1]["l.1.bias"].shape == (4,)
        return
    report, _ = convert(tmp_path / "src", dst, a)
    said = [notice for notice in report.notices if "1 unlisted tensor of equal elements" in notice]
    assert len(said) == (kind != "values")


# -- found by trying to break it --------------------------------------------------------------------


def test_integers_that_are_no_matrices_are_cast_around(tmp_path, dst):
    index = np.zeros((4, 4), np.int64)
    src = put(tmp_path / "src", {"attn.scale": (4,), "w": (8, 8)}, **{"attn.relative_index": index})
    found = convert(src, dst, dtype="fp16")[1]
    assert found["attn.relative_index"].dtype == np.int64 and found["w"].dtype == np.float16


def test_a_link_that_an_index_names_is_a_file(tmp_path, dst):
    src = put(tmp_path / "src", {"w": (8, 4)})
    (src / "model.safetensors").rename(src / "weights.safetensors")
    (src / "model-00001-of-00001.safetensors").symlink_to("weights.safetensors")
    (src / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}})
    )
    assert {*convert(src, dst)[1]} == {"w"}
    (src / ".blob").write_bytes((src / "weights.safetensors").read_bytes())
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (src / ".blob").rename(hidden / ".blob")
    (hidden / "model.safetensors").symlink_to(".blob")
    assert {*convert(hidden, dst)[1]} == {"w"}


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_of_another_type_is_told(number, tmp_path, dst):
    (tmp_path / "src").mkdir()
    for i in (1, 2):
        kind = "f2" if i == 1 + number else "f4"
        arrays = {f"h.{i}.w": np.ones((2, 2), kind), f"h.{i}.norm": np.ones(2, "f4")}
        save_file(arrays, tmp_path / "src" / f"model-0000{i}-of-00002.safetensors")
    with pytest.warns(rankxform.RankxformWarning, match=r"^h\.\*\.w is Float.*, and Float"):
        convert(tmp_path / "src", dst)


# -- what was left of the first round ----------------------------------------------------------------


def numbers(words):
    return "Float32", (np.asarray(words) & 0x7F | 0x3F80).astype("<u4") << 16


def qwen(folder, change=lambda name: name, **config):
    """Write a model under other names; return its whole tensors as a map makes them.

    Of one whose head is the embedding, a copy of it is stored as well.
    """
    model = Model("qwen3", 1)
    tensors = {n: numbers(w) for n, w in model.hf.items()}
    if config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    reference_forms.write_huggingface(folder, {change(n): entry for n, entry in tensors.items()})
    (folder / "config.json").write_text(json.dumps({**model.config, **config}))
    return model


MAPPED = {"dst_form": "unified", "map": "qwen3", "qkv": "grouped", "gate_up": "interleaved"}


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}])
def test_names_without_what_a_model_begins_with(config, tmp_path, dst):
    qwen(tmp_path / "plain", **config)
    qwen(tmp_path / "src", lambda name: name.removeprefix("model."), **config)
    parts = refused(tmp_path / "src", dst, **MAPPED)
    (option,) = [text for text in parts.tries if text.startswith("--rename")]
    rename = (shlex.split(option)[1],)
    made = convert(tmp_path / "src", dst, **MAPPED, rename=rename)[1]
    same(made, convert(tmp_path / "plain", tmp_path / "whole", **MAPPED)[1])


def test_the_text_of_a_vision_language_model(tmp_path, dst):
    model = qwen(tmp_path / "plain")
    src, text = tmp_path / "src", tmp_path / "text.json"
    text.write_text(json.dumps(model.config))
    change = {"architectures": ["InternVLForConditionalGeneration"], "text_config": model.config}
    for key in model.config:
        change[key] = None
    tensors = {
        n.replace("model.", "model.language_model.", 1): numbers(w) for n, w in model.hf.items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = "Float32", np.full((4, 4), 0x3F800000, "<u4")
    reference_forms.write_huggingface(src, tensors)
    (src / "config.json").write_text(json.dumps(change))
    first, second = refused(src, dst, **MAPPED).tries
    words = shlex.split(first.replace("and ", ""))
    assert "leave out --map" in second and words[0] == "--config"
    options = {
        w.lstrip("-"): words[i + 1] for i, w in enumerate(words) if w in ("--exclude", "--rename")
    }
    options = {name: (value,) for name, value in options.items()}
    made = convert(src, dst, **MAPPED, config=str(text), **options)[1]
    same(made, convert(tmp_path / "plain", tmp_path / "whole", **MAPPED)[1])


@pytest.mark.parametrize("is_relative", [False, True])
def test_rank_folders_from_another_number_on(is_relative, tmp_path, dst, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params, stages = {"w": ((16, 8), "Float32")}, [{"w": ([4], [0, -1], 0, 0)}]
    plain = reference.write_checkpoint(tmp_path / "plain", stages, params)
    for rank in range(4):
        folder = tmp_path / "my src" / f"rank_{rank + 8}"
        folder.mkdir(parents=True)
        shutil.copy(
            f"{plain}/rank_{rank}/checkpoint_{rank}.ckpt", folder / f"checkpoint_{rank + 8}.ckpt"
        )
    a = reference.write_strategy(tmp_path / "a.ckpt", stages)
    parts = refused("my src" if is_relative else tmp_path / "my src", dst, a)
    assert "has 4 ranks, 8-11" in parts.what
    line, _, named = parts.tries[0].partition(" and name ")
    subprocess.run(["/bin/sh", "-c", line], check=True)
    made = convert(Path(shlex.split(named)[0]), dst, a)[1]
    same(made, convert(plain, tmp_path / "whole", a)[1])


@pytest.mark.parametrize(
    "name", ["rng_state", "rng_state.cpu", "np_rng_state", "rng.cuda", "rng_states.0"]
)
def test_states_of_generators_are_no_weights(name, tmp_path, dst):
    state = {name: np.arange(16, dtype="u1")}
    src = put(tmp_path / "src", {"w": (4, 4), "model.wrng.b": (6, 4)}, **state)
    assert {*convert(src, dst, weights_only=True)[1]} == {"w", "model.wrng.b"}


def test_a_folder_with_a_map_of_names_is_unified(tmp_path, dst):
    """Whatever its files are called, as Hugging Face's shards too."""
    tensors = {n: ("Float32", np.full((4, 4), 0x3F800000, "<u4")) for n in "ab"}
    src = tmp_path / "src"
    reference_forms.write_unified(src, tensors, {})
    path = src / "param_name_map.json"
    text = path.read_text()
    for number, file in enumerate(sorted(src.glob("*.safetensors")), 1):
        new = f"model-{number:05}-of-00002.safetensors"
        text = text.replace(file.name, new)
        file.rename(src / new)
    path.write_text(text)
    found = convert(src, dst)[1]
    assert {*found} == {"a", "b"} and rankxform.check(src).form == "unified"
