"""Every pair of real strategies of as many ranks: one shards a checkpoint, the other is given.

Values differ everywhere, so that what replicas hold, and what different ranks do, tells.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import rankxform
from rankxform.request import Request
from rankxform.storage import user_files
from rankxform.transport import SerialTeam
from rankxform.verbs.check import compare_replicas
from tests import reference

DATA = Path(__file__).parents[1] / "data" / "real_strategies"
MOST_UNTOLD = 0.05
"""Of the pairs that nothing in the files tells apart, such as rows and columns in the same order."""


def jobs():
    found = {}
    for path in sorted(DATA.rglob("shapes.json")):
        folder = path.parent / "strategy"
        if folder.is_dir():
            params = json.loads(path.read_text())["params"]
            shapes = {n: (tuple(one["full_shape"]), one["dtype"]) for n, one in params.items()}
            name = str(path.parent.relative_to(DATA))
            found[name] = str(folder), user_files.load_strategy(str(folder)), shapes
    return found


JOBS = jobs()


def outcome(src, strategy, params, folder):
    """Return "refused", "same", "warned" or "wrong" of a conversion to whole tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        report = rankxform.transform(src, folder, strategy, None, fsync=False)
    except rankxform.RankxformWarning:
        return "warned"
    except rankxform.RankxformError:
        return "refused"
    assert report.warnings == ()
    found = reference.read_ckpt(folder / "rank_0" / "checkpoint_0.ckpt")
    same = all(
        found[n][1:] == (shape, reference.full_tensor(n, shape, dtype).tobytes())
        for n, (shape, dtype) in params.items()
    )
    return "same" if same else "wrong"


@pytest.mark.timeout(900)
def test_a_strategy_of_as_many_ranks_is_not_believed(tmp_path):
    counts = dict.fromkeys(("refused", "warned", "same", "wrong"), 0)
    for a, (path_a, own, shapes) in JOBS.items():
        for b, (path_b, other, others) in JOBS.items():
            common = {n: shapes[n] for n in shapes if n in others and n in own and n in other}
            if own.ranks != other.ranks or not common:
                continue
            whole, src = tmp_path / "whole.ckpt", tmp_path / "src"
            shutil.rmtree(src, ignore_errors=True)
            entries = {n: (d, reference.full_tensor(n, s, d)) for n, (s, d) in common.items()}
            reference.write_ckpt(whole, entries)
            rankxform.transform(whole, src, None, path_a, unmatched="drop", fsync=False)
            (src / "rankxform.json").unlink()
            if a == b:
                assert outcome(src, path_b, common, tmp_path / "dst") == "same", a
                continue
            found = outcome(src, path_b, common, tmp_path / "dst")
            counts[found] += 1
            if found == "wrong":
                replicas = compare_replicas(Request(str(src), None, path_b, None), SerialTeam())
                assert not replicas.differences, f"{a} by {b}: replicas tell"
    pairs = sum(counts.values())
    assert pairs > 100 and counts["wrong"] <= MOST_UNTOLD * pairs, counts
