"""What a reader pays who follows a call through the package: `python -m tests.reader [--path | --types | --names | --json]`.

A checkpoint of two ranks is made by the tests' own writers, and four calls are traced in one process, each
once it is warm. `tests/test_architecture.py` holds the figures: they may fall and never rise.

- functions: entered at least once; rules (`rankxform.statements.rule`) are a list and no path, and are
  counted apart
- moves: in the list of functions by their first entry, how often the file changes; returns: into a file
  that was left before; upper moves: among `UPPER` alone
- depth: most functions of the package on the stack; types: classes of values that are made or passed
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import rankxform
from rankxform.verbs.rules import all_rules
from tests import reference

PACKAGE = Path(rankxform.__file__).parent
TESTS = Path(__file__).parent
UPPER = ("verbs/", "target/", "source/")
"""Where a conversion is put together."""
SAYS_NOTHING = {
    "own", "owned", "mine", "ours", "of", "on", "over", "at", "to", "by", "named", "stored", "placed",
    "between", "only", "look", "told", "has", "takes", "written", "made", "some", "one", "found", "given",
    "wanted", "rest", "inside", "around", "beside", "entered", "asked", "known", "held", "more", "every",
    "both", "other", "others", "that", "this", "thing", "things", "it", "all", "any", "apart", "alone",
    "put", "take", "get", "do", "done", "go", "run_it", "kept", "left", "gone", "seen", "said", "noted",
    "lacking", "missing", "start", "stop", "end",
}  # fmt: skip
"""Names of functions that say nothing of what is returned or done."""
SAYS_WITH_ITS_CLASS = {
    "start", "stop", "end", "put", "take", "get", "has", "of", "on", "at", "over", "to", "by", "it",
    "run_it",
}  # fmt: skip
"""Of these, what a public method may be called: its class is the noun."""
SHORT = 8
"""Lines of a helper that can as well stand where it is called."""
UNNAMED = ("<listcomp>", "<genexpr>", "<lambda>", "<dictcomp>", "<setcomp>", "<module>")


class Function(NamedTuple):
    path: Path
    node: ast.FunctionDef
    is_method: bool
    is_nested: bool

    @property
    def says_nothing(self) -> bool:
        name = self.node.name
        if name.strip("_") not in SAYS_NOTHING or name.startswith("__"):
            return False
        is_public_method = self.is_method and not name.startswith("_")
        return not (is_public_method and name in SAYS_WITH_ITS_CLASS)

    @property
    def returns_unlike_fields(self) -> bool:
        """Whether it returns a tuple of three or more fields that are not all of one type."""
        returns = self.node.returns
        if not (isinstance(returns, ast.Subscript) and ast.unparse(returns.value) == "tuple"):
            return False
        fields = returns.slice.elts if isinstance(returns.slice, ast.Tuple) else []
        types = {ast.unparse(field) for field in fields}
        return len(fields) > 2 and len(types) > 1 and "..." not in types

    @property
    def lines(self) -> int:
        body = self.node.body[1:] if ast.get_docstring(self.node) else self.node.body
        return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def functions_of(path: Path) -> Iterator[Function]:
    def walk(parent: ast.AST, is_class: bool, is_nested: bool) -> Iterator[Function]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef):
                yield Function(path, node, is_class, is_nested)
                yield from walk(node, False, True)
            else:
                yield from walk(node, is_class or isinstance(node, ast.ClassDef), is_nested)

    yield from walk(ast.parse(path.read_text()), False, False)


class TextMeasures(NamedTuple):
    functions: list[Function]
    functions_per_1000_lines: float
    says_nothing: list[Function]
    nested: int
    unlike_fields: list[Function]
    short_with_one_caller: int
    mirrored: int  # modules with a test module of their name at their place


def measure_text() -> TextMeasures:
    paths = sorted(PACKAGE.rglob("*.py"))
    functions = [function for path in paths for function in functions_of(path)]
    private = [f for f in functions if f.node.name[0] == "_" and not f.node.name.startswith("__")]
    definitions = Counter(function.node.name for function in private)
    uses: Counter[str] = Counter()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            uses[getattr(node, "id", getattr(node, "attr", ""))] += 1
    modules = [path.relative_to(PACKAGE) for path in paths if path.name != "__init__.py"]
    lines = sum(path.read_text().count("\n") for path in paths)
    return TextMeasures(
        functions,
        round(1000 * len(functions) / lines, 1),
        [function for function in functions if function.says_nothing],
        sum(function.is_nested for function in functions),
        [function for function in functions if function.returns_unlike_fields],
        sum(
            definitions[f.node.name] == uses[f.node.name] == 1 and f.lines <= SHORT for f in private
        ),
        sum((TESTS / m.parent / f"test_{m.name}").is_file() for m in modules),
    )


class CallMeasures(NamedTuple):
    functions: int
    without_rules: int
    files: int
    moves: int
    returns: int
    upper_moves: int
    depth: int
    types: list[str]
    order: list[tuple[str, str]]  # file and function, by first entry


class Trace:
    """First entries of the package's functions, and classes of the values that pass by."""

    def __init__(self) -> None:
        self.first_entries: dict[CodeType, tuple[str, str]] = {}
        self.types: dict[str, None] = {}
        self.depth = self.deepest = 0

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(f"{PACKAGE}/") or code.co_name in UNNAMED:
            return
        if event == "call":
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            if code not in self.first_entries:
                file = code.co_filename.removeprefix(f"{PACKAGE}/")
                self.first_entries[code] = file, getattr(code, "co_qualname", code.co_name)
                for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                    self.note(frame.f_locals.get(name))
        elif event == "return":
            self.depth -= 1
            self.note(returned)

    def note(self, value: Any, level: int = 0) -> None:
        """Note the class of a value, or of the first one in a collection."""
        kind = type(value)
        if kind.__module__.startswith("rankxform."):
            is_named_tuple = isinstance(value, tuple) and hasattr(kind, "_fields")
            if is_named_tuple or hasattr(kind, "__dataclass_fields__"):
                self.types[kind.__name__] = None
        elif level < 2 and kind in (tuple, list, dict) and value:
            first = next(iter(value.values() if kind is dict else value))
            self.note(first, level + 1)


