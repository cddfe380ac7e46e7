"""Headers that are legal, and others; names and types of others."""

from __future__ import annotations

import pytest

from tests.reported import convert, dst, made, refused, same, tensors

__all__ = ["dst", "made"]


LEGAL = ("empty", "null", "padded", "order", "zero", "unicode")
ILLEGAL = {
    "dup": "twice", "trailing": "longer", "numbers": "texts", "overlap": "starts at", "hole": "starts",
    "short": "cut off", "onlymeta": "holds no tensor",
}  # fmt: skip


@pytest.mark.parametrize("kind", LEGAL)
def test_legal_headers(kind, made, dst):
    found = convert(made("st_headers") / kind, dst)[1]
    (w,) = (one for one in found.values() if one.shape == (2, 3))
    assert w.tolist() == [[0, 1, 2], [3, 4, 5]] and found["b"].shape == () and found["b"] == 7


@pytest.mark.parametrize("kind", ILLEGAL)
def test_illegal_headers(kind, made, dst):
    assert ILLEGAL[kind] in refused(made("st_headers") / kind, dst).what


def test_names_and_types(made, dst):
    for kind in ("names", "types", "both"):
        same(convert(made("odd_names") / kind, dst)[1], tensors(made("odd_names") / kind))
