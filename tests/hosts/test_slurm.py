"""launch/slurm.sbatch under a real Slurm of two nodes, and the hosts reached by a real ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import reference
from tests.hosts import slurm
from tests.hosts.machines import LOCAL, Hosts, require
from tests.hosts.test_exchange import COLUMN, ROW, big, gathered, spread

ROOT = Path(__file__).parents[2]
CASE = big(([4], COLUMN), ([2], ROW))


def need(tools):
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing and os.environ.get("RANKXFORM_HOSTS") == "required":
        pytest.fail(f"{', '.join(missing)} is not installed")
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


@pytest.fixture(scope="module")
def hosts():
    require()
    with Hosts(2) as made:
        yield made


@pytest.fixture
def clean(hosts):
    yield hosts
    hosts.wipe()


def mpi_type():
    """Return how srun starts processes of this environment's MPI."""
    told = subprocess.run(
        [Path(sys.executable).parent / "mpirun", "--version"], capture_output=True, text=True
    ).stdout
    return "pmix" if "Open" in told else "pmi2"


def test_the_slurm_script_converts_what_two_nodes_hold(clean):
    need(slurm.TOOLS)
    options = spread(clean, CASE)
    with slurm.Slurm(clean) as running:
        code, output = running.batch(
            ROOT / "launch" / "slurm.sbatch", "transform", LOCAL / "src", LOCAL / "dst", *options,
            options=["--nodes=2", "--ntasks-per-node=2"],
            PYTHON=sys.executable, MPI_TYPE=mpi_type(), OMPI_MCA_btl="self,sm,tcp",
            OMPI_MCA_pml="ob1",
        )  # fmt: skip
    assert code == 0, output
    assert "ranks 0 on h1; 1 on h2" in output
    assert reference.wrong_slices(gathered(clean), CASE.dst, CASE.params) == []


@pytest.fixture
def ssh(hosts):
    """A real sshd on every host, with keys of its own; the command that reaches one."""
    need(["sshd", "ssh", "ssh-keygen"])
    state = hosts.shared / "ssh"
    state.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", state / name], check=True
        )
    shutil.copy(state / "user.pub", state / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    daemons = [
        subprocess.Popen(
            hosts.on(name, shutil.which("sshd"), "-D", "-f", "/dev/null",
                     "-h", state / "host", "-o", f"AuthorizedKeysFile={state}/authorized",
                     "-o", "StrictModes=no", "-o", "PidFile=none", "-o", "UsePAM=no",
                     "-o", "PermitRootLogin=yes"),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name in hosts.names
    ]  # fmt: skip
    agent = state / "ssh"
    agent.write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -q -i {state}/user -o StrictHostKeyChecking=no "
        '-o UserKnownHostsFile=/dev/null -o BatchMode=yes -o ConnectionAttempts=20 "$@"\n'
    )
    agent.chmod(0o755)
    yield agent
    for daemon in daemons:
        daemon.kill()
        daemon.wait()


def test_hosts_without_a_scheduler_are_reached_by_ssh(clean, ssh):
    options = spread(clean, CASE)
    open_mpi = mpi_type() == "pmix"
    hostfile = clean.shared / "hostfile"
    hostfile.write_text("h1 slots=2\nh2 slots=2\n" if open_mpi else "h1:2\nh2:2\n")
    more = {
        "HYDRA_LAUNCHER_EXEC": ssh,
        "PRTE_MCA_plm_ssh_agent": ssh,
        "OMPI_ALLOW_RUN_AS_ROOT": 1,
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1,
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        clean.on("h1", "env", *(f"{k}={v}" for k, v in more.items()), sys.executable,
                 "-m", "rankxform", "transform", LOCAL / "src", LOCAL / "dst", *options,
                 "--hostfile", hostfile),
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks 0 on h1; 1 on h2" in done.stdout
    assert reference.wrong_slices(gathered(clean), CASE.dst, CASE.params) == []
