"""Shards on every node's own disk: converted without a shared folder, each remote byte sent once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import reference
from tests.cases import Case, random_case
from tests.hosts.machines import LOCAL, NETWORK, SFTP, Hosts, require

ROOT = Path(__file__).parents[2]
P_ON_3_HOSTS = {3: 1, 4: [1, 1, 2], 7: [3, 2, 2]}


@pytest.fixture(scope="module")
def hosts():
    require()
    with Hosts(3) as made:
        yield made


@pytest.fixture
def clean(hosts):
    yield hosts
    hosts.wipe()


def spread(hosts, case, kind="ckpt"):
    """Put the shards of a case on the hosts' own disks, neighbours together; return options."""
    made = hosts.shared / "made"
    shutil.rmtree(made, ignore_errors=True)
    reference.write_checkpoint(made / "src", case.src, case.params, case.extras, kind)
    folders = sorted((made / "src").iterdir(), key=lambda path: int(path.name[5:]))
    for number, folder in enumerate(folders):
        home = hosts.names[number * len(hosts.names) // len(folders)]
        target = hosts.disk(home) / "src" / folder.name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(folder, target)
    options = []
    for side, stages in (("src", case.src), ("dst", case.dst)):
        if stages:
            reference.write_stage_files(made / f"{side}_strategy", stages)
            options += [f"--{side}-strategy", made / f"{side}_strategy"]
    return [*map(str, options), "--no-fsync"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def gathered(hosts, name="dst"):
    """Bring the parts of a destination together that are on the hosts' own disks."""
    target = hosts.shared / "gathered"
    shutil.rmtree(target, ignore_errors=True)
    for host in hosts.names:
        for folder in (hosts.disk(host) / name).glob("rank_*"):
            shutil.copytree(folder, target / folder.name)
    return target


def transform(hosts, per_host, options, verb="transform", **more):
    return hosts.mpirun(
        per_host, sys.executable, "-m", "rankxform", verb, LOCAL / "src", LOCAL / "dst",
        *options, **more,
    )  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "processes"), [*enumerate([3, 4, 7, 3, 4, 7, 3, 4])])
def test_spread_shards_become_spread_shards(seed, processes, clean):
    kind = ("ckpt", "safetensors")[seed % 2]
    case = random_case(seed, mindspore_agrees=False, whole=False)
    options = spread(clean, case, kind)
    code, output = transform(clean, P_ON_3_HOSTS[processes], options)
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params, kind) == []


ROW, COLUMN = [0, -1], [-1, 0]
NAMES = ("w0", "w1", "w2", "w3")


def big(src, dst, shape=(1536, 2304)):
    """Return a case of 4 parameters of 14 MB: `src` and `dst` are (device matrix, tensor map)."""
    return Case(
        dict.fromkeys(NAMES, (shape, "Float32")),
        [dict.fromkeys(NAMES, (*src, 0, 0))],
        [dict.fromkeys(NAMES, (*dst, 0, 0))],
    )


TOTAL = 4 * 1536 * 2304 * 4
LONG = (24, 147456)
"""A shape of the same size, of whose rows every node of 3 wants 196 KiB."""

