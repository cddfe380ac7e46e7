"""The sizes of a model, as its config.json and a mapping table state them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.map_toml import NOTHING, MapTable, SizeExpression


class ModelSizes:
    """The sizes of a model: what its config.json states, and what a table makes of that."""

    def __init__(self, table: MapTable, config: Mapping[str, Any], label: str) -> None:
        """`label` is what messages call the configuration. Raises UsageError."""
        self.table, self.label = table, label
        self._stated = {
            k: v for k, v in config.items() if isinstance(v, (int, str, list, type(None)))
        }
        self._made: dict[str, Any] = {}
        for name, expression in table.sizes.items():
            self._made[name] = expression.value({**self._stated, **self._made})
        self.known: Mapping[str, Any] = {**self._stated, **self._made}
        for expression in table.requires:
            if not expression.value(self.known):
                raise UsageError(
                    f"says otherwise than {expression.text!r}, which {table.label} is for",
                    "give a table of your own (--map FILE.toml)",
                    where=label,
                )

    def without(self, name: str) -> ModelSizes:
        """Return the sizes where the configuration states 0 of something."""
        return ModelSizes(self.table, {**self._stated, name: 0}, self.label)

    def number(self, expression: SizeExpression, variables: Mapping[str, int]) -> int:
        """Return a number, from 0 on. Raises UsageError."""
        size = expression.value(self.known, variables)
        if size is None:
            missing_names = [n for n in self._names([expression]) if self._stated.get(n) is None]
            keys = [name for name in missing_names if name not in self.table.sizes]
            raise UsageError(
                f"{' and '.join(keys) or expression.text} is missing, from which "
                f"{self.table.label} "
                "works out shapes",
                where=self.label,
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise UsageError(
                f"{self.stated([expression])} make {expression.text!r} {size!r}; "
                f"{self.table.label} "
                "needs a number",
                where=self.label,
            )
        return size

    def holds(
        self, condition: SizeExpression | None, variables: Mapping[str, int] = NOTHING
    ) -> bool:
        return condition is None or bool(condition.value(self.known, variables))

    def stated(self, expressions: Iterable[SizeExpression]) -> str:
        """Return, for messages, what the configuration states of what expressions depend on."""
        names = [n for n in self._names(expressions) if self._stated.get(n) is not None]
        return ", ".join(f"{name} {self._stated[name]}" for name in names) or "no sizes"

    def _names(self, expressions: Iterable[SizeExpression]) -> list[str]:
        """Return all names that expressions depend on, of sizes and of the configuration."""
        todo = [name for expression in expressions for name in expression.names]
        dependencies: dict[str, None] = {}
        while todo:
            name = todo.pop(0)
            if name not in dependencies:
                dependencies[name] = None
                if name in self.table.sizes:
                    todo += self.table.sizes[name].names
        return list(dependencies)
