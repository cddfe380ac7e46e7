"""The verb ``hostfile``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rankxform.transport import Team

from .options import add_json, parse_count
from .screen import Screen

SUMMARY = "Print a hostfile made from an HCCL rank table."
EXAMPLE = "rankxform hostfile rank_table.json --style mpich > hosts"


def add_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "table", metavar="RANK_TABLE", help="rank table (JSON), version 0, 1.0 or 1.2"
    )
    verb.add_argument(
        "--style",
        choices=("openmpi", "mpich"),
        default="openmpi",
        help="whose mpirun reads it (default: %(default)s)",
    )
    verb.add_argument(
        "--slots",
        type=parse_count,
        metavar="N",
        help="processes on each host (default: its devices)",
    )
    add_json(verb)


def run(options: argparse.Namespace, team: Team) -> int:
    from rankxform.storage.posix import read_bytes
    from rankxform.transport.hostfile import format_hostfile, parse_rank_table

    def convert() -> tuple[str, list[dict[str, object]]]:
        path = Path(options.table)
        hosts = parse_rank_table(read_bytes(path), str(path))
        return format_hostfile(hosts, options.style, options.slots), list(map(vars, hosts))

    text, hosts = team.bcast(convert)
    Screen(options, team).result("hostfile", lambda: {"hosts": hosts}, lambda: text)
    return 0
