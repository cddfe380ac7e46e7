"""Two forms from outside: rank files in one folder, and boxes that follow no strategy."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager

from rankxform.checkpoints.base import DestinationFiles, SelectedFiles
from rankxform.checkpoints.rank_folders import RankFoldersForm
from rankxform.geometry.box import Box
from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    GROUP_DESTINATION,
    TYPE_NUMBER,
    option,
)
from rankxform.planning.catalog import DeclaredBox, Description
from rankxform.values import dataclass
from tests import reference
from tests.cases import Case
from tests.geometry.test_tiling import split

ROW, COLUMN = [0, -1], [-1, 0]
CASE = Case(
    dict.fromkeys("abc", ((48, 42), "Int32")),
    [dict.fromkeys("abc", ([4], ROW, 0, 0))],
    [dict.fromkeys("abc", ([6], COLUMN, 0, 0))],
)


@contextmanager
def registered(registry, name, one):
    registry[name] = one
    try:
        yield
    finally:
        del registry[name]


@dataclass(frozen=True, kw_only=True)
class FlatOptions:
    digits: int = option(
        5,
        GROUP_DESTINATION,
        "digits of a file's number",
        AFFECTS_BYTES,
        AFFECTS_COMPARISON,
        kind=TYPE_NUMBER,
    )


class FlatFolder(RankFoldersForm):
    """All files in one folder, and a list of them that appears when they are complete."""

    name = "flat"
    options, own_options = ("digits",), FlatOptions

    def pattern(self, where):
        return "*.ckpt"

    def recognizes(self, listing, store):
        return "files.json" if "files.json" in listing.files else None

    def select(self, listing, where, store, needed):
        return SelectedFiles({int(name.removesuffix(".ckpt")): name for name in listing.files})

    def destination_files(self, planner, options, step, suffix):
        digits = options["digits"]
        return DestinationFiles({n: f"{n:0{digits}}{suffix}" for n in range(planner.dst.ranks)})

    def owns(self, name, file):
        return name.split(".")[0].endswith(str(file)) and "/" not in name

    def companion_names(self, names):
        return ("files.json",)

    def companions(self, planner, arrangement, common):
        return {"files.json": [json.dumps(sorted(arrangement.names.values())).encode()]}

    def foreign_files(self, listing, own):
        return []


class Tiles(FlatFolder):
    """Boxes of tensors, which follow no strategy, in files that are of no rank; some twice."""

    name, title = "tiles", "tiles"
    described = True
    training: str | None = None
    counters = False
    configured = False

    def pattern(self, where):
        return "parts/*"

    def recognizes(self, listing, store):
        return "tiles.json" if "tiles.json" in listing.files else None

    def select(self, listing, where, store, needed):
        boxes = {
            name: tuple(
                DeclaredBox(file, Box(tuple(start), tuple(stop)), f"/{suffix}")
                for file, start, stop, suffix in some
            )
            for name, some in json.loads(store.read("tiles.json")).items()
        }
        files = {one.file for some in boxes.values() for one in some}
        stated = {name: (dtype, shape) for name, (shape, dtype) in CASE.params.items()}
        return SelectedFiles(
            {file: f"parts/{file}.safetensors" for file in sorted(files)},
            description=Description(listing.at("tiles.json"), boxes=boxes, declared=stated),
        )


def write_tiles(folder, seed=1):
    """Deal the boxes of every tensor to 16 files."""
    folder.mkdir()
    rng, document, entries = random.Random(seed), {}, {}
    for name, (shape, dtype) in CASE.params.items():
        full = reference.full_tensor(name, shape, dtype)
        for number, box in enumerate(split(Box.whole(shape), rng)):
            for file in rng.sample(range(16), 2 if number % 2 else 1):
                key = f"{name}/{number}"
                document.setdefault(name, []).append([file, box.start, box.stop, number])
                entries.setdefault(file, {})[key] = (dtype, full[box.slices()])
    for file, some in entries.items():
        reference.write_safetensors(folder / f"parts/{file}.safetensors", some)
    (folder / "tiles.json").write_text(json.dumps(document))
