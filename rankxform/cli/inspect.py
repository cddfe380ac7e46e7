"""The verb ``inspect``."""

from __future__ import annotations

from typing import Any

from rankxform.display.text import shown_path
from rankxform.errors import CheckpointError, UsageError
from rankxform.options import flag_of
from rankxform.request import Request
from rankxform.results import DictResult, lines
from rankxform.transport import Team

from .maps import show_names
from .options import Parsed, refuse_given_options, request_options
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    screen = Screen(options, team)
    _check_page(options)
    if options.compare_replicas or options.check:
        from rankxform.verbs.check import check, compare_replicas

        if options.compare_replicas:
            request = team.bcast(lambda: _request(options, options.src_strategy))
            replicas = compare_replicas(request, team, screen.progress)
            return screen.show("replicas", lambda: replicas)
        request = team.bcast(lambda: _request(options, "none"))
        checked = check(request, options.full, team, screen.progress)
        return screen.show("check", lambda: checked)
    if options.full:
        raise UsageError("--full is for --check", "give both")
    if options.page is not None:
        return _write_page(options, team, screen)
    if options.src_strategy is not None and options.map is None:
        from rankxform.verbs.check import compare_samples

        samples = compare_samples(team.bcast(lambda: _request(options, "none")), team)
        return screen.show("evidence", lambda: samples)
    if options.map is not None:
        return show_names(team.bcast(lambda: _request(options, "none")), team, screen)
    from rankxform.inspection import inspect
    from rankxform.verbs.contents import Inspection

    def inspect_path() -> Inspection:
        refuse_given_options(
            options, "is for --check, --replicas, --page, --src-strategy or --map", ("src_pattern",)
        )
        return Inspection(inspect(options.path, options.src_pattern), is_raw=options.raw)

    return screen.show("inspect", inspect_path)


def _request(options: Parsed, dst: str | None) -> Request:
    return Request(options.path, None, options.src_strategy, dst, **request_options(options))


def _check_page(options: Parsed) -> None:
    """Refuse what does not belong to a page, and what belongs to one alone."""
    needs = {"beside": "page", "beside_strategy": "beside"}
    for name, needed_name in needs.items():
        if getattr(options, name) is not None and getattr(options, needed_name) is None:
            flag, needed_flag = flag_of(name), flag_of(needed_name)
            raise UsageError(f"{flag} is for {needed_flag}", f"{flag} and {needed_flag}")
    for name in ("check", "compare_replicas", "full", "map", "raw", "verbose"):
        if options.page is not None and getattr(options, name):
            flag = flag_of(name.removeprefix("compare_"))
            raise UsageError(f"--page and {flag}: a page does not show that", "leave one out")


def _write_page(options: Parsed, team: Team, screen: Screen) -> int:
    """Write a page of what one checkpoint holds, or two."""
    from rankxform.verbs.contents import contents

    from .page import check_page_path, save_page

    def make_requests() -> list[Request]:
        first = _request(options, "none")
        requests = [first]
        if options.beside is not None:
            requests.append(Request(options.beside, None, options.beside_strategy, "none"))
        for request in requests:
            check_page_path(options.page, request, "--page")
        return requests

    checkpoints = [contents(request, team) for request in team.bcast(make_requests)]
    faults = [text for checkpoint in checkpoints for text in checkpoint.faults]
    warnings = [text for checkpoint in checkpoints for text in checkpoint.warnings]
    head: dict[str, Any] = {
        "title": " | ".join(checkpoint.src for checkpoint in checkpoints),
        "what": "Contents",
        "told": " | ".join(checkpoint.in_short() for checkpoint in checkpoints),
        "state": "wrong" if faults else "plan",
        "amounts": [],
    }
    drawn = [checkpoint.facts for checkpoint in checkpoints]
    team.bcast(
        lambda: save_page(options.page, {"result": "contents", "head": head, "contents": drawn})
    )
    shown = [lines("", f"{shown_path(c.src)}: {c.in_short()}") for c in checkpoints]
    shown += [lines("WRONG", fault) for fault in faults]
    shown.append(lines("page", shown_path(options.page)))
    facts = {"page": options.page, "faults": faults, "warnings": warnings}
    code = CheckpointError.exit_code if faults else 0
    return screen.show("contents", lambda: DictResult(facts, (*shown,), code))
