"""A strategy that is lost is derived from the job's YAML, a preset, and the slices in the files."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform import RankxformError, UsageError
from rankxform.cli.main import main
from rankxform.layout.layout import same_boxes
from rankxform.layout.states import NEVER_SAVED
from rankxform.request import Request
from rankxform.storage import user_files
from rankxform.transport import SerialTeam
from rankxform.verbs.launch import launch
from tests import reference
from tests.derivation.test_inputs import COMPILED_FILE, CONFIG, full, llama

__all__ = ["full"]

PRESET = {"preset": "llama_legacy", "fsync": False}


def yaml(dp, mp, pp, opt=True, threshold=0, vocabulary=True):
    return f"""\
use_parallel: True
parallel:
  enable_parallel_optimizer: {opt}
  parallel_optimizer_config:
    parallel_optimizer_threshold: {threshold}
parallel_config:
  data_parallel: {dp}
  model_parallel: {mp}
  pipeline_stage: {pp}
  vocab_emb_dp: {vocabulary}
"""


@pytest.fixture
def config(tmp_path):
    def write(*sizes, name="train.yaml", **more):
        (tmp_path / name).write_text(yaml(*sizes, **more))
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Four of its layers, whole."""
    where = tmp_path_factory.mktemp("small")
    layer = re.compile(r"layers\.(\d+)\.")
    params = {
        name: one
        for name, one in llama().items()
        if not (found := layer.search(name)) or int(found[1]) < 4
    }
    reference.write_checkpoint(where, None, params)
    return where / "rank_0/checkpoint_0.ckpt"


def unmarked(folder):
    """Take away what rankxform itself says of a folder, so that it is one of training."""
    (folder / "rankxform.json").unlink()
    shutil.rmtree(folder / ".rankxform", ignore_errors=True)
    for path in folder.parent.glob(f"{folder.name}_strategy*"):
        path.unlink()
    return folder


def saved(strategy):
    return [
        {n: one for n, one in some.items() if not n.startswith(f"{NEVER_SAVED}.")}
        for some in strategy.stages
    ]


def test_the_compilers_own_strategy_is_found(full, tmp_path):
    """Of 16 ranks of dp 2, mp 4, pp 2, with an optimizer shard: all slices are the same."""
    (tmp_path / "train.yaml").write_text(CONFIG)
    src = tmp_path / "src"
    shutil.copytree(full / "compiled", src)
    unmarked(src)
    words = [
        "strategy",
        "derive",
        "--shapes",
        str(src),
        "--dst-config",
        str(tmp_path / "train.yaml"),
    ]
    assert main([*words, "--preset", "llama_legacy", "-o", str(tmp_path / "s.ckpt")]) == 0
    found, compiled = (
        user_files.load_strategy(str(tmp_path / "s.ckpt")),
        user_files.load_strategy(str(COMPILED_FILE)),
    )
    for own, theirs in zip(saved(found), saved(compiled), strict=True):
        own = {n: one for n, one in own.items() if n in theirs}
        assert len(own) > 100
        assert all(same_boxes(one, theirs[name]) for name, one in own.items())
    rankxform.transform(src, tmp_path / "dst", src_config=str(tmp_path / "train.yaml"), **PRESET)
    params = llama()
    assert reference.wrong_slices(tmp_path / "dst", None, params, ranks=[0]) == []


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ((2, 4, 2), {}),
        ((4, 2, 1), {"vocabulary": False}),
        ((2, 2, 2), {"threshold": 16}),
        ((8, 1, 1), {"threshold": 24}),
        ((1, 4, 2), {"opt": False}),
        ((4, 1, 1), {"opt": False}),
    ],
)
def test_there_and_back(sizes, more, small, config, tmp_path):
    """With and without the optimizer's shard, also of a threshold that some are below."""
    train = config(*sizes, **more)
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=train, **PRESET)
    made = next(src.parent.glob("src_strategy*"))
    strategy = user_files.load_strategy(str(made))
    unmarked(src)
    with pytest.raises(rankxform.UsageError) as caught:
        rankxform.transform(src, tmp_path / "no")
    assert any(one.startswith("--src-config FILE") for one in caught.value.parts.tries)
    fine = config(1, 2, 1, name="fine.yaml")
    known = {"src_config": train, **PRESET}
    if more.get("threshold"):  # keys' heads may be repeated: equal bytes need not be replicas
        with pytest.raises(rankxform.DerivationError, match=r"attention\.w[kv].* cannot be told"):
            rankxform.transform(src, tmp_path / "no", **known)
        key = next(some["model.layers.0.attention.wk.weight"] for some in strategy.stages)
        known["opt_on" if key.opt_shards > 1 else "opt_off"] = [r"attention\.w[kv]"]
    report = rankxform.transform(src, tmp_path / "dst", dst_config=fine, **known)
    assert report.src_ranks == strategy.ranks
    rankxform.transform(small, tmp_path / "direct", dst_config=fine, **PRESET)
    verdict = rankxform.verify(
        src, tmp_path / "direct", dst_strategy=str(tmp_path / "direct_strategy.ckpt"), **known
    )
    assert verdict.same and verdict.bytes_compared > 100_000
    for rank in range(2):
        names = [f"{folder}/rank_{rank}/checkpoint_{rank}.ckpt" for folder in ("dst", "direct")]
        assert Path(tmp_path / names[0]).stat().st_size == Path(tmp_path / names[1]).stat().st_size


