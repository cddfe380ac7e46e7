"""Conversions with no strategy file for the destination, or for neither side."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform import DerivationError, StorageError, UsageError
from rankxform.cli.main import main
from tests import reference
from tests.compiled import COMPILED, DERIVE, MODELS, REAL, TUTORIALS

LLAMA = MODELS / "llama2_13b" / "tutorial4_16p_dp2mp4pp2"
COMPILED_FILE = LLAMA / "merged_ckpt_strategy.ckpt"
SMALL = {32000: 128, 5120: 64, 13824: 96}
SIZES = "dp=2,mp=4,pp=2,vocab_emb_dp=true"
DERIVED = {"preset": "llama_legacy", "optimizer_shard": "on", "threshold": 0}
CONFIG = """\
run_mode: 'finetune'
load_checkpoint: 'full.ckpt'
auto_trans_ckpt: True
use_parallel: True
parallel:
  parallel_mode: 1
  enable_parallel_optimizer: True
  parallel_optimizer_config:
    parallel_optimizer_threshold: 0
dp: &dp 2
parallel_config:
  data_parallel: *dp
  model_parallel: 4
  pipeline_stage: 2
  vocab_emb_dp: True
"""


def llama():
    """Llama-2 13B's parameters and states, every dimension scaled down."""
    lines = re.findall(r"PARAM (\S+) \(([\d, ]*)\) (\w+)", (LLAMA / "params.txt").read_text())
    params = {n: (tuple(SMALL[int(d)] for d in re.findall(r"\d+", s)), t) for n, s, t in lines}
    states = {
        f"{state}.{name}": (shape, "Float32")
        for name, (shape, _) in params.items()
        for state in ("adam_m", "adam_v")
    }
    return {**params, **states}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A complete checkpoint, and what the compiler's strategy makes of it."""
    where = tmp_path_factory.mktemp("llama")
    extras = {"global_step": ("Int32", np.array([7], "<u4"))}
    reference.write_checkpoint(where / "full", None, llama(), extras)
    (where / "full/rank_0/checkpoint_0.ckpt").rename(where / "full.ckpt")
    rankxform.transform(where / "full.ckpt", where / "compiled", None, COMPILED_FILE, fsync=False)
    return where


def differing(a, b):
    names = sorted(p.relative_to(a) for p in Path(a).rglob("*.ckpt"))
    assert names
    return [str(n) for n in names if not filecmp.cmp(a / n, b / n, shallow=False)]


def test_a_complete_checkpoint_needs_no_strategy_file(full, tmp_path):
    done = rankxform.transform(
        full / "full.ckpt", tmp_path / "dst", dst_parallel=SIZES, fsync=False, **DERIVED
    )
    assert differing(full / "compiled", tmp_path / "dst") == []
    assert done.strategy == str(tmp_path / "dst_strategy.ckpt")
    assert {role["optimizer"] for role in done.derivation["roles"]} == {"yes", "no"}
    assert main(["strategy", "diff", done.strategy, str(COMPILED_FILE)]) == 0
    again = rankxform.transform(
        full / "full.ckpt", tmp_path / "dst", dst_parallel=SIZES, fsync=False, **DERIVED
    )
    assert again.files_kept == 16
    manifest = json.loads((tmp_path / "dst" / "rankxform.json").read_text())
    assert manifest["verify"][:2] == ["--dst-strategy", done.strategy]
    assert rankxform.verify(full / "full.ckpt", tmp_path / "dst", None, done.strategy).same


def test_a_configuration_alone_says_everything(full, tmp_path, monkeypatch, capfd):
    (tmp_path / "full.ckpt").symlink_to(full / "full.ckpt")
    (tmp_path / "train.yaml").write_text(CONFIG)
    predict = CONFIG.replace("finetune", "predict").replace("full.ckpt", "output/made")
    predict = predict.replace("*dp", "1").replace("pipeline_stage: 2", "pipeline_stage: 1")
    predict += "src_strategy_path_or_dir: output/made_strategy.ckpt\n"
    (tmp_path / "predict.yaml").write_text(predict)
    monkeypatch.chdir(tmp_path)
    given = ["transform", "--dst-config", "train.yaml", "--preset", "llama_legacy", "--no-fsync"]
    assert main(given) == 0
    made = Path("output/transformed_checkpoint")
    assert differing(full / "compiled", made) == []
    assert "model.layers.*.attention.wq.weight (40)" in capfd.readouterr().out
    made.rename("output/made")
    Path("output/transformed_checkpoint_strategy.ckpt").rename("output/made_strategy.ckpt")
    given += ["--src-config", "train.yaml"]
    given[given.index("train.yaml")] = "predict.yaml"
    assert main(given) == 0
    params = {n: facts for n, facts in llama().items() if not n.startswith("adam")}
    stages = [
        {n: (list(one.device_matrix), one.printable_map, 0, 0) for n, one in layouts.items()}
        for layouts in strategy_of("output/transformed_checkpoint_strategy.ckpt").stages
    ]
    assert [len(some) for some in stages] == [len(params)]
    assert reference.wrong_slices(made, stages, params) == []


