"""Tables of models' names."""

from __future__ import annotations

import pytest

from rankxform.errors import UsageError
from rankxform.storage import user_files
from tests.cli.test_maps import ALSO, SAMPLED
from tests.operations.test_map import refused, written
from tests.reference_maps import KINDS, Model

pytestmark = pytest.mark.filterwarnings("ignore:.*infinite or no numbers")


def test_each_table_and_its_base_reads_and_is_listed():
    assert set(user_files.map_names()) == {*KINDS, *ALSO, *SAMPLED}
    for name in user_files.map_names():
        table = user_files.load_map_table(name)
        assert table.rules
        assert table.architectures
        assert table.title


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[map]\nnothing = 1", "nothing"),
        ("[map]\nextends = ['nowhere']", "extends 'nowhere'"),
        ("[map]\nextends = ['own']", "extends 'own'"),
        ("rules = 3", "expected a list"),
        ("[[rules]]\nmindformers = 'a'", "expected a name on one side"),
        ("[[rules]]\nmindformers = 'a'\nhuggingface = {b = ['x()']}", "only names, integers"),
        (
            "[[rules]]\nmindformers = 'a'\nhuggingface = {b = ['1']}\nsteps = ['mix']",
            "a step 'mix'",
        ),
        ("[[rules]]\nmindformers = 'a'\nhuggingface = {b = ['1'], c = ['1']}", "leave 2 tensors"),
        ("[[rules]]\nblocks = ['x']\nmindformers = 'a'\nhuggingface = {b = ['1']}", "block 'x'"),
        ("[[rules]]\nmindformers = 'a'\nhuggingface = {b = ['nothing']}", "nothing is missing"),
        ("[blocks.x]\nlayer = ['0', '1']", "expected mindformers, huggingface"),
        ("[[copies]]\nof = 'a'", "expected mindformers or huggingface"),
        ("= 3", "not TOML"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(text, said, tmp_path):
    (tmp_path / "own.toml").write_text(text)
    src = written(Model("qwen3", 1), tmp_path)
    assert said in refused(src, tmp_path, str(tmp_path / "own.toml"), UsageError)