def test_sizes_of_another_job_are_refused(small, config, tmp_path):
    """Whatever other sizes make as many ranks: the slices make no network, or are equal."""
    src = tmp_path / "src"
    true = (2, 4, 2)
    rankxform.transform(small, src, dst_config=config(*true), **PRESET)
    strategy = user_files.load_strategy(str(next(src.parent.glob("src_strategy*"))))
    unmarked(src)
    tried = 0
    for sizes in itertools.product((1, 2, 4, 8, 16), repeat=3):
        if sizes[0] * sizes[1] * sizes[2] != 16 or sizes == true or sizes[2] > 2:
            continue
        tried += 1
        wrong = config(*sizes, name="wrong.yaml")
        with pytest.raises(rankxform.RankxformError):
            rankxform.transform(src, tmp_path / "no", src_config=wrong, **PRESET)
        assert not (tmp_path / "no").exists()
    assert tried > 5 and strategy.ranks == 16


def test_other_numbers_of_ranks(small, config, tmp_path):
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=config(2, 2, 1), **PRESET)
    unmarked(src)
    with pytest.raises(rankxform.UsageError, match="holds the files of 4 ranks, and .* makes 8"):
        rankxform.transform(src, tmp_path / "no", src_config=config(2, 4, 1), **PRESET)
    with pytest.raises(rankxform.DerivationError, match="Give --preset"):
        rankxform.transform(src, tmp_path / "no", src_config=config(2, 2, 1), fsync=False)
    with pytest.raises(rankxform.UsageError, match="--src-config is for --dst-parallel"):
        rankxform.transform(small, tmp_path / "no", src_config=config(2, 2, 1), fsync=False)


def test_the_command_that_is_printed_compares(small, config, tmp_path, capsys):
    src = tmp_path / "src"
    train = config(2, 2, 1)
    rankxform.transform(small, src, dst_config=train, **PRESET)
    unmarked(src)
    words = ["transform", str(src), str(tmp_path / "dst"), "--src-config", train]
    assert main([*words, "--preset", "llama_legacy", "--no-fsync"]) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if "rankxform verify" in one)
    assert main(line.split("rankxform ")[1].split()) == 0
    assert "every byte compared" in capsys.readouterr().out


