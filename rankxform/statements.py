"""What files declare, and what is noticed about it: two statements of one fact must agree.

Whoever reads a statement, in a file's name, a header, metadata, an option, makes a `Statement` of
it. `contradictions` is the only place where statements are compared.

Whatever is noticed is a `Finding`: an error refuses, a warning is printed first and last, a notice
once. Findings are collected, and `require` is the only place where one is raised.

A rule is a generator of findings: it looks at one subject, a value that has everything that was
read, reads no file and never communicates. The subject is the same on every process, therefore the
findings are. Rules stand in the rooms of their subjects. They are run in the order of their
definitions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from operator import eq
from types import ModuleType
from typing import Any, TypeVar

from rankxform.values import NamedTuple, dataclass

from .errors import CheckpointError, DifferenceError, Message, RankxformError

ERROR, WARNING, NOTICE = "error", "warning", "notice"
NAMES, HEADERS, CATALOG, SAMPLES, PLAN, CONTENT, WRITTEN = (
    "names", "headers", "catalog", "samples", "plan", "content", "written",
)  # fmt: skip
"""What has to be known before something can be noticed."""
UNFIT = "unfit"
ACCEPT_ABSENT, ACCEPT_CONTRADICTIONS, ACCEPT_STEP = "absent", "contradictions", "step"
ACCEPT_EQUAL_SLICES, ACCEPT_EXTRA_RANKS, ACCEPT_NEW = "equal-slices", "extra-ranks", "new"
"""Values of --accept: doubts that do not refuse a source."""


@dataclass(frozen=True)
class Where:
    """Which elements of a tensor a finding is about."""

    tensor: str  # its name
    # Of the first, in the full tensor; None: no element was compared.
    index: tuple[int, ...] | None = None
    count: int = 0  # how many elements are meant
    size: int = 0  # of so many that were compared


class Finding(NamedTuple):
    """Something noticed: an error refuses, a warning is printed first and last, a notice once."""

    message: Message  # what was expected and found, and what to try
    severity: str = ERROR  # "error", "warning" or "notice"
    id: str = UNFIT  # the kind of statement that is contradicted; JSON's `fault`
    error: type[RankxformError] = CheckpointError  # what is raised if it refuses
    file: str | None = None  # address of the file that it is about; None: it is of no single file
    need: str = NAMES  # what had to be known to notice it
    rule: str = ""  # the name of its rule; JSON's `rule`
    group: str = ""  # of its rule: what a check calls it; "": by `need`
    elements: Where | None = None  # None: it is of the file as a whole

    @property
    def text(self) -> str:
        """The message, with what can be tried."""
        return str(self.message)

    @property
    def text_of_inspection(self) -> str:
        """What it says where nothing is converted: options that only a conversion has, as such."""
        tries = self.message.tries
        options = [
            text for text in tries if re.match("--(?!src-strategy|src-pattern|suffix)", text)
        ]
        message = self.message._replace(tries=tuple(t for t in tries if t not in options))
        text = str(message).replace("\n", "; ")
        return f"{text}; in a conversion {', or '.join(options)}" if options else text

    @property
    def group_name(self) -> str:
        """What a check calls what it is about."""
        return self.group or ("copies" if self.need == SAMPLES else "statements")

    @classmethod
    def of_error(cls, error: RankxformError, need: str = HEADERS) -> Finding:
        """Return an error that a pure function raised."""
        return cls(error.parts, error=type(error), need=need)


def as_warning(text: str, need: str = NAMES) -> Finding:
    """Return a finding that is printed first and last: what may be wrong."""
    return Finding(Message(text), WARNING, need=need)


def as_notice(text: str, need: str = NAMES) -> Finding:
    """Return a finding that is printed once: what was assumed."""
    return Finding(Message(text), NOTICE, need=need)


def as_difference(
    text: str, file: str | None, elements: Where | None = None, rule: str = ""
) -> Finding:
    """Return what makes a destination another than it should be."""
    return Finding(
        Message(text), error=DifferenceError, file=file, need=WRITTEN, rule=rule, elements=elements
    )


def as_accepted(noticed: Any) -> Any:
    """Return an error as the warning that it is where it is accepted; anything else as it is."""
    if not isinstance(noticed, Finding) or noticed.severity != ERROR:
        return noticed
    message = noticed.message._replace(tries=(), details="")
    return noticed._replace(severity=WARNING, message=message)


def errors_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that refuse."""
    return tuple(finding for finding in findings if finding.severity == ERROR)


