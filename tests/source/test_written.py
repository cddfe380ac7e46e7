"""Rules over what a manifest says, for every form that is written."""

from __future__ import annotations

import pytest

from rankxform.errors import RankxformError
from tests import rules

WRITTEN = [(row, form) for row in rules.WRITTEN for form in sorted(row.forms)]


@pytest.mark.filterwarnings("ignore::rankxform.RankxformWarning")
@pytest.mark.parametrize(("row", "form"), WRITTEN, ids=[f"{r.rule}-{form}" for r, form in WRITTEN])
def test_the_rule_of_a_written_row_speaks_of_the_file(row, form, tmp_path, monkeypatch):
    place = rules.WrittenPlace(tmp_path, form)
    assert place.verify().findings == ()
    path = row.damage(place)
    heard = []
    rules.listen(monkeypatch, heard)
    try:
        verdict = place.verify()
    except RankxformError as error:  # a table by which the manifest is found
        assert row.rule == "companions_are_as_written"
        assert str(path) in str(error)
        return
    assert {rule for rule, severity in heard if severity == row.severity} == {row.rule}
    assert {finding.file for finding in verdict.errors} == ({str(path)} if path else set())


@pytest.mark.parametrize("form", rules.FORMS)
def test_a_file_that_was_removed_is_made_again_and_the_others_compared(form, tmp_path):
    place = rules.WrittenPlace(tmp_path, form)
    removed = place.files[-1]
    data = removed.read_bytes()
    removed.unlink()
    report = place.write()
    assert (report.files_kept, report.files_compared) == (len(place.files) - 1,) * 2
    assert removed.read_bytes() == data
    assert place.verify().findings == ()
