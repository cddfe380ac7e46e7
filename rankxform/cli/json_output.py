"""The JSON that every verb prints with ``--json``. docs/json.md says what each name means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

VERSION = 1
"""Counts up when a name goes or changes its meaning; a name may be added without notice."""


def as_json(result: str, facts: Mapping[str, Any]) -> str:
    """Write the facts of one result; `result` names what they are of."""
    return json.dumps({"version": VERSION, "result": result, **facts}, indent=1)
