"""Checkpoints that are written to a bucket.

Commands are run by forked processes, which use obstore each for itself; this one never does.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rankxform
from rankxform.errors import CheckpointError, DifferenceError, StorageError, UsageError
from rankxform.storage.objects import access
from tests import reference
from tests.checkpoints import DATA
from tests.conformance.test_destinations import DestinationTests
from tests.forked import run_forked
from tests.local_world import run_world
from tests.mpi.conftest import prepare
from tests.mpi_launch import world
from tests.storage.objects import proxy, put, servers
from tests.toy_forms import CASE
from tests.verbs.test_follow import Training

AT_NIGHT = "RANKXFORM_OBJECT_FAULTS" in os.environ
"""Whether all cases run; others are a choice of them."""


def look(address, *words):
    """Ask another process what lies at an address (`look.at`): a forked one, if this one may."""
    if "obstore" in sys.modules:
        line = [sys.executable, "-m", "tests.storage.objects.look", address, *words]
        return json.loads(subprocess.run(line, capture_output=True, check=True, timeout=60).stdout)

    def work(comm):
        from rankxform.storage.objects.access import _bucket
        from tests.storage.objects.look import at

        _bucket.cache_clear()  # of the process that was forked
        return at(address, *words)

    (found,) = run_world(1, work)
    assert isinstance(found, dict), found
    return found


def command(*words, environ=(), processes=1):
    """Run the command in forked processes."""
    done = run_forked(words, processes, Path.cwd(), **dict(environ))
    return SimpleNamespace(returncode=done.code, stdout=done.stdout, stderr=done.stderr)


def converted(src, dst, *options, **how):
    done = command("transform", src, dst, "--no-fsync", *options, **how)
    assert done.returncode == 0, done.stderr
    return done


class TestObjectDestination(DestinationTests):
    """The laws of a destination."""

    @pytest.fixture(autouse=True)
    def in_bucket(self, bucket, source):
        self.dst = f"s3://{servers.BUCKET}/{self.tmp.parent.name}/{self.tmp.name}/dst"
        self.options.pop("fsync")

    def store(self, **options):
        return rankxform.transform(self.src, self.dst, self.a, self.b, **self.options, **options)

    def held(self):
        found = self.tmp / f"found-{world().rank}"
        look(self.dst, "--copy", str(found))
        return {
            int(path.parent.name.removeprefix("rank_")): reference.read_any(path)
            for path in found.glob(f"rank_*/*.{self.kind}")
        }


@pytest.mark.skipif(not AT_NIGHT, reason="in `make night`")
class TestObjectDestinationOfSafetensors(TestObjectDestination):
    kind = "safetensors"


PARAMS = {f"{n}.w": ((1024, 1024), "Float32") for n in range(12)}
LAYOUT = [{name: ([4], [0, -1], 0, 0) for name in PARAMS}]
CONTENT = sum(4 * int(np.prod(shape)) for shape, _ in PARAMS.values())
PART = r"partNumber=(\d+)"


@pytest.fixture
def line(bucket, monkeypatch):
    with proxy.before(bucket.port) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
        found.prefix, found.put_folder = bucket.at(), bucket.put_folder
        yield found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """48 MB of four ranks, and what folders get of them."""
    tmp = tmp_path_factory.mktemp("ranks")
    src = reference.write_checkpoint(tmp / "src", LAYOUT, PARAMS, kind="safetensors")
    a = reference.write_strategy(tmp / "a.ckpt", LAYOUT)
    halves = [{name: ([2], [-1, 0], 0, 0) for name in PARAMS}]
    b = reference.write_strategy(tmp / "b.ckpt", halves)
    made = {"whole": "none", "halves": b}
    for name, dst in made.items():
        converted(src, tmp / name, "--src-strategy", a, "--dst-strategy", dst)
    return SimpleNamespace(
        src=src,
        words={name: ["--src-strategy", a, "--dst-strategy", dst] for name, dst in made.items()},
        expected={name: files_below(tmp / name) for name in made},
    )


def files_below(folder):
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if "rankxform" not in name}


def there(address, tmp_path):
    """Return what lies at an address, and is no record of ours."""
    folder = tmp_path / f"there-{time.monotonic_ns()}"
    folder.mkdir()
    look(address, "--copy", str(folder))
    return files_below(folder)


def parts(line):
    """Return (path, number) of each part that came to the store, in order."""
    return [
        (n.path.partition("?")[0], int(match[1]))
        for n in line.noted
        if n.method == "PUT" and (match := re.search(PART, n.path))
    ]


SENT = [
    ("whole", 2, ()), ("halves", 4, ("--memory", "64M")), ("whole", 1, ()), ("halves", 4, ()),
    ("whole", 4, ("--memory", "64M")), ("halves", 1, ("--memory", "64M")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "processes", "memory"), SENT if AT_NIGHT else SENT[:2])
def test_each_byte_is_sent_once_by_whoever_has_it(name, processes, memory, ranks, line, tmp_path):
    dst = f"{line.prefix}/dst"
    done = converted(ranks.src, dst, *ranks.words[name], "--json", *memory, processes=processes)
    report, sent = json.loads(done.stdout), parts(line)
    assert there(dst, tmp_path) == ranks.expected[name]
    assert len(sent) == len({*sent}) > 2, "no part is sent twice"
    total = sum(map(len, ranks.expected[name].values()))
    assert report["bytes_written"] == total
    assert sum(n.received for n in line.noted if re.search(PART, n.path)) == total
    puts = [n for n in line.noted if n.method == "PUT" and not re.search(PART, n.path)]
    assert len(puts) <= 6, "the lock, twice; the job, twice; the manifest"
    assert look(dst)["begun"] == [] and set(look(dst)["objects"]) == {
        *ranks.expected[name], "rankxform.json"
    }  # fmt: skip
    if not memory:
        assert report["bytes_read"] == CONTENT


@pytest.mark.parametrize(
    ("name", "kind", "processes"), [("whole", "ckpt", 4), ("whole", "safetensors", 4),
    ("halves", "safetensors", 1)],
)  # fmt: skip
def test_files_carry_the_checksums_that_they_do_in_folders(
    name, kind, processes, ranks, line, tmp_path
):
    """Although several processes send parts of a file, and a run was killed before."""
    words = [*ranks.words[name], "--crc", "--format", kind, "--no-fsync"]
    converted(ranks.src, tmp_path / "folder", *words)
    expected, dst, running = files_below(tmp_path / "folder"), f"{line.prefix}/dst", [None]
    killed_at(3, line, running)
    running[0] = begin(ranks, dst, *words[4:], processes=processes, name=name)
    assert ended(running[0]) != 0
    line.before = lambda method, path: None
    converted(ranks.src, dst, *words, processes=processes)
    assert there(dst, tmp_path) == expected
    assert look(dst)["begun"] == []
    done = command("verify", ranks.src, dst, *words[:-1])
    assert done.returncode == 0, done.stdout + done.stderr
    without = [word for word in words if word != "--crc"]
    assert "--overwrite" in command("transform", ranks.src, dst, *without).stderr


def with_far_nodes(*words):
    """Run a command as three processes, of which two are of nodes without a way to the store."""
    line = [sys.executable, "-m", "rankxform", *map(str, words)]
    far = 'hostname $0; AWS_ENDPOINT_URL=http://127.0.0.1:1 exec "$@"'
    others = [
        part
        for name in ("far", "farther")
        for part in (":", "-n", "1", "unshare", "-m", "-u", "sh", "-c", far, name, *line)
    ]
    done = subprocess.run(
        [Path(sys.executable).with_name("mpirun"), "-n", "1", *line, *others],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root")
def test_a_node_without_a_way_to_the_store_gets_its_bytes_from_another(ranks, line, tmp_path):
    src, dst, again = f"{line.prefix}/src", f"{line.prefix}/dst", tmp_path / "again"
    line.put_folder(ranks.src, "src")
    said = with_far_nodes("transform", src, dst, *ranks.words["halves"], "--verify")
    assert said.count("2 of 3 nodes do not reach it (far, farther)") == 1
    assert is_right(dst, ranks, tmp_path)
    line.noted.clear()
    said = with_far_nodes("transform", dst, again, "--dst-strategy", ranks.words["halves"][1])
    assert "sent 33.6 MB between processes" in said, "each of them makes a third"
    assert files_below(again) == files_below(Path(ranks.src)), (
        "and the manifest's strategy is found"
    )
    assert line.bytes_of(r"rank_\d") < 1.02 * CONTENT
    assert "every byte compared" in with_far_nodes("verify", dst)
    assert "every byte compared" in with_far_nodes("verify", src, dst, *ranks.words["halves"])
    assert "nothing wrong" in with_far_nodes("inspect", "--check", dst)


def is_right(dst, ranks, tmp_path, name="halves"):
    """See that all is there, and nothing else."""
    return there(dst, tmp_path) == ranks.expected[name] and not look(dst)["begun"]


REQUESTS = {
    "begin": r"^POST .*uploads", "part": r"^PUT .*partNumber=2", "complete": r"^POST .*uploadId",
    "manifest": r"^PUT .*/rankxform\.json", "job": r"^PUT .*job\.json", "look": r"^HEAD .*rank_",
}  # fmt: skip


@pytest.mark.parametrize("action", [proxy.BUSY, proxy.CUT, proxy.LOST])
def test_a_request_that_fails_is_made_again(action, ranks, line, tmp_path):
    line.rules = [(expression, action) for expression in REQUESTS.values() for _ in range(2)]
    converted(ranks.src, f"{line.prefix}/dst", *ranks.words["halves"], processes=2)
    assert action == proxy.CUT or not line.rules  # of an answer without a body nothing is cut
    # Where the store begins an upload and nobody hears of it, it is abandoned in the end.
    assert is_right(f"{line.prefix}/dst", ranks, tmp_path)


def killed_at(number, line, running):
    """Kill processes when so many parts came to the store."""
    seen = []

    def before(method, path):
        if method == "PUT" and re.search(PART, path):
            seen.append(path)
            if len(seen) == number:
                running[0].kill()

    line.before = before


def begin(ranks, dst, *words, processes=1, name="halves"):
    """Begin a conversion in a process group of its own; return it."""
    launch = ["-n", str(processes)] if processes > 1 else []
    line = [sys.executable, "-m", "rankxform", "transform", *launch, str(ranks.src), dst]
    return subprocess.Popen(
        [*line, *map(str, ranks.words[name]), *words], start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(running):
    """Return how a process ended, and let go of what it said."""
    running.communicate(timeout=60)
    return running.returncode


@pytest.mark.parametrize("number", [4])
def test_a_killed_run_goes_on_with_the_parts_that_are_missing(number, ranks, line, tmp_path):
    dst, running = f"{line.prefix}/dst", [None]
    killed_at(number, line, running)
    running[0] = begin(ranks, dst)
    assert ended(running[0]) == -9
    line.before = lambda method, path: None
    assert there(dst, tmp_path) == {}, "nothing has its key before all is whole"
    found = look(dst)
    assert len(found["begun"]) == 2 and ".rankxform/job.json" in found["objects"]
    first = {*parts(line)}
    line.noted.clear()
    done = converted(ranks.src, dst, *ranks.words["halves"], processes=3)
    again = {*parts(line)}
    assert len(first & again) <= 4, "what was on its way when it was killed may not have arrived"
    assert len(again) <= 6 - number + 4
    assert "continued" in done.stdout
    assert is_right(dst, ranks, tmp_path)


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANKXFORM_OBJECT_FAULTS", "1"))))
def test_faults_at_random_slow_a_run_or_are_said(seed, ranks, line, tmp_path):
    rng, dst, name = random.Random(seed), f"{line.prefix}/dst", "halves"
    actions = [proxy.CUT, proxy.BUSY, proxy.LOST, proxy.SHORT, proxy.STALL]
    chance, src = rng.choice((0.05, 0.2, 0.5)), ranks.src
    if rng.random() < 0.5:
        line.put_folder(ranks.src, "src")
        src = f"{line.prefix}/src"
    line.at_random = lambda: rng.choice(actions) if rng.random() < chance else None
    words = [*ranks.words[name], *rng.choice(((), ("--memory", "64M")))]
    done = command("transform", src, dst, *words, processes=rng.randint(1, 3))
    line.at_random = lambda: None
    if done.returncode:
        assert done.returncode in (StorageError.exit_code, CheckpointError.exit_code), done.stderr
        assert "s3://" in done.stderr and "try" in done.stderr and "Traceback" not in done.stderr
        assert set(there(dst, tmp_path).items()) <= set(ranks.expected[name].items())
        converted(src, dst, *words)
    assert there(dst, tmp_path) == ranks.expected[name]
    command("clean", dst)
    assert is_right(dst, ranks, tmp_path, name)


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANKXFORM_OBJECT_KILLS", "0"))))
def test_kills_at_random(seed, ranks, line, tmp_path):
    """Of all processes, or of one; the next run, of as many as it likes, goes on."""
    rng, dst = random.Random(seed), f"{line.prefix}/dst"
    for _ in range(rng.randint(1, 3)):
        running = begin(ranks, dst, processes=rng.randint(1, 3))
        time.sleep(rng.uniform(0.3, 1.6))
        if rng.random() < 0.5:
            os.killpg(running.pid, signal.SIGKILL)
        else:
            pids = subprocess.run(
                ["pgrep", "-g", str(running.pid)], capture_output=True, text=True, check=False
            ).stdout.split()
            for pid in rng.sample(pids, min(1, len(pids))):
                os.kill(int(pid), signal.SIGKILL)
        ended(running)
        assert set(there(dst, tmp_path).items()) <= set(ranks.expected["halves"].items())
    converted(ranks.src, dst, *ranks.words["halves"], processes=rng.randint(1, 3))
    assert there(dst, tmp_path) == ranks.expected["halves"]
    command("clean", dst)
    assert is_right(dst, ranks, tmp_path)


@pytest.mark.parametrize(
    "expression",
    [r"^PUT .*partNumber=2", r"^GET .*rank_", r"^POST .*uploadId"][: 3 if AT_NIGHT else 1],
)
def test_credentials_that_expire_are_said_and_the_run_goes_on_with_others(
    expression, ranks, line, tmp_path
):
    src, dst, words = f"{line.prefix}/src", f"{line.prefix}/dst", ranks.words["halves"]
    line.put_folder(ranks.src, "src")
    line.rules = [(expression, proxy.REVOKED)]

    def revoke():  # from the first one on
        return None if line.rules else proxy.REVOKED

    line.at_random = revoke
    done = command("transform", src, dst, *words, processes=2)
    line.at_random = lambda: None
    assert done.returncode == StorageError.exit_code and "ExpiredToken" in done.stderr, done.stderr
    assert "try  fetch new credentials" in done.stderr and "Traceback" not in done.stderr
    assert there(dst, tmp_path).items() <= ranks.expected["halves"].items()
    converted(src, dst, *words, processes=3)
    assert there(dst, tmp_path) == ranks.expected["halves"]
    command("clean", dst)
    assert is_right(dst, ranks, tmp_path)


@pytest.mark.skipif(not AT_NIGHT, reason="in `make night`")
@pytest.mark.parametrize("expression", [PART, r"rank_\d"])
def test_a_server_that_is_started_anew_slows_a_run(
    expression, ranks, bucket, tmp_path, monkeypatch
):
    """Killed while parts come to it, or while it is read."""
    folder = tmp_path / "server"
    folder.mkdir()
    with servers.seaweedfs(folder) as server, proxy.before(server.port) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        src, dst, words = (
            f"s3://{servers.BUCKET}/src",
            f"s3://{servers.BUCKET}/dst",
            ranks.words["halves"],
        )
        converted(ranks.src, src, *words[:2], "--dst-strategy", words[1])
        asked, again = [], threading.Timer(1.0, server.start)

        def before(method, path):
            if re.search(expression, path) and method in ("PUT", "GET"):
                asked.append(path)
                if len(asked) == 4:
                    server.kill()
                    again.start()

        line.before = before
        done = command("transform", src, dst, *words, processes=2)
        again.join()
        server.await_bucket()
        line.before = lambda method, path: None
        if done.returncode:
            assert "s3://" in done.stderr and "try" in done.stderr, done.stderr
            converted(src, dst, *words)
        assert there(dst, tmp_path) == ranks.expected["halves"]
        command("clean", dst)
        assert is_right(dst, ranks, tmp_path)


def test_where_uploads_take_no_parts_each_is_an_object_meanwhile(
    ranks, line, tmp_path, monkeypatch
):
    """As at gs:// and az://, here at a server that takes parts too."""
    monkeypatch.setattr(access.Bucket, "takes_parts", False)
    dst, words = f"{line.prefix}/dst", ranks.words["halves"]
    line.rules = [(r"^PUT .*rankxform-parts/.*/00002", proxy.REVOKED)]
    line.at_random = lambda: None if line.rules else proxy.REVOKED
    done = command("transform", ranks.src, dst, *words)
    line.at_random = lambda: None
    assert done.returncode == StorageError.exit_code and "ExpiredToken" in done.stderr
    assert there(dst, tmp_path) == {} and len(look(dst)["begun"]) == 2
    assert "abandoned" in command("clean", dst).stdout
    assert look(dst) == {"objects": {}, "begun": []}
    line.rules = [(r"^PUT .*checkpoint_1.safetensors", proxy.REVOKED)]  # its parts are there
    line.at_random = lambda: None if line.rules else proxy.REVOKED
    assert command("transform", ranks.src, dst, *words, processes=2).returncode
    line.at_random = lambda: None
    line.noted.clear()
    done = converted(ranks.src, dst, *words, processes=3)
    assert "continued" in done.stdout and "each byte was sent twice" in done.stdout
    assert is_right(dst, ranks, tmp_path)
    assert command("verify", ranks.src, dst, *words).returncode == 0


