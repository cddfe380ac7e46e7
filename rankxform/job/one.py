"""One destination rank's file, under a name of the caller's, made by one process on its own."""

from __future__ import annotations

from pathlib import Path

from rankxform.engine.file_sink import Output
from rankxform.engine.pipeline import write_parts
from rankxform.errors import UsageError
from rankxform.planning.transfers import Portion
from rankxform.storage.posix import create, is_same, make_folder, own_name, publish, remove, sync
from rankxform.storage.sources import Sources
from rankxform.transport import Serial

from .checks import compare_ranks
from .measure import task
from .outputs import Layouts
from .prepare import prepare
from .request import Request


def convert_one(request: Request, target: Path) -> None:
    """Write the file of the one rank of `request` as `target`, complete or not at all.

    A file that is there is replaced, also by several processes at once. There is no manifest and
    no journal: what is stopped is begun anew.
    """
    conversion = prepare(request, Serial())
    compare_ranks(conversion, Serial())
    if any(is_same(target, path) for path in conversion.shards.paths.values()):
        raise UsageError(f"{target}: is a source file, which is never written to")
    (rank,) = conversion.ranks
    output = Output(own_name(target), Layouts(conversion).of(rank))
    portion = Portion(rank, 0, len(conversion.planner.names(rank)))
    work = task(conversion, [[portion]], Serial())
    make_folder(target.parent)
    create(output.part)
    try:
        with Sources(conversion.shards.paths, conversion.indexes) as sources:
            write_parts(
                work.moves,
                {rank: output},
                sources,
                request.memory,
                lambda done: None,
                call=work.choice.call,
            )
        if request.fsync:
            sync(output.part)
        publish(output.part, target, durable=request.fsync)
    except BaseException:
        remove(output.part)
        raise
