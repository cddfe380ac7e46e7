"""The page of --report: its numbers are the plan's, it stands alone, and a browser shows it whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.cli.test_command import command
from tests.place import Place

MODELS = Path(__file__).parents[1] / "data" / "models"
PARAMS = {
    "layers.0.wq": ((64, 48), "Float16"),
    "layers.1.wq": ((64, 48), "Float16"),
    "adam_m.layers.0.wq": ((64, 48), "Float32"),
    "adam_m.layers.1.wq": ((64, 48), "Float32"),
    "experts": ((8, 16, 12), "Float32"),
    "norm & <bias>": ((48,), "Float32"),
    "scalar": ((), "Float32"),
}
BROWSER = shutil.which("chromium")
LOOK = """<script>
const boxes = [...document.querySelectorAll('svg')].map(s => [...s.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]));
const over = boxes.flatMap(all => all.flatMap(([a, p], i) => all.slice(i + 1).filter(([b, q]) =>
  p.left + 1 < q.right && q.left + 1 < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom).map(([b]) => a + ' | ' + b)));
const wide = document.documentElement.scrollWidth - window.innerWidth;
const asked = performance.getEntriesByType('resource').length;
document.body.innerHTML = '<pre id="found">' + JSON.stringify([over, wide, asked]).replace(/[&<>]/g, '') + '</pre>';
</script></body>"""


def layouts(matrix, wq, experts):
    return {
        **dict.fromkeys([n for n in PARAMS if "wq" in n], (matrix, wq, 0, 0)),
        "experts": (matrix, experts, 0, 0),
        "norm & <bias>": (matrix, [-1], 0, 0),
        "scalar": (matrix, [], 0, 0),
    }


SRC = [layouts([2, 4], [0, -1], [1, 0, -1])]
DST = [layouts([4, 2], [-1, 0], [0, -1, 1])]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, SRC, DST, PARAMS)


def shapes_of(folder, to):
    """Write the shapes of a real network as --shapes reads them."""
    lines = (folder / "params.txt").read_text()
    found = {
        name: {"shape": [int(n) for n in shape.split(",") if n.strip()]}
        for name, shape in re.findall(r"PARAM (\S+) \(([\d, ]*)\)", lines)
    }
    to.write_text(json.dumps(found))
    return to


def check_alone(text):
    """See that nothing is fetched, nothing runs, and every drawing is sound."""
    assert not re.search(r"https?:|//\w|src=|href=|url\(|@import|<script|<link", text)
    drawings = re.findall(r"<svg.*?</svg>", text)
    for one in drawings:
        ElementTree.fromstring(one)
    return drawings


def numbers(text):
    """Return the bytes by (destination, source) that the page lists."""
    row = r"<td[^>]*>(\S+)</td><td[^>]*>(\d+)</td><td[^>]*>([\d,]+)</td>"
    table = text.split("as numbers</summary>")[1].split("</table>")[0]
    return {(a, b): int(n.replace(",", "")) for a, b, n in re.findall(row, table)}


@pytest.mark.parametrize("processes", [None, 3])
def test_a_conversion_and_its_verification(processes, place):
    page, flags = place.tmp / "page.html", ["--src-strategy", place.a, "--dst-strategy", place.b]
    words = [place.src, place.dst, *flags, "--report", page]
    code, output = command("transform", *words, processes=processes)
    assert code == 0, output
    text = page.read_text()
    assert len(check_alone(text)) == 4
    code, output = command("plan", place.src, *flags, "--json", "-n", processes or 1)
    plan = json.loads(output)
    wanted = {
        (str(one["rank"]), src): nbytes
        for one in plan["shards"]
        for src, nbytes in one["bytes_from"].items()
    }
    assert numbers(text) == wanted
    for one in plan["shards"]:
        assert sum(one["bytes_from"].values()) == one["bytes_written"]
        assert sum(one["bytes_from"].values()) == one["bytes_needed"]
    code, output = command("plan", place.src, *flags, "--json", "--dtype", "fp32")
    cast = json.loads(output)
    assert [r["bytes_from"] for r in cast["shards"]] == [r["bytes_from"] for r in plan["shards"]]
    assert cast["bytes_written"] > plan["bytes_written"]
    assert f"{plan['bytes_read']:,} bytes, {plan['bytes_needed']:,} needed" in text
    assert "layers.*.wq (2)" in text and "with adam_m" in text
    assert re.search(r"\d+%</span> efficiency: a plain copy .* 64 MiB a process", text)
    assert "1 tensor of Float32 8 x 16 x 12; 6.14 kB" in text and "whole on 8 ranks" in text
    code, output = command("verify", *words, processes=processes)
    assert code == 0 and "The same" in page.read_text(), output
    file = place.dst / "rank_1" / "checkpoint_1.ckpt"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    code, output = command("verify", *words, processes=processes)
    text = page.read_text()
    assert code == 6 and "DIFFERENT" in text and "differs" in text
    check_alone(text)
    assert sorted(p.name for p in place.tmp.iterdir() if p.suffix in (".html", ".part")) == [
        "page.html"
    ]


def test_where_no_page_can_be_is_said_first(place):
    flags = ["--src-strategy", place.a, "--dst-strategy", place.b]
    other = place.tmp / "other.html"
    other.write_text("not a page")
    for page, why in (
        (place.tmp, "ends in .html"),
        (Path(place.src) / "rank_0" / "checkpoint_0.ckpt", "ends in .html"),
        (place.tmp / "none" / "page.html", "in a folder that is there"),
        (Path(place.src) / "page.html", "lies in SRC"),
        (other, "is there already, and is no page"),
    ):
        code, output = command("transform", place.src, place.dst, *flags, "--report", page)
        assert code == 2 and why in output
        assert not place.dst.exists()
    assert other.read_text() == "not a page"
    page = Path("/proc/page.html")  # nothing can be made there: the work is done and told before
    for verb in ("transform", "verify"):
        code, output = command(verb, place.src, place.dst, *flags, "--report", page, processes=2)
        assert code == 0 and "warning: no page was written" in output
        assert "\ndone " in output or "\nsame " in output
    code, output = command("verify", place.dst, "--report", place.tmp / "page.html")
    assert code == 2 and "verify SRC DST" in output


def test_a_thousand_ranks_by_stage(tmp_path):
    folder = MODELS / "deepseek_v3"
    src, dst = folder / "full671b_1024p_dp16mp4pp16ep8", folder / "dst_512p_dp16mp4pp8ep32"
    page, flags = tmp_path / "page.html", ["--src-strategy", src, "--dst-strategy", dst]
    words = ["plan", "--shapes", shapes_of(src, tmp_path / "shapes.json"), *flags]
    code, output = command(*words, "--json", "--report", page)
    plan, text = json.loads(output), page.read_text()
    assert code == 0 and len(text) < 1 << 20
    check_alone(text)
    by_stage = numbers(text)
    assert {row for row, _ in by_stage} == set(map(str, range(8)))
    assert sum(by_stage.values()) == plan["bytes_written"]
    first = sum(sum(one["bytes_from"].values()) for one in plan["shards"] if one["rank"] < 64)
    assert sum(n for (row, _), n in by_stage.items() if row == "0") == first
    code, output = command(*words)
    assert code == 0 and re.search(r"^ +0 +64 +\S+ GB +\S+ GB +0, 1$", output, re.M), output
    code, output = command(*words, "-v")
    assert code == 0 and re.search(r"^ *511 ", output, re.M)
    code, output = command(*words, "--simulate", 512, "--nodes", 64, "--report", page)
    text = page.read_text()
    assert code == 0 and "by the cost model" in text and "sent to other nodes" in text
    check_alone(text)


def test_the_efficiency_is_that_of_a_plain_copy_and_the_nodes_are_a_matrix(place):
    """Given bandwidths make the copy's time a number that a pencil can check."""
    page, flags = place.tmp / "page.html", ["--src-strategy", place.a, "--dst-strategy", place.b]
    costs = ["--costs", "read=100K,write=50K"]
    words = [place.src, place.dst, *flags, "--report", page, *costs, "--json"]
    code, output = command("transform", *words)
    assert code == 0, output
    done, text = json.loads(output), page.read_text()
    seconds = done["bytes_needed"] / (100 << 10) + done["bytes_written"] / (50 << 10)
    shown = re.search(r"([\d,]+)%</span> efficiency: .* would take (\S+) s,.*\(as --costs", text)
    assert float(shown[2]) == pytest.approx(seconds, rel=0.01)
    found = int(shown[1].replace(",", "")) / 100
    assert found == pytest.approx(seconds / done["move_seconds"], abs=0.006)
    nodes = ["--simulate", 4, "--nodes", 2, "--src-placement", "node", "--report", page, "--json"]
    code, output = command("plan", place.src, *flags, *nodes)
    facts, text = json.loads(output), page.read_text()
    between = {(one["src_node"], one["dst_node"]): one["nbytes"] for one in facts["between_nodes"]}
    assert between and set(between) <= {(0, 1), (1, 0)}
    for node, processes in ((0, facts["workloads"][:2]), (1, facts["workloads"][2:])):
        sent = sum(one["bytes_sent"] for one in processes)
        assert between.get((node, 1 - node), 0) == sent
    assert "bytes of each destination node by source node" in text
    check_alone(text)


