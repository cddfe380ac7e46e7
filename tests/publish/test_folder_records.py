"""What becomes of earlier runs' work in a folder: decisions by records alone, as tables."""

from __future__ import annotations

import pytest

from rankxform.publish.folder_records import decide_earlier, files_to_make, with_recorded_sources
from rankxform.statements import FILE_IDENTITY, UNFIT


def identity(cast=None, *, sample="x", ranks=(0,), command=("rankxform", "transform")):
    """Of a conversion of some source files, with an option and the command that continues it."""
    files = {str(r): {"file": f"{r}.ckpt", "size": 8, "modified": 1, "sample": sample}
             for r in ranks}  # fmt: skip
    return {"options": {"dtype": cast}, "source files": files, "continued_by": [*command]}


def job(*arguments, **options):
    files = {"rank_0/a": {"id": 0, "inode": 7}, "rank_1/a": {"id": 1}}
    return {"identity": identity(*arguments, **options), "files": files, "stale": {"old": {}}}


def manifest(*arguments, **options):
    return {
        "identity": identity(*arguments, **options), "files": {"rank_0/a": {"id": 0}},
        "copied": ["c.json"], "beside": {"c.json": "e"},
    }  # fmt: skip


OTHER = "Float16"
DECISIONS = {  # job, manifest, --overwrite -> whether each stays, what is removed, or why not
    "an empty folder": (None, None, False, (False, False, False, None)),
    "a stopped run": (job(), None, False, (True, False, False, None)),
    "one of another conversion": (job(OTHER), None, False, UNFIT),
    "one of other source files": (job(sample="y"), None, False, FILE_IDENTITY),
    "that one, overwritten": (job(OTHER), None, True, (False, False, True, None)),
    "a complete run": (None, manifest(), False, (False, True, False, None)),
    "another complete run": (None, manifest(OTHER), False, UNFIT),
    "that one, overwritten too": (None, manifest(OTHER), True, (False, False, False, None)),
    "a run that had begun to replace it": (job(), manifest(OTHER), False, (True, False, False, None)),
    "a run that adds to it": (job(), manifest(), False, (True, True, False, None)),
    "another run's work beside it": (job(OTHER), manifest(), False, UNFIT),
    "another run's work beside it, overwritten": (
        job(OTHER), manifest(), True, (False, True, True, None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DECISIONS)
def test_what_becomes_of_earlier_work(case):
    stopped, complete, overwrite, expected = DECISIONS[case]
    earlier = decide_earlier(stopped, complete, identity(), overwrite=overwrite, folder="/dst")
    if isinstance(expected, str):
        assert earlier.refusal is not None
        assert (earlier.refusal.id, earlier.refusal.message.where) == (expected, "/dst")
        return
    stays = earlier.job is not None, earlier.manifest is not None
    assert (*stays, earlier.discarded is not None, earlier.refusal) == expected
    named = {"rank_0/a"} if earlier.discarded else set()  # only these are files that readers see
    assert {*earlier.stale} == ({"old"} if stopped else set()) | named
    assert earlier.copied == ({"c.json": "e"} if complete else {})


@pytest.mark.parametrize("record", [job, manifest])
def test_source_files_of_other_ranks_stay_in_the_identity(record):
    earlier = {"job": None, "manifest": None, record.__name__: record(ranks=(0, 3))}
    known = decide_earlier(**earlier, identity=identity(), overwrite=False, folder="/dst")
    new = with_recorded_sources(identity(sample="z"), known)
    assert {*new["source files"]} == {"0", "3"}
    assert new["source files"]["0"]["sample"] == "z"  # what this run reads itself


@pytest.mark.parametrize(("ranks", "command"), [("4", ["transform", "--ranks", "4"]), ("2", [])])
def test_no_command_continues_runs_of_other_ranks(ranks, command):
    stopped = job(command=["transform", "--ranks", ranks])
    mine = identity(command=["transform", "--ranks", "4"])
    known = decide_earlier(stopped, None, mine, overwrite=False, folder="/dst")
    assert with_recorded_sources(mine, known)["continued_by"] == command


NAMES = {0: "rank_0/a", 1: "rank_1/a"}
FILES = {  # what a job notes, which files are complete -> what it notes then, parts that go
    "begun anew": ({}, (), {"rank_0/a": {"id": 0}, "rank_1/a": {"id": 1}}, []),
    "complete by its own note": (
        {"rank_0/a": {"id": 0, "inode": 7}}, (0,),
        {"rank_0/a": {"id": 0, "inode": 7}, "rank_1/a": {"id": 1}}, [],
    ),
    "complete by the manifest, and begun": (
        {"rank_0/a": {"id": 0}}, (0,), {"rank_1/a": {"id": 1}}, ["rank_0/a"]
    ),
    "complete by the manifest": ({}, (0, 1), {}, []),
    "of other ranks": ({"rank_9/a": {"id": 9}}, (0, 1), {"rank_9/a": {"id": 9}}, []),
    "noted, and gone": (
        {"rank_0/a": {"id": 0, "inode": 7}}, (1,), {"rank_0/a": {"id": 0}}, []
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_which_files_are_made(case):
    job_files, complete, noted, dropped = FILES[case]
    assert files_to_make(NAMES, job_files, complete) == (noted, dropped)
