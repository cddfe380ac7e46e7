"""The verb ``hostfile``."""

from __future__ import annotations

from pathlib import Path

from rankxform.results import DictResult, lines
from rankxform.transport import Team

from .options import Parsed
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    from rankxform.storage.posix import read_bytes
    from rankxform.transport.hostfile import format_hostfile, parse_rank_table

    def convert() -> DictResult:
        path = Path(options.table)
        hosts = parse_rank_table(read_bytes(path), str(path))
        text = format_hostfile(hosts, options.style, options.slots)
        return DictResult({"hosts": [*map(vars, hosts)]}, (lines("", *text.splitlines()),))

    return Screen(options, team).show("hostfile", convert)
