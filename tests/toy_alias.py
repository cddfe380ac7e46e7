"""A step with an option of its own, and a document that it needs: other names for tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    AFFECTS_FIT,
    AFFECTS_LOAD,
    GROUP_OPERATIONS,
    option,
)
from rankxform.values import dataclass


@dataclass(frozen=True, kw_only=True)
class AliasOptions:
    alias: str | None = option(
        None,
        GROUP_OPERATIONS,
        "names of tensors, in a JSON file",
        AFFECTS_BYTES,
        AFFECTS_COMPARISON,
        AFFECTS_FIT,
        AFFECTS_LOAD,
    )


class Alias:
    """Names tensors as a document says."""

    own_options = AliasOptions

    def read(self, context):
        path = context.options["alias"]
        return None if path is None else json.loads(Path(path).read_text())

    def __call__(self, options):
        names = options["inputs"].get("alias")
        return names and (lambda tensor: replace(tensor, name=names.get(tensor.name, tensor.name)))
