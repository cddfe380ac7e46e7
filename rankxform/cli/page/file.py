"""Where a page goes, and when it is made; only then is what draws it imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.display.text import warn
from rankxform.errors import RankxformError, UsageError
from rankxform.request import Request
from rankxform.storage.posix import is_below, open_for_reading, range_reader, write_atomically
from rankxform.transport import Team

if TYPE_CHECKING:
    from rankxform.source.open import Source
    from rankxform.target.target import Target
    from rankxform.verbs.plan import Plan

_START_OF_PAGE = b"<!doctype html>"


def check_page_path(path: str | None, request: Request, flag: str = "--report") -> None:
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
    elif src and is_below(target, Path(src)):
        wrong = "lies in SRC, which is never written to; name a file elsewhere"
    elif target.exists() and not _is_page(target):
        wrong = "is there already, and is no page; name another file"
    if wrong:
        raise UsageError(f"{flag} {path}: {wrong}")


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_for_reading(path) as (fd, _):
        return range_reader(fd, path)(0, len(_START_OF_PAGE)).lower() == _START_OF_PAGE


def save_page(file: str, facts: Mapping[str, Any]) -> None:
    """Write the page that draws facts, which gets its name once whole. Raises StorageError."""
    from rankxform.results.html import page

    text = page(facts["head"]["title"], facts)
    write_atomically(Path(file).absolute(), text.encode(errors="backslashreplace"), durable=False)


def write_page(
    options: argparse.Namespace, source: Source, target: Target, plan: Plan, **outcome: Any
) -> None:
    """Write the page of a plan, and of what came of it. Raises StorageError."""
    from .facts import PageResults, page_document

    save_page(
        options.report, page_document(source, target, plan, options.words, PageResults(**outcome))
    )


def write_page_of_work(
    options: argparse.Namespace,
    request: Request,
    source: Source,
    target: Target,
    team: Team,
    **outcome: Any,
) -> None:
    """Write the page of what was done, and has been told. Collective.

    What fails now is a warning: the work is done.
    """
    from rankxform.verbs.plan import plan_target

    try:
        plan = plan_target(request, source, target, team, with_room=False).plan
        team.bcast(lambda: write_page(options, source, target, plan, **outcome))
    except Exception as error:
        if team.rank == 0:
            error_prefix = "" if isinstance(error, RankxformError) else f"{type(error).__name__}: "
            warn(f"no page was written: {error_prefix}{error}")
