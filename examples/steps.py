"""What the examples share: commands that are shown and run, and checks of what came out.

An example is run in an empty folder: ``python -m examples.fewer_ranks FOLDER``. The sources are
made, and the results checked, by `tests.reference`, which shares no code with rankxform.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import reference

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "tests/data/tutorials"


def shapes(tutorial, scale=None, states=()):
    """Return {name: (full shape, type)} of a tutorial's network, with optimizer states."""
    found = {}
    for line in (TUTORIALS / tutorial / "params.txt").read_text().splitlines():
        match = re.match(r"PARAM (\S+) \(([\d, ]*)\) (\w+)", line)
        if match:
            shape = tuple((scale or {}).get(n, n) for n in map(int, re.findall(r"\d+", match[2])))
            for state in ("", *states):
                found[state + match[1]] = shape, match[3]
    return found


def rankxform(*words, processes=None):
    """Run the command, under mpirun where a number of processes is given; show it."""
    run(sys.executable, "-m", "rankxform", *words, processes=processes)


def run(*words, processes=None):
    beside = Path(sys.executable).parent / "mpirun"
    start = [str(beside) if beside.exists() else "mpirun", "-n", str(processes)]
    line = [*(start if processes else []), *map(str, words)]
    print("+", shlex.join(line), flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(line, check=True, env={**os.environ, "PYTHONPATH": path})


def check(folder, stages, params, **more):
    """See that every slice in `folder` is the one that `stages` want. Exits where one is not."""
    wrong = reference.wrong_slices(folder, stages, params, **more)
    if wrong:
        sys.exit("WRONG:\n" + "\n".join(wrong[:20]))
    ranks = 1 if stages is None else reference.stage_size(stages) * len(stages)
    print(f"checked: {len(params)} parameters on {ranks} ranks in {folder}", flush=True)


def same_files(first, second):
    """See that two folders hold the same files, byte for byte."""
    names = [sorted(p.relative_to(f) for p in Path(f).glob("rank_*/*")) for f in (first, second)]
    if names[0] != names[1] or any(
        (Path(first) / name).read_bytes() != (Path(second) / name).read_bytes() for name in names[0]
    ):
        sys.exit(f"WRONG: {first} and {second} differ")
    print(f"the same: {len(names[0])} files in {first} and {second}", flush=True)


def start(main):
    """Run an example in the folder that the command line names, or in a new one."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="rankxform-"))
    folder.mkdir(parents=True, exist_ok=True)
    main(folder.absolute())
