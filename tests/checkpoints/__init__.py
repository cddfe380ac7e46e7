"""What is of one form alone. Laws of all forms are in tests/conformance/test_forms.py."""

from __future__ import annotations

from pathlib import Path

from tests import reference

DATA = Path(__file__).parents[1] / "data" / "formats"
FULL = reference.read_safetensors(DATA / "expected_full.safetensors")
STRATEGY = str(DATA / "unified" / "strategy.ckpt")
METADATA = "iteration_00000100/metadata.json"
COUNTERS = {"global_step", "learning_rate", "only_rank5"}
"""In the samples; test_counters.py is about them."""


def plain(found):
    """Return {name: (type, shape, bytes)} of {name: (type, words)}, but for counters."""
    return {n: (d, w.shape, w.tobytes()) for n, (d, w) in found.items() if n not in COUNTERS}
