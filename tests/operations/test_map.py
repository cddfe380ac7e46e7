"""Models under another naming: the real converters' samples, wrong sizes, and what a person
sees."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.engine import piece_schedule
from rankxform.errors import CheckpointError, RankxformError, RequestError, UsageError
from rankxform.request import Request
from rankxform.target.destination import DESTINATIONS
from rankxform.transport import SerialTeam
from rankxform.verbs.launch import launch
from tests import reference, reference_dcp, reference_forms
from tests.reference_maps import Model, random_strategy
from tests.reference_values import words
from tests.toy_uploads import Server

# Values are random bits, of which some are no numbers.
pytestmark = pytest.mark.filterwarnings("ignore:.*infinite or no numbers")
DATA = Path(__file__).parents[1] / "data" / "formats"
SAMPLES = {"qwen3": DATA / "hf_qwen3", "qwen3_moe": DATA / "hf_qwen3_moe"}


def arrays(folder, read):
    return {n: w for n, (_, w) in read(folder).items()}


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("name", SAMPLES)
def test_the_real_converters_samples_both_ways(name, ranks, stages, tmp_path, monkeypatch):
    sample = SAMPLES[name]
    mf = arrays(sample / "mindformers", reference_forms.read_unified)
    hf = arrays(sample / "hf", reference_forms.read_huggingface)
    params = {n: (w.shape, "Float32") for n, w in mf.items()}
    options = {"map": name, "config": str(sample / "hf" / "config.json")}
    for seed in range(3):
        monkeypatch.setattr(piece_schedule, "SMALL_TILE", (4 << 20, 8192, 2048)[seed])
        monkeypatch.setattr(piece_schedule, "_STORED", (4 << 20, 512, 96)[seed])
        here = tmp_path / str(seed)
        layouts = random_strategy(params, ranks, stages, seed)
        a = reference.write_stage_files(here / "strategy", layouts)
        reference.write_checkpoint(
            here / "src", layouts, params, None, "safetensors", make=lambda n, s, d: mf[n]
        )
        done = rankxform.transform(here / "src", here / "hf", a, dst_form="huggingface", **options)
        if ranks == 1:  # of gate and up, too, which lie in alternate rows or halves of rows
            assert done.bytes_read == sum(w.nbytes for w in mf.values())
        found = arrays(here / "hf", reference_forms.read_huggingface)
        assert {n: w.tobytes() for n, w in found.items()} == {n: w.tobytes() for n, w in hf.items()}
        rankxform.transform(
            sample / "hf", here / "back", None, a, format="safetensors", **options
        )  # fmt: skip
        wrong = reference.wrong_slices(
            here / "back", layouts, params, "safetensors", make=lambda n, s, d: mf[n]
        )
        assert wrong == []
        assert rankxform.load(here / "hf", None, a, rank=ranks * stages - 1, **options).bytes_read


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("trained", [1, 3])
def test_the_states_of_an_optimizer_go_with_their_parameters(name, trained, tmp_path):
    """Of every parameter, or of every third: frozen ones have none."""
    sample = SAMPLES[name]
    mf = arrays(sample / "mindformers", reference_forms.read_unified)
    hf = arrays(sample / "hf", reference_forms.read_huggingface)
    blocks = sorted({n.rpartition(".")[0] for n in mf})[::trained]
    states = {n: w ^ 1 for n, w in mf.items() if n.rpartition(".")[0] in blocks}
    every = {**mf, **{f"adam_m.{n}": w for n, w in states.items()}}
    every["global_step"] = np.array([9], "<i4").view("<u4")
    kinds = {n: "Int32" if n == "global_step" else "Float32" for n in every}
    reference_forms.write_unified(
        tmp_path / "src", {n: (kinds[n], w) for n, w in every.items()}, {}
    )
    options = {"map": name, "config": str(sample / "hf" / "config.json")}
    rankxform.transform(
        tmp_path / "src", tmp_path / "dcp", dst_form="dcp", names="torch", **options
    )
    found = {n: w for n, (_, w) in reference_dcp.read_items(tmp_path / "dcp")[0].items()}
    moments = {n for n in found if n.endswith(".exp_avg")}
    assert moments and (trained > 1 or len(moments) == len(hf))
    for one, words_ in hf.items():
        assert (found[f"model.{one}"] == words_).all()
        moment = f"optimizer.state.{one}.exp_avg"
        assert moment not in found or (found[moment] == words_ ^ 1).all()
    steps = [found[n] for n in found if n.endswith(".step")]
    assert len(steps) == len(moments) and all(one.view("<f4") == 9 for one in steps)
    named = {"names": "mindspore"} if trained > 1 else {}  # a map takes what is below "model."
    rankxform.transform(tmp_path / "dcp", tmp_path / "back", dst_form="unified", **named, **options)
    back = arrays(tmp_path / "back", reference_forms.read_unified)
    assert {n: w.tobytes() for n, w in back.items()} == {n: w.tobytes() for n, w in every.items()}


def test_fused_weights_are_taken_apart_in_the_order_of_the_file(tmp_path, monkeypatch):
    """Of gate and up, which lie in alternate rows, one is not made beside the other."""
    monkeypatch.setattr(piece_schedule, "SMALL_TILE", 2048)
    sample, server = SAMPLES["qwen3"], Server(tmp_path, 1 << 14)
    options = {"map": "qwen3", "config": str(sample / "hf" / "config.json")}
    monkeypatch.setitem(DESTINATIONS, "parts", server.destination)
    src = sample / "mindformers"
    done = rankxform.transform(src, "parts://hf", dst_form="huggingface", **options)
    rankxform.transform(src, tmp_path / "folder", dst_form="huggingface", **options)
    for address in done.files:
        name = address.removeprefix("parts://hf/")
        assert server.get(f"hf/{name}") == (tmp_path / "folder" / name).read_bytes()


def written(model, tmp_path, side="mf"):
    """Write a model as one whole file of MindFormers' names, and its config.json."""
    write = reference_forms.write_unified if side == "mf" else reference_forms.write_huggingface
    more = ({},) if side == "mf" else ()
    folder = write(tmp_path / side, model.tensors(side), *more)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    return folder


