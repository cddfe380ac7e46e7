"""`follow`: every step once, whatever stops it; nothing removed that it did not write."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

import rankxform
from rankxform import process
from rankxform.cli.main import main
from rankxform.publish import folder_records, journal
from rankxform.publish.lock import FolderLock
from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs import follow as follow_module
from rankxform.verbs.follow import RECORD_NAME, FollowSettings, follow
from tests import reference
from tests.forked import run_forked
from tests.local_world import run_world
from tests.mpi.test_maps import write_ranks
from tests.mpi_launch import environment, mpirun
from tests.reference_maps import Model

SRC = [{"w": ([4], [0, -1], 0, 0)}]
DST = [{"w": ([2], [-1, 0], 0, 0)}]
PARAMS = {"w": ((16, 8), "Float32")}


class Training:
    """Rank folders of several steps, and their conversions."""

    def __init__(self, tmp):
        self.tmp, self.src, self.dst = tmp, tmp / "src", tmp / "dst"
        self.a = reference.write_stage_files(tmp / "a", SRC)
        self.b = reference.write_stage_files(tmp / "b", DST)

    def save(self, step, ranks=range(4)):
        made = self.tmp / f"made{step}"
        reference.write_checkpoint(
            made, SRC, PARAMS, None, "safetensors", name=f"net-1_{step}", make=self.values(step)
        )
        for rank in ranks:
            folder = self.src / f"rank_{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            for path in (made / f"rank_{rank}").iterdir():
                shutil.copy(path, folder)

    def values(self, step):
        return lambda name, shape, dtype: reference.full_tensor(f"{name} {step}", shape, dtype)

    def is_right(self, step):
        folder, values = self.dst / f"1_{step}", self.values(step)
        wrong = reference.wrong_slices(folder, DST, PARAMS, "safetensors", make=values)
        return wrong == [] and (folder / "rankxform.json").exists()

    def follow(self, **settings):
        request = Request(str(self.src), str(self.dst), self.a, self.b, fsync=False)
        return follow(request, FollowSettings(**settings), SerialTeam())

    @property
    def words(self):
        return ["follow", self.src, self.dst, "--src-strategy", self.a, "--dst-strategy", self.b]


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def test_all_complete_steps_are_converted_once(training):
    for step in range(1, 21):
        training.save(step)
    training.save(21, ranks=range(3))
    outcome = training.follow()
    assert [entry.step for entry in outcome.converted] == [f"1_{step}" for step in range(1, 21)]
    assert outcome.waiting == ("1_21",) and all(map(training.is_right, range(1, 21)))
    training.save(21)
    again = training.follow()
    assert [entry.step for entry in again.converted] == ["1_21"]
    assert len(again.complete_before) == 20 and training.is_right(21)


@pytest.mark.parametrize("processes", [1, 3])
def test_the_command(training, processes):
    training.save(1)
    training.save(2)
    done = run_forked([*training.words, "--no-fsync", "--settle", "0"], processes, training.tmp)
    assert done.code == 0, done.stderr
    assert "step      1_1: 720 B" in done.stdout and done.stdout.endswith("2 steps converted\n")
    assert training.is_right(1) and training.is_right(2)
    document = json.loads(run_forked([*training.words, "--json"], processes, training.tmp).stdout)
    assert document["result"] == "follow" and document["complete_before"] == ["1_1", "1_2"]


def test_no_step_and_no_folder_are_one_message(training, tmp_path):
    reference.write_checkpoint(training.src, SRC, PARAMS, None, "safetensors")
    with pytest.raises(rankxform.UsageError, match="states a step"):
        training.follow()


def test_an_address_that_nothing_writes_is_refused(training, monkeypatch):
    training.save(1)
    monkeypatch.chdir(training.tmp)
    training.dst = "ftp://host/steps"
    with pytest.raises(rankxform.UsageError, match="nothing writes ftp:// addresses"):
        training.follow()
    assert not (training.tmp / "ftp:").exists()


@pytest.mark.parametrize("step", ["1_1,1_3", "3,1"])
def test_some_steps(step, training):
    """A step may be named without its epoch, and be gone once it is converted."""
    for number in range(1, 4):
        training.save(number)
    outcome = rankxform.follow(training.src, training.dst, training.a, training.b, step=step)
    assert [entry.step for entry in outcome.converted] == ["1_1", "1_3"]
    with pytest.raises(rankxform.UsageError, match="--step 4: expected some of 1_1, 1_2, 1_3"):
        rankxform.follow(training.src, training.dst, training.a, training.b, step="1_1,4")
    assert outcome.waiting == outcome.complete_before == ()


def test_only_what_it_wrote_is_removed(training):
    for step in (1, 2):
        training.save(step)
    training.follow()
    rankxform.transform(training.src, training.dst / "by_hand", training.a, training.b, step="1_1")
    (training.dst / "1_1" / "notes.txt").write_text("mine")
    training.save(3)
    outcome = training.follow(keep=1)
    assert outcome.removed == ("1_1", "1_2")
    left = {path.name for path in training.dst.iterdir()}
    assert left == {"1_1", "1_3", "by_hand", RECORD_NAME}
    assert [path.name for path in (training.dst / "1_1").rglob("*")] == ["notes.txt"]
    assert training.is_right(3)
    assert training.follow(keep=1).converted == (), "what was removed is not made again"


def test_the_oldest_is_removed_whenever_it_was_converted(training):
    training.save(2)
    training.save(1, ranks=range(3))
    training.follow(keep=2)
    training.save(1)
    training.follow(keep=2)
    training.save(3)
    assert training.follow(keep=2).removed == ("1_1",)
    assert training.is_right(2) and training.is_right(3)


def test_what_several_runs_note_is_all_kept(training):
    """Of two runs into one folder each notes its steps beside the other's."""
    request = Request(str(training.src), str(training.dst), training.a, training.b)

    def note(first_step):
        watcher = follow_module._Watcher(request, FollowSettings())
        for step in range(first_step, first_step + 30):
            watcher.note(f"1_{step}")

    with ThreadPoolExecutor(3) as runs:
        [*runs.map(note, (0, 30, 60))]
    noted = json.loads((training.dst / RECORD_NAME).read_bytes())["steps"]
    assert sorted(noted) == sorted(f"1_{step}" for step in range(90))
    assert [path.name for path in training.dst.iterdir()] == [RECORD_NAME]