def strategy_of(path):
    from rankxform.storage import user_files

    return user_files.load_strategy(str(path))


def test_a_threshold_that_nothing_states_for_the_destination_is_the_sources(full, tmp_path):
    """Slices of two jobs with a threshold of 4 KiB, of which the user says it once."""
    options = {"fsync": False, "preset": "llama_legacy", "optimizer_shard": "on"}
    there = {"dst_parallel": SIZES, "threshold": 4}
    rankxform.transform(full / "full.ckpt", tmp_path / "src", **there, **options)
    src = (tmp_path / "src", tmp_path / "src_strategy.ckpt")
    job = {**options, "src_parallel": SIZES, "dst_parallel": SIZES.replace("pp=2", "pp=1")}
    with pytest.raises(DerivationError) as refusal:
        rankxform.transform(src[0], tmp_path / "no", src[1], **job)
    key = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
    assert all(text in str(refusal.value) for text in ("--src-threshold", "--threshold", key))
    rankxform.transform(src[0], tmp_path / "both", src[1], src_threshold=4, threshold=4, **job)
    done = rankxform.transform(src[0], tmp_path / "one", src[1], src_threshold=4, **job)
    assert differing(tmp_path / "both", tmp_path / "one") == []
    said = "of 4 KiB or more, as in the source: --threshold states another"
    assert any(said in text for text in done.derivation["assumptions"])
    config = tmp_path / "dst.yaml"
    silent = CONFIG.replace("pipeline_stage: 2", "pipeline_stage: 1")
    silent = silent.replace("    parallel_optimizer_threshold: 0\n", "").replace(
        "  parallel_optimizer_config:\n", ""
    )
    config.write_text(silent)
    by_config = {**job, "dst_parallel": None, "optimizer_shard": None, "dst_config": str(config)}
    rankxform.transform(src[0], tmp_path / "yaml", src[1], src_threshold=4, **by_config)
    assert differing(tmp_path / "both", tmp_path / "yaml") == []
    stated = CONFIG.replace("threshold: 0", "threshold: 24")
    config.write_text(stated.replace("pipeline_stage: 2", "pipeline_stage: 1"))
    rankxform.transform(src[0], tmp_path / "stated", src[1], src_threshold=4, **by_config)
    assert differing(tmp_path / "both", tmp_path / "stated")


def test_load_and_plan_derive_too(full, tmp_path):
    whole = rankxform.load(
        full / "full.ckpt", dst_parallel=SIZES, rank=11, include="layers.39", **DERIVED
    )
    compiled = rankxform.load(full / "full.ckpt", None, COMPILED_FILE, rank=11, include="layers.39")
    assert list(whole) == list(compiled)
    assert all((whole[name] == compiled[name]).all() for name in whole)
    plan = rankxform.plan(full / "full.ckpt", dst_parallel=SIZES, **DERIVED)
    assert plan.dst_ranks == 16
    assert plan.derivation["stage_parameters"] == [724, 728]


def test_a_replicated_vocabulary_stays_so_by_way_of_a_job_without_tensor_parallel(tmp_path):
    names = [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
    ]
    params = dict.fromkeys(names, ((48, 16), "Float32"))
    src = reference.write_checkpoint(tmp_path / "src", None, params)
    one_part, parts = (f"{sizes},vocab_emb_dp=true" for sizes in ("dp=2,mp=1", "dp=1,mp=2"))
    one = rankxform.transform(
        src, tmp_path / "one", dst_parallel=one_part, preset="llama", unproven=True
    )
    options = {"src_parallel": one_part, "dst_parallel": parts, "optimizer_shard": "off"}
    two = rankxform.transform(tmp_path / "one", tmp_path / "two", one.strategy, **options)
    layouts = strategy_of(two.strategy).stages[0]
    assert [layouts[name].counts for name in names] == [(1, 1), (2, 1)]