def refused(src, tmp_path, kind, error=RankxformError, **options):
    form = "huggingface" if src.name == "mf" else None
    with pytest.raises(error) as caught:
        rankxform.transform(
            src, tmp_path / "dst", map=kind, config=str(tmp_path / "config.json"), dst_form=form,
            **options,
        )  # fmt: skip
    assert not (tmp_path / "dst").exists(), "something was written"
    return str(caught.value)


@pytest.mark.sampled
@pytest.mark.parametrize("side", ["mf", "hf"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "deepseek_v3", "llama_legacy_fused"])
def test_sizes_that_are_not_the_checkpoints_are_refused(kind, side, tmp_path):
    model = Model(kind, 3)
    src, config = written(model, tmp_path, side), dict(model.config)

    def with_config(**changed):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        return refused(src, tmp_path, kind)

    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    text = with_config(num_attention_heads=2 * heads)
    assert f"num_attention_heads {2 * heads}" in text
    assert "has shape" in text
    text = with_config(num_hidden_layers=layers + 1)
    assert f"num_hidden_layers {layers + 1}" in text
    assert "lacks" in text
    text = with_config(num_hidden_layers=layers - 1)
    if kind != "deepseek_v3" or not config["num_nextn_predict_layers"]:
        assert f"num_hidden_layers {layers - 1}" in text
    assert f"vocab_size {config['vocab_size'] + 1}" in with_config(
        vocab_size=config["vocab_size"] + 1
    )
    assert "hidden_size is missing" in with_config(hidden_size=None)
    assert "needs a number" in with_config(hidden_size=-3)