@pytest.mark.parametrize("more", [{"opt": False}, {}])
def test_tensor_parallel_ranks_are_not_taken_for_data_parallel_ones(more, small, config, tmp_path):
    """Whatever is replicated holds the same bytes, and the rest would have to."""
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=config(1, 8, 1, **more), **PRESET)
    unmarked(src)
    for sizes in ((8, 1, 1), (2, 4, 1), (4, 2, 1)):
        wrong = config(*sizes, name="wrong.yaml", opt=False)
        with pytest.raises(rankxform.RankxformError):
            rankxform.transform(src, tmp_path / "no", src_config=wrong, **PRESET)
    assert not (tmp_path / "no").exists()


def test_a_job_of_other_stages_ends_in_a_message(small, config, tmp_path):
    """A rank's file lacks what the YAML says that it has."""
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=config(1, 4, 2, opt=False), **PRESET)
    unmarked(src)
    wrong = config(2, 4, 1, name="wrong.yaml", threshold=16)
    with pytest.raises(rankxform.RankxformError) as caught:
        rankxform.transform(src, tmp_path / "no", src_config=wrong, **PRESET)
    assert caught.value.exit_code in (2, 3)
    shutil.rmtree(src / "rank_5")
    with pytest.raises(rankxform.CheckpointError, match="rank 5 has no file"):
        rankxform.transform(src, tmp_path / "no", src_config=config(1, 4, 2, opt=False), **PRESET)
    with pytest.raises(rankxform.UsageError, match="no such checkpoint"):
        rankxform.transform(tmp_path / "none", tmp_path / "no", src_config=wrong, **PRESET)