@pytest.mark.skipif(servers.azurite_program() is None, reason="Azurite is not installed")
def test_an_azure_container_takes_it_and_gives_it_back(ranks, tmp_path, monkeypatch):
    with servers.azurite(tmp_path) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        dst, words, back = "az://models/dst", ranks.words["halves"], tmp_path / "back"
        converted(ranks.src, dst, *words, "--verify", processes=2)
        assert command("verify", ranks.src, dst, *words).returncode == 0
        assert "every byte" in command("verify", dst).stdout
        assert "complete already" in converted(ranks.src, dst, *words).stdout
        converted(ranks.src, dst, *ranks.words["whole"], "--overwrite")
        converted(dst, back, "--dst-strategy", ranks.words["halves"][3], processes=2)
        assert files_below(back) == ranks.expected["halves"]
        assert "nothing was begun" in command("clean", dst).stdout


def test_a_run_that_is_killed_while_files_get_their_keys_goes_on(ranks, line, tmp_path):
    dst, running = f"{line.prefix}/dst", [None]

    def before(method, path):
        if method == "PUT" and path.endswith("/rankxform.json"):
            running[0].kill()
            raise proxy.DroppedError

    line.before = before
    running[0] = begin(ranks, dst)
    assert ended(running[0]) == -9
    line.before, line.noted[:] = lambda method, path: None, []
    assert "rankxform.json" not in look(dst)["objects"]
    converted(ranks.src, dst, *ranks.words["halves"])
    assert parts(line) == [] and is_right(dst, ranks, tmp_path)


