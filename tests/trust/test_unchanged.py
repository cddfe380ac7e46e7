"""What was read is what was indexed, to the end: a source that changes meanwhile is no source."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.storage.source_reader import SourceReader
from tests import reference
from tests.place import of_another_step

PARAMS = {"a": ((64, 32), "Float32"), "b": ((64, 32), "Float32")}
STAGES = [{name: ([2], [0, -1], 0, 0) for name in PARAMS}]


def block(path, keep_time=False):
    """Change bytes of a tensor in place."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        file.write(np.arange(64, dtype="<u4").tobytes())
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def append(path):
    with open(path, "ab") as file:
        file.write(b"\0" * 16)


def truncate(path):
    os.truncate(path, path.stat().st_size - 64)


CHANGES = {
    "a block in place": block,
    "replaced": lambda path: of_another_step(path, keep_time=False),
    "replaced, and the time kept": of_another_step,
    "appended to": append,
    "truncated": truncate,
}


def copied(path):
    """Replace a file by a true copy, as a storage tier does."""
    shutil.copy2(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)


HARMLESS = {
    "mode": lambda path: path.chmod(0o400),
    "hard link": lambda path: os.link(path, path.parent.parent / f"kept-{path.name}"),
    "copied": copied,
    "removed": lambda path: path.unlink(),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A source, and a function that changes a file when all was read."""
    reference.write_checkpoint(tmp_path / "src", STAGES, PARAMS)
    strategy = reference.write_strategy(tmp_path / "a.ckpt", STAGES)
    then = []
    check = SourceReader.check_unchanged

    def changed(self):
        while then:
            change, path = then.pop()
            change(path)
        return check(self)

    monkeypatch.setattr(SourceReader, "check_unchanged", changed)
    return (
        tmp_path,
        strategy,
        lambda change: then.append((change, tmp_path / "src" / "rank_1" / "checkpoint_1.ckpt")),
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("verb", ["transform", "load", "verify"])
def test_a_source_that_is_written_meanwhile(place, verb, change):
    folder, strategy, later = place
    rankxform.transform(folder / "src", folder / "known", strategy, None)
    later(change)
    calls = {
        "transform": lambda: rankxform.transform(folder / "src", folder / "dst", strategy, None),
        "load": lambda: rankxform.load(folder / "src", strategy, None),
        "verify": lambda: rankxform.verify(folder / "src", folder / "known", strategy, None),
    }
    with pytest.raises(rankxform.CheckpointError, match="training still writes there"):
        calls[verb]()
    assert not [path for path in (folder / "dst").rglob("*") if path.is_file()]


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_does_not_concern_the_content_is_a_notice(place, change):
    folder, strategy, later = place
    later(change)
    report = rankxform.transform(folder / "src", folder / "dst", strategy, None)
    assert "while it was read" in " ".join(report.notices) and report.warnings == ()
    (file,) = (folder / "dst").glob("rank_0/*")
    for name, (_, _, data) in reference.read_ckpt(file).items():
        assert data == reference.full_tensor(name, *PARAMS[name]).tobytes()


def test_an_adapter_and_a_destination_are_looked_at_too(place):
    folder, strategy, later = place
    rankxform.transform(folder / "src", folder / "known", strategy, None)
    (file,) = (folder / "known").glob("rank_0/*")
    later(lambda path: append(file))
    with pytest.raises(rankxform.CheckpointError, match="still writes"):
        rankxform.verify(folder / "src", folder / "known", strategy, None)


def test_a_file_that_was_just_written_is_waited_for(tmp_path, monkeypatch):
    """Two writes within a tick of the clock bear one time."""
    import time

    from rankxform.storage.source_reader import index_file, wait_for_newer_mtime

    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    path = tmp_path / "a.ckpt"
    reference.write_ckpt(path, {"a": ("Float32", np.zeros(4, "<u4"))})
    old = time.time_ns() - 60 * 10**9
    os.utime(path, ns=(old, old))
    wait_for_newer_mtime([index_file(path)])
    assert slept == []
    os.utime(path)
    wait_for_newer_mtime([index_file(path)])
    assert slept == [0.01]
