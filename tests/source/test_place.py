"""What lies at a place, before files are chosen."""

from __future__ import annotations

import pytest

from rankxform.checkpoints.base import CheckpointRef
from rankxform.errors import CheckpointError
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME
from rankxform.source.open import open_source
from rankxform.source.place import list_and_select
from rankxform.transport import SerialTeam
from tests.source.test_open import ranks, spoil

__all__ = ["ranks"]


def test_looking_reads_no_header(ranks):
    folder, _ = ranks
    spoil(folder, 0, 1, 2, 3)
    place = list_and_select(CheckpointRef(str(folder)))
    listing, selected = place.listing, place.selected
    assert listing is not None
    assert place.form.name == "ranks" and sorted(selected.names) == [0, 1, 2, 3]
    assert set(selected.names.values()) <= set(listing.files)


@pytest.mark.parametrize("form", [None, "ranks", "huggingface", "checkpoint2", "unified"])
def test_a_stopped_run_is_named_before_what_it_left(form, tmp_path):
    (tmp_path / FOLDER_NAME).mkdir()
    (tmp_path / FOLDER_NAME / JOB_NAME).write_text("{}")
    source = open_source(CheckpointRef(str(tmp_path), form), SerialTeam())
    with pytest.raises(CheckpointError, match="a conversion into this folder was stopped"):
        source.require()


def test_links_that_lead_nowhere_are_no_mark_of_a_form(ranks):
    folder, strategy = ranks
    for name in ("metadata.json", "common.json", "param_name_map.json"):
        (folder / name).symlink_to("nowhere")
    source = open_source(CheckpointRef(str(folder), strategy=strategy), SerialTeam())
    assert source.form.name == "ranks" and not source.errors
