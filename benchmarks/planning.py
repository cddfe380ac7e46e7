"""Planning DeepSeek-V3 671B from 1,024 to 512 ranks, and indexing 1,024 files, on one process.

``python -m benchmarks.planning metadata`` writes and reads the metadata.json of the same ranks.
``python -m benchmarks.planning plan`` works from the real strategy files and shapes; no
checkpoint is there. ``index`` makes 1,024 sparse files with 160,000 entries in all, as the ranks
of 16 stages would save them, and indexes them from their headers.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import statistics
import sys
import time
from pathlib import Path

from rankxform.checkpoints.checkpoint2 import Checkpoint2Form
from rankxform.formats.container import Schema, item_size
from rankxform.planning.assign import Writers, assignment_of
from rankxform.planning.build_catalog import catalog_of
from rankxform.planning.catalog import Description
from rankxform.planning.plan import Planner, needed_bytes
from rankxform.planning.selection import select_parameters
from rankxform.planning.transfers import SliceRange
from rankxform.storage import user_files
from rankxform.storage.checkpoint2_metadata import read_checkpoint2_metadata
from rankxform.storage.posix import write_atomically
from rankxform.storage.source_reader import Indexer
from tests import reference

DEEPSEEK = Path(__file__).parents[1] / "tests/data/models/deepseek_v3"
SRC = DEEPSEEK / "full671b_1024p_dp16mp4pp16ep8"
DST = DEEPSEEK / "dst_512p_dp16mp4pp8ep32"


def rss():
    """Return this process's anonymous memory, in bytes."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def saved(src):
    """Return full shapes of the parameters that DeepSeek-V3's training saves."""
    params = {}
    for name, shape in re.findall(r"PARAM (\S+) \(([\d, ]*)\)", (SRC / "params.txt").read_text()):
        full = tuple(int(n) for n in shape.split(",") if n.strip())
        for state in ("", "adam_m.", "adam_v."):
            if state + name in src and "expert_load" not in name:
                params[state + name] = full
    return params


def schemas_of(src, params):
    found = {}
    for stage, layouts in enumerate(src.stages):
        held = [(n, layouts[n], params[n]) for n in layouts if n in params]
        shapes = tuple(tuple(s // c for s, c in zip(shape, lay.counts)) for _, lay, shape in held)
        schema = Schema(tuple(n for n, *_ in held), ("Float32",) * len(held), shapes)
        for rank in src.ranks_in(stage):
            found[rank] = schema
    return found


def plan():
    src = user_files.load_strategy(str(SRC / "merged_ckpt_strategy.ckpt"))
    dst = user_files.load_strategy(str(DST / "merged_ckpt_strategy.ckpt"))
    params = saved(src)
    schemas = schemas_of(src, params)
    paths = {rank: f"rank_{rank}" for rank in schemas}
    before = rss()
    began = time.perf_counter()
    source = catalog_of(Description(src.label, src), schemas, paths, schemas)
    planner = Planner(source, dst, select_parameters(source, dst))
    everything = [
        SliceRange(rank, 0, len(planner.layouts_of_file(rank))) for rank in range(dst.ranks)
    ]
    transfers = planner.transfers(everything)
    seconds = time.perf_counter() - began
    memory = rss() - before
    began = time.perf_counter()
    writers = Writers.of_one_folder((0,) * 1024, range(dst.ranks))
    assignment_of(planner, range(dst.ranks), writers)
    shared = time.perf_counter() - began
    copies = sum(len(m.copies(c)) * len(ranks) for m in transfers for c, ranks in m.targets.items())
    total = sum(item_size("Float32") * _elements(shape) for shape in params.values())
    return {
        "parameters": len(params), "copies": copies, "seconds": seconds, "memory": memory,
        "sharing among 1,024": shared, "bytes to read": needed_bytes(planner, everything), "bytes needed": total,
    }  # fmt: skip


def _elements(shape):
    count = 1
    for n in shape:
        count *= n
    return count


def index(folder="/tmp/rankxform-bench/index"):
    src = user_files.load_strategy(str(SRC / "merged_ckpt_strategy.ckpt"))
    params = saved(src)
    root = Path(folder)
    paths = []
    for stage, layouts in enumerate(src.stages):
        entries = [
            (n, tuple(s // c for s, c in zip(params[n], lay.counts)))
            for n, lay in layouts.items()
            if n in params
        ]
        heads = []
        at = 0
        for name, shape in entries:
            nbytes = 4 * _elements(shape)
            left = nbytes
            while left:
                piece = min(left, 512 << 20)
                head = reference.ckpt_head(name, "Float32", shape, piece)
                heads.append((at, head))
                at += len(head) + piece
                left -= piece
        for rank in src.ranks_in(stage):
            path = root / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
            paths.append(path)
            if not path.exists():
                path.parent.mkdir(parents=True)
                with path.open("wb") as file:
                    for offset, head in heads:
                        file.seek(offset)
                        file.write(head)
                    file.truncate(at)
    seconds, memory, entries = [], 0, 0
    for _ in range(5):
        before = rss()
        began = time.perf_counter()
        indexer = Indexer()
        found = [indexer.index(path) for path in paths]
        seconds.append(time.perf_counter() - began)
        memory = rss() - before
        entries = sum(len(one.schema.names) for one in found)
    shutil.rmtree(root)
    return {
        "files": len(paths),
        "entries": entries,
        "seconds": statistics.median(seconds),
        "memory": memory,
    }


def metadata(folder="/tmp/rankxform-bench/metadata"):
    """Write and read the metadata.json of DeepSeek-V3 as Checkpoint 2.0."""
    src = user_files.load_strategy(str(SRC / "merged_ckpt_strategy.ckpt"))
    params = saved(src)
    schemas = schemas_of(src, params)
    paths = {rank: f"rank_{rank}" for rank in schemas}
    source = catalog_of(Description(src.label, src), schemas, paths, schemas)
    planner = Planner(source, src, select_parameters(source, src))
    found = {"parameters": len(params)}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for dedup in (False, True):
        form, path = Checkpoint2Form(), Path(folder) / f"{dedup}.json"
        options = {"prefix": None, "iteration": 1, "dedup": dedup}
        arrangement = form.destination_files(planner, options, 1, ".safetensors")
        began = time.perf_counter()
        parts = form.companions(planner.with_parts(arrangement.parts), arrangement, {})
        write_atomically(path, parts["metadata.json"], durable=False)
        written, began = time.perf_counter() - began, time.perf_counter()
        said = read_checkpoint2_metadata(path)
        seconds = time.perf_counter() - began
        found["dedup" if dedup else "plain"] = {
            "bytes": path.stat().st_size, "write": written, "read": seconds,
            "broadcast": len(pickle.dumps(said, -1)),
        }  # fmt: skip
    shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    print(json.dumps({"plan": plan, "index": index, "metadata": metadata}[sys.argv[1]]()))
