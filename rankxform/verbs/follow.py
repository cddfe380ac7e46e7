"""`follow`: convert the steps of one training, the oldest first, and go on as new ones appear.

Each step becomes a folder of its own in the destination, by the same conversion as `transform`
makes, with its journal and its manifest: a folder with a manifest is done, and whatever stops
`follow`, the same command goes on where it stopped. A step is converted once every rank has its
file of it; while the training goes on, once these files have not changed for a while, too.

Process 0 looks, and tells the others; it has to see the source's folders, and the destination.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from rankxform.checkpoints.base import SelectedFiles
from rankxform.display.text import format_count, format_seconds, format_size
from rankxform.errors import CheckpointError, FormatError, StoppedError, StorageError, UsageError
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME, MANIFEST_NAME, read_manifest
from rankxform.publish.records import identity_differences
from rankxform.request import Request
from rankxform.results import NORMAL, QUIET, Result, Section, lines
from rankxform.source.place import steps_at
from rankxform.statements import FILE_IDENTITY
from rankxform.storage.identity import inodes_of, is_below_any
from rankxform.storage.store import (
    FILE,
    NOTHING,
    FileVersion,
    absolute,
    address_of,
    storage_of,
    store_at,
)
from rankxform.target.destination import check_scheme, destination_of
from rankxform.target.inputs import source_ref
from rankxform.target.manifest import conversion_identity
from rankxform.target.resolve import resolve
from rankxform.transport import Team
from rankxform.transport.team import StopSource
from rankxform.values import NamedTuple, dataclass, decode_json, pattern_on_use

from .convert import OnStart, start_silently
from .transform import Report, transform

_POLL_SECONDS, _LONGEST_PAUSE, _SHARE = 0.5, 60.0, 9.0
"""Between two looks; where looking takes long, as on large storage, so many times as long."""
_LISTEN_SECONDS = 0.2
RECORD_NAME = "rankxform-follow.json"
"""What was converted here by `follow`, in its destination."""
_STEP = pattern_on_use(r"\d{1,18}(_\d{1,18})?")


class FollowSettings(NamedTuple):
    """How steps are followed."""

    # Go on as new steps appear; a function is asked on process 0 between two looks, while the
    # others wait. Once it returns False, what is complete is converted, and that was all.
    watch: bool | Callable[[], bool] = False
    settle: float = 10.0  # seconds for which a step's files must not have changed then
    keep: int | None = None  # how many of the newest conversions are kept; None: all


class ConvertedStep(NamedTuple):
    """One step that was converted."""

    step: str
    dst: str
    bytes_written: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Followed(Result):
    """What was done with the steps of a training. Sizes are bytes, times seconds."""

    src: str  # the source, as it was named
    dst: str  # the folder with a folder for each step
    converted: tuple[ConvertedStep, ...]  # in this order
    complete_before: tuple[str, ...]  # steps that had been converted by an earlier run
    waiting: tuple[str, ...]  # steps that some rank lacks
    removed: tuple[str, ...]  # steps whose conversions were removed
    warnings: tuple[str, ...] = ()  # what may be wrong
    lacking: tuple[str, ...] = ()  # what the steps lack that are waited for, in sentences

    def in_short(self) -> str:
        return f"{format_count(len(self.converted), 'step')} converted"

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield what was converted, what was there, and what is waited for."""
        if level > QUIET:
            for entry in self.converted:
                size, seconds = format_size(entry.bytes_written), format_seconds(entry.seconds)
                yield lines("step", f"{entry.step}: {size}, {seconds}, {entry.dst}")
            for label, steps in (
                ("before", self.complete_before),
                ("waiting", () if self.lacking else self.waiting),
                ("removed", self.removed),
            ):
                if steps:
                    yield lines(label, ", ".join(steps))
            yield from (lines("waiting", text) for text in self.lacking)
        yield lines("done", self.in_short())


class _Look(NamedTuple):
    """What process 0 sees: steps that can be converted, and all others but those done."""

    ready: tuple[str, ...]
    waiting: tuple[str, ...]
    done: tuple[str, ...]
    trouble: str = ""  # why no steps can be told, in a watch
    # What steps lack; in a watch those that have lacked it for a while.
    lacking: tuple[CheckpointError, ...] = ()


class _StepFiles(NamedTuple):
    """The files of a step, and since when they have these versions."""

    names: Mapping[int, str]
    versions: Sequence[FileVersion | None]
    since: float


