"""Documents that are read part by part."""

from __future__ import annotations

import pytest

from rankxform.errors import FormatError
from rankxform.formats import checkpoint2_metadata, documents
from tests.checkpoints import DATA, METADATA


def test_a_large_document_is_read_in_parts(monkeypatch):
    """Any size of what is read at once gives the same; an entry is never half read."""
    data = (DATA / "checkpoint2_2026" / METADATA).read_bytes()
    whole = checkpoint2_metadata.parse_checkpoint2_metadata(
        lambda offset, n: data[offset : offset + n]
    )
    for block in (1, 7, 1000):
        monkeypatch.setattr(documents, "_BLOCK", block)
        assert (
            checkpoint2_metadata.parse_checkpoint2_metadata(
                lambda offset, n: data[offset : offset + n]
            )
            == whole
        )
    for cut in range(0, len(data), 997):
        short = data[:cut]
        with pytest.raises(FormatError):
            checkpoint2_metadata.parse_checkpoint2_metadata(
                lambda offset, n, short=short: short[offset : offset + n]
            )
