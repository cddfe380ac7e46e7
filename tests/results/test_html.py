"""The page of --report: its facts are the plan's, it stands alone, and a browser shows them all."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest

from rankxform.display import text
from tests.cli.test_main import command as started
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
