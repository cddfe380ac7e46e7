"""How often a journal notes what is written."""

from __future__ import annotations

import pytest

from rankxform.planning.catalog import IdentityDict
from rankxform.publish import journal
from rankxform.publish.folder_records import FOLDER_NAME
from rankxform.publish.journal import JOURNAL_SECONDS, Journal
from rankxform.publish.records import CompletedSlices, FolderState


@pytest.mark.parametrize(("taken", "pause"), [(0.001, 5.0), (0.05, 5.0), (0.1, 10.0), (9.0, 30.0)])
def test_entries_are_rarer_where_they_take_long(taken, pause, tmp_path, monkeypatch):
    """They take a hundredth of the time, and half a minute of work is lost at most."""
    now = 0.0

    def slow_sync(path):
        nonlocal now
        now += taken

    monkeypatch.setattr(journal, "monotonic", lambda: now)
    monkeypatch.setattr(journal, "sync", slow_sync)
    (tmp_path / FOLDER_NAME).mkdir()
    part = tmp_path / "part"
    part.write_bytes(b"x")
    state = FolderState(tmp_path, "token", 1, frozenset(), CompletedSlices())
    written = Journal(state, 0, {0: (part, "layout")}, durable=True)
    cells = IdentityDict({(0,): (0,)})
    written.moved("w", cells)
    now += JOURNAL_SECONDS
    assert written.due
    written.commit({0: part}, {}, lambda nbytes: None)
    written.moved("v", cells)
    now += pause - 0.01
    assert not written.due
    now += 0.02
    assert written.due
