"""The launcher that embeds it: convert if need be, then become the program."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import rankxform
from tests import reference
from tests.mpi_launch import environment, mpirun, run
from tests.place import of_another_step

ROOT = Path(__file__).parents[2]
PARAMS = {"w": ((8, 6), "Float32"), "adam_m.w": ((8, 6), "Float32")}
SRC = [dict.fromkeys(PARAMS, ([4], [0, -1], 0, 0))]
DST = [dict.fromkeys(PARAMS, ([2], [-1, 0], 0, 0))]
PROGRAM = """
import json, os, sys
if "world" in sys.argv:
    from mpi4py import MPI
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.allreduce(1)
else:
    rank, size = int(os.environ["RANK_ID"]), int(os.environ["RANK_SIZE"])
facts = {k: os.environ[k] for k in ("LOAD_CHECKPOINT", "RANK_ID", "RANK_SIZE", "DEVICE_ID")}
told = json.dumps([rank, size, sys.argv[1:], facts])
open(f"told_{rank}.json", "w").write(told)
sys.exit(5 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def place(tmp_path):
    reference.write_checkpoint(tmp_path / "src", SRC, PARAMS)
    reference.write_strategy(tmp_path / "a.ckpt", SRC)
    reference.write_strategy(tmp_path / "b.ckpt", DST)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def launch(place, processes, *words, dst="b.ckpt", src="a.ckpt", options=(), **more):
    start = mpirun(processes) if processes else []
    options = options if processes else ["--any-world-size", *options]
    line = [*start, sys.executable, "-m", "rankxform", "launch", "--load", "src"]
    line += ["--src-strategy", src, "--dst-strategy", dst, "--no-fsync", *options]
    line += ["--", sys.executable, "train.py", *words]
    code, output = run(line, 60, env=environment(PYTHONPATH=str(ROOT), **more), cwd=place)
    told = [json.loads(p.read_text()) for p in sorted(place.glob("told_*.json"))]
    for path in place.glob("told_*.json"):
        path.unlink()
    return code, output, told


@pytest.mark.parametrize("kind", ["world", "plain"])
def test_it_is_converted_once_and_every_process_becomes_the_program(place, kind):
    result = place / "of {rank}" / "transformed_checkpoint"
    for turn in range(2):
        options = ["--output", result.parent, *(["--uses-mpi"] if kind == "world" else [])]
        code, output, told = launch(
            place, 2, kind, "{checkpoint}", "--rank={rank}", options=options
        )
        assert code == 0, output
        assert [(rank, size, words) for rank, size, words, _ in told] == [
            (rank, 2, [kind, str(result), f"--rank={rank}"]) for rank in range(2)
        ]
        assert [facts["RANK_ID"] for *_, facts in told] == ["0", "1"]
        assert [facts["DEVICE_ID"] for *_, facts in told] == ["0", "1"]
        assert {facts["LOAD_CHECKPOINT"] for *_, facts in told} == {str(result)}
        assert ("2 files complete already" in output) == bool(turn)
        assert reference.wrong_slices(result, DST, PARAMS) == []
    assert (result.parent / "strategy/b.ckpt").read_bytes() == (place / "b.ckpt").read_bytes()


def test_what_fits_is_not_copied(place):
    code, output, told = launch(place, 4, "plain", dst="a.ckpt")
    assert code == 0 and len(told) == 4
    assert "is sharded as a.ckpt wants it; nothing is converted" in output
    assert {facts["LOAD_CHECKPOINT"] for *_, facts in told} == {str(place / "src")}
    assert not (place / "output").exists()


def test_a_rank_beyond_the_strategy_does_not_matter(place):
    (place / "src/rank_9").mkdir()
    shutil.copy(place / "src/rank_0/checkpoint_0.ckpt", place / "src/rank_9/checkpoint_9.ckpt")
    code, output, told = launch(
        place, None, "plain", dst="a.ckpt", options=["--accept", "extra-ranks"]
    )
    assert code == 0 and len(told) == 1, output
    assert "nothing is converted" in output


def test_another_description_of_the_same_sharded_fits(place):
    same = [dict.fromkeys(PARAMS, ([2, 2], [[1, 0], -1], 0, 0))]
    reference.write_strategy(place / "same.ckpt", same)
    _, output, told = launch(place, None, "plain", dst="same.ckpt")
    assert "nothing is converted" in output and len(told) == 1
    other = [dict.fromkeys(PARAMS, ([2, 2], [[0, 1], -1], 0, 0))]
    reference.write_strategy(place / "other.ckpt", other)
    _, output, told = launch(place, None, "plain", dst="other.ckpt")
    assert "nothing is converted" not in output and len(told) == 1


def test_weights_alone_of_a_training_checkpoint_fit(place):
    reference.write_strategy(place / "predict.ckpt", [{"w": SRC[0]["w"]}])
    _, output, told = launch(place, None, "plain", dst="predict.ckpt")
    assert "nothing is converted" in output and len(told) == 1


def test_a_missing_rank_does_not_fit(place):
    (place / "src/rank_3/checkpoint_3.ckpt").unlink()
    options = ["--any-world-size"]
    code, output, told = launch(place, 2, "plain", dst="a.ckpt", options=options)
    assert code == 3 and told == [] and "rank 3 has no file" in output


@pytest.mark.parametrize("processes", [None, 3])
def test_no_program_is_started_where_the_conversion_fails(place, processes):
    (place / "src/rank_1/checkpoint_1.ckpt").write_bytes(b"\x0a\xff")
    code, output, told = launch(place, processes, "plain")
    assert code == 3 and told == []
    assert output.count("rankxform: error:") == 1


def test_the_programs_exit_code_is_its_own(place):
    assert launch(place, None, "plain", "fail")[0] == 5
    assert launch(place, 2, "plain", "fail")[0] != 0


def test_what_a_job_says_of_itself_stays(place):
    _, _, ((_, size, _, facts),) = launch(
        place, None, "plain", RANK_ID="6", RANK_SIZE="1", DEVICE_ID="2"
    )
    assert (size, facts["RANK_ID"], facts["DEVICE_ID"]) == (1, "6", "2")


def test_workers_without_mpi_are_sent_elsewhere(place):
    code, output, told = launch(place, None, "plain", MS_WORKER_NUM="8")
    assert code == 2 and told == []
    assert "8 workers were started without MPI, as by msrun" in output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["launch", "--load", "src"], "which program? launch --load CKPT ... -- python"),
        (["launch", "--load", "src", "--", "no such"], "there is no program 'no such' in PATH"),
        (
            ["transform", "src", "d", "--", "python"],
            "arguments after -- are only accepted by `launch`",
        ),
        (["launch", "--", "python"], "launch has no --load CKPT"),
    ],
)
def test_mistakes(place, line, words):
    code, output = run([sys.executable, "-m", "rankxform", *line], 60, env=environment(), cwd=place)
    assert code == 2 and words in output