# What is crossed by hand: 3 hosts, the source's ranks in runs on them, the destination's too.
PLACEMENTS = {
    "columns to rows": (big(([6], COLUMN), ([6], ROW)), 2 * TOTAL // 3),
    "rows to columns": (big(([6], ROW), ([6], COLUMN)), 2 * TOTAL // 3),
    "the same sharding": (big(([6], ROW), ([6], ROW)), 0),
    "whole on every rank": (big(([6], ROW), ([6], [-1, -1])), 2 * TOTAL),
    "one rank of each host has all": (big(([3, 2], ROW), ([6], COLUMN)), 0),
    "more slices": (big(([3], ROW), ([12], COLUMN)), 2 * TOTAL // 3),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "processes"), [*zip(PLACEMENTS, [3, 7, 7, 7, 3, 7])])
def test_each_remote_byte_crosses_once(name, processes, clean):
    case, remote = PLACEMENTS[name]
    options = spread(clean, case)
    before = clean.sent()
    code, output = transform(clean, P_ON_3_HOSTS[processes], options)
    crossed = clean.sent() - before
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []
    assert crossed <= 1.05 * remote + 1.5e6, output


def test_the_result_is_that_of_one_host(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    code, output = transform(clean, 1, options)
    assert code == 0, output
    made = clean.shared / "made"
    command = [sys.executable, "-m", "rankxform", "transform", made / "src", made / "one", *options]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    for rank in range(6):
        file = Path(f"rank_{rank}/checkpoint_{rank}.ckpt")
        assert (gathered(clean) / file).read_bytes() == (made / "one" / file).read_bytes()


def test_each_node_has_its_manifest_and_all_can_be_verified(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    code, output = transform(clean, 2, [*options, "--verify"])
    assert code == 0, output
    for node, name in enumerate(clean.names):
        manifest = json.loads((clean.disk(name) / "dst" / "rankxform.json").read_text())
        ranks = sorted(file["id"] for file in manifest["files"].values())
        assert ranks == [2 * node, 2 * node + 1]
    last = max(clean.names, key=lambda n: (clean.disk(n) / "dst/rankxform.json").stat().st_mtime_ns)
    assert last == "h1"
    strategies = options[:-1]
    code, output = transform(clean, 2, strategies, verb="verify")
    assert code == 0, output
    alone = [sys.executable, "-m", "rankxform", "verify", LOCAL / "dst"]
    code, output = clean.mpirun(2, *alone)
    assert (code, "6 files" in output) == (0, True), output
    file = clean.disk("h3") / "dst" / "rank_5" / "checkpoint_5.ckpt"
    with file.open("r+b") as opened:
        opened.seek(1 << 20)
        opened.write(b"another")
    for command in (transform(clean, 2, strategies, verb="verify"), clean.mpirun(2, *alone)):
        code, output = command
        assert (code, "DIFFERENT" in output, "--ranks" in output) == (6, True, False), output


LOADING = """
import sys
sys.path[:0] = [{root!r}]
import numpy as np
import rankxform
from mpi4py import MPI
from tests import reference
rank = MPI.COMM_WORLD.rank
found = rankxform.load({src!r}, {a!r}, {b!r}, comm=MPI.COMM_WORLD)
for name in {names!r}:
    whole = reference.full_tensor(name, (1536, 2304), "Float32")
    wanted = reference.shard(whole, ([3, 2], [0, -1], 0, 0), rank)
    assert np.array_equal(found[name].view("u4"), wanted), (rank, name)
print("loaded")
"""


def test_slices_are_loaded_from_other_nodes(clean):
    """Each node wants everything, on its two processes: two thirds come from the others."""
    case = big(([6], COLUMN), ([3, 2], ROW))
    spread(clean, case)
    made, script = clean.shared / "made", clean.shared / "loading.py"
    a, b = (str(made / f"{side}_strategy") for side in ("src", "dst"))
    script.write_text(LOADING.format(root=str(ROOT), src=str(LOCAL / "src"), a=a, b=b, names=NAMES))
    before = clean.sent()
    code, output = clean.mpirun(2, sys.executable, script)
    assert (code, output.count("loaded")) == (0, 6), output
    assert clean.sent() - before <= 1.05 * 2 * TOTAL + 1.5e6


def test_a_dry_run_measures_what_each_node_has(clean):
    """With the links, over which each of three nodes sends two thirds of its third."""
    case, crossing = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    with clean.slow("80mbit"):
        code, output = transform(clean, 1, [*options, "--dry-run"])
    assert code == 0, output
    seconds = float(re.search(r"the move would take about ([\d.]+) s", output)[1])
    assert seconds > 0.8 * crossing / 3 / 10e6


def test_what_fits_on_several_nodes_is_launched_as_it_is(clean):
    case, _ = PLACEMENTS["the same sharding"]
    options = spread(clean, case)[:-1]
    words = ["--load", LOCAL / "src", *options, "--output", LOCAL / "out", "--", "echo", "started"]
    code, output = clean.mpirun(2, sys.executable, "-m", "rankxform", "launch", *words)
    assert (code, output.count("started")) == (0, 6), output
    assert not (clean.disk("h1") / "out" / "transformed_checkpoint").exists()


def test_what_fits_but_is_on_other_nodes_is_brought_to_where_it_is_wanted(clean):
    case, _ = PLACEMENTS["the same sharding"]
    options = spread(clean, case)[:-1]
    one, other = clean.disk("h1") / "src", clean.disk("h3") / "src"
    one.rename(one.with_name("kept"))
    other.rename(one)
    one.with_name("kept").rename(other)
    words = ["--load", LOCAL / "src", *options, "--output", LOCAL / "out", "--", "cat"]
    words += ["{checkpoint}/rank_{rank}/checkpoint_{rank}.ckpt"]
    code, output = clean.mpirun(2, sys.executable, "-m", "rankxform", "launch", *words)
    assert code == 0, output[-2000:]
    found = gathered(clean, "out/transformed_checkpoint")
    assert reference.wrong_slices(found, case.dst, case.params) == []
    for number, name in enumerate(clean.names):
        folders = (clean.disk(name) / "out" / "transformed_checkpoint").glob("rank_*")
        assert {path.name for path in folders} == {f"rank_{2 * number}", f"rank_{2 * number + 1}"}
        assert contents(clean.disk(name) / "out" / "strategy") == contents(Path(options[3]))


def test_processes_may_be_assigned_to_nodes_in_turns(clean):
    """Processes 0 and 3 are on h1, 1 and 4 on h2, 2 and 5 on h3; so are destination ranks."""
    case, remote = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    before = clean.sent()
    command = [sys.executable, "-m", "rankxform"]
    code, output = clean.mpirun(
        2, *command, "transform", LOCAL / "src", LOCAL / "dst", *options, in_turns=True
    )
    crossed = clean.sent() - before
    assert code == 0, output
    assert "ranks 0, 3 on h1; 1, 4 on h2; 2, 5 on h3" in output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []
    assert crossed <= 1.05 * remote + 1.5e6
    code, output = clean.mpirun(
        2, *command, "verify", LOCAL / "src", LOCAL / "dst", *options[:4], "--keep-fingerprints",
        in_turns=True,
    )  # fmt: skip
    assert code == 0, output
    code, output = clean.mpirun(2, *command, "verify", LOCAL / "dst", in_turns=True)
    assert (code, "6 files" in output) == (0, True), output  # each node's manifest has its own


def test_a_missing_shard_is_one_error_that_names_the_nodes(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    shutil.rmtree(clean.disk("h2") / "src" / "rank_3")
    code, output = transform(clean, 2, options)
    assert code == 3
    assert output.count("rankxform: error") == 1
    assert "rank 3" in output
    assert "looked on h1, h2, h3" in output


def test_different_files_under_one_name_are_told_apart(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    other = clean.disk("h3") / "src" / "rank_0"
    shutil.copytree(clean.disk("h1") / "src" / "rank_0", other)
    code, output = transform(clean, 1, options)
    assert code == 0, output
    with next(other.iterdir()).open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"another")
    shutil.rmtree(clean.disk("h1") / "dst")
    code, output = transform(clean, 1, [*options, "--overwrite"])
    assert code == 3
    assert "differs between h1 and h3" in output
    with next(other.iterdir()).open("r+b") as file:
        file.write(bytes(64))  # as a crash leaves it
    code, output = transform(clean, 1, [*options, "--overwrite"])
    assert code == 0, output
    os.truncate(next(other.iterdir()), 1 << 20)
    shutil.rmtree(clean.disk("h1") / "dst")
    code, output = transform(clean, 1, [*options, "--overwrite"])
    assert code == 0, output
    assert re.search(r"h3: \S+rank_0/\S+: .*; the copy on h1 takes its place", output)
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []
    kept = clean.shared / "kept"
    shutil.copytree(clean.disk("h1") / "src" / "rank_0", kept / "rank_0")
    os.truncate(next((clean.disk("h1") / "src" / "rank_0").iterdir()), 100)
    code, output = transform(clean, 1, [*options, "--overwrite"])
    assert code == 3 and "differs" not in output and "takes its place" not in output
    shutil.rmtree(clean.disk("h1") / "dst")
    code, output = transform(clean, 1, [*options, "--overwrite", "--fallback", kept])
    assert code == 0 and f"{kept / 'rank_0'}" in output, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []


def test_a_shared_destination_is_found(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    target = clean.shared / "everywhere"
    code, output = clean.mpirun(
        1, sys.executable, "-m", "rankxform", "transform", LOCAL / "src", target, *options
    )
    assert code == 0, output
    assert reference.wrong_slices(target, case.dst, case.params) == []
    assert [path.name for path in target.glob("rankxform.json")] == ["rankxform.json"]
    shutil.rmtree(target)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("given", "exchanged"),
    [("read=1M,network=10G,read_latency=10ms", True), ("read=10G,network=1M", False), (None, None)],
)
def test_shared_storage_is_read_by_all_or_once_as_is_cheaper(given, exchanged, clean):
    """One file that all nodes see becomes columns, of which each node keeps two on its own disk."""
    case = big(([1], [-1, -1]), ([6], COLUMN))
    options = spread(clean, case)
    source = clean.shared / "made" / "src"
    command = [sys.executable, "-m", "rankxform", "transform", source, LOCAL / "dst", *options]
    before = clean.sent()
    code, output = clean.mpirun(1, *command, *(["--costs", given] if given else []))
    crossed = clean.sent() - before
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []
    if exchanged is not None:
        assert ("sent" in output) == exchanged
        remote = 2 * TOTAL // 3 if exchanged else 0
        assert remote <= crossed <= 1.05 * remote + 1.5e6


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (["--costs", "read=16M,network=1G,read_latency=5ms"], ()),
        (["--read-method", "two-phase"], ()),
        (["--read-method", "ranges"], (LONG,)),
    ],
)
def test_a_network_file_system_is_asked_for_each_byte_once(given, shape, clean):
    """Rows become columns, read from and written to one more host that serves its disk to all.

    Ranges that lie this far apart are the hardest: the system would read as much again ahead. What
    things cost is given: on a machine that is busy with something else sending costs more.
    """
    require("sshfs", SFTP)
    case = big(([6], ROW), ([6], COLUMN), *shape)
    options = [*spread(clean, case), *given]
    with clean.storage("400mbit"):
        disk = clean.disk("storage")
        shutil.copytree(clean.shared / "made" / "src", disk / "src")
        before = clean.sent(["storage"])
        code, output = clean.mpirun(
            1, sys.executable, "-m", "rankxform", "transform", NETWORK / "src", NETWORK / "dst",
            *options,
        )  # fmt: skip
        served = clean.sent(["storage"]) - before
        assert code == 0, output
        assert reference.wrong_slices(disk / "dst", case.dst, case.params) == []
        assert [path.name for path in (disk / "dst").glob("*.json")] == ["rankxform.json"]
        # one node writes a file, so that nodes read parts of every tensor in turn, the system reads
        # ahead past each part, and each file is read back: 61.4 MB, and 59.4 MB without the two
        assert served <= 1.05 * TOTAL + 2.5e6, output
        code, output = clean.mpirun(
            1, sys.executable, "-m", "rankxform", "verify", NETWORK / "src", NETWORK / "dst",
            *options[:4],
        )  # fmt: skip
        assert code == 0, output


def test_a_hostfile_says_which_ranks_go_where(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    places = clean.shared / "places"
    places.write_text("h3 slots=1\n10.79.0.1 slots=4\nh2 slots=1\n")
    code, output = transform(clean, 1, [*options, "--dst-placement", str(places)])
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []
    assert "ranks 1-4 on h1; 5 on h2; 0 on h3" in output
    assert sorted(p.name for p in (clean.disk("h3") / "dst").glob("rank_*")) == ["rank_0"]


def test_it_continues_after_a_remote_process_was_killed(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    with clean.slow("100mbit"), Interference(clean, lambda: os.kill(clean.workers("h2")[0], 9)):
        code, output = transform(clean, 2, [*options, "--stall-limit", "5"])
    assert code != 0
    assert clean.wait_until_idle(15)
    assert not any((clean.disk(name) / "dst" / "rankxform.json").exists() for name in clean.names)
    code, output = transform(clean, 2, options)
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []


def test_what_a_node_has_is_kept_when_nodes_come_in_another_order(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    code, output = transform(clean, 1, options)
    assert code == 0, output
    clean.names.reverse()
    try:
        code, output = transform(clean, 1, options)
    finally:
        clean.names.reverse()
    assert code == 0, output
    assert "6 files complete already" in output


def test_a_dropped_link_ends_all_within_the_stall_limit(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    drop = clean.unplugged("h3")
    with clean.slow("100mbit"), Interference(clean, drop.__enter__, until_idle=40):
        code, output = transform(clean, 2, [*options, "--stall-limit", "5"], deadline=40)
    drop.__exit__(None, None, None)
    assert code != 0
    assert "no answer from a process for 5 s" in output
    assert output.count("no answer") == 1
    code, output = transform(clean, 2, options)
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []


def test_a_full_remote_disk_is_one_error(clean):
    case, _ = PLACEMENTS["columns to rows"]
    options = spread(clean, case)
    with clean.small_disk("h3", LOCAL / "dst", "4m"):
        code, output = transform(clean, 2, options)
        assert code == 4
        assert output.count("rankxform: error") == 1
        assert "MB are free" in output
        assert re.search(r"met by process \d of 6 on h3\n", output)
    shutil.rmtree(clean.disk("h3") / "dst")
    code, output = transform(clean, 2, options)
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params) == []


class Interference:
    """Does something to the hosts when the bytes are crossing, and waits until all have ended."""

    def __init__(self, hosts, act, until_idle=0):
        self._hosts, self._act, self._until = hosts, act, until_idle
        self._thread, self._over = threading.Thread(target=self._run), threading.Event()
        self.idle = None

    def _run(self):
        before = self._hosts.sent()
        while self._hosts.sent() < before + 4e6:
            if self._over.wait(0.05):
                return
        self._act()
        if self._until:
            self.idle = self._hosts.wait_until_idle(self._until)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        assert self.idle in (None, True), "processes were left"


def test_a_derived_strategy_is_kept_on_every_node(clean):
    names = {"w": ((12, 6), "Float32"), "v": ((6, 12), "Float32")}
    src = [{"w": ([6], [0, -1], 0, 0), "v": ([6], [-1, 0], 0, 0)}]
    dst = [{"w": ([3], [0, -1], 0, 0), "v": ([3], [-1, 0], 0, 0)}]
    options = spread(clean, Case(names, src, None))
    sizes = ["--src-parallel", "dp=1,mp=6", "--dst-parallel", "dp=1,mp=3"]
    code, output = transform(clean, 1, [*options, *sizes])
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), dst, names) == []
    kept = [(clean.disk(host) / "dst_strategy.ckpt").read_bytes() for host in clean.names]
    assert kept == kept[:1] * 3
