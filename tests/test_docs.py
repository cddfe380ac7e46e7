"""README and docs: commands run, Python runs, generated pages and links are up to date."""

from __future__ import annotations

import ast
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import jsonschema
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import rankxform
from rankxform.cli import parser
from rankxform.cli.main import main
from rankxform.storage.store import STORAGE
from tests import reference, reference_forms
from tests.toy_storage import Memory

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
GENERATED = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
PICTURES = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
PARAMS = {
    "layers.0.weight": ((8, 8), "Float32"),
    "model.bias": ((8,), "Float32"),
    "adam_m.model.bias": ((8,), "Float32"),
}
ROWS = [{name: ([4], [0] + [-1] * (len(shape) - 1), 0, 0) for name, (shape, _) in PARAMS.items()}]
PAIRS = [{name: ([2], layout[1], 0, 0) for name, layout in ROWS[0].items()}]
# Elsewhere: a training program, another machine's disks, 8,192 ranks, node0 .. node3, the demo,
# a large model, MindFormers' configurations.
ELSEWHERE = (
    "launch", "/rxlocal", "--simulate", "node{rank}", "demo-data", "ranktable", "llama2_7b.ckpt",
    "train.yaml", "output", "rank_table", "s3://bucket/new",
)  # fmt: skip


def blocks(language):
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"(?ms)^```(\w*)\n(.*?)^```", text):
            if found[1] == language:
                line = text[: found.start()].count("\n") + 1
                marks = [pytest.mark.oracle] if "(net," in found[2] else []
                yield pytest.param(found[2], id=f"{page.name}:{line}", marks=marks)


def commands():
    """Every command of a block that is rankxform's, as it stands."""
    for block in blocks(""):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            found = re.match(
                r"\s*(?:\$ )?(?:mpirun .*?)?python -m rankxform (.*)|(?:\$ )?rankxform ([a-z].*)",
                line,
            )
            if found:
                text = found[1] or found[2]
                yield pytest.param(text, id=f"{block.id} {text[:40]}")


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.png")), ids=lambda path: path.name)
def test_a_picture_shows_something(path):
    """A page whose script fails draws nothing, and a picture of it has one colour."""
    assert PICTURES["count_different_rows"](path) >= PICTURES["FEWEST_ROWS"]


def test_the_page_of_a_picture_has_the_facts_that_the_script_draws():
    kinds = json.loads(json.dumps(PICTURES["sharding"]()["kinds"]))
    schema = json.loads((ROOT / "docs" / "page.schema.json").read_text())
    jsonschema.validate(kinds, {**schema["properties"]["kinds"], "$defs": schema["$defs"]})


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for src, a, b in (("SRC", "A", "B"), ("src", "a.ckpt", "b.ckpt")):
        reference.write_checkpoint(tmp_path / src, ROWS, PARAMS)
        reference.write_strategy(tmp_path / a, ROWS)
        reference.write_strategy(tmp_path / b, PAIRS)
    whole = reference.write_checkpoint(tmp_path / "whole", None, PARAMS)
    next(Path(whole).rglob("*.ckpt")).rename(tmp_path / "FILE.ckpt")
    (tmp_path / "PATH").symlink_to("SRC")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    parallel = ["--src-parallel", "dp=1,mp=4", "--dst-parallel", "dp=1,mp=2", "--predict"]
    strategy = ["strategy", "derive", "--from", "A", *parallel, "-o", "predict.ckpt"]
    assert main(strategy) == 0
    second = ["--dst-form", "checkpoint2", "--dst-strategy", "A", "--iteration", "100"]
    named = ["--dst-form", "dcp", "--names", "torch"]
    for dst, more in (("C2", second), ("HF", ["--dst-form", "huggingface"]), ("DCP", named)):
        assert main(["transform", "SRC", dst, "--src-strategy", "A", *more]) == 0
    model_of_docs(tmp_path)
    (tmp_path / "compiled.ckpt").write_bytes((tmp_path / "predict.ckpt").read_bytes())
    bucket = Memory()  # as tests/storage/objects have it of a server
    monkeypatch.setitem(STORAGE, "s3", bucket)
    for path in filter(Path.is_file, Path("SRC").rglob("*")):
        for prefix in ("run", "run/checkpoint"):
            bucket.files[f"s3://bucket/{prefix}/{path.relative_to('SRC')}"] = path.read_bytes()
    return tmp_path


