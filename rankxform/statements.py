"""Facts on a checkpoint, each stated by something: two statements of one fact must agree.

Whoever reads a statement, in a file's name, a header, metadata, an option, makes a `Statement` of
it, with its origin. `contradictions` is the only place where statements are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from .errors import Message

FILE_NAME, FOLDER, HEADER, SCALAR, METADATA, INDEX, TRACKER = (
    "file name", "folder", "header", "scalar", "metadata", "index", "tracker",
)  # fmt: skip
MANIFEST, CONFIGURATION, STRATEGY, ADAPTER, OPTION = (
    "manifest", "configuration", "strategy", "adapter", "option",
)  # fmt: skip
ORIGINS = (
    FILE_NAME, FOLDER, HEADER, SCALAR, METADATA, INDEX, TRACKER, MANIFEST, CONFIGURATION, STRATEGY,
    ADAPTER, OPTION,
)  # fmt: skip
"""What states facts."""


def _is_equal(a: Any, b: Any) -> bool:
    return bool(a == b)


def _same_shape(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tell whether shapes agree; JSON lists an axis for each device axis of a nested map."""
    return a == b if len(a) == len(b) else prod(a) == prod(b)


def _ends_in(weight: tuple[int, ...], bias: tuple[int, ...]) -> bool:
    """Tell whether a bias has an element for each row of its weight, or for each column."""
    return bias[0] in weight


def _share_one(a: frozenset[int], b: frozenset[int]) -> bool:
    return bool(a & b)


def _not_before(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tell whether the second counts on from the first: a resumed run's files count from one."""
    return all(first <= second for first, second in zip(a, b))


class StatementKind(NamedTuple):
    """A kind of facts."""

    words: str  # what is stated, of `{of}`
    remedy: str  # what to do where two disagree, or for a warning what it may mean
    agree: Callable[[Any, Any], bool] = _is_equal
    refused: bool = True  # whether that is a fault; otherwise it is a warning


STEP, ITERATION, NAMED_STEP, COMMIT = "step", "iteration", "named-step", "commit"
SHAPE, LAYER_SHAPE, BIAS_LENGTH, TYPE = "shape", "layers", "outputs", "type"
TOTAL_BYTES, MODEL_SIZE, BOXES, FILE_IDENTITY = "bytes", "size", "boxes", "files"

STATEMENT_KINDS: Mapping[str, StatementKind] = {
    STEP: StatementKind("{of} is", "bring the files of one step"),
    ITERATION: StatementKind(
        "the iteration is",
        "the job that loads it counts on from one of them",
        _share_one,
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
        "the full shape of {of!r} is", "is the strategy another network's?", _ends_in, refused=False
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
    """One statement: the kind of fact, of what, the value, what states it, and where, for messages.

    >>> Statement(STEP, "global_step", 100, METADATA, "common.json").value
    100
    """

    kind: str
    subject: str
    value: Any
    origin: str
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
    def refused(self) -> bool:
        """Whether it is a fault, or a warning."""
        return STATEMENT_KINDS[self.id].refused

    @property
    def parts(self) -> Message:
        """What differs, and what may be the reason."""
        kind, subject = STATEMENT_KINDS[self.id], self.first.subject
        first, second = (_written(fact.value) for fact in self)
        text = f"{kind.words.format(of=subject)} {first}, and {second} by {self.second.where}"
        return Message(text, (kind.remedy,), self.first.where)

    def __str__(self) -> str:
        return str(self.parts)


def contradictions(facts: Iterable[Statement]) -> Iterator[Contradiction]:
    """Yield for each property whose statements differ the first statement and the first other one.

    >>> a = Statement(STEP, "global_step", 100, METADATA, "common.json")
    >>> [str(one) for one in contradictions([a, a._replace(value=90, where="iteration_00000090")])]
    ... # doctest: +ELLIPSIS
    ['common.json: global_step is 100, and 90 by iteration_00000090; ...']
    """
    first: dict[tuple[str, str], Statement] = {}
    differing = set()
    for fact in facts:
        key = fact.kind, fact.subject
        earlier = first.setdefault(key, fact)
        if key not in differing and not STATEMENT_KINDS[fact.kind].agree(earlier.value, fact.value):
            differing.add(key)
            yield Contradiction(earlier, fact)


def _written(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, frozenset):
        return " or ".join(map(_written, sorted(value)))
    return str(list(value) if isinstance(value, tuple) else value)
