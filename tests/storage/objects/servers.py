"""SeaweedFS, moto and JuiceFS as S3 servers, started for the tests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path

KEY, SECRET, BUCKET = "rx-test-key", "rx-test-secret", "models"
_READY_SECONDS = 60


def program():
    """Return SeaweedFS's program; None where its wheel is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def _free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(port):
    """Return the variables by which a server is found."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
    }  # fmt: skip


class Server:
    """A server of a folder, which can be killed and started anew."""

    def __init__(self, line, folder, port):
        self._line, self._folder, self.port = line, folder, port
        self.start()

    def start(self):
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._line, cwd=self._folder, stdout=log, stderr=log)

    def kill(self):
        self._process.kill()
        self._process.wait()

    def await_bucket(self):
        """Make the bucket as soon as the server does so."""
        line = [sys.executable, "-m", "tests.storage.objects.put", "--bucket"]
        until = time.monotonic() + _READY_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            done = subprocess.run(
                line,
                env={**os.environ, **environment(self.port)},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return
            time.sleep(0.2)
        raise AssertionError(f"no server: {done.stderr[-500:]}")


@contextmanager
def seaweedfs(folder):
    """Run a server with an empty bucket; yield it."""
    port, master, volume, filer, *others = _free_ports(8)
    rights = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [{**identity, "actions": rights}]}))
    (folder / "data").mkdir()
    options = {
        "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": folder / "data",
        "master.telemetry": "false", "master.peers": "none", "master.port": master,
        "master.port.grpc": others[0], "master.volumeSizeLimitMB": 1024, "volume.max": 0,
        "volume.minFreeSpace": 1, "volume.port": volume, "volume.port.grpc": others[1],
        "filer.port": filer, "filer.port.grpc": others[2], "s3.port": port,
        "s3.port.grpc": others[3], "s3.port.iceberg": 0, "s3.port.lance": 0,
        "s3.autoCreateBucket": "false", "s3.iam": "false", "s3.config": config,
    }  # fmt: skip
    line = [program(), "-logtostderr=true", "server", "-filer", "-s3"]
    line += [f"-{name}={value}" for name, value in options.items()]
    with _running(line, folder, port) as server:
        yield server


@contextmanager
def moto(folder):
    """Run moto's server, which takes any keys and keeps all in memory; yield it."""
    (port,) = _free_ports(1)
    line = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with _running(line, folder, port) as server:
        yield server


@contextmanager
def juicefs(folder):
    """Run JuiceFS's gateway, which has no ETags and heeds no condition; yield it."""
    program, (port,) = Path(sys.executable).with_name("juicefs"), _free_ports(1)
    database, blocks = f"sqlite3://{folder / 'meta.db'}", folder / "blocks"
    blocks.mkdir()
    words = ["format", "--storage", "file", "--bucket", f"{blocks}/", database, "test"]
    subprocess.run([program, *words], check=True, capture_output=True)
    words = ["gateway", "--no-usage-report", "--multi-buckets", "--cache-dir", folder / "cache"]
    line = [program, *words, database, f"127.0.0.1:{port}"]
    keys = {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}
    with _running(["env", *(f"{n}={v}" for n, v in keys.items()), *line], folder, port) as server:
        yield server


def azurite_program():
    """Return the program that Azure's storage is emulated by; None where npm did not install it."""
    return shutil.which("azurite-blob")


_AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""That of the emulator's account, which everybody knows."""


@contextmanager
def azurite(folder):
    """Run Azurite with a container ``models``; yield the variables by which it is found."""
    line = [azurite_program(), "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    server = Server([*line, "--location", folder / "azurite", "--blobPort", "10000"], folder, 10000)
    try:
        until = time.monotonic() + _READY_SECONDS
        while _make_container() != 201:
            assert time.monotonic() < until, "no server"
            time.sleep(0.2)
        yield {"AZURE_STORAGE_USE_EMULATOR": "true"}
    finally:
        server.kill()


def _make_container():
    date, path = formatdate(usegmt=True), "/devstoreaccount1/models"
    versions = f"x-ms-date:{date}\nx-ms-version:2021-08-06"
    text = "PUT" + "\n" * 12 + f"{versions}\n/devstoreaccount1{path}\nrestype:container"
    digest = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers = dict(line.split(":", 1) for line in versions.split("\n"))
    headers["Authorization"] = f"SharedKey devstoreaccount1:{base64.b64encode(digest).decode()}"
    connection = HTTPConnection("127.0.0.1", 10000, timeout=5)
    try:
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@contextmanager
def _running(line, folder, port):
    """Run a server until it has a bucket, and while the block runs."""
    server = Server(line, folder, port)
    try:
        server.await_bucket()
        yield server
    finally:
        server.kill()