class _Watcher:
    """Looks for steps on process 0."""

    def __init__(self, request: Request, settings: FollowSettings) -> None:
        self._where = source_ref(replace(request, step=None), None).absolute()
        self._wanted_steps = request.step.replace(" ", "").split(",") if request.step else None
        self.dst, self._settings = absolute(request.dst or ""), settings
        self._destination = destination_of(self.dst)
        self._done: set[str] = set()  # steps whose conversions were seen to be complete
        self._noted: dict[str, str | None] | None = None  # what the record says; None: not read yet
        self._looked_at: dict[str, _StepFiles] = {}
        self._failed: dict[str, Sequence[FileVersion | None]] = {}
        self._lacking_since: dict[str, float] = {}
        self._is_watching = bool(settings.watch)
        self._pause = _POLL_SECONDS  # until the next look

    def look_for_steps(self) -> _Look:
        """Raises UsageError where there are no steps."""
        began = time.monotonic()
        place = self._where.path
        has_parent = not storage_of(place).has_folders or Path(place).parent.is_dir()
        if self._settings.watch and has_parent and store_at(place).list("*").kind == NOTHING:
            return _Look((), (), (), f"{place} is not there yet")
        try:
            steps, files_of = steps_at(self._where)
        except CheckpointError as error:
            if not self._settings.watch:
                raise
            return _Look((), (), (), error.parts.line)
        steps = self._steps_asked_for(steps)
        done = [step for step in steps if self._is_done(step)]
        ready: list[str] = []
        lacking: list[CheckpointError] = []
        for step in [step for step in steps if step not in done]:
            try:
                if self._is_ready(step, files_of(step)):
                    ready.append(step)
            except CheckpointError as error:
                if self._has_settled(self._lacking_since.setdefault(step, time.monotonic())):
                    lacking.append(error)
        waiting = [step for step in steps if step not in done and step not in ready]
        # One that is older than those to keep is not converted to be removed, or once more.
        newest = [step for step in steps if step not in waiting][-(self._settings.keep or 0) :]
        self._pause = min(max(_POLL_SECONDS, _SHARE * (time.monotonic() - began)), _LONGEST_PAUSE)
        ready = [step for step in ready if step in newest]
        return _Look(tuple(ready), tuple(waiting), tuple(done), "", tuple(lacking))

    def _steps_asked_for(self, steps: list[str]) -> list[str]:
        """Return those of the steps that --step names, as 1_100 or as 100; all if it names none."""
        if self._wanted_steps is None:
            return steps
        names = {step: {step, step.rpartition("_")[2]} for step in steps}
        missing = {*self._wanted_steps}.difference(*names.values())
        folders = store_at(self.dst).list("*").entries if missing else ()
        for step in [*missing]:  # one that was converted and is gone, maybe named without its epoch
            if any(map(self._is_done, (step, *(f for f in folders if f.endswith(f"_{step}"))))):
                missing.discard(step)
        if missing and not self._settings.watch:
            raise UsageError(f"--step {min(missing)}: expected some of {', '.join(steps)}")
        return [step for step in steps if not names[step].isdisjoint(self._wanted_steps)]

    def _is_done(self, step: str) -> bool:
        """Tell whether a conversion of a step is complete; at an address it stays so, which is
        listed no more."""
        if step in self._done and not storage_of(self.dst).has_folders:
            return True
        is_done = bool(_places_with(self.place_of(step), MANIFEST_NAME))
        self._done |= {step} if is_done else set()
        return is_done

    def place_of(self, step: str) -> str:
        """Return where the conversion of a step is."""
        return address_of(self.dst, step)

    def wait(self, stopping: StopSource) -> bool:
        """Wait for the next look or a signal, and return whether it is not the last one."""
        until = time.monotonic() + self._pause
        while (left := until - time.monotonic()) > 0 and stopping.reason() is None:
            time.sleep(min(left, _LISTEN_SECONDS))
        if callable(self._settings.watch):
            try:
                self._is_watching = bool(self._settings.watch())
            except Exception as error:
                text = f"the function watch raised {type(error).__name__}: {error}"
                raise UsageError(text) from error
        return self._is_watching

    def note_failure(self, step: str) -> None:
        """Note that a step was not converted; it is tried again when it has changed."""
        if step in self._looked_at:
            self._failed[step] = self._looked_at[step].versions
        if not any(_places_with(self.place_of(step), name) for name in _RECORDS):
            self.note(step, is_gone=True)  # it was refused before anything was made

    def keep(self) -> list[str]:
        """Remove the conversions that are noted and older than those to keep; return their steps.

        Only files that a manifest or a journal lists are removed, and empty folders.
        """
        number = self._settings.keep
        if number is None:
            return []
        steps = self._noted
        if steps is None:
            store = store_at(self.dst)
            steps = _noted_steps(store.read(RECORD_NAME) if store.has(RECORD_NAME) else b"")
        ordered = sorted(steps, key=lambda step: [*map(int, step.split("_"))])  # late ones too
        complete = [step for step in ordered if self._is_done(step)]
        if len(complete) < number:
            return []
        older, removed = ordered[: ordered.index(complete[-number])], []
        for step in older:
            try:
                removed += [step] * self._destination.remove_conversion(self.place_of(step))
            except StorageError:  # another run is at work there
                continue
            self._done.discard(step)
            if strategy := steps[step]:
                self._destination.change_record(self.dst, strategy, lambda _: None)
            self.note(step, is_gone=True)
        return removed

    def note(self, step: str, strategy: str | None = None, *, is_gone: bool = False) -> None:
        """Note that a step is converted here, with the strategy's file that was written for it, or
        that it is gone; other runs may note some, too."""

        def changed(content: bytes | None) -> bytes | None:
            steps = _noted_steps(content)
            if is_gone:
                steps.pop(step, None)
            else:
                steps[step] = strategy or steps.get(step)
            self._noted = steps
            if not steps:
                return None
            strategies = {step: name for step, name in steps.items() if name}
            record = {"kind": "rankxform follow", "steps": [*steps], "strategies": strategies}
            return json.dumps(record).encode()

        self._destination.change_record(self.dst, RECORD_NAME, changed)

    def is_changing(self) -> bool:
        """Tell whether files of a step that was looked at are gone, or others now."""
        with closing(storage_of(self._where.path).ranges()) as ranges:
            return any(
                ranges.version_now(address_of(self._where.path, name)) != version
                for names, versions, _ in self._looked_at.values()
                for name, version in zip(names.values(), versions)
            )

    def _has_settled(self, since: float) -> bool:
        return not self._is_watching or time.monotonic() - since >= self._settings.settle

    def _is_ready(self, step: str, selected: SelectedFiles) -> bool:
        """Tell whether no file of a step has changed for a while."""
        versions, before = [*self._versions(selected.names)], self._looked_at.get(step)
        if before is None or versions != before.versions:
            before = _StepFiles(selected.names, versions, time.monotonic())
            self._looked_at[step] = before
        return self._failed.get(step) != versions and self._has_settled(before.since)

    def _versions(self, names: Mapping[int, str]) -> Iterator[FileVersion | None]:
        store = store_at(self._where.path)
        yield from (store.version(name) for name in names.values())


