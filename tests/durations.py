"""How long tests take: ``python -m tests.durations`` prints the longest, and sums by file.

Every run of pytest writes what its tests took into ``build/durations/HALF.json``, HALF being what
RANKXFORM_HALF says (the Makefile: unit, oracle, mpich, openmpi, their hosts). ``--write`` renews
tests/durations.txt, the sums by file of all halves, by which collected tests are ordered: the
longest file first, so that no process begins a long one when the others are done.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "durations"
RAN = ROOT / "build" / "ran"
"""What each lane of `make test` ran: a document for each run of pytest."""
SUMS = ROOT / "tests" / "durations.txt"
SHOWN = 50


class Durations:
    """Orders the collected tests, and writes down how long each took (a plugin of pytest)."""

    def __init__(self, config):
        self._seconds, self._outcomes, self._began = Counter(), Counter(), time.monotonic()
        self._writes = not hasattr(config, "workerinput")  # a worker's reports reach its controller

    def pytest_collection_modifyitems(self, items):
        seconds = sums()
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or not report.passed:
            self._outcomes[report.outcome] += 1

    def pytest_sessionfinish(self):
        if not self._writes or not self._seconds:
            return
        lane = {**self._outcomes, "seconds": round(time.monotonic() - self._began)}
        RAN.mkdir(parents=True, exist_ok=True)
        half = os.environ.get("RANKXFORM_HALF", "some")
        (RAN / f"{half}-{os.getpid()}.json").write_text(json.dumps(lane))
        path = FOLDER / f"{os.environ.get('RANKXFORM_HALF', 'some')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        known |= {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        path.write_text(json.dumps(known, indent=0, sort_keys=True))


def sums():
    """Return the seconds of each file of tests, as tests/durations.txt has them."""
    lines = SUMS.read_text().splitlines() if SUMS.exists() else []
    return {name: int(seconds) for seconds, name in (line.split() for line in lines)}


def lanes_in_words():
    """Yield a line for each lane, and one of all."""
    total = Counter()
    for path in sorted(RAN.glob("*.json")):
        lane = Counter(json.loads(path.read_text()))
        total += lane
        yield f"{path.stem.rpartition('-')[0]}: {counted(lane)} in {lane['seconds']} s"
    yield f"all: {counted(total)}"


def counted(outcomes):
    return (
        f"{outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} skipped"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew tests/durations.txt")
    parser.add_argument("--ran", action="store_true", help="what `make test` ran, by lane")
    given = parser.parse_args()
    if given.ran:
        print("\n".join(lanes_in_words()))
        return
    by_test, by_file = {}, Counter()
    for path in sorted(FOLDER.glob("*.json")):
        for name, seconds in json.loads(path.read_text()).items():
            by_test[path.stem, name] = seconds
            by_file[name.partition("::")[0]] += seconds
    for (half, name), seconds in sorted(by_test.items(), key=lambda item: -item[1])[:SHOWN]:
        print(f"{seconds:8.1f} s  {half:14} {name}")
    print()
    lines = [f"{seconds:6.0f} {name}" for name, seconds in by_file.most_common() if seconds >= 1]
    print("\n".join(lines))
    if given.write:
        SUMS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