def test_an_inputs_change_is_said(place):
    launch(place, None, "plain")
    os.utime(place / "src/rank_2/checkpoint_2.ckpt", (time.time(), time.time()))
    code, _, told = launch(place, None, "plain")
    assert code == 0 and len(told) == 1  # copied: its bytes are the same
    of_another_step(place / "src/rank_2/checkpoint_2.ckpt")
    code, output, told = launch(place, None, "plain")
    assert code == 4 and told == [] and "of rank 2 was changed" in output
    code, output, told = launch(place, None, "plain", options=["--overwrite"])
    assert code == 0 and len(told) == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--step", "1_1"],
        ["--exclude", "adam"],
        ["--format", "safetensors"],
        ["--prefix", "x", "--ranks", "0-3"],
    ],
)
def test_what_asks_for_a_choice_or_another_form_is_converted(place, options):
    if "--step" in options:
        for rank in range(4):
            for step in ("1_1", "2_1"):
                shard = place / f"src/rank_{rank}/checkpoint_{rank}.ckpt"
                (shard.parent / f"net-{step}.ckpt").write_bytes(shard.read_bytes())
            shard.unlink()
    code, output, told = launch(place, None, "plain", dst="a.ckpt", options=options)
    assert code == 0 and "nothing is converted" not in output
    assert told[0][3]["LOAD_CHECKPOINT"].endswith("transformed_checkpoint")


def test_no_training_goes_on_from_an_older_step_unasked(place):
    for rank in range(4):
        shard = place / f"src/rank_{rank}/checkpoint_{rank}.ckpt"
        for step in ("1_1", "2_1") if rank != 3 else ("1_1",):
            (shard.parent / f"net-{step}.ckpt").write_bytes(shard.read_bytes())
        shard.unlink()
    code, output, told = launch(place, None, "plain")
    assert (code, told) == (3, [])
    assert "epoch 2 step 1 is newer but not complete: rank 3 has no file of it" in output
    code, output, told = launch(place, None, "plain", options=["--step", "1_1"])
    assert code == 0 and len(told) == 1 and "WARNING" not in output


