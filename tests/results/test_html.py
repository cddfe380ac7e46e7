"""The page of --report: its facts are the plan's, it stands alone, and a browser shows them all."""

from __future__ import annotations

import html
import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest

from rankxform.display import text
from tests.cli.test_command import command as started
from tests.forked import run_forked
from tests.place import Place

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "data" / "models"
SCHEMA = json.loads((ROOT / "docs" / "page.schema.json").read_text())
PARAMS = {
    "layers.0.wq": ((64, 48), "Float16"),
    "layers.1.wq": ((64, 48), "Float16"),
    "adam_m.layers.0.wq": ((64, 48), "Float32"),
    "adam_m.layers.1.wq": ((64, 48), "Float32"),
    "experts": ((8, 16, 12), "Float32"),
    "norm & <bias>": ((48,), "Float32"),
    "</script><script>alert(1)": ((), "Float32"),
}
# Of a moment, or of a destination that a plan of its own does not know.
MEASURED = ("read_latency_bytes", "bytes_stored", "bytes_free", "written_by")
BROWSER = shutil.which("chromium")
NO_BROWSER = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("RANKXFORM_HOSTS"), reason="no chromium here"
)


def layouts(matrix, wq, experts):
    return {
        **dict.fromkeys([n for n in PARAMS if "wq" in n], (matrix, wq, 0, 0)),
        "experts": (matrix, experts, 0, 0),
        "norm & <bias>": (matrix, [-1], 0, 0),
        "</script><script>alert(1)": (matrix, [], 0, 0),
    }


SRC = [layouts([2, 4], [0, -1], [1, 0, -1])]
DST = [layouts([4, 2], [-1, 0], [0, -1, 1])]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, SRC, DST, PARAMS)


def command(*words, processes=1):
    """Return the exit code of a command, and what it says, errors first."""
    done = run_forked(words, processes, ROOT)
    return done.code, done.stderr + done.stdout


def shapes_of(folder, to):
    """Write the shapes of a real network as --shapes reads them."""
    lines = (folder / "params.txt").read_text()
    found = {
        name: {"shape": [int(n) for n in shape.split(",") if n.strip()]}
        for name, shape in re.findall(r"PARAM (\S+) \(([\d, ]*)\)", lines)
    }
    to.write_text(json.dumps(found))
    return to


def facts_in(page):
    """Return the facts of a page, which fetches nothing, as the schema has them."""
    text = page.read_text()
    asked = text.replace("http://www.w3.org/", "")
    assert not re.search(r"https?:|src=|href=|url\(|@import|<link|fetch\(|XMLHttp|import\(", asked)
    assert text.count("</script>") == 2, "no fact ends a script"
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text, re.S)[1])
    jsonschema.validate(facts, SCHEMA)
    return facts


def spread(runs):
    return [f + i * step for f, many, step in zip(*[iter(runs)] * 3) for i in range(many)]


def cells(flow):
    return {(flow["rows"][r], flow["columns"][c]): nbytes for r, c, nbytes in flow["cells"]}


def test_without_scripts_a_page_has_its_words(place):
    page = place.tmp / "page<&>.html"
    words = [place.src, place.dst, *place.strategies, "--report", page]
    assert command("transform", *words)[0] == 0
    facts = facts_in(page)
    text = re.search(r"<noscript>(.*?)</noscript>", page.read_text(), re.S)[1]
    shown = html.unescape(re.sub("<[^>]*>", " ", text))
    head, origin = facts["head"], facts["made"]
    amounts = [value for _, value in (*head["amounts"], *facts["words"], *origin["rows"])]
    for words in (head["title"], head["what"], head["told"], origin["command"], *amounts):
        assert words in shown, words
    assert "page<&>.html" not in text, "it is escaped"