def follow(
    request: Request,
    settings: FollowSettings,
    team: Team,
    on_start: OnStart = start_silently,
    announce: Callable[[str], None] = lambda text: None,
) -> Followed:
    """Convert all complete steps that the destination lacks; with `watch`, until it is stopped.

    announce: told on process 0 what is waited for. Collective. Raises StoppedError when it is
    asked to stop, and without `watch` the first error.
    """
    try:
        return _convert_steps(request, settings, team, on_start, announce)
    except StoppedError as error:
        error.say(
            error.parts._replace(tries=error.tries or ("the same command goes on from here",))
        )
        raise
    finally:
        team.stopping.at_work(False)


def _convert_steps(
    request: Request,
    settings: FollowSettings,
    team: Team,
    on_start: OnStart,
    announce: Callable[[str], None],
) -> Followed:
    watcher = team.agree(lambda: _watcher(request, settings))
    converted: list[ConvertedStep] = []
    removed: list[str] = []
    warnings: list[str] = []
    complete_before: tuple[str, ...] | None = None
    announced, is_watching = "", team.bcast(lambda: bool(settings.watch))
    is_asked_once = not is_watching
    while True:
        look, has_failed = team.bcast(watcher.look_for_steps), False
        if complete_before is None:
            complete_before = look.done
            _check_options(request, watcher, look.done, team)
            removed += team.bcast(watcher.keep)
        for step in look.ready:
            dst = watcher.place_of(step)
            team.bcast(lambda step=step: watcher.note(step))  # type: ignore[misc]
            try:
                report = _convert(replace(request, step=step, dst=dst), team, on_start)
            except (CheckpointError, StorageError, UsageError) as error:  # no interruption of one
                team.bcast(lambda step=step: watcher.note_failure(step))  # type: ignore[misc]
                # What is asked for makes sense if another step was converted so.
                is_of_step = isinstance(error, CheckpointError) or (
                    isinstance(error, UsageError) and bool(converted or complete_before)
                )
                has_failed = has_failed or is_of_step
                is_changing = isinstance(error, StorageError) and team.bcast(watcher.is_changing)
                if is_asked_once or not (is_of_step or is_changing):
                    raise
                again = "when it changes" if is_watching else "by the same command"
                warnings.append(f"{step}: {error.parts.line}; it is tried again {again}")
                announce(f"WARNING:  {warnings[-1]}")
                continue
            warnings += [f"{step}: {text}" for text in report.warnings]
            converted.append(ConvertedStep(step, dst, report.bytes_written, report.seconds))
            announce(f"step      {step}: {format_size(report.bytes_written)}, {dst}")
            strategy = Path(report.strategy).name if report.strategy else None
            team.bcast(lambda step=step, name=strategy: watcher.note(step, name))  # type: ignore[misc]
            older_steps = team.bcast(watcher.keep)
            removed += older_steps
            if is_watching and older_steps:  # or else it is said at the end
                announce(f"removed   {', '.join(older_steps)}")
            announced = ""
        if not is_watching and has_failed:
            continue  # an older step may be among the newest now
        if not is_watching:
            break
        # From now on a signal ends all processes as one, with one message, not by MPI's abort.
        team.stopping.at_work(True)
        team.barrier()
        problems = [error.parts.what for error in look.lacking]
        text = "; ".join(filter(None, ["waiting   for the next step", look.trouble, *problems]))
        if announced != text:
            announce(text)
            announced = text
        is_watching = team.bcast(lambda: watcher.wait(team.stopping))
    warnings += filter(None, [look.trouble])
    if request.step and not settings.watch:
        for problem in look.lacking:
            raise problem
    return Followed(
        request.src, request.dst or "", tuple(converted), complete_before, look.waiting,
        tuple(removed),
        tuple(warnings), tuple(error.parts.what for error in look.lacking),
    )  # fmt: skip


