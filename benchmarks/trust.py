"""What it costs to be safe: the journal, and ``--verify``, as ratios of the move in one run.

``python -m benchmarks.trust CASE [--repeat 7]`` runs the case in turn in five ways, with 2 processes: with
fsync and without any journal (its entries and its file left out), as it is, with an entry every
fifth of a second instead of every half minute, with ``--verify``; and warm without fsync, plain and with
``--verify``. They take turns to begin. Prints the median move of each with
its range, and the median over the rounds of each ratio to the plain run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys

from benchmarks.cases import CASES, make
from tests.mpi_launch import environment, mpirun

PROGRAM = """
import sys
from rankxform.publish import journal
from rankxform.cli.main import main
{change}
sys.exit(main())
"""
NO_JOURNAL = """
def commit(self, parts, sums, on_progress):
    for part in parts.values():
        if self._durable:
            journal.sync(part)
journal.create = lambda path: None
journal.Journal._append = lambda self, line: None
journal.Journal.moved = lambda self, name, targets: None
journal.Journal.commit = commit
"""
OFTEN = "journal.JOURNAL_SECONDS = 0.2"
WAYS = {
    "no journal": (NO_JOURNAL, ()),
    "plain": ("", ()),
    "journal often": (OFTEN, ()),
    "verify": ("", ("--verify",)),
    "warm": ("", ("--no-fsync",)),
    "warm verify": ("", ("--no-fsync", "--verify")),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    _, src, a, b = make(options.case, options.folder)
    dst = f"{options.folder}/{options.case}-ckpt/dst"
    seconds = {way: [] for way in WAYS}
    for run in range(options.repeat + 1):  # the first is not counted
        first = run % len(WAYS)
        for way, (change, flags) in [*WAYS.items()][first:] + [*WAYS.items()][:first]:
            shutil.rmtree(dst, ignore_errors=True)
            os.sync()
            line = [*mpirun(options.processes), sys.executable, "-c"]
            line += [PROGRAM.format(change=change), "transform", src, dst, "--profile", *flags]
            line += [*(("--src-strategy", a) if a else ()), *(("--dst-strategy", b) if b else ())]
            done = subprocess.run(
                line, env=environment(), capture_output=True, text=True, check=True
            )
            if run:
                seconds[way].append(float(re.search(r"moved in ([\d.]+)", done.stdout)[1]))
    shutil.rmtree(dst)

    def ratio(way, base):
        return statistics.median(x / y for x, y in zip(seconds[way], seconds[base]))

    print(json.dumps({
        "case": options.case,
        **{way: [statistics.median(found), min(found), max(found)] for way, found in seconds.items()},
        "journal costs": ratio("plain", "no journal") - 1,
        "journal often costs": ratio("journal often", "no journal") - 1,
        "verify costs": ratio("verify", "plain") - 1,
        "verify costs warm": ratio("warm verify", "warm") - 1,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
