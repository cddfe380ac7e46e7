"""A destination that is there, compared."""

from __future__ import annotations

import pytest

import rankxform
from rankxform.target import existing
from tests import reference
from tests.place import Place
from tests.verbs.test_verify import place

__all__ = ["place"]


@pytest.mark.filterwarnings("ignore:.*names step 6:rankxform.RankxformWarning")
def test_a_tracker_that_leads_elsewhere_is_different(tmp_path):
    place = Place(tmp_path, [{"w": ([2], [0, -1], 0, 0)}], [{}], {"w": ((8, 4), "Float32")})
    rankxform.transform(
        place.src, place.dst, place.a, dst_form="hyperparallel", iteration=7, fsync=False
    )
    tracker = place.dst / "latest_checkpoint_iteration.txt"
    assert rankxform.verify(place.dst).differences == ()
    tracker.write_text("6")
    (found,) = rankxform.verify(place.dst).differences
    assert found.file == str(tracker) and "does not say 7" in found.text
    tracker.unlink()
    (found,) = rankxform.verify(place.dst).differences
    assert found.file == str(tracker) and "is missing" in found.text


def test_folders_and_files_that_do_not_belong_there_are_named(place):
    path, _ = place.entries(1)
    extra = place.dst / f"rank_4/old.{place.kind}"
    extra.parent.mkdir()
    extra.write_bytes(path.read_bytes())
    verdict = place.verify()
    (found,) = verdict.differences
    assert (found.file, verdict.ranks[found.file]) == (str(extra), 4)
    assert "ranks 0 to 3 only" in found.text
    (found,) = rankxform.verify(place.dst).differences
    assert found.text == "is not listed in the manifest"
    extra.unlink()
    beside = path.with_name(f"other.{place.kind}")
    beside.write_bytes(path.read_bytes())
    with pytest.warns(rankxform.RankxformWarning, match=f"{beside}: another checkpoint file"):
        assert place.verify().same is True
    with pytest.warns(rankxform.RankxformWarning, match=f"{beside}: another checkpoint file"):
        rankxform.transform(place.src, place.dst, place.a, place.b)
    (found,) = rankxform.verify(place.dst).differences
    assert found.file == str(beside)


def test_parameters_without_elements(tmp_path):
    params = {"w": ((4, 4), "Float32"), "empty": ((0, 4), "Float32")}
    stages = [{"w": ([2], [0, -1], 0, 0), "empty": ([2], [-1, -1], 0, 0)}]
    src = reference.write_checkpoint(tmp_path / "src", stages, params)
    strategy = reference.write_strategy(tmp_path / "s.ckpt", stages)
    rankxform.transform(src, tmp_path / "dst", strategy, None, verify=True, fsync=False)
    assert rankxform.verify(tmp_path / "dst").differences == ()
    assert rankxform.verify(src, tmp_path / "dst", strategy, None).differences == ()


def test_files_that_are_compared_share_one_block(place, monkeypatch):
    """What is read beside `--memory` does not grow with the number of files."""
    blocks, real = [], existing.ComparingSink

    def sink(*arguments):
        blocks.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(existing, "ComparingSink", sink)
    assert place.verify(memory=1 << 20).same
    assert len(blocks) == 4 and len({id(block) for block in blocks}) == 1
