"""A real Slurm over emulated nodes: its controller on the first, its daemon on all of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
_READY_SECONDS = 30

_CONF = """\
ClusterName=emulated
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
StateSaveLocation={state}/state
SlurmdSpoolDir={state}/spool.%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd.%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.%n.log
NodeName={nodes} CPUs=8 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Slurm on `hosts`; a context that starts and stops it."""

    def __init__(self, hosts):
        self._hosts = hosts
        self.state = hosts.shared / "slurm"

    def __enter__(self):
        munge = self.state / "munge"
        for folder in (self.state / "state", munge):
            folder.mkdir(parents=True)
        nodes = ",".join(self._hosts.names)
        conf = _CONF.format(first=self._hosts.names[0], state=self.state, nodes=nodes)
        (self.state / "slurm.conf").write_text(conf)
        (self.state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2 wants systemd
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        self._run(
            "munged", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._run("slurmctld")
        for name in self._hosts.names:
            (self.state / f"spool.{name}").mkdir()
            self._run("slurmd", "-N", name, host=name)
        deadline = time.monotonic() + _READY_SECONDS
        while self._states().count("idle") < len(self._hosts.names):
            if time.monotonic() > deadline:
                logs = "".join(p.read_text() for p in self.state.glob("slurm*.log"))
                raise RuntimeError(f"Slurm did not come up: {self._states()}\n{logs}")
            time.sleep(0.1)
        return self

    def _states(self):
        return self._run("sinfo", "-h", "-N", "-o", "%T", check=False).stdout.split()

    def __exit__(self, *_):
        for file in [*self.state.glob("slurm*.pid"), self.state / "munge" / "pid"]:
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except (OSError, ValueError):
                continue
        shutil.rmtree(self.state, ignore_errors=True)

    def command(self, *words, host=None, **environ):
        """Return a command of Slurm's that runs on a host (default: the first)."""
        given = {"SLURM_CONF": self.state / "slurm.conf", **environ}
        pairs = [f"{name}={value}" for name, value in given.items()]
        return self._hosts.on(host or self._hosts.names[0], "env", *pairs, *words)

    def _run(self, *words, host=None, check=True):
        command = self.command(*words, host=host)
        return subprocess.run(
            command, check=check, capture_output=True, text=True, timeout=60, cwd="/"
        )

    def batch(self, script, *words, options=(), deadline=120, **environ):
        """Submit a script and wait for it; return (code, the job's output)."""
        where = self.state / "jobs"
        where.mkdir(exist_ok=True)
        done = subprocess.run(
            self.command("sbatch", "--wait", f"--chdir={where}", "--output=job-%j.log", *options,
                         Path(script).resolve(), *words, **environ),
            capture_output=True, text=True, timeout=deadline, check=False,
        )  # fmt: skip
        logs = sorted(where.glob("job-*.log"), key=lambda path: int(path.stem[4:]))
        return done.returncode, (logs[-1].read_text() if logs else "") + done.stderr