def test_a_strategy_beside_the_destination_is_never_lost(full, tmp_path):
    beside = tmp_path / "dst_strategy.ckpt"
    beside.write_bytes(COMPILED_FILE.read_bytes())
    call = lambda **more: rankxform.transform(  # noqa: E731
        full / "full.ckpt", tmp_path / "dst", dst_parallel=SIZES, fsync=False,
        include="norm", **DERIVED, **more,
    )  # fmt: skip
    for more in ({}, {"overwrite": True}):
        with pytest.raises(StorageError, match="dst_strategy"):
            call(**more)
        assert beside.read_bytes() == COMPILED_FILE.read_bytes()
        assert not (tmp_path / "dst" / "rank_0").exists()
    beside.unlink()
    rankxform.derive(dst=SIZES, shapes=full / "full.ckpt", predict=True, preset="llama_legacy",
                     output=beside)  # fmt: skip
    with pytest.raises(StorageError, match="--overwrite"):
        call()
    call(overwrite=True)
    assert len(strategy_of(beside).stages[1]) == 728


def test_the_sources_strategy_is_not_replaced(tmp_path):
    params = {"w": ((8, 6), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", [{"w": ([4], [0, -1], 0, 0)}], params)
    rows = rankxform.derive(
        reference.write_strategy(tmp_path / "a.ckpt", [{"w": ([4], [0, -1], 0, 0)}]),
        dst="same", output=tmp_path / "dst_strategy.ckpt",
    )  # fmt: skip
    assert rows.strategy.derived
    with pytest.raises(StorageError, match="is the source's strategy"):
        rankxform.transform(
            src, tmp_path / "dst", tmp_path / "dst_strategy.ckpt", src_parallel="dp=1,mp=4",
            dst_parallel="dp=1,mp=2", overwrite=True,
        )  # fmt: skip
    assert strategy_of(tmp_path / "dst_strategy.ckpt").ranks == 4
    assert not list(tmp_path.glob("dst/rank_*"))


PARAMS = {"w": ((8, 8), "Float32")}
ROWS = [{"w": ([4], [0, -1], 0, 0)}]


class TestBeside:
    """What lies beside a destination describes it, whatever happens."""

    @pytest.fixture
    def place(self, tmp_path):
        reference.write_checkpoint(tmp_path / "src", ROWS, PARAMS)
        reference.write_strategy(tmp_path / "a.ckpt", ROWS)
        reference.write_strategy(tmp_path / "b.ckpt", [{"w": ([2], [-1, 0], 0, 0)}])
        self.derived(tmp_path, 2)
        return tmp_path

    def derived(self, place, mp, **more):
        return rankxform.transform(
            place / "src", place / "dst", place / "a.ckpt", src_parallel="dp=1,mp=4",
            dst_parallel=f"dp=1,mp={mp}", fsync=False, **more,
        )  # fmt: skip

    def test_a_failed_run_leaves_the_strategy_of_what_is_there(self, place, monkeypatch):
        def fail(*args, **more):
            raise StorageError("no space")

        monkeypatch.setattr("rankxform.target.folder.write_parts", fail)
        with pytest.raises(StorageError, match="no space"):
            self.derived(place, 4, overwrite=True)
        assert strategy_of(place / "dst_strategy.ckpt").ranks == 2
        assert reference.wrong_slices(place / "dst", [{"w": ([2], [0, -1], 0, 0)}], PARAMS) == []

    def test_another_strategy_that_is_given_does_not_leave_it(self, place):
        given = place / "src", place / "dst", place / "a.ckpt", place / "b.ckpt"
        with pytest.raises(StorageError):
            rankxform.transform(*given, fsync=False)
        rankxform.transform(*given, fsync=False, overwrite=True)
        assert not (place / "dst_strategy.ckpt").exists()
        assert rankxform.verify(*given).same

    def test_the_same_one_that_is_given_stays(self, place):
        kept = place / "dst_strategy.ckpt"
        rankxform.transform(place / "src", place / "dst", place / "a.ckpt", kept, fsync=False)
        assert kept.exists()

    def test_a_copy_of_it_in_another_form_does_too(self, place):
        kept = place / "dst_strategy.ckpt"
        for name in ("copy.json", "copy"):
            assert main(["strategy", "convert", str(kept), str(place / name)]) == 0
            given = place / "src", place / "dst", place / "a.ckpt", place / name
            rankxform.transform(*given, fsync=False)
            assert kept.exists()

    def test_a_name_that_is_nearly_too_long_needs_nothing_beside_it(self, place):
        long = place / ("d" * 245)
        rankxform.transform(place / "src", long, place / "a.ckpt", place / "b.ckpt", fsync=False)
        assert (long / "rankxform.json").exists()

    def test_a_file_of_another_kind_is_nobodys_to_replace(self, place):
        kept = place / "dst_strategy.ckpt"
        kept.write_bytes(b"mine")
        shutil.rmtree(place / "dst")
        for more in ({}, {"overwrite": True}):
            with pytest.raises(StorageError, match="move it away"):
                self.derived(place, 4, **more)
        assert kept.read_bytes() == b"mine"


def test_what_no_file_holds_is_left_out_and_said(tmp_path):
    """A parameter that the source lists and did not save needs no shape."""
    stages = [{"a.w": ([4], [0, -1], 0, 0), "b.frozen": ([4], [0, -1], 0, 0)}]
    params = {"a.w": ((8, 8), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", stages, params)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    with pytest.warns(rankxform.RankxformWarning, match="no file holds b.frozen"):
        done = rankxform.transform(src, tmp_path / "dst", strategy, src_parallel="dp=1,mp=4",
                               dst_parallel="dp=2,mp=2", optimizer_shard="on", opt_on="w",
                               fsync=False, accept="absent:frozen")  # fmt: skip
    assert done.accepted == ("absent:frozen",)
    assert "b.frozen" in done.derivation["assumptions"][-1]
    assert list(strategy_of(done.strategy).stages[0]) == ["a.w"]


@pytest.mark.parametrize("dst", ["dp=1,mp=1", "same,pp=1"])
def test_a_missing_pipeline_stage_is_an_error(tmp_path, dst):
    stages = [{"h.0.w": ([2], [0, -1], 0, 0)}, {"h.1.w": ([2], [0, -1], 0, 0)}]
    params = {name: ((8, 8), "Float32") for some in stages for name in some}
    src = reference.write_checkpoint(tmp_path / "src", stages, params)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    for rank in (2, 3):
        shutil.rmtree(tmp_path / f"src/rank_{rank}")
    more = {"dst_parallel": dst, "fsync": False}
    if dst != "same,pp=1":
        more["src_parallel"] = "dp=1,mp=2,pp=2"
    with pytest.raises(rankxform.CheckpointError, match=r"stage 1 .*ranks 2-3"):
        rankxform.transform(src, tmp_path / "dst", strategy, **more)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"dst_parallel": "same", "preset": "llama_legacy"},
            "changes nothing with --dst-parallel same",
        ),
        (
            {"dst_parallel": "same", "layers_per_stage": (1,)},
            "changes nothing with --dst-parallel same",
        ),
        ({"dst_parallel": "same"}, "there is no source strategy whose mesh"),
        ({"dst_parallel": "same", "rule": "w=(tp,)"}, "changes nothing with --dst-parallel same"),
        ({"dst_parallel": "same", "threshold": 1}, "changes nothing with --dst-parallel same"),
        ({"dst_parallel": "same,vocab_emb_dp=true"}, "only pp may change"),
        ({"dst_parallel": "dp=2", "optimizer_shard": "1"}, "from 2 on"),
        ({"preset": "llama_legacy"}, "--preset is for --dst-parallel"),
        ({"opt_on": "w"}, "--opt-on is for --dst-parallel"),
        ({"dst_parallel": "dp=2", "dst_strategy": COMPILED_FILE}, "leave one out"),
        ({"dst_parallel": "dp=2", "dst_config": "x.yaml"}, "give one of them"),
        ({"dst_config": "/no/such.yaml"}, "no such configuration file"),
        ({"dst_parallel": "dp=2", "preset": "qwen3"}, "--unproven"),
        ({"dst_parallel": "dp=2", "optimizer_shard": "maybe"}, "on, off, or a number"),
        ({"dst_parallel": "same,dp=2"}, "only pp may change"),
        ({"dst_parallel": "dp=2", "threshold": "many"}, "expected a number"),
        ({"dst_parallel": "dp=2", "unsharded": "dp"}, "expected cp"),
    ],
)
def test_options_that_cannot_be_meant(full, tmp_path, options, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        rankxform.transform(full / "full.ckpt", tmp_path / "dst", **options)
    assert not (tmp_path / "dst").exists()


def test_two_statements_of_the_layers_of_a_stage(full, tmp_path):
    (tmp_path / "own.toml").write_text("[preset]\nextends = 'llama_legacy'\noffset = [1, 0]\n")
    options = {"preset": str(tmp_path / "own.toml"), "layers_per_stage": (20, 20)}
    with pytest.raises(UsageError, match="goes without offset and interleave in .*own.toml"):
        rankxform.transform(full / "full.ckpt", tmp_path / "dst", dst_parallel="pp=2", **options)


def test_what_is_not_known_is_refused_at_once_and_in_whole(full, tmp_path, capfd):
    words = ["transform", str(full / "full.ckpt"), str(tmp_path / "dst"), "--dst-parallel"]
    assert main([*words, "dp=2,mp=4,pp=2", "--preset", "llama_legacy"]) == 3
    error = capfd.readouterr().err
    assert "for 1 reason" in error
    assert "vocab_emb_dp=true" in error
    assert "lm_head.weight, model.tok_embeddings.embedding_weight" in error
    assert main([*words, "dp=2,mp=4,pp=3,vocab_emb_dp=true", "--preset", "llama_legacy"]) == 3
    assert "40 layers do not spread over 3 stages" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


class TestConfigurations:
    def parse(self, text):
        from rankxform.derivation.inputs import parse_job_config

        return parse_job_config(text.encode(), "job.yaml")

    def test_what_is_read(self):
        found = self.parse(CONFIG)
        assert str(found.parallel) == "dp=2,mp=4,pp=2"
        assert (found.parallel.optimizer_shard, found.parallel.threshold) == (True, 0)
        assert (found.load_checkpoint, found.auto_trans, found.predict) == (
            "full.ckpt",
            True,
            False,
        )
        more = CONFIG.replace("threshold: 0", "threshold: 0\n    optimizer_weight_shard_size: 2")
        more = more.replace(
            "parallel_mode: 1", "parallel_mode: 1\n  pipeline_config: {pipeline_interleave: True}"
        )
        more += "model:\n  model_config:\n    offset: [[1, 0], [0, 1]]\n    pp_interleave_num: 2\n"
        found = self.parse(more.replace("finetune", "predict"))
        assert found.parallel.optimizer_shard == 2
        assert (found.offset, found.interleave, found.predict) == ((1, 0, 0, 1), 2, True)
        found = self.parse(more.replace("pipeline_interleave: True", "pipeline_interleave: False"))
        assert found.interleave == 1
        one = self.parse(
            CONFIG.replace("threshold: 0", "threshold: 0\n    optimizer_weight_shard_size: 1")
        )
        assert one.parallel.optimizer_shard is True  # MindSpore ignores 1
        top = self.parse(CONFIG.replace("parallel_mode: 1", "optimizer_weight_shard_size: 4"))
        assert top.parallel.optimizer_shard == 4
        alone = self.parse(CONFIG.replace("use_parallel: True", "use_parallel: False"))
        assert alone.parallel.ranks == 1

    @pytest.mark.parametrize(
        ("before", "after", "text"),
        [
            ("parallel_mode: 1", "parallel_mode: 2", "parallel_mode is 2"),
            ("vocab_emb_dp: True", "expert_model_parallel: 2", "expert_model_parallel is 2"),
            ("enable_parallel_optimizer: True", "enable_parallel_optimizer: 3", "True or False"),
            ("model_parallel: 4", "model_parallel: four", "expected a number"),
            ("vocab_emb_dp: True", "tensor_model_parallel_size: 2", "model_parallel is 4"),
            ("parallel_config:", "sizes:", "no parallel_config"),
            ("run_mode: 'finetune'", "run_mode: [", "not YAML"),
            ("use_parallel: True", "model: {model_config: {offset: 2}}", "offset is 2"),
            ("enable_parallel_optimizer: True", "x: 1", "no optimizer"),
            ("model_parallel: 4", "model_paralell: 4", "parallel_config.model_paralell is no key"),
            ("vocab_emb_dp: True", "pipeline_stages: 2", "pipeline_stage: 2, if that was meant"),
            ("use_parallel: True", "x: !!timestamp x", "not YAML"),
            ("use_parallel: True", "x: !!bool x", "not YAML"),
            ("use_parallel: True", "model: {model_config: {pp_interleave_num: 0}}", "1 to 1,024"),
            ("use_parallel: True", "model: {model_config: {offset: [[[1]]]}}", "list of numbers"),
        ],
    )
    def test_what_would_be_a_strategy_of_another_kind(self, before, after, text):
        config = CONFIG.replace(before, after)
        if text == "no optimizer":
            config += "  optimizer_shard: True\n"
            text = "make them agree"
        with pytest.raises(UsageError, match=re.escape(text)):
            self.parse(config)


class TestVerb:
    """`strategy` and its actions, as they are typed."""

    llama = next(one for one in COMPILED if str(one) == "llama2_7b:dp2mp4_opt").files[0]

    def run(self, capfd, *words, code=0):
        assert main(["strategy", *map(str, words)]) == code
        out, error = capfd.readouterr()
        return out if code in (0, 6) else error

    def test_show(self, capfd):
        text = self.run(capfd, "show", self.llama)
        assert "291 parameters, 582 optimizer states" in text
        assert "axis 0 into 8 (4 x 2 by the optimizer), 1 copy" in text
        assert json.loads(self.run(capfd, "show", self.llama, "--json"))["ranks"] == 8
        assert "no parameter" in self.run(capfd, "show", "none", code=2)

    def test_explain(self, capfd):
        text = self.run(capfd, "explain", self.llama, "--src-parallel", "dp=2,mp=4")
        assert "tuple(None, mp)" in text
        text = self.run(capfd, "explain", self.llama, "--src-parallel", "dp=4,mp=2", code=3)
        assert "fits no mesh of dp=4,mp=2" in text
        assert "--src-parallel" in self.run(capfd, "explain", self.llama, code=2)

    @pytest.mark.parametrize("form", ["one.ckpt", "stages", "one.json"])
    def test_a_strategy_keeps_its_meaning_in_every_form(self, capfd, tmp_path, form):
        source = (
            COMPILED_FILE if form != "stages" else REAL / "C_transformer/dp2mp2pp2_opt/strategy"
        )
        self.run(capfd, "convert", source, tmp_path / form)
        self.run(capfd, "convert", tmp_path / form, tmp_path / "back.ckpt")
        assert "the same" in self.run(capfd, "diff", tmp_path / "back.ckpt", source)
        assert strategy_of(tmp_path / "back.ckpt").stages == strategy_of(source).stages
        assert "already there" in self.run(capfd, "convert", source, tmp_path / "back.ckpt", code=4)

    def test_a_nested_map_in_json_needs_shapes(self, capfd, tmp_path):
        nested = REAL / "D_nested" / "n2"
        known = json.loads((nested / "shapes.json").read_text())["params"]
        shapes = {
            n: {"shape": one["full_shape"], "dtype": one["dtype"]} for n, one in known.items()
        }
        (tmp_path / "shapes.json").write_text(json.dumps(shapes))
        explain = [
            "explain",
            nested / "strategy/strategy_0.json",
            "--src-parallel",
            "dp=2,mp=2,cp=2",
        ]
        assert "nested tensor map" in self.run(capfd, *explain, code=3)
        words = ["convert", nested / "strategy/strategy_0.json", tmp_path / "out.ckpt"]
        assert "nested tensor map" in self.run(capfd, *words, code=3)
        self.run(capfd, *words, "--shapes", tmp_path / "shapes.json")
        assert (
            strategy_of(tmp_path / "out.ckpt").stages
            == strategy_of(nested / "strategy/strategy_0.ckpt").stages
        )
        words = ["convert", nested / "strategy/strategy_0.ckpt", tmp_path / "out.json"]
        assert "JSON has no nested" in self.run(capfd, *words, code=3)
        assert not (tmp_path / "out.json").exists()

    def test_diff_in_words(self, capfd):
        other = MODELS / "llama2_7b" / "src_dp8mp1pp1_opt.ckpt"
        text = self.run(capfd, "diff", self.llama, other, code=6)
        assert "axis 0 into 8 (4 x 2 by the optimizer), 1 copy; in the second other ranks" in text
        assert "axis 0 into 2 by the optimizer and axis 1 into 4, 1 copy" in text
        found = json.loads(self.run(capfd, "diff", self.llama, other, "--json", code=6))
        assert not found["same"]
        text = self.run(capfd, "diff", self.llama, COMPILED_FILE, code=6)
        assert "the first is of 8 ranks, the second of 2 stages of 8 ranks" in text

    def test_derive(self, capfd, tmp_path):
        shapes = tmp_path / "shapes.json"
        shapes.write_text(
            json.dumps({n: {"shape": s, "dtype": t} for n, (s, t) in llama().items()})
        )
        words = ["derive", "--shapes", shapes, "--preset", "llama_legacy", "--dst-parallel", SIZES,
                 "--optimizer-shard", "on", "--threshold", "0"]  # fmt: skip
        text = self.run(capfd, *words, "-o", tmp_path / "a.ckpt")
        assert "1: 182 parameters: model.layers.20-39, model.norm_out.weight" in text
        assert "if the network's shard() calls do not change" in text
        facts = json.loads(self.run(capfd, *words, "-o", tmp_path / "folder", "--json"))
        assert [Path(file).name for file in facts["files"]] == [
            "ckpt_strategy_rank_0.ckpt", "ckpt_strategy_rank_8.ckpt"
        ]  # fmt: skip
        for one in ("a.ckpt", "folder"):
            self.run(capfd, "diff", tmp_path / one, COMPILED_FILE)
            assert "derived by rankxform" in self.run(capfd, "show", tmp_path / one)
        assert "already there" in self.run(capfd, *words, "-o", tmp_path / "a.ckpt", code=4)
        assert "--dst-parallel" in self.run(capfd, *words[:5], "-o", tmp_path / "b", code=2)
        assert "try  --from STRATEGY" in self.run(
            capfd, "derive", "--dst-parallel", "dp=2", "-o", tmp_path / "b", code=2
        )

    def test_diff_knows_uneven_rows(self, capfd, tmp_path):
        for name, rows in (("a", [1, 2, 3, 4]), ("b", [4, 3, 2, 1])):
            layout = ([4], [0, -1], 0, 0, rows)
            reference.write_strategy(tmp_path / f"{name}.ckpt", [{"w": layout}])
        words = "diff", tmp_path / "a.ckpt"
        assert "the same" in self.run(capfd, *words, tmp_path / "a.ckpt")
        assert "DIFFERENT" in self.run(capfd, *words, tmp_path / "b.ckpt", code=6)

    def test_diff_knows_nested_maps_in_json(self, capfd, tmp_path):
        """It lists each of their axes as one of the tensor's."""
        layout = ("w", ([2, 2], [[1, 0], -1], 0, 0))
        (tmp_path / "a.ckpt").write_bytes(reference.proto_strategy([layout]))
        json_form = reference.json_strategy([layout], shapes={"w": (8, 6)})
        (tmp_path / "a.json").write_bytes(json_form)
        assert "the same" in self.run(capfd, "diff", tmp_path / "a.ckpt", tmp_path / "a.json")
        assert "the same" in self.run(capfd, "diff", tmp_path / "a.json", tmp_path / "a.ckpt")
        reference.write_strategy(tmp_path / "b.ckpt", [{"w": ([2, 2], [[0, 1], -1], 0, 0)}])
        words = "diff", tmp_path / "b.ckpt", tmp_path / "a.json"
        assert "DIFFERENT" in self.run(capfd, *words, code=6)

    def test_presets(self, capfd):
        assert "deepseek_v3" in self.run(capfd, "presets")
        assert "(None, mp)" in self.run(capfd, "presets", "llama_legacy")


class TestInterface:
    source = DERIVE / "dp8mp1.ckpt"

    def derive(self, rules, **more):
        shapes = json.loads((DERIVE / "dp8mp1.json").read_text())["shapes"]
        known = {n: {"shape": s} for n, s in shapes.items()}
        path = more.pop("tmp") / "shapes.json"
        path.write_text(json.dumps(known))
        return rankxform.derive(
            self.source, src=rankxform.Parallel(dp=8), shapes=path, rules=rules, **more
        )

    RULES = (
        (r"(q|fc1)\.weight|head|embed", ("tp", None)),
        (r"(q|fc1)\.bias", ["tp"]),
        (r"(proj|fc2)\.weight", "(None, tp)"),
        (r"gamma|bias", (None,)),
    )

    def test_rules_as_tuples_give_what_the_compiler_writes(self, tmp_path):
        found = self.derive(self.RULES, dst=rankxform.Parallel(dp=2, mp=4, optimizer_shard=False),
                            tmp=tmp_path)  # fmt: skip
        assert found.strategy.stages == strategy_of(DERIVE / "dp2mp4.ckpt").stages
        roles = {role.pattern: role for role in found.roles}
        assert roles["blocks.*.q.weight"].dst_layout == "[2, 4] [0, -1]"

    @pytest.mark.oracle
    def test_mindspores_layout_is_a_rule(self, tmp_path):
        parallel = pytest.importorskip("mindspore.parallel")
        layout = parallel.Layout((2, 1, 4), ("dp", "cp", "tp"))
        rules = {
            r"(q|fc1)\.weight|head|embed": layout("tp", "None"),
            r"(q|fc1)\.bias": layout("tp"),
            r"(proj|fc2)\.weight": layout("None", "tp"),
            r"gamma|bias": layout("None"),
        }
        found = self.derive(rules, dst=rankxform.Parallel(dp=2, mp=4, optimizer_shard=False),
                            tmp=tmp_path)  # fmt: skip
        assert found.strategy.stages[0]["head.weight"].device_matrix == (2, 1, 4)
        assert found.strategy.stages[0]["head.weight"].printable_map == [0, -1]

    def test_what_a_call_cannot_mean(self, tmp_path):
        sizes = rankxform.Parallel(dp=2, mp=4)
        with pytest.raises(DerivationError) as caught:
            self.derive((), dst=sizes, tmp=tmp_path)
        assert len(caught.value.reasons) == 2  # what mp shards, and the optimizer
        with pytest.raises(UsageError, match="none of the axes"):
            self.derive([("w", ("xp",))], dst=sizes, tmp=tmp_path)
        with pytest.raises(UsageError, match="unknown option"):
            self.derive((), dst=sizes, tmp=tmp_path, colour="red")
        for rules in ("abc", [("a",)], [(3, ("tp",))], 3):
            with pytest.raises(UsageError, match="a regular expression and a spec"):
                self.derive(rules, dst=sizes, tmp=tmp_path)
        with pytest.raises(UsageError, match="; --src-parallel"):
            rankxform.derive(self.source, dst=sizes)

    def test_a_preset_knows_the_stages_where_the_mesh_stays(self):
        source = MODELS / "llama2_7b" / "dst_dp2mp4pp1_opt.ckpt"
        found = rankxform.derive(source, dst="same,pp=2", preset="llama_legacy")
        assert [len(some) for some in found.strategy.stages] == [145 * 4, 146 * 4]

    def test_the_mesh_that_stays(self, tmp_path):
        """A network with rules of its own can still change its optimizer's shard."""
        where = TUTORIALS / "model_transformation"
        found = rankxform.derive(
            where / "dst_strategy.ckpt", dst="same", output=tmp_path / "s.ckpt"
        )
        assert found.strategy.stages == strategy_of(where / "dst_strategy.ckpt").stages
        assert strategy_of(tmp_path / "s.ckpt").derived


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rules]]\nnames = 'w'\nspec = '(xp,)'", "none of the axes"),
        ("[[rules]]\nnames = 'w'\nspec = 5", "expected a spec"),
        ("[[rules]]\nnames = 'w'\nspec = ['xp']", "none of the axes"),
        (
            "[[preset.requires]]\nfield = 'dp'\nvalue = true\nwhy = ''\n[[rules]]\nnames = 'w'",
            "requires",
        ),
        ("[[rules]]\nnames = 3", "names: expected a text"),
        ("[[rules]]\nnames = 'w'\ncolour = 'red'", "'colour' is none of"),
        ("[[rules]]\nnames = 'w'\nstage = 'middle'", "expected first or last"),
        ("[[rules]]\nnames = 'w'\nreplicated_if = ['never']", "expected vocab_emb_dp"),
        ("[preset]\nversion = '1'\n[[rules]]\nnames = 'w'", "preset, version"),
        ("[preset]\nversion = 1", "expected [[rules]]"),
        ("rules = 3", "rules: expected a list"),
        ("[other]", "'other' is none of preset, rules"),
        ("names = ", "not TOML"),
    ],
)
def test_a_rules_file_that_cannot_be_meant(tmp_path, text, message):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        rankxform.derive(dst="dp=2", shapes=tmp_path, preset=tmp_path / "own.toml")


