"""Killed while tensors are put together, a conversion continues; under other choices it does not."""

from __future__ import annotations

import json
import signal

import pytest

import rankxform
from rankxform.publish import journal
from tests import reference_forms
from tests.mpi.test_maps import write_ranks
from tests.reference_maps import Model
from tests.trust import victim
from tests.trust.test_form_kills import files
from tests.trust.test_kills import forked, kill_self


@pytest.mark.filterwarnings("ignore::rankxform.RankxformWarning")  # of random bits
def test_a_conversion_by_a_map_continues_where_it_was(tmp_path, monkeypatch):
    """Killed at every ninth call; continued under another choice, which is refused, and then right."""
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
    model, counts = Model("qwen3_moe", 2, "Float32"), tmp_path / "count"
    write_ranks(tmp_path, model, "mf", 4, 1, 1)
    (tmp_path / "config.json").write_text(json.dumps(model.config))

    def convert(dst, at, **more):
        number = victim.count_calls(lambda n: kill_self() if n == at else None)
        rankxform.transform(
            tmp_path / "src", dst, tmp_path / "strategy", dst_form="huggingface", dtype="bf16",
            map="qwen3_moe", config=str(tmp_path / "config.json"), max_shard=8000, **more,
        )  # fmt: skip
        counts.write_text(str(number[0]))

    whole = tmp_path / "whole"
    assert forked(lambda: convert(whole, 0)) == 0
    wanted, calls = files(whole), int(counts.read_text())
    assert len(wanted) > 2
    assert calls > 60
    for at in range(5, calls + 1, 9):
        dst = tmp_path / f"dst{at}"
        assert forked(lambda at=at, dst=dst: convert(dst, at)) == -signal.SIGKILL
        if (dst / "rankxform.json").exists():
            continue
        if any(dst.rglob("*.safetensors")):
            with pytest.raises(rankxform.RankxformError):
                convert(dst, 0, qkv="contiguous")
        assert forked(lambda dst=dst: convert(dst, 0)) == 0
        assert files(dst) == wanted, at
    assert set(reference_forms.read_huggingface(whole)) == set(model.hf)
