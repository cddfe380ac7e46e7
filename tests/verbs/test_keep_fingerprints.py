"""`verify SRC DST --keep-fingerprints`: DST can be verified without SRC, and only if it was right."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.errors import StorageError, UsageError
from rankxform.publish.lock import FolderLock
from rankxform.verbs import keep_fingerprints
from tests import reference
from tests.local_world import run_world
from tests.place import Place

PARAMS = {
    "w": ((16 << 10, 1024), "Float32"),  # 64 MiB: of which 64 blocks are samples
    "b": ((12,), "BFloat16"),
    "s": ((), "Float64"),
}
SRC = [{"w": ([4], [0, -1], 0, 0), "b": ([4], [0], 0, 0), "s": ([4], [], 0, 0)}]
DST = [{"w": ([2], [-1, 0], 0, 0), "b": ([2], [-1], 0, 0), "s": ([2], [], 0, 0)}]
FORMS = {
    "ranks": {},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpoint2": {"dst_form": "checkpoint2", "iteration": 7},
    "hyperparallel": {"dst_form": "hyperparallel"},
    "dcp": {"dst_form": "dcp"},
    "huggingface": {"dst_form": "huggingface", "max_shard": 40_000_000},
}


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, SRC, DST, PARAMS, "safetensors")


def converted(place, options):
    """Convert without fingerprints; return the arguments of both verbs, and the manifest."""
    whole = options.get("dst_form") == "huggingface"
    places = place.src, place.dst, place.a, None if whole else place.b
    rankxform.transform(*places, fsync=False, **options)
    (manifest,) = place.dst.rglob("rankxform.json")
    return places, manifest


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_byte_outside_samples_is_found_without_the_source(form, processes, place):
    places, manifest = converted(place, FORMS[form])
    assert rankxform.verify(place.dst).same is None
    options = {**FORMS[form], "keep_fingerprints": True, "progress": False}
    verdicts = run_world(processes, lambda c: rankxform.verify(*places, comm=c, **options))
    assert all(verdict.same and verdict.fingerprints_kept for verdict in verdicts)
    assert not [*place.dst.rglob(".rankxform")]
    later = rankxform.verify(place.dst)
    assert (later.same, later.checked) == (True, "fingerprints")
    listed = json.loads(manifest.read_text())["files"]
    name = max(listed, key=lambda n: listed[n]["size"])
    with open(manifest.parent / name, "r+b") as file:
        file.seek(listed[name]["size"] // 2 + 300_000)
        file.write(b"\1\2\3")
    (difference,) = rankxform.verify(place.dst).differences
    assert difference.file == str(manifest.parent / name)


def test_they_are_those_of_a_verified_conversion(place):
    places, manifest = converted(place, {"verify": True})
    was = manifest.read_bytes()
    assert rankxform.verify(*places, keep_fingerprints=True).same
    assert json.loads(manifest.read_bytes()) == {**json.loads(was), "stale": {}}


def test_a_conversion_compares_files_that_were_touched_since(place):
    """It took a damaged one for complete, by its samples."""
    places, _ = converted(place, {})
    assert rankxform.verify(*places, keep_fingerprints=True).same
    place.final(0).touch()
    assert rankxform.transform(*places, fsync=False).files_compared == 1
    assert rankxform.transform(*places, fsync=False, verify=True).files_compared == 2
    with open(place.final(1), "r+b") as file:
        file.seek(20_300_000)
        file.write(b"\1\2\3")
    for options in ({}, {"verify": True}):
        with pytest.raises(StorageError, match="was changed after it was written"):
            rankxform.transform(*places, fsync=False, **options)


def test_what_is_repaired_has_its_fingerprint_again(place):
    places, _ = converted(place, {})
    assert rankxform.verify(*places, keep_fingerprints=True).same
    with open(place.final(1), "r+b") as file:
        file.seek(20_300_000)
        file.write(b"\1\2\3")
    repair = rankxform.verify(place.dst).repair
    remove, command = repair.split(" && ")
    subprocess.run(shlex.split(remove), check=True)
    assert main(shlex.split(command)[1:]) == 0
    assert rankxform.verify(place.dst).same


def test_nothing_is_kept_of_what_differs(place):
    places, manifest = converted(place, {})
    was = manifest.read_bytes()
    with open(place.final(1), "r+b") as file:
        file.seek(20_300_000)
        file.write(b"\1\2\3")
    verdict = rankxform.verify(*places, keep_fingerprints=True)
    assert (verdict.same, verdict.fingerprints_kept) == (False, False)
    assert manifest.read_bytes() == was


def refused(places, kind, match, **options):
    with pytest.raises(kind, match=match):
        rankxform.verify(*places, keep_fingerprints=True, **options)


def test_what_another_tool_wrote_has_no_manifest(place):
    places, manifest = converted(place, {})
    manifest.unlink()
    refused(places, UsageError, "there is no manifest")


def test_a_file_has_to_be_listed(place):
    places, manifest = converted(place, {})
    document = json.loads(manifest.read_bytes())
    del document["files"]["rank_1/checkpoint_1.safetensors"]
    manifest.write_text(json.dumps(document))
    refused(places, UsageError, "does not list rank_1/checkpoint_1.safetensors")
    assert rankxform.verify(*places).same


def test_slices_that_the_manifest_states_otherwise(place):
    """The bytes are the same, and the manifest's types are of another destination."""
    places, manifest = converted(place, {})
    text = manifest.read_text()
    manifest.write_text(text.replace('["BFloat16",[12]', '["Float16",[12]'))
    assert manifest.read_text() != text
    refused(places, UsageError, "states other slices of rank_0/checkpoint_0.safetensors")


def test_both_sides_were_changed_alike(place):
    """What SRC makes now is in DST; the manifest's sample is of what was written."""
    places, manifest = converted(place, {})
    document = json.loads(manifest.read_bytes())
    document["files"]["rank_1/checkpoint_1.safetensors"]["sample"] = 32 * "0"
    manifest.write_text(json.dumps(document))
    refused(places, StorageError, "is what SRC makes, and not what was written")


def test_a_run_at_work(place):
    places, _ = converted(place, {})
    lock = FolderLock(place.dst / ".rankxform/lock")
    refused(places, StorageError, "works on this folder")
    lock.release()
    assert rankxform.verify(*places, keep_fingerprints=True).same


def test_a_manifest_that_changes_meanwhile(place, monkeypatch):
    places, manifest = converted(place, {})
    contents_of = keep_fingerprints.FingerprintedDestination.fill

    def fill(*arguments):
        document = json.loads(manifest.read_bytes())
        manifest.write_text(json.dumps({**document, "later": {"another": 1}}))
        return contents_of(*arguments)

    monkeypatch.setattr(keep_fingerprints.FingerprintedDestination, "fill", fill)
    refused(places, StorageError, "was changed meanwhile; nothing is kept")
    assert "digest" not in manifest.read_text()
    assert not (place.dst / ".rankxform").exists()
    assert reference.wrong_slices(place.dst, DST, PARAMS, "safetensors") == []
