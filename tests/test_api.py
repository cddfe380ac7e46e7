"""What a program or a notebook sees of the functions: progress, results, options, help."""

from __future__ import annotations

import json
import pydoc
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jsonschema
import pytest

import rankxform
from rankxform.display import text
from rankxform.results import DictResult, Group, Lines, Table, as_document, lines
from tests import reference
from tests.mpi_launch import environment, mpirun

ROOT = Path(__file__).parents[1]
NAMES = [f"layers.{i}.weight" for i in range(8)]
PARAMS = dict.fromkeys(NAMES, ((64, 32), "Float32"))
SRC = [dict.fromkeys(NAMES, ([4], [0, -1], 0, 0))]
DST = [dict.fromkeys(NAMES, ([2], [0, -1], 0, 0))]
NBYTES = 8 * 64 * 32 * 4


@pytest.fixture
def place(tmp_path):
    class Place:
        src = reference.write_checkpoint(tmp_path / "src", SRC, PARAMS)
        a = reference.write_strategy(tmp_path / "a.ckpt", SRC)
        b = reference.write_strategy(tmp_path / "b.ckpt", DST)
        dst = tmp_path / "dst"

    return Place


CALLS = {
    "transform": lambda p, **more: rankxform.transform(p.src, p.dst, p.a, p.b, fsync=False, **more),
    "load": lambda p, **more: rankxform.load(p.src, p.a, p.b, rank=1, **more),
    "plan": lambda p, **more: rankxform.plan(p.src, p.a, p.b, **more),
    "check": lambda p, **more: rankxform.check(p.src, p.a, full=True, **more),
    "inspect": lambda p, **more: rankxform.inspect(p.src, **more),
    "verify": lambda p, **more: rankxform.verify(p.src, p.dst, p.a, p.b, **more),
}


class Heard(list):
    def __call__(self, done, total, phase):
        self.append((done, total, phase))


