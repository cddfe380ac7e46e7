"""Starts this command's processes with the mpirun that belongs to this Python's MPI library."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankxform.errors import UsageError

from . import hostfile
from .library import OPEN_MPI, family_of, load, name_of

_ANSWER = 30.0
_LAUNCH_AGENTS = (
    "OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC",
)  # fmt: skip
"""What says that hosts are reached otherwise than by ssh."""
_HOME = Path(__file__).parents[2]
_PROGRAM = (
    "import sys; sys.path[:1] = []; sys.path.append({home!r}); "
    "from rankxform.__main__ import run; sys.exit(run())"
)
"""As `rankxform` itself is started: no module of the working folder is imported."""
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def command(processes: int, words: Sequence[str], hosts: str | None = None) -> list[str]:
    """Return the command line that runs rankxform with `words` on so many processes.

    hosts: a file of the hosts to use, in the form of MPICH or of Open MPI. Raises UsageError where
    there is no MPI library, or no mpirun that fits it.
    """
    library = load().Get_library_version()
    mpirun = _found(library)
    own = [sys.executable, "-c", _PROGRAM.format(home=str(_HOME)), *words]
    number = ["-n", str(processes)]
    if family_of(library) != OPEN_MPI:
        named = _hosts(hosts, "mpich", "-f", "-hosts") if hosts else []
        return [mpirun, *named, *number, *own]
    options = ["--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if hosts:
        options += _hosts(hosts, "openmpi", "--hostfile", "--host")
        options += [word for name in _PASSED_ON if name in os.environ for word in ("-x", name)]
    else:  # what it counts as slots may be cores, or what a scheduler has granted
        options.append("--oversubscribe")
    return [mpirun, *options, *number, *own]


def _hosts(path: str, style: str, as_file: str, as_list: str) -> list[str]:
    """Return the options that name hosts: the file, or its hosts if it is of the other's form."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}") from error
    found = hostfile.parse(data, path)
    for host in found:
        _check_known(host.address, path)
    foreign = b":" if style == "openmpi" else b"slots="
    if not any(foreign in line.partition(b"#")[0] for line in data.splitlines()):
        return [as_file, path]
    return [as_list, ",".join(f"{host.address}:{host.devices}" for host in found)]


def _check_known(host: str, path: str) -> None:
    """Raise UsageError for a host that neither the resolver nor ssh's configuration knows."""
    if any(name in os.environ for name in _LAUNCH_AGENTS):
        return  # it knows hosts by names of its own
    try:
        socket.getaddrinfo(host, None)
    except UnicodeError:
        raise UsageError(f"--hostfile {path}: {host!r} is no name of a host") from None
    except OSError as error:
        if not _is_alias(host):
            why = error.strerror
            raise UsageError(f"--hostfile {path}: host {host} is not known: {why}") from None


def _is_alias(host: str) -> bool:
    """Tell whether ssh may know a name that the resolver does not."""
    line = ["ssh", "-G", host]
    try:
        told = subprocess.run(line, capture_output=True, text=True, timeout=_ANSWER, check=False)
    except subprocess.TimeoutExpired:
        return True
    except OSError:  # there is no ssh
        return False
    return f"hostname {host}\n" not in told.stdout or "proxyjump" in told.stdout


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of the processes: numpy's libraries start no threads of their own."""
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **environ}


def _found(library: str) -> str:
    """Return the path of the mpirun that fits a library, by its version's text."""
    name, beside = name_of(library), Path(sys.executable).parent / "mpirun"
    paths = [str(beside)] if beside.exists() else []
    paths += [path] if (path := shutil.which("mpirun")) and path not in paths else []
    others = []
    for path in paths:
        told = _version(path)
        if family_of(told) == family_of(library):
            return path
        others.append(f"{path} is another's ({next(iter(told.splitlines()), 'no version')})")
    found = "; ".join(others) or f"there is none there, nor beside {sys.executable}"
    raise UsageError(
        f"-n: put the mpirun of {name} in PATH, which this Python ({sys.executable}) uses; {found}"
    )


def _version(path: str) -> str:
    try:
        told = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer: {error}"
    return told.stdout + told.stderr