class HasFindings:
    """Something with findings, and what they say by severity, in their order."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What refuses it."""
        return errors_of(self.findings)

    @property
    def notices(self) -> tuple[str, ...]:
        """What was assumed."""
        return tuple(f.text for f in self.findings if f.severity == NOTICE)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be wrong."""
        return tuple(f.text for f in self.findings if f.severity == WARNING)


def require(findings: Iterable[Finding], *, is_counted: bool = True) -> None:
    """Raise the first error; its details say how many others there are if `is_counted`."""
    errors = errors_of(findings)
    if not errors:
        return
    first, others = errors[0], len(errors) - 1
    counted = f"{others} more such fault{'s' if others > 1 else ''}; inspect lists them"
    details = (first.message.details, counted if others and is_counted else "")
    error = first.error.of_parts(first.message._replace(details="\n".join(filter(None, details))))
    is_fault = first.need != PLAN or first.id != UNFIT
    error.fault, error.rule = first.id if is_fault else None, first.rule or None
    raise error


Check = TypeVar("Check", bound=Callable[..., Iterator[Any]])


class Rule(NamedTuple):
    """A rule, as it is registered."""

    name: str  # of its function
    need: str
    check: Callable[..., Iterator[Any]]
    accept: str  # the value of --accept by which its errors are warnings; "": there is none
    group: str  # what a check calls what it is about; "": by `need`


def rule(need: str, accept: str = "", *, group: str = "") -> Callable[[Check], Check]:
    """Register a generator of findings."""

    def register(check: Check) -> Check:
        check.rule = Rule(check.__name__, need, check, accept, group)  # type: ignore[attr-defined]
        return check

    return register


def rules_of(need: str, modules: Iterable[ModuleType]) -> list[Rule]:
    """Return the rules of modules that need something, in the order in which they are run."""
    rules = (
        getattr(value, "rule", None)
        for module in modules
        for value in vars(module).values()
        if getattr(value, "__module__", "") == module.__name__  # others are imported
    )
    return [rule for rule in rules if isinstance(rule, Rule) and rule.need == need]


def run_rules(
    need: str,
    modules: Iterable[ModuleType],
    subject: Any,
    accepts: Callable[[str], bool] = lambda doubt: False,
) -> Iterator[Any]:
    """Yield what all rules of a need find, one rule after the other; of samples evidence too.

    modules: with these rules, in the order in which they are run; who has the subject knows them
    (`verbs.rules` lists all). accepts: tells which values of --accept are given for all names, by
    which errors are warnings.
    """
    for name, _, check, accept, group in rules_of(need, modules):
        is_accepted = accept and accepts(accept)
        for noticed in map(as_accepted, check(subject)) if is_accepted else check(subject):
            is_finding = isinstance(noticed, Finding)
            yield noticed._replace(need=need, rule=name, group=group) if is_finding else noticed


def _same_shape(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tell whether shapes agree; JSON lists an axis for each device axis of a nested map."""
    return a == b if len(a) == len(b) else prod(a) == prod(b)


