"""Which tensors --dtype casts."""

from __future__ import annotations

import numpy as np
import pytest

import rankxform
from tests import reference, reference_forms


@pytest.mark.parametrize("router_type", ["BFloat16", "Float32"])
@pytest.mark.parametrize(
    "names",
    [
        ("mlp.gate.weight", "mlp.gate.bias"),
        ("mlp.router.weight", "mlp.router.bias"),
        ("ffn.gate.weight", "ffn.expert_offsets"),
    ],
)
def test_what_a_router_adds_to_scores_keeps_a_longer_type(names, router_type, tmp_path):
    """Beside a router of the same type it is cast with it; what is not as long always is."""
    router, bias = (f"layers.0.{name}" for name in names)
    one = {"BFloat16": (0x3F80, "<u2"), "Float32": (0x3F800000, "<u4")}
    tensors = {
        router: (router_type, np.full((8, 4), *one[router_type])),
        bias: ("Float32", np.full(8, *one["Float32"])),
        "layers.0.norm.weight": ("Float32", np.full(8, *one["Float32"])),
        f"{router.rpartition('.')[0]}.scale": ("Float32", np.full(4, *one["Float32"])),
    }
    reference_forms.write_huggingface(tmp_path / "src", tensors)
    options = {"dst_form": "huggingface", "dtype": "bf16", "fsync": False}
    rankxform.transform(tmp_path / "src", tmp_path / "dst", **options)
    (path,) = (tmp_path / "dst").glob("*.safetensors")
    types = {name: dtype for name, (dtype, _, _) in reference.read_safetensors(path).items()}
    assert types.pop(bias) == ("Float32" if router_type == "BFloat16" else "BFloat16")
    assert {*types.values()} == {"BFloat16"}