@pytest.mark.parametrize("side", ["mf", "hf"])
def test_missing_and_unknown_tensors_are_refused_by_name(side, tmp_path):
    model = Model("qwen3", 1)
    own = getattr(model, side)
    name = next(n for n in own if "layers.0" in n and "norm" not in n)
    gone = own.pop(name)
    text = refused(written(model, tmp_path, side), tmp_path, "qwen3", CheckpointError)
    assert repr(name) in text
    own[name] = gone
    own["model.rotary.inv_freq"] = gone
    shutil.rmtree(tmp_path / side)
    src = written(model, tmp_path, side)
    text = refused(src, tmp_path, "qwen3", CheckpointError)
    assert "no rule of map qwen3 takes 'model.rotary.inv_freq'" in text
    options = {"map": "qwen3", "config": str(tmp_path / "config.json")}
    done = rankxform.transform(src, tmp_path / "dst", exclude="inv_freq", **options)
    assert [left.names for left in done.left_out] == [("model.rotary.inv_freq",)]


def test_the_configuration_of_another_kind_is_refused(tmp_path):
    model = Model("qwen3", 1)
    model.config["architectures"] = ["LlamaForCausalLM"]
    src = written(model, tmp_path)
    assert "is of a LlamaForCausalLM" in refused(src, tmp_path, "qwen3", UsageError)
    missing = refused(src, tmp_path, str(tmp_path / "none.toml"), UsageError)
    assert "no such mapping table" in missing
    assert "there is no map" in refused(src, tmp_path, "qwen99", UsageError)


def near(array, scale, bits):
    """Return bfloat16 words of a random array, and of one that is close to it."""
    base = bits.normal(0, 1, array.shape)
    return words(base, "BFloat16"), words(base + scale * bits.normal(0, 1, array.shape), "BFloat16")


def test_names_that_a_strategy_does_not_know_are_refused(tmp_path):
    model = Model("qwen3", 1, "BFloat16")
    params = model.params("mf")
    strategy = reference.write_stage_files(tmp_path / "Q", random_strategy(params, 2, 1, 0))
    hub = written(model, tmp_path, "hf")
    with pytest.raises(RequestError, match=r"(?s)lists none of the tensors.*--map"):
        rankxform.transform(hub, tmp_path / "dst", None, strategy)
    assert not (tmp_path / "dst").exists()
    states = {"adam_m.w": ("Float32", np.zeros((4, 4), "<f4"))}
    reference_forms.write_huggingface(tmp_path / "states", states)
    with pytest.warns(rankxform.RankxformWarning, match="belong to no parameter"):
        done = rankxform.transform(tmp_path / "states", tmp_path / "to", None, "shard:^adam_m=0@2")
    assert len(done.files) == 2


def test_a_table_of_ones_own_splits_and_joins(tmp_path):
    (tmp_path / "own.toml").write_text(
        """
        [[rules]]
        huggingface = "scales"
        steps = ["concat"]
        mindformers = { pre = ["1"], post = ["n - 1"] }
        [[rules]]
        mindformers = "m"
        steps = ["transpose"]
        huggingface = { w = ["n", "2 * n"] }
        """
    )
    (tmp_path / "config.json").write_text('{"n": 3, "model_type": "own"}')
    scales, matrix = np.arange(3, dtype="<u4"), np.arange(18, dtype="<u4").reshape(3, 6)
    tensors = {"scales": ("Float32", scales), "w": ("Float32", matrix)}
    src = reference_forms.write_huggingface(tmp_path / "hf", tensors)
    options = {"map": str(tmp_path / "own.toml"), "config": str(tmp_path / "config.json")}
    rankxform.transform(src, tmp_path / "mf", dst_form="unified", **options)
    found = arrays(tmp_path / "mf", reference_forms.read_unified)
    assert {n: w.tolist() for n, w in found.items()} == {
        "pre": [0], "post": [1, 2], "m": matrix.T.tolist()
    }  # fmt: skip
    rankxform.transform(tmp_path / "mf", tmp_path / "back", dst_form="huggingface", **options)
    back = arrays(tmp_path / "back", reference_forms.read_huggingface)
    assert {n: w.tobytes() for n, w in back.items()} == {
        "scales": scales.tobytes(), "w": matrix.tobytes()
    }  # fmt: skip


