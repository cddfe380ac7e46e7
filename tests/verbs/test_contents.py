"""What the page of a checkpoint says of its content."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

from tests.results.test_html import PARAMS, command, facts_in, place

__all__ = ["place"]


def spread(runs):
    return [f + i * step for f, many, step in zip(*[iter(runs)] * 3) for i in range(many)]


def test_what_checkpoints_hold(place):
    """Each entry is found where the page says it is, in files that are read by nobody else."""
    page = place.tmp / "page.html"
    assert command("transform", place.src, place.dst, *place.strategies)[0] == 0
    words = ["inspect", place.src, "--src-strategy", place.a, "--page", page]
    code, output = command(*words, "--beside", place.dst, "--beside-strategy", place.b, "--json")
    assert code == 0 and json.loads(output)["page"] == str(page), output
    facts = facts_in(page)
    for one, folder in zip(facts["contents"], (place.src, place.dst), strict=True):
        names = [tensor[0] for tensor in one["tensors"]]
        assert sorted(names) == sorted(PARAMS) and one["title"] == str(folder)
        layer = names.index("layers.0.wq")
        assert names[layer + 1] == "adam_m.layers.0.wq", "a state stands behind its parameter"
        assert {tuple(tensor[2]) for tensor in one["tensors"]} == {s for s, _ in PARAMS.values()}
        values = {}
        for file, (path, rank, stage, nbytes) in enumerate(one["files"]):
            assert f"rank_{rank}/" in path and stage == 0 and nbytes == os.path.getsize(path)
            layout, data = one["layouts"][one["layout_of"][file]], Path(path).read_bytes()
            for entry, offset, size in zip(layout["entries"], layout["offsets"], layout["nbytes"]):
                values[names[entry], rank] = data[offset : offset + size]
        whole = values["norm & <bias>", 0]
        assert all(values["norm & <bias>", rank] == whole for rank in range(8))
        sharding = one["shardings"][one["tensors"][names.index("layers.0.wq")][4]]
        edges, cell_bytes = [spread(runs) for runs in sharding["edges"]], {}
        assert sharding["cells"] is None, "all cells of the grid have files"
        every = itertools.product(*(range(len(e) - 1) for e in edges))
        for cell, placement in zip(every, spread(sharding["files"]), strict=True):
            for file in spread(one["placements"][placement]):
                rank = one["files"][file][1]
                rows, columns = (e[i + 1] - e[i] for e, i in zip(edges, cell))
                assert len(values["layers.0.wq", rank]) == rows * columns * 2
                held = values["layers.0.wq", rank]
                assert cell_bytes.setdefault(tuple(cell), held) == held
        assert len(cell_bytes) > 1 and len(set(cell_bytes.values())) == len(cell_bytes)
    code, output = command("inspect", place.src, "--page", page)
    assert code == 2 and "--src-strategy" in output
    for words, why in (
        (["--beside", place.dst], "--beside is for --page"),
        (["--page", page, "--beside-strategy", place.b], "--beside-strategy is for --beside"),
        (["--page", page, "--check"], "--page and --check"),
    ):
        code, output = command("inspect", place.src, *words)
        assert code == 2 and why in output


def test_a_page_names_slices_that_no_file_holds(place):
    page = place.tmp / "page.html"
    for rank in (0, 4):  # the other copy of the slice too
        shutil.rmtree(Path(place.src) / f"rank_{rank}")
    code, output = command("inspect", place.src, "--src-strategy", place.a, "--page", page)
    assert code == 3 and "no source file holds" in output, output
    one = facts_in(page)["contents"][0]
    at = next(tensor[4] for tensor in one["tensors"] if tensor[0] == "layers.0.wq")
    assert one["faults"] and "in no file" in one["shardings"][at]["holds"]
