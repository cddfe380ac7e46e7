"""Names at the destination: renamed, chosen, and never two of one name."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import rankxform
from rankxform.errors import RequestError
from tests import reference, reference_forms
from tests.place import Place

NAMES = ["model.layers.0.w", "model.layers.1.w"]
STATES = [f"adam_m.{name}" for name in NAMES]
PARAMS = dict.fromkeys([*NAMES, *STATES], ((8, 6), "Float32"))
RULES = [r"^model\.=", r"layers\.(\d)=blocks.\1"]
NEW = {name: name.replace("model.layers", "blocks") for name in PARAMS}


def layouts(names, layout):
    return [dict.fromkeys(names, layout)]


@pytest.fixture(params=["ckpt", "safetensors"])
def place(tmp_path, request):
    src, dst = ([4], [0, -1], 0, 0), ([3], [-1, 0], 0, 0)
    return Place(tmp_path, layouts(PARAMS, src), layouts(NEW.values(), dst), PARAMS, request.param)


def right(place, rank, names):
    found = reference.read_any(place.final(rank))
    assert set(found) == {NEW[name] for name in names}
    for name in names:
        full = reference.full_tensor(name, *PARAMS[name])
        want = reference.shard(full, place.dst_stages[0][NEW[name]], rank)
        assert found[NEW[name]][2] == want.tobytes(), name
    return True


def test_parameters_and_their_states_are_renamed(place):
    place.transform(rename=RULES)
    assert all(right(place, rank, PARAMS) for rank in range(3))
    assert place.verify(rename=RULES).same
    assert place.transform(rename=RULES).files_kept == 3
    assert "--rename" in place.manifest["verify"]
    with pytest.raises(rankxform.StorageError, match="rename was"):
        place.transform(rename=[*RULES, "no such name="])


def test_names_are_chosen_as_they_are_afterwards(place):
    report = place.transform(rename=RULES, exclude="^adam_m", include="^blocks.1")
    assert all(right(place, rank, NAMES[1:]) for rank in range(3))
    assert set(report.left_out[0].names) == {NEW[NAMES[0]], *(NEW[s] for s in STATES)}


def test_loading_renames_too(place):
    found = rankxform.load(place.src, place.a, place.b, rank=1, rename=RULES)
    assert set(found) == set(NEW.values())
    full = reference.full_tensor(NAMES[0], *PARAMS[NAMES[0]])
    want = reference.shard(full, place.dst_stages[0][NEW[NAMES[0]]], 1)
    assert np.array_equal(np.asarray(found[NEW[NAMES[0]]]).view("u4"), want.view("u4"))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([r"\.\d\.=.0."], "would both be called 'model.layers.0.w'"),
        (["nonsense"], "expected REGEX=REPLACEMENT"),
        (["(=x"], "missing \\)"),
        ([r"w=\2"], "invalid group reference"),
        ([".*="], "leaves no name"),
        ([r"w=\0"], "leaves a NUL"),
        (["a{99999999999999999999}=x"], "expected a regular expression"),
        (["\udcff=x"], "is not UTF-8"),
    ],
)
def test_what_cannot_be_renamed_is_refused(rules, words, place):
    with pytest.raises(rankxform.RankxformError, match=words) as caught:
        place.transform(rename=rules)
    assert caught.value.exit_code in (2, 3) and not place.dst.exists()


def test_flags_and_named_groups_are_understood(place):
    rules = [r"(?i)^MODEL\.=", r"layers\.(?P<n>\d)=blocks.\g<n>"]
    place.transform(rename=rules)
    assert all(right(place, rank, PARAMS) for rank in range(3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rename": [*RULES, "^modle="]}, "--rename '\\^modle=' renames nothing"),
        ({"rename": [*RULES, "adam_m=exp_avg"]}, "matched without its prefix"),
        ({"rename": RULES, "include": ["blocks", "^blokcs"]}, "--include '\\^blokcs' matches no"),
    ],
)
def test_a_pattern_that_matches_nothing_is_a_warning(options, words, place):
    with pytest.warns(rankxform.RankxformWarning, match=words):
        report = place.transform(**options)
    assert len(report.warnings) == 1 and not report.notices


def test_an_exclusion_that_matches_nothing_is_noticed(place):
    notice = "--exclude 'nothing' matches no parameter"
    assert rankxform.plan(place.src, place.a, place.b, rename=RULES, exclude="nothing").notices == (
        notice,
    )


def test_faults_of_the_source_are_reported_under_its_own_names(place):
    params = {**PARAMS, NAMES[0]: ((8, 6), "Float16")}
    src = [dict.fromkeys(PARAMS, ([4], [0, -1], 0, 0))]
    reference.write_checkpoint(place.tmp / "other", src, params, kind=place.kind)
    shutil.copy(place.tmp / "other" / place.shard(1).relative_to(place.src), place.shard(1))
    with pytest.raises(rankxform.CheckpointError, match=f"'{NAMES[0]}' is Float16"):
        place.transform(rename=RULES)


def test_an_unlisted_state_follows_its_parameter_under_its_new_name(tmp_path):
    """Only the parameter is listed: the state is sharded like it on both sides, renamed."""
    params = {"a": ((8, 4), "Float32"), "adam_m.a": ((8, 4), "Float32")}
    place = Place(
        tmp_path, [{n: ([4], [0, -1], 0, 0) for n in params}], [{"b": ([2], [0, -1], 0, 0)}], params
    )
    reference.write_strategy(place.a, [{"a": ([4], [0, -1], 0, 0)}])
    place.transform(rename="a$=b", exclude="nothing")
    for rank in range(2):
        found = reference.read_any(place.final(rank))
        assert {name: shape for name, (_, shape, _) in found.items()} == {
            "b": (4, 4), "adam_m.b": (4, 4),
        }  # fmt: skip


def test_marks_of_types_follow_their_tensors(tmp_path):
    """safetensors marks Int4 by a text under the tensor's name; two tensors swap names here."""
    entries = {
        "a": ("Int4", reference.full_tensor("a", (4,), "Int4")),
        "b": ("Int8", reference.full_tensor("b", (4,), "Int8")),
    }
    reference.write_safetensors(tmp_path / "src/rank_0/c.safetensors", entries, {"a": "Int4"})
    names = ("^a$=c", "^b$=a", "^c$=b")
    rankxform.transform(tmp_path / "src", tmp_path / "dst", rename=names)
    found = rankxform.inspect(tmp_path / "dst/rank_0/checkpoint_0.safetensors")
    assert found["metadata"] == {"format": "ms", "b": "Int4"}
    assert {p["name"]: p["dtype"] for p in found["entries"]} == {"a": "Int8", "b": "Int4"}


