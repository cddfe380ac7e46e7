"""The tree of errors: a class says whose fault it is, and with which code the command ends.

::

    RankxformError              70  a bug of rankxform's own
    ├── UsageError               2  the call: arguments, launcher and MPI library disagree
    ├── StrategyError            3  a strategy file, or two that contradict each other
    ├── CheckpointError          3  a source file, or a folder that does not fit its strategy
    ├── RequestError             3  strategies and checkpoint are sound, the wish is not: shapes
    │                               that do not divide, names that only one side knows
    ├── DerivationError          3  a strategy that cannot be derived from what is given
    ├── StorageError             4  reading or writing failed: space, permission, device
    ├── DifferenceError          6  a verification found that two sides are not the same
    ├── StoppedError            75  stopped by a signal or a stall; run the command again
    └── PeerError               70  another process met a bug

Under MPI the failure of one process is raised on all, as one class with one message. Those with
codes 2 and 3 are ValueErrors too.

An error says in one short line what was found where; then what can be tried, each a command, an
option or an action; then details. `str` of it is all of them in a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

_QUOTED = 200
"""Most characters of a document that a message quotes."""
_LIKENESS = 0.75
"""Words that are less alike than this are not meant for each other."""
_LONG = rf"""(?<!\w)'(?:[^'\\\n]|\\.)*'(?!\w)|"(?:[^"\\\n]|\\.)*"|\S{{{_QUOTED},}}"""
"""Texts in quotes, and words; compiled where there is an error."""
_BRACKET = r"[\[\]{})]|\((?=[\d'\"])"
"""Of a list, a table or a tuple."""
_NAME, _PATH, _TEXT = 255, 4096, 1000
"""Most bytes of a file's name and path, and characters of what was found."""


def _shorten_quotations(text: str) -> str:
    """Return a message with the middle of its long quotations left out.

    >>> _shorten_quotations(f"x.json: 'w' is {[7] * 900}, no number").count("7")
    40
    """
    fragments, position = [], 0
    for start, end in _lists(text):
        fragments += [text[position:start], _cut(text[start:end])]
        position = end
    return re.sub(_LONG, lambda match: _cut(match[0]), "".join([*fragments, text[position:]]))


def _cut(text: str) -> str:
    path = text.partition("?")[0]  # an address may have words behind it
    is_path = "/" in path and not re.search(r"\s", text) and len(text) < _PATH
    if len(text) <= _QUOTED or (is_path and max(map(len, path.split("/"))) <= _NAME):
        return text
    return f"{text[: _QUOTED // 2]} ... {text[-_QUOTED // 10 :]}"