def test_a_rules_file_of_ones_own(tmp_path):
    (tmp_path / "own.toml").write_text("[[rules]]\nnames = '^w'\nspec = '(tp, None)'\n")
    (tmp_path / "shapes.json").write_text('{"w0": {"shape": [8, 4]}, "w1": {"shape": [8, 4]}}')
    found = rankxform.derive(dst="dp=1,mp=4", shapes=tmp_path / "shapes.json", predict=True,
                             preset=tmp_path / "own.toml")  # fmt: skip
    assert [one.dst_layout for one in found.roles] == ["[4] [0, -1]", "[4] [0, -1]"]


def test_a_derived_strategy_gets_a_frameworks_names(tmp_path):
    params = dict.fromkeys(("w", "adam_m.w", "adam_v.w"), ((8, 4), "Float32"))
    four, two = ([dict.fromkeys(params, ([n], [0, -1], 0, 0))] for n in (4, 2))
    src = reference.write_checkpoint(tmp_path / "src", four, params)
    a = reference.write_strategy(tmp_path / "a.ckpt", four)
    b = reference.write_strategy(tmp_path / "b.ckpt", two)
    rankxform.transform(src, tmp_path / "given", a, b, names="torch")
    sizes = {"src_parallel": "dp=1,mp=4", "dst_parallel": "dp=1,mp=2"}
    rankxform.transform(src, tmp_path / "derived", a, names="torch", **sizes)
    for rank in range(2):
        given, derived = (
            tmp_path / kind / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
            for kind in ("given", "derived")
        )
        assert "model.w" in reference.read_ckpt(derived)
        assert given.read_bytes() == derived.read_bytes()