def test_repeated_heads_of_keys_are_not_taken_for_the_optimizers_slices(config, tmp_path):
    """Equal bytes are replicas, or heads that are repeated: the threshold of the YAML is a lie."""

    def make(name, shape, dtype):
        full = reference.full_tensor(name, shape, dtype)
        if re.search(r"attention\.w[kv]", name):
            full[:] = np.tile(full[: shape[0] // 8], (8, 1))
        return full

    layers = {n: one for n, one in llama().items() if not re.search(r"layers\.([4-9]|\d\d)\.", n)}
    reference.write_checkpoint(tmp_path / "full", None, layers, make=make)
    whole, src = tmp_path / "full/rank_0/checkpoint_0.ckpt", tmp_path / "src"
    rankxform.transform(whole, src, dst_config=config(4, 2, 1, threshold=16), **PRESET)
    unmarked(src)
    lie = config(4, 2, 1, threshold=0, name="lie.yaml")
    with pytest.raises(rankxform.RankxformError) as caught:
        rankxform.transform(src, tmp_path / "no", src_config=lie, **PRESET)
    assert "attention.w" in str(caught.value)
    true = {"src_config": config(4, 2, 1, threshold=16), **PRESET}
    with pytest.raises(rankxform.DerivationError, match=r"attention\.w[kv].* cannot be told"):
        rankxform.transform(src, tmp_path / "no", **true)
    rankxform.transform(src, tmp_path / "dst", opt_off=[r"attention\.w[kv]"], **true)
    assert reference.wrong_slices(tmp_path / "dst", None, layers, make=make) == []


@pytest.mark.parametrize(
    ("true", "wrong", "text"),
    [
        ((4, 1, 2), (8, 1, 1), r"ranks 0 and 7 do not both hold .* makes them one pipeline stage"),
        ((2, 2, 2), (4, 2, 1), r"ranks 0 and 7 do not both hold .* makes them one pipeline stage"),
        ((8, 1, 1), (4, 1, 2), r"ranks 0 and 4 hold the same parameters, .* two pipeline stages"),
    ],
)
def test_stages_that_the_configuration_does_not_say(true, wrong, text, small, config, tmp_path):
    """Layers of the other stages would be taken for tensors that no strategy shards."""
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=config(*true, opt=False), **PRESET)
    unmarked(src)
    lie = config(*wrong, name="wrong.yaml", opt=False)
    for options in ({}, {"unlisted": "take-one"}):
        with pytest.raises(UsageError, match=text):
            rankxform.transform(src, tmp_path / "no", src_config=lie, **options, **PRESET)
    assert not (tmp_path / "no").exists()


def test_launch_derives_both_strategies(small, config, tmp_path):
    src, train = tmp_path / "src", config(2, 2, 1)
    rankxform.transform(small, src, dst_config=train, **PRESET)
    unmarked(src)
    next_job = config(1, 2, 1, name="next.yaml", opt=False)
    request = Request(str(src), None, src_config=train, dst_config=next_job, **PRESET)
    report, _ = launch(request, tmp_path / "out", SerialTeam())
    assert len(report.files) == 2
    dst, out = tmp_path / "dst", tmp_path / "out/transformed_checkpoint"
    rankxform.transform(src, dst, src_config=train, dst_config=next_job, **PRESET)
    for rank in range(2):
        files = (next((folder / f"rank_{rank}").glob("*")) for folder in (dst, out))
        assert len({path.read_bytes() for path in files}) == 1


@pytest.mark.parametrize(
    ("usual", "misspelt", "text"),
    [
        ("enable_parallel_optimizer", "enable_parallel_optimiser", r"parallel\.enable_parallel_"),
        ("\nparallel:", "\nparallell:", "parallell is no key of MindFormers"),
        ("use_parallel: True", "use_paralel: False", "use_paralel is no key of MindFormers"),
        ("use_parallel: True", "use_parallel: 'False'", "use_parallel"),
        ("parallel_config:", "parallel_config:\n  vocab_emp_dp: False", "vocab_emb_dp: False, if"),
        ("parallel_config:", "parallel_config:\n  use_seq_paralel: True", "use_seq_parallel: True"),
        ("parallel_optimizer_threshold", "parallel_optimizer_threshhold", "no key of MindFormers"),
        ("use_parallel: True", "use_parallel: True\nrun_mode: pedict", "did you mean predict"),
    ],
)
def test_a_misspelt_key_of_any_table(usual, misspelt, text, small, config, tmp_path):
    path = Path(config(2, 2, 1))
    path.write_text(path.read_text().replace(usual, misspelt))
    with pytest.raises(UsageError, match=text):
        rankxform.plan(small, dst_config=str(path), preset="llama_legacy")


def test_what_is_advised_where_sizes_or_a_preset_are_wrong(small, config, tmp_path):
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=config(2, 4, 1), **PRESET)
    unmarked(src)
    too_many = config(4, 3, 1, name="twelve.yaml")
    with pytest.raises(UsageError, match="holds the files of 8 ranks, and .* makes 12"):
        rankxform.transform(src, tmp_path / "no", src_config=too_many, **PRESET)
    with pytest.raises(rankxform.DerivationError, match="^nothing says what shards") as raised:
        rankxform.transform(src, tmp_path / "no", src_config=config(2, 4, 1))
    assert raised.value.tries[0] == "--preset llama_legacy"


# -- rules of one's own ------------------------------------------------------------------------------

RULES = ("wq=(tp, None)", "wo=(None, tp)", "norm=(None,)", "emb=(None, None)")


@pytest.fixture
def ranks(tmp_path):
    """Files of four ranks, of which nothing but rules says how they are sharded."""
    shapes = {"wq": ([0, -1], (64, 64)), "wo": ([-1, 0], (64, 64)), "norm": ([-1], (64,))}
    names = {f"layers.{layer}.{name}": fact for layer in (0, 1) for name, fact in shapes.items()}
    names["emb"] = [-1, -1], (96, 64)
    stages = [{name: ([4], where, 0, 0) for name, (where, _) in names.items()}]
    params = {name: (shape, "Float32") for name, (_, shape) in names.items()}
    return reference.write_checkpoint(tmp_path / "src", stages, params)


