"""How an option is declared: with its help, and what depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

BYTES, COMPARE, FIT, LOAD = "bytes", "compare", "fit", "load"
"""What depends on an option: the bytes of the output; the `verify` that compares it; whether a
checkpoint fits as it is; and what `load`, which writes no files, takes."""

WHAT = "what is converted"
ON_THE_WAY = "operations on the way"
DERIVED = "destination strategy, derived instead of given"
SOURCE = "which source files"
OUTPUT = "output"
IO = "reading and memory"
RUN = "how it is done"

GROUPS = (WHAT, ON_THE_WAY, DERIVED, SOURCE, OUTPUT, IO, RUN)
"""The groups of options, in the order in which help shows them."""

PLACES = ("shared", "node")
"""Where `plan --simulate` may have source files: on a storage of all nodes, or on each its own."""

CONVERSIONS = ("transform", "verify", "plan", "launch")
WRITERS = ("transform", "launch")


def flag_of(name: str) -> str:
    """Return how the command line writes an option.

    >>> flag_of("lora_rank")
    '--lora-rank'
    """
    return "--" + name.replace("_", "-")


def option(
    default: Any,
    group: str,
    help: str,
    *affects: str,
    kind: str = "text",
    choices: Any = None,
    metavar: str | None = None,
    verbs: Sequence[str] = CONVERSIONS,
    flag: str | None = None,
    aliases: Sequence[str] = (),
) -> Any:
    """Declare an option.

    kind: "text", "flag" (true if it is there), "off" (false if it is there), "repeated", or one of
    `rankxform.cli.options.KINDS`. choices: the values that it may have, or a registry of them.
    flag: if that is not the name with dashes; aliases: other flags.
    """
    facts = {
        "group": group, "help": help, "affects": frozenset(affects), "kind": kind,
        "choices": choices, "metavar": metavar, "verbs": verbs, "flag": flag,
        "aliases": tuple(aliases),
    }  # fmt: skip
    return field(default=default, metadata=facts)
