"""Files of a DCP: items whose bytes were changed."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference_dcp
from tests.checkpoints.test_dcp import WORDS, items
from tests.conformance.test_forms import mutated
from tests.reference_dcp import write_dcp

pytestmark = pytest.mark.filterwarnings("ignore:optimizer[^/]*do not round")
MUTATIONS = int(os.environ.get("RANKXFORM_MUTATIONS", "300"))
"""Of items: 10,000 at night."""


def test_bytes_of_items_that_were_changed_are_refused_or_harmless(tmp_path):
    tensors = {"a": ("Float32", WORDS), "b": ("BFloat16", WORDS.astype("<u2"))}
    src = Path(write_dcp(tmp_path / "src", tensors, items={"lr": reference_dcp.saved(0.1)}))
    want, rng, refused = items(src)[0], random.Random(MUTATIONS), 0
    for _ in range(MUTATIONS):
        path = rng.choice(sorted(src.glob("*.distcp")))
        good = path.read_bytes()
        path.write_bytes(mutated(good, rng))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = rankxform.load(src, check_crc=True)
        except RankxformError as error:
            refused += 1
            assert "bug" not in str(error)
        else:
            for name, array in found.items():
                assert np.asarray(array).tobytes() == want[name][2], name
        path.write_bytes(good)
    assert refused > MUTATIONS / 2