@pytest.mark.parametrize("processes", [1, 3])
def test_a_conversion_and_its_verification(processes, place):
    page, flags = place.tmp / "page.html", place.strategies
    words = [place.src, place.dst, *flags, "--report", page]
    code, output = command("transform", *words, processes=processes)
    assert code == 0, output
    facts = facts_in(page)
    code, output = started("plan", place.src, *flags, "--json", "-n", processes)
    plan = json.loads(output)
    assert cells(facts["flow"]) == {
        (str(one["rank"]), src): nbytes
        for one in plan["shards"]
        for src, nbytes in one["bytes_from"].items()
    }
    for at, one in enumerate(plan["shards"]):
        assert sum(one["bytes_from"].values()) == one["bytes_needed"] == one["bytes_written"]
        assert facts["flow"]["row_sums"][at] == one["bytes_needed"]
    shown = facts["results"]["plan"]
    alike = set(plan) - {"shards", "version", "result", *MEASURED}
    assert {name: shown[name] for name in alike} == {name: plan[name] for name in alike}
    assert facts["head"]["title"] == "src -> dst"
    assert facts["head"]["what"] == "8 ranks -> 8 ranks"
    assert facts["head"]["told"].startswith("done, ") and facts["head"]["state"] == "right"
    kinds = {kind["title"]: kind for kind in facts["kinds"]["drawn"]}
    assert "with adam_m" in kinds["layers.*.wq (2)"]["about"]
    assert kinds["experts"]["about"].startswith("1 tensor of Float32 8 x 16 x 12; 6.14 kB")
    assert "norm & <bias>" in facts["kinds"]["same"], "what stays as it was is named alone"
    code, _ = command("verify", *words, processes=processes)
    head = facts_in(page)["head"]
    assert code == 0 and head["state"] == "right"
    assert head["told"].startswith("the same, every byte compared")
    file = place.dst / "rank_1" / "checkpoint_1.ckpt"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    code, _ = command("verify", *words, processes=processes)
    facts = facts_in(page)
    assert code == 6 and facts["head"]["state"] == "wrong" and "DIFFERENT" in facts["head"]["told"]
    assert facts["results"]["verify"]["differences"]
    assert sorted(p.name for p in place.tmp.iterdir() if p.suffix in (".html", ".part")) == [
        "page.html"
    ]


def test_where_no_page_can_be_is_said_first(place):
    flags = place.strategies
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
        code, output = command("inspect", place.src, "--page", page)
        assert code == 2 and why in output and "--page" in output
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
    plan, facts = json.loads(output), facts_in(page)
    assert code == 0 and page.stat().st_size < 2 << 20
    by_stage = cells(facts["flow"])
    assert {row for row, _ in by_stage} == set(map(str, range(8)))
    assert sum(by_stage.values()) == plan["bytes_written"]
    first = sum(sum(one["bytes_from"].values()) for one in plan["shards"] if one["rank"] < 64)
    assert sum(n for (row, _), n in by_stage.items() if row == "0") == first
    assert [len(side["stages"]) for side in facts["layers"]] == [16, 8]
    titles = [(one["title"], one["change"]) for one in facts["kinds"]["drawn"]]
    assert len(set(titles)) == len(titles), "a kind of several stages is drawn once"
    code, output = command(*words)
    assert code == 0 and re.search(r"^ +0 +64 +\S+ GB +\S+ GB +0, 1$", output, re.M), output
    code, output = command(*words, "-v")
    assert code == 0 and re.search(r"^ *511 ", output, re.M)
    code, output = command(*words, "--simulate", 512, "--nodes", 64, "--report", page)
    facts = facts_in(page)
    assert code == 0 and "by the cost model" in facts["head"]["told"]
    between = facts["results"]["simulation"]["between_nodes"]
    assert sum(cells(facts["nodes"]).values()) == sum(one["nbytes"] for one in between) > 0


@pytest.mark.parametrize("processes", [1, 3])
def test_where_the_time_went(processes, place):
    """What came from memory is said; a run that moved nothing has no times."""
    page = place.tmp / "page.html"
    words = [place.src, place.dst, *place.strategies, "--report", page, "--json"]
    code, output = command("transform", *words, processes=processes)
    assert code == 0, output
    done, time = json.loads(output), facts_in(page)["time"]
    fetched = done["bytes_fetched"]
    in_memory = fetched is not None and fetched < done["bytes_read"]
    assert in_memory == any("came from memory" in words for words in time["told"])
    code, _ = command("transform", *words)
    assert code == 0 and "time" not in facts_in(page), "nothing was moved the second time"


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


def test_a_page_of_some_ranks_and_of_few_layers_a_stage(place, tmp_path):
    page = place.tmp / "page.html"
    code, output = command("plan", place.src, *place.strategies, "--ranks", 0, "--report", page)
    assert code == 0, output
    kinds = {kind["title"]: kind for kind in facts_in(page)["kinds"]["drawn"]}
    held = {side["name"]: side["holds"] for side in kinds["layers.*.wq (2)"]["sides"]}
    assert held["after"] == "1 slice", held
    names = [f"layers.{i}.w" for i in range(6)]
    params = dict.fromkeys(names, ((8, 6), "Float32"))
    src = [{name: ([2], [0, -1], 0, 0)} for name in names]
    dst = [{name: ([2], [-1, 0], 0, 0)} for name in names]
    stages = Place(tmp_path / "stages", src, dst, params)
    code, output = command("plan", stages.src, *stages.strategies, "--report", page)
    assert code == 0, output
    assert len(facts_in(page)["kinds"]["drawn"]) == 1


