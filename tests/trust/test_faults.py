"""The system refuses one call, each in turn: a clean error or success, never a wrong file.

Every way of failing is tried at every fifth call, each from another one on; with RANKXFORM_CRASHES=third
an error of the device at every third call, of the two conversions at others; with =all all of them at
every call.
"""

from __future__ import annotations

import errno
import os

import pytest

import rankxform
from rankxform.publish import journal
from tests.trust.test_kills import KilledPlace
from tests.trust.victim import sync_nothing

WRITING = ("pwritev", "fsync", "replace", "link", "unlink", "mkdir", "open", "close", "utime")
READING = ("preadv", "pread", "fstat", "open")


class Injector:
    """Counts calls of some functions of `os`, and lets the one with number `at` go wrong."""

    def __init__(self, monkeypatch, names, at, how):
        self.calls, self.hit = 0, None
        self._at, self._how = at, how
        for name in names:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, real):
        def call(*args, **kwargs):
            if name == "open" and args[1] & os.O_PATH:  # of a folder, on the way to the next call
                return real(*args, **kwargs)
            self.calls += 1
            if self.calls != self._at:
                return real(*args, **kwargs)
            self.hit = name
            if self._how != "short":
                if name == "close":
                    real(*args)  # a failing close has closed
                named = [] if isinstance(args[0], int) else [os.fspath(args[0])]
                raise OSError(self._how, os.strerror(self._how), *named)
            if name in ("preadv", "pwritev"):
                fd, buffers, offset = args
                first = buffers[0][: max(1, len(buffers[0]) // 2)]
                return real(fd, [first], offset)
            if name == "pread":
                fd, nbytes, offset = args
                return real(fd, max(1, nbytes // 2), offset)
            return real(*args, **kwargs)

        return call


def convert(place, dst):
    return rankxform.transform(place.src, dst, **place.options)


WAYS = [
    *((WRITING, error) for error in (errno.EIO, errno.ENOSPC, errno.EDQUOT, "short")),
    *((READING, error) for error in (errno.EIO, errno.ESTALE, "short")),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("names", "how"),
    WAYS,
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else None,
)
@pytest.mark.parametrize(("link", "kind"), [("none", "ckpt"), ("hard", "safetensors")])
def test_every_call_refused_in_turn(link, kind, names, how, tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
    monkeypatch.setattr(os, "fsync", sync_nothing)
    place = KilledPlace(tmp_path, link, kind)
    with monkeypatch.context() as patch:
        counter = Injector(patch, names, 0, how)
        convert(place, tmp_path / "count")
    failed = set()
    share = os.environ.get("RANKXFORM_CRASHES", "sixth")
    first, step = 1 + WAYS.index((names, how)) % 5, 5
    if share == "third" and how == errno.EIO:
        first, step = 1 + (link == "hard"), 3
    if share == "all":
        first, step = 1, 1
    for at in range(first, counter.calls + 1, step):
        dst = tmp_path / f"dst{at}"
        with monkeypatch.context() as patch:
            injector = Injector(patch, names, at, how)
            try:
                convert(place, dst)
            except rankxform.RankxformError as error:
                failed.add(injector.hit)
                assert how != "short", error
                assert isinstance(error, (rankxform.StorageError, rankxform.CheckpointError))
                assert os.strerror(how) in str(error)
                assert str(tmp_path) in str(error), "the message names a file"
            else:
                assert place.files(dst) == place.whole
                assert (dst / "rankxform.json").exists()
        assert injector.hit, "the call was reached"
        place.check_unfinished(dst)
        convert(place, dst)
        place.check_finished(dst)
    assert how == "short" or len(failed) >= 2
