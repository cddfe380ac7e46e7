"""Destination files written by the engine, and noted in a journal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from rankxform.engine.checksum import IntegrityChecker
from rankxform.engine.file_sink import OutputFile, file_sinks, part_descriptors
from rankxform.engine.pipeline import Traffic, WorkInputs, execute
from rankxform.errors import RankxformError, StorageError
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.transfers import Transfer
from rankxform.storage.posix import OnProgress

from .journal import Journal


def write_parts(
    work: WorkPlan,
    inputs: WorkInputs,
    outputs: Mapping[int, OutputFile],
    on_progress: OnProgress,
    journal: Journal | None = None,
    checker: IntegrityChecker | None = None,
) -> Traffic:
    """Carry out `work`; write into the existing part files of `outputs`, by destination rank.

    What is complete is noted in the `journal`, also when the work ends early; on a device that is
    full what is in buffers by then takes the room that the journal held. With one that is durable
    the device writes while the work goes on. A quarter of the work's memory is for the
    files' buffers; the rest is as for `rankxform.engine.pipeline.execute`.
    """
    parts = part_descriptors()
    is_durable = journal is not None and journal.durable
    sinks = file_sinks(outputs, parts, work.memory // 4, is_durable)
    if journal:
        journal.take_room(sum(sink.room for sink in sinks.values()))

    def commit(on_progress: OnProgress = on_progress) -> None:
        for sink in sinks.values():
            sink.finish()
        if journal:
            sums = checker.take() if checker else {}
            journal.commit(
                {rank: output.part for rank, output in outputs.items()}, sums, on_progress
            )

    def complete(transfer: Transfer) -> None:
        if journal and transfer.targets:
            journal.moved(transfer.parameter.name, transfer.targets)
            if journal.due:
                commit()

    try:
        traffic = execute(work, inputs, sinks, on_progress, checker, complete)
        commit()
        traffic.seconds["fsync"] = journal.seconds if journal else 0.0
        return traffic
    except RankxformError:
        with suppress(StorageError):
            if journal:
                journal.give_room()
            commit(lambda nbytes: None)
        raise
    finally:
        if journal:
            journal.close()
        parts.close()
