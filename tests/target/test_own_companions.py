"""A model's small files, from one Hugging Face folder into another."""

from __future__ import annotations

import json

import numpy as np
import pytest

import rankxform
from rankxform.errors import StorageError
from rankxform.publish.folder_records import FolderRecords
from tests import reference, reference_forms
from tests.reference_maps import Model

OTHERS = {"tokenizer.json": b"{}", "generation_config.json": b"[1]", "LICENSE": b"free"}


def write(
    src, change=lambda config, tensors: None, text=lambda config: json.dumps(config, indent=4)
):
    """Write a model with all its small files; return its configuration."""
    model = Model("qwen3", 1)
    tensors = {n: ("BFloat16", np.asarray(w) & 0x7F | 0x3F80) for n, w in model.hf.items()}
    config = {
        "zeta": [1, {"a": None}], **model.config, "torch_dtype": "bfloat16", "eps": 1e-06,
        "title": "\u00e4", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False,
    }  # fmt: skip
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    change(config, tensors)
    reference_forms.write_huggingface(src, tensors)
    (src / "config.json").write_text(text(config))
    for name, content in OTHERS.items():
        (src / name).write_bytes(content)
    return config


def converted(tmp_path, **options):
    rankxform.transform(
        tmp_path / "src", tmp_path / "dst", dst_form="huggingface", fsync=False, **options
    )
    return (tmp_path / "dst/config.json").read_bytes()


def test_all_go_along_unchanged(tmp_path):
    write(tmp_path / "src")
    assert converted(tmp_path) == (tmp_path / "src/config.json").read_bytes()
    assert all((tmp_path / "dst" / name).read_bytes() == data for name, data in OTHERS.items())
    assert rankxform.verify(tmp_path / "src", tmp_path / "dst").notices == ()
    assert rankxform.verify(tmp_path / "dst").notices == ()


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_the_type_is_the_tensors(key, indent, tmp_path):
    """Under the key that is there; other keys, their order and the indent stay."""

    def change(config, tensors):
        config[key] = config.pop("torch_dtype")

    def text(config):
        return json.dumps(config, indent=indent) + "\n"

    config = write(tmp_path / "src", change, text)
    made = converted(tmp_path, dtype="fp32")
    assert made.decode() == text({**config, key: "float32"})


def test_of_a_model_of_several_parts(tmp_path):
    """The text's own section states the same."""
    section = {"torch_dtype": "bfloat16", "vocab_size": 40}
    write(tmp_path / "src", lambda config, tensors: config.update(text_config=dict(section)))
    with pytest.warns(rankxform.RankxformWarning, match="--vocab 64"):
        config = json.loads(converted(tmp_path, dtype="fp16", vocab=64))
    assert config["text_config"] == {"torch_dtype": "float16", "vocab_size": 64}
    assert (config["torch_dtype"], config["vocab_size"]) == ("float16", 64)


@pytest.mark.parametrize("is_written_out", [True, False])
def test_a_quantization_goes_with_its_matrices(is_written_out, tmp_path):
    def change(config, tensors):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        for name in [n for n in tensors if "up_proj" in n]:
            words = tensors[name][1]
            tensors[name] = "F8_E4M3", np.full(words.shape, 0x38, "u1")
            tensors[f"{name}_scale_inv"] = "Float32", np.full((1, 1), 0x3F800000, "<u4")

    write(tmp_path / "src", change)
    config = json.loads(converted(tmp_path, **({"dtype": "bf16"} if is_written_out else {})))
    assert ("quantization_config" in config) is not is_written_out
    assert config["torch_dtype"] == "bfloat16"


def test_a_part_of_a_model(tmp_path):
    """Its configuration is the whole model's, unchanged; what it lacks is said."""
    write(tmp_path / "src")
    text = "goes along unchanged, but torch_dtype is bfloat16, and it is float32 here; tie_word"
    with pytest.warns(rankxform.RankxformWarning, match=text):
        made = converted(tmp_path, exclude=("^lm_head",), dtype="fp32")
    assert made == (tmp_path / "src/config.json").read_bytes()


