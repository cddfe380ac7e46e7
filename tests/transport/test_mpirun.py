"""Hosts of a hostfile are asked before mpirun starts, which would wait for one that is not there."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time

import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.errors import UsageError
from rankxform.transport import launcher, mpirun
from rankxform.transport.mpirun import _PROGRAM, _SETUP, command
from tests.mpi_launch import run

HERE = 'shift; exec sh -c "$*"'
"""What a host answers that is as this one."""


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Return what writes a program that stands where ssh does: what it does for each host."""
    path = tmp_path / "agent"
    for name in ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent"):
        monkeypatch.setenv(name, str(path))

    def write(**answers):
        cases = "".join(f"{name}) {answer};;\n" for name, answer in answers.items())
        path.write_text(
            f'#!/bin/sh\necho "$1" >>{tmp_path}/asked\ncase "$1" in\n{cases}*) {HERE};;\nesac\n'
        )
        path.chmod(0o755)

    write()
    return write


def own_library():
    return launcher.import_mpi().Get_library_version()


def asked(*names, seconds=20.0):
    own = mpirun.HostSetup(rankxform.__version__, own_library(), _SETUP)
    mpirun.check_hosts(names, "hosts", own, seconds)


def test_all_hosts_can_take_part_and_this_one_is_not_asked(tmp_path, agent):
    asked("n1", "localhost", "n2", "127.0.0.1", "127.0.0.2")
    assert sorted((tmp_path / "asked").read_text().split()) == ["127.0.0.2", "n1", "n2"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("sleep 60", "n2: does not answer within 1 s"),
        ("sleep 60 & wait", "n2: does not answer within 1 s"),
        ("echo no route >&2; exit 255", "n2: is not reached: no route"),
        ("exit 255", "n2: is not reached: without a reason"),
        ("echo no such python >&2; exit 127", "n2: no such python"),
        ("exit 1", f"n2: {sys.executable} ended with 1"),
        ("echo hello; echo 0.0.1 HYDRA", "n2: has rankxform 0.0.1, and here it is "),
        (":", "n2: has rankxform , and here it is "),
        (
            f'shift; set -- "$(echo "$*" | sed \'s|{sys.executable}|/no/python|\')"; sh -c "$*"',
            "/no/python",
        ),
        ('cd /; shift; exec sh -c "cd /no/such/folder && $*"', "/no/such/folder"),
    ],
)
def test_a_host_that_cannot_take_part(agent, answer, told):
    agent(n2=answer)
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        asked("n1", "n2", "n3", seconds=1.0 if "sleep" in answer else 20.0)
    assert time.monotonic() - began < 20
    parts = caught.value.parts
    assert parts.line == "--hostfile hosts: host n2 cannot take part"
    assert parts.details.startswith("n2: ") and told in parts.details
    assert len(parts.details.splitlines()) == 1
    assert parts.tries[1] == "take it out of hosts"


def test_another_librarys_host(agent):
    is_open = launcher.family_of(own_library()) == launcher.OPEN_MPI
    told = "MPICH Version: 5" if is_open else "Open MPI v5.0.8"
    agent(n1=f"echo {rankxform.__version__} {shlex.quote(told)}")
    with pytest.raises(UsageError) as caught:
        asked("n1")
    assert "n1: has the library of " in caught.value.parts.details


def test_what_is_proposed_can_be_pasted(agent, capfd, tmp_path):
    """The first line asks the host what was asked."""
    agent(n1="exit 255")
    with pytest.raises(UsageError) as caught:
        asked("n1")
    words = shlex.split(caught.value.parts.tries[0])
    asked_there = f"cd {os.getcwd()} && {sys.executable} -m rankxform -V"
    assert words == [str(tmp_path / "agent"), "n1", asked_there]


@pytest.mark.parametrize(
    "setting", [{"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7"}, {"HYDRA_LAUNCHER": "fork"}]
)
def test_a_schedulers_hosts_are_not_asked(agent, monkeypatch, tmp_path, setting):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    asked("n1")
    assert not (tmp_path / "asked").exists()


def test_without_ssh(monkeypatch, tmp_path):
    for name in ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        asked("n1")
    assert "n1: ssh is not to be started: No such file" in caught.value.parts.details


def test_all_slots_are_started_where_no_number_is_given(tmp_path, agent):
    file = tmp_path / "hosts"
    file.write_text("n1:3\nn2:2\n")
    line = command(None, ["launch", "a", "--", "t.py", "-n"], str(file), rankxform.__version__)
    at = line.index(_PROGRAM)
    assert line[at + 1 :] == ["launch", "a", "-n", "5", "--", "t.py", "-n"]
    assert line[at - 3 : at - 1] == ["5", sys.executable]
    line = command(4, ["plan", "-n", "4"], str(file), rankxform.__version__)
    assert line[line.index(_PROGRAM) + 1 :] == ["plan", "-n", "4"]


