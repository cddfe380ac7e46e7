"""Every rule has a row of tests/rules.py, which breaks it."""

from __future__ import annotations

import warnings
from contextlib import suppress

import pytest

import rankxform
from rankxform import statements
from rankxform.checkpoints.base import FORMS
from rankxform.errors import RankxformError
from tests import healthy, rules

SPEAKS_TOO = {
    "tensors_are_as_configured": {"tensors_are_as_the_model_states"},
    "tensors_are_usual": {"weights_are_usual"},
}
"""Rules of a conversion that `inspect --check` draws up for its evidence alone, and does not show."""


@pytest.mark.filterwarnings("ignore::rankxform.RankxformWarning")
@pytest.mark.parametrize("row", rules.ALL, ids=lambda row: f"{row.rule}-{row.severity}")
def test_the_rule_of_a_row_speaks_and_no_other(row, tmp_path, monkeypatch):
    heard = []
    rules.listen(monkeypatch, heard)
    with suppress(RankxformError):
        row.damage(rules.Place(tmp_path))
    spoke = {rule for rule, severity in heard if severity == row.severity}
    assert spoke - SPEAKS_TOO.get(row.rule, set()) == {row.rule}


@pytest.mark.parametrize("name", healthy.ALL)
def test_no_rule_speaks_of_a_healthy_checkpoint(name, tmp_path):
    place = rules.Place(tmp_path)
    options = dict(healthy.ALL[name](place))
    strategy, known = options.pop("src_strategy", None), options.pop("warned", ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = place.convert(strategy, **options)
    assert [w for w in report.warnings if not any(text in w for text in known)] == []
    checked = rankxform.check(place.src, strategy, full=True, progress=False)
    assert [f.text for f in checked.findings if not any(text in f.text for text in known)] == []


def test_every_rule_has_a_row_and_every_row_a_rule():
    named = {row.rule for row in (*rules.ALL, *rules.WRITTEN)}
    from rankxform.verbs.rules import all_rules

    assert named == {rule.name for rule in all_rules()}
    written = {rule.name for rule in all_rules() if rule.need == statements.WRITTEN}
    assert written == {row.rule for row in rules.WRITTEN}
    assert {*rules.FORMS} == {name for name in FORMS if FORMS[name].is_written}
