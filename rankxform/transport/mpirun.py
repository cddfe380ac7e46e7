"""How the command is started on other hosts, and what they are asked first."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from rankxform.errors import UsageError
from rankxform.values import NamedTuple

from .hostfile import Host, parse_hostfile
from .launcher import MPICH, OPEN_MPI, family_of, import_mpi, name_of

_ANSWER = 30.0
_SLURM = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}
"""By any of these mpirun takes itself for started in an allocation."""
_NODE_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "COBALT_NODEFILE")
"""Where a scheduler's file of nodes is, each at the beginning of its lines."""
_NODE_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_CHOSEN_STARTERS = (
    "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "HYDRA_RMK", "PRTE_MCA_plm", "PRTE_MCA_ras",
    "OMPI_MCA_plm", "OMPI_MCA_ras",
)  # fmt: skip
"""What a person sets who knows how mpirun reaches nodes."""
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
    mpirun = _find_mpirun(library)
    data, hosts = _hosts(path) if path else (b"", [])
    number = ["-n", str(processes or sum(host.devices for host in hosts))]
    command = [sys.executable, "-c", _PROGRAM, *words]
    if processes is None:  # rankxform gets the number too, before the words of another program
        position = command.index("--") if "--" in command else len(command)
        command[position:position] = number
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if path:
        names = [host.address for host in hosts]
        if processes is not None and family_of(library) != OPEN_MPI:  # which starts on all
            before = accumulate((host.devices for host in hosts), initial=0)
            names = [name for name, slots in zip(names, before) if slots < processes]
        check_hosts(names, path, HostSetup(version, library, _SETUP, passed_on))
    starter = _starter_options(family_of(library) or MPICH, path)
    if family_of(library) != OPEN_MPI:
        named = _as_options(path, data, hosts, rb"(:\d+)?", "-f", "-hosts") if path else []
        return [mpirun, *starter, *named, *number, *command]
    options = ["--bind-to", "none", *starter]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    if path:
        options += _as_options(path, data, hosts, rb"( +slots=\d+)?", "--hostfile", "--host")
        options += [word for name in passed_on for word in ("-x", name)]
    else:  # what it counts as slots may be cores, or what a scheduler has granted
        options.append("--oversubscribe")
    return [mpirun, *options, *number, *command]


def _starter_options(
    family: str, hostfile: str | None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the options by which mpirun starts processes where a scheduler's means would fail.

    Inside an allocation mpirun asks the scheduler to start processes, which the script's own node
    does not need, and without a working srun MPICH's waits for ever. Raises UsageError where
    several nodes are meant, and none can be reached.
    """
    if any(name in environ for name in _CHOSEN_STARTERS):
        return []
    node_counts = [environ[name] for name in _NODE_COUNTS if environ.get(name, "").isdecimal()]
    is_slurm, is_lsf = bool(_SLURM & environ.keys()), "LSF_BINDIR" in environ
    is_one_node = max(map(int, node_counts), default=1) <= 1
    if is_lsf:  # host and slots, host and slots, ...
        is_one_node = len(environ.get("LSB_MCPU_HOSTS", "").split()) <= 2
    node_file = next((environ[name] for name in _NODE_FILES if name in environ), None)
    if node_file is not None and hostfile is None:
        nodes = set[str]()
        with suppress(OSError):  # of a job that has ended
            lines = Path(node_file).read_text().splitlines()
            nodes = {line.split()[0] for line in lines if line.strip()}
        if len(nodes) <= 1:
            here = ["-launcher", "fork", "-rmk", "user"]
            return ["--prtemca", "ras", "^pbs"] if family == OPEN_MPI else here
    if not (is_slurm or is_lsf):
        return []
    if hostfile is None and is_one_node:
        # Of its own node the process needs no scheduler's leave.
        here = ["-launcher", "fork", "-rmk", "user"]
        no_slurm = ["--prtemca", "plm", "^slurm", "--prtemca", "ras", "^slurm"]
        return no_slurm if family == OPEN_MPI else here
    if not is_slurm or (failure := _srun_failure()) is None:
        return []
    if hostfile is not None and family != OPEN_MPI:
        return ["-launcher", "ssh"]
    count = max(node_counts, default="several")
    raise UsageError(
        f"-n: the Slurm allocation has {count} nodes, and srun {failure}",
        "--hostfile FILE, whose hosts ssh reaches",
        "srun -n P python -m rankxform ... where srun works",
    )


def _srun_failure() -> str | None:
    """Return why srun starts nothing; None if it does, or has not answered yet."""
    try:
        done = subprocess.run(
            ["srun", "-N1", "-n1", "true"], capture_output=True, text=True,
            timeout=_ANSWER, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return "is not there"
    except subprocess.TimeoutExpired:
        return None  # it waits for what other steps use
    if done.returncode == 0:
        return None
    return f"fails: {(done.stderr.strip().splitlines() or ['without a reason'])[-1]}"


def _hosts(path: str) -> tuple[bytes, list[Host]]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{error.strerror}", where=f"--hostfile {path}") from error
    return data, parse_hostfile(data, path)


def _as_options(
    path: str, data: bytes, hosts: Sequence[Host], slots: bytes, file: str, named: str
) -> list[str]:
    """Return the options that name hosts: the file, or its hosts if mpirun may not read it so.

    slots: how plain lines of this mpirun say how many there are; comments it may not know.
    """
    plain_line = rb"([^\s:#=\[\]]+" + slots + rb")?"
    if all(re.fullmatch(plain_line, line) for line in data.split(b"\n")):
        return [file, path]
    return [named, ",".join(f"{host.address}:{host.devices}" for host in hosts)]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of the processes: numpy's libraries start no threads of their own."""
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **environ}