def test_a_stop_ends_a_run_soon_and_the_next_goes_on(ranks, line, tmp_path):
    dst = f"{line.prefix}/dst"
    line.rules = [("^PUT .*partNumber=1", proxy.STALL)] * 2
    running = begin(ranks, dst)
    until = time.monotonic() + 30
    while not parts(line) and time.monotonic() < until:
        time.sleep(0.05)
    began = time.monotonic()
    running.terminate()
    assert ended(running) == 75
    assert time.monotonic() - began < 2.5
    converted(ranks.src, dst, *ranks.words["halves"])
    assert is_right(dst, ranks, tmp_path)


def test_clean_keeps_what_is_complete_although_its_job_is_there(ranks, line, tmp_path):
    """The run was killed between its manifest and the end of its job."""
    dst, running = f"{line.prefix}/dst", [None]

    def before(method, path):
        is_removal = method == "DELETE" or (method == "POST" and "delete" in path)
        if is_removal and any(
            n.method == "PUT" and "/rankxform.json" in n.path for n in line.noted
        ):
            running[0].kill()
            raise proxy.DroppedError

    line.before = before
    running[0] = begin(ranks, dst)
    assert ended(running[0]) == -9
    line.before = lambda method, path: None
    assert "job of a stopped run was removed" in command("clean", dst).stdout
    assert is_right(dst, ranks, tmp_path)
    assert command("verify", ranks.src, dst, *ranks.words["halves"]).returncode == 0