def test_another_configuration_is_another_conversion(tmp_path):
    model = Model("llama", 2)
    src = written(model, tmp_path)
    options = {"map": "llama", "config": str(tmp_path / "config.json"), "dst_form": "huggingface"}
    rankxform.transform(src, tmp_path / "dst", **options)
    assert rankxform.transform(src, tmp_path / "dst", **options).files_kept
    with pytest.raises(RankxformError):
        rankxform.transform(src, tmp_path / "dst", gate_up="contiguous", **options)
    verdict = rankxform.verify(src, tmp_path / "dst", gate_up="contiguous", **options)
    assert {one.elements.tensor.split(".")[-2] for one in verdict.differences} == {
        "gate_proj",
        "up_proj",
    }


def test_a_program_is_launched_from_a_published_model(tmp_path, monkeypatch):
    """`launch` asks for the latest step; a folder of whole tensors holds one, which is it."""
    monkeypatch.chdir(tmp_path)
    sample = SAMPLES["qwen3"]
    mf = arrays(sample / "mindformers", reference_forms.read_unified)
    params = {n: (w.shape, "Float32") for n, w in mf.items()}
    layouts = random_strategy(params, 2, 1, 1)
    reference.write_strategy(tmp_path / "b.ckpt", layouts)
    request = Request(str(sample / "hf"), None, None, "b.ckpt", map="qwen3", format="safetensors")
    done, made = launch(request, tmp_path / "output", SerialTeam())
    assert len(done.files) == 2
    make = {"make": lambda n, s, d: mf[n]}
    assert reference.wrong_slices(Path(made), layouts, params, "safetensors", **make) == []
    with pytest.raises(UsageError, match="holds one step"):
        rankxform.transform(sample / "hf", "no", None, "b.ckpt", map="qwen3", step="1_5")


def test_a_head_that_the_configuration_calls_tied_is_not_left_out_unsaid(tmp_path):
    """The rule was said to be missing, and the first try left the trained head out."""
    model = next(
        one for seed in range(9)
        for one in [Model("llama_legacy", seed)] if not one.config["tie_word_embeddings"]
    )  # fmt: skip
    src = written(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**model.config, "tie_word_embeddings": True}))
    with pytest.raises(rankxform.CheckpointError) as refused:
        rankxform.transform(
            src, tmp_path / "dst", map="llama_legacy", dst_form="huggingface",
            config=str(tmp_path / "config.json"),
        )  # fmt: skip
    assert "says that the model has no 'lm_head.weight' of its own" in refused.value.what
    assert "tie_word_embeddings" in refused.value.what
    assert refused.value.tries[0].startswith("--config FILE of this model")


def test_a_configuration_becomes_the_folder_s(tmp_path):
    """With the model's type, which a map of one model knows."""
    model = Model("qwen3", 1)
    src = written(model, tmp_path)
    given = tmp_path / "config.json"
    options = {"map": "qwen3", "config": str(given), "dst_form": "huggingface"}
    rankxform.transform(src, tmp_path / "typed", **options)
    assert (tmp_path / "typed" / "config.json").read_bytes() == given.read_bytes()
    del model.config["model_type"]
    given.write_text(json.dumps(model.config))
    rankxform.transform(src, tmp_path / "dst", **options)
    found = json.loads((tmp_path / "dst" / "config.json").read_text())
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert found == {**kind, **model.config}
    assert rankxform.verify(src, tmp_path / "dst", **options)
    shutil.copy(given, tmp_path / "other.json")
    legacy = Model("llama_legacy", 1)
    del legacy.config["model_type"]
    src = written(legacy, tmp_path / "legacy")
    options |= {"map": "llama_legacy", "config": str(tmp_path / "legacy" / "config.json")}
    with pytest.warns(rankxform.RankxformWarning, match="states no model_type"):
        rankxform.transform(src, tmp_path / "legacy-hf", **options)
    assert not (tmp_path / "legacy-hf" / "config.json").exists()