def test_a_page_of_a_tensor_without_elements(tmp_path):
    params = {"empty": ((0, 4), "Float32"), "w": ((8, 4), "Float32")}
    layouts = [dict.fromkeys(params, ([1], [-1, -1], 0, 0))]
    place = Place(tmp_path, layouts, layouts, params)
    page = tmp_path / "page.html"
    code, output = command("transform", place.src, place.dst, *place.strategies, "--report", page)
    assert code == 0, output
    code, output = command(
        "transform", place.src, tmp_path / "dcp", "--src-strategy", place.a, "--dst-form", "dcp"
    )
    assert code == 0, output
    words = ["--dst-strategy", place.b, "--report", page]
    code, output = command("transform", tmp_path / "dcp", tmp_path / "again", *words)
    assert code == 0 and facts_in(page)["head"]["state"] == "right", output


# -- in a browser --------------------------------------------------------------------------------


def browse(page, script, tmp, width=1200, dark=False):
    """Return what a script, which awaits, returns in a page."""
    text = page.read_text()
    assert text.count("</body>") == 1
    found = "document.body.innerHTML = '<pre id=found></pre>';"
    found += "document.querySelector('#found').textContent = JSON.stringify(said);"
    run = f"<script>{{const said = (() => {{{script}}})(); {found}}}</script></body>"
    driven = tmp / "driven.html"
    driven.write_text(text.replace("</body>", run))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}",
         f"--user-data-dir={tmp / 'browser'}", f"--window-size={width},1000", "--dump-dom",
         driven.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    said = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert said, done.stdout[-2000:]
    return json.loads(re.sub("&lt;", "<", re.sub("&gt;", ">", said[1].replace("&amp;", "&"))))


OPEN = """
  const unfold = (root) => { for (let more = true; more;) { more = false;
    for (const one of root.querySelectorAll('details:not([open])')) {
      one.open = true; one.dispatchEvent(new Event('toggle')); more = true; } } };
"""
LOOK = f"""{OPEN} unfold(document);
  const boxes = [...document.querySelectorAll('svg')].map((svg) =>
    [...svg.querySelectorAll('text')].map((text) => [text.textContent, text.getBoundingClientRect()]));
  const over = boxes.flatMap((all) => all.flatMap(([a, p], i) => all.slice(i + 1).filter(([b, q]) =>
    p.left + 1 < q.right && q.left + 1 < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom)
    .map(([b]) => a + ' | ' + b)));
  const clipped = [...document.querySelectorAll('svg')].flatMap((svg) => {{
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter((text) => {{ const box = text.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
    }}).map((text) => text.textContent); }});
  const [ink, paper] = ['color', 'backgroundColor'].map((name) =>
    getComputedStyle(document.querySelector('main'))[name].match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0));
  const small = [...document.querySelectorAll('main *')].filter((one) => one.children.length === 0 &&
    one.textContent.trim() && one.tagName !== 'title' && parseFloat(getComputedStyle(one).fontSize) < 9);
  const asked = performance.getEntriesByType('resource').length;
  const keys = [...document.querySelectorAll('summary, input, .scroll')].filter((one) => one.tabIndex < 0).length;
  return {{over, clipped, wide: document.documentElement.scrollWidth - window.innerWidth, asked, keys,
    small: small.length, contrast: Math.abs(ink - paper), dark: ink > paper}};
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A conversion, a plan of a real network, and what two checkpoints hold."""
    tmp = tmp_path_factory.mktemp("pages")
    place = Place(tmp, SRC, DST, PARAMS)
    folder = MODELS / "llama2_7b"
    shapes = shapes_of(folder, tmp / "shapes.json")
    llama = ["--src-strategy", folder / "src_dp8mp1pp1_opt.ckpt", "--dst-strategy"]
    words = {
        "transform": [place.src, place.dst, *place.strategies, "--report"],
        "plan": ["--shapes", shapes, *llama, folder / "dst_dp2mp4pp1_opt.ckpt", "--report"],
        "inspect": [
            place.src, "--src-strategy", place.a, "--beside", place.dst, "--beside-strategy",
            place.b, "--page",
        ],
    }  # fmt: skip
    for verb, some in words.items():
        code, output = command(verb, *some, tmp / f"{verb}.html")
        assert code == 0, output
    return tmp


