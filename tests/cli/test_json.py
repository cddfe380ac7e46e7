"""--json: every verb has it, and one name has one meaning, which docs/json.md tells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankxform.cli import parser
from rankxform.cli.main import main
from tests import reference
from tests.mpi_launch import environment

ROOT = Path(__file__).parents[2]
PARAMS = {"w": ((8, 6), "Float32"), "adam_m.w": ((8, 6), "Float32"), "b": ((4,), "Float32")}
ROWS = [{name: ([4], [0] + [-1] * (len(s) - 1), 0, 0) for name, (s, _) in PARAMS.items()}]
COLUMNS = [{"w": ([2], [-1, 0], 0, 0), "b": ([2], [0], 0, 0)}]
REPLICATED = [{name: ([2], [-1] * len(s), 0, 0) for name, (s, _) in PARAMS.items()}]
STAGES = [{"x": ([2], [0], 0, 0)}, {"y": ([2], [0], 0, 0)}]
TABLE = {
    "version": "1.0", "status": "completed", "server_list": [
        {"server_id": "10.0.0.1", "device": [{"device_id": "0", "rank_id": "0"}]}],
}  # fmt: skip
MODEL = ROOT / "tests" / "data" / "formats" / "hf_qwen3" / "hf"
A_TO_B = "--src-strategy A --dst-strategy B"
COMMANDS = [
    f"transform SRC DST {A_TO_B}",
    "transform SRC OTHER --src-strategy A --dst-strategy A",
    "transform SRC C2 --src-strategy A --dst-strategy A --dst-form checkpoint2 --iteration 100",
    f"transform SRC DRY --dry-run {A_TO_B}",
    "transform SRC DERIVED --src-strategy A --src-parallel dp=1,mp=4 --dst-parallel dp=1,mp=2",
    f"plan SRC {A_TO_B}",
    "plan SRC HF --src-strategy A --dst-form huggingface",
    f"plan SRC {A_TO_B} --step 1_100 --fallback STEPS",
    f"plan SRC {A_TO_B} --simulate 4",
    f"plan SRC {A_TO_B} --simulate 4 --nodes 2 --src-placement node",
    f"follow STEPS OUT {A_TO_B} --no-fsync",
    "verify DST",
    f"verify SRC DST {A_TO_B}",
    "verify SRC BROKEN --src-strategy A --dst-strategy A",
    f"ranks {A_TO_B}",
    "merge S merged.ckpt",
    "inspect SRC",
    "inspect SRC --src-strategy A",
    "inspect C2 --check --full",
    "inspect DST",
    "inspect C2",
    "inspect .",
    "inspect A",
    "inspect S",
    "inspect STEPS",
    "inspect UNCLEAR",
    "inspect table.json",
    "inspect SRC/rank_0",
    "inspect DST/rank_0/checkpoint_0.ckpt",
    "inspect UNEQUAL --replicas --src-strategy R",
    "inspect SRC --src-strategy A --page page.html",
    "strategy show A",
    "strategy explain A --src-parallel dp=1,mp=4",
    "strategy derive --from A --src-parallel dp=1,mp=4 --dst-parallel dp=1,mp=2 -o d.ckpt",
    "strategy convert A c.json",
    "strategy diff A B",
    "strategy presets",
    "strategy presets llama",
    "maps list",
    "maps show qwen3",
    f"maps check qwen3 {MODEL}",
    "hostfile table.json",
    "clean DST",
    "plan SRC s3://bucket/new --src-strategy A --dst-strategy B",
    "transform SRC NOWHERE --src-strategy R --dst-strategy A",
]
MAPS = {"bytes_from", "needed_ranks", "metadata", "costs", "phases", "tensors"}
"""Names of maps whose keys are data."""
VALUES = {
    "plan", "verify", "launch", "clean", "merge", "contents", "follow", "inspect", "hostfile", "simulation", "checkpoint2", "unified",
    "huggingface", "bytes", "sizes", "folder", "described", "destination", "strategies", "json",
    "collection", "2_200",
}  # fmt: skip
"""What docs/json.md quotes and is no name but a value."""


def broken(name, shape, dtype):
    return np.full(shape, 0.5, "<f4").view("<u4")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


def write_inputs(tmp_path):
    """Write what `COMMANDS` read."""
    reference.write_checkpoint(tmp_path / "SRC", ROWS, PARAMS, name="net_{rank}-1_100")
    for name, strategy in (("A", ROWS), ("B", COLUMNS), ("R", REPLICATED)):
        reference.write_strategy(tmp_path / name, strategy)
    reference.write_stage_files(tmp_path / "S", STAGES)
    for step in ("1_100", "2_200"):
        reference.write_checkpoint(tmp_path / "STEPS", ROWS, PARAMS, name=f"net_{{rank}}-{step}")
    (tmp_path / "STEPS/rank_3/net_3-2_200.ckpt").unlink()
    reference.write_checkpoint(tmp_path / "UNCLEAR", ROWS, PARAMS, name="net_{rank}-1_100")
    reference.write_ckpt(tmp_path / "UNCLEAR/rank_1/other.ckpt", {})
    reference.write_checkpoint(
        tmp_path / "BROKEN", ROWS, PARAMS, name="checkpoint_{rank}", make=broken
    )
    reference.write_checkpoint(tmp_path / "UNEQUAL", REPLICATED, PARAMS)
    reference.write_checkpoint(tmp_path / "CHANGED", REPLICATED, PARAMS, make=broken)
    (tmp_path / "CHANGED/rank_1").rename(tmp_path / "UNEQUAL/rank_01")
    shutil.rmtree(tmp_path / "UNEQUAL/rank_1")
    (tmp_path / "UNEQUAL/rank_01").rename(tmp_path / "UNEQUAL/rank_1")
    (tmp_path / "table.json").write_text(json.dumps(TABLE))


def documents(capfd):
    for words in COMMANDS:
        main([*words.split(), "--json"])
        out, error = capfd.readouterr()
        assert out.strip(), f"{words}: {error}"
        yield json.loads(out)
    launch = [sys.executable, "-m", "rankxform", "launch", "--load", "SRC", *A_TO_B.split()]
    done = subprocess.run(
        [*launch, "--json", "--any-world-size", "--", "true"],
        capture_output=True,
        env=environment(),
        check=True,
    )
    yield json.loads(done.stdout)


def names_in(value, found):
    """Collect every name of a document, and the type of its values."""
    for one in value if isinstance(value, list) else []:
        names_in(one, found)
    for name, one in value.items() if isinstance(value, dict) else ():
        kind = {int: "number", float: "number"}.get(type(one), type(one).__name__)
        found.setdefault(name, set()).update({kind} - {"NoneType"})
        if name not in MAPS:
            names_in(one, found)


def test_every_name_of_every_verb_has_one_type_and_is_documented(place, capfd):
    found, results = {}, set()
    for document in documents(capfd):
        assert list(document)[:2] == ["version", "result"] and document["version"] == 1
        results.add(document["result"])
        names_in(document, found)
    verbs = set(parser.COMMANDS)
    assert results == verbs | {"simulation", "replicas", "evidence", "check", "contents", "error"}
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}
    page = (ROOT / "docs" / "json.md").read_text()
    told = set(re.findall(r"`([a-z_0-9]+)`", "\n".join(re.findall(r"(?m)^\|.*", page))))
    assert set(found) - told == set(), "printed, and not documented"
    assert told - set(found) - VALUES == set(), "documented, and not printed"


def test_each_result_has_the_names_that_the_page_lists(place, capfd):
    found = {}
    for document in documents(capfd):
        found.setdefault(document["result"], set()).update(document)
    page = (ROOT / "docs" / "json.md").read_text().split("## By result")[1]
    told = {
        result: set(re.findall(r"`(\w+)`", names))
        for result, names in re.findall(r"(?m)^\| `([^`]+)` \| (.*) \|$", page)
    }
    assert told == {result: names - {"version", "result"} for result, names in found.items()}


def test_no_text_has_an_escaped_end_of_line(place, capfd):
    """A section's texts are lines: one that has several is escaped where it is shown."""
    for words in COMMANDS:
        main(words.split())
        assert "\\n" not in "".join(capfd.readouterr()), words