def test_clean_leaves_nothing_of_a_killed_run(ranks, line, tmp_path):
    dst, running = f"{line.prefix}/dst", [None]
    killed_at(4, line, running)
    running[0] = begin(ranks, dst)
    assert ended(running[0]) == -9
    line.before = lambda method, path: None
    done = command("clean", dst)
    assert done.returncode == 0 and "abandoned" in done.stdout, done.stderr
    assert look(dst) == {"objects": {}, "begun": []}
    converted(ranks.src, dst, *ranks.words["halves"])
    assert "nothing was begun" in command("clean", dst).stdout
    assert is_right(dst, ranks, tmp_path), "what is complete stays"


def test_a_second_run_is_kept_away(ranks, line, tmp_path):
    dst = f"{line.prefix}/dst"
    line.rules = [("^PUT .*partNumber=1", proxy.STALL)] * 2
    running = begin(ranks, dst)
    until = time.monotonic() + 30
    while ".rankxform/lock" not in look(dst)["objects"] and time.monotonic() < until:
        time.sleep(0.05)
    second = command("transform", ranks.src, dst, *ranks.words["halves"])
    cleaning = command("clean", dst)
    assert ended(running) == 0
    assert second.returncode == StorageError.exit_code, second.stdout
    assert (
        f"process {running.pid} on " in second.stderr and "works on this address" in second.stderr
    )
    assert cleaning.returncode == StorageError.exit_code and "works on this" in cleaning.stderr
    assert is_right(dst, ranks, tmp_path)


