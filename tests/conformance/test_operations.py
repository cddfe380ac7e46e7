"""What every operation keeps to, written once: however tensors are read, exchanged and put, they
become the same. What they become is tested in tests/mpi/test_operations.py and test_maps.py."""

from __future__ import annotations

import json
import random
from typing import ClassVar

import numpy as np
import pytest

import rankxform
from rankxform.engine import in_memory
from rankxform.layout.names import natural_sort_key
from rankxform.planning import budget
from tests import reference, reference_forms
from tests.mpi.conftest import as_nodes
from tests.mpi.test_maps import model_of, options_of
from tests.mpi_launch import world
from tests.place import contents
from tests.reference_maps import random_strategy
from tests.reference_values import adapter_of, words

# Values are random bits, of which some are no numbers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no numbers|.*value is zero|.*do not round:rankxform.RankxformWarning"
)
SHAPES = {
    "embedding.word_embeddings.weight": (40, 24), "layers.0.up.weight": (16, 24),
    "layers.1.up.weight": (16, 24), "norm.weight": (48,), "stack.weight": (4, 16, 24),
}  # fmt: skip


class OperationTests:
    """The laws of an operation. A subclass says what is converted with which options."""

    block = 4096  # bytes of a tile's buffers
    back: ClassVar[dict | None] = None  # options by which a conversion back undoes it

    def write(self, tmp):
        """Write tmp/src, and the strategies tmp/a and tmp/b; return options. On process 0."""
        bits = np.random.default_rng(3)
        arrays = {n: bits.normal(0, 1, shape) for n, shape in SHAPES.items()}
        arrays |= {f"adam_m.{n}": array / 2 for n, array in list(arrays.items())}
        self.write_ranks(tmp, {n: ("Float32", words(a, "Float32")) for n, a in arrays.items()})
        return self.options(tmp)

    def options(self, tmp):
        """Return the options of the operation, and write what they name."""

    def becomes(self, name, shape):
        """Return name and shape at the destination, for its strategy."""
        return name, shape

    def write_ranks(self, tmp, tensors):
        """Write a source and strategies of two pipeline stages each."""
        params = {n: (array.shape, dtype) for n, (dtype, array) in tensors.items()}
        for side, ranks, seed, first_stage in (("a", 2, 1, 2), ("b", 4, 2, 3)):
            names, stages = [*SHAPES][:first_stage], [{}, {}]
            for name, (shape, dtype) in params.items():
                stage = stages[name.removeprefix("adam_m.") not in names]
                if side == "b":
                    name, shape = self.becomes(name, shape)
                stage[name] = shape, dtype
            layouts = [random_strategy(stage, ranks, 1, seed)[0] for stage in stages]
            reference.write_stage_files(tmp / side, layouts)
            if side == "a":
                reference.write_checkpoint(
                    tmp / "src", layouts, params, None, "safetensors",
                    make=lambda name, shape, dtype: tensors[name][1],
                )  # fmt: skip

    @pytest.fixture
    def made(self, tmp):
        """Convert in one process, by ranges; return options and the bytes of the files."""
        if world().rank == 0:
            options = self.write(tmp)
            told = {"format": "safetensors", "fsync": False, "read_method": "ranges", **options}
            rankxform.transform(tmp / "src", tmp / "one", self.a(tmp), str(tmp / "b"), **told)
        options = world().bcast(options if world().rank == 0 else None)
        return options, contents(tmp / "one")

    def a(self, tmp):
        return str(tmp / "a") if (tmp / "a").exists() else None

    @pytest.fixture
    def small_steps(self, monkeypatch):
        """Have tensors move in many tiles, and as large ones do where they lie in memory."""
        monkeypatch.setattr(budget, "_LARGEST_ARENA", self.block)
        monkeypatch.setattr(in_memory, "_LEAST_BYTES", 0)

    @pytest.mark.sampled
    @pytest.mark.world(sizes=(2, 3))
    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize("method", ["auto", "two-phase"])
    def test_files_are_the_same(self, method, nodes, made, tmp, small_steps, monkeypatch):
        options, wanted = made
        if 1 < nodes <= world().size:
            as_nodes(monkeypatch, nodes, 5)
        told = {"format": "safetensors", "fsync": False, "read_method": method, "memory": "1M"}
        rankxform.transform(
            tmp / "src", tmp / "dst", self.a(tmp), str(tmp / "b"), comm=world(), **told, **options
        )
        assert contents(tmp / "dst") == wanted

    @pytest.mark.sampled
    @pytest.mark.world(sizes=(2, 3))
    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize("method", ["auto", "two-phase"])
    def test_arrays_are_the_same(self, method, nodes, made, tmp, small_steps, monkeypatch):
        options, _ = made
        if 1 < nodes <= world().size:
            as_nodes(monkeypatch, nodes, 6)
        rank = random.Random(f"{world().rank} {method}").randrange(8)
        found = rankxform.load(
            tmp / "src", self.a(tmp), str(tmp / "b"), rank=rank, comm=world(), read_method=method,
            memory="1M", progress=False, **options,
        )  # fmt: skip
        (path,) = (tmp / "one" / f"rank_{rank}").iterdir()
        wanted = reference.read_safetensors(path)
        assert sorted(found, key=natural_sort_key) == sorted(wanted, key=natural_sort_key)
        for name, (dtype, shape, data) in wanted.items():
            assert (found.dtypes[name], found[name].shape) == (dtype, shape)
            assert found[name].tobytes() == data, name

    @pytest.mark.world(sizes=(1,))
    @pytest.mark.parametrize("rank", [0, 7])
    def test_a_rank_alone_gets_the_same(self, rank, made, tmp):
        """A source of several pipeline stages is read as far as that rank's needs it."""
        options, wanted = made
        rankxform.transform(
            tmp / "src", tmp / "dst", self.a(tmp), str(tmp / "b"), ranks=[rank], fsync=False,
            format="safetensors", **options,
        )  # fmt: skip
        found = contents(tmp / "dst")
        assert found == {name: wanted[name] for name in found}
        found = rankxform.load(tmp / "src", self.a(tmp), str(tmp / "b"), rank=rank, **options)
        assert len(found) == len(reference.read_safetensors(next((tmp / "dst").glob("*/*"))))

    @pytest.mark.world(sizes=(1, 3))
    def test_what_can_be_undone_is_undone(self, made, tmp):
        if self.back is None:
            pytest.skip("it has no inverse")
        rankxform.transform(
            tmp / "one", tmp / "back", str(tmp / "b"), self.a(tmp), comm=world(), fsync=False,
            format="safetensors", read_method="two-phase", **self.back,
        )  # fmt: skip
        for rank in range(4):
            (own,), (theirs,) = (
                (tmp / folder / f"rank_{rank}").iterdir() for folder in ("back", "src")
            )
            assert reference.read_safetensors(own) == reference.read_safetensors(theirs)