def test_code_that_the_configuration_names(tmp_path):
    classes = {"AutoModel": "modeling_new.NewModel", "AutoConfig": "org/repo--configuration.C",
               "AutoTokenizer": ["tokenization_new.Slow", None], "X": "../outside.Y"}  # fmt: skip
    write(tmp_path / "src", lambda config, tensors: config.update(auto_map=classes))
    for name in ("modeling_new", "tokenization_new", "configuration", "unnamed"):
        (tmp_path / "src" / f"{name}.py").write_text(name)
    (tmp_path / "outside.py").write_text("outside")
    report = rankxform.transform(
        tmp_path / "src", tmp_path / "dst", dst_form="huggingface", fsync=False
    )
    copied = sorted(path.name for path in (tmp_path / "dst").glob("*.py"))
    assert copied == ["modeling_new.py", "tokenization_new.py"]
    assert any("modeling_new.py and tokenization_new.py" in n or "modeling_new.py, " in n
               for n in report.notices)  # fmt: skip


def test_a_configuration_that_is_named_wins(tmp_path):
    config = write(tmp_path / "src")
    (tmp_path / "mine.json").write_text(json.dumps({**config, "mine": 1}))
    assert json.loads(converted(tmp_path, config=tmp_path / "mine.json"))["mine"] == 1
    assert (tmp_path / "dst/tokenizer.json").is_file()


def test_a_reference_without_a_map(tmp_path):
    """Of tensors that have a published model's names already."""
    config = write(tmp_path / "like", lambda config, tensors: config.update(mine=2))
    write(tmp_path / "src")
    for name in ("config.json", *OTHERS):
        (tmp_path / "src" / name).unlink()
    report = rankxform.transform(
        tmp_path / "src", tmp_path / "dst", dst_form="huggingface", like=str(tmp_path / "like")
    )
    assert json.loads((tmp_path / "dst/config.json").read_text()) == config
    assert not any("no config.json" in notice for notice in report.notices)


