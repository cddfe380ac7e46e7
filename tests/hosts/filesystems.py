"""Distributed file systems, mounted twice on this machine as two nodes would mount them.

Their programs come as wheels (``rankxform[filesystems]``) or as Debian packages
(``make filesystems``). Processes of one ``mpirun`` see one of the two mounts each, at one path, in
mount namespaces of their own: to rankxform these are nodes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

_READY_SECONDS = 60
_VIEW = (
    'if [ "${PMI_RANK:-${PMIX_RANK:-0}}" -lt "$1" ]; then mount --bind "$2" "$4"; '
    'else mount --bind "$3" "$4"; fi; shift 4; exec "$@"'
)


def program(name):
    """Return the path of a program of this environment, or of the machine."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def why_not(*programs):
    """Return why there can be no such file system here, or None."""
    if os.geteuid() != 0:
        return "mounting file systems needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "mounting file systems needs /dev/fuse"
    missing = [name for name in (*programs, "unshare", "fusermount3") if program(name) is None]
    return f"there is no {', '.join(missing)} (rankxform[filesystems])" if missing else None


def _free_port():
    """Return a port that is free, and so is the one 10,000 above, which servers use for RPC."""
    for port in range(21000, 29000, 7):
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10000))
            return port
    raise OSError("no free ports")


class TwoMounts:
    """One file system: `a` and `b` are its mounts, `view` where processes see one of them."""

    def __init__(self, folder):
        self.a, self.b, self.view = (folder / name for name in ("a", "b", "view"))
        for one in (self.a, self.b, self.view):
            one.mkdir()

    def seen(self, first, swapped=False):
        """Return the start of a command whose first processes see one mount, the others the
        other."""
        mounts = (self.b, self.a) if swapped else (self.a, self.b)
        inside = ["unshare", "-m", "--propagation", "private", "sh", "-c", _VIEW, "sh"]
        return [str(word) for word in (*inside, first, *mounts, self.view)]

    def wait(self):
        """Wait until both mounts show one file system."""
        until = time.monotonic() + _READY_SECONDS
        while time.monotonic() < until:
            time.sleep(0.2)
            if all(os.path.ismount(one) for one in (self.a, self.b)):
                with suppress(OSError):
                    (self.a / "ready").touch()
                    if (self.b / "ready").exists():
                        return
        pytest.fail("the file system did not come up")


@contextmanager
def mounted(kind, folder):
    """Mount a file system twice in `folder`."""
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        found = TwoMounts(folder)

        def start(name, *words):
            command = [program(name), *map(str, words)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(_end, process)

        stack.callback(_unmount, found)
        STARTS[kind](start, folder, found)
        found.wait()
        stack.callback(_unmount, found)  # before the processes end
        yield found


def _end(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _unmount(found):
    for one in (found.a, found.b):
        subprocess.run(["umount", "-l", one], capture_output=True, check=False)


def _juicefs(start, folder, found):
    database = f"sqlite3://{folder}/meta.db"
    words = ["format", "--storage", "file", "--bucket", f"{folder}/store/", database, "rankxform"]
    subprocess.run([program("juicefs"), *words], check=True, capture_output=True)
    for one in (found.a, found.b):
        cache = folder / f"cache-{one.name}"
        start("juicefs", "mount", "--no-usage-report", "--cache-dir", cache, database, one)


def _seaweedfs(start, folder, found):
    (folder / "store").mkdir()
    ports = {}
    for name in ("master", "volume", "filer"):
        with socket.socket():
            ports[name] = _free_port() + len(ports)
    listen = [f"-{name}.port={port}" for name, port in ports.items()]
    here = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    here += ["-master.telemetry=false"]  # else it sends to the network
    start("weed", "server", f"-dir={folder}/store", "-filer", "-volume.max=20", *here, *listen)
    _answering(ports["filer"])
    for one in (found.a, found.b):
        cache = folder / f"cache-{one.name}"
        cache.mkdir()
        filer = f"-filer=127.0.0.1:{ports['filer']}"
        start("weed", "mount", filer, f"-dir={one}", f"-cacheDir={cache}")


def _answering(port):
    until = time.monotonic() + _READY_SECONDS
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)


def _glusterfs(start, folder, found):
    host = socket.gethostname()
    hosts = Path("/etc/hosts")
    if host not in hosts.read_text().split():
        hosts.write_text(f"{hosts.read_text()}127.0.0.1 {host}\n")
    start("glusterd", "--no-daemon")
    bricks = [folder / "store" / number for number in "12"]
    for brick in bricks:
        brick.mkdir(parents=True)
    name = f"rx{os.getpid()}"
    where = [f"{host}:{brick}" for brick in bricks]
    _gluster("volume", "create", name, *where, "force")
    _gluster("volume", "start", name)
    for one in (found.a, found.b):
        subprocess.run(["mount", "-t", "glusterfs", f"{host}:/{name}", one], check=True)


def _gluster(*words):
    until = time.monotonic() + _READY_SECONDS
    command = [program("gluster"), "--mode=script", *words]
    while subprocess.run(command, capture_output=True, check=False).returncode:
        if time.monotonic() > until:
            pytest.fail(f"gluster {' '.join(words)} fails")
        time.sleep(0.5)


STARTS = {"juicefs": _juicefs, "seaweedfs": _seaweedfs, "glusterfs": _glusterfs}
PROGRAMS = {
    "juicefs": ("juicefs",),
    "seaweedfs": ("weed",),
    "glusterfs": ("gluster", "glusterd", "glusterfs"),
}