class TestLike:
    """What is made is compared with a published model, all kinds of matrices."""

    @pytest.fixture
    def place(self, tmp_path):
        bits = np.random.default_rng(8)
        model = Model("qwen3", 3, "BFloat16", "grouped", "interleaved")
        published, trained = {}, {}
        for name, array in model.hf.items():
            published[name], trained[name] = near(array, 0.1, bits)
        folders = {}
        for which, tensors in (("published", published), ("trained", trained)):
            model.hf.update(tensors)
            folders[which] = written(model, tmp_path / which, "hf")
            (folders[which] / "config.json").write_text(json.dumps(model.config))
        ours = tmp_path / "ours"
        rankxform.transform(folders["trained"], ours, map="qwen3", fsync=False)
        (ours / "rankxform.json").unlink()
        (file,) = ours.glob("rank_0/*")
        return model, folders["published"], ours, file

    def convert(self, place, **options):
        _, published, ours, _ = place
        return rankxform.transform(
            ours, ours.parent / "dst", map="qwen3", like=str(published), dst_form="huggingface",
            fsync=False, **options,
        )  # fmt: skip

    def change(self, file, how):
        entries = {
            n: (d, np.frombuffer(data, "<u2").reshape(shape).copy())
            for n, (d, shape, data) in reference.read_any(file).items()
        }
        how(entries)
        write = reference.write_ckpt if file.suffix == ".ckpt" else reference.write_safetensors
        write(file, entries)

    def test_a_model_that_was_trained_on_resembles_it(self, place):
        assert self.convert(place).warnings == ()

    @pytest.mark.parametrize("what", ["layers", "vocabulary"])
    def test_what_lies_in_another_order(self, place, what):
        def exchange(entries):
            if what == "vocabulary":
                (name,) = (n for n in entries if "embed" in n)
                entries[name][1][...] = entries[name][1][::-1].copy()
                return
            layers = sorted(
                {int(n.split("layers.")[1].split(".")[0]) for n in entries if "layers." in n}
            )
            for name in [n for n in entries if f"layers.{layers[0]}.self_attention" in n]:
                other = name.replace(f"layers.{layers[0]}.", f"layers.{layers[-1]}.")
                entries[name], entries[other] = entries[other], entries[name]

        self.change(place[3], exchange)
        with pytest.raises(rankxform.RankxformError, match="would not resemble|does not tell"):
            self.convert(place)

    def test_another_model_is_a_warning(self, place):
        model, published, *_ = place
        bits = np.random.default_rng(9)
        model.hf.update({n: near(array, 0.1, bits)[0] for n, array in model.hf.items()})
        written(model, published.parent, "hf")
        with pytest.warns(rankxform.RankxformWarning, match="nothing that is made resembles"):
            self.convert(place, qkv="grouped", gate_up="interleaved")


@pytest.mark.parametrize("side", ["hf", "mf"])
def test_a_model_without_its_multi_token_prediction_layers(side, tmp_path):
    """Transformers saves DeepSeek-V3 without them, and its config.json still states them."""
    model = next(
        one
        for one in (Model("deepseek_v3", seed) for seed in range(20))
        if one.config["num_nextn_predict_layers"]
    )
    layers = model.config["num_hidden_layers"]
    beyond = tuple(f"model.layers.{layers + n}." for n in range(2))
    model.hf = {n: w for n, w in model.hf.items() if not n.startswith(beyond)}
    model.mf = {n: w for n, w in model.mf.items() if not n.startswith("mtp.")}
    src = written(model, tmp_path, side)
    options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json")}
    if side == "mf":
        options["dst_form"] = "huggingface"
    with pytest.warns(rankxform.RankxformWarning, match="the checkpoint has none of these layers"):
        rankxform.transform(src, tmp_path / "dst", **options)
    if side == "mf":
        made = arrays(tmp_path / "dst", reference_forms.read_huggingface)
    else:
        (path,) = (tmp_path / "dst").glob("rank_0/*")
        made = {
            n: np.frombuffer(data, "u1") for n, (_, _, data) in reference.read_any(path).items()
        }
    wanted = model.hf if side == "mf" else model.mf
    assert {n: w.tobytes() for n, w in made.items()} == {n: w.tobytes() for n, w in wanted.items()}


