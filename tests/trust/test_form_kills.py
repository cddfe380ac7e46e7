"""Killed at any call, a destination of any form is never believed to be what it is not."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.publish import journal
from tests import reference, reference_forms
from tests.cases import Case
from tests.mpi_launch import environment, mpirun, own_tmp, run
from tests.trust.test_faults import READING, WRITING, Injector
from tests.trust.test_kills import ROOT, clear_away

NAMES = ["embedding.weight", *(f"layers.{i}.w" for i in range(3))]
PARAMS = dict.fromkeys((*NAMES, *(f"adam_m.{n}" for n in NAMES)), ((8, 6), "Float32"))
SRC = [{n: ([4], [0, -1], 0, 0) for n in PARAMS}]
DST = [{n: ([2], [-1, 0], 0, 0) for n in PARAMS}]
CASE = Case(PARAMS, SRC, DST, {"global_step": ("Int32", np.array([7], "<i4"))})
FORMS = {
    "huggingface": {"max_shard": 600},
    "unified": {"max_part": 900},
    "checkpoint2": {"dedup": True},
    "dcp": {"max_part": 900},
    "hyperparallel": {"max_part": 900},
}
INDEXES = (
    "model.safetensors.index.json", "param_name_map.json", "metadata.json", ".metadata",
)  # fmt: skip
OTHERS = {  # another conversion into the same folder, whose files have other names or contents
    "huggingface": {"max_shard": 400},
    "unified": {"max_part": 500},
    "checkpoint2": {"dedup": False},
    "dcp": {"max_part": 500},
    "hyperparallel": {"max_part": 500},
}


def complete(folder, form):
    """Return the tensors that a reader finds; None if nothing says that the folder is complete."""
    marks = {
        "huggingface": "model.safetensors.index.json",
        "unified": "param_name_map.json",
        "checkpoint2": "latest_checkpointed_iteration.txt",
        "dcp": ".metadata",
        "hyperparallel": "latest_checkpoint_iteration.txt",
    }
    if not (folder / marks[form]).exists():
        return None
    return reference_forms.wrong_in(form, folder, CASE)


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name != "rankxform.json"
    }


class FormPlace:
    def __init__(self, tmp, form, before):
        self.tmp, self.form = tmp, form
        self.src = reference.write_checkpoint(tmp / "src", SRC, PARAMS, CASE.extras, "safetensors")
        self.a, self.b = (
            reference.write_strategy(tmp / f"{side}.ckpt", stages)
            for side, stages in (("a", SRC), ("b", DST))
        )
        self.begin = self.convert_old if before else lambda dst: None
        self.convert(tmp / "whole")
        self.whole = files(tmp / "whole")
        assert complete(tmp / "whole", form) == []

    def convert(self, dst, **more):
        to = self.b if self.form == "checkpoint2" else None
        options = {**FORMS[self.form], "overwrite": True, **more}
        rankxform.transform(self.src, dst, self.a, to, dst_form=self.form, **options)

    def convert_old(self, dst):
        self.convert(dst, **OTHERS[self.form])


@pytest.mark.parametrize("form", FORMS)
def test_an_index_of_somebody_elses_files_is_not_replaced(form, tmp_path):
    place = FormPlace(tmp_path, form, before=False)
    names = {
        "huggingface": "model.safetensors.index.json",
        "unified": "param_name_map.json",
        "checkpoint2": "iteration_00000007/metadata.json",
        "dcp": ".metadata",
        "hyperparallel": "global_step_7/.metadata",
    }
    index = tmp_path / "dst" / names[form]
    index.parent.mkdir(parents=True)
    index.write_text(json.dumps({"weight_map": {"w": "other.safetensors"}}))
    with pytest.raises(rankxform.StorageError, match=r"already there.*--overwrite"):
        place.convert(tmp_path / "dst", overwrite=False)
    assert "other" in index.read_text()
    place.convert(tmp_path / "dst")
    assert complete(tmp_path / "dst", form) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_second_run_writes_nothing(form, tmp_path):
    place = FormPlace(tmp_path, form, before=False)
    every = [*(tmp_path / "whole").rglob("*.safetensors"), *(tmp_path / "whole").rglob("*.distcp")]
    before = {path: path.stat().st_mtime_ns for path in every}
    to = place.b if form == "checkpoint2" else None
    done = rankxform.transform(
        place.src, tmp_path / "whole", place.a, to, dst_form=form, **FORMS[form]
    )
    assert done.files_kept == len(done.files) == len(before)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    with pytest.raises(rankxform.StorageError, match="--overwrite"):
        rankxform.transform(place.src, tmp_path / "whole", place.a, to, dst_form=form,
                            **OTHERS[form])  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_was_changed_is_found(form, tmp_path):
    """`verify DST` knows the companion files; so does a comparison with the source."""
    place = FormPlace(tmp_path, form, before=False)
    dst = tmp_path / "whole"
    (index,) = (path for path in dst.rglob("*") if path.name in INDEXES)
    own = place.b if form == "checkpoint2" else None
    assert rankxform.verify(place.src, dst, place.a, own).same
    text = index.read_bytes()
    index.write_bytes(text.replace(b"embedding.weight", b"embedding.other_"))
    assert rankxform.verify(dst).same is False
    assert rankxform.verify(place.src, dst, place.a, own).same is False
    index.write_bytes(text)
    assert rankxform.verify(dst).same is not False
    index.unlink()
    below = form in ("checkpoint2", "hyperparallel")
    assert rankxform.verify(index.parent if below else dst).same is False


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("names", "how"),
    [(WRITING, errno.EIO), (WRITING, errno.ENOSPC), (READING, errno.EIO), (READING, "short")],
    ids=["write-EIO", "write-ENOSPC", "read-EIO", "read-short"],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_refused(form, names, how, tmp_path, monkeypatch):
    """Every ninth call goes wrong: an error or success, and a second run ends well."""
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
    place = FormPlace(tmp_path, form, before=False)
    with monkeypatch.context() as patch:
        calls = Injector(patch, names, 0, how)
        place.convert(tmp_path / "count")
    for at in range(1 + random.Random(form).randrange(9), calls.calls + 1, 9):
        dst = tmp_path / f"dst{at}"
        with monkeypatch.context() as patch:
            injector = Injector(patch, names, at, how)
            try:
                place.convert(dst)
            except rankxform.RankxformError as error:
                assert how != "short" and os.strerror(how) in str(error)
            else:  # what could not be removed of the lock goes with the next run
                own = {n: data for n, data in files(dst).items() if ".rankxform" not in n}
                assert own == place.whole
        assert injector.hit and complete(dst, form) in (None, []), at
        place.convert(dst)
        assert files(dst) == place.whole, at


KILLS = int(os.environ.get("RANKXFORM_FORM_KILLS", "1"))


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_random_kills_under_mpirun(form, tmp_path):
    place, rng = FormPlace(tmp_path, form, before=False), random.Random(form)
    to = ["--dst-strategy", place.b] if form == "checkpoint2" else []
    (option, value), *_ = FORMS[form].items()
    own = [f"--{option.replace('_', '-')}", *([] if value is True else [value])]

    def command(processes, dst, **settings):
        line = [
            *mpirun(processes), sys.executable, "-m", "tests.trust.victim", "transform", place.src,
            dst, "--src-strategy", place.a, *to, "--dst-form", form, *own, "--overwrite",
        ]  # fmt: skip
        with own_tmp() as tmp:
            env = environment(**{n: str(v) for n, v in settings.items()}, TMPDIR=tmp)
            return run([str(word) for word in line], 60, env=env, cwd=ROOT)

    calls = {}
    for processes in (2, 3):
        counts = tmp_path / f"counts{processes}"
        counts.mkdir()
        code, output = command(processes, tmp_path / f"n{processes}", VICTIM_COUNTS=counts)
        assert code == 0, output
        calls[processes] = [int((counts / str(p)).read_text()) for p in range(processes)]
    for kill in range(KILLS):
        dst, mark = tmp_path / f"dst{kill}", f"{os.getpid()}-{form}-{kill}"
        processes = rng.choice((2, 3))
        process = rng.randrange(processes)
        at, whom = rng.randint(1, calls[processes][process]), rng.choice(("one", "all"))
        command(
            processes, dst, VICTIM_ID=mark, VICTIM_PROCESS=process, VICTIM_CALL=at, VICTIM_WHOM=whom
        )
        clear_away(f"VICTIM_ID={mark}".encode())
        assert complete(dst, form) in (None, []), (processes, process, at)
        code, output = command(5 - processes, dst, VICTIM_ID="x", VICTIM_CALL=0, VICTIM_WHOM="")
        assert code == 0, output
        assert files(dst) == place.whole, (processes, process, at)
