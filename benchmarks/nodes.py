"""Several nodes, played by namespaces of this machine (tests/hosts): needs root.

``python -m benchmarks.nodes link [--rate 800mbit] [--parameters 8]``: shards on the own disks of 3
nodes, and slow links between them; how long the move takes over what the bytes need that each node
must send.

``python -m benchmarks.nodes slow [--percent 20]``: 2 nodes hold replicas that a third one wants,
and one of the two runs only a part of the time; the move over the ideal division of reading.

``python -m benchmarks.nodes lost [--rate 800mbit]``: the fourth of 4 nodes is lost with its disk, and what
8 ranks had becomes the slices of 6 on the others; the move over what the busiest link needs. The lost
slices lie on another node, or on a storage host alone.

``python -m benchmarks.nodes choice``: 36 cases of layouts, places and links, each with every way of
reading forced, and with the one that is chosen; the choice over the best. A storage host serves
its disk by sshfs, and every node has a page cache of its own for it, empty at the start.

``python -m benchmarks.nodes simulate [--rate 200mbit] [--disk 40e6]``: 8 nodes with slow links and disks that
read slowly (block devices whose reads the kernel limits), empty caches; the move over what `plan --simulate`
says of the same cluster with these costs.

Medians of `--repeat` runs; bytes are counted by the nodes' network interfaces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests import reference
from tests.hosts.machines import LOCAL, NETWORK, Hosts

ROW, COLUMN, WHOLE = [0, -1], [-1, 0], [-1, -1]
SHAPE, PARAMETERS = (1536, 9216), 8
NBYTES = SHAPE[0] * SHAPE[1] * 4
WAYS = ("auto", "ranges", "sieving", "two-phase")
DISK = Path("/tmp/rx-disk")
OWN, ONE, SERVER = "own disks", "one disk that all see", "storage host"
FAST, STORAGE, SLOW = "none", "storage", "all"


def make(hosts, src, dst, place, shape=SHAPE, parameters=PARAMETERS):
    """Write a checkpoint sharded by `src`, to a `place`: the nodes' own disks in runs of ranks, one
    that all see, or a storage host; return its folder and the strategies' options.

    Layouts are (device matrix, map).
    """
    made = hosts.shared / "made"
    params = {f"w{n}": (shape, "Float32") for n in range(parameters)}
    layouts = [[dict.fromkeys(params, (*side, 0, 0))] for side in (src, dst)]
    for old in (made, *(hosts.disk(name) / "src" for name in (*hosts.names, "storage"))):
        shutil.rmtree(old, ignore_errors=True)
    reference.write_checkpoint(made / "src", layouts[0], params)
    for name, stages in zip("ab", layouts):
        reference.write_stage_files(made / name, stages)
    options = ["--src-strategy", made / "a", "--dst-strategy", made / "b"]
    if place == ONE:
        return made / "src", options
    if place == SERVER:
        shutil.move(made / "src", hosts.disk("storage") / "src")
        return NETWORK / "src", options
    folders = sorted((made / "src").iterdir(), key=lambda path: int(path.name[5:]))
    for number, folder in enumerate(folders):
        home = hosts.names[number * len(hosts.names) // len(folders)]
        shutil.move(folder, hosts.disk(home) / "src" / folder.name)
    return LOCAL / "src", options


def convert(hosts, per_host, src, options, way="auto", dst=LOCAL / "dst"):
    """Convert; return the seconds of the move, and the bytes that crossed."""
    for name in hosts.names:
        shutil.rmtree(hosts.disk(name) / "dst", ignore_errors=True)
    before = hosts.sent()
    code, output = hosts.mpirun(
        per_host, sys.executable, "-m", "rankxform", "transform", src, dst, *options,
        "--no-fsync", "--profile", "--read-method", way,
    )  # fmt: skip
    if code:
        raise SystemExit(output)
    return float(re.search(r"moved in ([\d.]+)", output)[1]), hosts.sent() - before


def repeated(times, *arguments, **options):
    found = [convert(*arguments, **options) for _ in range(times)]
    seconds, nbytes = zip(*found)
    return statistics.median(seconds), statistics.median(nbytes), max(seconds) / min(seconds)


def link(hosts, options):
    count = options.parameters
    src, strategies = make(hosts, ([6], COLUMN), ([6], ROW), OWN, parameters=count)
    rate = rate_of(options)
    wanted = 2 * count * NBYTES / 9  # each of 3 nodes sends two thirds of its third
    with hosts.slow(options.rate):
        for per_host in (1, 2):
            seconds, nbytes, _ = repeated(options.repeat, hosts, per_host, src, strategies)
            print(
                f"{3 * per_host} processes: {seconds:.2f} s, {seconds / (wanted / rate):.2f} times "
                f"{wanted / 1e6:.0f} MB a node at {options.rate}; crossed "
                f"{nbytes / 3 / wanted:.3f} times the bytes"
            )


def slow(hosts, options):
    """Two nodes hold everything, a third one wants it; ideal is what their speeds add up to."""
    src, strategies = make(hosts, ([2], WHOLE), ([1], WHOLE), OWN)
    place = hosts.shared / "place"
    place.write_text("h3:1\n")
    strategies += ["--dst-placement", place]
    both, *_ = repeated(options.repeat, hosts, 1, src, strategies)
    share = options.percent / 100
    with hosts.throttled("h2", share):
        found, *_ = repeated(options.repeat, hosts, 1, src, strategies)
    shutil.rmtree(hosts.disk("h2") / "src")
    one, *_ = repeated(options.repeat, hosts, 1, src, strategies)
    ideal = max(both, one / (1 + share))
    print(
        f"two readers {both:.2f} s, one {one:.2f} s; one of two at {options.percent} %: "
        f"{found:.2f} s, {found / ideal:.2f} times the ideal {ideal:.2f} s"
    )


def lost(hosts, options):
    """Ranks 6 and 7 are lost: of one matrix of 4 rows twice, or of 8 rows, which storage has."""
    total = options.parameters * NBYTES
    for device_matrix, of_lost, wanted in (
        ([2, 4], "on another node", total / 3),  # h2 has half of all, and sends two thirds of it
        ([8], "on a storage host", total / 4),  # which sends them once
    ):
        with hosts.storage(options.rate) as empty, hosts.slow(options.rate):
            src, strategies = make(
                hosts, (device_matrix, ROW), ([6], COLUMN), SERVER, parameters=options.parameters
            )
            for rank in range(6):
                folder = hosts.disk("storage") / "src" / f"rank_{rank}"
                shutil.copytree(folder, hosts.disk(hosts.names[rank // 2]) / "src" / folder.name)
            found = []
            for _ in range(options.repeat):
                empty()
                found.append(convert(hosts, 1, LOCAL / "src", [*strategies, "--fallback", src]))
        seconds, ideal = statistics.median(s for s, _ in found), wanted / rate_of(options)
        print(
            f"lost slices {of_lost}: {seconds:.2f} s, {seconds / ideal:.2f} times "
            f"{wanted / 1e6:.0f} MB at {options.rate}"
        )


def rate_of(options):
    """Return the bytes a second of a slow link."""
    return float(re.match(r"\d+", options.rate)[0]) * 1e6 / 8


NODES, _CONTENT = 8, 1448 / 1514  # part of a full packet that is content
SIMULATED = {
    "columns to rows": (([16], COLUMN), ([16], ROW)),
    "the same rows": (([16], ROW), ([16], ROW)),
    "16 to 24 ranks, rows": (([16], ROW), ([24], ROW)),
    "rows to 2 replicas of columns": (([16], ROW), ([2, 8], COLUMN)),
    "2 replicas of columns to rows": (([2, 8], COLUMN), ([16], ROW)),
    "rows to whole": (([16], ROW), ([8], WHOLE)),
}


def simulate(hosts, options):
    """A disk's reads and a link are slow, so that what two cores do for eight nodes is hidden."""
    network, worst = rate_of(options) * _CONTENT, 1.0
    print("| layout | simulated | move | over simulated | bound by |\n|---|---:|---:|---:|---|")
    for layout, sides in SIMULATED.items():
        if options.only not in layout:
            continue
        _, strategies = make(hosts, *sides, OWN, parameters=options.parameters)
        shapes = hosts.shared / "shapes.json"
        names = [f"w{n}" for n in range(options.parameters)]
        shapes.write_text(
            json.dumps({name: {"shape": SHAPE, "dtype": "Float32"} for name in names})
        )
        found = json.loads(run(
            sys.executable, "-m", "rankxform", "plan", "--shapes", shapes, *strategies,
            "--simulate", NODES, "--nodes", NODES, "--src-placement", "node", "--dst-placement", "node",
            "--costs", f"read={options.disk},write={20 * options.disk},network={network}", "--json",
        ))  # fmt: skip
        with slow_disks(hosts, options.disk) as (where, empty), hosts.slow(options.rate):
            seconds = []
            for _ in range(options.repeat):
                empty()
                seconds.append(convert(hosts, 1, where, strategies)[0])
        move, simulated = statistics.median(seconds), found["predicted_seconds"]
        over = move / simulated
        worst = max(worst, over, 1 / over)
        print(f"| {layout} | {simulated:.2f} s | {move:.2f} s | {over:.2f} | {found['bound_by']} |")
    print(f"at most {worst:.2f} apart")


