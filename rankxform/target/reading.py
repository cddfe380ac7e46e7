"""The source files of a conversion while they are read, with what steps need beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rankxform.engine.operands import Operands
from rankxform.planning.catalog import Parameter
from rankxform.storage.sources import Sources

from .aim import Conversion


@contextmanager
def opened(conversion: Conversion) -> Iterator[tuple[Sources, Operands]]:
    """Open the source's files, and those of an adapter."""
    with ExitStack() as stack:
        files, adapter = conversion.source, conversion.adapter
        sources = stack.enter_context(Sources(files.paths, files.indexes))
        planner = conversion.planner
        tensors: dict[str, tuple[Parameter, Sources]] = {}
        if any(any(one.steps) for one in planner.selection.parameters):
            tensors = {p.src_name: (p, sources) for p in planner.catalog.parameters}
        if adapter is not None:
            own = stack.enter_context(Sources(adapter.paths, adapter.indexes))
            more: list[Parameter] = adapter.table.parameters
            tensors.update((p.src_name, (p, own)) for p in more if "lora" in p.src_name)
        yield sources, Operands(tensors)
