"""A verb, an option and a section of a result are one declaration each; all that shows has them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import jsonschema
import pytest

from rankxform.cli.help import help_text
from rankxform.cli.parser import COMMANDS, parse_arguments
from rankxform.display.text import as_text
from rankxform.errors import UsageError
from rankxform.results import NORMAL, VERBOSE, Table, lines
from tests.cli import toy_verb

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def with_tally():
    toy_verb.register()
    yield
    del COMMANDS["tally"]


def test_a_verb_is_in_help_pages_and_completion():
    assert "  tally " in help_text(["--help"])
    shown = help_text(["tally", "--help"])
    assert "--twice " in shown and "--unit {files,heaps}" in shown and "PATH  " in shown
    page = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]["cli.md"]()
    assert "## tally" in page and "| `--twice` | Count every file twice. |" in page
    files = runpy.run_path(str(ROOT / "packaging" / "generate.py"))["FILES"]
    assert ".SH TALLY" in files["rankxform.1"]() and "\\-\\-twice" in files["rankxform.1"]()
    completion = files["rankxform.bash"]()
    assert '"tally") words="--help --json --twice --unit"' in completion
    assert '"tally --unit") words="files heaps"' in completion


def test_its_options_are_read_and_refused():
    parsed = parse_arguments(["tally", "--unit=heaps", "src", "--twice"])
    assert (parsed.path, parsed.unit, parsed.twice, parsed.json) == ("src", "heaps", True, False)
    with pytest.raises(UsageError, match="tally has no PATH"):
        parse_arguments(["tally"])
    with pytest.raises(UsageError, match="'heap' is none of files, heaps; did you mean heaps"):
        parse_arguments(["tally", "src", "--unit", "heap"])


class WithAnother(toy_verb.Tally):
    """The same with a section more."""

    def sections(self, level=NORMAL):
        yield from super().sections(level)
        yield lines("also", "a <section> of its own")
        yield Table(("what", "number"), [("rows", 3)])


def test_a_section_is_in_text_and_notebook_and_fields_are_json():
    found = WithAnother(4, 2, warnings=("look here",))
    assert as_text(found).splitlines() == [
        "4 files, 2 processes", "also      a <section> of its own", "", "what  number",
        "rows       3", "", "WARNING:  look here",
    ]  # fmt: skip
    assert "files  processes" in as_text(found, VERBOSE)
    assert found.as_dict() == {
        "files": 4, "processes": 2, "unit": "files", "warnings": ["look here"],
    }  # fmt: skip
    html = found._repr_html_()
    assert "a &lt;section&gt; of its own" in html and "look here" in html
    facts = json.loads(re.search(r"draw\((\{.*\}),root\)\}</script></div>$", html)[1])
    jsonschema.validate(facts, json.loads((ROOT / "docs" / "page.schema.json").read_text()))
    assert ["also", "a <section> of its own"] in facts["head"]["amounts"]
    assert facts["tables"] == [{"columns": ["what", "number"], "rows": [["rows", 3]], "total": 1}]
