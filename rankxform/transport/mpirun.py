"""Starts this command's processes with the mpirun that belongs to this Python's MPI library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from rankxform.errors import UsageError
from rankxform.transport.hostfile import Host, parse_hostfile

from .library import OPEN_MPI, family_of, import_mpi, name_of

_ANSWER = 30.0
_SETUP = f"import sys; sys.path[:1] = []; sys.path.append({str(Path(__file__).parents[2])!r});"
"""As `rankxform` itself is started: no module of the working folder is imported."""
_PROGRAM = f"{_SETUP} from rankxform.__main__ import run; sys.exit(run())"
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def command(
    processes: int | None, words: Sequence[str], path: str | None = None, version: str = ""
) -> list[str]:
    """Return the command line that runs rankxform with `words` on so many processes.

    Args:
        processes: how many; None for as many as the hosts have slots.
        path: a file of the hosts to use, in the form of MPICH or of Open MPI, which are asked
            whether they can take part.
        version: of this rankxform, which hosts must have.

    Raises:
        UsageError: there is no MPI library, no mpirun that fits it, or hosts cannot take part.
    """
    library = import_mpi().Get_library_version()
    mpirun = _found(library)
    data, hosts = _hosts(path) if path else (b"", [])
    number = ["-n", str(processes or sum(host.devices for host in hosts))]
    command = [sys.executable, "-c", _PROGRAM, *words]
    if processes is None:  # rankxform gets the number too, before the words of another program
        position = command.index("--") if "--" in command else len(command)
        command[position:position] = number
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if path:
        from .hosts import HostSetup, check_hosts

        names = [host.address for host in hosts]
        if processes is not None and family_of(library) != OPEN_MPI:  # which starts on all
            before = accumulate((host.devices for host in hosts), initial=0)
            names = [name for name, slots in zip(names, before) if slots < processes]
        check_hosts(names, path, HostSetup(version, library, _SETUP, passed_on))
    if family_of(library) != OPEN_MPI:
        named = _as_options(path, data, hosts, b"slots=", "-f", "-hosts") if path else []
        return [mpirun, *named, *number, *command]
    options = ["--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if path:
        options += _as_options(path, data, hosts, b":", "--hostfile", "--host")
        options += [word for name in passed_on for word in ("-x", name)]
    else:  # what it counts as slots may be cores, or what a scheduler has granted
        options.append("--oversubscribe")
    return [mpirun, *options, *number, *command]


def _hosts(path: str) -> tuple[bytes, list[Host]]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{error.strerror}", where=f"--hostfile {path}") from error
    return data, parse_hostfile(data, path)


def _as_options(
    path: str, data: bytes, hosts: Sequence[Host], foreign: bytes, file: str, named: str
) -> list[str]:
    """Return the options that name hosts: the file, or its hosts if it is of the other's form."""
    if not any(foreign in line.partition(b"#")[0] for line in data.splitlines()):
        return [file, path]
    return [named, ",".join(f"{host.address}:{host.devices}" for host in hosts)]


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
        version_text = _version(path)
        if family_of(version_text) == family_of(library):
            return path
        first_line = next(iter(version_text.splitlines()), "no version")
        others.append(f"{path} is another's ({first_line})")
    reason = "; ".join(others) or f"there is none there, nor beside {sys.executable}"
    raise UsageError(
        f"-n: put the mpirun of {name} in PATH, which this Python ({sys.executable}) uses; {reason}"
    )


def _version(path: str) -> str:
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer: {error}"
    return result.stdout + result.stderr
