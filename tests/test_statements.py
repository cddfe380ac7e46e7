"""Statements of one fact, by whatever makes them, agree; or both are named."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.display.text import from_here, printable
from rankxform.statements import STATEMENT_KINDS, Statement, contradictions, join
from tests import reference, reference_forms
from tests.reference_maps import Model
from tests.reference_values import words

PACKAGE = Path(rankxform.__file__).parent
VALUES = {
    "iteration": (frozenset({1}), frozenset({2})),
    "named-step": ((2, 5), (1, 5)),
    "shape": ((4, 8), (8, 8)),
    "outputs": ((8,), (9,)),
}


@pytest.mark.parametrize("kind", STATEMENT_KINDS)
def test_two_statements_of_one_fact_are_compared(kind):
    one, other = VALUES.get(kind, (1, 2))
    first = Statement(kind, "x", one, "here")
    assert [*contradictions([first, Statement(kind, "x", one, "there")])] == []
    (found,) = contradictions([first, Statement(kind, "x", other, "there")])
    finding = found.finding
    assert finding.id == kind and finding.message.where == "here"
    assert "by there" in finding.text
    assert [*contradictions([first, Statement(kind, "y", other, "there")])] == []


READERS = {
    "checkpoints/checkpoint2.py": {"ITERATION"},
    "checkpoints/dcp.py": {"SHAPE", "TYPE"},
    "checkpoints/folders.py": {"STEP", "TOTAL_BYTES"},
    "checkpoints/huggingface.py": {"COMMIT"},
    "operations/map.py": {"MODEL_SIZE"},
    "planning/build_catalog.py": {"BIAS_LENGTH", "LAYER_SHAPE", "SHAPE", "TOTAL_BYTES", "TYPE"},
    "source/source.py": {"STEP", "TYPE"},
    "target/findings.py": {"SHAPE"},
    "target/training.py": {"ITERATION"},
    "verbs/evidence.py": {"NAMED_STEP", "STEP"},
}
"""Modules that read statements -> the kinds of which they make them."""


def test_each_reader_makes_its_statements():
    """A reader that goes silent takes a comparison with it, and nothing else would fail."""
    kinds_by_module = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Statement":
                module = str(path.relative_to(PACKAGE))
                kinds_by_module.setdefault(module, set()).add(ast.unparse(node.args[0]))
    assert kinds_by_module == READERS


TENSORS = {n: ("Float32", np.arange(6, dtype="<u4")) for n in "abcd"}


def converted(src, folder, **options):
    return rankxform.transform(src, folder / "dst", fsync=False, **options)


@pytest.mark.parametrize("form", ["huggingface", "unified"])
def test_the_bytes_that_an_index_states(tmp_path, form):
    src = tmp_path / "src"
    if form == "unified":
        reference_forms.write_unified(src, TENSORS, {})
    else:
        reference_forms.write_huggingface(src, TENSORS, files=2)
    (index,) = (p for p in src.glob("*.json") if "index" in p.name or "map" in p.name)
    assert converted(src, tmp_path).warnings == ()
    document = json.loads(index.read_text())
    document["metadata"] = {"total_size": 1000}
    index.write_text(json.dumps(document))
    with pytest.warns(rankxform.RankxformWarning, match="bytes of all tensors are 1,000, and 96"):
        rankxform.load(src)


def test_parts_without_their_map(tmp_path):
    reference_forms.write_unified(tmp_path / "src", TENSORS, {})
    (tmp_path / "src" / "param_name_map.json").unlink()
    with pytest.warns(rankxform.RankxformWarning, match="which is written last"):
        converted(tmp_path / "src", tmp_path)


def test_a_tracker_that_names_a_later_iteration(tmp_path):
    stages = [{n: ([2], [0, -1], 0, 0) for n in "ab"}]
    params = dict.fromkeys("ab", ((4, 4), "Float32"))
    for step in (30, 20):
        extras = {"global_step": ("Int32", np.array([step], "<i4"))}
        reference.write_checkpoint(tmp_path / str(step), stages, params, extras)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    options = {"dst_form": "checkpoint2"}
    rankxform.transform(tmp_path / "30", tmp_path / "root", strategy, strategy, **options)
    with pytest.warns(rankxform.RankxformWarning, match="says 30, and 20 was written"):
        rankxform.transform(tmp_path / "20", tmp_path / "root", strategy, strategy, **options)


@pytest.fixture
def model(tmp_path):
    made = Model("qwen3", 3, "BFloat16", "grouped", "interleaved")
    bits = np.random.default_rng(1)
    made.hf.update({n: words(bits.normal(0, 1, a.shape), "BFloat16") for n, a in made.hf.items()})
    tensors = {n: ("BFloat16", array) for n, array in made.hf.items()}
    reference_forms.write_huggingface(tmp_path / "hf", tensors)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(made.config))
    return made, tmp_path


def test_names_that_are_there_already(model):
    _, folder = model
    with pytest.raises(rankxform.UsageError, match="has Hugging Face's names already"):
        converted(folder / "hf", folder, map="qwen3", dst_form="huggingface")


def test_a_map_that_was_forgotten(model):
    made, folder = model
    layouts = [{name: ([2], [-1] * array.ndim, 0, 0) for name, array in made.mf.items()}]
    strategy = reference.write_strategy(folder / "s.ckpt", layouts)
    words = f"none of the {len(made.hf)} names of SRC is in .*; --map qwen3"
    with pytest.raises(rankxform.RankxformError, match=words):
        rankxform.transform(folder / "hf", folder / "dst", None, strategy)
    rankxform.transform(folder / "hf", folder / "dst", None, strategy, map="qwen3")


def test_a_map_of_names_that_are_changed_first(model):
    made, folder = model
    tensors = {f"base.{n}": ("BFloat16", array) for n, array in made.hf.items()}
    reference_forms.write_huggingface(folder / "based", tensors)
    (folder / "based" / "config.json").write_text(json.dumps(made.config))
    options = {"map": "qwen3", "rename": ("^base\\.=",)}
    rankxform.transform(folder / "based", folder / "dst", fsync=False, **options)


def test_two_configurations(model):
    made, folder = model
    other = made.config | {"num_attention_heads": 2 * made.config["num_attention_heads"]}
    (folder / "c.json").write_text(json.dumps(other))
    with pytest.raises(rankxform.UsageError, match="num_attention_heads is"):
        converted(folder / "hf", folder, map="qwen3", config=str(folder / "c.json"))
    (folder / "c.json").write_text(json.dumps(made.config | {"rope_theta": 7, "eos_token_id": 1}))
    converted(folder / "hf", folder, map="qwen3", config=str(folder / "c.json"))


def test_small_files_of_a_model_that_were_changed(model):
    _, folder = model
    shutil.copytree(folder / "hf", folder / "like")
    converted(folder / "hf", folder, map="qwen3")
    made_of = folder / "back"
    rankxform.transform(folder / "dst", made_of, map="qwen3", like=str(folder / "like"),
                        dst_form="huggingface", verify=True)  # fmt: skip
    assert rankxform.verify(made_of).warnings == ()
    (made_of / "config.json").write_text("{}")
    with pytest.warns(rankxform.RankxformWarning, match="config.json: was changed since"):
        assert rankxform.verify(made_of).same
    (made_of / "config.json").unlink()
    with pytest.warns(rankxform.RankxformWarning, match="config.json: is gone"):
        rankxform.verify(made_of)


def adapter(folder, modules, config):
    """Write a PEFT adapter for modules of (8, 8) matrices."""
    tensors = {}
    for module in modules:
        for part, shape in (("lora_A", (2, 8)), ("lora_B", (8, 2))):
            name = f"base_model.model.{module}.{part}.weight"
            tensors[name] = ("Float32", reference.full_tensor(name, shape, "Float32"))
    reference_forms.write_huggingface(folder, tensors)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return str(folder)


@pytest.mark.parametrize(
    ("modules", "config", "text"),
    [
        ([0, 1], {"target_modules": ["q"]}, None),
        ([1], {"target_modules": ["q"]}, r"has pairs for 1 of 2 layers\.\*\.q\.weight"),
        ([1], {"target_modules": ["q"], "layers_to_transform": [1]}, None),
        ([0, 1], {"target_modules": ["q", "v"]}, "target_modules has 'v'"),
        ([0, 1], {"alpha_pattern": {"x": 8}}, "alpha_pattern has 'x'"),
    ],
)
def test_an_adapter_and_what_its_configuration_states(tmp_path, modules, config, text):
    tensors = {
        f"layers.{n}.{x}.weight": (
            "Float32", reference.full_tensor(f"{n}{x}", (8, 8), "Float32")
        )
        for n in range(2)
        for x in "qv"
    }  # fmt: skip
    reference_forms.write_huggingface(tmp_path / "src", tensors)
    lora = adapter(tmp_path / "lora", [f"layers.{n}.q" for n in modules], config)
    options = {"lora": lora, "dst_form": "huggingface"}
    if text is None:
        report = converted(tmp_path / "src", tmp_path, **options)
        assert report.warnings == ()
        assert f"is added to {len(modules)} matrices" in " ".join(report.notices)
        return
    with pytest.warns(rankxform.RankxformWarning, match=text):
        converted(tmp_path / "src", tmp_path, **options)


@pytest.mark.parametrize("value", ["x" * 5000, [*range(3000)], {"y" * 5000: 1}, [["z"] * 900] * 9])
def test_no_message_quotes_a_document_at_length(tmp_path, value):
    src = tmp_path / "src"
    reference_forms.write_huggingface(src, TENSORS, files=2)
    (index,) = src.glob("*.index.json")
    document = json.loads(index.read_text())
    for wrong in (
        {**document, "weight_map": value},
        {**document, "weight_map": {"a": value}},
        value,
    ):
        index.write_text(json.dumps(wrong))
        with pytest.raises(rankxform.RankxformError) as caught:
            rankxform.load(src)
        assert len(str(caught.value)) < len(str(index)) + 500, str(caught.value)


def test_an_adapter_is_added_once(tmp_path):
    tensors = {"q.weight": ("Float32", reference.full_tensor("q", (8, 8), "Float32"))}
    reference_forms.write_huggingface(tmp_path / "src", tensors)
    lora = adapter(tmp_path / "lora", ["q"], {})
    shutil.copytree(lora, tmp_path / "copy")
    other = adapter(tmp_path / "other", ["q"], {"lora_alpha": 8})
    (tmp_path / "other" / "adapter_model.safetensors").unlink()
    rankxform.transform(tmp_path / "src", tmp_path / "once", lora=lora, dst_form="huggingface")
    rankxform.transform(tmp_path / "once", tmp_path / "moved", dst_form="huggingface")
    for made in ("once", "moved"):
        for again in (lora, str(tmp_path / "copy")):
            with pytest.raises(rankxform.CheckpointError, match="was added to these tensors alre"):
                rankxform.transform(tmp_path / made, tmp_path / "twice", lora=again)
            assert not (tmp_path / "twice").exists()
    tensors = {f"base_model.model.q.lora_{x}.weight": ("Float32", reference.full_tensor(x, s, "Float32"))
               for x, s in (("A", (2, 8)), ("B", (8, 2)))}  # fmt: skip
    reference_forms.write_huggingface(tmp_path / "other", tensors)
    (tmp_path / "other" / "model.safetensors").rename(
        tmp_path / "other" / "adapter_model.safetensors"
    )
    rankxform.transform(tmp_path / "once", tmp_path / "two", lora=other)
    rankxform.transform(
        tmp_path / "once", tmp_path / "meant", lora=lora, accept=("contradictions",)
    )


def test_an_adapter_that_was_never_trained(tmp_path):
    tensors = {"q.weight": ("Float32", reference.full_tensor("q", (8, 8), "Float32"))}
    reference_forms.write_huggingface(tmp_path / "src", tensors)
    lora = adapter(tmp_path / "lora", ["q"], {})
    path = tmp_path / "lora" / "adapter_model.safetensors"
    data = path.read_bytes()
    b = reference.full_tensor("base_model.model.q.lora_B.weight", (8, 2), "Float32").tobytes()
    assert data.count(b) == 1
    path.write_bytes(data.replace(b, bytes(len(b))))
    with pytest.warns(rankxform.RankxformWarning, match="1 B matrices looked at is constant, as b"):
        converted(tmp_path / "src", tmp_path, lora=lora)


def test_the_strategy_that_mindformers_left_with_the_checkpoint(tmp_path):
    """`output/strategy` beside `output/checkpoint` is compared with what is given."""
    params = {"w": ((8, 8), "Float32"), "v": ((8, 8), "Float32")}
    rows = [dict.fromkeys(params, ([4], [0, -1], 0, 0))]
    columns = [dict.fromkeys(params, ([4], [-1, 0], 0, 0))]
    src = tmp_path / "output" / "checkpoint"
    src.parent.mkdir()
    reference.write_checkpoint(src, rows, params)
    (tmp_path / "output" / "strategy").mkdir()
    own = tmp_path / "output" / "strategy" / "s_rank_0.ckpt"
    reference.write_strategy(own, rows)
    same = reference.write_strategy(tmp_path / "same.ckpt", rows)
    for given in (own, own.parent, same):
        rankxform.transform(src, tmp_path / "dst", given, None, overwrite=True)
    own.unlink()
    reference.write_strategy(own, columns)
    with pytest.raises(
        rankxform.StrategyError, match="shard '.' in two(?s:.*)left .* with .*/checkpoint"
    ):
        rankxform.transform(src, tmp_path / "other", same, None)
    assert not (tmp_path / "other").exists()
    rankxform.transform(src, tmp_path / "other", same, None, accept=("contradictions",))


def test_uneven_rows_beside_the_checkpoint(tmp_path):
    """The compiler states them of an embedding, and not of its moments: the same file, twice."""
    params = dict.fromkeys(("emb", "adam_m.emb"), ((10, 4), "Float32"))
    stages = [{"emb": ([2], [0, -1], 0, 0, [4, 6]), "adam_m.emb": ([2], [0, -1], 0, 0)}]
    whole = {n: ("Float32", reference.full_tensor(n, (10, 4), "Float32")) for n in params}
    reference.write_ckpt(tmp_path / "a.ckpt", whole)
    (tmp_path / "output" / "strategy").mkdir(parents=True)
    same = reference.write_strategy(tmp_path / "same.ckpt", stages)
    reference.write_strategy(tmp_path / "output" / "strategy" / "s.ckpt", stages)
    made = tmp_path / "output" / "checkpoint"
    rankxform.transform(tmp_path / "a.ckpt", made, None, same)
    (made / "rankxform.json").unlink()
    rankxform.transform(made, tmp_path / "dst", same, None)


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ("layers.1.weight", r"shape of layers.\*.weight is \[16, 16\], and \[8, 32\]"),
        ("head.weight", r"shape of 'head.weight' is \[8, 32\], and \[16\] by its bias"),
        (None, None),
    ],
)
def test_slices_that_agree_with_no_neighbour(tmp_path, lie, text):
    shapes = {f"layers.{n}.weight": (16, 16) for n in range(4)}
    shapes |= {
        "layers.4.weight": (16, 8),
        "0.w": (16, 16),
        "1.w": (4, 16),
        "head.weight": (16, 16),
        "head.bias": (16,),
    }
    rows = {name: ([4], [0, *[-1] * (len(shape) - 1)], 0, 0) for name, shape in shapes.items()}
    rows["1.w"] = ([4], [-1, -1], 0, 0)  # as slices of "0.w", by design
    params = {name: (shape, "Float32") for name, shape in shapes.items()}
    src = reference.write_checkpoint(tmp_path / "src", [rows], params)
    given = {**rows, **({lie: ([2, 2], [1, 0], 0, 0)} if lie else {})}
    strategy = reference.write_strategy(tmp_path / "a.ckpt", [given])
    if lie is None:
        assert converted(src, tmp_path, src_strategy=strategy).warnings == ()
        return
    with pytest.warns(rankxform.RankxformWarning, match=text):
        converted(src, tmp_path, src_strategy=strategy)


def test_a_state_of_another_shape_than_its_parameter(tmp_path):
    """Headers agree with both layouts; the full shapes do not."""
    params = {"w": ((8, 8), "Float32"), "adam_m.w": ((4, 16), "Float32")}
    src = [{"w": ([2], [0, -1], 0, 0), "adam_m.w": ([2], [-1, 0], 0, 0)}]
    reference.write_checkpoint(tmp_path / "src", src, params)
    strategy = reference.write_strategy(tmp_path / "s.ckpt", src)
    with pytest.raises(rankxform.CheckpointError, match=r"'w' is \[8, 8\], and \[4, 16\] by those"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", strategy, None)


def test_a_stage_of_a_pipeline_alone(tmp_path):
    stages = [{"a": ([2], [0, -1], 0, 0)}, {"b": ([2], [0, -1], 0, 0)}]
    params = dict.fromkeys("ab", ((4, 4), "Float32"))
    folder = reference.write_stage_files(tmp_path / "strategy", stages)
    reference.write_checkpoint(tmp_path / "src", stages[:1], params)
    first = sorted((tmp_path / "strategy").iterdir())[0]
    with pytest.warns(rankxform.RankxformWarning, match="is pipeline stage 0's alone"):
        converted(tmp_path / "src", tmp_path, src_strategy=str(first))
    assert folder


# -- every rule speaks ------------------------------------------------------------------------------


WORDS = [
    "plain", "", "two words", "it's", 'say "x"', "$(touch pwned)", "`x`", "a\\nb", "line\nfeed", "\ttab",
    "\r", "\x1b[31m", "\u202egnp", "\udcff\udcfe", "*?[a]", "~", "!x", "-dash", "#", "{rank}", "%d", "ü\n1",
    "\udcff0", "'\n'",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_a_printed_command_is_what_a_shell_reads(word, tmp_path):
    """As it is printed: with nothing that a terminal hides, so that printing changes nothing."""
    text = join(["printf", "%s", word, word])
    assert printable(text) == text
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == os.fsencode(word) * 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["-n", "--report", "a b"])
def test_a_name_below_the_working_folder_is_never_like_an_option(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = from_here(str(tmp_path / name))
    assert not short.startswith("-") and Path(short).absolute() == tmp_path / name
