"""A source while its tensors are read, with the operands of what is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rankxform.engine.array_sink import ArraySink
from rankxform.engine.operands import Operands
from rankxform.engine.pipeline import Messenger, WorkInputs, execute
from rankxform.formats.base import TensorSpec
from rankxform.planning.catalog import Parameter
from rankxform.planning.exchange import WorkPlan
from rankxform.source.opening import Source
from rankxform.storage.posix import OnProgress
from rankxform.storage.samples import check_content
from rankxform.storage.sources import SourceReader

from .target import Target


@contextmanager
def open_work_inputs(
    source: Source,
    target: Target,
    work: WorkPlan | None = None,
    p2p: Messenger | None = None,
    on_progress: OnProgress = lambda nbytes: None,
) -> Iterator[WorkInputs]:
    """Open the source's files, and those of an adapter, to do `work` (None: to look at tensors).

    Operands that processes send each other are in memory when it returns; where `work` has such,
    every process calls it, with messages.
    """
    with ExitStack() as stack:
        digests_by_file = target.evidence.digests_by_file

        def recheck(file: int) -> None:
            check_content(source.paths[file], source.indexes[file], digests_by_file.get(file, {}))

        sources = operand_reader = stack.enter_context(
            SourceReader(source.paths, source.indexes, recheck)
        )
        planner, adapter = target.planner, target.adapter
        tensors: dict[str, tuple[Parameter, SourceReader]] = {}
        if any(any(parameter.steps) for parameter in planner.selection.parameters):
            tensors = {p.src_name: (p, sources) for p in planner.catalog.parameters}
        if adapter is not None:
            operand_reader = stack.enter_context(SourceReader(adapter.paths, adapter.indexes))
            adapter_parameters: list[Parameter] = adapter.table.parameters
            tensors.update(
                (p.src_name, (p, operand_reader))
                for p in adapter_parameters
                if "lora" in p.src_name
            )
        first = work.operands if work is not None else None
        if first is None:
            yield WorkInputs(sources, p2p, Operands(tensors))
            operand_reader.check_unchanged()
            return
        parameters = (transfer.parameter for transfer in first.transfers if transfer.targets)
        arrays = ArraySink(TensorSpec(p.name, p.dtype, p.shape) for p in parameters)
        operand_traffic = execute(
            first, WorkInputs(operand_reader, p2p), {0: arrays}, lambda nbytes: on_progress(0)
        )
        read = (
            0 if operand_reader is sources else operand_traffic.read
        )  # else it counts in what these read in all
        operand_traffic = replace(operand_traffic, read=read, written=0)
        yield WorkInputs(sources, p2p, Operands(tensors, arrays.take()), operand_traffic)
