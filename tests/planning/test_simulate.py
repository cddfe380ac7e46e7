"""Work that is predicted."""

from __future__ import annotations

import numpy as np

from rankxform.request import Request
from rankxform.target.node_folders import PLACEMENT_NODE, PLACEMENT_SHARED
from rankxform.transport import SerialTeam
from rankxform.verbs.plan import Cluster, simulate
from tests import reference, reference_forms
from tests.operations.test_base import BITS


def test_a_simulation_counts_the_factors_that_cross(tmp_path):
    """Two nodes, the factors in the file of one: it reads their 16 bytes once, and sends them."""
    codes = BITS.integers(0, 100, (256, 256)).astype("u1")
    scales = ("Float32", np.ones((2, 2), "<u4"))
    src = tmp_path / "src"
    reference_forms.write_huggingface(src, {"m": ("F8_E4M3", codes), "m_scale_inv": scales}, 2)
    stages = [{"m": ([2], [0, -1], 0, 0)}]
    dst = reference.write_strategy(tmp_path / "dst.ckpt", stages)
    request = Request(str(src), None, None, str(dst), dtype="bf16", read_method="ranges")
    node, shared = (
        simulate(request, SerialTeam(), Cluster(2, 2, placement))[1].simulation
        for placement in (PLACEMENT_NODE, PLACEMENT_SHARED)
    )
    read = [sum(one.read for one in found.workloads) for found in (node, shared)]
    assert read[0] - read[1] == 16
    assert sorted(one.received for one in node.workloads) == [16, 256 * 128]