def trace(call: Callable[[], object], is_rule: Callable[[str], bool]) -> CallMeasures:
    """Trace a call, after one that is not."""
    call()
    tracer = Trace()
    sys.setprofile(tracer)
    try:
        call()
    finally:
        sys.setprofile(None)
    order = [*tracer.first_entries.values()]
    files = [file for file, _ in order]
    moves, returns = count_moves(files)
    upper_moves, _ = count_moves([file for file in files if file.startswith(UPPER)])
    without_rules = sum(not is_rule(name) for _, name in order)
    return CallMeasures(
        len(order), without_rules, len({*files}), moves, returns, upper_moves, tracer.deepest,
        [*tracer.types], order,
    )  # fmt: skip


def count_moves(files: list[str]) -> tuple[int, int]:
    """Return how often the file changes in a list, and how often into one that was left.

    >>> count_moves(["a", "a", "b", "a"])
    (2, 1)
    """
    moves, returns, left = 0, 0, set[str]()
    for before, file in pairwise(files):
        if file != before:
            moves += 1
            left.add(before)
            returns += file in left
    return moves, returns


def measure_calls(folder: Path) -> dict[str, CallMeasures]:
    """Return what `transform`, `load` and both kinds of `verify` enter, of a two-rank checkpoint."""
    kinds = ("q", "k", "up", "down")
    params = {
        f"layers.{n}.{kind}.weight": ((64, 32), "Float32") for n in range(3) for kind in kinds
    }
    rows, columns = (
        [{name: ([2], tensor_map, 0, 0) for name in params}] for tensor_map in ([0, -1], [-1, 0])
    )
    src = reference.write_checkpoint(folder / "src", rows, params)
    a, b = (
        reference.write_strategy(folder / name, layouts)
        for name, layouts in (("a.ckpt", rows), ("b.ckpt", columns))
    )
    numbers = iter(range(9))

    def transform() -> None:
        rankxform.transform(src, folder / f"dst{next(numbers)}", a, b, progress=False)

    transform()
    dst = folder / "dst0"
    rules = {rule.name for rule in all_rules()}
    calls: dict[str, Callable[[], object]] = {
        "transform": transform,
        "load": lambda: rankxform.load(src, a, b, rank=0, progress=False),
        "verify SRC DST": lambda: rankxform.verify(src, dst, a, b, progress=False),
        "verify DST": lambda: rankxform.verify(dst, progress=False),
    }
    return {name: trace(call, rules.__contains__) for name, call in calls.items()}


def as_figures(measures: TextMeasures | CallMeasures) -> dict[str, float]:
    """Return the numbers of what was measured; of a list how long it is."""
    fields = measures._asdict().items()
    return {name: len(value) if isinstance(value, list) else value for name, value in fields}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reader", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--path", action="store_true", help="first entries of a transform, by file")
    parser.add_argument("--types", action="store_true", help="classes of values, by call")
    parser.add_argument("--names", action="store_true", help="functions whose names say nothing, or that return unlike fields")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the figures alone, as one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = measure_calls(Path(folder))
    text = measure_text()
    if options.json:
        figures = {name: as_figures(measures) for name, measures in calls.items()}
        print(json.dumps({**figures, "text": as_figures(text)}))
        return
    columns = [field for field in CallMeasures._fields if field not in ("types", "order")]
    print(f"{'':15}", *(f"{column:>13}" for column in columns), f"{'types':>6}")
    for name, measures in calls.items():
        print(f"{name:15}", *(f"{getattr(measures, c):>13}" for c in columns), f"{len(measures.types):>6}")  # fmt: skip
        if options.types:
            print(" ", ", ".join(measures.types))
    if options.path:
        here = ""
        for file, function in calls["transform"].order:
            print(f"{'' if file == here else file:>40}  {function}")
            here = file
    for name, figure in as_figures(text).items():
        print(f"{name.replace('_', ' '):25}{figure:>8}")
    for function in (*text.says_nothing, *text.unlike_fields) if options.names else ():
        print(f"{function.path.relative_to(PACKAGE.parent)}:{function.node.lineno} {function.node.name}")  # fmt: skip


if __name__ == "__main__":
    main()
