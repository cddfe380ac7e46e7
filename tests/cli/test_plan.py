"""The verb `plan`."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest

from tests.cli.test_main import PARAMS, command, place, right
from tests.place import Place

__all__ = ["place"]


@pytest.mark.parametrize(
    ("method", "latency"), [("auto", 60000), ("ranges", None), ("sieving", None)]
)
def test_a_plan_by_each_read_method(method, latency, place):
    flags = [*place.strategies, "--read-method", method]
    code, output = command("plan", place.src, *flags, "--json")
    assert code == 0 and json.loads(output)["read_latency_bytes"] == latency
    code, output = command("plan", place.src, *flags)
    assert code == 0 and "how files are read" in output


def test_shapes_of_parameters_in_no_strategy_are_planned_too(place):
    shapes = {"w": {"shape": [8, 6], "dtype": "Float32"}, "step": {"shape": [], "dtype": "Int32"}}
    path = place.tmp / "shapes.json"
    path.write_text(json.dumps(shapes))
    flags = [*place.strategies, "--json"]
    code, output = command("plan", "--shapes", path, *flags)
    assert code == 0 and json.loads(output)["parameters"] == 2
    path.write_text(json.dumps({"w": {"shape": [9, 6], "dtype": "Float32"}}))
    code, output = command("plan", "--shapes", path, *flags)
    assert code == 3 and "'w' in " in output and "axis 0" in output


def test_plan_names_what_is_needed(place):
    code, output = command("plan", place.src, *place.strategies)
    assert code == 0 and "  needs  " in output
    code, output = command("plan", place.src, *place.strategies, "--json")
    assert [rank["bytes_needed"] for rank in json.loads(output)["shards"]] == [64, 64, 64]


@pytest.mark.parametrize("processes", [None, 2])
def test_plan_as_json(processes, place):
    code, output = command(
        "plan", place.src, *place.strategies, "--json",
        "--processes", 2, processes=processes,
    )  # fmt: skip
    assert code == 0, output
    plan = json.loads(output)
    assert plan["bytes_needed"] == 8 * 6 * 4 == plan["bytes_written"]
    every = ["0", "1", "2", "3"]
    assert [(r["rank"], r["writers"], list(r["bytes_from"])) for r in plan["shards"]] == [
        (0, [0], every),
        (1, [0], every),
        (2, [1], every),
    ]


def test_a_plan_without_a_checkpoint(place, tmp_path):
    shapes = {n: {"shape": list(s), "dtype": d} for n, (s, d) in PARAMS.items()}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    flags = [*place.strategies, "--json"]
    code, output = command("plan", "--shapes", tmp_path / "shapes.json", *flags)
    assert code == 0, output
    imagined, real = json.loads(output), json.loads(command("plan", place.src, *flags)[1])
    for key in ("shards", "bytes_needed", "bytes_read", "bytes_written"):
        assert imagined[key] == real[key]
    (tmp_path / "shapes.json").write_text('{"w": {"shape": "large"}}')
    code, output = command("plan", "--shapes", tmp_path / "shapes.json", *flags)
    assert code == 2 and "shapes.json: not {name:" in output


def test_a_plan_says_the_command_that_does_it(place):
    for words in (["plan", "--processes=2"], ["plan"], ["transform", "--dry-run"]):
        code, output = command(*words[:1], place.src, place.dst, *place.strategies, *words[1:])
        assert code == 0 and not place.dst.exists()
        assert ("with --dry-run: how long" in output) == (words[0] == "plan")
        line = re.search(r"^next +rankxform (.*)$", output, re.M)[1]
        code, output = command(*shlex.split(line))
        assert code == 0 and right(place) and ("2 processes" in output) == ("=2" in line)
        shutil.rmtree(place.dst)


@pytest.mark.parametrize(
    "options",
    [(), ("--nodes", 2), ("--read-method", "ranges"), ("--nodes", 2, "--src-placement", "node")],
)
def test_a_simulation_of_a_source_that_lacks_a_shard_is_refused(options, tmp_path):
    rows = [{"w": ([ranks], [0, -1], 0, 0)} for ranks in (4, 2)]
    place = Place(tmp_path, rows[:1], rows[1:], {"w": ((8, 6), "Float32")})
    shutil.rmtree(place.src / "rank_3")  # which process 0 needs nothing of
    code, output = command("plan", place.src, *place.strategies, "--simulate", 2, *options)
    assert code == 3 and "rank 3 has no file" in output
