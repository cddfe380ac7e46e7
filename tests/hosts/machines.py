"""Emulated hosts: namespaces of this machine that look to programs like hosts of a cluster.

Each host has a network of its own behind a bridge, its own name, its own ``/tmp`` and
``/dev/shm``, and a disk of its own at ``LOCAL``. Everything else is the machine's: the shared file
system, with the software on it. The bridge lies in a namespace too, so nothing gets out.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.mpi_launch import environment

LOCAL = Path("/rxlocal")
"""Where every host has its own disk."""

NETWORK = Path("/tmp/rx-network")
"""Where hosts see the folder of a storage host, if there is one."""

SFTP = "/usr/lib/openssh/sftp-server"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
_NET = "10.79.0"
_READY_SECONDS = 30
_PERIOD = 0.02
_STORAGE, _PORT = 250, 7000
_HEADERS = 66
"""Bytes of a packet of TCP over IPv4 on Ethernet, with a timestamp, that are no content."""
_STARTS = 3
_NOT_STARTED = (
    "A daemon failed to report back after being spawned",
    "daemon has unexpectedly failed after launch",
    "A daemon died unexpectedly",
    "was unable to reliably start one or more daemons",
)
"""What Open MPI says where a host's daemon did not report back."""


def why_not(more=()):
    """Return why there can be no emulated nodes with `more` programs here, or None."""
    if os.geteuid() != 0:
        return "emulated nodes need root"
    missing = [tool for tool in (*TOOLS, *more) if shutil.which(tool) is None]
    if missing:
        return f"emulated nodes need {', '.join(missing)} (tests/hosts/install.sh)"
    probe = subprocess.run(
        ["ip", "netns", "add", f"rx{os.getpid()}-probe"], capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "del", f"rx{os.getpid()}-probe"], capture_output=True)
    return f"this kernel has no network namespaces: {probe.stderr}" if probe.returncode else None


def require(*more):
    """Skip where there can be no hosts with `more` programs, but fail where the environment says
    there must be."""
    reason = why_not(more)
    if reason and os.environ.get("RANKXFORM_HOSTS") == "required":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def _sh(*command, check=True):
    return subprocess.run([*map(str, command)], check=check, capture_output=True, text=True)


def _software():
    """Return the folders that hosts must see to run this project: it, and its environment."""
    return list(dict.fromkeys([Path(__file__).resolve().parents[2], Path(sys.prefix).resolve()]))


def _is_ours(pid):
    """Whether a namespace is of this process, or of none that is still there."""
    return pid == os.getpid() or not Path(f"/proc/{pid}").exists()


