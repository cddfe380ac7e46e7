"""The command as people start it: with and without mpirun, in the spellings they know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankxform.cli.main import main, run_of
from rankxform.cli.parser import COMMANDS
from rankxform.errors import UsageError
from rankxform.transport import mpirun as own_mpirun
from tests import reference
from tests.mpi_launch import environment, mpirun, run
from tests.place import Place

PARAMS = {"w": ((8, 6), "Float32"), "adam_m.w": ((8, 6), "Float32")}
SHARDED = [dict.fromkeys(PARAMS, ([4], [0, -1], 0, 0))]
ACROSS = [{"w": ([3], [-1, 0], 0, 0)}]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, SHARDED, ACROSS, PARAMS, name="net-3_70")


def right(place):
    return reference.wrong_slices(place.dst, ACROSS, {"w": PARAMS["w"]}) == []


def command(*arguments, processes=None, **options):
    """Run rankxform; return (exit code, output), errors and output together."""
    start = mpirun(processes) if processes else []
    line = [*start, sys.executable, "-m", "rankxform", *map(str, arguments)]
    return run(line, 60, env=environment(), cwd=ROOT, **options)


def test_a_verb_from_outside(place):
    program = (
        "import sys; from rankxform.cli.main import main; from tests.cli import toy_verb\n"
        "toy_verb.register()\n"
        "sys.exit(main())"
    )

    def tally(processes, *words):
        line = [*(mpirun(processes) if processes else []), sys.executable, "-c", program, *words]
        code, output = run(line, 60, env=environment(), cwd=ROOT)
        # where processes start slowly, it says first that it is at work
        return code, re.sub(r"^rankxform: at work \(\d+ s\)\n", "", output)

    assert tally(None, "tally", place.src, "--twice") == (0, "8 files, 1 processes\n")
    assert tally(2, "tally", place.src) == (0, "4 files, 2 processes\n")
    code, text = tally(2, "tally", place.src, "--json")
    assert (code, json.loads(text)["files"]) == (0, 4)
    assert "tally" in tally(None, "--help")[1]
    code, text = tally(None, "tally", place.src, "--thrice")
    assert code == 2 and "tally has no option" in text


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("verb", ["plan", "inspect", "ranks"])
def test_a_result_that_cannot_be_printed_is_one_message(verb, processes, place):
    words = [place.src] if verb == "inspect" else []
    words += [] if verb == "inspect" else place.strategies
    words = [place.src, *words] if verb == "plan" else words
    start = mpirun(processes) if processes else []
    program = (
        "import os, sys; from rankxform.cli.main import main\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "sys.exit(main())"
    )
    line = [*start, sys.executable, "-c", program, verb, *map(str, words)]
    code, text = run(line, 60, env=environment(), cwd=ROOT)
    assert code == 4 and "No space left on device" in text and "Traceback" not in text


def test_every_command_has_options_and_does_something():
    for command in COMMANDS.values():
        assert run_of(command) and command.options


def error_lines(output):
    return [line for line in output.splitlines() if line.startswith("rankxform: error:")]


def test_options_that_are_not_meant_are_refused(place):
    code, output = command("verify", place.src, "--rename", "a=b")
    assert code == 2 and "--rename and one folder: it is compared with its own manifest" in output
    code, output = command("verify", place.src)
    assert code == 2 and "there is no manifest" in output and "verify SRC DST" in output
    code, output = command("inspect", place.src, "--step", "1_1")
    assert code == 2 and "--step is for --check, --replicas" in output
    code, output = command("ranks", *place.strategies, "--include", "w")
    assert code == 2 and "--include needs SRC" in output
    code, output = command("ranks", place.src, *place.strategies, "--include", "w")
    assert code == 0 and "needs source ranks" in output
    code, output = command("plan", place.src, "--shapes", place.a, "--src-strategy", place.a)
    assert code == 2 and "SRC and --shapes" in output


def test_a_source_of_more_ranks_than_its_strategy(place):
    half = reference.write_strategy(
        place.tmp / "half.ckpt", [dict.fromkeys(PARAMS, ([2], [0, -1], 0, 0))]
    )
    odd = reference.write_strategy(place.tmp / "odd.ckpt", [{"w": ([5], [-1, 0], 0, 0)}])
    code, output = command(
        "transform", place.src, place.dst, "--src-strategy", half, "--dst-strategy", odd
    )
    assert code == 3 and "is of 2 ranks, and the checkpoint has 4" in output
    assert not place.dst.exists()


@pytest.mark.parametrize("processes", [None, 3])
def test_results_as_json(processes, place):
    flags = [*place.strategies, "--json", "--progress", "none"]
    code, output = command("transform", place.src, place.dst, *flags, processes=processes)
    found = json.loads(output)
    assert code == 0 and right(place)
    assert (found["src"], found["dst"]) == (str(place.src), str(place.dst))
    assert (found["step"], found["src_ranks"], found["dst_ranks"]) == ("3_70", 4, 3)
    assert len(found["files"]) == 3 and found["left_out"][0]["names"] == ["adam_m.w"]
    code, output = command("verify", place.src, place.dst, *flags, processes=processes)
    found = json.loads(output)
    assert code == 0 and (found["same"], found["step"], found["differences"]) == (True, "3_70", [])


SPELLINGS = {
    "mindformers": ("--src_ckpt_strategy", "--dst_ckpt_strategy", "--src_ckpt_dir", "--dst_ckpt_dir"),
    "mindformers later": ("--src_strategy", "--dst_strategy", "--src_checkpoint", "--dst_checkpoint_dir"),
    "tutorials": (
        "--src_strategy_file", "--dst_strategy_file", "--src_checkpoints_dir", "--dst_checkpoints_dir",
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("joined", [False, True])
def test_the_command_lines_of_other_tools(spelling, joined, place):
    values = (place.a, place.b, place.src, place.dst)
    flags = list(zip(SPELLINGS[spelling], values))
    words = [f"{f}={v}" for f, v in flags] if joined else [w for pair in flags for w in pair]
    code, output = command(*words, "--prefix", "checkpoint_")
    assert code == 0, output
    assert right(place)


def test_mindformers_script_writes_ckpt_files_and_takes_abbreviations(place):
    """transform_ckpt.py reads safetensors too, and its argparse takes --pre for --prefix."""
    values = ("--src_ckpt_strategy", place.a, "--dst_ckpt_s", place.b, "--pre", "new_")
    folder = place.src.parent / "safetensors"
    code, output = command("transform", place.src, folder, "--src-strategy", place.a,
                           "--dst-strategy", place.a, "--format", "safetensors")  # fmt: skip
    assert code == 0, output
    code, output = command("--src_ckpt_dir", folder, "--dst_ckpt_dir", place.dst, *values)
    assert code == 0, output
    assert [path.suffix for path in place.dst.glob("rank_*/new_*")] == [".ckpt"] * 3
    code, output = command("--src_ckpt_dir", folder, "--dst_ckpt_d", place.dst, "--src_ckpt", "x")
    assert code == 2 and "no option --src" in output


def test_what_means_nothing_here_is_ignored_with_a_note(place):
    code, output = command(
        "--src_checkpoint", place.src, "--dst_checkpoint_dir", place.dst, "--src_strategy", place.a,
        "--dst_strategy", place.b, "--world_size", 8, "--rank_id", 0, "--transform_process_num", 2,
    )  # fmt: skip
    assert code == 0, output
    assert right(place)
    assert "--world_size, --rank_id, --transform_process_num: not needed" in output
    assert "rank_N lies in DST;" in output


@pytest.mark.sampled
@pytest.mark.parametrize("processes", [None, 3])
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["transform"], 2, "name SRC, the checkpoint"),
        (["transform", "{src}"], 2, "name DST, the folder"),
        (["transform", "{src}", "{dst}", "--frobnicate"], 2, "transform has no option --frobnicate (see"),
        (["transform", "{src}", "{dst}", "--ranks", "x"], 2, "0,2-5"),
        (["transform", "{src}", "{dst}", "--memory", "much"], 2, "256M"),
        (["transform", "{src}", "{dst}", "--costs", "read=1G,speed=1"], 2, "'speed=1': expected one =VALUE each of read, write"),
        (["transform", "{src}", "{dst}", "--costs", "read=0"], 2, "more than nothing"),
        (["transform", "{src}", "{dst}", "--costs", "read_latency=1G"], 2, "a time such as 100us"),
        (["transform", "{src}", "{dst}", "--costs", "overlap=2"], 2, "a share from 0 to 1"),
        (["transform", "{src}", "{dst}", "--ranks", "3", "--src-strategy", "{a}", "--dst-strategy", "{b}"], 2, "destination rank 3 does not exist"),
        (["transform", "{src}", "{dst}", "--dst-strategy", "{b}"], 2, "--src-strategy none"),
        (["transform", "{src}", "{dst}", "--src-strategy", "{src}/rank_0/net-3_70.ckpt"], 3, "net-3_70.ckpt"),
        (["transform", "{a}/x", "{dst}"], 2, "no such checkpoint"),
        (["transform", "{src}", "{a}", "--src-strategy", "{a}"], 4, "a.ckpt: is a file, and DST must be a folder"),
        (["transfrom"], 2, "there is no verb transfrom; did you mean transform?"),
        (["strategy", "show", "{a}", "--jsn"], 2, "strategy show has no option --jsn; did you mean --json?"),
        (["frobnicate"], 2, "there is no verb frobnicate (see"),
    ],
)  # fmt: skip
def test_errors_are_one_message_and_the_ruled_exit_code(processes, arguments, code, words, place):
    filled = [a.format(src=place.src, dst=place.dst, a=place.a, b=place.b) for a in arguments]
    found, output = command(*filled, processes=processes)
    assert found == code, output
    assert len(error_lines(output)) == 1, output
    assert words in output
    assert "Traceback" not in output
    assert not list(place.dst.rglob("*.ckpt"))


def test_a_truncated_shard_under_mpirun_ends_all_processes_with_one_message(place):
    shard = Path(place.src) / "rank_2" / "net-3_70.ckpt"
    os.truncate(shard, 50)
    began = time.monotonic()
    code, output = command("transform", place.src, place.dst, *place.strategies, processes=3)
    assert code == 3, output
    assert len(error_lines(output)) == 1 and "rank_2/net-3_70.ckpt" in output
    assert time.monotonic() - began < 30
    assert not list(place.dst.rglob("*.ckpt"))


def test_a_killed_process_takes_the_others_down_and_leaves_no_final_name(place):
    """The victim stops itself while the others work and wait."""
    program = (
        "import os, sys; import rankxform.target.folder as job; from rankxform.cli.main import main\n"
        "write = job.write_parts\n"
        "def die(*a, **k):\n"
        "    done = write(*a, **k)\n"
        "    if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return done\n"
        "job.write_parts = die\n"
        "sys.exit(main())"
    )
    line = [*mpirun(3), sys.executable, "-c", program, "transform", place.src, str(place.dst)]
    code, output = run([*line, *place.strategies], 40, env=environment(), cwd=ROOT)
    assert code not in (0, "deadline"), output
    assert not list(place.dst.rglob("checkpoint_?.ckpt"))


def uses_open_mpi():
    told = subprocess.run([*mpirun(1)[:1], "--version"], capture_output=True, text=True, check=True)
    return "Open MPI" in told.stdout


def test_another_mpis_launcher_is_refused_once(place):
    """Before MPI_Init, which would abort, or find each process alone."""
    own_is_open = uses_open_mpi()
    for rank in (0, 2):
        theirs = {"PMI_FD": "9", "PMI_SIZE": "4", "PMI_RANK": str(rank)}
        if not own_is_open:
            theirs = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": str(rank)}
        done = subprocess.run(
            [sys.executable, "-m", "rankxform", "transform", place.src, place.dst],
            env={**environment(), **theirs},
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert len(error_lines(done.stderr)) == (rank == 0)
        if rank == 0:
            assert "try  rankxform transform -n P ..." in done.stderr
            name = "MPICH" if own_is_open else "Open MPI"
            assert f"this mpirun is {name}'s, and this Python uses " in done.stderr
    assert not place.dst.exists()


@pytest.mark.parametrize("processes", [1, 3])
def test_the_command_starts_its_own_processes(processes, place):
    code, output = command("transform", "-n", processes, place.src, place.dst, *place.strategies)
    assert code == 0 and right(place), output
    assert re.search(rf"rankxform [\d.]+, {processes} process", output)
    code, output = command("verify", f"-n{processes}", place.src, place.dst, *place.strategies)
    assert code == 0 and "every byte compared" in output
    (place.tmp / "json.py").write_text("raise SystemExit('not this one')")
    words = [sys.executable, "-m", "rankxform", "verify", "-qn", processes, place.src, place.dst]
    words = ["sh", "-c", f'cd {place.tmp} && exec rankxform "$@"', "sh", *words[3:]]
    words += place.strategies
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("same "), done.stderr + done.stdout
    code, output = command("verify", place.src, place.dst, *place.strategies, "--hostfile", "h")
    assert code == 2 and "--hostfile h: No such file or directory" in output
    code, output = command(
        "verify", place.src, place.dst, *place.strategies, "--hostfile", "h", processes=2
    )
    assert code == 2 and "the launcher has hosts of its own\n  try  leave it out" in output
    code, output = command("verify", "-n", 2, place.src, place.dst, *place.strategies, processes=3)
    assert code == 2 and "the launcher has started 3 processes\n  try  leave out -n 2\n" in output


def test_the_mpirun_of_this_pythons_library(tmp_path, monkeypatch):
    """Beside the interpreter, or in PATH; another library's is refused, with both names."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="put the mpirun of .* in PATH, .*; there is none"):
        own_mpirun.command(2, ["plan"])
    own = "mpirun (Open MPI) 1.0" if uses_open_mpi() else "HYDRA build details:"
    for told in ("mpirun (Open MPI) 1.0", "HYDRA build details:"):
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{told}'\n")
        (tmp_path / "mpirun").chmod(0o755)
        if told != own:
            with pytest.raises(UsageError, match=r"is another's \((HYDRA|mpirun \(Open)"):
                own_mpirun.command(2, ["plan"])
            continue
        line = own_mpirun.command(2, ["plan", "-v"])
        assert line[0] == str(tmp_path / "mpirun")
        assert line[-6:-3] == ["2", sys.executable, "-c"] and line[-2:] == ["plan", "-v"]


