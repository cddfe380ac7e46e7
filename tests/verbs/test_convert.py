"""A conversion into each kind of destination: in which order processes wait for each other."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankxform import statements
from rankxform.errors import Message, RankxformError, StorageError
from rankxform.request import Request
from rankxform.statements import Finding
from rankxform.target import existing, findings, resolve
from rankxform.target.destination import ArrayDestination, OneFileDestination
from rankxform.target.existing import ExistingDestination
from rankxform.target.folder import FolderDestination
from rankxform.transport import SerialTeam
from rankxform.verbs import convert as converting
from rankxform.verbs import evidence
from rankxform.verbs.launch import launch
from rankxform.verbs.transform import transform
from tests import reference

PARAMS = {"w": ((8, 6), "Float32")}
SRC = [{"w": ([2], [0, -1], 0, 0)}]
DST = [{"w": ([2], [-1, 0], 0, 0)}]
STEPS = ("prepare", "resolve", "check_free", "with_evidence", "claim", "plan_work", "begin", "move",
         "publish", "sum_up")  # fmt: skip
OF_DESTINATION = ("prepare", "check_free", "begin", "publish")


class RecordingTeam(SerialTeam):
    """Notes the outermost collective calls, by the step of `convert` in which they are made."""

    def __init__(self):
        self.calls, self._steps, self._is_inside = {step: [] for step in STEPS}, [], False

    @contextmanager
    def step(self, name):
        self._steps.append(name)
        yield
        self._steps.pop()

    def within(self, name, function):
        """Return a function whose calls are those of a step."""

        def call(*args, **keywords):
            with self.step(name):
                return function(*args, **keywords)

        return call

    def one(self, name, function):
        """Return a function all of whose calls count as one."""

        def call(*args, **keywords):
            return self._note(name, function, *args, **keywords)

        return call

    def _note(self, name, function, *args, **keywords):
        if self._is_inside:
            return function(*args, **keywords)
        self.calls[self._steps[-1]].append(name)
        self._is_inside = True
        try:
            return function(*args, **keywords)
        finally:
            self._is_inside = False

    def bcast(self, compute):
        return self._note("bcast", super().bcast, compute)

    def allgather(self, compute):
        return self._note("allgather", super().allgather, compute)

    def agree(self, compute):
        return self._note("agree", super().agree, compute)

    def work(self, compute, show):
        return self._note("work", super().work, compute, show)


def written(calls):
    """Write calls as the head of `convert` does: "agree, 2 allgather"."""
    groups = []
    for call in calls:
        if groups and groups[-1][0] == call:
            groups[-1][1] += 1
        else:
            groups.append([call, 1])
    return ", ".join(call if count == 1 else f"{count} {call}" for call, count in groups) or "-"


@pytest.fixture
def request_into(tmp_path):
    src = reference.write_checkpoint(tmp_path / "src", SRC, PARAMS)
    a = reference.write_strategy(tmp_path / "a.ckpt", SRC)
    b = reference.write_strategy(tmp_path / "b.ckpt", DST)

    def make(**options):
        options = {"dst": str(tmp_path / "dst"), "dst_strategy": str(b), **options}
        dst, dst_strategy = options.pop("dst"), options.pop("dst_strategy")
        options = {"read_method": "ranges", "fsync": False, **options}
        return Request(str(src), dst, str(a), dst_strategy, **options)

    return make


def record(request, destination, monkeypatch):
    """Convert; return by step what collective calls were made."""
    team = RecordingTeam()
    for name in ("resolve", "with_evidence", "plan_work", "move", "sum_up"):
        monkeypatch.setattr(converting, name, team.within(name, getattr(converting, name)))
    for name, module, function in (
        ("look", resolve, "look_at"),
        ("open", resolve, "open_place"),
        ("open", existing, "open_source"),
    ):
        monkeypatch.setattr(module, function, team.one(name, getattr(module, function)))
    for name in OF_DESTINATION:
        setattr(destination, name, team.within(name, getattr(destination, name)))
    claim = destination.claim

    @contextmanager
    def claim_noted(conversion, team):
        with team.step("claim"):
            claimed = claim(conversion, team)
            conversion = claimed.__enter__()
        yield conversion
        claimed.__exit__(None, None, None)

    destination.claim = claim_noted
    converting.convert(request, destination, team)
    return {step: written(calls) for step, calls in team.calls.items()}


def stated():
    """Return what the head of `convert` states, by kind and step; the last entry is repeated."""
    lines = [line.split("|") for line in converting.__doc__.splitlines() if "|" in line]
    (_, *kinds), *rows = [[cell.strip() for cell in line] for line in lines]
    rows = [row + row[-1:] * (len(kinds) + 1 - len(row)) for row in rows]
    return {kind: {row[0]: row[n] for row in rows} for n, kind in enumerate(kinds, 1)}


def test_the_head_states_the_order_of_collectives(request_into, tmp_path, monkeypatch):
    found = {}
    for kind, destination, options in (
        ("folder", FolderDestination(), {}),
        (
            "one file",
            OneFileDestination(tmp_path / "w.ckpt"),
            {"dst": None, "dst_strategy": "none"},
        ),
        ("arrays", ArrayDestination(1), {}),
        ("existing", ExistingDestination(), {}),
        ("described", ExistingDestination(), {"dst_form": "dcp", "dst": str(tmp_path / "dcp")}),
    ):
        if kind == "described":
            transform(request_into(**options), SerialTeam())
        with monkeypatch.context() as patch:
            found[kind] = record(request_into(**options), destination, patch)
    assert found == stated()


def test_what_was_asked_for_is_shown_and_not_what_lies_there(request_into, tmp_path):
    """An existing folder of boxes has its own files; a header speaks of those of the target."""
    transform(request_into(dst_form="dcp"), SerialTeam())
    shown = []

    def on_start(conversion, nbytes):
        shown.append(conversion)
        return lambda done, end: None

    destination = ExistingDestination()
    outcome = converting.convert(request_into(dst_form="dcp"), destination, SerialTeam(), on_start)
    assert destination.differences == []
    assert shown[0].target.arrangement.names == outcome.conversion.target.arrangement.names
    assert shown[0].planner is not outcome.conversion.planner


@pytest.mark.parametrize("is_accepted", [True, False])
def test_an_error_of_any_rule_may_be_accepted(request_into, tmp_path, monkeypatch, is_accepted):
    """`rule` says by which value of --accept, whatever the rule's subject is."""

    @statements.rule(statements.PLAN, statements.ACCEPT_ABSENT)
    def nothing_is_right(draft):
        yield Finding(Message("is wrong"))

    nothing_is_right.__module__ = findings.__name__
    monkeypatch.setattr(findings, "nothing_is_right", nothing_is_right, raising=False)
    accepted = (statements.ACCEPT_ABSENT,) if is_accepted else ()
    request = request_into(accept=accepted)
    if is_accepted:
        assert any(
            text.startswith("is wrong") for text in transform(request, SerialTeam()).warnings
        )
    else:
        with pytest.raises(RankxformError, match="is wrong"):
            transform(request, SerialTeam())