@contextmanager
def slow_disks(hosts, rate):
    """Move the nodes' sources to block devices of which each reads `rate` bytes a second at most;
    yield where they are, and how to empty the caches. This process is limited too."""
    group, devices = Path("/sys/fs/cgroup/blkio") / f"rx{os.getpid()}", []
    group.mkdir()
    images = Path(tempfile.mkdtemp(prefix="rx-disks-", dir="/dev/shm"))
    try:
        for name in hosts.names:
            image, source = images / name, hosts.disk(name) / "src"
            nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
            image.touch()
            os.truncate(image, nbytes * 11 // 10 + (64 << 20))
            run("mkfs.ext4", "-q", "-d", source, image)
            devices.append(run("losetup", "--find", "--show", image).strip())
            run(*hosts.on(name, "mkdir", "-p", DISK))
            run(*hosts.on(name, "mount", "-o", "ro", devices[-1], DISK))
            number = os.stat(devices[-1]).st_rdev
            limit = f"{os.major(number)}:{os.minor(number)} {int(rate)}"
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield DISK, lambda: Path("/proc/sys/vm/drop_caches").write_text("3")
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        for name, device in zip(hosts.names, devices):
            subprocess.run([*map(str, hosts.on(name, "umount", DISK))], check=False)
            subprocess.run(["losetup", "--detach", device], check=False)
        shutil.rmtree(images)
        with suppress(OSError):
            group.rmdir()


def run(*command):
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


LONG = (96, 147456)
LAYOUTS = {
    "the same rows": (([6], ROW), ([6], ROW), SHAPE),
    "rows to columns": (([6], ROW), ([6], COLUMN), SHAPE),
    "columns to rows": (([6], COLUMN), ([6], ROW), SHAPE),
    "2 replicas of rows to columns": (([2, 3], ROW), ([6], COLUMN), SHAPE),
    "rows to whole": (([6], ROW), ([3], WHOLE), SHAPE),
    "long rows to columns": (([6], ROW), ([6], COLUMN), LONG),
}
PLACES = ((OWN, FAST), (OWN, SLOW), (ONE, FAST), (SERVER, FAST), (SERVER, STORAGE), (SERVER, SLOW))
"""Where the source is, and which links are slow: none, the storage host's, or all."""


def choice(hosts, options):
    print("| layout | source | slow links | auto | forced, in s | auto over best | spread |")
    print("|---|---|---|---:|---|---:|---:|")
    wrong = []
    cases = 0
    for place, links in PLACES:
        some = [name for name in LAYOUTS if options.only in f"{name}, {place}, {links}"]
        cases += len(some)
        if not some:
            continue
        with _links(hosts, place, links, options.rate) as empty:
            for layout in some:
                src, dst, shape = LAYOUTS[layout]
                where, strategies = make(hosts, src, dst, place, shape)
                found = {way: [] for way in WAYS}
                for _ in range(options.repeat):
                    for way in WAYS:
                        empty()
                        found[way].append(convert(hosts, 1, where, strategies, way)[0])
                middle = {way: statistics.median(some) for way, some in found.items()}
                spread = max(max(some) / min(some) for some in found.values()) - 1
                best = min(WAYS[1:], key=middle.get)
                over = middle["auto"] / middle[best]
                every = ", ".join(f"{way} {middle[way]:.3f}" for way in WAYS[1:])
                row = (layout, place, links, f"{middle['auto']:.3f} s", every, f"{over:.2f}",
                       f"{spread:.0%}")  # fmt: skip
                print("|", " | ".join(row), "|", flush=True)
                if over > 1.1 + spread:
                    wrong.append(row[:3])
    print(f"{len(wrong)} of {cases} slower than the best by more than 10 % and the spread", *wrong)


@contextmanager
def _links(hosts, place, links, rate):
    """Make links slow; yield how to empty the caches of what is read over the network."""
    with ExitStack() as stack:
        empty = lambda: None  # noqa: E731
        if place == SERVER:
            empty = stack.enter_context(hosts.storage(None if links == FAST else rate))
        if links == SLOW:
            stack.enter_context(hosts.slow(rate))
        yield empty


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("link", "slow", "lost", "choice", "simulate"))
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--disk", type=float, default=40e6, help="simulate: bytes a second")
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="link: of 57 MB each")
    parser.add_argument("--percent", type=int, default=20)
    parser.add_argument(
        "--only",
        default="",
        help="choice, simulate: only cases with this in 'layout, source, slow links'",
    )
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    ways = {"link": link, "slow": slow, "lost": lost, "choice": choice, "simulate": simulate}
    with Hosts(NODES if options.what == "simulate" else 3) as hosts:
        ways[options.what](hosts, options)


if __name__ == "__main__":
    main()