def test_half_of_a_multi_token_prediction_layer_is_no_layer(tmp_path):
    model = next(
        one
        for one in (Model("deepseek_v3", seed) for seed in range(20))
        if one.config["num_nextn_predict_layers"]
    )
    layers = model.config["num_hidden_layers"]
    for name in [n for n in model.hf if n.startswith(f"model.layers.{layers}.mlp.")]:
        del model.hf[name]
    text = refused(written(model, tmp_path, "hf"), tmp_path, "deepseek_v3", CheckpointError)
    assert "lacks" in text


def test_one_name_that_both_namings_have_hides_nothing(tmp_path):
    """The head is called alike: a map that was forgotten, or is another model's, is told."""
    every = (Model("llama_legacy", seed) for seed in range(20))
    model = next(one for one in every if "lm_head.weight" in {*one.hf} & {*one.mf})
    layouts = [{n: ([2], [0] + [-1] * (w.ndim - 1), 0, 0) for n, w in model.mf.items()}]
    strategy = reference.write_strategy(tmp_path / "b.ckpt", layouts)
    hf = written(model, tmp_path, "hf")
    with pytest.raises(rankxform.RequestError, match=r"lists 1 of the \d+ tensors, and not"):
        rankxform.transform(hf, tmp_path / "dst", None, strategy)
    assert not (tmp_path / "dst").exists()
    mf = written(model, tmp_path)
    said = refused(mf, tmp_path, "llama")
    assert "Hugging Face's names already" not in said and "--map llama_legacy" in said


