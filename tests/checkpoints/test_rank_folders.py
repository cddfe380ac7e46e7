"""Which file is rank N's: never guessed."""

from __future__ import annotations

import os

import pytest

import rankxform
from rankxform.checkpoints.base import DEFAULT_PATTERN, FORMS, CheckpointRef, RankFilter
from rankxform.errors import CheckpointError, UsageError
from rankxform.storage.store import PosixStore
from tests import reference


def find(folder, ranks, pattern=DEFAULT_PATTERN, step=None, suffix=None):
    store = PosixStore(folder)
    where = CheckpointRef(str(folder), pattern=pattern, step=step, suffix=suffix)
    return FORMS["ranks"].select(store.list(pattern), where, store, RankFilter(ranks))


def make(tmp, *names):
    for name in names:
        path = tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp


def test_the_newest_step_that_all_ranks_have(tmp_path):
    make(tmp_path, *(f"rank_{r}/net-{e}_5.ckpt" for r in (0, 1) for e in (2, 9, 10)))
    make(tmp_path, "rank_0/net-11_5.ckpt")
    found = find(tmp_path, [0, 1])
    assert found.names == {r: f"rank_{r}/net-10_5.ckpt" for r in (0, 1)}
    assert found.step == (10, 5)
    assert found.skipped_steps == ((2, 5), (9, 5), (11, 5))
    assert found.missing_ranks == {(11, 5): (1,)}
    with pytest.raises(CheckpointError, match="epoch 11 step 5 is newer but not complete: rank 1"):
        find(tmp_path, [0, 1], step="latest")
    make(tmp_path, "rank_1/net-11_5.ckpt")
    assert find(tmp_path, [0, 1], step="latest").step == (11, 5)


def test_the_time_of_modification_does_not_matter(tmp_path):
    make(tmp_path, "rank_0/net-1_5.ckpt", "rank_0/net-2_5.ckpt")
    os.utime(tmp_path / "rank_0/net-2_5.ckpt", (1, 1))
    assert find(tmp_path, [0]).step == (2, 5)


def test_no_common_step_is_an_error_that_lists_the_files(tmp_path):
    make(tmp_path, "rank_0/net-1_5.ckpt", "rank_1/net-2_5.ckpt")
    with pytest.raises(
        CheckpointError,
        match=r"no step is there for every rank.*net-2_5.*net-1_5|no step.*net-1_5.*net-2_5",
    ):
        find(tmp_path, [0, 1])


def test_a_step_or_suffix_chooses(tmp_path):
    make(tmp_path, "rank_0/net-1_5.ckpt", "rank_0/net-2_5.ckpt", "rank_0/net_breakpoint.ckpt")
    with pytest.raises(CheckpointError, match="state an epoch and a step and some do not"):
        find(tmp_path, [0])
    assert find(tmp_path, [0], step="1_5").names[0] == "rank_0/net-1_5.ckpt"
    assert find(tmp_path, [0], suffix="breakpoint").names[0] == "rank_0/net_breakpoint.ckpt"
    with pytest.raises(UsageError, match="such as 10_73"):
        find(tmp_path, [0], step="five")
    with pytest.raises(
        CheckpointError, match="rank 0 lacks step .*; of rank 0 the steps are 1_5, 2_5"
    ):
        find(tmp_path, [0], step="7_7")
    with pytest.raises(CheckpointError, match="rank 0 has no checkpoint"):
        find(tmp_path, [0], suffix="elsewhere")


def test_a_step_without_its_epoch(tmp_path):
    make(tmp_path, *(f"rank_{r}/net-{step}.ckpt" for r in (0, 1) for step in ("1_5", "2_5", "2_9")))
    assert find(tmp_path, [0, 1], step="9").names[1] == "rank_1/net-2_9.ckpt"
    with pytest.raises(UsageError, match="--step 5: say which; there are 1_5, 2_5"):
        find(tmp_path, [0, 1], step="5")
    with pytest.raises(
        CheckpointError, match="--step 6: no such step; the steps are 1_5, 2_5, 2_9"
    ):
        find(tmp_path, [0, 1], step="6")


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint_{r}",
        "llama_rank_{r}-3_4",
        "net-1_2",
        "checkpoint_1-10_73",
        "transformed{r}",
        "rank{r}_x-1_1",
    ],
)
def test_names_with_and_without_the_ranks_number_are_one_family(name, tmp_path):
    make(tmp_path, *(f"rank_{r}/{name.format(r=r)}.ckpt" for r in range(12)))
    assert len(find(tmp_path, range(12)).names) == 12


def test_two_runs_in_one_folder_are_two_families(tmp_path):
    make(
        tmp_path,
        *(f"rank_{r}/{n}-1_5.ckpt" for r in (0, 1, 2) for n in ("checkpoint", "checkpoint_1")),
    )
    with pytest.raises(CheckpointError, match="families"):
        find(tmp_path, [0, 1, 2])


