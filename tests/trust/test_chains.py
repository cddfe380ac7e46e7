"""Chains of conversions in which only the first is told how its source is sharded."""

from __future__ import annotations

import os
import random
import shutil

import pytest

import rankxform
from tests import reference

CHAINS = int(os.environ.get("RANKXFORM_CHAINS", "12"))
"""200 at night."""

PARAMS = {
    "embed.weight": ((48, 24), "Float32"),
    "layers.0.wq": ((24, 24), "BFloat16"),
    "layers.0.wo": ((24, 48), "BFloat16"),
    "layers.1.wq": ((24, 24), "BFloat16"),
    "layers.1.norm": ((24,), "Float32"),
}
FORMS = ("ranks", "ranks", "checkpoint2", "unified", "huggingface")


def random_strategy(rng):
    """Return one or two stages of 1 to 8 ranks."""
    ranks = rng.choice((1, 2, 3, 4, 6, 8))
    split = rng.choice([n for n in (1, 2, 3, 4) if ranks % n == 0])
    stage = {}
    for name, (shape, _) in PARAMS.items():
        axes = [-1] * len(shape)
        if rng.random() < 0.8:
            axes[rng.randrange(len(shape))] = rng.choice((0, 1))
        stage[name] = ([ranks // split, split], axes, 0, 0)
    if rng.random() < 0.3:
        return [
            {n: one for n, one in stage.items() if "layers.1" not in n},
            {n: one for n, one in stage.items() if "layers.1" in n},
        ]
    return [stage]


def is_whole(folder):
    """Tell whether all tensors come out right, whole."""
    out = folder.parent / f"{folder.name}-whole"
    shutil.rmtree(out, ignore_errors=True)
    rankxform.transform(folder, out, None, None, format="ckpt", fsync=False)
    found = reference.read_ckpt(out / "rank_0" / "checkpoint_0.ckpt")
    return all(
        found[n][2] == reference.full_tensor(n, shape, dtype).tobytes()
        for n, (shape, dtype) in PARAMS.items()
    )


@pytest.mark.parametrize("seed", range(CHAINS))
def test_the_end_is_what_the_beginning_was(tmp_path, seed):
    rng = random.Random(seed)
    stages = random_strategy(rng)
    reference.write_checkpoint(
        tmp_path / "0", stages, PARAMS, kind=rng.choice(("ckpt", "safetensors"))
    )
    src = tmp_path / "0"
    given = reference.write_strategy(tmp_path / "0.ckpt", stages)
    ranked = []
    for number in range(1, rng.randint(3, 6) + 1):
        form = rng.choice(FORMS)
        dst, strategy = tmp_path / str(number), None
        if form in ("ranks", "checkpoint2"):
            strategy = reference.write_strategy(tmp_path / f"{number}.ckpt", random_strategy(rng))
        options = {"iteration": 7} if form == "checkpoint2" else {}
        if form == "ranks":
            options["format"] = rng.choice(("ckpt", "safetensors"))
            ranked.append(dst)
        rankxform.transform(src, dst, given, strategy, dst_form=form, fsync=False, **options)
        src, given = dst, None
    assert is_whole(src)
    for link in ranked[:1]:
        wrong = reference.write_strategy(tmp_path / "wrong.ckpt", random_strategy(rng))
        try:
            rankxform.transform(link, tmp_path / "refused", wrong, None, fsync=False)
        except rankxform.RankxformError:
            continue
        assert is_whole(tmp_path / "refused"), "the same boxes"
