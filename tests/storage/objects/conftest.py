"""A server for all tests, and a prefix for each."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.storage.objects import put, servers

if "RANKXFORM_OBJECTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


_PORT = pytest.StashKey[int]()


def pytest_sessionstart(session):
    """Start the server in this process: those that are forked for a test have one in common."""
    if servers.program() is None or "RANKXFORM_OBJECTS" not in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="seaweedfs-"))
    running = servers.seaweedfs(folder)
    session.config.stash[_PORT] = running.__enter__().port
    session.config.add_cleanup(lambda: (running.__exit__(None, None, None), shutil.rmtree(folder)))


@pytest.fixture(scope="session")
def server(request):
    if _PORT not in request.config.stash:
        assert os.environ["RANKXFORM_OBJECTS"] != "required", "SeaweedFS is not installed"
        pytest.skip("SeaweedFS is not installed")
    return request.config.stash[_PORT]


@pytest.fixture
def bucket(server, monkeypatch, tmp_path, request):
    """A prefix of the test's own: `at(name)` is its address, `put(name, data)` puts an object."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "S3_", "OBS_"))]:
        monkeypatch.delenv(name)
    for name, value in servers.environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # its .aws
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", f"{request.node.name}-{tmp_path.name}")
    return SimpleNamespace(
        at=lambda name="": f"s3://{servers.BUCKET}/{prefix}{'/' if name else ''}{name}",
        put=lambda name, data: put.put(f"{prefix}/{name}", data),
        put_folder=lambda folder, name="": put.put_folder(folder, f"{prefix}/{name}".rstrip("/")),
        port=server,
    )