def test_what_a_killed_run_began_or_did_not_note_is_removed(training, monkeypatch):
    """It notes a step before it is converted."""
    places = training.src, training.dst, training.a, training.b
    for step in (1, 2):
        training.save(step)
        with monkeypatch.context() as patch:
            patch.setattr(folder_records.FolderRecords, "finish", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rankxform.follow(*places, step=f"1_{step}")
        assert [*(training.dst / f"1_{step}").rglob("job.json")]
    training.save(3)
    with monkeypatch.context() as patch:
        patch.setattr(follow_module, "ConvertedStep", interrupt)  # behind its manifest
        with pytest.raises(KeyboardInterrupt):
            rankxform.follow(*places, step="1_3")
    assert training.is_right(3)
    training.save(4)
    outcome = rankxform.follow(*places, keep=1)
    assert outcome.removed == ("1_1", "1_2", "1_3")
    assert {path.name for path in training.dst.iterdir()} == {"1_4", RECORD_NAME}
    training.save(5)
    rankxform.follow(*places, step="1_5")
    assert rankxform.follow(*places, keep=1).removed == ("1_4",), "without a new one, too"


def test_what_is_continued_or_at_work_is_not_removed(training, monkeypatch):
    places = training.src, training.dst, training.a, training.b

    def begin(step):
        training.save(step)
        with monkeypatch.context() as patch:
            patch.setattr(folder_records.FolderRecords, "finish", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rankxform.follow(*places, step=f"1_{step}")

    begin(1)
    training.save(2)
    rankxform.follow(*places, step="1_2")
    outcome = rankxform.follow(*places, keep=2)
    assert [entry.step for entry in outcome.converted] == ["1_1"] and not outcome.removed
    begin(3)
    lock = FolderLock(training.dst / "1_3" / ".rankxform" / "lock")
    training.save(4)
    assert rankxform.follow(*places, step="1_4", keep=1).removed == ("1_1", "1_2")
    assert (training.dst / "1_3" / ".rankxform" / "job.json").exists()
    lock.release()
    assert rankxform.follow(*places, step="1_4", keep=1).removed == ("1_3",)


def test_a_derived_strategy_is_removed_with_its_step(training):
    options = {"src_parallel": "dp=1,mp=4", "dst_parallel": "dp=1,mp=2", "optimizer_shard": "off"}
    training.save(1)
    training.save(2)
    for step in ("1_1", "1_2"):
        rankxform.follow(
            training.src, training.dst, training.a, keep=1, step=step, progress=False, **options
        )
    names = {path.name for path in training.dst.iterdir()}
    assert names == {"1_2", "1_2_strategy.ckpt", RECORD_NAME}


def test_a_step_of_which_too_little_is_left_ends_no_watch(training):
    """Once another was converted with these options."""
    training.save(1)
    request = Request(
        str(training.src), str(training.dst), training.a, training.b, include=("w",), fsync=False
    )
    steps = iter([2, 3])

    def goes_on():
        step = next(steps, None)
        if step is not None:
            training.save(step)
        if step == 2:
            for path in training.src.glob("*/net-1_2.*"):
                reference.write_safetensors(path, {"b": ("Float32", np.zeros(2, "<u4"))})
        return step is not None

    outcome = follow(request, FollowSettings(watch=goes_on, settle=0.0), SerialTeam())
    assert [entry.step for entry in outcome.converted] == ["1_1", "1_3"]
    assert "1_2: " in "".join(outcome.warnings)


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_what_was_moved_or_linked_is_not_removed(training):
    """Nor what a record names that was written by somebody else."""
    training.save(1)
    training.follow()
    (training.dst / "1_1").rename(training.tmp / "moved")
    (training.dst / "1_1").symlink_to(training.tmp / "moved")
    training.save(2)
    training.follow()
    (training.tmp / "empty").mkdir()
    (training.dst / "1_2" / "link").symlink_to(training.tmp / "empty")
    (training.dst / RECORD_NAME).write_text(
        json.dumps({"steps": ["../moved", None, 3, {}, "1_1", "1_2"]})
    )
    training.save(3)
    assert training.follow(keep=1).removed == ("1_2",)
    assert (training.tmp / "moved" / "rankxform.json").exists()
    assert [path.name for path in (training.dst / "1_2").iterdir()] == ["link"]


@pytest.mark.parametrize("form", ["checkpoint2", "hyperparallel", "dcp", "unified", "huggingface"])
def test_all_that_it_wrote_is_removed(form, tmp_path):
    """Trackers and the model's configuration too."""
    model, options = Model("qwen3", 2, "Float32"), {}
    write_ranks(tmp_path, model, "mf", 4, 1, 1)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    if form == "huggingface":
        options = {"map": "qwen3", "config": str(tmp_path / "config.json")}
    for path in [*(tmp_path / "src").glob("rank_*/*")]:
        for step in (1, 2):
            shutil.copy(path, path.with_name(f"net-1_{step}.safetensors"))
        path.unlink()
    for step in ("1_1", "1_2"):
        outcome = rankxform.follow(
            tmp_path / "src", tmp_path / "dst", tmp_path / "strategy", keep=1, step=step,
            dst_form=form, fsync=False, **({"iteration": 7} if "point2" in form else {}), **options,
        )  # fmt: skip
    assert outcome.removed == ("1_1",)
    assert {path.name for path in (tmp_path / "dst").iterdir()} == {"1_2", RECORD_NAME}


def test_a_watch_says_why_it_sees_no_steps(training):
    training.save(1)
    shutil.copy(
        training.src / "rank_0/net-1_1.safetensors", training.src / "rank_0/other-1_1.safetensors"
    )
    told, looks = [], iter([True, True, False])
    request = Request(str(training.src), str(training.dst), training.a, training.b, fsync=False)
    settings = FollowSettings(watch=lambda: next(looks), settle=0)
    outcome = follow(request, settings, SerialTeam(), announce=told.append)
    assert len(told) == 1 and "waiting" in told[0] and "families" in told[0]
    assert outcome.converted == () and "families" in outcome.warnings[0]


def test_what_would_be_removed_is_not_made(training):
    for step in range(1, 6):
        training.save(step)
    outcome = training.follow(keep=2)
    assert [entry.step for entry in outcome.converted] == ["1_4", "1_5"] and not outcome.removed


def test_an_older_step_is_converted_where_the_newest_is_torn(training):
    """A training that died while it saved its last step, at the last look of a watch."""
    training.save(1)
    training.save(2)
    os.truncate(training.src / "rank_1/net-1_2.safetensors", 50)
    looks = iter([True, False])
    outcome = training.follow(watch=lambda: next(looks), settle=3, keep=1)
    assert [entry.step for entry in outcome.converted] == ["1_1"] and training.is_right(1)
    assert any("1_2" in warning for warning in outcome.warnings)


def test_it_goes_on_where_it_was_killed(training):
    """Steps appear while it watches, and it is killed again and again."""
    words = [sys.executable, "-m", "rankxform", *map(str, training.words), "--no-fsync", "--watch"]
    words += ["--settle", "0.2", "--progress", "none"]
    kills, steps = int(os.environ.get("RANKXFORM_KILLS", 1)) * 6, 6
    for number in range(kills):
        if number < steps:
            training.save(number + 1)
        process = subprocess.Popen(
            words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(0.3 + 0.9 * number / kills)
        process.kill()
        process.wait()
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("waiting"):
        assert process.poll() is None  # until it listens for signals
    wanted = [training.dst / f"1_{step}" / "rankxform.json" for step in range(1, steps + 1)]
    until = time.monotonic() + 60
    while time.monotonic() < until and not all(path.exists() for path in wanted):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert all(map(training.is_right, range(1, steps + 1)))
    assert not [*training.dst.rglob("*.part")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_watch_of_several_processes_with_one_message(number, training):
    training.save(1)
    words = [*mpirun(2), sys.executable, "-m", "rankxform", *training.words, "--no-fsync"]
    process = subprocess.Popen(
        [*map(str, words), "--watch", "--settle", "0", "--progress", "none"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not process.stdout.readline().startswith("waiting"):
        assert process.poll() is None
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    said = output + errors
    assert process.returncode == 75, said
    assert said.count(f"rankxform: error: stopped by {number.name}") == 1, said
    assert "the same command goes on from here" in said
    assert "MPI_Abort" not in said, said


def test_a_step_that_is_torn_is_tried_again_when_it_has_changed(training, monkeypatch):
    training.save(1)
    training.save(2)
    path = training.src / "rank_2" / "net-1_1.safetensors"
    data = path.read_bytes()
    os.truncate(path, 60)
    said, until = [], time.monotonic() + 30

    class Stop:
        def reason(self):
            if said and path.stat().st_size < len(data):
                path.write_bytes(data)
            is_done = (training.dst / "1_1" / "rankxform.json").exists()
            return "stopped by a test" if is_done or time.monotonic() > until else None

        def at_work(self, is_at_work):
            """Nothing is noted."""

    team = SerialTeam()
    team.stopping = Stop()
    monkeypatch.setattr("rankxform.verbs.follow._POLL_SECONDS", 0.05)
    request = Request(str(training.src), str(training.dst), training.a, training.b, fsync=False)
    with pytest.raises(rankxform.StoppedError):
        follow(request, FollowSettings(watch=True, settle=0.0), team, announce=said.append)
    assert training.is_right(1) and training.is_right(2)
    assert any("tried again" in text for text in said)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_was_saved_again_is_begun_anew(processes, training, monkeypatch):
    """But not with other options, by which it would be unlike the steps before."""
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
    places = training.src, training.dst, training.a, training.b
    job = training.dst / "1_1" / ".rankxform" / "job.json"

    def stopped(comm):
        def stop(*_):
            if job.exists():
                raise KeyboardInterrupt

        with pytest.raises((KeyboardInterrupt, rankxform.RankxformError)):
            rankxform.follow(*places, comm=comm, progress=stop)

    training.save(1)
    run_world(processes, stopped)
    assert job.exists()
    training.values = lambda step: lambda name, *of: reference.full_tensor(f"{name} again", *of)
    training.save(1)
    with pytest.raises(rankxform.StorageError, match="other inputs or options"):
        rankxform.follow(*places, weights_only=True)
    run_world(processes, lambda comm: rankxform.follow(*places, comm=comm, progress=False))
    assert training.is_right(1)


def test_iterations_of_a_checkpoint_2(training):
    """Each becomes a folder of its own, with the iteration's folder in it, once."""
    training.save(3)
    options = {"dst_form": "checkpoint2", "fsync": False}
    for number in (3, 4):
        rankxform.transform(
            training.src, training.tmp / "iterations", training.a, training.b, iteration=number,
            overwrite=True, **options,
        )  # fmt: skip
    request = Request(
        str(training.tmp / "iterations"), str(training.dst), None, training.b, **options
    )
    outcome = follow(request, FollowSettings(), SerialTeam())
    assert [entry.step for entry in outcome.converted] == ["3", "4"]
    again = follow(request, FollowSettings(), SerialTeam())
    assert again.converted == () and again.complete_before == ("3", "4")
    assert rankxform.verify(training.tmp / "iterations", training.dst / "4", None, training.b).same


@pytest.mark.parametrize("saved", [0, 1])
@pytest.mark.parametrize("processes", [1, 3])
def test_a_program_follows_its_own_training(processes, saved, training):
    """Every process calls; process 0 is asked, here until the third step was saved. SRC need not be
    there before."""

    def work(comm):
        steps = iter(range(saved + 1, 4))

        def goes_on():
            step = next(steps, None)
            if step is not None:
                training.save(step)
            return step is not None

        places = training.src, training.dst, training.a, training.b
        options = {"comm": comm, "progress": False, "keep": 2}
        outcome = rankxform.follow(*places, watch=goes_on, settle=3600.0, **options)
        again = rankxform.follow(*places, **options)
        return [entry.step for entry in outcome.converted], outcome.removed, repr(again)

    for step in range(1, saved + 1):
        training.save(step)
    found = run_world(processes, work)
    assert found == processes * [(["1_2", "1_3"], (), "Followed(0 steps converted)")]
    assert training.is_right(2) and training.is_right(3)


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(
    ("looks", "again"), [(2, "when it changes"), (1, "by the same command")], ids=["while", "last"]
)
def test_what_cannot_be_converted_is_a_warning_on_every_process(looks, again, processes, training):
    """While it watches it looks again; in the last look it has done what it could."""
    training.save(1)
    training.save(2)
    os.truncate(training.src / "rank_2" / "net-1_1.safetensors", 60)

    def work(comm):
        answers = iter([True, False][-looks:])
        warned = pytest.warns(rankxform.RankxformWarning, match=f"tried again {again}")
        with warned if comm.rank == 0 else nullcontext():
            outcome = rankxform.follow(
                training.src, training.dst, training.a, training.b, comm=comm, progress=False,
                watch=lambda: next(answers), settle=0.0 if looks == 2 else 3600.0,
            )  # fmt: skip
        return [entry.step for entry in outcome.converted], len(outcome.warnings)

    assert run_world(processes, work) == processes * [(["1_2"], 1)]


def test_warnings_of_conversions_are_its_own(training, tmp_path):
    nans = {"w": ("Float32", np.full((16, 8), 0x7FC00000, "<u4"))}
    reference.write_ckpt(tmp_path / "whole" / "rank_0" / "net-1_1.ckpt", nans)
    with pytest.warns(rankxform.RankxformWarning, match="1_1: .*no numbers"):
        outcome = rankxform.follow(tmp_path / "whole", training.dst, "none", training.b)
    assert len(outcome.warnings) == 1


@pytest.mark.parametrize("processes", [1, 3])
def test_a_function_that_raises_is_one_error(processes, training):
    training.save(1)

    def work(comm):
        places = training.src, training.dst, training.a, training.b
        with pytest.raises(rankxform.UsageError, match="watch raised ZeroDivisionError"):
            rankxform.follow(*places, comm=comm, progress=False, watch=lambda: 1 / 0)
        return True

    assert run_world(processes, work) == processes * [True]


@pytest.mark.parametrize(
    "options",
    [{"keep": 0}, {"keep": "3"}, {"keep": True}, {"settle": -1.0}, {"settle": float("nan")},
     {"settle": "5"}, {"watch": "no"}],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense(options, training):
    training.save(1)
    with pytest.raises(rankxform.UsageError, match="expected"):
        rankxform.follow(training.src, training.dst, training.a, training.b, **options)
    assert not training.dst.exists()


def test_a_step_that_was_converted_may_be_gone(training):
    training.save(1)
    training.save(2)
    places = training.src, training.dst, training.a, training.b
    assert len(rankxform.follow(*places, step="1_1").converted) == 1
    for rank in range(4):
        (training.src / f"rank_{rank}" / "net-1_1.safetensors").unlink()
    assert [entry.step for entry in rankxform.follow(*places, step="1_1, 1_2").converted] == ["1_2"]
    assert rankxform.follow(*places, step="1,2").converted == ()
    (training.tmp / "file").write_text("")
    with pytest.raises(rankxform.UsageError, match="is a file, and DST must be a folder"):
        rankxform.follow(training.src, training.tmp / "file", training.a, training.b)


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds <= 0.2, "the others hear of it often"
        self.now += seconds

    def __getattr__(self, name):
        return getattr(time, name)


def test_no_faster_than_asked(monkeypatch):
    told, clock, before = [], Clock(), process._io_priority(process._GET)
    monkeypatch.setattr(process, "time", clock)
    with process.throttled(told.append, 1e6) as on_progress:
        for _ in range(4):
            on_progress(100_000)
        assert process._io_priority(process._GET) == process._IDLE_CLASS
    assert clock.now == pytest.approx(100.4) and sum(told) == 400_000
    assert process._io_priority(process._GET) == before, "an embedding program is as it was"


@pytest.mark.parametrize("verb", ["transform", "verify"])
def test_verbs_that_move_bytes_are_throttled(verb, training, monkeypatch):
    """The 512 bytes of the tensor take half a second of a clock that only sleeping moves."""
    training.save(1)
    words = [training.src, training.dst, "--src-strategy", training.a, "--dst-strategy", training.b]
    if verb == "verify":
        assert run_forked(["transform", *words], 1, training.tmp).code == 0
    clock = Clock()
    monkeypatch.setattr(process, "time", clock)
    options = {"src_strategy": training.a, "dst_strategy": training.b, "throttle": 1024}
    getattr(rankxform, verb)(training.src, training.dst, **options)
    assert clock.now >= 100.5


def test_a_step_that_a_rank_lacks_is_said(training, capfd):
    """It was "done 0 steps", and nothing at all in a watch."""
    training.save(1)
    training.save(2, ranks=range(3))
    training.save(3, ranks=(1,))
    texts = (
        "step 1_2 is not complete: rank 3 has no file of it",
        "step 1_3 is not complete: ranks 0, 2-3 have no file of it",
    )
    outcome = training.follow()
    assert outcome.waiting == ("1_2", "1_3") and outcome.lacking == texts
    assert main([*map(str, training.words), "--no-fsync"]) == 0
    printed = capfd.readouterr().out
    assert all(f"waiting   {text}\n" in printed for text in texts)
    assert main([*map(str, training.words), "--step", "1_1,1_3", "--no-fsync"]) == 3
    assert texts[1] in capfd.readouterr().err
    assert main([*map(str, training.words), "--step", "1_1", "--no-fsync"]) == 0


@pytest.mark.parametrize("settle", [0.0, 3600.0])
def test_a_step_that_a_rank_lacks_is_said_once_in_a_watch(training, settle):
    """As soon as it has lacked it for as long as files have to stay the same."""
    training.save(1)
    training.save(2, ranks=range(3))
    said, answers = [], iter([True] * 4)
    settings = FollowSettings(watch=lambda: next(answers, False), settle=settle)
    request = Request(str(training.src), str(training.dst), training.a, training.b, fsync=False)
    follow(request, settings, SerialTeam(), announce=said.append)
    text = "step 1_2 is not complete: rank 3 has no file of it"
    assert sum(text in line for line in said) == (settle == 0.0)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("changed", ["strategy", "option", "source"])
def test_steps_that_were_made_with_other_options(training, changed, processes):
    """It was "done 0 steps", as if they had been made as was asked for."""
    training.save(1)
    training.save(2)
    words = [*map(str, training.words), "--no-fsync"]
    assert run_forked(words, processes, training.tmp).code == 0
    assert run_forked(words, processes, training.tmp).code == 0  # with the same ones
    if changed == "option":
        words += ["--dtype", "bf16"]
    else:
        sharding = {"strategy": [2], "source": [4]}[changed]
        folder = reference.write_stage_files(
            training.tmp / "other", [{"w": (sharding, [0, -1], 0, 0)}]
        )
        words[-2] = folder
    training.save(3)
    done = run_forked(words, processes, training.tmp)
    assert done.code == 4 and "1_2: was made with other options: " in done.stderr
    assert not (training.dst / "1_3").exists()


def test_steps_whose_sources_are_gone_or_were_saved_again_are_done(training):
    for step in (1, 2, 3):
        training.save(step)
    training.follow()
    for path in training.src.glob("rank_[12]/*-1_3.*"):
        path.unlink()
    for path in training.src.glob("*/*-1_2.*"):
        os.utime(path, (1, 1))
    outcome = training.follow()
    assert outcome.converted == () and outcome.complete_before == ("1_1", "1_2", "1_3")


def test_what_is_removed_is_said_while_it_watches(training):
    training.save(1)
    said, steps = [], iter([2, 3])

    def goes_on():
        step = next(steps, None)
        if step is not None:
            training.save(step)
        return step is not None

    settings = FollowSettings(watch=goes_on, settle=0.0, keep=1)
    request = Request(str(training.src), str(training.dst), training.a, training.b, fsync=False)
    follow(request, settings, SerialTeam(), announce=said.append)
    assert [line for line in said if line.startswith("removed")] == [
        "removed   1_1",
        "removed   1_2",
    ]