def test_a_pattern_for_the_source_means_its_own_names(tmp_path):
    layout = ([4], [0, -1], 0, 0)
    params = {"model.w": ((8, 6), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", [{"model.w": layout}], params)
    renames = {"rename": r"^model\.="}
    with pytest.raises(rankxform.StrategyError, match="no parameter of the checkpoint"):
        rankxform.transform(src, tmp_path / "dst", "shard:^w$=0@4", **renames)
    rankxform.transform(src, tmp_path / "dst", "shard:^model=0@4", "shard:^w$=1@2", **renames)
    found = rankxform.inspect(tmp_path / "dst/rank_1/checkpoint_1.ckpt")["entries"]
    assert [(one["name"], one["shape"]) for one in found] == [("w", [8, 3])]


def test_moments_that_are_codes_are_not_renamed_by_halves(tmp_path):
    """8-bit optimizers keep codes and their scales: under MindSpore's names they would be numbers."""
    tensors = {"w": ("Float32", np.ones((4, 4), "<u4"))}
    for kind in ("exp_avg", "exp_avg_sq"):
        tensors[f"optimizer.state.w.{kind}"] = "Int8", np.ones((4, 4), "u1")
        tensors[f"optimizer.state.w.{kind}_scale"] = "Float32", np.ones(4, "<u4")
    reference_forms.write_huggingface(tmp_path / "src", tensors)
    options = {"dst_form": "huggingface", "fsync": False}
    with pytest.raises(RequestError, match="is Int8, and MindSpore's adam_m holds numbers"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", names="mindspore", **options)
    options |= {"names": "mindspore", "weights_only": True}
    rankxform.transform(tmp_path / "src", tmp_path / "dst", **options)
    (path,) = (tmp_path / "dst").glob("*.safetensors")
    assert [*reference.read_safetensors(path)] == ["w"]
