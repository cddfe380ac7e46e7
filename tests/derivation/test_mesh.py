"""Specs of a mesh, printed and read."""

from __future__ import annotations

import pytest

from rankxform.derivation.mesh import parse_spec, print_spec, validate_spec


@pytest.mark.parametrize("text", ["(mp, None)", "(None,)", "((cp, mp), None)", "()", "(ep, None)"])
def test_a_spec_is_printed_as_it_is_read(text):
    spec = parse_spec(text)
    assert parse_spec(print_spec(spec)) == spec
    assert validate_spec([list(axes) or None for axes in spec], "it") == spec
