"""The lock of a destination folder tells a live run from a dead one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

import rankxform
from rankxform.execution import lock
from rankxform.execution.lock import Lock

HOLDER = """
import sys, time
from pathlib import Path
from rankxform.execution.lock import Lock
held = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


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
        Lock(path)


def test_a_suspended_run_is_alive(path, other):
    other.send_signal(19)
    with pytest.raises(rankxform.StorageError, match="works on this folder"):
        Lock(path)


def test_a_dead_run_lets_go_at_once(path, other):
    other.kill()
    other.wait()
    Lock(path).release()
    assert not path.exists()


def test_a_process_that_only_has_the_number_of_a_dead_one(path):
    Lock(path)._ended.set()
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "start": record["start"] - 5}))
    Lock(path).release()


def test_elsewhere_the_age_of_the_lock_counts(path):
    Lock(path)._ended.set()
    record = {**json.loads(path.read_text()), "host": "node7", "boot": "another"}
    path.write_text(json.dumps(record))
    with pytest.raises(rankxform.StorageError, match=r"on node7 works on this .* after 60 s"):
        Lock(path)
    old = time.time() - lock.DEAD_AFTER_SECONDS - 1
    os.utime(path, (old, old))
    Lock(path).release()


def test_a_run_whose_folder_was_taken_over_stops(path):
    mine = Lock(path)
    mine.check()
    path.write_text(json.dumps({"host": "node7"}))
    with pytest.raises(rankxform.StorageError, match="another run has taken"):
        mine.check()
    mine.release()
    assert path.exists(), "another's lock is left alone"


def test_of_many_that_come_at_once_one_gets_it(path):
    program = HOLDER.replace("held = ", "time.sleep(float(sys.argv[2]) - time.time()); held = ")
    at = str(time.time() + 1.5)
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", program, path, at],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(8)
    ]
    time.sleep(4)
    for process in crowd:
        process.kill()
    outputs = [process.communicate() for process in crowd]
    assert sum(out == b"held\n" for out, _ in outputs) == 1
    assert sum(b"works on this folder" in err for _, err in outputs) == 7
