"""Numbers in protobuf's encoding."""

from __future__ import annotations

import pytest

from rankxform.formats.protobuf import read_varint, signed, varint


@pytest.mark.parametrize("n", [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1])
def test_numbers_survive(n):
    assert read_varint(varint(n), 0) == (n, len(varint(n)))
    assert signed(read_varint(varint(-5), 0)[0], 64) == -5
