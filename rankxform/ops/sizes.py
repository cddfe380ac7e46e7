"""The sizes of a model, as its config.json and a mapping table state them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.map_toml import Expression, MapTable


class Sizes:
    """The sizes of a model: what its config.json states, and what a table makes of that."""

    def __init__(self, table: MapTable, config: Mapping[str, Any], label: str) -> None:
        """`label` is what messages call the configuration. Raises UsageError."""
        self.table, self.label = table, label
        self._stated = {k: v for k, v in config.items() if isinstance(v, (int, list, type(None)))}
        self._made: dict[str, Any] = {}
        for name, one in table.sizes.items():
            self._made[name] = one.value({**self._stated, **self._made})
        for one in table.requires:
            if not one.value(self.known):
                raise UsageError(
                    f"{label}: says otherwise than {one.text!r}, which {table.label} is for; give "
                    "a table of your own (--map FILE.toml)"
                )

    @property
    def known(self) -> Mapping[str, Any]:
        return {**self._stated, **self._made}

    def number(self, one: Expression, variables: Mapping[str, int]) -> int:
        """Return a number, from 0 on. Raises UsageError."""
        found = one.value({**self.known, **variables})
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise UsageError(
                f"{self.label}: {self.stated([one])} make {one.text!r} {found!r}; "
                f"{self.table.label} needs a number"
            )
        return found

    def holds(self, condition: Expression | None) -> bool:
        return condition is None or bool(condition.value(self.known))

    def stated(self, expressions: Iterable[Expression]) -> str:
        """Return, for messages, what the configuration states of what expressions depend on."""
        names: dict[str, None] = {}
        todo = [name for one in expressions for name in one.names]
        while todo:
            name = todo.pop(0)
            if name in self.table.sizes and self.table.sizes[name].text != name:
                todo += self.table.sizes[name].names
            elif name in self._stated:
                names[name] = None
        return ", ".join(f"{name} {self._stated[name]}" for name in names) or "no sizes"