def test_what_is_there_is_not_replaced(ranks, bucket, tmp_path):
    dst, words = bucket.at("dst"), ranks.words["halves"]
    converted(ranks.src, dst, *words)
    again = converted(ranks.src, dst, *words)
    assert "complete already" in again.stdout
    other = command("transform", ranks.src, dst, *ranks.words["whole"])
    assert other.returncode == StorageError.exit_code
    assert "holds the work of an earlier run" in other.stderr
    converted(ranks.src, dst, *ranks.words["whole"], "--overwrite")
    assert is_right(dst, ranks, tmp_path, "whole"), "the files of the earlier one are gone"
    bucket.put("dst/rank_0/checkpoint_0.safetensors", b"another's")
    changed = command("transform", ranks.src, dst, *ranks.words["whole"])
    assert changed.returncode == StorageError.exit_code
    assert "was changed after it was written" in changed.stderr


@pytest.mark.parametrize("name", ["rank_0/checkpoint_0.safetensors", "rank_7/other.safetensors"])
def test_somebody_elses_files_are_refused(name, ranks, bucket):
    bucket.put(f"dst/{name}", b"another's")
    done = command("transform", ranks.src, bucket.at("dst"), *ranks.words["halves"])
    assert done.returncode == StorageError.exit_code
    assert "holds checkpoint files that rankxform did not write" in done.stderr
    assert look(bucket.at("dst")) == {"objects": {name: 9}, "begun": []}


