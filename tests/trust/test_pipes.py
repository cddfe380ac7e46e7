"""A pipe in the place of a document keeps nobody waiting, and one that is written to is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rankxform.errors import StorageError
from rankxform.storage import posix
from tests import reference
from tests.checkpoints import DATA

PARAMS = {"w": ((8, 12), "Float32")}
STAGE = [{"w": ([4], [0, -1], 0, 0)}]


def run(*words):
    """Return what a command says, which must end soon."""
    line = [sys.executable, "-m", "rankxform", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def with_pipe(folder, name):
    """Put a pipe in the place of a file of a folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return folder


def test_what_is_written_to_a_pipe_is_read_as_a_shell_hands_it_over(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = os.urandom(3 << 20)

    def write():
        with path.open("wb") as file:
            for start in range(0, len(content), 1 << 20):
                file.write(content[start : start + (1 << 20)])
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.2)
    assert posix.read_bytes(path) == content
    writer.join()


def test_a_pipe_that_nobody_writes_to_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(posix, "_PIPE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="nobody writes to this pipe"):
        posix.read_bytes(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom"])
def test_a_device_is_no_document(path):
    with pytest.raises(StorageError, match="is no regular file"):
        posix.read_bytes(Path(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rankxform.json", ".rankxform/job.json", ".rankxform/lock", "SHA256SUMS"]
)
def test_in_a_destination(name, tmp_path):
    src = reference.write_checkpoint(tmp_path / "src", STAGE, PARAMS)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", STAGE)
    words = ["--src-strategy", strategy, "--dst-strategy", "none", "--digests", "sha256"]
    for verb in (["transform", src], ["verify"], ["inspect"], ["clean"]):
        dst = with_pipe(tmp_path / verb[0], name)
        code, text = run(*verb, dst, *(words if verb[0] == "transform" else ()))
        assert "bug" not in text and code != 70, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ("hf_qwen3/hf", "config.json"), ("hf_qwen3/hf", "model.safetensors.index.json"),
        ("hf_qwen3/hf", "SHA256SUMS"), ("dcp_torch_fsdp4/ckpt", ".metadata"),
        ("unified/out", "param_name_map.json"),
    ],
)  # fmt: skip
def test_in_a_source(sample, name, tmp_path):
    shutil.copytree(DATA / sample, tmp_path / "src")
    code, text = run("inspect", with_pipe(tmp_path / "src", name), "--check", "--full")
    assert "bug" not in text and code != 70, text
