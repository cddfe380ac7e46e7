"""The table of a DCP, written and read."""

from __future__ import annotations

import random

import pytest

from rankxform.formats import dcp_metadata
from rankxform.formats.dcp_metadata import HYPER_FLAVOR, TORCH_FLAVOR, DcpMetadata, StoredItem
from rankxform.geometry.box import Box


def table(rng):
    """Return a table of some tensors in boxes, and of what is no tensor."""
    found = DcpMetadata()
    for number in range(rng.randint(1, 12)):
        name, axes = f"layers.{number}.w", rng.randint(0, 5)
        shape = tuple(rng.choice((1, 5, 300, 70_000)) for _ in range(axes))
        found.tensors[name] = rng.choice(("BFloat16", "Float32", "F8_E4M3", "Int64")), shape
        items = [StoredItem("__0_0.distcp", rng.randrange(1 << 40), 9, name, Box.whole(shape))]
        found.items[name] = tuple(items)
    found.items["lr"] = (StoredItem("__1_0.distcp", 0, 1261, "lr"),)
    return found


@pytest.mark.parametrize("flavor", [TORCH_FLAVOR, HYPER_FLAVOR], ids=["torch", "hyper"])
def test_a_table_that_is_written_is_read(flavor):
    for seed in range(100):
        one = table(random.Random(seed))
        found = dcp_metadata.parse_dcp_metadata(
            b"".join(dcp_metadata.format_dcp_metadata(one, flavor))
        )
        assert found == one
