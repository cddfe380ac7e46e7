"""Results as HTML: the static template `page.js`, `page.css`, and the facts as JSON data.

A page fetches nothing. The template sets every fact as text, so that no fact can become markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from secrets import token_hex
from typing import Any

from . import as_table

VERSION = 1
"""Counts up when a fact goes or changes its meaning; docs/page.schema.json states them."""


@cache
def _template(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def page(title: str, facts: Mapping[str, Any]) -> str:
    """Return an HTML page that draws the facts, and where scripts do not run has them in words."""
    head, origin = facts["head"], facts.get("made", {})
    rows = [
        *((head[name], "") for name in ("what", "told") if head[name]),
        *(("warning", text) for text in facts.get("warnings", ())),
        *head["amounts"],
        *facts.get("words", ()),
        *origin.get("rows", ()),
        *([("command", origin["command"])] if origin else ()),
        ("", "The pictures need JavaScript."),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_template('page.css')}</style></head>"
        '<body style="margin:0"><main class="page"></main>'
        f"<noscript>{as_table(title, rows)}</noscript>"
        f'<script type="application/json" id="facts">{_as_data(facts)}</script>'
        f"<script>{_template('page.js')}\n"
        'rankxformPage(JSON.parse(document.getElementById("facts").textContent), '
        'document.querySelector("main"));</script></body></html>\n'
    )


def fragment(facts: Mapping[str, Any], instead: str) -> str:
    """Return the HTML of a notebook cell: a drawing, or `instead` if scripts do not run.

    The drawing is in a shadow root, so that its style does not reach the rest of the notebook.
    """
    place = f"rankxform-{token_hex(8)}"  # unique among the cells of several kernels
    script = (
        f"{{const place=document.currentScript?.closest('#{place}')"
        f"??document.getElementById('{place}');"
        f"{_template('page.js').replace('const rankxformPage =', 'const draw =')}\n"
        "const root=place.attachShadow({mode:'open'}),style=document.createElement('style');"
        f"style.textContent={json.dumps(_template('page.css'))};root.append(style);"
        f"draw({_as_data(facts)},root)}}"
    )
    return f'<div id="{place}">{instead}<script>{script}</script></div>'


def _as_data(facts: Mapping[str, Any]) -> str:
    """Return facts as JSON in which no text can end the script element."""
    return json.dumps({"version": VERSION, **facts}, separators=(",", ":")).replace("<", "\\u003c")
