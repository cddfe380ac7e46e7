"""Which tensors are dropped: states, copies, and what is named like them."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rankxform
from rankxform.errors import RankxformError
from tests import reference
from tests.reported import convert, dst, made, put, refused, same, tensors

__all__ = ["dst", "made"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", ["adam", "nnadam", "lamb", "amsgrad", "rmsprop", "adadelta", "ftrl"]
)
def test_states_of_mindspores_optimizers(kind, made, dst):
    folder = made("ms_optimizers")
    expected = load_file(folder / f"expect-{kind}.safetensors")
    src, strategy = folder / kind, folder / f"{kind}.json"
    same(convert(src, dst, strategy)[1], expected)
    weights = {name: expected[name] for name in "wb"}
    same(convert(src, dst, strategy, weights_only=True)[1], weights)
    report, found = convert(src, dst, strategy, folder / "infer.json", dst_form="ranks")
    same(found, weights)
    assert {n for one in report.left_out for n in one.names} == {*expected} - {*weights}
    renamed = convert(src, dst, strategy, rename=("^w$=layers.w",))[1]
    assert {n.rpartition("w")[0] for n in renamed if n.endswith("layers.w")} == {
        n.rpartition("w")[0] + "layers." for n in expected if n == "w" or n.endswith(".w")
    }
    cast = convert(src, dst, strategy, dtype="fp16")[1]
    assert {n for n, one in cast.items() if one.dtype == np.float16} == {*"wb"}


def test_states_of_a_chained_optimizer(made, dst):
    src = made("mcore_chained") / "mcore"
    every = convert(src, dst)[1]
    weights = {n: one for n, one in every.items() if "optimizer" not in n}
    assert len(weights) == 4 and len(every) == 16
    same(convert(src, dst, weights_only=True)[1], weights)
    cast = convert(src, dst, dtype="fp16")[1]
    assert {n for n, one in cast.items() if one.dtype == np.float16} == {*weights}
    renamed = convert(src, dst, rename=("^decoder=model",))[1]
    assert not any("decoder" in name for name in renamed)


def test_weights_that_are_named_like_states(made, dst):
    src = made("state_like_weights")
    report, found = convert(src, dst, weights_only=True)
    same(found, tensors(src))
    assert any("leaves nothing out" in text for text in report.notices) and not report.warnings


COPIES = {"ema.w": 1, "ema.b": 2, "w": 3, "b": 4, "adam_m.w": 5, "adam_m.b": 6}


@pytest.fixture
def copies(tmp_path):
    shapes = {"w": (8, 4), "b": (8,)}
    arrays = {n: np.full(shapes[n[-1]], k, "f4") for n, k in COPIES.items()}
    (tmp_path / "copies").mkdir()
    save_file(arrays, tmp_path / "copies" / "model.safetensors")
    return tmp_path / "copies", arrays


def test_a_copy_of_the_parameters_is_never_dropped_by_guess(copies, dst, monkeypatch, tmp_path):
    src, arrays = copies
    same(convert(src, dst)[1], arrays)
    parts = refused(src, dst / "none", weights_only=True)
    assert parts.tries == (
        "--exclude '^ema\\.' to leave them out", "--include . to keep them as weights"
    )  # fmt: skip
    found = convert(src, dst, weights_only=True, exclude=(r"^ema\.",))[1]
    assert {*found} == {"w", "b"}
    found = convert(src, dst, weights_only=True, include=(".",))[1]
    assert {*found} == {"w", "b", "ema.w", "ema.b"}
    report, found = convert(src, dst, dtype="fp16", rename=("^w$=layers.w",))
    assert {*found} == {"layers.w", "b", "ema.layers.w", "ema.b", "adam_m.layers.w", "adam_m.b"}
    assert {n for n, one in found.items() if one.dtype == np.float16} == {"layers.w", "b"}
    assert any("keep their type" in text for text in report.notices)
    found = convert(src, dst, dtype="fp16", cast_states=("^ema",))[1]
    assert found["ema.w"].dtype == np.float16


def test_a_copy_follows_its_parameters_sharding(copies, tmp_path, dst):
    _, arrays = copies
    rows = [{"w": ([4], [0, -1], 0, 0), "b": ([4], [0], 0, 0)}]
    for rank in range(4):
        folder = tmp_path / "ranks" / f"rank_{rank}"
        folder.mkdir(parents=True)
        parts = {
            n: np.array_split(one * 1, 4)[rank] + np.float32(rank) for n, one in arrays.items()
        }
        save_file(parts, folder / "net.safetensors")
    a = reference.write_strategy(tmp_path / "a.ckpt", rows)
    found = convert(tmp_path / "ranks", dst, a)[1]
    for name, array in arrays.items():
        steps = np.repeat(np.arange(4), 2).reshape(-1, *(1,) * (array.ndim - 1))
        np.testing.assert_array_equal(found[name], array + steps)


def test_numbered_states_are_told(tmp_path, dst):
    (tmp_path / "src").mkdir()
    arrays = {n: np.ones((2, 2), "f4") for n in ("w", "adam_m.0", "adam_m.1")}
    save_file(arrays, tmp_path / "src" / "model.safetensors")
    with pytest.warns(rankxform.RankxformWarning, match="states by number"):
        same(convert(tmp_path / "src", dst)[1], arrays)
    parts = refused(tmp_path / "src", dst / "none", weights_only=True)
    pattern = parts.tries[0].split("'")[1]
    assert [*convert(tmp_path / "src", dst, weights_only=True, exclude=(pattern,))[1]] == ["w"]


@pytest.mark.parametrize(
    "shapes",
    [
        {"generator.w": (8, 4), "discriminator.w": (8, 6), "generator.optimizer.state.w.exp_avg": (8, 4)},
        {"actor.model.w": (8, 4), "ref.model.w": (8, 6), "actor.optimizer.state.w.exp_avg": (8, 4)},
        {"model.w": (8, 4), "head.w": (4, 4), "optimizer.state.w.exp_avg": (8, 4),
         "optimizer.state.head.w.exp_avg": (4, 4)},
    ],
)  # fmt: skip
def test_all_weights_stay_whoever_has_an_optimizer(shapes, tmp_path, dst):
    found = convert(put(tmp_path / "src", shapes), dst, weights_only=True)[1]
    assert {*found} == {name for name in shapes if "optimizer" not in name}


@pytest.mark.parametrize("options", [{"rename": (r"^ema\.=avg.",)}, {"names": "torch"}, {}])
def test_what_a_message_says_of_copies_fits_the_names_that_they_get(options, copies, dst):
    options = {"dst_form": "dcp", "exclude": ("adam",), **options}
    with pytest.raises(RankxformError) as caught:
        convert(copies[0], dst, weights_only=True, **options)
    pattern = caught.value.parts.tries[0].split("'")[1]
    report, _ = convert(
        copies[0], dst, weights_only=True, **{**options, "exclude": ("adam", pattern)}
    )
    assert report.parameters == 2
