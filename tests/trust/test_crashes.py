"""Every state in which a crash can leave a destination is continued, and ends with the right bytes.

The states come from the log of one undisturbed run (`tests.trust.disk`). Before a run continues, no
file has its final name and other bytes, and no reader takes the folder for complete if it is not.
RANKXFORM_CRASHES says which of the states after a power loss are taken: all, every third, and so on.
"""

from __future__ import annotations

import json
import os
import random
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import pytest

import rankxform
from rankxform.publish import folder_records, journal, lock
from tests import reference_forms
from tests.local_world import Failed, LocalComm, run_world
from tests.mpi.test_maps import write_ranks
from tests.place import contents
from tests.reference_maps import Model
from tests.trust.disk import Disk, as_recorded, contents_of, recording
from tests.trust.test_kills import KilledPlace

SHARE = os.environ.get("RANKXFORM_CRASHES", "sixth")
ALL = SHARE == "all"
_TWICE = 20  # every so many states a run that continues is killed in its turn
_BY_OTHERS = 10  # every so many states as many processes continue as the state was made by


@pytest.fixture(autouse=True)
def frequent_entries(monkeypatch):
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)


class Ranks(KilledPlace):
    """Rank folders; some are equal, and become links of one file."""

    def convert(self, dst, comm=None):
        rankxform.transform(self.src, dst, comm=comm, **self.options)


class Mapped:
    """A Hugging Face folder whose tensors are put together by a map."""

    def __init__(self, tmp):
        self.tmp = tmp
        model = Model("qwen3_moe", 2, "Float32")
        write_ranks(tmp, model, "mf", 4, 1, 1)
        (tmp / "config.json").write_text(json.dumps(model.config))
        self.convert(tmp / "whole")
        self.whole = contents(tmp / "whole")
        assert set(reference_forms.read_huggingface(tmp / "whole")) == set(model.hf)

    def convert(self, dst, comm=None):
        rankxform.transform(
            self.tmp / "src", dst, self.tmp / "strategy", dst_form="huggingface", dtype="bf16",
            map="qwen3_moe", config=str(self.tmp / "config.json"), max_shard=8000, comm=comm,
        )  # fmt: skip

    def check_unfinished(self, dst):
        there = {name: data for name, data in contents(dst).items() if name in self.whole}
        assert all(data == self.whole[name] for name, data in there.items())
        if (dst / "model.safetensors.index.json").exists() or (dst / "rankxform.json").exists():
            assert there == self.whole

    def check_finished(self, dst):
        assert contents(dst) == self.whole


@contextmanager
def started_anew():
    """Have the machine another boot id."""
    with ExitStack() as stack:
        for module in (lock, folder_records, journal):
            stack.enter_context(mock.patch.object(module, "boot_id", return_value="another boot"))
        yield


class Crashes:
    """The states of one conversion, made by `processes`, and how each is continued."""

    def __init__(self, place, processes=1, begin=lambda dst: None):
        self.place, self.processes = place, processes
        self.area, self.number = place.tmp / "area", 0
        self.dst = self.area / "above" / "dst"  # its folders are made by the run, and may be lost
        self.area.mkdir()
        begin(self.dst)
        self.disk = self._record(contents_of(self.area))
        place.check_finished(self.dst)
        self.area.rename(place.tmp / "recorded")  # it keeps its inode numbers

    def _record(self, before):
        self.number += 1
        log_path = self.place.tmp / f"calls{self.number}"
        with recording(self.area, log_path) as log:
            self._convert(log)
        return Disk(self.area, log_path, before)

    def _convert(self, log=None):
        if self.processes == 1:
            return self.place.convert(self.dst)
        begin = LocalComm._begin

        def work(comm):
            def marked(this, outgoing, senders, finish):
                log.add("mark")
                return begin(this, outgoing, senders, finish)

            if log is not None:
                log.process = comm.rank
            with mock.patch.object(LocalComm, "_begin", marked) if log else nullcontext():
                self.place.convert(self.dst, comm)

        for outcome in run_world(self.processes, work):
            assert not isinstance(outcome, Failed), outcome
        return None

    def check(self, state, number):
        """Build a state; continue it, some of them twice; compare with an undisturbed run."""
        try:
            self._continue(state, number)
        except Exception as error:
            found = f"{state.kind} before call {state.at}: {sorted(state.files)}"
            raise AssertionError(found) from error

    def _continue(self, state, number):
        place, dst = self.place, self.dst
        nodes = self.disk.build(state)
        with as_recorded(nodes), started_anew() if state.is_power_loss else nullcontext():
            place.check_unfinished(dst)
            if number % _TWICE == 0:
                again = self._record(state.files)
                second = random.Random(number).choice([*again.killed()])
                second = second._replace(is_power_loss=state.is_power_loss)
                nodes.clear()
                nodes |= again.build(second)
                place.check_unfinished(dst)
            if self.processes > 1 and number % _BY_OTHERS == 0:
                self._convert()
            else:
                place.convert(dst)
        place.check_finished(dst)

    def check_all(self, states, step=1):
        count = 0
        for number, state in enumerate(states):
            if number % step == 0:
                self.check(state, number)
                count += 1
        return count


LINKED = pytest.mark.parametrize(
    ("link", "kind"), [("none", "ckpt"), ("hard", "safetensors")], ids=["ckpt", "linked"]
)
STEP = {"all": 1, "third": 3, "sixth": 6, "twelfth": 12}[SHARE]


@pytest.mark.sampled
@LINKED
def test_every_call_of_one_process(link, kind, tmp_path):
    crashes = Crashes(Ranks(tmp_path, link, kind))
    assert crashes.check_all(crashes.disk.killed()) > 100


@pytest.mark.sampled
@LINKED
def test_what_was_not_synced_is_lost(link, kind, tmp_path):
    crashes = Crashes(Ranks(tmp_path, link, kind))
    assert crashes.check_all(crashes.disk.power_lost(), STEP) > 150 // STEP


@pytest.mark.sampled
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes(processes, tmp_path):
    crashes = Crashes(Ranks(tmp_path, "none", "ckpt"), processes)
    assert {call.process for call in crashes.disk.calls} == {*range(processes)}
    assert crashes.check_all(crashes.disk.killed(), STEP) > 150 // STEP
    for process in range(processes):
        assert crashes.check_all(crashes.disk.one_killed(process), STEP) > 30 // STEP
    assert crashes.check_all(crashes.disk.power_lost(), 2 * STEP) > 150 // STEP


@pytest.mark.filterwarnings("ignore::rankxform.RankxformWarning")  # of random bits
def test_tensors_that_are_put_together(tmp_path):
    crashes = Crashes(Mapped(tmp_path))
    assert crashes.check_all(crashes.disk.killed(), STEP) > 30 // STEP
    assert crashes.check_all(crashes.disk.power_lost(), 2 * STEP) > 30 // STEP