def test_one_process_needs_no_mpi(place):
    """mpi4py cannot even be imported here."""
    program = "import sys; sys.modules['mpi4py'] = None; from rankxform.cli.main import main; sys.exit(main())"
    line = [sys.executable, "-c", program, "transform", place.src, str(place.dst)]
    code, output = run([*line, *place.strategies], 60, env=environment(), cwd=ROOT)
    assert code == 0, output
    assert right(place)


@pytest.mark.parametrize("arguments", [["--help"], ["transform", "--help"], ["--version"], []])
def test_help_needs_no_mpi_and_is_printed_once(arguments):
    program = "import sys; sys.modules['mpi4py'] = None; from rankxform.cli.main import main; sys.exit(main())"
    code, output = run(
        [*mpirun(2), sys.executable, "-c", program, *arguments], 60, env=environment(), cwd=ROOT
    )
    assert code == 0, output
    assert max(output.count("usage: rankxform"), output.count("rankxform 0.")) == 1


@pytest.mark.parametrize("option", ["--time-limit", "--stall-limit"])
def test_no_time_at_all_is_a_mistake(option):
    code, output = command("transform", "a", "b", option, "0")
    assert code == 2
    assert f"{option} '0': expected a time such as 90m" in output


@pytest.mark.parametrize(
    "words",
    [
        "transform SRC DST A B", "plan SRC A B", "plan SRC A B --simulate 4", "ranks SRC A B",
        "inspect SRC", "inspect SRC A", "inspect SRC A --check", "inspect SRC A --page PAGE",
    ],
)  # fmt: skip
def test_every_verb_that_opens_a_source_tells_its_warnings(words, place, capfd):
    """In words and in JSON; a warning alone is no error."""
    for rank in range(3):
        shard = Path(place.src) / f"rank_{rank}/net-3_70.ckpt"
        shard.with_name("net-4_80.ckpt").write_bytes(shard.read_bytes())
    told = {
        "SRC": [place.src], "DST": [place.dst], "PAGE": [f"{place.dst}.html"],
        "A": ["--src-strategy", place.a], "B": ["--dst-strategy", place.b],
    }  # fmt: skip
    arguments = [str(part) for word in words.split() for part in told.get(word, [word])]
    text = "epoch 4 step 80 is newer but not complete"
    assert main(arguments) == 0 and text in capfd.readouterr().out
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    warnings = document.get("warnings") or [row["text"] for row in document["rows"]]
    assert any(text in warning for warning in warnings)


