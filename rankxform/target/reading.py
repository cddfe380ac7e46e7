"""A source while its tensors are read, with the operands of what is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rankxform.engine.operands import Operands
from rankxform.engine.pipeline import Inputs, Messenger
from rankxform.planning.catalog import Parameter
from rankxform.source.opening import Source
from rankxform.storage.sources import Sources

from .target import Target


@contextmanager
def reading(source: Source, target: Target, p2p: Messenger | None = None) -> Iterator[Inputs]:
    """Open the source's files, and those of an adapter."""
    with ExitStack() as stack:
        sources = stack.enter_context(Sources(source.paths, source.indexes))
        planner, adapter = target.planner, target.adapter
        tensors: dict[str, tuple[Parameter, Sources]] = {}
        if any(any(one.steps) for one in planner.selection.parameters):
            tensors = {p.src_name: (p, sources) for p in planner.catalog.parameters}
        if adapter is not None:
            own = stack.enter_context(Sources(adapter.paths, adapter.indexes))
            more: list[Parameter] = adapter.table.parameters
            tensors.update((p.src_name, (p, own)) for p in more if "lora" in p.src_name)
        yield Inputs(sources, p2p, Operands(tensors))
