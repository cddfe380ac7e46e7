"""Where the page of --report goes, and when it is made; only then is `page` imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.errors import RankxformError, UsageError
from rankxform.request import Request
from rankxform.storage.posix import is_inside, opened, range_reader, write_small
from rankxform.transport import Team

from .terminal import warn

if TYPE_CHECKING:
    from rankxform.job.plan import Plan
    from rankxform.job.report import Report
    from rankxform.job.verdict import Verdict
    from rankxform.target.aim import Conversion

_START_OF_PAGE = b"<!doctype html>"


def check(path: str | None, request: Request) -> None:
    """See that a page may be written there, if one is asked for, before the work.

    Raises UsageError.
    """
    if path is None:
        return
    src, dst = request.src, request.dst
    target = Path(path).absolute()
    wrong = None
    if target.suffix not in (".html", ".htm"):
        wrong = "name a file that ends in .html"
    elif not target.parent.is_dir() and (dst is None or target.parent != Path(dst).absolute()):
        wrong = "name a file in a folder that is there"
    elif src and is_inside(target, Path(src)):
        wrong = "lies in SRC, which is never written to; name a file elsewhere"
    elif target.exists() and not _is_page(target):
        wrong = "is there already, and is no page; name another file"
    if wrong:
        raise UsageError(f"--report {path}: {wrong}")


def _is_page(path: Path) -> bool:
    """Whether a file is a page of HTML, which another page may replace."""
    if not path.is_file():
        return False
    with opened(path) as (fd, _):
        start = range_reader(fd, path)(0, len(_START_OF_PAGE))
    return start.lower() == _START_OF_PAGE


def write(options: argparse.Namespace, conversion: Conversion, plan: Plan, **outcome: Any) -> None:
    """Write the page of a plan, which gets its name once it is whole. Raises StorageError."""
    from .page import page

    text = page(conversion, plan, options.words, **outcome)
    target = Path(options.report).absolute()
    write_small(target, text.encode(errors="backslashreplace"), durable=False)


def report(
    options: argparse.Namespace,
    processes: Team,
    prepared: Callable[[], Conversion],
    done: Report | None = None,
    verdict: Verdict | None = None,
) -> None:
    """Write the page of what was done, and has been told, if one is asked for. Collective.

    What fails now is a warning: the work is done.
    """
    if not options.report:
        return
    from rankxform.job.efficiency import plain_copy
    from rankxform.job.plan import summarize
    from rankxform.job.predict import predict_loads

    def write_it() -> None:
        plan = summarize(conversion, found, policy)
        write(options, conversion, plan, done=done, verdict=verdict, copy=copy)

    try:
        conversion = prepared()
        copy = plain_copy(conversion, done, processes) if done else None
        found, policy = predict_loads(conversion, processes.size, processes)
        processes.bcast(write_it)
    except RankxformError as error:
        if processes.rank == 0:
            warn(f"no page was written: {error}")