@pytest.mark.parametrize(
    "verb", ["inspect SRC --replicas", "ranks SRC", "maps check qwen3 SRC --config CONFIG"]
)
def test_only_options_that_the_command_has_are_to_be_tried(verb, place, capfd):
    config = Path(__file__).parents[1] / "data/formats/hf_qwen3/hf/config.json"
    told = {"SRC": str(place.src), "CONFIG": str(config)}
    assert main([told.get(word, word) for word in verb.split()]) == 2
    text = capfd.readouterr().err
    assert "--src-strategy FILE" in text and "--src-config" not in text
    assert main(["transform", str(place.src), str(place.dst)]) == 2
    assert "--src-config" in capfd.readouterr().err


@pytest.mark.parametrize("throttle", ["0", "0.5"])
def test_no_bytes_a_second_are_refused(throttle, place, capfd):
    flags = ["--src-strategy", str(place.a), "--dst-strategy", str(place.b), "--throttle", throttle]
    assert main(["transform", str(place.src), str(place.dst), *flags]) == 2
    assert "throttle is 0; expected a byte a second at least" in capfd.readouterr().err


def test_a_pipe_that_closes_early_is_no_error(place):
    line = f"{sys.executable} -m rankxform inspect {place.src} | true"
    code, output = run(["bash", "-o", "pipefail", "-c", line], 30, env=environment(), cwd=ROOT)
    assert "Traceback" not in output
    assert code in (0, 141), output


def test_the_launch_script(place):
    script = ROOT / "launch" / "mpirun.sh"
    done = subprocess.run(
        [script, "transform", place.src, place.dst, *place.strategies],
        env=environment(PYTHON=sys.executable, PROCESSES="3"),
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ", 3 processes" in done.stdout
    assert right(place)


def test_a_working_folder_that_is_gone(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    line = [sys.executable, "-m", "rankxform", "transform", str(tmp_path), str(tmp_path / "dst")]
    shell = ["/bin/sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *line]
    root = str(Path(__file__).parents[2])
    code, output = run(shell, 60, env=environment(PYTHONPATH=root), cwd=folder)
    assert code == 2 and output.count("\n") <= 2 and "the working folder is gone" in output
