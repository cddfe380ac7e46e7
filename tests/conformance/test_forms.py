"""What every form of checkpoint keeps to, written once.

A form passes by a subclass of `ReadFormTests`, which names samples that the framework itself wrote,
and one of `WrittenFormTests`, which says how a destination of it is known. What is of one form alone
stands in tests/checkpoints.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import sys
import warnings
from itertools import count, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import rankxform
from rankxform.checkpoints import base
from rankxform.checkpoints.base import FORMS
from rankxform.display.text import as_text, format_size
from rankxform.errors import RankxformError
from rankxform.options import flag_of
from rankxform.publish import journal
from rankxform.source.place import listing_at
from rankxform.storage.store import store_at
from tests import reference, reference_forms, reference_megatron, reference_torch
from tests.cases import Case, random_case
from tests.checkpoints import COUNTERS, DATA
from tests.mpi_launch import environment, mpirun, own_tmp, run, world
from tests.place import contents
from tests.toy_forms import CASE as TOY_CASE
from tests.toy_forms import FlatFolder, Tiles, registered, write_tiles
from tests.trust.test_crashes import STEP, Crashes
from tests.trust.test_faults import READING, WRITING, Injector
from tests.trust.test_kills import ROOT, clear_away

MUTATIONS = int(os.environ.get("RANKXFORM_MUTATIONS", "300")) // 3
"""Of what describes a checkpoint, for each form."""
SUFFIXES = (".safetensors", ".distcp", ".ckpt", ".bin")
MEGATRONS = "llama", "qwen2_tied", "qwen3", "qwen3_moe", "mixtral"
"""Models of tests/data/formats/megatron that were saved in both of its forms."""
RANDOM_MASTERS = "ignore:optimizer[^/]*do not round"
"""What is said of samples whose values are random."""


class ReadFormTests:
    """Laws of a form as a source."""

    form: ClassVar[str]
    samples: ClassVar[tuple[str, ...]]  # below tests/data/formats, written by the framework
    index: ClassVar[str] = ""  # the file that says where tensors are; "": headers of files do
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES  # of its files with tensors

    def pytest_generate_tests(self, metafunc):
        if "sample" in metafunc.fixturenames:
            metafunc.parametrize("sample", self.samples)

    def folder(self, sample, tmp):
        """Return a copy of a sample, which may be damaged."""
        copy = tmp / "src"
        shutil.copytree(DATA / sample, copy)
        return copy

    def tensors(self, sample):
        """Return what a sample holds, {name: (type, words)}, but for counters."""
        own = (DATA / sample).parent / "expected.safetensors"
        path = own if own.exists() else DATA / "expected_full.safetensors"
        return reference_forms.tensors_in(path)

    def is_whole(self, found, sample):
        """Return whether arrays by name are the tensors of a sample."""
        arrays = {n: np.asarray(a) for n, a in found.items() if n not in COUNTERS}
        wanted = {n: (w.shape, w.tobytes()) for n, (_, w) in self.tensors(sample).items()}
        return {n: (a.shape, a.tobytes()) for n, a in arrays.items()} == wanted

    def test_samples_are_recognized(self, sample, tmp_path):
        found = rankxform.inspect(self.folder(sample, tmp_path))
        assert (found["kind"], found["form"], found["faults"]) == ("described", self.form, [])
        assert as_text(found)

    def test_it_recognizes_no_folder_without_one_of_its_marks(self, tmp_path):
        """By marks alone it is decided whether the form's module is imported."""
        folders = [path for path in (DATA, *DATA.rglob("*")) if path.is_dir()]
        for folder in [*folders, self.folder(self.samples[0], tmp_path)]:
            where = base.CheckpointRef(str(folder))
            listing = listing_at(str(folder), FORMS[self.form], where)
            if FORMS[self.form].recognizes(listing, store_at(str(folder))):
                assert base._may_be(self.form, {*listing.entries, *listing.files}), folder

    @pytest.mark.filterwarnings(RANDOM_MASTERS)
    def test_samples_become_whole_tensors(self, sample, tmp_path):
        src, dst = self.folder(sample, tmp_path), tmp_path / "dst"
        rankxform.transform(src, dst, dst_form="huggingface", max_shard=3000, exclude=[*COUNTERS])
        wanted = self.tensors(sample)
        assert reference_forms.wrong_tensors("huggingface", dst, wanted) == []
        assert rankxform.verify(src, dst, exclude=[*COUNTERS]).same

    @pytest.mark.filterwarnings(RANDOM_MASTERS)
    @pytest.mark.slow
    @pytest.mark.sampled
    @pytest.mark.world(sizes=(2, 3, 5))
    def test_several_processes_read_the_same(self, sample, tmp):
        if world().rank == 0:
            self.folder(sample, tmp)
        world().Barrier()
        options = {"dst_form": "huggingface", "exclude": [*COUNTERS], "fsync": False}
        rankxform.transform(tmp / "src", tmp / "dst", comm=world(), **options)
        wanted = self.tensors(sample)
        assert reference_forms.wrong_tensors("huggingface", tmp / "dst", wanted) == []

    @pytest.mark.filterwarnings(RANDOM_MASTERS)
    @pytest.mark.parametrize("damage", ["lost", "cut off"])
    def test_a_file_that_is_lost_or_cut_off_is_named(self, damage, tmp_path):
        """If copies of all that it holds are elsewhere, they are read instead."""
        sample = self.samples[0]
        src = self.folder(sample, tmp_path)
        paths = sorted(path for path in src.rglob("*") if path.suffix in self.suffixes)
        if damage == "lost" and not self.index:
            paths = paths[:-1]  # nothing says that there was one more
        for path in paths:
            data = path.read_bytes()
            if path.suffix == ".safetensors" and {*reference.read_safetensors(path)} <= COUNTERS:
                continue  # no tensor is lost
            path.unlink()
            if damage == "cut off":
                path.write_bytes(data[:-1])
            try:
                found = rankxform.load(src)
            except RankxformError as error:
                # Where no index lists files, it is the tensors that lack elements.
                assert path.name in str(error) or (not self.index and "boxes cover" in str(error))
            else:
                assert self.is_whole(found, sample), path
                assert any(path.name in text for text in found.notices)
            path.write_bytes(data)
        assert self.is_whole(rankxform.load(src), sample)

    def test_a_change_of_what_describes_it_raises_no_other_error(self, tmp_path):
        """It is refused, or read; an error of ours would be called a bug."""
        rng = random.Random(self.form)
        src = self.folder(self.samples[0], tmp_path)
        paths = [path for path in src.rglob("*") if path.suffix in self.suffixes]
        path = min([*src.rglob(Path(self.index).name)] if self.index else paths)
        good = path.read_bytes()
        refused = 0
        for _ in range(MUTATIONS):
            path.write_bytes(mutated(good, rng))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    rankxform.load(src, check_crc=True)
            except RankxformError as error:
                refused += 1
                assert "bug" not in str(error)
        assert refused > MUTATIONS / 4


