"""Names of parameters, as options choose them."""

from __future__ import annotations

import random
import re
import shlex

import pytest

from rankxform.layout.names import option_to_exclude


@pytest.mark.parametrize("seed", range(40))
def test_the_option_that_excludes_some_names_excludes_no_other(seed):
    """Of random trees of modules, with numbers and with signs of expressions in their names."""
    rng = random.Random(seed)
    parts = ["h", "v", "0", "1", "12", "w", "w+", "a|b", "[x", "b"]
    all_names = {".".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(30)}
    names = set(rng.sample(sorted(all_names), rng.randint(1, 12)))
    if seed % 3 == 0:
        names = {name for name in all_names if name.startswith(("h.", "v.1."))} or names
    for others in (None, all_names - names):
        flag, text = shlex.split(option_to_exclude(sorted(names), others))
        assert flag == "--exclude"
        assert {name for name in all_names if re.search(text, name)} == names
