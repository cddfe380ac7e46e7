"""Destination files written by the engine, and noted in a journal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from rankxform.engine.checksum import IntegrityChecker
from rankxform.engine.file_sink import Output, file_sinks, part_descriptors
from rankxform.engine.operands import Operands
from rankxform.engine.pipeline import Messenger, Traffic, execute
from rankxform.errors import RankxformError, StorageError
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.transfers import Transfer
from rankxform.storage.posix import OnProgress
from rankxform.storage.sources import Sources

from .journal import Journal


def write_parts(
    plan: WorkPlan,
    outputs: Mapping[int, Output],
    sources: Sources,
    memory: int,
    on_progress: OnProgress,
    *,
    journal: Journal | None = None,
    behind: bool = False,
    checker: IntegrityChecker | None = None,
    p2p: Messenger | None = None,
    operands: Operands | None = None,
) -> Traffic:
    """Carry out `plan`; write into the existing part files of `outputs`, by destination rank.

    `memory` bounds the buffers, in bytes. With `behind` the device writes while the work goes on.
    What is complete is noted in the `journal`, also when the work ends early; the rest is as for
    `rankxform.engine.pipeline.carry`.
    """
    parts = part_descriptors()
    sinks = file_sinks(outputs, parts, memory // 4, behind)

    def commit(on_progress: OnProgress = on_progress) -> None:
        for sink in sinks.values():
            sink.finish()
        if journal:
            sums = checker.take() if checker else {}
            journal.commit({rank: one.part for rank, one in outputs.items()}, sums, on_progress)

    def complete(transfer: Transfer) -> None:
        if journal and transfer.targets:
            journal.moved(transfer.parameter.name, transfer.targets)
            if journal.due:
                commit()

    try:
        traffic = execute(
            plan, sinks, sources, memory // 2, on_progress,
            p2p=p2p, checker=checker, on_complete=complete, operands=operands,
        )  # fmt: skip
        commit()
        traffic.seconds["fsync"] = journal.seconds if journal else 0.0
        return traffic
    except RankxformError:
        with suppress(StorageError):
            commit(lambda done: None)
        raise
    finally:
        parts.close()
