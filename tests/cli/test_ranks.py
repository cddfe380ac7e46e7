"""The verb `ranks`."""

from __future__ import annotations

import json

from tests.cli.test_main import command, place

__all__ = ["place"]


def test_ranks(place):
    code, output = command("ranks", "--src-strategy", place.a, "--dst-strategy", place.a, "--json")
    assert code == 0, output
    assert json.loads(output)["needed_ranks"] == {"0": [0], "1": [1], "2": [2], "3": [3]}
    code, exact = command("ranks", place.src, *place.strategies, "--ranks", "1")
    assert code == 0, exact
    assert exact.splitlines()[1].split() == ["1", "0,", "1,", "2,", "3"]
