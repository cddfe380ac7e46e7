"""How layers are spread over pipeline stages."""

from __future__ import annotations

from rankxform.derivation.stages import spread_layers


def test_layers_are_spread_as_mindformers_does():
    assert spread_layers(4, 2) == [0, 0, 1, 1]
    assert spread_layers(8, 2, interleave=2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert spread_layers(9, 2, interleave=2, offset=(0, 0, 1, 0)) == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert spread_layers(61, 16, offset=(1,) * 13 + (0,) * 3).count(0) == 4