@pytest.mark.parametrize("name", CALLS)
def test_a_callback_hears_how_far_it_is(place, name):
    if name == "verify":
        CALLS["transform"](place)
    heard = Heard()
    CALLS[name](place, progress=heard)
    assert heard[0] == (0, 0, "plan")
    phase = {"transform": "move", "verify": "compare"}.get(name, name)
    rest = heard[1:]
    if name in ("plan", "inspect"):
        assert not rest
        return
    assert {one[2] for one in rest} == {phase} and len({one[1] for one in rest}) == 1
    assert [one[0] for one in rest] == sorted(one[0] for one in rest)
    assert rest[-1][0] == rest[-1][1] >= (NBYTES // 2 if name == "load" else NBYTES)


class GaveUp(Exception):
    pass


@pytest.mark.parametrize("error", [GaveUp, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["plan", "work"])
@pytest.mark.parametrize("name", ["transform", "load", "verify", "check"])
def test_a_callback_that_raises_ends_the_call_alone(place, name, at, error):
    if name == "verify":
        CALLS["transform"](place)

    def give_up(done, total, phase):
        if (phase == "plan") == (at == "plan"):
            raise error("enough")

    with pytest.raises(error, match="enough"):
        CALLS[name](place, progress=give_up)
    if name == "transform":
        assert not [*place.dst.rglob("*.ckpt")]
    assert CALLS[name](place, progress=False) is not None


def test_a_callback_that_raises_again_and_again_ends_all_processes(place):
    """Process 0 hears of the progress beside reductions that every process has to take part in."""
    program = (
        "import sys, rankxform\n"
        "def no(done, total, phase):\n"
        "    if phase != 'plan': raise ValueError('enough')\n"
        "try:\n"
        "    rankxform.transform(*sys.argv[1:5], progress=no)\n"
        "except rankxform.UsageError as error:\n"
        "    print(error)\n"
    )
    line = [*mpirun(3), sys.executable, "-c", program, place.src, place.dst, place.a, place.b]
    done = subprocess.run(
        list(map(str, line)), env=environment(), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout.count("progress raised ValueError: enough") == 3, done.stdout + done.stderr
    assert not [*place.dst.rglob("*.ckpt")]


@pytest.mark.parametrize("progress", [True, False])
def test_a_short_call_says_nothing(place, capfd, progress):
    CALLS["transform"](place, progress=progress)
    assert capfd.readouterr() == ("", "")


def test_a_notebook_gets_a_bar(place, monkeypatch):
    """Whatever is written where a kernel listens appears below the cell."""

    class Stream:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    Stream.__module__ = "ipykernel.iostream"
    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("rankxform.display.progress._BAR_SECONDS", 0.0)
    CALLS["transform"](place)
    lines = [line for line in stream.text.split("\r") if line.strip()]
    assert lines and all(len(line) <= 72 for line in lines)
    assert "#" in lines[-1] and "left" in lines[-1]
    assert stream.text.endswith("\r"), "the bar is not left there"


def results(place):
    yield CALLS["plan"](place)
    yield CALLS["transform"](place)
    yield CALLS["verify"](place)
    yield rankxform.verify(place.dst)
    yield CALLS["load"](place)
    yield CALLS["check"](place)
    yield rankxform.contents(place.src, place.a)
    derived = rankxform.derive(place.a, dst="dp=1,mp=2", src="dp=1,mp=4", unproven=True)
    yield derived
    yield derived.strategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield rankxform.derive(
            dst="dp=1,mp=2", shapes=place.dst / "rank_0/checkpoint_0.ckpt",
            rules={"layers[.].*": ("mp", None)},
        )  # fmt: skip


def test_results_say_shortly_what_they_are(place):
    for found in results(place):
        kind = type(found).__name__
        assert repr(found).startswith(f"{kind}(") and len(repr(found)) < 400, repr(found)
        assert "\n" not in repr(found)
        html = found._repr_html_()
        assert "<div><strong>" in html and html.count("<tr>") == html.count("</tr>")
        if kind == "Verdict" and found.same is None:
            with pytest.raises(rankxform.DifferenceError):
                bool(found)
        else:
            assert bool(found)


def drawn(html):
    """Return the facts that a notebook draws, as the schema has them."""
    facts = json.loads(re.search(r"draw\((\{.*\}),root\)\}</script></div>$", html)[1])
    jsonschema.validate(facts, json.loads((ROOT / "docs" / "page.schema.json").read_text()))
    return facts


def test_layers_stand_by_stage_before_and_after(place):
    plan = CALLS["plan"](place)
    assert (plan.src_layers, plan.dst_layers) == (("0-7",), ("0-7",))
    from dataclasses import replace

    html = replace(plan, src_layers=("0-3", "4-7"), dst_layers=())._repr_html_()
    assert drawn(html)["layers"] == [
        {"name": "before", "stages": [{"names": "0-3", "layers": 4}, {"names": "4-7", "layers": 4}]}
    ]


def test_names_are_escaped(place):
    plan = CALLS["plan"](place)
    from dataclasses import replace

    html = replace(plan, warnings=("<b>&",) * 9)._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "<b>" not in html and "and 4 more" in html
    assert drawn(html)["warnings"] == [*["<b>&"] * 5, "and 4 more"]
    assert html.count("</script>") == 1


@pytest.mark.parametrize(
    ("wrong", "meant"), [("src_startegy", "src_strategy"), ("includ", "include"), ("dry_run", "")]
)
def test_an_unknown_option_names_the_nearest(place, wrong, meant):
    text = f"did you mean {meant}" if meant else "lists the options"
    with pytest.raises(rankxform.UsageError, match=text):
        rankxform.transform(place.src, place.dst, **{wrong: "x"})


def test_values_may_be_texts_as_on_the_command_line(place):
    plain = rankxform.plan(place.src, place.a, place.b, memory=64 << 20)
    assert rankxform.plan(place.src, place.a, place.b, memory="64M") == plain
    with pytest.raises(rankxform.UsageError, match="memory 'much': expected a size such as 256M"):
        rankxform.plan(place.src, place.a, place.b, memory="much")
    with pytest.raises(rankxform.RankxformError, match="step 7"):
        rankxform.plan(place.src, place.a, place.b, step=7)
    with pytest.raises(
        rankxform.UsageError, match="progress is 'off'; expected True, False or a f"
    ):
        rankxform.plan(place.src, place.a, place.b, progress="off")


def words(found):
    """Return what a result's sections say, by label."""
    return {s.label: " ".join(s.texts) for s in found.sections() if isinstance(s, Lines)}


def test_groups_and_commands_fit_a_terminal(monkeypatch):
    """Names are wrapped and escaped; a command is neither, for it is pasted."""
    monkeypatch.setattr(text, "width", lambda stream=1: 30)
    command = "rankxform transform /a/folder/SRC DST --src-strategy A"
    group = Group("whole, 8 copies; (None, tp)", ["layers.*.\x1b[1m w (32)", "b " * 20])
    shown = text.as_text(DictResult({}, (group, lines("next", command))))
    *names, last = shown.splitlines()
    assert "\x1b[1m w" not in shown and "\\x1b[1m w (32)" in shown
    assert all(len(line) <= 30 for line in names) and last.endswith(command)
    (amount,) = as_document(DictResult({}, (group, lines("next", command))))["head"]["amounts"]
    assert amount == (group.heading, "; ".join(group.texts))


def test_a_plan_says_what_reads_less(place, tmp_path):
    whole = reference.write_strategy(
        tmp_path / "whole.ckpt", [dict.fromkeys(NAMES, ([2], [-1, -1], 0, 0))]
    )
    twice = rankxform.plan(place.src, place.a, whole, processes=16)
    assert twice.bytes_read == 2 * twice.bytes_needed
    assert "2.00 times" in words(twice)["in all"] and "two-phase" in words(twice)["read less"]
    methods = [row[0] for s in twice.sections() if isinstance(s, Table) for row in s.rows]
    assert "each slice in one read" in methods
    once = rankxform.plan(place.src, place.a, whole, processes=16, read_method="two-phase")
    assert once.bytes_read == once.bytes_needed and "read less" not in words(once)
    assert "read less" not in words(rankxform.plan(place.src, place.a, place.b, processes=2))


def test_a_misspelt_source_is_named_before_the_other_order(place):
    rankxform.transform(place.src, place.dst, place.a, place.b)
    wrong = str(place.src).removesuffix("src") + "srcc"
    with pytest.raises(rankxform.UsageError, match="no such checkpoint") as caught:
        rankxform.transform(wrong, place.dst, place.a, place.b)
    (tried,) = caught.value.tries  # what rankxform wrote into DST is no source that was meant
    assert tried.startswith(str(place.src)), tried
    (place.dst / "rankxform.json").unlink()
    with pytest.raises(rankxform.UsageError, match="no such checkpoint.* is there") as caught:
        rankxform.transform(wrong, place.dst, place.a, place.b)
    assert caught.value.tries[1] == "exchange SRC and DST"


def test_what_lies_nearby_is_named_if_its_name_and_its_content_fit(place, tmp_path):
    """It was: any name of which half the letters are the same, whatever lay there."""
    (tmp_path / "trained").mkdir()
    for near, wrong in (("train", "trained"), ("run_checkpoint", "my_checkpoints")):
        (tmp_path / near).mkdir(exist_ok=True)
        with pytest.raises(rankxform.UsageError, match="no such checkpoint") as caught:
            rankxform.transform(tmp_path / f"{wrong}_", tmp_path / "dst", place.a, place.b)
        assert caught.value.tries == (), near
    (tmp_path / "notes.ckpt").write_text("no strategy")
    with pytest.raises(rankxform.UsageError, match="no such strategy") as caught:
        rankxform.transform(place.src, tmp_path / "dst", tmp_path / "note.ckpt", place.b)
    assert caught.value.tries == ()


@pytest.mark.parametrize("name", ["transform", "load", "verify", "plan"])
def test_help_lists_the_options_by_group(name):
    text = pydoc.render_doc(getattr(rankxform, name), renderer=pydoc.plaintext)
    for group, option in (("what is converted:", "include:"), ("reading and memory:", "memory:")):
        assert text.index(group) < text.index(option)
    assert ("max_shard:" in text) == (name != "load")
    assert max(map(len, text.splitlines()[3:])) <= 100


def test_a_message_names_keywords_beside_options(place, tmp_path):
    with pytest.raises(rankxform.UsageError) as raised:
        rankxform.transform(place.src, tmp_path / "out")
    assert "--src-strategy is src_strategy=" in raised.value.details
    with pytest.raises(rankxform.UsageError, match="optimizer_shard: a Parallel was given"):
        rankxform.derive(place.a, dst=rankxform.Parallel(dp=1, mp=2), optimizer_shard="off")
    with pytest.raises(rankxform.UsageError, match="src_threshold: a Parallel was given"):
        rankxform.derive(place.a, dst="dp=2", src=rankxform.Parallel(dp=4), src_threshold=1)
    with pytest.raises(rankxform.UsageError, match="without a strategy there is one, 0, of whole"):
        rankxform.load(place.src, place.a, rank=3)


def test_load_and_reshard_advise_in_keywords(place):
    with pytest.raises(rankxform.UsageError) as raised:
        rankxform.load(place.src)
    assert "no src_strategy= says" in raised.value.what
    first, *others = raised.value.tries
    assert first.startswith("src_strategy=FILE or FOLDER ("), first
    assert any(text.startswith("src_strategy='none' if ") for text in others), others
    assert "--" not in str(raised.value)
    with pytest.raises(rankxform.UsageError, match="does not exist") as raised:
        rankxform.load(place.src, place.a, place.b, rank=64)
    assert raised.value.tries[0].startswith("pass rank= of 0-"), raised.value.tries
    slices = dict(rankxform.load(place.src, place.a, place.a, rank=0))
    with pytest.raises(rankxform.UsageError, match="nobody takes rank 1") as raised:
        rankxform.reshard(slices, place.a, place.a)
    assert raised.value.tries[0].startswith("start "), raised.value.tries
    with pytest.raises(rankxform.UsageError, match="no src_strategy= says how they were sharded"):
        rankxform.reshard(slices, dst_strategy=place.a, src_rank=1)
    with pytest.raises(rankxform.UsageError, match="did you mean release"):
        rankxform.reshard(slices, place.a, place.a, relase=True)
    with pytest.raises(rankxform.UsageError, match=r"help\(rankxform.load\) lists"):
        rankxform.load(place.src, place.a, overwrite=True)


def test_an_error_is_shown_by_few_lines_of_this_package(place):
    """Every process prints it: under mpirun it is read as often as there are processes."""
    with pytest.raises(rankxform.RankxformError) as raised:
        rankxform.load(f"{place.src}/absent")
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert len(raised.traceback) <= 3, raised.traceback
