"""Killed at any call that changes the file system, and continued, the result is the same.

The kills are random in process, call and victim; their seeds are fixed. They show what real signals,
launchers and /proc add to tests/trust/test_crashes.py, which goes through every call.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

import rankxform
from rankxform.target.destination import DESTINATIONS
from tests.mpi_launch import environment, mpirun, own_tmp, run
from tests.place import Place
from tests.toy_uploads import Server
from tests.trust import victim

ROOT = Path(__file__).parents[2]
KILLS_A_TEST = 8 if os.environ.get("RANKXFORM_SHARE") == "third" else 25
NAMES = [f"w{i}" for i in range(6)]
PARAMS = {n: ((24, 16 + 8 * (i % 2)), "Float32") for i, n in enumerate(NAMES)}
SRC = [{n: ([4], [0, -1] if i % 3 else [-1, 0], 0, 0) for i, n in enumerate(NAMES)}]
DST = [{n: ([3, 2], [1, -1], 0, 0) for n in NAMES}]


class KilledPlace(Place):
    """A source of 4 ranks, a target of 6 of which 3 pairs are equal, and how it should end."""

    def __init__(self, tmp, link, kind):
        super().__init__(tmp, SRC, DST, PARAMS, kind)
        self.options = {"src_strategy": self.a, "dst_strategy": self.b, "link": link, "crc": True}
        rankxform.transform(self.src, tmp / "whole", **self.options)
        self.whole = self.files(tmp / "whole")
        self.before = self.files(tmp / "src")
        assert len(self.whole) == 6

    def files(self, folder):
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(Path(folder).rglob(f"*.{self.kind}"))
        }

    def check_unfinished(self, dst):
        """No file under a final name is incomplete; the manifest says the truth."""
        there = self.files(dst)
        for name, data in there.items():
            assert data == self.whole[name], f"{name} is incomplete under its final name"
        if (dst / "rankxform.json").exists():
            assert there == self.whole
        return there

    def check_finished(self, dst):
        assert self.files(dst) == self.whole
        others = {p.name for p in dst.rglob("*") if p.is_file()} - {"rankxform.json"}
        assert others == {Path(name).name for name in self.whole}
        assert self.files(self.src) == self.before, "the source is as it was"


def forked(work):
    """Run `work` in a child; return how it ended (a signal's number is negative)."""
    child = os.fork()
    if not child:
        code = 70
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A place, and how many changing calls each process makes, by their number."""
    place = KilledPlace(tmp_path_factory.mktemp("kills"), "none", "ckpt")
    calls = {}
    for processes in (1, 2, 3):
        counts = place.tmp / f"counts{processes}"
        counts.mkdir()
        code, output = command(place, processes, place.tmp / "n", VICTIM_COUNTS=counts)
        assert code == 0, output
        calls[processes] = [int((counts / str(p)).read_text()) for p in range(processes)]
        target_of = place.tmp / "n"
        place.check_finished(target_of)
        os.rename(target_of, place.tmp / f"n{processes}")
    return place, calls


def command(place, processes, dst, method="auto", **settings):
    options = place.options
    line = [
        *mpirun(processes), sys.executable, "-m", "tests.trust.victim", "transform", place.src, dst,
        "--src-strategy", options["src_strategy"], "--dst-strategy", options["dst_strategy"],
        "--link", options["link"], "--crc", "--read-method", method,
    ]  # fmt: skip
    more = {name: str(value) for name, value in settings.items()}
    with own_tmp() as tmp:
        env = environment(**more, TMPDIR=tmp)
        return run([str(word) for word in line], 60, env=env, cwd=ROOT)


def clear_away(mark):
    """End what a killed launcher left running, as a batch system does."""
    until = time.monotonic() + 20
    while left := victim.relatives(mark):
        assert time.monotonic() < until, left
        for pid, _ in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANKXFORM_KILLS", "1"))))
def test_random_kills_under_mpirun(seed, busy):
    place, calls = busy
    rng = random.Random(seed)
    for kill in range(KILLS_A_TEST):
        dst = place.tmp / f"dst-{seed}-{kill}"
        mark = f"{os.getpid()}-{seed}-{kill}"
        processes = rng.choice((1, 2, 3))
        process = rng.randrange(processes)
        settings = {
            "VICTIM_ID": mark,
            "VICTIM_PROCESS": process,
            "VICTIM_CALL": rng.randint(1, calls[processes][process]),
            "VICTIM_WHOM": rng.choice(("one", "all", "launcher")),
        }
        methods = [rng.choice(("auto", "two-phase")) for _ in range(2)]
        command(place, processes, dst, methods[0], **settings)
        clear_away(f"VICTIM_ID={mark}".encode())
        place.check_unfinished(dst)
        others = rng.choice([n for n in (1, 2, 3, 4) if n != processes])
        none = {"VICTIM_ID": "none", "VICTIM_CALL": 0, "VICTIM_WHOM": ""}
        code, output = command(place, others, dst, methods[1], **none)
        assert code == 0, (settings, methods, output)
        place.check_finished(dst)


def test_every_part_of_an_upload(tmp_path, monkeypatch):
    """A run is killed before each part that a destination of ascending parts takes."""
    place, sent = Place(tmp_path, SRC, DST, PARAMS, "ckpt"), []

    def kill_at_the_second():
        if sent:
            kill_self()
        sent.append(1)

    server, runs = Server(tmp_path / "server", 1000, kill_at_the_second), 1
    monkeypatch.setitem(DESTINATIONS, "parts", server.destination)
    options = {"src_strategy": place.a, "dst_strategy": place.b, "fsync": False}
    while forked(lambda: rankxform.transform(place.src, "parts://run", **options)):
        runs += 1
        assert runs < 1000
    rankxform.transform(place.src, tmp_path / "dst", **options)
    files = sorted((tmp_path / "dst").rglob("*.ckpt"))
    for path in files:
        assert path.read_bytes() == server.get(f"run/{path.relative_to(tmp_path / 'dst')}")
    assert runs == sum(-(-path.stat().st_size // server.part_size) for path in files) > 10