def model_of_docs(tmp_path):
    """QWEN, a trained model in rank folders, with its strategy Q; PUBLISHED; and LORA, an adapter."""
    sample = ROOT / "tests" / "data" / "formats" / "hf_qwen3"
    (tmp_path / "PUBLISHED").symlink_to(sample / "hf")
    arrays = {n: w for n, (_, w) in reference_forms.read_unified(sample / "mindformers").items()}
    params = {n: (w.shape, "Float32") for n, w in arrays.items()}
    layouts = [{n: ([4], [0] + [-1] * (w.ndim - 1), 0, 0) for n, w in arrays.items()}]
    reference.write_strategy(tmp_path / "Q", layouts)
    reference.write_checkpoint(tmp_path / "QWEN", layouts, params, make=lambda n, s, d: arrays[n])
    module = "decoder.layers.0.self_attention.linear_proj"
    factors = {f"{module}.lora_A.weight": (2, 32), f"{module}.lora_B.weight": (16, 2)}
    tensors = {n: ("Float32", np.ones(s, "<f4").view("<u4")) for n, s in factors.items()}
    reference.write_safetensors(tmp_path / "LORA" / "adapter.safetensors", tensors)


def network():
    ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
    net = ms.nn.Cell()
    for number, (name, (shape, _)) in enumerate(PARAMS.items()):
        zeros = np.zeros(shape, np.float32)
        net.insert_param_to_cell(
            f"p{number}", ms.Parameter(zeros, name=name), check_name_contain_dot=False
        )
    return net


@pytest.mark.parametrize("text", [*commands()])
def test_a_command_runs(text, place):
    words = shlex.split(
        re.sub(r" -n (\d+|P) | > \S+$", " ", text), comments=True
    )  # by this process alone
    parser.parse_arguments(["8" if word == "N" else word for word in words])
    if any(part in text for part in ELSEWHERE):
        return
    renames = [after for word, after in itertools.pairwise(words) if word == "--rename"]
    new = {
        name: layout
        for name, layout in PAIRS[0].items()
        if not {"--exclude", "--no-optimizer"}.intersection(words) or "adam" not in name
    }
    for rename in renames:  # B is the strategy of the network with the new names
        regex, _, replacement = rename.partition("=")
        new = {
            re.sub(f"(?<![^.]){regex.lstrip('^')}", replacement, name): layout
            for name, layout in new.items()
        }
    reference.write_strategy("B", [new])
    if words[0] == "verify":
        given = ["SRC", "DST", "--src-strategy", "A", "--dst-strategy", "B", "--verify"]
        assert main(["transform", *given]) == 0
    if words[0] == "follow":
        words.remove("--watch")
        for path in Path("SRC").glob("rank_*/*"):
            path.rename(path.with_name(f"net-1_5{path.suffix}"))
        words[2] = "STEPS"
    assert main(words) == 0


@pytest.mark.parametrize(
    "text", [one for one in blocks("python") if not one.id.startswith("api.md")]
)
def test_python_runs(text, place):
    names = {"net": network()} if "(net," in text else {}
    exec(compile(text, "docs", "exec"), names)


@pytest.mark.parametrize("page", GENERATED)
def test_a_generated_page_is_up_to_date(page):
    assert (ROOT / "docs" / page).read_text() == GENERATED[page](), "run docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def functions_of(page):
    """Functions and classes that a page names by module: (module, name)."""
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`((?:[a-z_]+\.)+)(\w+)(?:\.\w+)?`", text)
    packages = {path.stem for path in (ROOT / "rankxform").iterdir()}
    return sorted({(m[:-1], name) for m, name in named if m.partition(".")[0] in packages})


@pytest.mark.parametrize(("module", "name"), functions_of("design.md"))
def test_what_the_design_names_is_there(module, name):
    package = ROOT.joinpath("rankxform", *module.split("."))
    if (package / f"{name}.py").exists() or (package / name).is_dir():  # a module
        return
    assert hasattr(import_module(f"rankxform.{module}"), name), f"{module}.{name}"