class TestVariants:
    """What MindFormers has in several ways: names and axes tell, or the destination's strategy."""

    @pytest.fixture
    def mixed(self):
        """Return a model with experts in one layer at least, in all of PyNative's ways."""
        every = (Model("deepseek_v3", seed, "Float32", variants=6) for seed in range(20))
        return next(one for one in every if any("expert_bias" in name for name in one.mf))

    def test_what_is_there_tells(self, mixed, tmp_path):
        src = written(mixed, tmp_path)
        options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json")}
        report = rankxform.transform(src, tmp_path / "hf", dst_form="huggingface", **options)
        assert arrays(tmp_path / "hf", reference_forms.read_huggingface).keys() == mixed.hf.keys()
        assert not any("MindFormers gets" in text for text in report.notices)

    def test_so_it_does_behind_other_names(self, mixed, tmp_path):
        mixed.mf = {f"net.{name}": words for name, words in mixed.mf.items()}
        mixed.float32 |= {f"net.{name}" for name in mixed.float32}
        src = written(mixed, tmp_path)
        options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json")}
        options |= {"rename": (r"^net\.=",), "dst_form": "huggingface"}
        rankxform.transform(src, tmp_path / "hf", **options)
        assert arrays(tmp_path / "hf", reference_forms.read_huggingface).keys() == mixed.hf.keys()

    @pytest.mark.parametrize("variants", [0, 6])
    def test_so_does_one_that_shards_an_axis_over_two_of_devices(self, variants, tmp_path):
        every = (Model("deepseek_v3", seed, "Float32", variants=variants) for seed in range(40))
        model = next(
            one
            for one in every
            if one.config["n_routed_experts"] == 4 and any("expert_bias" in n for n in one.mf)
        )
        src = written(model, tmp_path, "hf")
        params = model.params("mf")
        rows = {n: ([2, 2], [-1] * len(shape), 0, 0) for n, (shape, _) in params.items()}
        for name, (shape, _) in params.items():
            if "experts.weight" in name:
                rows[name] = [2, 2], [[1, 0], *[-1] * (len(shape) - 1)], 0, 0
        b = reference.write_strategy(tmp_path / "b.ckpt", [rows])
        options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json"), "format": "ckpt"}
        rankxform.transform(src, tmp_path / "dst", None, b, **options)
        own = model.mf
        wrong = reference.wrong_slices(tmp_path / "dst", [rows], params, make=lambda n, *_: own[n])
        assert wrong == []

    def test_the_destinations_strategy_tells(self, mixed, tmp_path):
        src = written(mixed, tmp_path, "hf")
        params = mixed.params("mf")
        layouts = random_strategy(params, 2, 1, 1)
        b = reference.write_stage_files(tmp_path / "b", layouts)
        options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json")}
        rankxform.transform(src, tmp_path / "dst", None, b, format="ckpt", **options)
        own = mixed.mf
        wrong = reference.wrong_slices(
            tmp_path / "dst", layouts, params, make=lambda name, *_: own[name]
        )
        assert wrong == []

    def test_else_an_option_does_and_a_note_says_so(self, mixed, tmp_path):
        src = written(mixed, tmp_path, "hf")
        options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json")}
        options["dst_form"] = "unified"
        report = rankxform.transform(src, tmp_path / "dst", **options)
        told = "MindFormers gets experts=rows, bias=router, mla=concat"
        assert any(told in text for text in report.notices)
        ways = ("experts=axis", "bias=layer", "mla=concat")
        rankxform.transform(src, tmp_path / "way", variant=ways, **options)
        assert arrays(tmp_path / "way", reference_forms.read_unified).keys() == mixed.mf.keys()
        for wrong in ("experts", "experts=x", "heads=2"):
            with pytest.raises(UsageError, match="--variant"):
                rankxform.transform(src, tmp_path / "no", variant=(wrong,), **options)

    def test_a_bias_that_the_configuration_requires(self, mixed, tmp_path):
        names = [name for name in mixed.mf if "expert_bias" in name]
        mixed.config["topk_method"] = "noaux_tc"
        for name in names:
            del mixed.mf[name]
        src = written(mixed, tmp_path)
        options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json")}
        options["dst_form"] = "huggingface"
        with pytest.raises(CheckpointError, match="lacks 'decoder.*expert_bias'"):
            rankxform.transform(src, tmp_path / "dst", **options)
        rankxform.transform(src, tmp_path / "without", exclude=("expert_bias$",), **options)
        mixed.config["topk_method"] = "greedy"
        (tmp_path / "config.json").write_text(json.dumps(mixed.config))
        rankxform.transform(src, tmp_path / "dst", **options)

    def test_counters_of_load_are_no_weights(self, mixed, tmp_path):
        layer = next(name for name in mixed.mf if "expert_bias" in name).partition(".mlp.")[0]
        for name in ("router.fi_accu", "router.expert_load", "tokens_per_expert", "ga_steps"):
            mixed.mf[f"{layer}.mlp.{name}"] = mixed.new(4)
        src = written(mixed, tmp_path)
        options = {"map": "deepseek_v3", "config": str(tmp_path / "config.json")}
        report = rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", **options)
        (left,) = (one for one in report.left_out if "no weight" in one.reason)
        assert len(left.names) == 4