def _not_before(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tell whether the second counts on from the first: a resumed run's files count from one."""
    return all(first <= second for first, second in zip(a, b))


class StatementKind(NamedTuple):
    """A kind of statements."""

    words: str  # what is stated, of `{of}`
    remedy: str  # what to do where two disagree, or for a warning what it may mean
    agree: Callable[[Any, Any], bool] = eq
    refused: bool = True  # whether that is a fault; otherwise it is a warning


STEP, ITERATION, NAMED_STEP, COMMIT = "step", "iteration", "named-step", "commit"
SHAPE, LAYER_SHAPE, BIAS_LENGTH, TYPE = "shape", "layers", "outputs", "type"
TOTAL_BYTES, MODEL_SIZE, BOXES, FILE_IDENTITY = "bytes", "size", "boxes", "files"

STATEMENT_KINDS: Mapping[str, StatementKind] = {
    STEP: StatementKind("{of} is", "bring the files of one step"),
    ITERATION: StatementKind(
        "the iteration is",
        "the job that loads it counts on from one of them",
        lambda a, b: bool(a & b),
        refused=False,
    ),
    NAMED_STEP: StatementKind(
        "{of} are",
        "was the file renamed, or overwritten by an earlier step?",
        _not_before,
        refused=False,
    ),
    SHAPE: StatementKind("the full shape of {of!r} is", "bring both of one network", _same_shape),
    LAYER_SHAPE: StatementKind(
        "from slices of one shape the full shape of {of} is",
        "is the strategy another network's?",
        refused=False,
    ),
    BIAS_LENGTH: StatementKind(
        "the full shape of {of!r} is",
        "is the strategy another network's?",
        lambda weight, bias: bias[0] in weight,  # an element for each row, or for each column
        refused=False,
    ),
    TYPE: StatementKind("the type of {of!r} is", "copy both again from one checkpoint"),
    TOTAL_BYTES: StatementKind(
        "the bytes of {of} are", "is a file missing, or of another checkpoint?", refused=False
    ),
    MODEL_SIZE: StatementKind("{of} is", "bring both of one model"),
    BOXES: StatementKind("{of!r} is sharded as", "bring both of one checkpoint"),
    FILE_IDENTITY: StatementKind("{of} is", "bring the one that was not changed or replaced"),
    COMMIT: StatementKind(
        "the commit is",
        "the files are of two versions of the model? Download them again",
        refused=False,
    ),
}
"""All kinds, by the id that a fault bears."""

ALL_TENSORS = "all tensors"
"""Of what bytes are stated."""


class Statement(NamedTuple):
    """One statement: the kind of fact, of what, the value, and where it stands, for messages.

    >>> Statement(STEP, "global_step", 100, "common.json").value
    100
    """

    kind: str
    subject: str
    value: Any
    where: str


class Contradiction(NamedTuple):
    """Two statements of one fact that do not agree."""

    first: Statement
    second: Statement

    @property
    def id(self) -> str:
        """The stable name of such a fault."""
        return self.first.kind

    @property
    def finding(self) -> Finding:
        """What differs, and what may be the reason: an error or a warning, by the kind."""
        kind, subject = STATEMENT_KINDS[self.id], self.first.subject
        first, second = (_value_text(statement.value) for statement in self)
        text = f"{kind.words.format(of=subject)} {first}, and {second} by {self.second.where}"
        message = Message(text, (kind.remedy,), self.first.where)
        return Finding(message, ERROR if kind.refused else WARNING, self.id, need=HEADERS)


def contradictions(statements: Iterable[Statement]) -> Iterator[Contradiction]:
    """Yield for each property whose statements differ the first statement and the first other one.

    >>> a = Statement(STEP, "global_step", 100, "common.json")
    >>> b = a._replace(value=90, where="iteration_00000090")
    >>> [one.finding.text for one in contradictions([a, b])]
    ... # doctest: +ELLIPSIS
    ['common.json: global_step is 100, and 90 by iteration_00000090; ...']
    """
    first: dict[tuple[str, str], Statement] = {}
    differing = set()
    for statement in statements:
        key = statement.kind, statement.subject
        earlier = first.setdefault(key, statement)
        if key not in differing and not STATEMENT_KINDS[statement.kind].agree(
            earlier.value, statement.value
        ):
            differing.add(key)
            yield Contradiction(earlier, statement)


def _value_text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, frozenset):
        return " or ".join(map(_value_text, sorted(value)))
    return str(list(value) if isinstance(value, tuple) else value)


# -- words as a shell reads them, of commands that are printed and pasted --------------------------


def join(words: Iterable[str]) -> str:
    r"""Return a command of these words, of which nothing is hidden or changed when it is printed.

    Control characters, and bytes that are no text, are written as bash, ksh, zsh and POSIX.1-2024
    read them.

    >>> print(join(["a b", "two\nlines", "it's\udcff"]))
    'a b' $'two\nlines' $'it\'s\377'
    """
    quoted = list[str]()
    for word in words:
        if word.isprintable():
            quoted.append(shlex.quote(word))
            continue
        escaped = ""
        for character in word:
            is_byte = "\udc80" <= character <= "\udcff"
            data = character.encode(errors="surrogateescape" if is_byte else "surrogatepass")
            plain = character if character.isprintable() else "".join(f"\\{b:03o}" for b in data)
            escaped += _ESCAPES.get(character, plain)
        quoted.append(f"$'{escaped}'")
    return " ".join(quoted)


def quote(word: str) -> str:
    """Return one word of a command."""
    return join([word])


_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}