@pytest.mark.parametrize("is_beside", [False, True])
def test_another_ranks_file_is_named(is_beside, tmp_path):
    """It was "2 families", and none of the three options helped."""
    names = {r: [f"rank_{r}/checkpoint_{r}.ckpt"] for r in range(4)}
    names[2] = ["rank_2/checkpoint_1.ckpt", *(names[2] if is_beside else [])]
    make(tmp_path, *(name for of_rank in names.values() for name in of_rank))
    told = r"checkpoint_1.ckpt lies in rank_2, and by its name is rank_1's; mv (\S+) (\S+)\.aside"
    with pytest.raises(CheckpointError, match=told) as refused:
        find(tmp_path, [0, 1, 2, 3])
    assert ("copy the file of rank_2 again" in str(refused.value)) != is_beside
    path = tmp_path / "rank_2/checkpoint_1.ckpt"
    path.rename(f"{path}.aside")
    if is_beside:
        assert find(tmp_path, [0, 1, 2, 3]).names[2] == "rank_2/checkpoint_2.ckpt"


def test_both_formats_are_two_families(tmp_path):
    make(tmp_path, "rank_0/net-1_5.ckpt", "rank_0/net-1_5.safetensors")
    with pytest.raises(CheckpointError, match="families"):
        find(tmp_path, [0])
    assert find(tmp_path, [0], pattern="rank_{rank}/*.ckpt").names == {0: "rank_0/net-1_5.ckpt"}


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("ckpt_{rank}/*.ckpt", "ckpt_{r}/auto_parallel-6_1.ckpt"),
        ("node{rank}/CKP_1-4_32.ckpt", "node{r}/CKP_1-4_32.ckpt"),
        ("rank_{rank}/rank_{rank}.ckpt", "rank_{r}/rank_{r}.ckpt"),
        ("*/rank_{rank}/*", "run/rank_{r}/net.safetensors"),
        ("w_{rank}.safetensors", "w_{r}.safetensors"),
    ],
)
def test_other_patterns(pattern, name, tmp_path):
    make(tmp_path, *(name.format(r=r) for r in range(3)))
    assert find(tmp_path, [0, 1, 2], pattern).names == {r: name.format(r=r) for r in range(3)}


def test_a_pattern_must_say_where_the_rank_is(tmp_path):
    with pytest.raises(UsageError, match="{rank} must stand"):
        find(tmp_path, [0], pattern="*.ckpt")


def test_what_is_no_rank_folder_is_passed_over(tmp_path):
    make(
        tmp_path,
        "rank_0/a.ckpt",
        "rank_1x/a.ckpt",
        "rank_x/a.ckpt",
        "rank_0/graph.meta",
        "log.ckpt",
    )
    assert find(tmp_path, [0]).names == {0: "rank_0/a.ckpt"}


def test_a_rank_that_is_there_twice(tmp_path):
    make(tmp_path, "rank_1/a.ckpt", "rank_01/a.ckpt")
    with pytest.raises(CheckpointError, match="both rank 1's"):
        find(tmp_path, [1])


def test_glob_characters_and_links_in_the_path(tmp_path):
    odd = tmp_path / "run [1] *"
    make(odd, "rank_0/a.ckpt")
    link = tmp_path / "link"
    link.symlink_to(odd)
    assert len(find(odd, [0]).names) == len(find(link, [0]).names) == 1


def test_ranks_that_are_not_needed_do_not_decide_the_step(tmp_path):
    make(tmp_path, "rank_0/net-2_5.ckpt", "rank_1/net-1_5.ckpt")
    found = find(tmp_path, [0])
    assert found.names == {0: "rank_0/net-2_5.ckpt"}


def test_a_folder_without_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint at.*--src-pattern"):
        find(tmp_path, [0])


@pytest.mark.parametrize("text", ["a\nb", "\n", "a b", "größe", "it's"])
def test_a_name_of_any_characters(text, tmp_path):
    """A file's name may have an end of line, which a message shows as a sign."""
    params, stage = {"w": ((8, 4), "Float32")}, [{"w": ([2], [0, -1], 0, 0)}]
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stage)
    src = reference.write_checkpoint(tmp_path / text, stage, params, name=f"net{text}-3_70")
    found = rankxform.load(src, strategy, None)["w"]
    assert found.tobytes() == reference.full_tensor("w", *params["w"]).tobytes()
    path = next((tmp_path / text / "rank_1").iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError) as error:
        rankxform.load(src, strategy, None)
    line = str(error.value).splitlines()[0]
    assert str(path).replace("\n", "\\n") in line and "cut off" in line
