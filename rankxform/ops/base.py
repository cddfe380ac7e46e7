"""How a destination tensor comes from a source tensor: one derivation, applied before planning.

A derivation is a chain of operations, each a pure function of a `Tensor`, the same on every
process. Sources are read by `src_name` and `src_dtype`, destinations written by `name` and
`dtype`; where the types differ, the engine converts as it copies. Identity costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankxform.errors import RequestError
from rankxform.formats.base import Schema
from rankxform.geometry.box import Shape
from rankxform.layout.strategy import Strategy


@dataclass(frozen=True)
class Tensor:
    """A tensor being derived: its name and type in the source, and those that it gets.

    shape: its full shape, in elements. dropped: why it is not written, or "".
    """

    src_name: str
    name: str
    src_dtype: str
    dtype: str
    shape: Shape
    dropped: str = ""


Operation = Callable[[Tensor], Tensor]
"""Returns the tensor with what it changes. The new name must depend on the old name alone, so that
strategies, which know names only, can be renamed alike; a dropped tensor is renamed too."""

OPERATIONS: dict[str, Callable[[Mapping[str, Any]], Operation | None]] = {}
"""Makes an operation of the options of a conversion, None where they do not ask for it; in the
order in which they are applied; filled in the package's `__init__`."""


class Derivation:
    """The operations of one conversion."""

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self._operations = tuple(operations)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Derivation:
        """Return what the options of a conversion ask for. Raises UsageError."""
        made = (make(options) for make in OPERATIONS.values())
        return cls(one for one in made if one is not None)

    def __call__(self, tensor: Tensor) -> Tensor:
        for operation in self._operations:
            tensor = operation(tensor)
        return tensor

    def name_of(self, src_name: str) -> str:
        """Return the name that a source tensor gets, written or not."""
        return self(Tensor(src_name, src_name, "", "", ())).name

    def drops(self, src_name: str) -> bool:
        """Tell whether a source tensor of this name is not written."""
        return bool(self(Tensor(src_name, src_name, "", "", ())).dropped)

    def strategy(self, src: Strategy) -> Strategy:
        """Return a source strategy under the names that its parameters get. Raises RequestError."""
        new = self._renamed(src.stages_of)
        stages = [{new[old]: layout for old, layout in some.items()} for some in src.stages]
        same = all(list(a) == list(b) for a, b in zip(stages, src.stages))
        return src if same else replace(src, stages=tuple(stages))

    def schemas(
        self, schemas: Mapping[int, Schema], listed: Iterable[str] = ()
    ) -> tuple[Mapping[int, Schema], Mapping[str, str]]:
        """Return the schemas of files with the new names; and the source's names of renamed
        tensors, by new name.

        `listed` are the names in the source's strategy. Raises RequestError where two tensors, of
        the files or the strategy, get one name.
        """
        if not self._operations:
            return schemas, {}
        alike = dict.fromkeys(schemas.values())
        new = self._renamed([*listed, *(name for one in alike for name in one.names)])
        src_names = {name: old for old, name in new.items() if name != old}
        if not src_names:
            return schemas, {}
        renamed = {
            one: Schema(tuple(new[name] for name in one.names), one.dtypes, one.shapes)
            for one in alike
        }
        return {file: renamed[one] for file, one in schemas.items()}, src_names

    def _renamed(self, names: Iterable[str]) -> dict[str, str]:
        if not self._operations:
            return {name: name for name in names}
        found: dict[str, str] = {}
        owner: dict[str, str] = {}
        for name in names:
            found[name] = new = self.name_of(name)
            other = owner.setdefault(new, name)
            if other != name:
                raise RequestError(
                    f"{other!r} and {name!r} would both be called {new!r}; change --rename so that "
                    "each parameter has a name of its own"
                )
        return found