class TestNone(OperationTests):
    back: ClassVar = {}

    def options(self, tmp):
        return {}


class TestRename(OperationTests):
    back: ClassVar = {"rename": [r"^(adam_m\.)?model\.=\1"]}

    def options(self, tmp):
        return {"rename": [r"^(adam_m\.)?(?!adam)=\1model."]}

    def becomes(self, name, shape):
        return f"model.{name}".replace("model.adam_m.", "adam_m.model."), shape


class TestCast(OperationTests):
    def options(self, tmp):
        return {"dtype": "bf16", "keep_dtype": "norm"}


@pytest.mark.filterwarnings("ignore:.*beside .* that it has:rankxform.RankxformWarning")
class TestVocabulary(OperationTests):
    block = 1 << 16
    back: ClassVar = {"vocab": 40}

    def options(self, tmp):
        return {"vocab": 48, "vocab_fill": "repeat-last"}

    def becomes(self, name, shape):
        return name, (48, *shape[1:]) if "embedding" in name else shape


class TestAdapter(OperationTests):
    def options(self, tmp):
        shapes = {name.removesuffix(".weight"): SHAPES[name] for name in SHAPES if "up" in name}
        lora = adapter_of("peft", shapes, "Float32", 2, np.random.default_rng(4))
        tensors = {name: ("Float32", array) for name, array in lora.items()}
        reference.write_safetensors(tmp / "lora" / "adapter_model.safetensors", tensors)
        stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}
        (tmp / "lora" / "adapter_config.json").write_text(json.dumps(stated))
        return {"lora": str(tmp / "lora"), "dtype": "bf16"}


class TestBlocks(OperationTests):
    """8-bit floats times factors."""

    def write(self, tmp):
        bits = np.random.default_rng(6)
        codes = bits.integers(0, 256, (200, 300)).astype("u1")
        codes[(codes & 0x7F) == 0x7F] = 1
        factors = bits.uniform(1e-3, 2, (2, 3)).astype("<f4").view("<u4")
        tensors = {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": ("Float32", factors),
                   "norm": ("BFloat16", codes[:, 0].astype("<u2"))}  # fmt: skip
        reference_forms.write_huggingface(tmp / "src", tensors, files=2)
        params = {"m.weight": ((200, 300), "BFloat16"), "norm": ((200,), "BFloat16")}
        reference.write_stage_files(tmp / "b", random_strategy(params, 8, 1, 3))
        return {"dtype": "bf16"}


class MapTests(OperationTests):
    block = 1 << 16  # of many pieces
    kind: str

    def write(self, tmp):
        model = model_of(self.kind, 1)
        reference_forms.write_huggingface(tmp / "src", model.tensors("hf"), files=3)
        (tmp / "config.json").write_text(json.dumps(model.config))
        reference.write_stage_files(tmp / "b", random_strategy(model.params("mf"), 8, 1, 4))
        return options_of(model, tmp)


class TestMapOfQwen3(MapTests):
    kind = "qwen3"


class TestMapOfExperts(MapTests):
    kind = "qwen3_moe"


class TestMapOfDeepSeek(MapTests):
    kind = "deepseek_v3"