def test_an_upload_that_another_program_began_is_refused(ranks, bucket, tmp_path):
    dst, words = bucket.at("dst"), ranks.words["halves"]
    look(dst, "--begin", "rank_1/checkpoint_1.safetensors")
    done = command("transform", ranks.src, dst, *words)
    assert done.returncode == StorageError.exit_code
    assert "an upload to it was begun" in done.stderr
    assert "nothing was begun" in command("clean", dst).stdout and len(look(dst)["begun"]) == 1
    converted(ranks.src, dst, *words, "--no-lock")
    assert there(dst, tmp_path) == ranks.expected["halves"]
    assert len(look(dst)["begun"]) == 1, "it goes on beside this run"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--writers", "node"], "--writers is for a folder"),
        (["ftp"], "nothing writes ftp:// addresses"),
        (["inside"], "lies in the source"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(words, text, ranks, bucket):
    dst, src = bucket.at("dst"), ranks.src
    if words == ["ftp"]:
        dst, words = "ftp://models/dst", []
    if words == ["inside"]:
        bucket.put_folder(ranks.src, "src")
        src, dst, words = bucket.at("src"), bucket.at("src/new"), []
    before = look(bucket.at())["objects"]
    done = command("transform", src, dst, *ranks.words["halves"], *words)
    assert done.returncode == UsageError.exit_code and text in done.stderr, done.stderr
    assert look(bucket.at())["objects"] == before


def test_no_secret_is_written_or_said(ranks, line, tmp_path):
    """Wherever a run ends."""
    dst, running, said = f"{line.prefix}/dst", [None], []
    killed_at(3, line, running)
    running[0] = begin(ranks, dst, "-v")
    said.append(running[0].communicate()[0])
    line.before = lambda method, path: None
    line.rules = [("^POST .*uploadId", proxy.BUSY)]
    done = command("transform", ranks.src, dst, *ranks.words["halves"], "-v", "--json")
    said += [done.stdout, done.stderr]
    done = command("transform", ranks.src, dst, environ={"AWS_SECRET_ACCESS_KEY": "wrong-secret"})
    said += [done.stdout, done.stderr]
    folder = tmp_path / "all"
    look(line.prefix, "--copy", str(folder))
    said += [p.read_bytes().decode(errors="replace") for p in folder.rglob("*") if p.is_file()]
    for text in said:
        assert servers.SECRET not in text and "wrong-secret" not in text
        assert "Signature=" not in text and servers.KEY not in text


def test_from_a_bucket_into_a_bucket_and_compared_there(ranks, bucket, tmp_path):
    src, dst, words = bucket.at("src"), bucket.at("dst"), ranks.words["halves"]
    bucket.put_folder(ranks.src, "src")
    converted(src, dst, *words, "--verify", processes=2)
    assert is_right(dst, ranks, tmp_path)
    assert command("verify", src, dst, *words, processes=2).returncode == 0
    done = command("verify", dst, processes=2)
    assert done.returncode == 0 and "fingerprints" in done.stdout
    name = "rank_1/checkpoint_1.safetensors"
    data = bytearray(ranks.expected["halves"][name])
    data[-1] ^= 1
    bucket.put(f"dst/{name}", bytes(data))
    for done in (command("verify", dst), command("verify", src, dst, *words)):
        assert done.returncode == DifferenceError.exit_code, done.stderr
    back = command("transform", dst, tmp_path / "back", "--dst-strategy", "none")
    assert back.returncode != 0 and "is not the file that" in back.stderr


def test_steps_are_followed_from_a_bucket_into_one(bucket, tmp_path):
    training = Training(tmp_path)
    for step in (1, 2):
        training.save(step)
    training.save(3, ranks=range(3))
    bucket.put_folder(training.src, "src")
    words = ["--src-strategy", training.a, "--dst-strategy", training.b, "--keep", "2"]
    line = [sys.executable, "-m", "rankxform", "follow", bucket.at("src"), bucket.at("dst"), *words]
    line += ["--watch", "--settle", "0.5"]
    watching = subprocess.Popen(
        [*map(str, line)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    for text in watching.stdout:
        said.append(text)
        if "step 1_3 is not complete" in text:
            training.save(3)
            bucket.put_folder(training.src / "rank_3", "src/rank_3")
        if text.startswith("removed"):
            break
    watching.terminate()
    assert ended(watching) == 75 and said[-1] == "removed   1_1\n", said
    names = {name.partition("/")[0] for name in look(bucket.at("dst"))["objects"]}
    assert names == {"1_2", "1_3", "rankxform-follow.json"}
    training.dst = tmp_path / "found"
    look(bucket.at("dst"), "--copy", str(training.dst))
    assert training.is_right(2) and training.is_right(3)
    done = command("follow", bucket.at("src"), bucket.at("dst"), *words)
    assert "0 steps converted" in done.stdout and "before    1_2, 1_3" in done.stdout, done.stderr


HF = DATA / "hf_qwen3/hf"
WRITTEN = {
    "unified": (None, ["--dst-strategy", "none", "--dst-form", "unified"]),
    "dcp": (None, ["--dst-strategy", "B", "--dst-form", "dcp"]),
    "huggingface": (HF, ["--dst-strategy", "none", "--dst-form", "huggingface", "--max-shard", "1MB"]),
    "torch_dist": (HF, ["--dst-strategy", "none", "--dst-form", "torch_dist", "--map", "qwen3",
                        "--transformer-impl", "transformer_engine", "--iteration", "5"]),
    "vllm": (HF, ["--dst-form", "vllm", "--tensor-parallel", "2"]),
    "checkpoint2": (None, ["--dst-strategy", "B", "--dst-form", "checkpoint2", "--iteration", "5"]),
    "hyperparallel": (None, ["--dst-strategy", "B", "--dst-form", "hyperparallel",
                             "--iteration", "5"]),
}  # fmt: skip


IN_THE_NIGHT = () if AT_NIGHT else ("dcp", "unified", "torch_dist", "hyperparallel")


@pytest.mark.parametrize("form", sorted({*WRITTEN}.difference(IN_THE_NIGHT)))
def test_a_form_is_the_same_bytes_as_in_a_folder(form, bucket, tmp_path):
    """With its table, its configuration and its tracker."""
    src, words = WRITTEN[form]
    if src is None:
        src, a, b = prepare(CASE, tmp_path, "safetensors")
        words = ["--src-strategy", a, *(b if word == "B" else word for word in words)]
    converted(src, tmp_path / "folder", *words)
    converted(src, bucket.at("dst"), *words, processes=2)
    assert there(bucket.at("dst"), tmp_path) == files_below(tmp_path / "folder")
    done = command("verify", src, bucket.at("dst"), *words, "--keep-fingerprints")
    assert done.returncode == 0, done.stderr
    assert command("verify", bucket.at("dst")).returncode == 0
    done = command("inspect", bucket.at("dst"), "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_derived_strategy_lies_beside_the_destination(bucket, tmp_path):
    src, a, _ = prepare(CASE, tmp_path, "ckpt")
    words = ["--src-strategy", a, "--src-parallel", "dp=1,mp=4", "--dst-parallel", "dp=1,mp=2"]
    converted(src, bucket.at("dst"), *words, "--unproven")
    assert "dst_strategy.ckpt" in look(bucket.at())["objects"]
    again = ["--src-strategy", a, "--dst-strategy", bucket.at("dst_strategy.ckpt")]
    assert command("verify", src, bucket.at("dst"), *again).returncode == 0


@pytest.mark.parametrize("start", [servers.moto, servers.juicefs][: 2 if AT_NIGHT else 1])
def test_another_server_takes_it_and_gives_it_back(start, ranks, bucket, tmp_path, monkeypatch):
    """Which lists and answers otherwise."""
    assert "RANKXFORM_OBJECTS" in os.environ
    if os.environ["RANKXFORM_OBJECTS"] != "required":
        pytest.importorskip("moto")
    with start(tmp_path) as server, proxy.before(server.port) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        dst, words, running = "s3://models/dst", ranks.words["halves"], [None]
        killed_at(3, line, running)
        running[0] = begin(ranks, dst)
        assert ended(running[0]) == -9
        line.before = lambda method, path: None
        done = converted(ranks.src, dst, *words)
        assert "continued" in done.stdout
        assert is_right(dst, ranks, tmp_path)
        assert command("verify", ranks.src, dst, *words).returncode == 0
        back = tmp_path / "back"
        converted(dst, back, "--dst-strategy", "none", processes=2)
        assert files_below(back) == ranks.expected["whole"]
        if not AT_NIGHT:
            return
        assert "complete already" in converted(ranks.src, dst, *words).stdout
        name = "rank_1/checkpoint_1.safetensors"
        time.sleep(1.1)  # what has no ETag is told apart by its time, in seconds
        put.put(f"dst/{name}", bytes(len(ranks.expected["halves"][name])))
        changed = command("transform", ranks.src, dst, *words)
        assert "was changed after it was written" in changed.stderr
        assert command("verify", dst).returncode == DifferenceError.exit_code