def derive_by_rules(src, *rules, **options):
    pairs = [rule.split("=", 1) for rule in rules]
    return rankxform.derive(
        dst="dp=1,mp=4", shapes=src, rules=pairs, optimizer_shard="off", **options
    )


def test_what_rules_alone_say_is_said(ranks):
    text = "By which axes these are sharded, --rule alone says: layers.*.wo (2), layers.*.wq (2)."
    assert text in derive_by_rules(ranks, *RULES).assumptions


@pytest.mark.parametrize("rule", ["norm=(tp,)", "emb=(tp, None)", "emb=(None, tp)"])
def test_a_rule_by_which_replicas_would_be_slices(rule, ranks):
    """It was believed."""
    with pytest.raises(
        rankxform.DerivationError, match="hold the same bytes where they would"
    ) as refusal:
        derive_by_rules(ranks, rule, *RULES)
    assert any("Correct" in reason and rule.partition("=")[0] in reason
               for reason in refusal.value.reasons)  # fmt: skip


@pytest.mark.parametrize("shard", ["on", 3])
def test_an_optimizer_that_cannot_shard_is_said(shard, tmp_path):
    shapes = {"w": (64, 64), "v": (66, 64), "norm": (64,)}
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({
        f"layers.{layer}.{name}": {"shape": shape} for layer in range(9)
        for name, shape in shapes.items()
    }))  # fmt: skip
    rules = [(name, f"({'None, ' * len(shape)})") for name, shape in shapes.items()]
    derived = rankxform.derive(
        dst="dp=3", shapes=path, rules=rules, optimizer_shard=str(shard), threshold=1,
        opt_on=("layers",),
    )  # fmt: skip
    text = "It does not shard 9 of these, whose slices do not divide among the ranks that hold them"
    assert any(text in one and "layers.*.w (9)" in one for one in derived.assumptions)
    derived = rankxform.derive(
        dst="dp=2", shapes=path, rules=rules, optimizer_shard="on", threshold=1, opt_on=("layers",)
    )
    assert not any("does not shard" in one for one in derived.assumptions)


# -- what was stated near what is right ------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_as", "stated", "tried"),
    [
        ({}, {"vocabulary": False}, "vocab_emb_dp: true"),
        ({"vocabulary": False}, {}, "vocab_emb_dp: false"),
        ({}, {"opt": False}, "parallel.enable_parallel_optimizer: true"),
        ({"opt": False}, {}, "parallel.enable_parallel_optimizer: false"),
        ({}, {"threshold": 64},
         "parallel.parallel_optimizer_config.parallel_optimizer_threshold: 0"),
        ({}, {"sizes": (4, 2, 1)}, "data_parallel: 2, model_parallel: 4"),
        ({}, {"sizes": (4, 2, 1), "vocabulary": False},
         "vocab_emb_dp: true, data_parallel: 2, model_parallel: 4"),
        ({}, {"sizes": (4, 2, 1), "vocabulary": False, "threshold": 64},
         "vocab_emb_dp: true, parallel.parallel_optimizer_config.parallel_optimizer_threshold: 0, "
         "data_parallel: 2, model_parallel: 4"),
    ],
    ids=["vocabulary", "no-vocabulary", "optimizer", "no-optimizer", "threshold", "swapped", "two", "three"],
)  # fmt: skip
def test_a_statement_near_it_that_the_slices_fit_is_named(saved_as, stated, tried, small, config, tmp_path):  # fmt: skip
    """It was "choose the preset", once for each kind of parameter."""
    src, stated = tmp_path / "src", {**stated}
    right = config(2, 4, 1, name="right.yaml", **saved_as)
    rankxform.transform(small, src, dst_config=right, **PRESET)
    unmarked(src)
    sizes = stated.pop("sizes", (2, 4, 1))
    wrong = config(*sizes, name="wrong.yaml", **stated)
    with pytest.raises(rankxform.DerivationError, match="^the files' slices are not") as refused:
        rankxform.transform(src, tmp_path / "no", src_config=wrong, **PRESET)
    assert f"{tried} in --src-config: the slices fit that" in refused.value.tries
    assert all("Correct --src-config, or choose" in text for text in refused.value.reasons)
    rankxform.transform(src, tmp_path / "dst", src_config=right, **PRESET)


