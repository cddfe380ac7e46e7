"""Files of ranks that lie in other ranks' folders, and files that are cut off: what is advised."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

import rankxform
from tests import reference

NAMES = [f"layers.{number}.w" for number in range(3)]
REPLICATED, ALONE = ([2, 4], [0, -1], 0, 0), ([8], [0, -1], 0, 0)
PARAMS = {**dict.fromkeys(NAMES, ((64, 64), "Float32")), "norm": ((64,), "Float32")}
WHOLE = [{name: ([1], [-1] * len(shape), 0, 0) for name, (shape, _) in PARAMS.items()}]


def made(folder, layout, name="net_rank_{}-1_2"):
    """Write eight ranks, whose files may have the rank's number in their names."""
    stages = [{**dict.fromkeys(NAMES, layout), "norm": ([8], [-1], 0, 0)}]
    src = folder / "src"
    reference.write_checkpoint(src, stages, PARAMS)
    for rank in range(8):
        path = src / f"rank_{rank}/checkpoint_{rank}.ckpt"
        path.rename(path.with_name(f"{name.format(rank)}.ckpt"))
    return src, reference.write_strategy(folder / "a.ckpt", stages)


def file_of(src, rank):
    (path,) = (src / f"rank_{rank}").iterdir()
    return path


def exchange(src, a, b):
    first, second = file_of(src, a), file_of(src, b)
    first.rename(src / "aside")
    second.rename(first.with_name(second.name))
    (src / "aside").rename(second.with_name(first.name))


def refused(src, strategy, dst):
    with pytest.raises(rankxform.CheckpointError) as refusal:
        rankxform.transform(src, dst, strategy, None)
    return refusal.value.parts


@pytest.mark.parametrize("layout", [REPLICATED, ALONE])
@pytest.mark.parametrize("pairs", [[(2, 5)], [(2, 5), (0, 7)], [(0, 1), (1, 2)]])
def test_files_that_by_their_names_were_exchanged(layout, pairs, tmp_path):
    """Also three in a circle; the command puts them right."""
    src, strategy = made(tmp_path, layout)
    for pair in pairs:
        exchange(src, *pair)
    parts = refused(src, strategy, tmp_path / "dst")
    ranks = sorted({rank for pair in pairs for rank in pair})
    names = " and ".join(f"rank_{rank}" for rank in ranks)
    assert f"by their names the files of {names} were exchanged" in parts.what
    subprocess.run(["/bin/sh", "-c", parts.tries[0]], check=True)
    rankxform.transform(src, tmp_path / "dst", strategy, None)
    assert reference.wrong_slices(tmp_path / "dst", WHOLE, PARAMS) == []


def test_files_that_by_samples_were_exchanged(tmp_path):
    src, strategy = made(tmp_path, REPLICATED, "net-1_2")
    exchange(src, 2, 5)
    parts = refused(src, strategy, tmp_path / "dst")
    text = "either those of 1 and 6, or of 2 and 5 were exchanged, and samples do not tell"
    assert parts.tries[0].endswith(text)
    # The exchange of the others makes replicas agree as well, of another checkpoint.
    assert not any("exchange the files" in text for text in parts.tries)
    assert not any("--accept" in text for text in parts.tries)


def test_three_replicas_say_which_two_were_exchanged(tmp_path):
    stages = [dict.fromkeys(NAMES, ([3, 4], [0, -1], 0, 0))]
    src = tmp_path / "src"
    reference.write_checkpoint(src, stages, dict.fromkeys(NAMES, ((64, 64), "Float32")))
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    first, second = file_of(src, 2), file_of(src, 5)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    text = "exchange the files of ranks 2 and 5: each has the other's slices"
    assert refused(src, strategy, tmp_path / "dst").tries[0] == text


@pytest.mark.parametrize("layout", [REPLICATED, ALONE])
def test_a_file_that_was_copied_over_another(layout, tmp_path):
    src, strategy = made(tmp_path, layout, "net-1_2")
    shutil.copyfile(file_of(src, 2), file_of(src, 5))
    parts = refused(src, strategy, tmp_path / "dst")
    told = f"copy {file_of(src, 5)} again: it has the slices of rank 2 or 6"
    if layout is ALONE:
        told = "again: one is a copy of the other"
    assert told in parts.tries[0]
    assert not any("--accept contradictions" in text for text in parts.tries)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
@pytest.mark.parametrize("layout", [REPLICATED, ALONE])
def test_a_file_that_is_cut_off(layout, kind, tmp_path):
    """Where other ranks hold the same slices they may serve instead, by a command that works."""
    stages = [dict.fromkeys(NAMES, layout)]
    params = dict.fromkeys(NAMES, ((64, 64), "Float32"))
    src = reference.write_checkpoint(tmp_path / "src", stages, params, kind=kind)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    path = tmp_path / f"src/rank_2/checkpoint_2.{kind}"
    path.write_bytes(path.read_bytes()[:60])
    tries = refused(src, strategy, tmp_path / "dst").tries
    assert tries[0] == "copy the file again" and "--fallback PLACE" in tries[-1]
    moves = [text for text in tries if text.startswith("mv ")]
    assert len(moves) == (layout is REPLICATED)
    for text in moves:
        subprocess.run(shlex.split(text.partition(",")[0]), check=True)
        rankxform.transform(src, tmp_path / "dst", strategy, None)
        whole = [dict.fromkeys(NAMES, ([1], [-1, -1], 0, 0))]
        assert reference.wrong_slices(tmp_path / "dst", whole, params, kind) == []
