"""Rules and presets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankxform.derivation import rules
from rankxform.derivation.derive import derive
from rankxform.derivation.mesh import Parallel, parse_parallel, parse_spec
from rankxform.derivation.request import DeriveRequest, Extent
from rankxform.derivation.rules import parse_rule
from rankxform.errors import DerivationError, UsageError
from tests.compiled import COMPILED


@pytest.mark.parametrize(
    "call",
    [
        lambda: parse_spec("tp, None"),
        lambda: parse_spec("(tp, mp)"),
        lambda: parse_spec("(xp,)"),
        lambda: parse_rule("wq"),
        lambda: parse_rule("w(=(tp,)"),
        lambda: parse_rule("w=square(tp,)"),
        lambda: parse_parallel("dp=0", "--dst-parallel"),
        lambda: parse_parallel("dp=2,dp=4", "--dst-parallel"),
        lambda: parse_parallel("dp=2,xp=4", "--dst-parallel"),
        lambda: parse_parallel("dp", "--dst-parallel"),
        lambda: parse_parallel("dp=99999,mp=99999", "--dst-parallel"),
        lambda: rules.load_preset("unknown"),
        lambda: rules.load_preset("/no/such/file.toml"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(call):
    with pytest.raises(UsageError):
        call()


def test_every_preset_says_what_it_was_proven_on():
    for name in rules.preset_names():
        preset = rules.load_preset(name)
        assert preset.evidence
        assert bool(preset.networks) == preset.proven
        assert all(rule.stage for rule in preset.rules)
        assert preset.proven == (name in {one.facts.get("preset") for one in COMPILED})


def test_a_preset_of_other_names_proposes_the_one_that_fits():
    given = DeriveRequest(None, Parallel(dp=2), preset=rules.load_preset("llama"), extents={
        "model.layers.0.attention.wq.weight": Extent((8, 8), 256)})  # fmt: skip
    with pytest.raises(DerivationError, match="Give --preset llama_legacy"):
        derive(given)
    with pytest.raises(DerivationError) as caught:
        derive(replace(given, preset=None))
    assert caught.value.tries == ("--preset llama_legacy, which knows all names",)
    assert "no rule says how it is sharded" in caught.value.reasons[0]