def _lists(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each outermost list or table of a text."""
    opened, start = list[str](), 0
    for bracket in re.finditer(_BRACKET, text):
        if bracket[0] in "[{(":
            start = start if opened else bracket.start()
            opened.append(bracket[0])
        elif opened and (bracket[0] != ")" or opened[-1] == "("):
            opened.pop()
            if not opened:
                yield start, bracket.end()


class Message(NamedTuple):
    """The parts of an error message."""

    what: str  # what was expected and what was found
    tries: tuple[str, ...] = ()  # what the user can try, the likeliest first
    where: str = ""  # the file, option or tensor; "": `what` names it
    details: str = ""

    @property
    def line(self) -> str:
        """The first line of the message."""
        where = self.where.replace("\n", "\\n")  # a name may have any character
        return f"{where}: {self.what}" if where else self.what

    def __str__(self) -> str:
        tries = f"; {', or '.join(self.tries)}" if self.tries else ""
        return f"{self.line}{tries}" + (f"\n{self.details}" if self.details else "")


class _MessageError(Exception):
    """An error whose message has parts."""

    def __init__(self, what: str = "", *tries: str, where: object = "", details: str = "") -> None:
        """`tries` continue the sentence, without a full stop. For the others see `Parts`."""
        self.say(Message(what, tries, str(where), details))

    def say(self, parts: Message) -> None:
        """Replace the message."""
        what, details = _shorten_quotations(parts.what), _shorten_quotations(parts.details)
        what = what if len(what) <= _TEXT else f"{what[: _TEXT // 2]} ... {what[-_TEXT // 2 :]}"
        # What is to be pasted is left whole.
        tries = tuple(t if t.startswith("--") else _shorten_quotations(t) for t in parts.tries)
        self.parts = Message(what, tries, _shorten_quotations(parts.where), details)
        self.args = (str(self.parts),)

    @property
    def what(self) -> str:
        """What was expected and what was found, in one line."""
        return self.parts.what

    @property
    def where(self) -> str:
        """The file, option or tensor of which it was found; "" where `what` says it."""
        return self.parts.where

    @property
    def tries(self) -> tuple[str, ...]:
        """What can be tried: commands, options or actions."""
        return self.parts.tries

    @property
    def details(self) -> str:
        """What there is to know beside, in lines."""
        return self.parts.details

    def at(self, where: object) -> Message:
        """Return the same of a file, or of what else it was found in."""
        return self.parts._replace(what=self.parts.line, where=str(where))


class RankxformError(_MessageError):
    """Any failure that rankxform reports by one message.

    what, where, tries, details: its parts. process: on which process it was met, in words, where
    that matters. resumable: whether what was done is kept, so that the same call continues it.
    fault: the stable name of what is wrong with a checkpoint, where it has one (docs/errors.md).
    rule: the name of the rule that it breaks, where it has one.
    """

    exit_code: ClassVar[int] = 70
    resumable = False
    process = ""
    fault: str | None = None
    rule: str | None = None

    @classmethod
    def of_parts(cls, parts: Message) -> Self:
        """Return the error that has these parts."""
        return cls(parts.what, *parts.tries, where=parts.where, details=parts.details)

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} [{self.process}]" if self.process else message


class RankxformWarning(UserWarning):
    """The result may not be what was meant, for example if a newer step was passed over."""


class UsageError(RankxformError, ValueError):
    """The call itself cannot be carried out as written."""

    exit_code = 2


class StrategyError(RankxformError, ValueError):
    """A strategy file is unreadable, incomplete, or contradicts another."""

    exit_code = 3


class CheckpointError(RankxformError, ValueError):
    """A source checkpoint is broken or does not fit its strategy."""

    exit_code = 3


class RequestError(RankxformError, ValueError):
    """The inputs are sound, but the conversion that is asked for has no right answer."""

    exit_code = 3


class DerivationError(RankxformError, ValueError):
    """A strategy cannot be derived: what is given leaves something open, or contradicts itself.

    reasons: each with the option that answers it.
    """

    exit_code = 3
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        reasons: Sequence[str],
        what: str = "the strategy cannot be derived",
        tries: Sequence[str] = (),
    ) -> DerivationError:
        """Build the message for `reasons` why not; `tries` would answer some."""
        count = "1 reason" if len(reasons) == 1 else f"{len(reasons)} reasons"
        listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(reasons, 1))
        error = cls(f"{what}, for {count}", *tries, details=listed)
        error.reasons = tuple(reasons)
        return error


class StorageError(RankxformError):
    """The file system refused a read or a write."""

    exit_code = 4

    @classmethod
    def of(cls, error: OSError, path: object, doing: str) -> StorageError:
        """Build the message for `error`, met while `doing` (a verb) something to `path`."""
        return cls(f"cannot {doing}: {error.strerror or error}", where=str(path))


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a question that proposes the most similar of `words`. "": none is similar.

    >>> did_you_mean("src_startegy", ["src_strategy", "step"]), did_you_mean("x", ["step"])
    ('; did you mean src_strategy?', '')
    """
    from difflib import get_close_matches

    candidates = list(words)
    matches = [c for c in candidates if word.strip("-") and c.startswith(word)][:1]
    matches = matches or get_close_matches(word, candidates, 1, _LIKENESS)
    return f"; did you mean {matches[0]}?" if matches else ""


class FormatError(_MessageError):
    """Bytes that do not follow their format; the message says what was found, at which byte.

    Format readers do not know the file; their callers turn this into a StrategyError or a
    CheckpointError that names it.
    """


@contextmanager
def raising_storage_errors(path: object = None, action: str = "use") -> Iterator[None]:
    """Turn an OSError raised inside the block into a StorageError.

    `path`: what the block uses; None: the error knows, or it is some file. `action`: the verb of
    the message "cannot <action>".
    """
    try:
        yield
    except OSError as error:
        raise StorageError.of(error, path or error.filename or "a file", action) from error


class DifferenceError(RankxformError):
    """A verification found that two sides are not the same."""

    exit_code = 6


class StoppedError(RankxformError):
    """Stopped before the end by a signal or because a process stopped answering."""

    exit_code = 75


class PeerError(RankxformError):
    """Another process failed in a way that is no RankxformError: a bug of ours."""


def peer_error(
    name: str,
    parts: Message,
    process: str = "",
    fault: str | None = None,
    rule: str | None = None,
    reasons: tuple[str, ...] = (),
) -> RankxformError:
    """Return the error that every process raises for one that failed with class `name`.

    >>> peer_error("StorageError", Message("disk full")), peer_error("KeyError", Message("x"))
    (StorageError('disk full'), PeerError('x'))
    """
    kinds = {kind.__name__: kind for kind in RankxformError.__subclasses__()}
    error = kinds.get(name, PeerError).of_parts(parts)
    error.process, error.fault, error.rule = process, fault, rule
    if isinstance(error, DerivationError):
        error.reasons = reasons
    return error


def exit_code(error: BaseException) -> int:
    """Return the process exit code for `error`.

    >>> exit_code(StorageError("disk full")), exit_code(KeyError())
    (4, 70)
    """
    if isinstance(error, RankxformError):
        return error.exit_code
    return RankxformError.exit_code