def test_the_command_says_which_host(tmp_path, agent, capfd):
    agent(n2="echo connection refused >&2; exit 255")
    file = tmp_path / "hosts"
    file.write_text("localhost:1\nn2:2\n")
    words = ["transform", "--hostfile", str(file), str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*words, "--json"]) == 2
    out, error = capfd.readouterr()
    assert "n2: is not reached: connection refused" in error
    assert json.loads(out)["code"] == 2


def test_several_hosts_are_counted(agent):
    agent(n1="exit 255", n3="exit 255")
    with pytest.raises(UsageError) as caught:
        asked("n1", "n2", "n3")
    parts = caught.value.parts
    assert parts.line == "--hostfile hosts: 2 of 3 hosts cannot take part, such as n1"
    assert [line[:4] for line in parts.details.splitlines()] == ["n1: ", "n3: "]
    assert parts.tries[1] == "take them out of hosts"


def test_a_rank_table_is_no_hostfile(tmp_path):
    file = tmp_path / "table.json"
    file.write_text('{"version": "1.0", "server_list": []}')
    with pytest.raises(UsageError, match="is a rank table, and no hostfile; rankxform hostfile"):
        command(None, ["plan"], str(file), rankxform.__version__)
    file.write_text("localhost:0\n")
    with pytest.raises(UsageError, match="no host of a hostfile: 'localhost:0'"):
        command(None, ["plan"], str(file), rankxform.__version__)


# -- inside a scheduler's allocation, or what is left of one ------------------------------------------

ONE_NODE = {
    "SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NODELIST": "n1", "SLURM_JOB_NODELIST": "n1",
    "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "4",
}  # fmt: skip
TWO_NODES = {**ONE_NODE, "SLURM_NNODES": "2", "SLURM_NODELIST": "n[1-2]"}
LEFTOVERS = {
    "one node": ONE_NODE,
    "a job's number alone": {"SLURM_JOB_ID": "7"},
    "LSF": {"LSB_JOBID": "7", "LSF_BINDIR": "/nowhere"},
    "PBS": {"PBS_JOBID": "7", "PBS_NODEFILE": "/nowhere", "PBS_ENVIRONMENT": "PBS_BATCH"},
    "SGE": {"PE_HOSTFILE": "/nowhere", "SGE_ROOT": "/nowhere", "JOB_ID": "7", "ARC": "lx-amd64"},
    "Cobalt": {"COBALT_NODEFILE": "/nowhere"},
    "Kubernetes": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    "a job that has ended": {**ONE_NODE, "SLURM_JOB_END_TIME": "1"},
}


def srun(tmp_path, monkeypatch, text):
    """Put a srun into PATH that does something."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin/srun"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.mark.parametrize("kind", LEFTOVERS)
def test_processes_of_this_node_start_without_a_scheduler(kind, tmp_path, monkeypatch):
    """A srun that fails, or never answers, is not asked; the processes are a world of two."""
    srun(tmp_path, monkeypatch, "exec sleep 60" if kind == "one node" else "exit 1")
    for name, value in LEFTOVERS[kind].items():
        monkeypatch.setenv(name, value)
    line = command(2, ["transform", "--help"])
    line[line.index("-c") + 1 :] = [
        "import os; from mpi4py import MPI; os.write(1, b'size %d\\n' % MPI.COMM_WORLD.size)"
    ]
    began = time.monotonic()
    code, output = run(line, 60)
    assert code == 0, output
    assert output.count("size 2") == 2 and time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("text", "told"),
    [("echo no controller >&2; exit 1", "no controller"), ("exit 3", "without a reason")],
)
def test_nodes_that_srun_cannot_reach_are_refused_before_the_start(
    text, told, tmp_path, monkeypatch
):
    srun(tmp_path, monkeypatch, text)
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"has 2 nodes, and srun fails: .*{told}"):
        command(2, ["transform", "a", "b"])


def test_nodes_that_srun_reaches_are_left_to_it(tmp_path, monkeypatch):
    srun(tmp_path, monkeypatch, "exit 0")
    plain = command(2, ["transform", "a", "b"])
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    assert command(2, ["transform", "a", "b"]) == plain


def test_what_a_person_has_chosen_stays(monkeypatch):
    plain = command(2, ["transform", "a", "b"])
    for name, value in {**ONE_NODE, "HYDRA_LAUNCHER": "ssh", "PRTE_MCA_plm": "ssh"}.items():
        monkeypatch.setenv(name, value)
    assert command(2, ["transform", "a", "b"]) == plain
