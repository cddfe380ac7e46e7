"""Steps, and files left by others, by few bytes."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.verbs.test_evidence import PARAMS, RIGHT, STEP, Place, place, refused

__all__ = ["place"]


def test_an_older_file_of_one_rank(place):
    place.change(3, PARAMS)
    refused(place, "replicas")


@pytest.mark.parametrize("options", [{}, {"weights_only": True}, {"exclude": "global_step"}])
def test_files_of_two_steps(tmp_path, options):
    place = Place(
        tmp_path, lambda rank: {"global_step": (STEP[0], np.array([100 - rank // 3], "<i4"))}
    )
    error = refused(place, r"global_step is 100, and 99 by .*rank_3", **options)
    assert (error.fault, error.rule) == ("step", "files_are_of_one_step")


@pytest.mark.parametrize("iteration", [99, 100])
def test_common_json_and_the_folders_number(tmp_path, iteration):
    place = Place(tmp_path, {"global_step": STEP})
    other = rankxform.transform(place.src, tmp_path / "c2", place.right, place.right,
                                dst_form="checkpoint2")  # fmt: skip
    assert other.warnings == ()
    root = tmp_path / "c2"
    (root / "iteration_00000100").rename(root / f"iteration_{iteration:08}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        rankxform.transform(root, tmp_path / "out", None, None)
    assert bool(found) == (iteration == 99)


def test_common_json_and_the_tensors(tmp_path):
    place = Place(tmp_path, {"global_step": STEP})
    rankxform.transform(place.src, tmp_path / "c2", place.right, place.right,
                        dst_form="checkpoint2")  # fmt: skip
    path = tmp_path / "c2" / "iteration_00000100" / "common.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"global_step": 90, "step_num": 100}))
    (path.parent / "rankxform.json").unlink()
    with pytest.raises(rankxform.CheckpointError, match="global_step is 90, and 100 by"):
        rankxform.transform(tmp_path / "c2", tmp_path / "out", None, None)


def test_a_resumed_runs_names_count_from_one_and_its_scalars_do_not(tmp_path):
    extras = {n: ("Int32", np.array([v], "<i4")) for n, v in (("step_num", 150), ("epoch_num", 3))}
    extras["global_step"] = STEP
    reference.write_checkpoint(tmp_path / "src", RIGHT, PARAMS, extras, name="net-1_50")
    strategy = reference.write_strategy(tmp_path / "a.ckpt", RIGHT)
    made = tmp_path / "c2"
    rankxform.transform(tmp_path / "src", made, strategy, strategy, dst_form="checkpoint2")
    assert rankxform.transform(made, tmp_path / "out", None, None).warnings == ()
