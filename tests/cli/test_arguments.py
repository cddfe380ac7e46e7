"""Arguments as people order them."""

from __future__ import annotations

import itertools
import json

import pytest

import rankxform
from rankxform.cli import parser
from rankxform.cli.main import main
from rankxform.errors import UsageError
from tests import reference

OPTIONS = (("--src-strategy", "A"), ("--dst-strategy", "B"), ("--overwrite",))
STAGES = [{"w": ([2], [0, -1], 0, 0)}]


@pytest.mark.parametrize("order", [*itertools.permutations(range(5))][::7])
def test_src_and_dst_stand_anywhere_among_options(order):
    groups = [("SRC",), *OPTIONS, ("DST",)]
    words = [word for at in order for word in groups[at]]
    names = [word for word in words if word in ("SRC", "DST")]
    found = parser.parse_arguments(["transform", *words])
    assert [found.src, found.dst] == names
    assert (found.src_strategy, found.dst_strategy, found.overwrite) == ("A", "B", True)


def test_too_many_are_refused():
    with pytest.raises(UsageError, match="C: transform takes no such arguments"):
        parser.parse_arguments(["transform", "A", "--overwrite", "B", "C"])


def test_an_error_is_an_object_too(tmp_path, capfd):
    assert main(["transform", str(tmp_path / "no"), str(tmp_path / "dst"), "--json"]) == 2
    out, error = capfd.readouterr()
    found = json.loads(out)
    assert (found["result"], found["kind"], found["code"]) == ("error", "UsageError", 2)
    assert found["fault"] == "unfit"
    assert found["message"] in error.replace("\n", " ") or "no such checkpoint" in found["message"]


OUTPUTS = [
    ("merge", "A", "s3://b/m.ckpt"),
    ("strategy", "convert", "A", "s3://b/m.json"),
    ("strategy", "derive", "--from", "A", "--src-parallel", "dp=1,mp=2", "--dst-parallel",
     "dp=1,mp=1", "-o", "s3://b/new"),
    ("inspect", "SRC", "--page", "s3://b/page.html"),
    ("plan", "SRC", "DST", "--src-strategy", "A", "--dst-strategy", "none", "--report",
     "s3://b/page.html"),
    ("launch", "--load", "SRC", "--src-strategy", "A", "--dst-strategy", "none", "--output",
     "s3://b/out", "--", "true"),
]  # fmt: skip


@pytest.mark.parametrize("words", OUTPUTS, ids=lambda words: words[0] + words[1])
def test_a_file_that_is_written_beside_dst_has_no_address(words, tmp_path, monkeypatch, capfd):
    """A path that looks like one were a folder here, with a success that nobody finds."""
    monkeypatch.chdir(tmp_path)
    folder = reference.write_stage_files(tmp_path / "a", STAGES)
    src = reference.write_checkpoint(tmp_path / "src", STAGES, {"w": ((4, 4), "Float32")})
    places = {"A": str(folder), "SRC": str(src), "DST": str(tmp_path / "dst")}
    assert main([places.get(word, word) for word in words]) == UsageError.exit_code
    error = capfd.readouterr().err
    assert "expected a path to write to, found an address" in error, error
    assert {path.name for path in tmp_path.iterdir()} <= {"a", "src"}


def test_another_step_into_the_same_destination(tmp_path):
    params, strategy = {"w": ((4, 4), "Float32")}, reference.write_strategy(tmp_path / "a", STAGES)
    for step in ("1_100", "1_200"):
        reference.write_checkpoint(tmp_path / step, STAGES, params, name=f"net-{step}")
    rankxform.transform(tmp_path / "1_200", tmp_path / "dst", strategy, None)
    with pytest.raises(rankxform.StorageError, match="holds step 1_200, and the source's is 1_100"):
        rankxform.transform(tmp_path / "1_100", tmp_path / "dst", strategy, None)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["maps", "chek", "llama", "src"], "ACTION 'chek' is none of .*; did you mean check"),
        (["transform", "a", "b", "--dtype", "bf61"], "--dtype 'bf61' is none of .* mean bf16"),
        (["strategy", "shwo", "a"], "did you mean show"),
    ],
)
def test_the_nearest_choice_is_named(line, meant):
    with pytest.raises(UsageError, match=meant):
        parser.parse_arguments(line)


def test_an_error_in_lines(capfd, monkeypatch, tmp_path):
    """What was found where, as the path was given; what can be tried; and details."""
    # This process is old: a sign of life would be written at once, from a thread, while it is read.
    monkeypatch.setattr("rankxform.cli.main.seconds_since_start", lambda: 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    assert main(["transform", "src", "dst"]) == 3
    first, *more = capfd.readouterr().err.splitlines()
    assert first.startswith("rankxform: error: src: holds no checkpoint at ")
    assert [line[:7] for line in more] == ["  try  ", "  or   "]
    elsewhere = tmp_path / "data" / tmp_path.relative_to("/") / "ck"
    monkeypatch.setattr("sys.argv", ["rankxform"])
    assert main(["inspect", str(elsewhere)]) == 2
    assert "data" + str(tmp_path) in capfd.readouterr().err, "not cut in the middle of a path"


def test_short_flags_stand_together_and_values_may_begin_with_a_dash():
    found = parser.parse_arguments(["transform", "A", "B", "-vn2", "--include", "-x y"])
    assert (found.verbose, found.number, found.include) == (True, 2, ("-x y",))
    with pytest.raises(UsageError, match="-v takes no value"):
        parser.parse_arguments(["transform", "A", "B", "-v=2"])
    with pytest.raises(UsageError, match="there is no verb strategy show"):
        parser.parse_arguments(["strategy show", "A"])
    with pytest.raises(UsageError, match="did you mean --help"):
        parser.parse_arguments(["transform", "A", "B", "--hel"])
    with pytest.raises(UsageError, match="expected a time"):
        parser.parse_arguments(["transform", "A", "B", f"--time-limit={'9' * 400}:00"])


def test_help_fits_a_narrow_terminal_and_a_closed_pipe(monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "1")
    for words in (["--help"], ["transform", "--help-all"], ["launch", "--help"]):
        assert main(words) == 0
    assert "usage: rankxform" in capfd.readouterr().out
