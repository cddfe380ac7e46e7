"""The table of verbs. Each is a module; only that of the verb that was asked for is imported."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from rankxform.transport import Team

if TYPE_CHECKING:
    from .launch import Program


class Command(Protocol):
    """A module of this package: what the verb takes, does and prints.

    SUMMARY: one sentence; EXAMPLE: a command.
    """

    SUMMARY: str
    EXAMPLE: str

    def add_options(self, verb: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""

    def run(self, options: argparse.Namespace, team: Team) -> int | Program:
        """Do it; return the exit code, or what this process becomes. Collective."""


COMMANDS: dict[str, str] = {
    name: f"{__package__}.{name}"
    for name in (
        "transform", "verify", "launch", "plan", "ranks", "merge", "strategy", "maps", "inspect",
        "hostfile",
    )
}  # fmt: skip
"""The module of each verb, in the order of --help."""


def command_named(name: str) -> Command:
    """Return a verb's module."""
    return cast(Command, import_module(COMMANDS[name]))