def mutated(data, rng):
    """Return bytes of which a few were changed, taken away or put in, in the first 4 KiB."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(len(data), 4096))
        how = rng.randrange(4)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at] = rng.randrange(256)
        elif how == 2:
            del data[at : at + rng.randint(1, 9)]
        else:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
    return bytes(data)


# -- destinations -------------------------------------------------------------------------------

NAMES = ["embedding.weight", *(f"layers.{i}.w" for i in range(3))]
PARAMS = dict.fromkeys((*NAMES, *(f"adam_m.{n}" for n in NAMES)), ((8, 6), "Float32"))
CASE = Case(
    PARAMS,
    [{n: ([4], [0, -1], 0, 0) for n in PARAMS}],
    [{n: ([2], [-1, 0], 0, 0) for n in PARAMS}],
    {"global_step": ("Int32", np.array([7], "<i4"))},
)


class FormPlace:
    """A source of 4 ranks in a folder, and its conversion into a form, empty folder or not."""

    def __init__(self, tmp, suite, is_over_another=False):
        self.tmp, self.suite = tmp, suite
        self.src = reference.write_checkpoint(
            tmp / "src", CASE.src, PARAMS, CASE.extras, "safetensors"
        )
        self.a, self.b = (
            reference.write_strategy(tmp / f"{side}.ckpt", stages)
            for side, stages in (("a", CASE.src), ("b", CASE.dst))
        )
        self.to = self.b if suite.is_sharded else None
        self.begin = self.convert_otherwise if is_over_another else lambda dst: None
        self.convert(tmp / "whole")
        self.whole = contents(tmp / "whole")
        assert suite.complete(tmp / "whole") == []

    def convert(self, dst, comm=None, **options):
        settings = {**self.suite.options, "overwrite": True, "comm": comm, **options}
        form = self.suite.form
        return rankxform.transform(self.src, dst, self.a, self.to, dst_form=form, **settings)

    def convert_otherwise(self, dst, **options):
        return self.convert(dst, **self.suite.otherwise, **options)

    def check_unfinished(self, dst):
        assert self.suite.complete(dst) in (None, [])

    def check_finished(self, dst):
        assert contents(dst) == self.whole


class WrittenFormTests:
    """Laws of a form as a destination."""

    form: ClassVar[str]
    # Of a conversion into several files, and of another one whose files have other names or contents.
    options: ClassVar[dict] = {}
    otherwise: ClassVar[dict] = {}
    mark: ClassVar[str]  # the file by which readers know that a folder is complete
    index: ClassVar[str] = ""  # the file that says where tensors are
    renamed: ClassVar[tuple[bytes, bytes]] = (b"embedding.weight", b"embedding.other_")  # in it
    is_sharded: ClassVar[bool] = False  # it has to be told how ranks shard

    @pytest.fixture
    def place(self, tmp_path):
        return FormPlace(tmp_path, self)

    def wrong(self, folder, case, lost=(), more=()):
        """Return what is wrong in a destination, as `reference_forms.wrong_in`."""
        return reference_forms.wrong_in(self.form, folder, case, lost, more)

    def complete(self, folder):
        """Return what is wrong for a reader; None if nothing says that the folder is complete."""
        return self.wrong(folder, CASE) if (folder / self.mark).exists() else None

    @pytest.mark.slow
    @pytest.mark.sampled
    @pytest.mark.world(sizes=(1, 3))
    @pytest.mark.parametrize("src", reference_forms.FORMS)
    def test_every_form_becomes_it(self, src, tmp):
        for seed, case in some_models(f"{src} {self.form}"):
            converted(src, self, seed, case, tmp / str(seed))

    def test_options_of_other_forms_are_refused(self, tmp_path):
        of_others = {name: form for form in FORMS for name in FORMS[form].options}
        src = DATA / "checkpoint2"
        for name in of_others.keys() - {*FORMS[self.form].options}:
            numbers = "iteration", "tensor_parallel", "pipeline_parallel"
            is_flag = name in ("dedup", "expert_parallel")
            value = True if is_flag else 1 if name in numbers else "1"
            value = {"transformer_impl": "local", "platform": "ascend"}.get(name, value)
            with pytest.raises(rankxform.UsageError, match=f"^{flag_of(name)} is for --dst-form"):
                rankxform.transform(src, tmp_path / "dst", dst_form=self.form, **{name: value})
        assert not (tmp_path / "dst").exists()

    @pytest.mark.parametrize("name", ["it's", 'say "x"', "a, (b)", "a\\b", "größe", "a\nb"])
    def test_names_of_any_characters(self, name, tmp_path):
        params = {name: ((4,), "Float32"), "w": ((4,), "Float32")}
        stage = {name: ([2], [0], 0, 0), "w": ([2], [-1], 0, 0)}
        case = Case(params, [stage], [stage], CASE.extras)
        src = reference.write_checkpoint(tmp_path / "src", case.src, params, case.extras)
        strategy = reference.write_strategy(tmp_path / "s.ckpt", case.src)
        to = strategy if self.is_sharded else None
        told = {"dst_form": self.form, **self.options}
        rankxform.transform(src, tmp_path / "dst", strategy, to, **told)
        assert self.wrong(tmp_path / "dst", case) == []
        declared = None if FORMS[self.form].described else strategy
        found = rankxform.load(tmp_path / "dst", declared, strategy, rank=1)
        assert found[name].tobytes() == reference.full_tensor(name, (4,), "Float32")[2:].tobytes()

    def test_a_second_run_writes_nothing(self, place):
        paths = [path for path in (place.tmp / "whole").rglob("*") if path.suffix in SUFFIXES]
        before = {path: path.stat().st_mtime_ns for path in paths}
        done = place.convert(place.tmp / "whole", overwrite=False)
        assert done.files_kept == len(done.files)
        assert {path: path.stat().st_mtime_ns for path in paths} == before
        with pytest.raises(rankxform.StorageError, match="--overwrite"):
            place.convert_otherwise(place.tmp / "whole", overwrite=False)

    def test_an_index_of_somebody_elses_files_is_not_replaced(self, place, tmp_path):
        index = tmp_path / "dst" / self.index
        index.parent.mkdir(parents=True)
        index.write_text(json.dumps({"weight_map": {"w": "other.safetensors"}}))
        with pytest.raises(rankxform.StorageError, match=r"already there.*--overwrite"):
            place.convert(tmp_path / "dst", overwrite=False)
        assert "other" in index.read_text()
        place.convert(tmp_path / "dst")
        assert self.complete(tmp_path / "dst") == []

    def test_an_index_that_was_changed_is_found(self, place):
        """`verify DST` knows the companion files; so does a comparison with the source."""
        dst = place.tmp / "whole"
        index = dst / self.index
        own = place.to if self.is_sharded else None
        compared = (place.src, dst, place.a, own)
        told = {"dst_form": self.form}
        assert rankxform.verify(*compared, **told).same
        data = index.read_bytes()
        index.write_bytes(data.replace(*self.renamed))
        assert rankxform.verify(dst).same is False
        if FORMS[self.form].described:  # else no reader needs it
            assert rankxform.verify(*compared, **told).same is False
        index.write_bytes(data)
        assert rankxform.verify(dst).same is not False
        index.unlink()
        assert rankxform.verify(index.parent).same is False

    @pytest.mark.filterwarnings("ignore:.*and 7 was written:rankxform.RankxformWarning")
    @pytest.mark.filterwarnings("ignore:.*complete are 7:rankxform.RankxformWarning")
    def test_a_tracker_that_leads_nowhere_is_found(self, place):
        if FORMS[self.form].tracker is None:
            pytest.skip("a form without steps")
        dst, own = place.tmp / "whole", place.to if self.is_sharded else None
        compared = (place.src, dst, place.a, own)
        told = {"dst_form": self.form, "iteration": 7}
        assert rankxform.verify(*compared, **told).same
        for text in ("6", "19", "nothing", ""):
            (dst / self.mark).write_text(text)
            assert rankxform.verify(*compared, **told).same is False, text
            try:
                doubts = rankxform.verify(dst).warnings
            except rankxform.CheckpointError as error:  # nothing else says which step is complete
                doubts = [str(error)]
            assert any(self.mark in text for text in doubts), text
        step_folder = (dst / self.index).parent
        step_folder.with_name(re.sub("7$", "8", step_folder.name)).mkdir()
        (dst / self.mark).write_text("8")
        assert rankxform.verify(*compared, **told).same

    def test_a_bit_that_was_changed_is_found(self, place):
        """Or what it is in is refused; only the manifest may say of itself what it likes."""
        dst, rng = place.tmp / "whole", random.Random(self.form)
        place.convert(dst, verify=True)
        for path in sorted(path for path in dst.rglob("*") if path.is_file()):
            data, is_manifest = path.read_bytes(), path.name == "rankxform.json"
            for at in rng.sample(range(len(data)), min(len(data), 100 if is_manifest else 16)):
                changed = data[:at] + bytes([data[at] ^ 1 << rng.randrange(7)]) + data[at + 1 :]
                path.write_bytes(changed)
                is_harmless = is_manifest or changed.strip() == data.strip()  # a tracker's newline
                try:
                    same = rankxform.verify(dst).same
                except (RankxformError, rankxform.RankxformWarning) as error:
                    assert "bug" not in str(error)
                else:
                    assert same is False or is_harmless, (path.name, at)
            path.write_bytes(data)
        assert rankxform.verify(dst).same

    @pytest.mark.sampled
    @pytest.mark.parametrize("megabytes", [1, pytest.param(300, marks=pytest.mark.slow)])
    def test_a_tenth_that_was_changed_is_found_and_a_byte_by_fingerprints(
        self, megabytes, tmp_path
    ):
        """Samples see the first; of the second they say what they did not compare."""
        params = {"w": ((megabytes << 8, 1024), "Float32")}
        stage = [{"w": ([2], [0, -1], 0, 0)}]
        src = reference.write_checkpoint(
            tmp_path / "src", stage, params, CASE.extras, "safetensors"
        )
        a = reference.write_strategy(tmp_path / "a.ckpt", stage)
        to, dst = a if self.is_sharded else None, tmp_path / "dst"
        told = {"dst_form": self.form, **self.options, "overwrite": True, "fsync": False}
        for verify, share in ((False, 10), (True, 1 << 40)):
            rankxform.transform(src, dst, a, to, verify=verify, **told)
            before = rankxform.verify(dst)
            assert before.same is (True if verify else None)
            sampled = [before.bytes_sampled, before.total_bytes]
            assert f"({' of '.join(map(format_size, sampled))})" in as_text(before) or verify
            paths = [p for p in dst.rglob("*") if p.suffix in SUFFIXES]
            path = max(paths, key=lambda path: path.stat().st_size)
            size, modified = path.stat().st_size, path.stat().st_mtime_ns
            count = max(1, size // share)
            place = size // 2 + random.Random(self.form).randrange(size // 4)
            with path.open("r+b") as file:
                file.seek(place)
                data = file.read(count)
                file.seek(place)
                file.write(bytes(byte ^ 85 for byte in data))
            os.utime(path, ns=(modified, modified))
            (found,) = rankxform.verify(dst).differences
            assert (found.file, found.elements) == (str(path), None)
            assert found.rule == "content_is_unchanged" or "CRC" in found.text

    @pytest.mark.slow
    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("names", "how"),
        [(WRITING, errno.EIO), (WRITING, errno.ENOSPC), (READING, errno.EIO), (READING, "short")],
        ids=["write-EIO", "write-ENOSPC", "read-EIO", "read-short"],
    )
    def test_a_call_is_refused(self, names, how, place, tmp_path, monkeypatch):
        """Every ninth call goes wrong: an error or success, and a second run ends well."""
        monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
        with monkeypatch.context() as patch:
            calls = Injector(patch, names, 0, how)
            place.convert(tmp_path / "count")
        for at in range(1 + random.Random(self.form).randrange(9), calls.calls + 1, 9):
            dst = tmp_path / f"dst{at}"
            with monkeypatch.context() as patch:
                injector = Injector(patch, names, at, how)
                try:
                    place.convert(dst)
                except rankxform.RankxformError as error:
                    assert how != "short" and os.strerror(how) in str(error)
                else:  # what could not be removed of the lock goes with the next run
                    own = {n: data for n, data in contents(dst).items() if ".rankxform" not in n}
                    assert own == place.whole
            assert injector.hit and self.complete(dst) in (None, []), at
            place.convert(dst)
            assert contents(dst) == place.whole, at

    @pytest.mark.slow
    @pytest.mark.sampled
    @pytest.mark.parametrize("is_over_another", [False, True], ids=["empty", "over-another"])
    def test_no_reader_believes_what_is_not_complete(self, is_over_another, tmp_path, monkeypatch):
        monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
        place = FormPlace(tmp_path, self, is_over_another)
        crashes = Crashes(place, begin=place.begin)
        assert crashes.check_all(crashes.disk.killed(), STEP) > 30 // STEP
        assert crashes.check_all(crashes.disk.power_lost(), 2 * STEP) > 30 // STEP

    @pytest.mark.slow
    @pytest.mark.sampled
    def test_random_kills_under_mpirun(self, place, tmp_path):
        rng = random.Random(self.form)
        to = ["--dst-strategy", place.b] if self.is_sharded else []
        (option, value), *_ = self.options.items()
        own = [flag_of(option), *([] if value is True else [value])]

        def command(processes, dst, **settings):
            line = [
                *mpirun(processes), sys.executable, "-m", "tests.trust.victim", "transform",
                place.src, dst, "--src-strategy", place.a, *to, "--dst-form", self.form, *own,
                "--overwrite",
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
            dst, mark = tmp_path / f"dst{kill}", f"{os.getpid()}-{self.form}-{kill}"
            processes = rng.choice((2, 3))
            process = rng.randrange(processes)
            at, whom = rng.randint(1, calls[processes][process]), rng.choice(("one", "all"))
            command(
                processes, dst, VICTIM_ID=mark, VICTIM_PROCESS=process, VICTIM_CALL=at,
                VICTIM_WHOM=whom,
            )  # fmt: skip
            clear_away(f"VICTIM_ID={mark}".encode())
            assert self.complete(dst) in (None, []), (processes, process, at)
            code, output = command(5 - processes, dst, VICTIM_ID="x", VICTIM_CALL=0, VICTIM_WHOM="")
            assert code == 0, output
            assert contents(dst) == place.whole, (processes, process, at)


KILLS = int(os.environ.get("RANKXFORM_FORM_KILLS", "1"))

# -- models -------------------------------------------------------------------------------------

MODELS = 10
"""They take 99.5 % of the branches that 25 take; with several processes, and of pairs, fewer."""


def with_states(case, seed):
    """Return a case with optimizer states, a tied embedding, and a strategy on both sides."""
    rng = random.Random(seed)
    for name in list(case.params):
        if rng.random() < 0.5:
            for state in ("adam_m.", "adam_v."):
                case.params[state + name] = case.params[name]
                for stage in (*case.src, *case.dst):
                    if name in stage:
                        stage[state + name] = stage[name]
    name = next(n for n in case.src[0] if "." in n and not n.startswith("adam"))
    if rng.random() < 0.5:
        for stages in (case.src, case.dst):
            own = next(stage[name] for stage in stages if name in stage)
            stages[0][name] = stages[-1][name] = own  # tied
    return case


def models():
    """Yield (seed, case) whose layouts every form can state."""
    for seed in count():
        case = with_states(random_case(seed, mindspore_agrees=False, whole=False), seed)
        if all(reference_forms.can_be_2(stages, case.params) for stages in (case.src, case.dst)):
            yield seed, case


def some_models(pair):
    """Return the models of a pair of forms: others for each, RANKXFORM_MODELS of them."""
    number = int(os.environ.get("RANKXFORM_MODELS", 5 if world().size == 1 else 2))
    every = list(islice(models(), max(number, MODELS)))
    return random.Random(pair).sample(every, number)


def write_strategies(case, tmp):
    """Write both strategies; return their folders."""
    for side, stages in (("src", case.src), ("dst", case.dst)):
        reference.write_stage_files(tmp / f"{side}_strategy", stages)


def converted(src, suite, seed, case, here):
    """Convert a case from one form to another, and see that nothing is wrong."""
    dst, rng = suite.form, random.Random(f"{src} {suite.form} {seed}")
    if world().rank == 0:
        reference_forms.write_any(src, here / "src", case, seed)
        write_strategies(case, here)
    world().Barrier()
    a = str(here / "src_strategy") if src == "ranks" else None
    is_sharded = suite.is_sharded or (dst in reference_forms.SHARDED and rng.random() < 0.5)
    b = str(here / "dst_strategy") if is_sharded else None
    limit = {"max_part": 5000} if rng.random() < 0.5 and not is_sharded else {}
    options = {
        "huggingface": {"max_shard": rng.choice((1 << 30, 5000))},
        "unified": limit,
        "checkpoint2": {"dedup": rng.random() < 0.5, "prefix": rng.choice(("", "llm"))},
        "dcp": limit,
        "hyperparallel": limit or {"iteration": seed},
        "ranks": {"format": "safetensors"},
        "flat": {"format": "ckpt"},
    }[dst]
    told = {"read_method": rng.choice(("auto", "two-phase")), "comm": world()}
    rankxform.transform(
        here / "src", here / "dst", a, b, dst_form=dst, fsync=False, verify=True,
        memory=rng.choice((1 << 20, 64 << 20)), **options, **told,
    )  # fmt: skip
    wrong = []
    if world().rank == 0:
        lost = case.extras if src == "checkpoint2" and seed % 3 == 0 else ()
        states = (src, dst) == ("checkpoint2", "unified")  # common.json become tensors
        wrong = suite.wrong(
            here / "dst", case, lost, reference_forms.counters(case, lost) if states else {}
        )
    assert world().bcast(wrong) == [], (seed, src, dst)
    assert rankxform.verify(here / "dst", comm=world()).same, seed
    own = None if dst == "checkpoint2" else b
    assert rankxform.verify(here / "src", here / "dst", a, own, dst_form=dst, **told).same, seed


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("seed", range(8))
def test_through_any_three_forms_and_back(seed, tmp):
    rng = random.Random(seed)
    ((_, case),) = [*islice(models(), seed, seed + 1)]
    if world().rank == 0:
        reference_forms.write_any("ranks", tmp / "0", case)
        write_strategies(case, tmp)
    world().Barrier()
    a, b = str(tmp / "src_strategy"), str(tmp / "dst_strategy")
    before, of = tmp / "0", a
    for number, form in enumerate([*rng.choices(reference_forms.FORMS, k=3), "ranks"], 1):
        is_sharded = form == "ranks" or form in reference_forms.SHARDED
        to = (a if number == 4 else b) if is_sharded else None
        after = tmp / str(number)
        rankxform.transform(
            before, after, of, to, dst_form=form, fsync=False, comm=world(),
            **({"format": "safetensors"} if form == "ranks" else {}),
        )  # fmt: skip
        before, of = after, to if form == "ranks" else None
    assert reference.wrong_slices(tmp / "4", case.src, case.params, "safetensors") == []


# -- the forms ----------------------------------------------------------------------------------


class TestCheckpoint2(ReadFormTests, WrittenFormTests):
    form = "checkpoint2"
    samples = (
        "checkpoint2", "checkpoint2_2026", "checkpoint2_2026_dedup", "checkpoint2_noprefix_dedup"
    )  # fmt: skip
    options, otherwise = {"dedup": True}, {"dedup": False}
    mark, index = "latest_checkpointed_iteration.txt", "iteration_00000007/metadata.json"
    is_sharded = True


class TestUnified(ReadFormTests, WrittenFormTests):
    form, samples = "unified", ("unified/out", "unified/out_3parts")
    options, otherwise = {"max_part": 900}, {"max_part": 500}
    mark = index = "param_name_map.json"


class TestHuggingFace(ReadFormTests, WrittenFormTests):
    form, samples = "huggingface", ("3 files", "1 file")
    options, otherwise = {"max_shard": 600}, {"max_shard": 400}
    mark = index = "model.safetensors.index.json"

    def folder(self, sample, tmp):
        tensors = self.tensors(sample)
        return reference_forms.write_huggingface(tmp / "src", tensors, int(sample[0]))


class TestDcp(ReadFormTests, WrittenFormTests):
    form = "dcp"
    samples = tuple(
        f"dcp_torch_{name}/ckpt" for name in ("fsdp4", "boxes", "mesh2x2", "safetensors")
    )
    options, otherwise = {"max_part": 900}, {"max_part": 500}
    mark = index = ".metadata"


class TestHyperParallel(ReadFormTests, WrittenFormTests):
    form = "hyperparallel"
    samples = tuple(
        f"dcp_hyperparallel{name}/ckpt" for name in ("", "_local", "_mindspore", "_ragged")
    )
    options, otherwise = {"max_part": 900}, {"max_part": 500}
    mark, index = "latest_checkpoint_iteration.txt", "global_step_7/.metadata"


class TestDcpSafetensors(ReadFormTests):
    form, samples = "dcp_safetensors", ("dcp_hf_sharded/ckpt",)


class TestTorchDist(ReadFormTests):
    form, index = "torch_dist", ".metadata"
    samples = "dcp_mcore/ckpt", *(f"megatron/{model}/torch_dist" for model in MEGATRONS)

    def tensors(self, sample):
        if sample.startswith("megatron"):
            return reference_megatron.tensors_of((DATA / sample).parent)
        return {reference_megatron.local(n): t for n, t in super().tensors(sample).items()}


class TestMegatron(ReadFormTests):
    form, suffixes = "megatron", (".pt",)
    samples = "megatron/llama/legacy/iter_0000005", *(f"megatron/{m}/legacy" for m in MEGATRONS)

    def tensors(self, sample):
        found = reference_megatron.tensors_of(DATA / "megatron" / sample.split("/")[1])
        if "tied" in sample:  # the last stage has a copy
            found["output_layer.weight"] = found["embedding.word_embeddings.weight"]
        return found


class TestVerl(ReadFormTests):
    form, suffixes = "verl", (".pt",)
    samples = tuple(
        f"verl/{job}/ckpt" for job in ("fsdp1", "fsdp2", "hsdp", "tp", "fsdp_tp", "old_mesh")
    )


class TestPyTorch(ReadFormTests):
    form, samples, index = "pytorch", ("3 files", "1 file"), "pytorch_model.bin.index.json"

    def folder(self, sample, tmp):
        return reference_torch.write_folder(tmp / "src", self.tensors(sample), int(sample[0]))


class TestRanks(WrittenFormTests):
    form, mark, is_sharded = "ranks", "rankxform.json", True
    options, otherwise = {"format": "safetensors"}, {"format": "ckpt"}
    # There is no index; the others are those of tests/trust/test_faults, test_crashes and test_kills.
    test_an_index_of_somebody_elses_files_is_not_replaced = None
    test_an_index_that_was_changed_is_found = None
    test_a_call_is_refused = test_no_reader_believes_what_is_not_complete = None
    test_random_kills_under_mpirun = None


class TestFlatToy(WrittenFormTests):
    """Rank files in one folder, of a form from outside."""

    form, is_sharded = "flat", True
    options, otherwise = {"format": "ckpt"}, {"digits": 7}
    mark = index = "files.json"
    renamed = (b"00000", b"00009")
    test_random_kills_under_mpirun = None  # another process does not know the toy

    @pytest.fixture(autouse=True)
    def registered(self):
        with registered(FORMS, self.form, FlatFolder()):
            yield

    def wrong(self, folder, case, lost=(), more=()):
        ranks = folder.parent / f"{folder.name} by rank"
        for name in json.loads((folder / "files.json").read_text()):
            rank = int(re.match(r"\d+", name)[0])
            (ranks / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, ranks / f"rank_{rank}/checkpoint_{rank}.ckpt")
        wrong = reference.wrong_slices(ranks, case.dst, case.params)
        shutil.rmtree(ranks)
        return wrong


class TestTilesToy(ReadFormTests):
    """Boxes that follow no strategy, of a form from outside."""

    form, samples, index = "tiles", ("tiles",), "tiles.json"
    test_a_change_of_what_describes_it_raises_no_other_error = None  # the toy trusts its table

    @pytest.fixture(autouse=True)
    def registered(self):
        with registered(FORMS, self.form, Tiles()):
            yield

    def folder(self, sample, tmp):
        write_tiles(tmp / "src")
        return tmp / "src"

    def tensors(self, sample):
        return reference_forms.full(TOY_CASE)
