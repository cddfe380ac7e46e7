"""Costs of reads, as they are given."""

from __future__ import annotations

import pytest

from rankxform.planning.reads import parse_costs


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1G", 1e9), ("2.5GB", 2.5e9), ("512M", 512e6), ("1Gi", 1 << 30), ("1GiB", 1 << 30), ("7", 7)],
)
def test_rates_are_decimal_as_they_are_printed(text, rate):
    assert parse_costs(f"read={text}").read == rate


@pytest.mark.parametrize("text", ["1X", "-1G", "G", "1 G i", "0"])
def test_what_is_no_rate(text):
    with pytest.raises(ValueError, match="expected"):
        parse_costs(f"network={text}")
