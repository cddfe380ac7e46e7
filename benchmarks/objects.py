"""A conversion from object storage, and an upload, against plain transfers by the same library.

``python -m benchmarks.objects [--processes 1] [--delay-ms 15 --mbps 40] [--repeat 5]`` starts
SeaweedFS on this machine with a checkpoint of 1 GiB of 8 ranks, and measures in turn: the whole
command that converts it to 4 ranks in a folder in memory; obstore, with 16 connections, that copies
the objects there in ranges of 8 MiB; the upload of a folder by the command; and by `obstore.put`.
With a delay (of each way) and a rate (of a connection) all goes through a relay that has these.
Prints medians, what the command reached of the plain transfer, and the processor time of each.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.cases import noise
from tests import reference
from tests.mpi_launch import environment, mpirun
from tests.storage.objects import put, servers

PLAIN_READ = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import obstore
from obstore.store import S3Store
url, folder, bucket = sys.argv[1:]
store = S3Store(bucket, client_options={"allow_http": True}, endpoint=url)
metas = [m for page in obstore.list(store, prefix="src") for m in page]
pieces = []
for meta in metas:
    path = os.path.join(folder, meta["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    pieces += [(meta["path"], fd, at, min(8 << 20, meta["size"] - at))
               for at in range(0, meta["size"], 8 << 20)]
def fetch(piece):
    key, fd, at, nbytes = piece
    os.pwrite(fd, obstore.get_range(store, key, start=at, length=nbytes), at)
with ThreadPoolExecutor(16) as pool:
    list(pool.map(fetch, pieces))
"""
PLAIN_WRITE = """
import sys, pathlib, obstore
from obstore.store import S3Store
url, folder, bucket = sys.argv[1:]
store = S3Store(bucket, client_options={"allow_http": True}, endpoint=url, unsigned_payload=True)
for path in sorted(pathlib.Path(folder).rglob("rank_*/*.*")):
    obstore.put(store, f"plain/{path.relative_to(folder)}", path, chunk_size=8 << 20)
"""
_CHUNK = 256 << 10


@contextmanager
def relay(port, delay, rate):
    """Pass bytes on to a port: each `delay` seconds later, and a connection's `rate` a second."""

    async def pump(reader, writer):
        queue, free = asyncio.Queue(64), 0.0

        async def send():
            while (item := await queue.get()) is not None:
                due, data = item
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                writer.write(data)
                await writer.drain()
            writer.close()

        sending = asyncio.create_task(send())
        while data := await reader.read(_CHUNK):
            now = time.monotonic()
            free = max(now, free) + len(data) / rate
            await queue.put((free + delay, data))
        await queue.put(None)
        await sending

    async def connect(reader, writer):
        try:
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
        except ConnectionError:
            writer.close()

    async def serve(told):
        server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=_CHUNK)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=lambda: asyncio.run(serve(theirs)), daemon=True)
    process.start()
    yield ours.recv()
    process.kill()


PARAMS = {f"{n}.weight": ((4096, 2048), "Float32") for n in range(32)}
LAYOUTS = {
    name: [{parameter: ([ranks], place, 0, 0) for parameter in PARAMS}]
    for name, ranks, place in (("a", 8, [0, -1]), ("b", 4, [0, -1]))
}


def make(root, kind):
    """Make 1 GiB of 8 ranks, each byte of which is needed, unless it is there."""
    if not (root / "complete").exists():
        root.mkdir(parents=True, exist_ok=True)
        for name, layout in LAYOUTS.items():
            reference.write_strategy(root / f"{name}.ckpt", layout)
        reference.write_checkpoint(root / "src", LAYOUTS["a"], PARAMS, kind=kind, make=noise)
        (root / "complete").touch()
    return root / "src", root / "a.ckpt", root / "b.ckpt"


def timed(line):
    """Run a command; return its seconds, those of the processor, and what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [*map(str, line)], env=environment(), capture_output=True, text=True, check=True
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used, done.stdout


def show(name, plain_name, rows, start):
    """Print the medians of what was measured in turn."""
    (mine, cpu), (plain, plain_cpu) = (
        [statistics.median(column) for column in zip(*part)] for part in zip(*rows)
    )
    print(
        f"{name}: {mine:.2f} s, {plain_name}: {plain:.2f} s; reached {plain / mine:.2f}, "
        f"{plain / (mine - start):.2f} without start; processor {cpu:.2f} s and {plain_cpu:.2f} s"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mbps", type=float, default=40.0)
    parser.add_argument("--memory", default="512M")
    parser.add_argument("--kind", default="ckpt")
    options = parser.parse_args()
    src, a, b = make(Path(options.folder) / f"objects-{options.kind}", options.kind)
    launch = mpirun(options.processes) if options.processes > 1 else []
    command = [*launch, sys.executable, "-m", "rankxform"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tmp, dst = Path(folder), Path(folder) / "dst"
        with servers.seaweedfs(tmp) as server:
            os.environ.update(servers.environment(server.port))
            put.put_folder(src, "src")
            delay, rate = options.delay_ms / 1e3, options.mbps * 1e6
            with relay(server.port, delay, rate) if delay else nullcontext(server.port) as port:
                os.environ.update(servers.environment(port))
                measure(options, command, src, a, b, tmp, dst)


def measure(options, command, src, a, b, tmp, dst):
    """Measure in turn, and print."""
    url, bucket = os.environ["AWS_ENDPOINT_URL"], f"s3://{servers.BUCKET}"
    words = ["--src-strategy", a, "--dst-strategy", b, "--memory", options.memory]
    start = statistics.median(timed([*command, "--version"])[0] for _ in range(options.repeat))
    reads, writes = [], []
    for _ in range(options.repeat):
        shutil.rmtree(dst, ignore_errors=True)
        seconds, used, _ = timed(
            [*command, "transform", f"{bucket}/src", dst, *words, "--no-fsync", "--json"]
        )
        shutil.rmtree(tmp / "src", ignore_errors=True)
        plain = timed([sys.executable, "-c", PLAIN_READ, url, tmp, servers.BUCKET])
        reads.append(((seconds, used), plain[:2]))
        shutil.rmtree(tmp / "src")
    show("converted", "fetched by obstore", reads, start)
    for number in range(options.repeat):
        there = f"{bucket}/dst{number}"
        seconds, used, _ = timed([*command, "transform", src, there, *words])
        plain = timed([sys.executable, "-c", PLAIN_WRITE, url, dst, servers.BUCKET])
        writes.append(((seconds, used), plain[:2]))
    show("converted into it", "obstore.put", writes, start)


if __name__ == "__main__":
    main()