def test_a_launch_opens_and_samples_its_source_once(tmp_path, monkeypatch):
    """It looks whether the checkpoint fits, and converts what it has open."""
    params = {"w": ((8, 4), "Float32"), "v": ((8, 4), "Float32")}
    rows, columns = ([{n: ([2], m, 0, 0) for n in params}] for m in ([0, -1], [-1, 0]))
    src = reference.write_checkpoint(tmp_path / "src", rows, params)
    a = reference.write_strategy(tmp_path / "a.ckpt", rows)
    b = reference.write_strategy(tmp_path / "b.ckpt", columns)
    calls = Counter()
    for module, name in ((resolve, "open_place"), (evidence, "examine")):
        real = getattr(module, name)

        def counted(*arguments, name=name, real=real, **options):
            calls[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, counted)
    request = Request(str(src), None, a, b)
    report, place = launch(request, tmp_path / "out", SerialTeam())
    assert report is not None and calls == {"open_place": 1, "examine": 1}
    assert reference.wrong_slices(Path(place), columns, params) == []


def test_a_launch_knows_its_source_again(tmp_path):
    """By samples of every file, as a conversion does: touched it is the same, changed another."""
    params = {"w": ((8, 4), "Float32"), "v": ((8,), "Float32")}
    rows, columns = (
        [{"w": ([2], layout, 0, 0), "v": ([2], [-1], 0, 0)}] for layout in ([0, -1], [-1, 0])
    )
    src = Path(reference.write_checkpoint(tmp_path / "src", rows, params, kind="safetensors"))
    a = reference.write_strategy(tmp_path / "a.ckpt", rows)
    b = reference.write_strategy(tmp_path / "b.ckpt", columns)
    request = Request(str(src), None, a, b)
    first, _ = launch(request, tmp_path / "out", SerialTeam())
    assert first is not None and first.files_kept == 0
    paths = sorted(src.rglob("*.safetensors"))
    for path in paths:
        os.utime(path, (1, 1))
    again, _ = launch(request, tmp_path / "out", SerialTeam())
    assert again is not None and again.files_kept == 2
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1  # of v, whose type and shape say that all ranks hold the same
        path.write_bytes(data)
        os.utime(path, (1, 1))
    with pytest.raises(StorageError, match="was changed or is another"):
        launch(request, tmp_path / "out", SerialTeam())