class Hosts:
    """`count` hosts h1, h2, ..; a context that makes and removes them.

    shared: a folder that all of them see.
    """

    def __init__(self, count):
        self.names = [f"h{n + 1}" for n in range(count)]
        self._pids, self._keepers = {}, []

    def __enter__(self):
        self.shared = Path(tempfile.mkdtemp(prefix="rx-hosts-", dir="/var/tmp"))
        LOCAL.mkdir(exist_ok=True)
        self._remove()  # what a killed run left
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _space(self, name):
        """Return the name of the network namespace of a host, or of the switch."""
        return f"rx{os.getpid()}-{name}"

    def _make(self):
        _sh("ip", "netns", "add", self._space("switch"))
        _sh("ip", "-n", self._space("switch"), "link", "add", "br0", "type", "bridge")
        _sh("ip", "-n", self._space("switch"), "link", "set", "br0", "up")
        lines = ["127.0.0.1 localhost"]
        lines += [f"{_NET}.{n + 1} {name}" for n, name in enumerate(self.names)]
        (self.shared / "etc_hosts").write_text("\n".join(lines) + "\n")
        for number, name in enumerate(self.names, 1):
            self._make_one(number, name)
        agent = self.shared / "rsh"
        agent.write_text(_AGENT.format(state=self.shared))
        agent.chmod(0o755)

    def _make_one(self, number, name):
        space = self._space(name)
        disk = self.disk(name)
        disk.mkdir(parents=True)
        _sh("ip", "netns", "add", space)
        address = f"02:00:00:00:00:{number:02x}"  # that of a host in its place before
        _sh(*["ip", "link", "add", "eth0", "address", address, "netns", space, "type", "veth"],
            *["peer", "name", f"p{name}", "netns", self._space("switch")])  # fmt: skip
        _sh("ip", "-n", self._space("switch"), "link", "set", f"p{name}", "master", "br0", "up")
        _sh("ip", "-n", space, "addr", "add", f"{_NET}.{number}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _sh("ip", "-n", space, "link", "set", device, "up")
        ready = self.shared / f"{name}.pid"
        kept = [path for path in _software() if path.is_relative_to("/tmp")]
        opened = "; ".join(f"exec {n}<'{path}'" for n, path in enumerate(kept, 5)) or ":"
        back = "; ".join(
            f"mkdir -p '{path}'; mount -c --rbind /proc/self/fd/{n} '{path}'; exec {n}<&-"
            for n, path in enumerate(kept, 5)
        )
        setup = f"""set -e
            hostname {name}
            mount --bind {self.shared}/etc_hosts /etc/hosts
            mount -t tmpfs tmpfs /dev/shm
            {opened}
            mount -t tmpfs tmpfs /tmp
            {back}
            mount --bind {disk} {LOCAL}
            mount -t sysfs sysfs /sys
            echo $$ > {ready}.part; mv {ready}.part {ready}
            exec sleep 86400"""
        keeper = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--uts", "--ipc",
             "--propagation", "private", "bash", "-c", setup],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._keepers.append(keeper)
        deadline = time.monotonic() + _READY_SECONDS
        while not ready.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"host {name} did not come up")
            time.sleep(0.02)
        self._pids[name] = int(ready.read_text())

    def __exit__(self, *_):
        self._remove()
        shutil.rmtree(self.shared, ignore_errors=True)

    def _kill_all(self, keep=()):
        """Kill what runs on hosts, but for process ids in `keep`; return the hosts' networks.

        With those of test runs that were killed and left theirs.
        """
        lines = _sh("ip", "netns", "list", check=False).stdout.split("\n")
        spaces = [line.split()[0] for line in lines if re.match(r"rx\d+-", line)]
        spaces = [one for one in spaces if _is_ours(int(one[2:].partition("-")[0]))]
        for space in spaces:
            for pid in _sh("ip", "netns", "pids", space, check=False).stdout.split():
                if int(pid) not in keep:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        return spaces

    def _remove(self):
        for space in self._kill_all():
            _sh("ip", "netns", "del", space, check=False)
        for keeper in self._keepers:
            keeper.wait()
        self._pids, self._keepers = {}, []

    def _remove_one(self, name):
        """Remove a host, with its disk."""
        for pid in _sh("ip", "netns", "pids", self._space(name), check=False).stdout.split():
            self._signal(int(pid), signal.SIGKILL)
        self._keepers.pop().wait()
        _sh("ip", "-n", self._space("switch"), "link", "del", f"p{name}")  # now, not in a while
        _sh("ip", "netns", "del", self._space(name))
        del self._pids[name]
        (self.shared / f"{name}.pid").unlink()
        shutil.rmtree(self.disk(name))

    # -- what can be done with them ----------------------------------------------------------

    def disk(self, name):
        """Return a host's own disk, as the machine sees it."""
        return self.shared / "disks" / name

    def wipe(self):
        """Remove what is on the hosts' own disks."""
        for name in self.names:
            for entry in self.disk(name).iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def on(self, name, *command):
        """Return a command that runs on a host."""
        return ["nsenter", "-t", str(self._pids[name]), "-m", "-u", "-n", "-i", *map(str, command)]

    def mpirun(self, per_host, *command, options=(), deadline=120, in_turns=False, **more):
        """Run a command with `per_host` processes on each host; return (code, output).

        `per_host` is a number, or one for each host; neighbours are on one host or, `in_turns`, on
        different ones. At the deadline, when the code is "deadline",
        everything is ended on all hosts. Where the launcher's own daemon does not come up on a
        host, as happens on a busy machine, nothing of the command has run, and it is started again.
        """
        for _ in range(_STARTS):
            code, output = self._mpirun(per_host, command, options, deadline, in_turns, more)
            first = output.lstrip("-\n").partition("\n")[0]  # before any word of the command's
            if not any(words in first for words in _NOT_STARTED):
                break
            self._kill_all(keep=self._pids.values())
        return code, output

    def _mpirun(self, per_host, command, options, deadline, in_turns, more):
        counts = [per_host] * len(self.names) if isinstance(per_host, int) else per_host
        beside = Path(sys.executable).parent / "mpirun"
        start, env = self._launcher(beside, counts, in_turns)
        first = self.on(self.names[0], beside, *start, "-n", sum(counts), *options, *command)
        with (self.shared / "output").open("w+b") as output:
            process = subprocess.Popen(
                first, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**environment(), **env, **more},
            )  # fmt: skip
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                code = "deadline"
                self._kill_all(keep=self._pids.values())
                process.wait()
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def _launcher(self, mpirun, counts, in_turns):
        """Return what mpirun of either kind is told, and its environment."""
        open_mpi = "Open" in _sh(mpirun, "--version").stdout.split("\n")[0]
        one = in_turns and not open_mpi  # hydra begins anew at the end of its list
        places = [(name, 1 if one else n) for name, n in zip(self.names, counts) if n]
        hostfile = self.shared / f"hosts-{'-'.join(map(str, counts))}{'-in-turns' * in_turns}"
        form = "{} slots={}\n" if open_mpi else "{}:{}\n"
        hostfile.write_text("".join(form.format(*place) for place in places))
        if open_mpi:
            by = ["--map-by", "node"] if in_turns else []
            return ["--hostfile", str(hostfile), "--bind-to", "none", *by], {
                "PRTE_MCA_plm_ssh_agent": str(self.shared / "rsh"),
                "OMPI_MCA_pml": "ob1",
                "OMPI_MCA_btl": "self,sm,tcp",
            }
        agent = str(self.shared / "rsh")
        return ["-f", str(hostfile), "-launcher", "ssh", "-launcher-exec", agent], {}

    def sent(self, names=None):
        """Return the bytes that hosts (None: all) have sent over their network.

        Without the headers: how many packets say no more than that something came in depends on
        how busy the machine is.
        """
        counters = [f"/sys/class/net/eth0/statistics/tx_{what}" for what in ("bytes", "packets")]
        found = 0
        for name in names or self.names:
            nbytes, packets = _sh(*self.on(name, "cat", *counters)).stdout.split()
            found += int(nbytes) - _HEADERS * int(packets)
        return found

    def workers(self, name):
        """Return the process ids of the conversion's processes on a host."""
        found = []
        for pid in _sh("ip", "netns", "pids", self._space(name), check=False).stdout.split():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"rankxform" in words and b"python" in words[0]:
                    found.append(int(pid))
        return found

    def wait_until_idle(self, seconds):
        """Return whether no process of a conversion is left, on any host, within `seconds`."""
        deadline = time.monotonic() + seconds
        while any(self.workers(name) for name in self.names):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    @contextmanager
    def slow(self, rate):
        """Let hosts send no faster than `rate`, such as "800mbit"."""
        for name in self.names:
            self._shape(name, rate)
        try:
            yield
        finally:
            for name in self.names:
                _sh(*self.on(name, *["tc", "qdisc", "del", "dev", "eth0", "root"]))

    @contextmanager
    def storage(self, rate=None):
        """Let all hosts see a folder of one more host, over the network; yield how to empty caches.

        The folder is `NETWORK`; the machine sees it as the storage host's disk. It sends no faster
        than `rate`. Every host has a page cache of its own for it.
        """
        self._make_one(_STORAGE, "storage")
        code = _SERVER.format(port=_PORT, program=SFTP)
        server = subprocess.Popen(self.on("storage", sys.executable, "-c", code))

        def mount():
            for name in self.names:
                self._sshfs(name)

        def unmount():
            for name in self.names:
                _sh(*self.on(name, "umount", "-l", NETWORK), check=False)

        def empty():
            unmount()
            mount()

        try:
            if rate:
                self._shape("storage", rate)
            mount()
            yield empty
        finally:
            unmount()
            server.kill()
            server.wait()
            self._remove_one("storage")

    def _sshfs(self, name):
        _sh(*self.on(name, "mkdir", "-p", NETWORK))
        where = f"{_NET}.{_STORAGE}:{LOCAL}"
        command = ["sshfs", where, NETWORK, "-o", f"directport={_PORT},auto_cache"]
        deadline = time.monotonic() + _READY_SECONDS
        while _sh(*self.on(name, *command), check=False).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} cannot mount {where}")
            time.sleep(0.05)

    def _shape(self, name, rate):
        _sh(*self.on(name, *["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate"], rate,
                     *["burst", "1mbit", "latency", "50ms"]))  # fmt: skip

    @contextmanager
    def throttled(self, name, share):
        """Let the conversion's processes on a host run only a `share` of the time."""
        ended = threading.Event()

        def throttle():
            while not ended.wait(share * _PERIOD):
                for pid in self.workers(name):
                    self._signal(pid, signal.SIGSTOP)
                time.sleep((1 - share) * _PERIOD)
                for pid in self.workers(name):
                    self._signal(pid, signal.SIGCONT)

        thread = threading.Thread(target=throttle)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _signal(self, pid, number):
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    @contextmanager
    def unplugged(self, name):
        """Cut a host off from the others."""
        _sh("ip", "-n", self._space("switch"), "link", "set", f"p{name}", "down")
        try:
            yield
        finally:
            _sh("ip", "-n", self._space("switch"), "link", "set", f"p{name}", "up")
            self._wait_until_reached(name)

    def _wait_until_reached(self, name):
        """Wait until a host and each other can reach each other again, which takes a moment."""
        for other in self.names:
            for a, b in ((name, other), (other, name)):
                probe = self.on(a, "bash", "-c", f"exec 3<>/dev/tcp/{b}/9")  # nobody listens there
                deadline = time.monotonic() + _READY_SECONDS
                while "refused" not in _sh("timeout", "1", *probe, check=False).stderr:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"{b} cannot be reached from {a}")
                    time.sleep(0.1)

    @contextmanager
    def small_disk(self, name, folder, size):
        """Give a host a folder that holds no more than `size`, such as "1m"."""
        _sh(*self.on(name, "mkdir", "-p", folder))
        _sh(*self.on(name, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder))
        try:
            yield
        finally:
            _sh(*self.on(name, "umount", "-l", folder))


# What a storage host runs: one sftp server for each connection, without ssh around it.
_SERVER = """
import signal, socket, subprocess
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with socket.create_server(("0.0.0.0", {port})) as server:
    while True:
        connection, _ = server.accept()
        with connection:
            subprocess.Popen(["{program}"], stdin=connection, stdout=connection)
"""

# It stands where ssh stands: rsh [options] HOST COMMAND..., in a clean environment.
_AGENT = """#!/bin/bash
while [[ ${{1:-}} == -* ]]; do
    case $1 in -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;; *) shift ;; esac
done
host=$1; shift
pid=$(cat {state}/$host.pid) || {{ echo "no host $host" >&2; exit 255; }}
exec nsenter -t "$pid" -m -u -n -i -- env -i HOME="$HOME" PATH="{{path}}" bash -c "cd; $*"
""".replace("{{path}}", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