def _check_options(request: Request, watcher: _Watcher, steps: Sequence[str], team: Team) -> None:
    """Refuse to go on beside steps that were made otherwise than the request says. Collective.

    The newest is compared that the source still has.
    """
    for step in reversed(steps):
        place = watcher.place_of(step)
        with suppress(CheckpointError):  # its files are being removed, say
            conversion = resolve(replace(request, step=step, dst=place), team)
            identity = {**conversion_identity(conversion), "source files": {}}
            recorded = team.bcast(
                lambda: read_manifest(_places_with(place, MANIFEST_NAME)[0])["identity"]  # noqa: B023
            )
            changed = identity_differences(recorded, identity)
            if not changed:
                return
            raise StorageError(
                f"was made with other options: {'; '.join(changed[:3])}",
                "name another folder as DST",
                "run with what it was made with",
                where=place,
            )


def _convert(request: Request, team: Team, on_start: OnStart) -> Report:
    """Convert a step; begin anew what was begun of files that have been saved again since."""
    try:
        return transform(request, team, on_start)
    except StorageError as error:
        if error.fault != FILE_IDENTITY or request.overwrite:
            raise
    return transform(replace(request, overwrite=True), team, on_start)


def _watcher(request: Request, settings: FollowSettings) -> _Watcher:
    if request.files is not None:
        raise UsageError("follow finds the files of each step itself", "leave out files")
    if request.fallback:
        raise UsageError("follow looks at one folder", "leave out --fallback")
    check_scheme(request.dst or "")
    if store_at(absolute(request.dst or "")).list("*").kind == FILE:
        raise UsageError("is a file, and DST must be a folder", where=request.dst)
    places = absolute(request.src), absolute(request.dst or "")
    if all(storage_of(place).has_folders for place in places):
        src, dst = map(Path, places)
        if is_below_any(dst, inodes_of(src, with_folders=True)):
            text = f"lies in the source folder {src}, which is never written to"
            raise UsageError(text, "choose another destination", where=dst)
    keep, settle = settings.keep, settings.settle
    if keep is not None and (type(keep) is not int or keep < 1):
        raise UsageError(f"--keep {keep}: expected a number, at least 1", "leave out --keep")
    if type(settle) not in (int, float) or not 0 <= settle < inf:
        raise UsageError(f"--settle {settle}: expected seconds from 0 on")
    if not isinstance(settings.watch, bool) and not callable(settings.watch):
        raise UsageError(f"watch is {settings.watch!r}; expected True, False or a function")
    return _Watcher(request, settings)


_RECORDS = f"{FOLDER_NAME}/{JOB_NAME}", MANIFEST_NAME


def _places_with(place: str, name: str) -> list[str]:
    """Return a conversion's place, or an iteration's in it, if it has something so named."""
    store = store_at(place)
    if store.has(name):
        return [place]
    return [address_of(place, f.removesuffix(f"/{name}")) for f in store.list(f"*/{name}").files]


def _noted_steps(content: bytes | None) -> dict[str, str | None]:
    """Return the steps that are noted, with the names of their strategies' files."""
    try:
        noted = decode_json(content or b"")
        strategies = noted.get("strategies", {})
        names = [step for step in map(str, noted["steps"]) if _STEP().fullmatch(step)]
        return {step: Path(strategies[step]).name if step in strategies else None for step in names}
    except (FormatError, KeyError, TypeError, AttributeError):
        return {}
