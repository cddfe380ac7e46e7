"""Which states a destination gets where its strategy lists some, or none."""

from __future__ import annotations

import pytest

import rankxform
from rankxform.planning.selection import unusual_tensors
from tests import reference, reference_forms

SHAPES = {"w": (16, 8), "v": (16, 8), "norm": (8,)}
MUON = ("w", "v", "norm", "muon_m.w", "muon_m.v", "adam_m.norm", "adam_v.norm")
GRAPH = ("w", "v", "norm", "adam_m.norm", "adam_v.norm")


def layouts(ranks, names):
    """Return a strategy of one stage that shards matrices, and their states, by rows."""
    return [
        {
            name: ([ranks], [0, -1] if len(SHAPES[name.rpartition(".")[2]]) > 1 else [-1], 0, 0)
            for name in names
        }
    ]


def converted(tmp_path, listed, form="checkpoint2", **options):
    """Convert a checkpoint with Muon's states for a strategy that lists some names.

    A Checkpoint 2.0 lists them itself; of rank folders neither strategy does.
    """
    params, src, a = (
        {n: (SHAPES[n.rpartition(".")[2]], "Float32") for n in MUON},
        tmp_path / "src",
        None,
    )
    if form == "checkpoint2":
        reference_forms.write_checkpoint2(src, layouts(2, MUON), params, {})
    else:
        reference.write_checkpoint(src, layouts(2, MUON), params, kind="safetensors")
        a = reference.write_strategy(tmp_path / "a.ckpt", layouts(2, GRAPH))
    b = reference.write_strategy(tmp_path / "b.ckpt", layouts(4, listed))
    report = rankxform.transform(src, tmp_path / "dst", a, b, fsync=False, **options)
    path = next((tmp_path / "dst").glob("rank_3/*.safetensors"))
    return report, {n: s for n, (_, s, _) in reference.read_safetensors(path).items()}


@pytest.mark.parametrize("form", ["checkpoint2", "ranks"])
def test_a_family_that_compilers_do_not_list_follows_its_parameters(form, tmp_path):
    report, shapes = converted(tmp_path, GRAPH, form)
    assert shapes["muon_m.w"] == shapes["w"] == (4, 8)
    assert {*MUON} <= {*shapes} and report.warnings == ()


@pytest.mark.parametrize(
    "listed",
    [
        (*GRAPH, "muon_m.w"),  # v is frozen
        (*GRAPH, *(f"{state}.{n}" for state in ("adam_m", "adam_v") for n in "wv")),  # AdamW
    ],
)
def test_a_family_that_is_listed_follows_its_list(tmp_path, listed):
    _, shapes = converted(tmp_path, listed)
    states = {name for name in MUON if name.startswith("muon_m")} & {*shapes}
    assert states == {name for name in listed if name.startswith("muon_m")}


def test_weights_alone(tmp_path):
    report, shapes = converted(tmp_path, GRAPH, weights_only=True)
    assert {*shapes} == {*SHAPES} and report.warnings == ()


def test_a_strategy_without_states(tmp_path):
    with pytest.warns(rankxform.RankxformWarning, match=r"muon_m\.\w, muon_m\.\w: left out"):
        _, shapes = converted(tmp_path, tuple(SHAPES))
    assert not any("." in name for name in shapes)


@pytest.mark.parametrize(
    ("prefix", "rule"),
    [
        ("module.module.", r"'^module\.module\.='"),
        ("module._orig_mod.", r"'^module\._orig_mod\.='"),
        ("_forward_module.", r"'^_forward_module\.='"),
        ("_orig_mod.", r"'_orig_mod\.='"),
    ],
)
def test_wrappers_are_taken_away_by_one_option(prefix, rule):
    shapes = {f"{prefix}layers.{n}.w": (4, 4) for n in range(3)}
    (text,) = unusual_tensors(shapes, [*shapes])
    assert text.endswith(f"--rename {rule}")