@pytest.mark.sampled
@NO_BROWSER
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (760, True), (500, False)])
@pytest.mark.parametrize("page", ["transform", "plan", "inspect"])
def test_a_browser_shows_it_whole(page, width, dark, pages, tmp_path):
    """No text over another or cut off, nothing wider than the window, nothing asked for; legible
    in light and dark; what can be opened is reached by keyboard."""
    seen = browse(pages / f"{page}.html", LOOK, tmp_path, width, dark)
    assert seen.pop("contrast") > 500 and seen.pop("wide") <= 0 and seen.pop("dark") is dark
    assert seen == {"over": [], "clipped": [], "asked": 0, "keys": 0, "small": 0}


# What draws nothing by itself: which version it is, an axis that is not there or not cut, and the
# step of a single file.
MUTATE = f"""{OPEN}
  const facts = JSON.parse(document.getElementById('facts').textContent);
  const shown = () => {{ const root = document.createElement('div');
    rankxformPage(facts, root); unfold(root); return root.innerHTML; }};
  const before = shown(), same = []; let many = 0;
  const visit = (node, path) => {{ for (const name of Object.keys(node)) {{
    const old = node[name], here = [...path, name];
    if (['version', 'result', 'placements'].includes(name) || (name === 'axes' && path.includes('shardings')) || (path.at(-1) === 'axes' && old === null)) continue;
    if (path.includes('shardings') && Array.isArray(node) && name % 3 === 2 && node[name - 1] === 1) continue; // the step of a single one
    if (old !== null && typeof old === 'object') {{ visit(old, here); continue; }}
    node[name] = typeof old === 'number' ? old + (Number.isInteger(old) ? 1 : old / 2 || 1)
      : typeof old === 'boolean' ? !old : old === null ? 'x' : old + 'x';
    let after; try {{ after = shown(); }} catch (error) {{ after = error; }}
    if (after === before) same.push(here.join('.'));
    node[name] = old; many++; }} }};
  visit(facts, []);
  return {{many, same, again: shown() === before}};
"""


@NO_BROWSER
@pytest.mark.parametrize("page", ["transform", "inspect"])
def test_each_fact_changes_what_is_shown(page, pages, tmp_path):
    found = browse(pages / f"{page}.html", MUTATE, tmp_path)
    assert found["many"] > 300 and found["again"]
    assert found["same"] == [], found["same"]


@NO_BROWSER
def test_bytes_and_times_read_as_they_do_elsewhere(pages, tmp_path):
    sizes = [0, 1, 999, 1000, 1001, 999_499, 999_500, 1_350_000_000, 372_060_048, 5e15, 7e17]
    times = [0, 3e-5, 0.00123, 0.0099, 0.4, 9.99, 12.3, 75, 3599, 7380]
    script = f"return [{json.dumps(sizes)}.map(rankxformPage.size), {json.dumps(times)}.map(rankxformPage.seconds)]"
    found = browse(pages / "plan.html", script, tmp_path)
    assert found == [list(map(text.format_size, sizes)), list(map(text.format_seconds, times))]


SEARCH = f"""{OPEN}
  const input = document.querySelector('input'), listed = () => [...document.querySelectorAll('.found code')].map((one) => one.textContent);
  const all = listed();
  input.value = 'ADAM 1.wq'; input.dispatchEvent(new Event('input'));
  const found = listed(); unfold(document.querySelector('.found'));
  const rows = [...document.querySelectorAll('.found td')].map((one) => one.textContent);
  input.value = 'nothing'; input.dispatchEvent(new Event('input'));
  return {{all: all.length, found, rows, none: listed().length, said: document.querySelector('[role=status]').textContent}};
"""


@NO_BROWSER
def test_a_tensor_is_searched(pages, tmp_path):
    found = browse(pages / "inspect.html", SEARCH, tmp_path)
    assert found["all"] == len(PARAMS) and found["none"] == 0
    assert found["said"] == f"0 of {len(PARAMS)} tensors"
    assert found["found"] == ["adam_m.layers.1.wq"]
    facts = facts_in(pages / "inspect.html")["contents"]
    wanted = []
    for one in facts:  # 8 ranks each, of which every second or fourth holds the same
        at = next(n for n, tensor in enumerate(one["tensors"]) if tensor[0] == found["found"][0])
        layout = one["layouts"][0]
        wanted.append(f"{layout['offsets'][layout['entries'].index(at)]:,}")
    assert len(found["rows"]) == 2 * 8 * 6
    assert found["rows"][4] == wanted[0] and found["rows"][8 * 6 + 4] == wanted[1]