VERBS = ["convert", "transform", "verify", "load", "plan", "launch"]


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_verb_does_is_read_in_one_go(verb):
    """It has no function inside, and is short."""
    text = (ROOT / f"rankxform/verbs/{verb}.py").read_text()
    function = next(n for n in ast.parse(text).body if getattr(n, "name", None) == verb)
    assert not any(isinstance(node, ast.Lambda) for one in function.body for node in ast.walk(one))
    assert function.end_lineno - function.body[1].lineno < 30


def docstrings():
    """The docstrings of the package, by file."""
    for path in sorted((ROOT / "rankxform").rglob("*.py")):
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
        yield path.name, "\n".join(ast.get_docstring(node) or "" for node in nodes)


PAGES = [(page, (ROOT / "docs" / page).read_text()) for page in ("decisions.md", "design.md")]


@pytest.mark.parametrize(("page", "text"), [*PAGES, *docstrings()], ids=lambda one: one[:20])
def test_modules_that_a_text_names_are_there(page, text):
    package = ROOT / "rankxform"
    rooms = {path.name for path in package.iterdir() if path.is_dir()}
    named = re.findall(r"`(?:rankxform\.)?([a-z_]+)\.([A-Za-z_]+)[\w.]*`", text)
    for room, module in {one for one in named if one[0] in rooms}:
        own = (package / room / "__init__.py").read_text() if (package / room).is_dir() else ""
        known = (package / room / f"{module}.py").exists() or (package / room / module).is_dir()
        assert known or module in own, f"{room}.{module}"


def messages(page="errors.md"):
    """The messages that a page explains."""
    for line in (ROOT / "docs" / page).read_text().partition("## Rules")[0].splitlines():
        cell = line[2:].split(" | ")[0]
        if line.startswith("| ") and cell != "message":
            yield cell


@pytest.mark.parametrize("message", [*messages()])
def test_a_message_that_is_explained_is_one_of_the_code(message):
    """Its longest run of fixed words."""
    every = " ".join(path.read_text() for path in (ROOT / "rankxform").rglob("*.py"))
    every = re.sub(r"\s+", " ", re.sub(r'["\']\s*\n?\s*f?["\']', "", every))
    fixed = re.split(r" ?\.\.\. ?|\[.*?\]|[\w_]*\d[\w_.]*|\bP\b|'s\b", message)
    assert max(fixed, key=len).strip(" ,") in every


def test_errors_are_explained_in_chinese_too():
    assert [*messages("errors.zh.md")] == [*messages()]
    codes = [
        re.findall(r"(?m)^## (\d+)", (ROOT / "docs" / page).read_text())
        for page in ("errors.md", "errors.zh.md")
    ]
    assert codes[0] == codes[1] and len(codes[0]) == 6


def test_the_quick_start_in_chinese_has_the_same_commands():
    first, second = (
        re.findall(
            r"(?ms)^```.*?^```|^#+ ", (ROOT / "docs" / name).read_text().split("{toctree}")[0]
        )
        for name in ("index.md", "quickstart.zh.md")
    )
    blocks = [one for one in first if one.startswith("```") and one != "```\n```"]
    assert [one for one in second if one.startswith("```")] == blocks
    assert first.count("## ") == second.count("## ")


def test_the_site_builds_without_a_warning(tmp_path):
    line = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", tmp_path]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert "quickstart.zh.html" in page and f"rankxform {rankxform.__version__}" in page
    assert (tmp_path / "notebook.ipynb").is_file()
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=.https?:", page), "it needs no network"


def test_the_notebook_runs():
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept as it is written"
    where = {"metadata": {"path": str(ROOT / "docs")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's own transport
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    shown = [
        one["data"]["text/plain"].partition("(")[0]
        for cell in notebook.cells
        for one in cell.get("outputs", ())
        if "text/html" in one.get("data", {})
    ]
    assert shown == ["Contents", "Plan", "Report", "Verdict", "Contents"]
