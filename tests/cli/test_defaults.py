"""Options from a file and from the environment."""

from __future__ import annotations

import pytest

from rankxform.cli.main import main
from rankxform.cli.parser import parse_arguments
from rankxform.errors import UsageError
from tests import reference

LINE = ["transform", "SRC", "DST"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(here, text, name="rankxform.toml"):
    (here / name).write_text(text)


def test_a_file_here_or_above_has_what_the_command_line_does_not(here, monkeypatch):
    written(here, 'src-strategy = "a"\nmemory = "32M"\n[transform]\nno_fsync = true\n')
    (here / "job").mkdir()
    monkeypatch.chdir(here / "job")
    options = parse_arguments([*LINE, "--memory", "16M"])
    assert (options.src_strategy, options.memory, options.fsync) == ("a", 16 << 20, False)
    assert [one.words for one in options.defaults] == [("--no-fsync",), ("--src-strategy=a",)]
    assert parse_arguments(["verify", "SRC", "--memory", "1M", "DST"]).src_strategy == "a"
    assert not parse_arguments(["verify", "DST"]).src_strategy
    assert {one.origin for one in options.defaults} == {str(here / "rankxform.toml")}
    assert (
        parse_arguments(["plan", "SRC"]).memory == 32 << 20
        and not parse_arguments(["inspect", "SRC"]).src_strategy
    )


def test_the_environment_comes_before_a_file(here, monkeypatch):
    written(here, 'memory = "32M"\noverwrite = true')
    monkeypatch.setenv("RANKXFORM_MEMORY", "16M")
    monkeypatch.setenv("RANKXFORM_OVERWRITE", "0")
    monkeypatch.setenv("RANKXFORM_OF_ANOTHER", "1")
    options = parse_arguments(LINE)
    assert options.memory == 16 << 20 and not options.overwrite
    assert [one.origin for one in options.defaults] == ["RANKXFORM_MEMORY"]
    monkeypatch.setenv("RANKXFORM_HELP", "1")
    monkeypatch.setenv("RANKXFORM_SRC_STRATEGY_FILE", "right")
    written(here, 'src_strategy = "wrong"')
    assert parse_arguments(LINE).src_strategy == "right", "another spelling of the same option"
    monkeypatch.setenv("RANKXFORM_CONFIG_FILE", str(here / "nowhere.toml"))
    with pytest.raises(UsageError, match="no such file of options"):
        parse_arguments(LINE)


def test_the_command_line_comes_before_what_excludes_it(here):
    written(here, 'verbose = true\nprogress = "none"\nsrc_ckpt_dir = "other"')
    with pytest.raises(UsageError, match="no option --src-ckpt-dir"):
        parse_arguments(LINE)
    written(here, 'verbose = true\nprogress = "none"\nkeep = 3')
    options = parse_arguments([*LINE, "--quiet"])
    assert options.quiet and not options.verbose and options.progress == "none"
    assert parse_arguments(["plan", "SRC"]).verbose, "and what plan lacks is another verb's"


def test_a_wrong_value_is_told_with_its_place(here, monkeypatch):
    monkeypatch.setenv("RANKXFORM_MEMORY", "lots")
    with pytest.raises(UsageError, match="'lots'(?s:.*)--memory=lots is of RANKXFORM_MEMORY"):
        parse_arguments(LINE)


def test_a_file_that_is_named_is_the_only_one(here):
    written(here, 'memory = "32M"')
    written(here, 'dtype = "bf16"\nexclude = ["a", "b"]\nranks = [0, 2]', "other.toml")
    for flag in (["--config-file", "other.toml"], ["--config-file=other.toml"]):
        options = parse_arguments([*LINE, *flag])
        assert (options.dtype, options.exclude, options.ranks) == ("bf16", ("a", "b"), (0, 2))
        assert options.memory is None


@pytest.mark.parametrize("flag", ["--src-strategy", "--src-ckpt-strategy", "--src_ckpt_strategy"])
def test_every_spelling_of_an_option_comes_before_a_file(here, flag):
    written(here, 'src_strategy = "a"')
    assert parse_arguments([*LINE, flag, "b"]).src_strategy == "b"
    assert parse_arguments([*LINE, f"{flag}=b"]).src_strategy == "b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memry = '3M'", "transform has no option --memry; did you mean --memory"),
        ("[transfrom]\nmemory = '3M'", "no verb transfrom; did you mean transform"),
        ("[transform]\nsimulate = 4", "transform has no option --simulate"),
        ("memory = ", "not TOML"),
        ("fsync = false", "no option --fsync; did you mean --no-fsync"),
        ("memory = true", "--memory is True; expected its value"),
        ("overwrite = 'perhaps'", "expected true or false"),
        ("dst-form = 'dcp'\ndst_form = 'ranks'", "dst-form and dst_form are one option"),
        ("src-strategy = 'a'\nsrc-ckpt-strategy = 'b'", "src-ckpt-strategy are one option"),
    ],
)
def test_what_a_file_cannot_say(here, text, message):
    written(here, text)
    with pytest.raises(UsageError, match=message):
        parse_arguments(LINE)


def test_an_empty_list_states_nothing_and_both_origins_are_named(here, monkeypatch):
    written(here, "ranks = []\nsrc_strategy = []")
    options = parse_arguments(LINE)
    assert (options.ranks, options.src_strategy, options.defaults) == ((), None, [])
    monkeypatch.setenv("RANKXFORM_VERBOSE", "1")
    monkeypatch.setenv("RANKXFORM_QUIET", "1")
    with pytest.raises(UsageError, match="--quiet is of RANKXFORM_QUIET; --verbose is of RANKX"):
        parse_arguments(LINE)


def test_a_file_that_is_not_there(here):
    with pytest.raises(UsageError, match="no such file of options"):
        parse_arguments([*LINE, "--config-file", "nowhere.toml"])
    with pytest.raises(UsageError, match="--config-file has no value"):
        parse_arguments([*LINE, "--config-file"])


def test_what_was_taken_is_said(here, capfd):
    names = {"w": ((4, 4), "Float32")}
    layouts = [{"w": ([2], [0, -1], 0, 0)}]
    reference.write_checkpoint(here / "src", layouts, names)
    reference.write_strategy(here / "a.ckpt", layouts)
    written(here, 'src_strategy = "a.ckpt"\ninclude = ["w"]')
    assert main(["transform", "src", "dst"]) == 0
    said = capfd.readouterr().out
    assert "options   --src-strategy=a.ckpt (rankxform.toml)\n" in said
    assert "          --include=w (rankxform.toml)\n" in said
    assert main(["plan", "src", "dst"]) == 0
    assert "--src-strategy=a.ckpt (rankxform.toml)" in capfd.readouterr().out
    assert main(["verify", "dst"]) == 6, "of one folder its manifest says all; sizes alone"