def test_a_threshold_that_nobody_stated_is_said(small, tmp_path):
    """Where all parameters are below it, nothing was asked, and nothing said."""
    done = rankxform.transform(
        small, tmp_path / "dst", dst_parallel="dp=2,mp=2,vocab_emb_dp=true", **PRESET
    )
    told = "Whether the optimizer shards is not stated: parameters of fewer than 64 KiB, as all are"
    assert any(told in text for text in done.derivation["assumptions"])


def test_a_rule_that_contradicts_the_slices_is_named(small, config, tmp_path):
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=config(2, 4, 1), **PRESET)
    unmarked(src)
    rule = r"feed_forward\.w1\.weight=(None, mp)"
    with pytest.raises(rankxform.DerivationError) as refused:
        rankxform.transform(
            src, tmp_path / "no", src_config=config(2, 4, 1), rule=(rule,), **PRESET
        )
    assert refused.value.tries == (f"without --rule {rule!r}: the slices fit that",)
    assert refused.value.reasons[0].startswith(f"Correct --rule {rule!r}")


def test_a_conversion_warns_of_what_a_rule_alone_says(ranks, tmp_path, config):
    """A wrong axis of a matrix that no preset knows makes another matrix, and exit code 0."""
    path = config(1, 4, 1, opt=False)
    told = r"--rule alone says: layers\.\*\.wo \(2\), layers\.\*\.wq \(2\)"
    with pytest.warns(rankxform.RankxformWarning, match=told):
        rankxform.transform(ranks, tmp_path / "dst", src_config=path, rule=RULES, fsync=False)


def test_what_is_not_said_is_no_contradiction(ranks, tmp_path, config):
    """Where a rule names no parameter, the slices were blamed."""
    path = config(1, 4, 1, opt=False)
    rules = RULES[1:]
    with pytest.raises(rankxform.DerivationError, match="^what is said of the job does not tell"):
        rankxform.transform(ranks, tmp_path / "no", src_config=path, rule=rules)


@pytest.mark.parametrize(("strategy", "tried"), [
    ("none", "--src-strategy FILE of the job that wrote them; none says that slices are whole"),
    ("shard:w=1,emb=0@4", "correct --src-strategy shard:w=1,emb=0@4"),
])  # fmt: skip
def test_the_option_that_contradicts_a_stated_shape_is_named(strategy, tried, ranks, tmp_path):
    shapes = {f"layers.{n}.{w}": (64, 64) for n in (0, 1) for w in ("wq", "wo")}
    b = tmp_path / "b.json"
    listed = {name: ([2], [-1, -1], 0, 0) for name in shapes}
    reference.write_strategy(b, [listed], kind="json", shapes=shapes)
    with pytest.raises(RankxformError, match="the full shape of") as refused:
        rankxform.transform(ranks, tmp_path / "no", strategy, b, exclude=("norm", "emb"))
    assert refused.value.tries[0] == tried


def test_a_rule_and_a_size_that_are_both_wrong_are_named_with_where_they_stand(small, config, tmp_path):  # fmt: skip
    src = tmp_path / "src"
    rankxform.transform(small, src, dst_config=config(2, 4, 1), **PRESET)
    unmarked(src)
    rule, wrong = r"feed_forward\.w1=(None, mp)", config(2, 4, 1, name="w.yaml", vocabulary=False)
    with pytest.raises(rankxform.DerivationError) as refused:
        rankxform.transform(src, tmp_path / "no", src_config=wrong, rule=(rule,), **PRESET)
    told = f"vocab_emb_dp: true in --src-config and without --rule {rule!r}: the slices fit that"
    assert told in refused.value.tries
