"""A server for all tests, and a prefix for each."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from tests.storage.objects import put, servers

if "RANKXFORM_OBJECTS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    if servers.program() is None:
        assert os.environ["RANKXFORM_OBJECTS"] != "required", "SeaweedFS is not installed"
        pytest.skip("SeaweedFS is not installed")
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as port:
        yield port


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