def test_what_lies_there_stays(tmp_path):
    """Of the same model it is the user's own; of another it is refused; what was copied is replaced."""
    config = write(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/config.json").write_text(json.dumps({**config, "mine": 3}))
    assert json.loads(converted(tmp_path))["mine"] == 3
    (tmp_path / "dst/config.json").write_text(json.dumps({**config, "hidden_size": 999}))
    with pytest.raises(StorageError, match="of another model"):
        converted(tmp_path, overwrite=True, dtype="fp32")
    (tmp_path / "dst/config.json").unlink()
    assert json.loads(converted(tmp_path, overwrite=True, dtype="fp32"))["torch_dtype"] == "float32"
    assert json.loads(converted(tmp_path, overwrite=True, dtype="fp16"))["torch_dtype"] == "float16"


def test_files_of_ranks_get_none(tmp_path):
    write(tmp_path / "src")
    rankxform.transform(tmp_path / "src", tmp_path / "dst", fsync=False)
    assert not [*(tmp_path / "dst").rglob("*config*"), *(tmp_path / "dst").rglob("tokenizer*")]
    assert reference.read_safetensors(next((tmp_path / "dst").rglob("*.safetensors")))


def test_a_configuration_stays_the_runs_own(tmp_path):
    """A run that finds it as it would write it knows it again in the next."""
    write(tmp_path / "src")
    converted(tmp_path)
    for options in ({}, {}, {"dtype": "fp32"}, {"dtype": "fp32"}, {"dtype": "fp16"}):
        made = json.loads(converted(tmp_path, overwrite=True, **options))
        types = {"fp32": "float32", "fp16": "float16"}
        assert made["torch_dtype"] == types.get(options.get("dtype"), "bfloat16")
    assert (tmp_path / "dst/tokenizer.json").is_file()


def test_what_a_killed_run_wrote_is_known_again(tmp_path, monkeypatch):
    """It is killed between the small files and the manifest."""
    write(tmp_path / "src")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FolderRecords, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            converted(tmp_path, dtype="fp32")
    assert (tmp_path / "dst/config.json").is_file()
    converted(tmp_path, dtype="fp32")
    made = converted(tmp_path, dtype="fp16", overwrite=True)
    assert json.loads(made)["torch_dtype"] == "float16"


@pytest.mark.parametrize("name", ["exclude", "include"])
def test_what_is_not_so_of_a_part(name, tmp_path):
    def change(config, tensors):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        for weight in [n for n in tensors if "up_proj" in n]:
            words = tensors[weight][1]
            tensors[weight] = "F8_E4M3", np.full(words.shape, 0x38, "u1")
            tensors[f"{weight}_scale_inv"] = "Float32", np.full((1, 1), 0x3F800000, "<u4")

    write(tmp_path / "src", change)
    options = {"exclude": ("inv_freq|q_norm",)} if name == "exclude" else {"include": ("layers",)}
    with pytest.warns(rankxform.RankxformWarning, match="quantization_config is stated, and its"):
        converted(tmp_path, dtype="bf16", **options)


@pytest.mark.parametrize("section", ["vision_config", "llm_config"])
def test_sections_of_all_parts_state_the_type(section, tmp_path):
    """Where all tensors get one; a part that was of another type before stays so in a copy."""

    def change(config, tensors):
        config[section] = {"dtype": "torch.bfloat16", "deep": {"quantization_config": None}}

    config = write(tmp_path / "src", change)
    assert json.loads(converted(tmp_path))[section] == config[section]
    made = json.loads(converted(tmp_path, dtype="fp32", overwrite=True))
    assert made[section] == {"dtype": "torch.float32", "deep": {"quantization_config": None}}


def test_what_lies_there_is_compared(tmp_path):
    """It stays, with a warning; and no note says that there is none."""
    config = write(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/config.json").write_text(json.dumps({**config, "mine": 3}))
    report = rankxform.transform(
        tmp_path / "src", tmp_path / "dst", dst_form="huggingface", fsync=False, dtype="fp32"
    )
    text = "dst/config.json: lies there and stays, but torch_dtype is bfloat16, and it is float32"
    assert any(text in notice for notice in report.notices)
    assert not any("gets no config.json" in notice for notice in report.notices)


@pytest.mark.parametrize("name", ["like", "config"])
def test_a_configuration_that_is_given_is_compared(name, tmp_path):
    config = write(tmp_path / "like", lambda config, tensors: config.update(vocab_size=99))
    write(tmp_path / "src")
    given = tmp_path / "like" / ("config.json" if name == "config" else "")
    with pytest.warns(rankxform.RankxformWarning, match="goes along, but vocab_size is 99, and"):
        converted(tmp_path, **{name: str(given)})
    (tmp_path / "like/config.json").write_text(json.dumps({**config, "vocab_size": 48}))
    report = rankxform.transform(
        tmp_path / "src", tmp_path / "dst", dst_form="huggingface", fsync=False, overwrite=True,
        dtype="fp16", **{name: str(given)},
    )  # fmt: skip
    text = "goes along, but torch_dtype is bfloat16, and it is float16 here"
    assert any(text in notice for notice in report.notices)


@pytest.mark.parametrize(
    "change",
    [
        {"torch_dtype": ["bfloat16"]}, {"dtype": {"a": 1}}, {"text_config": {"dtype": [1]}},
        {"title": "\ud800 and \u00e4"}, {"num_hidden_layers": True}, {"auto_map": [1]},
    ],
)  # fmt: skip
def test_odd_values_stay_as_they_are(change, tmp_path):
    def text(config):
        return json.dumps(config, ensure_ascii="title" not in change).replace("\ud800", "\\ud800")

    config = write(tmp_path / "src", lambda config, tensors: config.update(change), text)
    made = json.loads(converted(tmp_path, dtype="fp32"))
    is_stated = config["torch_dtype"] == "bfloat16"
    assert made == {**config, **({"torch_dtype": "float32"} if is_stated else {})}


@pytest.mark.parametrize("content", ["{", "[1]", "null"])
def test_a_configuration_that_cannot_be_read_goes_along(content, tmp_path):
    write(tmp_path / "src", text=lambda config: content)
    with pytest.warns(rankxform.RankxformWarning, match="goes along unchanged, but"):
        assert converted(tmp_path).decode() == content


def test_code_that_other_code_imports(tmp_path):
    classes = {"AutoModel": "modeling_new.NewModel"}
    write(tmp_path / "src", lambda config, tensors: config.update(auto_map=classes))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_new.Slow", None]}}
    (tmp_path / "src/tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name, line in (
        ("modeling_new", "from .helper_ops import x\nfrom .package import y\nimport torch\n"),
        ("helper_ops", "    from .modeling_new import z\nfrom .deeper.part import w\n"),
        ("deeper", ""), ("tokenization_new", ""), ("unnamed", ""),
    ):  # fmt: skip
        (tmp_path / "src" / f"{name}.py").write_text(line)
    converted(tmp_path)
    copied = sorted(path.stem for path in (tmp_path / "dst").glob("*.py"))
    assert copied == ["deeper", "helper_ops", "modeling_new", "tokenization_new"]