def test_the_sources_own_strategy_is_never_removed(place):
    """MindFormers keeps it where the next job's belongs."""
    (place / "output/strategy").mkdir(parents=True)
    (place / "a.ckpt").rename(place / "output/strategy/a.ckpt")
    (place / "output/strategy/notes.json").write_text("{}")
    for options in ([], ["--overwrite"]):
        code, output, told = launch(
            place, None, "plain", src="output/strategy/a.ckpt", options=options
        )
        assert (code, told) == (4, []), output
        assert (
            "a.ckpt: is the source's strategy" in output
            and "choose another folder, such as --output" in output
        )
    assert (place / "output/strategy/a.ckpt").exists()
    options = ["--overwrite", "--output", "other"]
    (place / "other/strategy").mkdir(parents=True)
    (place / "other/strategy/notes.json").write_text("{}")
    code, output, told = launch(place, None, "plain", src="output/strategy/a.ckpt", options=options)
    assert code == 0 and len(told) == 1
    assert (place / "other/strategy/notes.json").exists()


def test_no_training_starts_from_shards_without_a_strategy(place):
    code, output, told = launch(place, None, "plain", src="none")
    assert (code, told) == (3, []) and "try  --src-strategy FILE" in output
    line = [sys.executable, "-m", "rankxform", "launch", "--load", "src", "--", sys.executable]
    code, output = run([*line, "train.py"], 60, env=environment(), cwd=place)
    assert code == 2 and "files of 4 ranks, and no --src-strategy says" in output


def test_several_files_of_a_rank_do_not_fit_for_loaders_differ(place):
    for rank in range(4):
        shard = place / f"src/rank_{rank}/checkpoint_{rank}.ckpt"
        for step in ("9_1", "10_1"):
            (shard.parent / f"net-{step}.ckpt").write_bytes(shard.read_bytes())
        shard.unlink()
    _, output, _ = launch(place, None, "plain", dst="a.ckpt")
    assert "nothing is converted" not in output and "epoch 10 step 1" in output


def test_what_a_conversion_would_refuse_does_not_fit(place):
    data = (place / "src/rank_0/checkpoint_0.ckpt").read_bytes()
    for rank in range(1, 4):
        (place / f"src/rank_{rank}/checkpoint_{rank}.ckpt").write_bytes(data)
    big = {"w": ((256, 64), "Float32")}
    sharded = [{"w": ([4], [-1, -1], 0, 0)}]
    reference.write_checkpoint(place / "src", sharded, big)
    code, output, told = launch(place, None, "plain", dst="a.ckpt")
    assert code == 3 and told == [] and "every rank holds the same bytes" in output


def test_another_conversion_into_the_same_output_mixes_nothing(place):
    launch(place, None, "plain")
    three = [dict.fromkeys(PARAMS, ([1], [-1, -1], 0, 0))]
    reference.write_strategy(place / "c.ckpt", three)
    code, output, told = launch(place, None, "plain", dst="c.ckpt")
    assert code == 4 and told == [] and "b.ckpt: is of another strategy than c.ckpt" in output
    code, output, told = launch(place, None, "plain", dst="c.ckpt", options=["--overwrite"])
    assert code == 0, output
    assert [p.name for p in (place / "output/strategy").iterdir()] == ["c.ckpt"]
    result = place / "output/transformed_checkpoint"
    assert [p.name for p in result.glob("rank_*")] == ["rank_0"]


def test_the_launchers_numbers_count_under_mpirun(place):
    _, _, told = launch(place, 2, "plain", RANK_ID="0", RANK_SIZE="7", DEVICE_ID="0")
    assert [(rank, size, facts["DEVICE_ID"]) for rank, size, _, facts in told] == [
        (0, 2, "0"),
        (1, 2, "1"),
    ]


def test_a_program_that_cannot_be_started(place):
    bad = place / "bad"
    bad.write_text("")
    bad.write_bytes(b"\x7fELF no program")
    bad.chmod(0o755)
    strategies = "--src-strategy", "a.ckpt", "--dst-strategy", "b.ckpt"
    line = [sys.executable, "-m", "rankxform", "launch", "--load", "src", *strategies]
    line += ["--no-fsync", "--any-world-size", "--", "./bad"]
    code, output = run(line, 60, env=environment(), cwd=place)
    assert code == 2 and "./bad: cannot be started: Exec format error" in output
    assert "Traceback" not in output


