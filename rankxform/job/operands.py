"""What the operations on the way need besides options: read on process 0, used by all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.map_toml import MapTable
from rankxform.layout.names import expression
from rankxform.ops.base import Derivation
from rankxform.ops.mapping import NameMap, Sizes
from rankxform.storage import maps

from .request import Request

CHOICES = ("qkv", "gate_up")
"""The options that choose a step of a map."""


@dataclass(frozen=True)
class Operands:
    """What files say of the operations: a mapping table, and the sizes of the model.

    label: what messages call the configuration.
    """

    table: MapTable | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""


def read_operands(request: Request, where: Path) -> Operands:
    """Read what the operations of a conversion of `where` need. Raises UsageError."""
    if request.map is None:
        for name in ("config", *CHOICES):
            if getattr(request, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --map; give both")
        return Operands()
    table = maps.load(request.map)
    for name in CHOICES:
        if getattr(request, name) is not None and name not in table.choices:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"leave out {flag}: {table.label} has no such choice")
    path = Path(request.config) if request.config is not None else where / maps.CONFIG
    if request.config is None and not path.is_file():
        raise UsageError(
            f"give --config, the model's config.json: {table.label} needs its sizes, and "
            f"{where} has none"
        )
    config = maps.config(path)
    named = [str(one) for one in config.get("architectures") or ()]
    if table.architectures and named and not set(named) & set(table.architectures):
        raise UsageError(
            f"{path}: is of a {named[0]}; {table.label} is for {' and '.join(table.architectures)}"
        )
    return Operands(table, config, str(path))


def derivation_of(request: Request, given: Operands) -> Derivation:
    """Return what becomes of the source's tensors; the same on every process."""
    return Derivation.of({**vars(request), "mapping": name_map(request, given)})


def name_map(request: Request, given: Operands) -> NameMap | None:
    """Return the map, with the model's sizes, if one is asked for. Raises UsageError."""
    if given.table is None:
        return None
    sizes = Sizes(given.table, given.config, given.label)
    chosen = {name: value for name in CHOICES if (value := getattr(request, name))}
    excluded = [expression(text, "--exclude") for text in request.exclude]
    return NameMap(sizes, chosen, excluded)


def assumptions(request: Request, derivation: Derivation) -> Iterator[str]:
    """Yield what no file records and is taken to be so."""
    for one in derivation.compositions:
        if isinstance(one, NameMap):
            open_ = [name for name in one.choices if getattr(request, name) is None]
            if open_:
                said = ", ".join(f"{name} {one.choices[name]}" for name in open_)
                flags = " and ".join("--" + name.replace("_", "-") for name in open_)
                yield (
                    f"{one.table.label}: takes {said}, as MindFormers does by default; no file "
                    f"records it ({flags} say otherwise)"
                )
