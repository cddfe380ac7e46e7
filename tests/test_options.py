"""Options, as they are declared."""

from __future__ import annotations

import pytest

from rankxform.cli.options import request_options
from rankxform.cli.parser import parse_arguments
from rankxform.options import option_info
from rankxform.request import Request, all_options
from rankxform.target.manifest import option_words


@pytest.mark.parametrize(
    "option",
    [o for o in all_options() if "transform" in option_info(o).verbs and o.name != "costs"],
    ids=lambda option: option.name,
)
def test_an_option_is_written_as_it_is_read(option):
    kind = option_info(option).kind
    value = {bool: kind.stands_for, int: 1 << 22, float: 2.5, str: "-x y"}[kind.item]
    if kind.choices:
        value = next(choice for choice in kind.choices if choice != option.default)
    value = "absent:-x y" if option.name == "accept" else value
    if kind.is_tuple:
        value = (0, 2, 5) if kind.item is int else (value, value)
    request = Request("SRC", "DST", **{option.name: value})
    words = [*option_words(request, {option.name})]
    read = request_options(parse_arguments(["transform", "SRC", "DST", *words]))
    assert Request("SRC", "DST", **read) == request and words
