"""The lock of a destination folder tells a live run from a dead one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

import rankxform
from rankxform.publish import lock
from rankxform.publish.lock import FolderLock

HOLDER = """
import sys, time
from pathlib import Path
from rankxform.publish.lock import FolderLock
held = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "own" / "lock"


@pytest.fixture
def other(path):
    """A process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_live_run_is_not_disturbed(path, other):
    with pytest.raises(rankxform.StorageError, match=f"process {other.pid} on .* works on this"):
        FolderLock(path)


def test_a_suspended_run_is_alive(path, other):
    other.send_signal(19)
    with pytest.raises(rankxform.StorageError, match="works on this folder"):
        FolderLock(path)


def test_a_dead_run_lets_go_at_once(path, other):
    other.kill()
    other.wait()
    FolderLock(path).release()
    assert not path.exists()


def test_a_process_that_only_has_the_number_of_a_dead_one(path):
    FolderLock(path)._ended.set()
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "start": record["start"] - 5}))
    FolderLock(path).release()


@pytest.fixture
def elsewhere(path):
    """The lock of a process on another host, renewed some seconds ago."""
    FolderLock(path)._ended.set()
    record = {**json.loads(path.read_text()), "host": "node7", "boot": "another"}

    def renew(seconds):
        path.write_text(json.dumps(record))
        os.utime(path, (time.time() - seconds,) * 2)

    renew(0)
    return renew


def test_elsewhere_the_age_of_the_lock_counts(path, elsewhere):
    elsewhere(lock.DEAD_AFTER_SECONDS + 1)
    FolderLock(path, pytest.fail).release()


def test_a_run_elsewhere_is_waited_for_until_it_counts_as_dead(path, elsewhere):
    elsewhere(lock.DEAD_AFTER_SECONDS - 1)
    told = []
    began = time.monotonic()
    FolderLock(path, told.append).release()
    assert time.monotonic() - began < lock.DEAD_AFTER_SECONDS / 2
    (line,) = told
    assert "on node7 worked on this folder; if nothing is heard of it in 1 s, this run goes" in line


@pytest.mark.parametrize("change", ["renewed", "of another run"])
def test_a_run_elsewhere_that_is_heard_of_has_the_folder(path, elsewhere, change, monkeypatch):
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)

    def hear(line):
        if change == "renewed":
            os.utime(path)
        else:
            path.write_text(path.read_text().replace("node7", "node8"))

    elsewhere(5)
    with pytest.raises(rankxform.StorageError, match=r"on node. works on this .* after 60 s"):
        FolderLock(path, hear)


# -- where nodes' caches are not coherent ----------------------------------------------------------


@pytest.fixture
def incoherent(monkeypatch):
    """A file system on which an flock is seen by its own node alone."""
    monkeypatch.setattr(lock, "is_coherent", lambda path: False)
    monkeypatch.setattr(lock.fcntl, "flock", lambda fd, operation: None)
    monkeypatch.setattr(lock, "_CACHED_SECONDS", 0.05)


def test_a_folder_keeps_the_turn_where_an_flock_does_not(path, incoherent, monkeypatch):
    monkeypatch.setattr(lock, "_GUARD_SECONDS", 0.2)
    seen = []
    real = lock._read
    monkeypatch.setattr(
        lock, "_read", lambda one: (seen.append(one.with_name("lock.turn").exists()), real(one))[1]
    )
    FolderLock(path).release()
    assert seen and all(seen)
    assert not path.parent.exists()


def test_the_turn_of_a_dead_run_is_ended(path, incoherent, monkeypatch):
    monkeypatch.setattr(lock, "_GUARD_SECONDS", 0.2)
    path.parent.mkdir()
    path.with_name("lock.turn").mkdir()
    FolderLock(path).release()
    assert not path.parent.exists()


def test_what_replaced_a_dead_run_is_seen_late(path, elsewhere, incoherent, monkeypatch):
    """Another run takes the lock, and this node still sees the dead run's for a while."""
    elsewhere(lock.DEAD_AFTER_SECONDS + 1)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: path.write_text('{"host": "node8"}'))
    with pytest.raises(rankxform.StorageError, match="works on this folder"):
        FolderLock(path)
    assert json.loads(path.read_text()) == {"host": "node8"}


