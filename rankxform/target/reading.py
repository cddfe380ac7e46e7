"""A source while its tensors are read, with the operands of what is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rankxform.engine.array_sink import Arrays
from rankxform.engine.operands import Operands
from rankxform.engine.pipeline import Inputs, Messenger, execute
from rankxform.formats.base import TensorSpec
from rankxform.planning.catalog import Parameter
from rankxform.planning.exchange import WorkPlan
from rankxform.source.opening import Source
from rankxform.storage.posix import OnProgress
from rankxform.storage.samples import check_content
from rankxform.storage.sources import Sources

from .target import Target


@contextmanager
def reading(
    source: Source,
    target: Target,
    work: WorkPlan | None = None,
    p2p: Messenger | None = None,
    on_progress: OnProgress = lambda done: None,
) -> Iterator[Inputs]:
    """Open the source's files, and those of an adapter, to do `work` (None: to look at tensors).

    Operands that processes send each other are in memory when it returns; where `work` has such,
    every process calls it, with messages.
    """
    with ExitStack() as stack:
        seen = target.evidence.seen

        def recheck(file: int) -> None:
            check_content(source.paths[file], source.indexes[file], seen.get(file, {}))

        sources = held = stack.enter_context(Sources(source.paths, source.indexes, recheck))
        planner, adapter = target.planner, target.adapter
        tensors: dict[str, tuple[Parameter, Sources]] = {}
        if any(any(one.steps) for one in planner.selection.parameters):
            tensors = {p.src_name: (p, sources) for p in planner.catalog.parameters}
        if adapter is not None:
            held = stack.enter_context(Sources(adapter.paths, adapter.indexes))
            more: list[Parameter] = adapter.table.parameters
            tensors.update((p.src_name, (p, held)) for p in more if "lora" in p.src_name)
        first = work.operands if work is not None else None
        if first is None:
            yield Inputs(sources, p2p, Operands(tensors))
            held.check_unchanged()
            return
        parameters = (one.parameter for one in first.transfers if one.targets)
        arrays = Arrays(TensorSpec(p.name, p.dtype, p.shape) for p in parameters)
        before = execute(first, Inputs(held, p2p), {0: arrays}, lambda done: on_progress(0))
        read = 0 if held is sources else before.read  # else it counts in what these read in all
        before = replace(before, read=read, written=0)
        yield Inputs(sources, p2p, Operands(tensors, arrays.take()), before)
