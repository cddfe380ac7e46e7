"""The API's keywords are those of the table."""

from __future__ import annotations

from rankxform.api import resharding_names
from rankxform.keywords import Keywords, LoadKeywords, ReshardKeywords
from rankxform.options import AFFECTS_LOAD
from rankxform.request import all_options, options_affecting


def test_keywords_are_the_table():
    """What an editor completes is what the table knows."""
    assert {*Keywords.__annotations__} | {*LoadKeywords.__annotations__} == {
        *(one.name for one in all_options()),
        "files",
    }
    assert {*LoadKeywords.__annotations__} == {*options_affecting(AFFECTS_LOAD), "files"}
    of_arrays = {*ReshardKeywords.__annotations__} - {"src_rank", "rank", "dtypes", "into"}
    assert of_arrays == {*resharding_names()}