def test_a_run_whose_folder_was_taken_over_stops(path):
    mine = FolderLock(path)
    mine.check()
    path.write_text(json.dumps({"host": "node7"}))
    with pytest.raises(rankxform.StorageError, match="another run has taken"):
        mine.check()
    mine.release()
    assert path.exists(), "another's lock is left alone"


def test_of_many_that_come_at_once_one_gets_it(path):
    program = HOLDER.replace("held = ", "print('ready', flush=True); sys.stdin.read(); held = ")
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", program, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(8)
    ]
    for process in crowd:
        assert process.stdout.readline() == b"ready\n", process.stderr.read()
    for process in crowd:
        process.stdin.close()
        process.stdin = None
    until = time.monotonic() + 60
    while sum(one.poll() is None for one in crowd) > 1 and time.monotonic() < until:
        time.sleep(0.1)
    for process in crowd:
        process.kill()
    outputs = [process.communicate() for process in crowd]
    assert sum(out == b"held\n" for out, _ in outputs) == 1
    assert sum(b"works on this folder" in err for _, err in outputs) == 7


def test_the_last_one_removes_the_folder_and_nobody_elses_work(path):
    mine = FolderLock(path)
    kept = path.with_name("journal")
    kept.write_text("of the next run")
    mine.release()
    assert kept.exists()
    kept.unlink()
    FolderLock(path).release()
    assert not path.parent.exists()


TAKER = """
import sys, time
from pathlib import Path
from rankxform.errors import StorageError
from rankxform.publish.lock import FolderLock
path, until, taken = Path(sys.argv[1]), time.time() + 3, 0
while time.time() < until:
    try:
        held = FolderLock(path)
    except StorageError:
        continue
    own = path.with_name("record")
    with own.open("x") as file:  # raises where two are in
        file.write("mine")
    assert own.read_text() == "mine"
    own.unlink()
    held.release()
    taken += 1
print(taken)
"""


def test_taken_and_let_go_at_a_run_no_two_are_ever_in(path):
    crowd = [
        subprocess.Popen([sys.executable, "-c", TAKER, path], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in crowd]
    assert [process.returncode for process in crowd] == [0, 0, 0]
    assert all(int(taken) > 0 for taken in outputs)
    assert not path.parent.exists()


@pytest.mark.parametrize("ahead", [30, 1e9])
def test_a_dead_lock_dated_in_the_future_is_waited_for_as_long_as_any(
    ahead, path, elsewhere, monkeypatch
):
    """By a host whose clock was wrong: by its age alone, it would be waited for until then."""
    monkeypatch.setattr(lock, "DEAD_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.1)
    elsewhere(-ahead)
    told = []
    FolderLock(path, told.append).release()
    assert len(told) == 1 and "in 1 s" in told[0]


def test_a_live_run_whose_clock_is_ahead_is_not_disturbed(path, elsewhere, monkeypatch):
    monkeypatch.setattr(lock, "DEAD_AFTER_SECONDS", 2.0)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.1)
    elsewhere(-1000)
    renewals = iter(range(-1001, -2000, -1))
    with pytest.raises(rankxform.StorageError, match="works on this folder"):
        FolderLock(path, lambda line: elsewhere(next(renewals)))


def test_a_lock_with_a_lease_on_it_is_read_and_waited_for(path, other, monkeypatch):
    """As an NFS server has, which lets nobody open it who does not wait."""
    real = os.open

    def with_lease(name, flags, *mode, **options):
        if str(name) == str(path) and flags & os.O_NONBLOCK:
            raise BlockingIOError(11, "a lease")
        return real(name, flags, *mode, **options)

    monkeypatch.setattr(os, "open", with_lease)
    with pytest.raises(rankxform.StorageError, match="works on this folder"):
        FolderLock(path)


def test_a_pipe_in_the_place_of_a_lock_is_no_lock(path):
    path.parent.mkdir()
    os.mkfifo(path)
    FolderLock(path).release()
