"""What a configuration says of a model, against the tensors that it has."""

from __future__ import annotations

import pytest

from rankxform.target.stated_model import refuted

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("words", "rows", "is_fit"),
    [
        (32000, 32000, True),
        (32000, 32001, True),  # a token for padding
        (32000, 32008, True),
        (32000, 32009, False),
        (151669, 151680, True),  # up to a multiple of 64
        (151669, 151936, True),
        (151669, 152960, False),  # a multiple that is too far
        (151669, 151668, True),  # a few words have no row
        (32000, 31000, True),
        (40, 10, False),  # one rank's slice
        (32000, 28001, False),
        (256000, 254900, False),
        (100, 104, False),  # models for tests are not padded
    ],
)
def test_an_embedding_may_have_rows_of_no_word(words, rows, is_fit):
    text = refuted({"vocab_size": words}, {EMBEDDING: (rows, 4)}, is_part=False)
    assert bool(text) is not is_fit
    assert is_fit or str(words) in text


def test_a_configuration_may_state_how_many_rows_there_are():
    shapes = {EMBEDDING: (104, 4)}
    assert not refuted({"vocab_size": 100, "embedding_size": 104}, shapes, is_part=False)
    assert refuted({"vocab_size": 100, "embedding_size": 105}, shapes, is_part=False)