@pytest.mark.skipif(
    BROWSER is None and "RANKXFORM_HOSTS" not in os.environ, reason="no chromium here"
)
@pytest.mark.parametrize("width", [1200, 480])
def test_a_browser_shows_it_whole(width, place):
    """No text over another, nothing wider than the window, nothing asked for."""
    page, flags = place.tmp / "page.html", ["--src-strategy", place.a, "--dst-strategy", place.b]
    pages = [["transform", place.src, place.dst, *flags]]
    folder = MODELS / "llama2_7b"
    shapes = shapes_of(folder, place.tmp / "shapes.json")
    llama = ["--src-strategy", folder / "src_dp8mp1pp1_opt.ckpt", "--dst-strategy"]
    pages.append(["plan", "--shapes", shapes, *llama, folder / "dst_dp2mp4pp1_opt.ckpt"])
    for words in pages:
        code, output = command(*words, "--report", page)
        assert code == 0, output
        text = page.read_text()
        assert text.count("</body>") == 1
        page.write_text(text.replace("</body>", LOOK))
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             f"--user-data-dir={place.tmp / 'browser'}", f"--window-size={width},1000",
             "--dump-dom", page.as_uri()],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
        over, wide, asked = json.loads(found[1])
        assert over == [] and wide <= 0 and asked == 0
