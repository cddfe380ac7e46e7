"""Opening a source: what is found wrong is collected, and what is not needed is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankxform.checkpoints.base import CheckpointRef
from rankxform.errors import CheckpointError, UsageError
from rankxform.layout.strategy import WholeStrategy
from rankxform.source.open import open_source
from rankxform.source.source import ALL, SourceNeed
from rankxform.statements import HEADERS
from rankxform.storage import user_files
from rankxform.transport import SerialTeam
from tests.reference import write_checkpoint, write_ckpt, write_strategy

LAYOUTS = [{"a": ([2], [0, -1], 0, 0)}, {"b": ([2], [0, -1], 0, 0)}]
PARAMS = dict.fromkeys("ab", ((8, 4), "Float32"))


@pytest.fixture
def ranks(tmp_path):
    """A checkpoint of two stages on four ranks, and its strategy."""
    folder = write_checkpoint(tmp_path / "src", LAYOUTS, PARAMS)
    return Path(folder), user_files.load_strategy(str(write_strategy(tmp_path / "a.ckpt", LAYOUTS)))


def spoil(folder, *numbers):
    for rank in numbers:
        (folder / f"rank_{rank}/checkpoint_{rank}.ckpt").write_bytes(b"\xff" * 64)


def test_a_source_without_faults_has_a_table(ranks):
    folder, strategy = ranks
    source = open_source(CheckpointRef(str(folder), strategy=strategy), SerialTeam()).require()
    assert [one.name for one in source.require_catalog().parameters] == ["a", "b"]
    assert source.needed_files == tuple(source.indexes) == (0, 1, 2, 3)
    assert source.form.name == "ranks" and source.errors == ()


def test_every_fault_is_collected_and_the_first_is_raised(ranks):
    folder, strategy = ranks
    spoil(folder, 1, 3)
    source = open_source(CheckpointRef(str(folder), strategy=strategy), SerialTeam())
    assert [fault.file for fault in source.errors] == [source.paths[1], source.paths[3]]
    assert all(fault.need == HEADERS for fault in source.errors)
    assert source.catalog is None and sorted(source.indexes) == [0, 2]
    with pytest.raises(CheckpointError, match="rank_1/checkpoint_1.ckpt"):
        source.require()


@pytest.mark.parametrize("narrowed", [False, True])
def test_ranks_that_are_not_needed_are_not_read(narrowed, ranks):
    folder, strategy = ranks
    spoil(folder, 2)
    need = SourceNeed(ranks=(0, 1)) if narrowed else ALL
    source = open_source(CheckpointRef(str(folder), strategy=strategy), SerialTeam(), need)
    assert bool(source.errors) != narrowed
    if narrowed:
        assert [one.name for one in source.require_catalog().parameters] == ["a"]


def test_files_whose_ranks_nothing_tells_are_a_fault_and_still_known(ranks):
    folder, _ = ranks
    source = open_source(CheckpointRef(str(folder)), SerialTeam())
    assert sorted(source.indexes) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="no --src-strategy says"):
        source.require()
    whole = open_source(CheckpointRef(str(folder), strategy=WholeStrategy()), SerialTeam())
    assert whole.require_catalog().strategy is not None and len(whole.paths) == 4


def test_files_that_contradict_the_strategy_are_a_fault_of_their_content(ranks):
    folder, strategy = ranks
    write_ckpt(folder / "rank_1/checkpoint_1.ckpt", {"a": ("Float32", np.zeros((2, 4), "<f4"))})
    source = open_source(CheckpointRef(str(folder), strategy=strategy), SerialTeam())
    assert [one.need for one in source.errors] == [HEADERS] and len(source.paths) == 4
    with pytest.raises(CheckpointError, match="'a'"):
        source.require()


def test_preferred_files_are_chosen_where_all_are_there(ranks):
    folder, strategy = ranks
    (folder / "rank_0/checkpoint_0-1_9.ckpt").write_bytes(b"")
    names = {rank: f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(4)}
    where = CheckpointRef(str(folder), strategy=strategy)
    assert open_source(where, SerialTeam()).errors
    assert not open_source(where, SerialTeam(), SourceNeed(preferred=names)).errors
    assert open_source(
        where, SerialTeam(), SourceNeed(preferred={**names, 4: "rank_4/x.ckpt"})
    ).errors