def test_a_derived_strategy_is_kept_for_the_next_job(place):
    """The first launch derives, prints and keeps it; the next finds the checkpoint fit by it."""
    sizes = ["--src-parallel", "dp=1,mp=4", "--dst-parallel", "dp=1,mp=2"]
    sizes += ["--optimizer-shard", "off", "--any-world-size"]
    start = [sys.executable, "-m", "rankxform", "launch", "--no-fsync", "--load"]
    program = ["--", sys.executable, "train.py"]
    more = environment(PYTHONPATH=str(ROOT))
    line = [*start, "src", "--src-strategy", "a.ckpt", *sizes, *program]
    code, output = run(line, 60, env=more, cwd=place)
    assert code == 0, output
    assert "axis 0 into 4, 1 copy -> axis 0 into 2, 1 copy; (mp, None)" in output
    kept = place / "output/strategy/ckpt_strategy_rank_0.ckpt"
    made = place / "output/transformed_checkpoint"
    half = [dict.fromkeys(PARAMS, ([2], [0, -1], 0, 0))]
    assert reference.wrong_slices(made, half, PARAMS) == []
    assert not list((place / "output").glob("*_strategy.ckpt"))
    sizes[1] = "dp=1,mp=2"
    line = [*start, str(made), "--src-strategy", str(kept), *sizes, *program]
    code, output = run(line, 60, env=more, cwd=place)
    assert code == 0, output
    assert "nothing is converted" in output


def test_stage_files_are_kept_merged_too(place):
    """MindFormers promises a merged file in output/strategy."""
    stages = [{"w": ([2], [0, -1], 0, 0)}, {"adam_m.w": ([2], [0, -1], 0, 0)}]
    reference.write_stage_files(place / "stages", stages)
    code, output, told = launch(place, 0, dst="stages")
    assert code == 0, output
    assert told
    kept = place / "output/strategy"
    assert sorted(path.name for path in kept.iterdir()) == [
        "ckpt_strategy_rank_0.ckpt", "ckpt_strategy_rank_1.ckpt", "merged_ckpt_strategy.ckpt"
    ]  # fmt: skip
    assert rankxform.inspect(kept / "merged_ckpt_strategy.ckpt")["stages"] == 2
    assert rankxform.inspect(kept)["stages"] == 2


def test_the_program_is_started_as_the_launcher_was(place):
    """Python ignores SIGPIPE and SIGXFSZ, and reading many files raises a limit: not the program's."""
    words = [
        sys.executable,
        "-m",
        "rankxform",
        "launch",
        "--load",
        "src",
        "--src-strategy",
        "a.ckpt",
    ]
    words += ["--dst-strategy", "none", "--no-fsync", "--", "/bin/sh", "-c"]
    words += ["grep SigIgn /proc/self/status > ignored; ulimit -n > limit; umask > mask"]
    line = ["/bin/sh", "-c", 'ulimit -Sn 200; umask 027; exec "$@"', "sh", *words]
    code, output = run(line, 60, env=environment(PYTHONPATH=str(ROOT)), cwd=place)
    assert code == 0, output
    ignored = int((place / "ignored").read_text().split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))
    assert (place / "limit").read_text() == "200\n" and (place / "mask").read_text() == "0027\n"


@pytest.mark.parametrize("processes", [None, 3])
def test_processes_that_are_not_as_many_as_ranks(place, processes):
    """A forgotten mpirun started rank 0 of 1 with a slice of two ranks. The try works as it is."""
    start = mpirun(processes) if processes else []
    words = ["launch", "--load", "src", "--src-strategy", "a.ckpt", "--dst-strategy", "b.ckpt"]
    program = ["--no-fsync", "--", sys.executable, "train.py", "plain"]
    more = environment(PYTHONPATH=str(ROOT))
    line = [*start, sys.executable, "-m", "rankxform", *words, *program]
    code, output = run(line, 60, env=more, cwd=place)
    assert code == 2 and not [*place.glob("told_*")] and not (place / "output").exists()
    assert "the destination has 2 ranks, and the program is started by another" in output
    assert f"number of processes: {processes or 1}\n" in output
    (told,) = {text for text in output.splitlines() if "  try  " in text}
    again = shlex.split(told.partition("try")[2])
    assert again[:6] == ["mpirun", "-n", "2", "python", "-m", "rankxform"]
    code, output = run([*mpirun(2), sys.executable, *again[4:]], 60, env=more, cwd=place)
    assert code == 0 and len([*place.glob("told_*")]) == 2, output


def test_a_whole_checkpoint_is_for_any_number_of_processes(place):
    code, output, told = launch(place, 2, "plain", dst="none")
    assert code == 0 and len(told) == 2, output


@pytest.mark.parametrize("word", ["{chekpoint}", "--load={checkpoints}", "{ranks}"])
def test_a_word_that_is_nearly_one_that_is_filled_in(place, word):
    code, output, told = launch(place, 2, "plain", word)
    assert (code, told) == (2, []) and "is not filled in; did you mean" in output
    code, output, told = launch(place, 2, "plain", "{epoch}", "{}", "{rank}")
    assert code == 0 and told[0][2][1:3] == ["{epoch}", "{}"]
    assert "the program gets {epoch} as it is; {rank} and {checkpoint} are filled in" in output
