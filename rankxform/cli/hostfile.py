"""The verb ``hostfile``."""

from __future__ import annotations

from pathlib import Path

from rankxform.transport import Team

from .options import Parsed
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    from rankxform.storage.posix import read_bytes
    from rankxform.transport.hostfile import format_hostfile, parse_rank_table

    def convert() -> tuple[str, list[dict[str, object]]]:
        path = Path(options.table)
        hosts = parse_rank_table(read_bytes(path), str(path))
        return format_hostfile(hosts, options.style, options.slots), list(map(vars, hosts))

    text, hosts = team.bcast(convert)
    Screen(options, team).result("hostfile", lambda: {"hosts": hosts}, lambda: text)
    return 0