def _find_mpirun(library: str) -> str:
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


_SECONDS = 30.0
"""In which a host must have answered; a Python on a network file system takes its time."""
_AT_ONCE = 64
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ControlMaster=no"]
"""Not as the master of later connections, which would keep its output open and seem not to end."""
_AGENTS = {
    MPICH: ("HYDRA_LAUNCHER_EXEC",),
    OPEN_MPI: ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
}
"""What names the program that a library's mpirun reaches hosts by, where it is not ssh."""
_OTHERS = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "HYDRA_LAUNCHER_EXTRA_ARGS",
    "OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args",
)  # fmt: skip
"""What says that mpirun may reach hosts by a scheduler's own means, or with words of its own."""
_HOST_ANSWER = (
    "import rankxform; from rankxform.transport.launcher import import_mpi; "
    "print(rankxform.__version__, import_mpi().Get_library_version().replace('\\n', ' '))"
)
_OWN = ("127.0.0.1", "127.0.1.1")
"""The latter is a host's own name in Debian's /etc/hosts."""
_NO_CONNECTION = 255
"""The exit code of ssh where the host was not reached."""


class HostSetup(NamedTuple):
    """What this host has, and the others must have."""

    version: str  # of rankxform
    library: str  # what the MPI library says of its version
    setup: str  # Python that finds this rankxform
    passed_on: Mapping[str, str] = {}  # the part of the environment that processes get


def check_hosts(
    names: Sequence[str], label: str, local: HostSetup, seconds: float = _SECONDS
) -> None:
    """See that each host has this rankxform, an MPI library of this family, and this folder.

    Hosts are asked at once, by the program that mpirun reaches them by. Where that is another's
    than a program's, such as a scheduler's, nothing is asked.

    Args:
        names: hosts, some of which may be this one.
        label: the hostfile, for messages.
        local: what this host has and each must have.
        seconds: in which a host must have answered.

    Raises:
        UsageError: hosts do not answer, or cannot take part; each with what it said.
    """
    agent = _agent(family_of(local.library) or MPICH)
    others = [name for name in names if not _is_here(name)]
    if agent is None or not others:
        return
    settings = [f"{name}={value}" for name, value in local.passed_on.items()]
    program = ["env", *settings, sys.executable, "-c", f"{local.setup} {_HOST_ANSWER}"]
    text = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(program)}"
    lines = [[*agent, name, text] for name in others]
    with ThreadPoolExecutor(min(_AT_ONCE, len(lines))) as threads:
        answers = threads.map(lambda line: _answer(line, local, seconds), lines)
        wrong = {name: why for name, why in zip(others, answers) if why}
    if wrong:
        first = next(iter(wrong))
        check = f"cd {shlex.quote(os.getcwd())} && {shlex.quote(sys.executable)} -m rankxform -V"
        raise UsageError(
            f"host {first} cannot take part" if len(wrong) == 1
            else f"{len(wrong)} of {len(names)} hosts cannot take part, such as {first}",
            f"{shlex.join([*agent, first])} {shlex.quote(check)}",
            f"take {'it' if len(wrong) == 1 else 'them'} out of {label}",
            where=f"--hostfile {label}",
            details="\n".join(f"{name}: {why}" for name, why in wrong.items()),
        )  # fmt: skip


def _agent(family: str) -> list[str] | None:
    """Return the words by which mpirun reaches a host, None where it may be by no program."""
    launchers = {os.environ.get(name, "ssh") for name in ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP")}
    if launchers != {"ssh"} or any(name in os.environ for name in _OTHERS):
        return None
    named = [os.environ[name] for name in _AGENTS[family] if name in os.environ]
    return shlex.split(named[0].partition(":")[0]) if named else _SSH


def _is_here(name: str) -> bool:
    """Return whether a name is this host's: a socket can be bound to no other host's address."""
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in addresses:
        if str(address[0]).startswith("127.") and address[0] not in _OWN:
            continue  # mpirun reaches it as another host
        with suppress(OSError), socket.socket(family, kind, protocol) as listener:
            listener.bind(address)
            return True
    return False


def _answer(line: Sequence[str], local: HostSetup, seconds: float) -> str | None:
    """Ask one host; return why it cannot take part, None if it can."""
    try:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{line[0]} is not to be started: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what the program has started
        process.communicate()
        return f"does not answer within {seconds:.0f} s"
    last = next(reversed(errors.strip().splitlines()), "")
    if process.returncode == _NO_CONNECTION:
        return f"is not reached: {last or 'without a reason'}"
    if process.returncode:
        return last or f"{sys.executable} ended with {process.returncode}"
    version, _, library = next(reversed(output.splitlines() or [""])).partition(" ")
    if version != local.version:
        return f"has rankxform {version}, and here it is {local.version}"
    theirs, ours = family_of(library), family_of(local.library)
    if theirs != ours:
        return f"has the library of {theirs or library}, and here it is of {ours or local.library}"
    return None
