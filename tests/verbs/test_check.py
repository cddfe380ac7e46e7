"""`inspect --check`: defects of each kind are found, and healthy checkpoints are left in peace."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.cli.main import main
from tests import reference, reference_dcp, reference_forms
from tests.cases import random_case
from tests.reference_dcp import write_dcp

DATA = Path(__file__).parents[1] / "data" / "formats"
HEALTHY = int(os.environ.get("RANKXFORM_HEALTHY", "3"))
"""Checkpoints of each form: 100 at night."""


def checked(capfd, path, *options):
    """Run the command; return its exit code and what it found, by state the texts."""
    code = main(["inspect", str(path), "--check", "--json", *map(str, options)])
    document = json.loads(capfd.readouterr().out)
    if document["result"] == "error":  # there is nothing to check
        return code, {"wrong": [document["message"]]}
    found = {}
    for row in document["rows"]:
        found.setdefault(row["state"], []).append(f"{row['check']}: {row['text']}")
    return code, found


def counted(name, shape, dtype):
    """Return finite values of any type, which differ everywhere."""
    start, numbers = sum(map(ord, name)) % 50, reference.counting_tensor(name, shape, dtype)
    if reference.ITEM[dtype] == 1:  # of which there are 256: the next ones begin with another
        numbers = numbers.astype(np.int64)
        numbers += np.arange(numbers.size).reshape(numbers.shape) // 256
    return (numbers + start).astype(reference.WORD[reference.ITEM[dtype]])


WORDS = np.arange(24, dtype="<u4").reshape(6, 4)
MODEL = {"w": ("Float32", WORDS), "v": ("Float32", WORDS + 100)}
BOXES = {"w": [((0, 0), (3, 4)), ((3, 0), (6, 4))]}


@pytest.fixture
def src(tmp_path):
    return Path(write_dcp(tmp_path / "src", MODEL, boxes=BOXES))


def last(src):
    return sorted(src.glob("*.distcp"))[-1]


def torn(src):
    path = src / ".metadata"
    path.write_bytes(path.read_bytes()[:-20])


def shortened(src):
    os.truncate(last(src), last(src).stat().st_size - 1)


def other_content(src):
    data = bytearray(last(src).read_bytes())
    data[data.find(b"\x17\0\0\0") if b"\x17\0\0\0" in data else data.find(b"\x70\0\0\0")] ^= 1
    last(src).write_bytes(data)


DEFECTS = {
    "a torn table": (torn, "torn"),
    "a file that is gone": (lambda src: last(src).unlink(), "is missing"),
    "a file that is shorter": (shortened, "is shorter than"),
    "content that is not the checksum's": (other_content, "CRC-32 is"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(src, capfd, defect):
    assert checked(capfd, src, "--full")[0] == 0
    change, text = DEFECTS[defect]
    change(src)
    code, found = checked(capfd, src, "--full")
    assert code == 3 and any(text in one for one in found["wrong"])


def test_boxes_that_overlap(tmp_path, capfd):
    boxes = {"w": [((0, 0), (4, 4)), ((2, 0), (6, 4))]}
    code, found = checked(capfd, write_dcp(tmp_path / "src", MODEL, boxes=boxes))
    assert code == 3 and any("overlap" in one for one in found["wrong"])


@pytest.mark.parametrize("dtype", ["Float16", "BFloat16", "Float32", "Float64"])
def test_values_that_are_no_numbers(tmp_path, capfd, dtype):
    word = reference.WORD[reference.ITEM[dtype]]
    words = np.ones((6, 4), word)
    words[2, 1] = np.iinfo(word).max >> 1  # a NaN
    src = write_dcp(tmp_path / "src", {"w": (dtype, words)})
    code, found = checked(capfd, src, "--full")
    assert code == 3 and any("1 value of w: no number" in one for one in found["wrong"])


def test_what_was_not_looked_at_is_said(src, capfd):
    code, found = checked(capfd, src)
    assert code == 0 and any("--full compares them" in one for one in found["not checked"])


def test_ranks_without_a_strategy(tmp_path, capfd):
    stage = [{"w": ([2, 2], [0, -1], 0, 0)}]
    params = {"w": ((8, 4), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", stage, params, make=counted)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stage)
    code, found = checked(capfd, src)
    assert code == 6 and any("give --src-strategy" in one for one in found["not checked"])
    code, found = checked(capfd, src, "--full")
    assert code == 6 and found["right"], "values are, and most was not looked for"
    assert checked(capfd, src, "--src-strategy", strategy)[0] == 0
    shutil.copyfile(*(next(Path(src, f"rank_{n}").iterdir()) for n in (0, 1)))
    code, found = checked(capfd, src, "--src-strategy", strategy)
    assert code == 3 and found["wrong"]


@pytest.mark.parametrize("option", ["--check", "--page=page.html"])
def test_a_strategy_is_no_checkpoint(option, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    assert main(["inspect", strategy, option]) == 2
    assert "is a strategy, and no checkpoint" in capfd.readouterr().err


def test_without_a_strategy_a_torn_file_alone_is_wrong(tmp_path, capfd):
    """The missing option was a fault too, with advice of options that inspect does not take."""
    stages, params = [{"w": ([4], [0, -1], 0, 0)}], {"w": ((64, 64), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", stages, params)
    torn = next(Path(src, "rank_2").iterdir())
    os.truncate(torn, torn.stat().st_size - 9)
    code, found = checked(capfd, src)
    assert code == 3 and len(found["wrong"]) == 1 and str(torn) in found["wrong"][0], found
    assert any("give --src-strategy" in text for text in found["not checked"])
    assert not any("--src-config" in text for texts in found.values() for text in texts)


@pytest.mark.parametrize("form", reference_forms.FORMS)
def test_healthy_checkpoints_of_every_form(tmp_path, capfd, form, monkeypatch):
    monkeypatch.setattr(reference, "full_tensor", counted)
    monkeypatch.setattr(reference_forms, "full", lambda case: {
        n: (d, counted(n, s, d)) for n, (s, d) in case.params.items()
    })  # fmt: skip
    seed = done = 0
    while done < HEALTHY:
        seed += 1
        case = random_case(seed, mindspore_agrees=False, whole=False)
        if not reference_forms.can_be_2(case.src, case.params):
            continue
        src, done = tmp_path / str(seed), done + 1
        if form == "ranks":
            reference.write_checkpoint(src, case.src, case.params, {}, make=counted)
        else:
            case.extras.clear()
            reference_forms.write_any(form, src, case, seed)
        told = []
        if form == "ranks":
            strategy = reference.write_strategy(tmp_path / f"{seed}.ckpt", case.src)
            told = ["--src-strategy", strategy]
        code, found = checked(capfd, src, "--full", *told)
        assert code in (0, 6) and not found.get("wrong") and not found.get("doubtful"), found


@pytest.mark.parametrize("sample", sorted(p.parent.name for p in DATA.glob("dcp_*/ckpt")))
@pytest.mark.parametrize("full", [[], ["--full"]])
def test_samples_of_other_frameworks(capfd, sample, full):
    code, found = checked(capfd, DATA / sample / "ckpt", *full)
    assert code == 0 and not found.get("wrong")
    doubts = [one for one in found.get("doubtful", ()) if "do not round" not in one]
    assert not doubts, "the samples' masters are random"


def test_a_rank_without_a_file(tmp_path, capfd):
    """It is wrong where no other holds its slices, doubtful where they do, or nothing tells."""
    params = {"w": ((8, 4), "Float32"), "b": ((6,), "Float32")}
    sharded = [{"w": ([4], [0, -1], 0, 0), "b": ([4], [-1], 0, 0)}]
    copied = [{"w": ([2, 2], [0, -1], 0, 0), "b": ([2, 2], [-1], 0, 0)}]
    for name, layouts in (("sharded", sharded), ("copied", copied)):
        src = Path(reference.write_checkpoint(tmp_path / name, layouts, params))
        strategy = reference.write_strategy(tmp_path / f"{name}.ckpt", layouts)
        shutil.rmtree(src / "rank_2")
        code, found = checked(capfd, src, "--src-strategy", strategy)
        state = "wrong" if name == "sharded" else "doubtful"
        assert code == (3 if name == "sharded" else 0)
        assert any(one.startswith("ranks: rank 2 of ") for one in found[state])
        assert any("ranks: rank 2 has no file" in one for one in checked(capfd, src)[1]["doubtful"])
        shutil.rmtree(src / "rank_3")
        found = checked(capfd, src, "--src-strategy", strategy)[1]
        assert any(one.startswith("ranks: rank 2-3 of ") for one in found[state]), "the last too"


def test_in_python(src, tmp_path):
    found = rankxform.check(src, full=True)
    assert found and found.full and found.form == "dcp" and found.bytes_read >= 2 * WORDS.nbytes
    other_content(src)
    assert not rankxform.check(src, full=True)
    with pytest.raises(rankxform.UsageError, match="unknown option 'cast'"):
        rankxform.check(src, cast="fp16")
    alone = {"w": ("Float32", WORDS)}
    reference.write_safetensors(tmp_path / "one.safetensors", alone)
    with pytest.raises(rankxform.DifferenceError, match="nothing could be compared"):
        bool(rankxform.check(tmp_path / "one.safetensors"))


def test_one_rank_s_file_is_not_wrong_because_a_strategy_is_missing(tmp_path):
    layouts = [{"w": ([4], [0, -1], 0, 0)}]
    src = reference.write_checkpoint(tmp_path / "src", layouts, {"w": ((8, 4), "Float32")})
    found = rankxform.check(Path(src) / "rank_1" / "checkpoint_1.ckpt")
    assert found.same is None and not [row for row in found.rows if row.state == "wrong"]
    assert any("give --src-strategy" in row.text for row in found.rows)


def test_in_words(src, capfd):
    (src / ".metadata.tmp").touch()
    assert main(["inspect", str(src), "--check"]) == 0
    out = capfd.readouterr().out
    assert "PyTorch DCP" in out and "nothing wrong was found" in out
    assert "leftovers doubtful: .metadata.tmp" in out
    assert main(["inspect", str(src), "--full"]) == 2
    assert reference_dcp.read_items(src)[0].keys() == MODEL.keys()


def test_a_byte_of_a_replica_that_no_sample_sees(tmp_path):
    """With --full every byte of replicas is compared, and one that differs is wrong."""
    stage = {"w": ([2, 2], [0, -1], 0, 0), "v": ([2, 2], [0, -1], 0, 0)}
    params = dict.fromkeys("wv", ((2048, 1024), "Float32"))
    src = reference.write_checkpoint(tmp_path / "src", [stage], params)
    a = reference.write_strategy(tmp_path / "a.ckpt", [stage])
    assert rankxform.check(src, a, full=True).same
    path = Path(src, "rank_1/checkpoint_1.ckpt")
    with path.open("r+b") as file:
        file.seek(1_500_000)
        byte = file.read(1)
        file.seek(1_500_000)
        file.write(bytes([byte[0] ^ 1]))
    assert rankxform.check(src, a).same, "samples do not see it"
    found = rankxform.check(src, a, full=True)
    (wrong,) = [row for row in found.rows if row.state == "wrong"]
    assert found.same is False and wrong.check == "replicas"
    assert "rank 1 and rank 3 hold other bytes" in wrong.text
    file_bytes = sum(path.stat().st_size for path in Path(src).glob("*/*"))
    assert found.bytes_read < 1.2 * file_bytes, "replicas are read with all else"
