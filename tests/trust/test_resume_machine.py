"""Random histories of one destination: runs, kills, lost parts, reboots, other options, other sources.

After each step: the source is as it was; a file under a final name is whole and of a conversion that
was begun; a manifest states what is there. A run that ends well leaves exactly what an undisturbed one
writes. A run may be refused only where its inputs or options are not those of what is there, where
something else has changed a file, or where another run is at work.

RANKXFORM_HISTORIES: how many; 500 at night.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import rankxform
from rankxform.publish import folder_records, journal, lock
from tests import local_world, reference
from tests.local_world import Failed, run_world
from tests.trust.victim import count_calls

HISTORIES = int(os.environ.get("RANKXFORM_HISTORIES", "40"))
STEPS = 12 if HISTORIES > 40 else 8
STEP, KIND = "1_7", "safetensors"
NAMES = [f"w{i}" for i in range(5)]
PARAMS = {n: ((24, 16 + 8 * (i % 2)), "Float32") for i, n in enumerate(NAMES)}
SRC = [{n: ([4], [0, -1] if i % 3 else [-1, 0], 0, 0) for i, n in enumerate(NAMES)}]
DST = [{n: ([3, 2], [1, -1], 0, 0) for n in NAMES}]
REFUSED, KILLED = "refused", "killed"
MOST_CALLS = 160
"""A process makes as many changing calls, or fewer: then it is not killed."""

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "exclude": st.just(("w3",)),
        "verify": st.just(True),
        "link": st.just("hard"),
        "digests": st.just("sha256"),
        "fsync": st.just(True),
    },
)
CALLS = st.integers(1, MOST_CALLS)
KILLS = st.tuples(st.integers(0, 2), CALLS, st.sampled_from(["one", "all"]))

RUNS = {
    "options": OPTIONS, "processes": st.sampled_from([1, 1, 2, 3]), "follows": st.booleans(),
    "overwrite": st.sampled_from([False, False, True]),
    "ranks": st.sampled_from([None, None, (0, 1), (2, 3, 4, 5)]),
}  # fmt: skip


class Sources:
    """Two states of one source, and what conversions of them write, which is made once."""

    def __init__(self, tmp):
        self.tmp = Path(tmp)
        self.a = reference.write_strategy(self.tmp / "a.ckpt", SRC)
        self.b = reference.write_strategy(self.tmp / "b.ckpt", DST)
        for state in range(2):

            def values(name, shape, dtype, state=state):
                return reference.full_tensor(f"{name} {state}", shape, dtype)

            reference.write_checkpoint(
                self.tmp / f"state{state}", SRC, PARAMS, None, KIND, make=values, name=f"net-{STEP}"
            )
        self._whole = {}

    def whole(self, state, excluded):
        """Return the files of an undisturbed conversion, by name."""
        if (state, excluded) not in self._whole:
            folder = self.tmp / f"whole{state}{len(excluded)}"
            source = self.tmp / f"state{state}"
            rankxform.transform(source, folder, self.a, self.b, exclude=excluded, fsync=False)
            self._whole[state, excluded] = files_of(folder)
        return self._whole[state, excluded]


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob(f"*.{KIND}")
    }


class Settings:
    """What a run is told; two of the same `identity` make the same bytes by the same records."""

    def __init__(self, state, edition, options):
        self.options = {"fsync": False, "link": "none", **options}
        self.excluded = self.options.get("exclude", ())
        self.content = state, self.excluded
        self.identity = state, edition, self.excluded, self.options.get("verify", False)


class History(RuleBasedStateMachine):
    """One destination. `base` is what its records may speak of; None: there are none."""

    sources: Sources

    def __init__(self):
        super().__init__()
        self.number = len(list(self.sources.tmp.glob("history*")))
        self.tmp = self.sources.tmp / f"history{self.number}"
        self.src, self.out = self.tmp / "src", self.tmp / "out"
        self.dst = self.out / STEP
        shutil.copytree(self.sources.tmp / "state0", self.src)
        self.state = self.edition = 0
        self.boot = "a boot"
        self.clock = 0.0
        self.base, self.is_mixed, self.is_sound = None, False, True
        self.begun, self.damaged = set(), {}
        self.random = random.Random(0)

    @initialize(seed=st.integers(0, 1 << 16))
    def seed(self, seed):
        self.random.seed(seed)

    def teardown(self):
        shutil.rmtree(self.tmp)
        self.tmp.mkdir()

    # -- runs ----------------------------------------------------------------------------------

    def work_of(self, settings, follows, overwrite, ranks, kill, stop_at=None):
        """Return what each process of a run does."""
        options = {**settings.options, "overwrite": overwrite}

        def act(comm, number):
            if stop_at == number:
                os.kill(os.getpid(), signal.SIGSTOP)
            if kill and (comm.rank, number) == (kill[0] % comm.size, kill[1]):
                os.killpg(0, signal.SIGKILL) if kill[2] == "all" else os.kill(
                    os.getpid(), signal.SIGKILL
                )

        def work(comm):
            patches = [
                mock.patch.object(journal, "JOURNAL_SECONDS", 0),
                mock.patch.object(lock, "HEARTBEAT_SECONDS", 0.05),
                mock.patch.object(lock, "DEAD_AFTER_SECONDS", 0.3),
                mock.patch.object(lock, "_LOOK_SECONDS", 0.05),
                mock.patch.object(lock, "_GUARD_SECONDS", 0.5),
                mock.patch.object(time, "time", lambda real=time.time: real() + self.clock),
                *(
                    mock.patch.object(module, "boot_id", return_value=self.boot)
                    for module in (lock, folder_records, journal)
                ),
            ]
            with ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                count_calls(lambda number: act(comm, number))
                given = comm if comm.size > 1 else None
                places = self.src, self.out if follows else self.dst
                run = rankxform.follow if follows else rankxform.transform
                more = {} if follows or ranks is None else {"ranks": ranks}
                try:
                    result = run(*places, self.sources.a, self.sources.b, comm=given,
                                 progress=False, **more, **options)  # fmt: skip
                except rankxform.RankxformError as error:
                    return REFUSED, str(error)
                return "done", [*getattr(result, "warnings", ())]

        return work

    def may_be_refused(self, settings, overwrite):
        if overwrite or self.base is None:
            return False
        return not self.is_sound or self.is_mixed or self.base != settings.identity

    def note_begun(self, settings, overwrite):
        self.begun.add(settings.content)
        differs = self.base not in (None, settings.identity)
        self.is_mixed = self.is_mixed or differs or (overwrite and self.base is not None)
        self.base = settings.identity

    def note_done(self, settings, overwrite, ranks):
        self.base, self.is_mixed = settings.identity, False
        self.begun.add(settings.content)
        whole = self.sources.whole(*settings.content)
        there = files_of(self.dst)
        wanted = [n for n in whole if ranks is None or int(n.split("/")[0][5:]) in ranks]
        assert all(there.get(name) == whole[name] for name in wanted)
        self.damaged = {name: data for name, data in self.damaged.items() if name not in wanted}
        self.is_sound = not self.damaged
        assert (self.dst / "rankxform.json").exists()
        if ranks is None:  # what others have begun of other ranks stays
            assert not (self.dst / ".rankxform").exists() and not self.paths("*.part")
        if settings.options.get("digests"):
            lines = (self.dst / "SHA256SUMS").read_text().splitlines()
            stated = {line[66:]: line[:64] for line in lines}
            digests = {n: hashlib.sha256(d).hexdigest() for n, d in there.items()}
            assert stated == {n: d for n, d in digests.items() if n not in self.damaged}

    @rule(**RUNS)
    def run(self, options, **how):
        self._run(Settings(self.state, self.edition, options), None, **how)

    @rule(**RUNS, kill=KILLS)
    def kill_a_run(self, options, kill, **how):
        self._run(Settings(self.state, self.edition, options), kill, **how)

    @precondition(lambda self: self.base is not None)
    @rule(processes=st.sampled_from([1, 2]), kill=st.none() | KILLS, follows=st.booleans())
    def go_on(self, processes, kill, follows):
        """Run again what was begun, which is what people do."""
        options = {"exclude": self.base[2], "verify": self.base[3]}
        settings = Settings(self.state, self.edition, options)
        self._run(settings, kill, processes=processes, follows=follows)

    def _run(self, settings, kill, processes, follows, overwrite=False, ranks=None):
        ranks = None if follows else ranks
        had_manifest = (self.dst / "rankxform.json").exists()
        # `follow` never makes a step anew that it takes for done
        may_refuse = self.may_be_refused(settings, overwrite and not (follows and had_manifest))
        before = self.snapshot()
        work = self.work_of(settings, follows, overwrite, ranks, kill)
        outcomes = run_world(processes, work, deadline=60)
        if any(isinstance(outcome, Failed) for outcome in outcomes):
            assert kill is not None, outcomes
            self.note_begun(settings, overwrite)
            return
        how, text = outcomes[0]
        if follows and had_manifest and how == "done":
            assert self.snapshot() == before, "a folder with a manifest is done"
            return
        if how == REFUSED or (follows and text):
            assert may_refuse, text
            assert self.snapshot() == before, text
            return
        self.note_done(settings, overwrite, ranks)

    def snapshot(self):
        """Return the files of the destination that hold tensors, or state something of them."""
        return {
            name: data
            for name, data in ((str(p), p.read_bytes()) for p in self.dst.rglob("*") if p.is_file())
            if ".rankxform" not in name
        }

    @rule(options=OPTIONS, call=CALLS, other=OPTIONS, follows=st.booleans(),
          is_killed=st.booleans())  # fmt: skip
    def run_beside(self, options, call, other, follows, is_killed):
        """Stop a run at some call, begin another beside it, and let the first go on, or kill it."""
        settings = Settings(self.state, self.edition, options)
        may_refuse = self.may_be_refused(settings, False)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                work = self.work_of(settings, False, False, None, None, stop_at=call)
                how, text = work(Alone)
                os.write(write, text.encode()[:2000] if how == REFUSED else b"")
                code = 2 if how == REFUSED else 0
            os._exit(code)
        os.close(write)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            self.note_begun(settings, False)
            self._second(Settings(self.state, self.edition, other), follows)
            os.kill(child, signal.SIGKILL if is_killed else signal.SIGCONT)
            _, status = os.waitpid(child, 0)
            may_refuse = True
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        assert code in ((-signal.SIGKILL,) if is_killed else ()) or code in (0, 2), code
        if code == 0:
            self.note_done(settings, False, None)
        if code == 2:
            assert may_refuse, text

    def _second(self, settings, follows):
        before, may_refuse = self.snapshot(), True
        work = self.work_of(settings, follows, False, None, None)
        (outcome,) = run_world(1, work, deadline=60)
        assert not isinstance(outcome, Failed), outcome
        how, text = outcome
        if how == REFUSED or (follows and text):
            assert may_refuse and self.snapshot() == before, text
            return
        self.note_begun(settings, False)

    # -- what else happens -----------------------------------------------------------------------

    @precondition(lambda self: self.base is not None)
    @rule(state=st.integers(0, 1), keeps_times=st.booleans())
    def change_source(self, state, keeps_times):
        for path in sorted(self.src.rglob(f"*.{KIND}")):
            status = path.stat()
            fresh = path.with_name("fresh")
            shutil.copy(self.sources.tmp / f"state{state}" / path.relative_to(self.src), fresh)
            if keeps_times:
                os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.replace(fresh, path)
        self.state, self.edition = state, self.edition + 1

    @precondition(lambda self: self.base is not None)
    @rule()
    def start_machine_anew(self):
        self.boot += "+"

    @precondition(lambda self: self.base is not None)
    @rule(seconds=st.sampled_from([-1e8, -100.0, 0.0, 100.0, 1e8]))
    def step_clock(self, seconds):
        """Also as file systems' clocks: what a run has left was renewed in the past or the future."""
        self.clock = seconds
        with suppress(FileNotFoundError):
            path = self.dst / ".rankxform" / "lock"
            os.utime(path, (path.stat().st_mtime + seconds,) * 2)

    @precondition(lambda self: self.paths("*.part"))
    @rule(is_removed=st.booleans(), share=st.floats(0, 1))
    def lose_part(self, is_removed, share):
        self.lose(self.paths("*.part"), is_removed, share)

    @precondition(lambda self: self.paths("journal-*"))
    @rule(is_removed=st.booleans(), share=st.floats(0, 1))
    def lose_journal(self, is_removed, share):
        self.lose(self.paths("journal-*"), is_removed, share)

    def lose(self, paths, is_removed, share):
        path = self.random.choice(paths)
        path.unlink() if is_removed else os.truncate(path, int(path.stat().st_size * share))

    def paths(self, pattern):
        return sorted(self.dst.rglob(pattern))

    @precondition(lambda self: self.paths(f"*.{KIND}"))
    @rule()
    def lose_file(self):
        self.random.choice(self.paths(f"*.{KIND}")).unlink()

    @precondition(lambda self: self.paths(f"*.{KIND}"))
    @rule()
    def damage_file(self):
        path = self.random.choice(self.paths(f"*.{KIND}"))
        data = bytearray(path.read_bytes())
        data[-1 - self.random.randrange(16)] ^= 1
        path.write_bytes(data)  # a linked one changes under its other names, too
        self.is_sound = False
        for name, content in files_of(self.dst).items():
            if os.path.samefile(self.dst / name, path):
                self.damaged[name] = content

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def source_is_as_it_was(self):
        assert files_of(self.src) == files_of(self.sources.tmp / f"state{self.state}")

    @invariant()
    def files_are_whole(self):
        wholes = [self.sources.whole(*content) for content in self.begun] or [{}]
        for name, data in files_of(self.dst).items():
            right = [whole.get(name) for whole in wholes]
            assert data in right or self.damaged.get(name) == data, name

    @invariant()
    def manifest_is_true(self):
        manifest = self.dst / "rankxform.json"
        if not manifest.exists() or not self.is_sound:
            return
        job = self.dst / ".rankxform" / "job.json"
        try:
            verdict = rankxform.verify(self.dst, progress=False)
        except rankxform.StorageError as error:
            assert job.exists() or (self.dst / ".rankxform").exists(), error
            return
        there = files_of(self.dst)
        if not verdict.differences:
            assert any(
                there.items() <= self.sources.whole(*content).items() for content in self.begun
            )


class Alone:
    rank, size = 0, 1


@pytest.mark.filterwarnings("ignore::rankxform.RankxformWarning")
def test_random_histories(tmp_path, monkeypatch):
    monkeypatch.setattr(local_world, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(History, "sources", Sources(tmp_path), raising=False)
    TestCase = History.TestCase
    TestCase.settings = settings(
        max_examples=HISTORIES, stateful_step_count=STEPS, deadline=None, database=None,
        derandomize=HISTORIES <= 40, suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],  # a history is short, and takes seconds
    )  # fmt: skip
    TestCase().runTest()
