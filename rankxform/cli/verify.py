"""The verb ``verify``."""

from __future__ import annotations

from rankxform.errors import UsageError
from rankxform.transport import Team

from .options import Parsed, refuse_given_options
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    from rankxform.verbs.verify import verify
    from rankxform.verbs.verify_folder import share_of_files, verify_folder

    screen = Screen(options, team)
    if team.bcast(lambda: _means_manifest(options)):
        subset = options.subset
        share = None if subset is None else team.bcast(lambda: share_of_files(subset))
        request, verdict = None, verify_folder(options.src, team, screen.progress, share)
    else:
        request = screen.request()
        verdict = verify(request, team, screen.begin)
    code = screen.show("verify", lambda: verdict)
    if request is not None:
        screen.page_of_work(verdict=verdict)
    return code


def _means_manifest(options: Parsed) -> bool:
    """Whether one folder was given, to be compared with its own manifest."""
    if options.dst or options.dst_option or options.src_option or not options.src:
        if options.subset is not None:
            raise UsageError("--subset is for one folder: verify DST")
        return False
    if options.src_strategy or options.dst_strategy:
        raise UsageError("one folder and a strategy: verify SRC DST, or verify DST by its manifest")
    refuse_given_options(
        options,
        "and one folder: it is compared with its own manifest; leave the option out, or give the "
        "source too: verify SRC DST",
    )
    if options.report:
        raise UsageError("--report is for a comparison with the source: verify SRC DST")
    return True
