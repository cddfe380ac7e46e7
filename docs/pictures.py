"""Write the pictures of docs/ with Chromium: `python docs/pictures.py`, after a change of the page.

They are looked at, not compared: another version of a browser or a font draws other pixels.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankxform.request import Request
from rankxform.results.html import page
from rankxform.target.resolve import resolve
from rankxform.transport import SerialTeam
from rankxform.verbs.picture import as_drawn, kinds

HERE = Path(__file__).parent
DATA = HERE.parent / "tests" / "data"
BROWSER = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


FEWEST_ROWS = 50
"""A picture with fewer different rows of pixels shows nothing: the page's script failed."""


def shoot(html: Path, name: str, width: int, height: int) -> None:
    """Write a picture of a page's upper part. Raises ValueError if the page draws nothing."""
    place = f"--screenshot={HERE / name}"
    size = f"--window-size={width},{height}"
    subprocess.run([*BROWSER, place, size, html.as_uri()], check=True, capture_output=True)
    if count_different_rows(HERE / name) < FEWEST_ROWS:
        raise ValueError(f"{name} has one colour: the page's script failed")


def count_different_rows(png: Path) -> int:
    """Return how many different rows of pixels, as its filters encode them, a PNG file has."""
    data, position, content = png.read_bytes(), 8, b""
    height = int.from_bytes(data[20:24], "big")
    while position < len(data):
        end = position + 8 + int.from_bytes(data[position : position + 4], "big")
        if data[position + 4 : position + 8] == b"IDAT":
            content += data[position + 8 : end]
        position = end + 4  # a checksum stands behind each chunk
    pixels = zlib.decompress(content)
    row = len(pixels) // height
    return len({pixels[start : start + row] for start in range(0, len(pixels), row)})


def sharding() -> Mapping[str, Any]:
    """How Llama-2 7B is sharded by two real jobs: dp8 with optimizer shards, then dp2 mp4."""
    folder = DATA / "models" / "llama2_7b"
    lines = re.findall(r"PARAM (\S+) \(([\d, ]*)\) (\w+)", (folder / "params.txt").read_text())
    shapes = {
        name: {"shape": [int(n) for n in shape.split(",") if n.strip()], "dtype": dtype}
        for name, shape, dtype in lines
    }
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "shapes.json"
        path.write_text(json.dumps(shapes))
        src, dst = (str(folder / f"{n}_opt.ckpt") for n in ("src_dp8mp1pp1", "dst_dp2mp4pp1"))
        request = Request("", None, src, dst, shapes=str(path))
        target = resolve(request, SerialTeam()).target
    drawn = [as_drawn(kind) for kind in kinds(target) if re.search(r"\.w[12]\.weight", kind.name)]
    return {"kinds": {"drawn": drawn, "more": [], "same": []}}


STRATEGIES = DATA / "tutorials" / "resilience_train_and_predict"
SRC = ["--src-strategy", STRATEGIES / "src_strategy.ckpt"]
DST = ["--dst-strategy", STRATEGIES / "dst_strategy.ckpt"]
SEARCH = """<script>
const find = document.querySelector("input");
find.value = "mapping.weight";
find.dispatchEvent(new Event("input"));
document.querySelectorAll(".found details")[0].open = true;
</script></body>"""


def run(*words: object) -> None:
    """Run the command on what `make demo` made."""
    line = [sys.executable, "-m", "rankxform", *map(str, words)]
    subprocess.run(line, check=True, capture_output=True, cwd=HERE.parent)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "page.html"
        made.write_text(page("How tensors are sharded", sharding()))
        shoot(made, "sharding.png", 820, 510)
        run("verify", "-n", 2, "demo-data/src", "demo-data/dst", *SRC, *DST, "--report", made)
        shoot(made, "report.png", 1000, 1000)
        run("inspect", "demo-data/src", *SRC, "--page", made)
        text = made.read_text().replace(str(HERE.parent / "demo-data"), "/data")
        made.write_text(text.replace("</body>", SEARCH))
        shoot(made, "contents.png", 1000, 900)