@pytest.mark.parametrize(
    ("kind", "like"), [("telechat3", "llama"), ("telechat3_moe", "deepseek_v3")]
)
def test_models_under_the_names_of_another(kind, like, tmp_path):
    """The networks of MindFormers 2.1.0 have these parameters, and no others but counters."""
    model = Model(like, 3, "Float32")
    model.config["model_type"] = kind
    src = written(model, tmp_path)
    options = {"map": kind, "config": str(tmp_path / "config.json")}
    rankxform.transform(src, tmp_path / "hf", dst_form="huggingface", **options)
    assert arrays(tmp_path / "hf", reference_forms.read_huggingface).keys() == model.hf.keys()
    rankxform.transform(tmp_path / "hf", tmp_path / "back", dst_form="unified", **options)
    found = arrays(tmp_path / "back", reference_forms.read_unified)
    assert {n: w.tobytes() for n, w in found.items()} == {
        n: w.tobytes() for n, w in model.mf.items()
    }


def test_experts_of_four_bits_are_refused_by_name(tmp_path):
    """As DeepSeek-V4 is published: two numbers in a byte, and a scale for each 32."""
    model = Model("deepseek_v4", 1)
    tensors = model.tensors("hf")
    for name, (_, array) in list(tensors.items()):
        if ".experts." in name:
            rows, columns = array.shape
            tensors[name] = "Int8", np.zeros((rows, columns // 2), "u1")
            scale = name.replace(".weight", ".scale")
            tensors[scale] = "F8_E8M0", np.zeros((rows, 1), "u1")
    reference_forms.write_huggingface(tmp_path / "src", tensors)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**model.config, "expert_dtype": "fp4", "quantization_config": quantization}
    (tmp_path / "src/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight' .*experts fp4: Int8 with"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", map="deepseek_v4")


def test_a_tensor_of_a_layer_that_should_have_none_is_refused(tmp_path):
    """Whether a layer compresses, the configuration says layer by layer."""
    model = Model("deepseek_v4", 1)
    model.config["compress_ratios"] = [0] * len(model.config["compress_ratios"])
    src = written(model, tmp_path)
    options = {"map": "deepseek_v4", "config": str(tmp_path / "config.json")}
    with pytest.raises(CheckpointError, match=r"compressor.* is beyond .*compress_ratios \[0"):
        rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", **options)
    model.config["compress_ratios"] = [4]
    (tmp_path / "config.json").write_text(json.dumps({**model.config, "num_hidden_layers": 3}))
    with pytest.raises(UsageError, match="a list is too short"):
        rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", **options)


@pytest.mark.parametrize(
    "extra",
    [
        [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in (0, 1)],
        ["model.layers.0.a", "model.layers.1.a", "model.layers.1.b"],
        [f"model.layers.9.{kind}.weight" for kind in ("eh_proj", "enorm", "self_attn.q_proj")],
        [f"model.layers.{n}.input_layernorm.weight" for n in (9, 10)],
    ],
)
def test_one_try_leaves_out_all_that_no_rule_takes(extra, tmp_path):
    """And nothing else: what a map makes then is what it makes of the model without these."""
    model = Model("qwen3", 1)
    tensors = {n: ("BFloat16", np.asarray(w) & 0x7F | 0x3F80) for n, w in model.hf.items()}
    src, plain = tmp_path / "src", tmp_path / "plain"
    for folder, entries in ((plain, tensors),
                            (src, tensors | {n: ("BFloat16", np.full(8, 0x3F80, "<u2")) for n in extra})):  # fmt: skip
        reference_forms.write_huggingface(folder, entries)
        (folder / "config.json").write_text(json.dumps(model.config))
    options = {"map": "qwen3", "fsync": False, "qkv": "grouped", "gate_up": "interleaved"}
    with pytest.raises(CheckpointError) as refusal:
        rankxform.transform(src, tmp_path / "dst", **options)
    (text,) = [t for t in refusal.value.parts.tries if t.startswith("--exclude")]
    pattern = shlex.split(text)[1]
    made = []
    for folder, exclude in ((src, (pattern,)), (plain, ())):
        rankxform.transform(folder, tmp_path / f"{folder.name}dst", exclude=exclude, **options)
        (path,) = (tmp_path / f"{folder.name}dst").rglob("*.safetensors")
        made.append(reference.read_safetensors(path))
    assert made[0] == made[1]
