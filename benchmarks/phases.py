"""A plot of where the time goes, by number of processes.

``python -m benchmarks.phases CASE FILE.svg [--processes 1,2,4,8] [--repeat 5] [--fsync]`` runs the case with each
number of processes and draws, for the run of median length, the mean over its processes of the
seconds in each phase, stacked. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import shutil

from benchmarks.cases import CASES, make
from benchmarks.move import rankxform

COLOURS = {
    "start": "#b0b0b0", "index": "#8fbcd4", "plan": "#5b8fb9", "compare": "#35608a",
    "read": "#8cc084", "copy": "#e8c15a", "write": "#d9822b", "fsync": "#a23b3b",
    "publish": "#6b4c9a", "wait": "#e3e3e3",
}  # fmt: skip


def phases(output):
    """Return the mean seconds of each phase from what ``--profile`` printed."""
    lines = output[output.index("\nprocess ") :].split("\n\n")[0].strip().splitlines()
    names = lines[0].split()[1:-1]
    rows = [[float(cell) for cell in line.split()[1:-1]] for line in lines[1:] if line[0] == " "]
    return {n: sum(column) / len(rows) for n, column in zip(names, zip(*rows))}


def draw(bars, title, target):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rankxform"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    places = range(len(bars))
    below = [0.0] * len(bars)
    for name, colour in COLOURS.items():
        heights = [found.get(name, 0.0) for found in bars.values()]
        if max(heights) > 0.001:
            axes.bar(places, heights, bottom=below, color=colour, label=name, width=0.6)
            below = [a + b for a, b in zip(below, heights)]
    for place, total in zip(places, below):
        axes.text(place, total, f"{total:.2f} s", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(list(places), [f"{p}" for p in bars])
    axes.set_xlabel("processes")
    axes.set_ylabel("seconds, mean over processes")
    axes.set_ylim(0, max(below) * 1.12)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, bbox_to_anchor=(1, 1), fontsize=9)
    figure.savefig(target, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("target")
    parser.add_argument("--processes", default="1,2,4,8")
    parser.add_argument("--folder", default="/tmp/rankxform-bench")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--fsync", action="store_true")
    options = parser.parse_args()
    case, src, a, b = make(options.case, options.folder)
    dst = f"{options.folder}/{options.case}-ckpt/dst"
    bars = {}
    for processes in map(int, options.processes.split(",")):
        runs = []
        for _ in range(options.repeat):
            shutil.rmtree(dst, ignore_errors=True)
            os.sync()
            more = () if options.fsync else ("--no-fsync",)
            found = phases(rankxform(src, dst, a, b, processes, *more)[2])
            runs.append((sum(found.values()), found))
        runs.sort(key=lambda run: run[0])
        bars[processes] = runs[len(runs) // 2][1]
        print(processes, {n: round(s, 4) for n, s in bars[processes].items()}, flush=True)
    shutil.rmtree(dst, ignore_errors=True)
    synced = "with fsync" if options.fsync else "without fsync"
    draw(bars, f"{case.about}, 2 cores, {synced}", options.target)


if __name__ == "__main__":
    main()
