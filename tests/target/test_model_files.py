"""A model's small files beside its tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import rankxform
from rankxform.errors import RankxformError
from tests.reported import convert, dst, made

__all__ = ["dst", "made"]


CONFIG = {
    "architectures": ["A"], "model_type": "a", "vocab_size": 16, "hidden_size": 4,
    "num_hidden_layers": 2,
}  # fmt: skip


class TestBeside:
    """A destination is its tensors, its index and tracker, and the small files of a model."""

    @pytest.fixture
    def model(self, tmp_path):
        src = tmp_path / "src"
        src.mkdir()
        arrays = {"model.embed_tokens.weight": np.ones((16, 4), "f4")}
        arrays |= {f"model.layers.{n}.mlp.weight": np.full((8, 4), n + 2, "f4") for n in range(2)}
        save_file(arrays, src / "model.safetensors")
        self.write(src, **CONFIG)
        return src

    def write(self, folder, **config):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")

    def verified(self, src, dst, **options):
        options.setdefault("dst_form", "huggingface")
        return {
            one.elements.tensor if one.elements else Path(one.file).name: one.text
            for one in rankxform.verify(src, dst, **options).differences
        }

    @pytest.mark.parametrize("with_manifest", [True, False])
    def test_an_index(self, with_manifest, model, dst):
        convert(model, dst, max_shard=200)
        if not with_manifest:
            (dst / "rankxform.json").unlink()
        assert self.verified(model, dst) == {}
        index = dst / "model.safetensors.index.json"
        text = index.read_text()
        index.unlink()
        assert "is missing" in self.verified(model, dst)[index.name]
        index.write_text(text + "\n")
        found = self.verified(model, dst)
        assert found == ({index.name: "was changed since it was written"} if with_manifest else {})

    def test_one_file_of_another_tool_needs_none(self, model, dst):
        dst.mkdir()
        shutil.copy(model / "model.safetensors", dst)
        assert self.verified(model, dst) == {}

    @pytest.mark.parametrize("text", [None, "3", "x"])
    def test_a_tracker(self, text, model, dst):
        options = {"dst_form": "checkpoint2", "iteration": 7}
        rankxform.transform(model, dst, **options)
        assert self.verified(model, dst, **options) == {}
        (tracker,) = dst.glob("*.txt")
        tracker.unlink() if text is None else tracker.write_text(text)
        assert [*self.verified(model, dst, **options)] == [tracker.name]
        tracker.write_text("9")  # a later one, of another job
        (dst / "iteration_00000009").mkdir()
        with pytest.warns(rankxform.RankxformWarning, match="a job takes 9"):
            assert self.verified(model, dst, **options) == {}

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"vocab_size": 8}, "vocab_size is 8"),
            ({"vocab_size": 32}, "vocab_size is 32"),
            ({"hidden_size": 8}, "hidden_size is 8"),
            ({"num_hidden_layers": 4}, "num_hidden_layers is 4, and there are 2 layers"),
            ({"architectures": ["B"]}, "architectures is ['B']"),
        ],
    )
    def test_another_models_configuration(self, change, why, model, dst):
        self.write(dst, **{**CONFIG, **change})
        for overwrite in (False, True):
            with pytest.raises(RankxformError, match="is of another model") as caught:
                rankxform.transform(model, dst, dst_form="huggingface", overwrite=overwrite)
            assert why in str(caught.value) and not [*dst.glob("*.safetensors")]
        (dst / "config.json").unlink()
        report = rankxform.transform(model, dst, dst_form="huggingface")
        assert any("tokenizer.json lay there already" in text for text in report.notices)
        self.write(dst, **{**CONFIG, **change})
        assert why in self.verified(model, dst)["config.json"]

    def test_people_change_a_configuration(self, model, dst):
        self.write(dst, **CONFIG, torch_dtype="float16")
        report = rankxform.transform(model, dst, dst_form="huggingface")
        assert any("config.json, tokenizer.json lay there" in text for text in report.notices)
        assert self.verified(model, dst) == {} and (dst / "config.json").is_file()

    def test_what_was_copied_goes_with_its_tensors(self, tmp_path, made, dst):
        """Another model is written over an earlier one, whose config.json came from --like."""
        folder = made("lora_into_ranks")
        options = {"map": "qwen3", "fsync": False}
        ranks = tmp_path / "unified"
        rankxform.transform(folder / "hf", ranks, dst_form="unified", **options)
        like = {**options, "like": str(folder / "hf"), "dst_form": "huggingface"}
        rankxform.transform(ranks, dst, **like)
        assert (dst / "config.json").is_file()
        other = tmp_path / "other"
        other.mkdir()
        save_file({"w": np.ones((4, 4), "f4")}, other / "model.safetensors")
        report = rankxform.transform(other, dst, dst_form="huggingface", overwrite=True)
        assert not (dst / "config.json").exists()
        assert any("go with the tensors for which they" in text for text in report.notices)

    @pytest.mark.parametrize(
        "config",
        [
            {"encoder_layers": 6, "num_hidden_layers": 6},
            {"vision_config": {"hidden_size": 3}, "hidden_size": 9},
            {"text_config": {"vocab_size": 16, "hidden_size": 4}, "vocab_size": 9},
            {"vocab_size": 16, "hidden_size": 8, "word_embed_proj_dim": 4},
            {"num_hidden_layers": 1, "num_nextn_predict_layers": 1},
        ],
    )
    def test_models_of_several_parts_are_not_judged(self, config, model, dst):
        self.write(dst, **config)
        rankxform.transform(model, dst, dst_form="huggingface")
        assert self.verified(model, dst) == {}

    def test_a_plain_copy_is_the_same(self, model, tmp_path):
        """Whatever its config.json means: it is the source's own."""
        self.write(model, vocab_size=7, num_hidden_layers=9)
        shutil.copytree(model, tmp_path / "copy")
        with pytest.warns(rankxform.RankxformWarning, match="vocab_size is 7"):
            assert self.verified(model, tmp_path / "copy") == {}

    def test_what_lay_there_before_is_never_removed(self, tmp_path, made, dst):
        folder = made("lora_into_ranks")
        unified, options = tmp_path / "unified", {"map": "qwen3", "like": str(folder / "hf")}
        rankxform.transform(folder / "hf", unified, dst_form="unified", map="qwen3")
        dst.mkdir()
        shutil.copy(folder / "hf/config.json", dst)
        rankxform.transform(unified, dst, dst_form="huggingface", **options)
        other = tmp_path / "other"
        other.mkdir()
        save_file({"w": np.ones((4, 4), "f4")}, other / "model.safetensors")
        rankxform.transform(other, dst, dst_form="huggingface", overwrite=True)
        assert (dst / "config.json").is_file()

    def test_the_same_model_keeps_its_files(self, tmp_path, made, dst):
        folder = made("lora_into_ranks")
        unified, options = tmp_path / "unified", {"map": "qwen3", "dst_form": "huggingface"}
        rankxform.transform(folder / "hf", unified, dst_form="unified", map="qwen3")
        rankxform.transform(unified, dst, like=str(folder / "hf"), **options)
        more = {"config": str(folder / "hf/config.json"), "dtype": "bf16", "overwrite": True}
        rankxform.transform(unified, dst, **options, **more)
        rankxform.transform(folder / "hf", dst, dst_form="huggingface", overwrite=True)
        assert (dst / "config.json").is_file()

    def test_a_copy_that_was_changed_is_noticed(self, tmp_path, made, dst):
        folder = made("lora_into_ranks")
        ranks, options = tmp_path / "unified", {"map": "qwen3", "like": str(folder / "hf")}
        rankxform.transform(folder / "hf", ranks, dst_form="unified", map="qwen3")
        rankxform.transform(ranks, dst, dst_form="huggingface", **options)
        config = json.loads((dst / "config.json").read_text())
        (dst / "config.json").write_text(json.dumps({**config, "rope_theta": 1}))
        verdict = rankxform.verify(ranks, dst, dst_form="huggingface", **options)
        assert verdict and any("config.json: was changed" in text for text in verdict.notices)
