"""What command lines mean: `argparse`, built from the same table, understands them alike."""

from __future__ import annotations

import argparse
import random
from functools import cache

import pytest

from rankxform.cli.parser import COMMANDS, parse_arguments
from rankxform.errors import UsageError
from rankxform.options import flags_of, option_info

LINES = 5000
VALUES = (
    "a",
    "x=y",
    "0",
    "7",
    "1,2",
    "3-5",
    "64M",
    "bf16",
    "90m",
    "-",
    "-1",
    "",
    "10_73",
    "r w",
    "-a b",
)


class Refused(Exception):
    """What argparse says instead of ending the process."""


class _Oracle(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


class _Once(argparse.Action):
    """Refuses a second, different value."""

    def __call__(self, parser, namespace, value, flag=None):
        first = vars(namespace).setdefault(f"first_{self.dest}", value)
        if first != value:
            raise Refused(f"{flag} twice")
        setattr(namespace, self.dest, value)


@cache
def oracle_of(command):
    """Return argparse's parser of a command, without its places."""
    parser = _Oracle(add_help=False, allow_abbrev=False)
    detail = parser.add_mutually_exclusive_group()
    ignored = [(f"ignored_{option.name}", option) for option in command.ignored_options]
    taken = [(option.name, option) for option in command.options]
    flags = {flag for _, option in taken for flag in flags_of(option)}
    for name, option in [*taken, *ignored]:
        kind = option_info(option).kind
        names = [f for f in flags_of(option) if not name.startswith("ignored_") or f not in flags]
        if not names:
            continue
        group = detail if name in ("verbose", "quiet") and command.table in OUTPUT else parser
        if kind.stands_for is not None:
            action = "store_true" if kind.stands_for else "store_false"
            group.add_argument(*names, dest=name, action=action, default=option.default)
            continue
        facts = {"dest": name, "default": option.default, "type": kind.parse}
        if kind.repeated:
            facts |= {"action": "append", "default": None}
        elif name in ONCE:
            facts["action"] = _Once
        if kind.choices:
            facts["choices"] = tuple(kind.choices)
        group.add_argument(*names, **facts)
    return parser


OUTPUT = ("transform", "verify", "launch")
ONCE = (
    "src_strategy", "dst_strategy", "src_pattern", "step", "map", "config", "like", "lora",
    "lora_strategy", "src_config", "dst_config",
)  # fmt: skip


def line_of(command, rng):
    """Return a random command line; two in three have values of the right kind."""
    options = [o for o in [*command.options, *command.ignored_options] if o.name != "config_file"]
    words = [place.name for place in command.places]
    groups = [[word] for word in words]
    required = [option for option in command.options if option.name in command.required]
    for option in [*required, *rng.choices(options, k=rng.randrange(6))]:
        flag, kind = rng.choice(flags_of(option)), option_info(option).kind
        if rng.random() < 0.2:
            flag = flag.replace("-", "_").replace("__", "--", 1)
        value = rng.choice([*VALUES, *map(str, kind.choices)])
        if kind.stands_for is not None and rng.random() < 0.95:
            groups.append([flag])
        elif flag.startswith("--") and rng.random() < 0.5:
            groups.append([f"{flag}={value}"])
        elif not flag.startswith("--") and value and " " not in value and rng.random() < 0.3:
            groups.append([flag + value])
        else:
            groups.append([flag, value] if rng.random() < 0.95 else [flag])
    if rng.random() < 0.05:
        groups.append([rng.choice(["--nothing", "-x", "--src", "-"])])
    rng.shuffle(groups)
    return [word for group in groups for word in group]


def expected_of(command, words):
    """Return what argparse makes of a line: values by name; None if it refuses it."""
    dashed = [w if w[:2] != "--" else "=".join([w.partition("=")[0].replace("_", "-"),
              *w.split("=", 1)[1:]]) for w in words]  # fmt: skip
    try:
        values, extra_words = oracle_of(command).parse_known_args(dashed)
    except Refused:
        return None
    facts = vars(values)
    if any(word.startswith("-") and word != "-" and word[1:] != "1" for word in extra_words):
        return None
    placed = [place.name for place in command.places]
    if len(extra_words) > len(placed):
        return None
    missing = {place.name for place in command.places[len(extra_words) :] if place.is_required}
    if missing | {name for name in command.required if facts[name] is None}:
        return None
    facts |= dict(zip(placed, extra_words))
    return {n: tuple(v) if isinstance(v, list) else v for n, v in facts.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_argparse_understands_the_same(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command, rng, accepted = COMMANDS[name], random.Random(name), 0
    for _ in range(LINES // len(COMMANDS)):
        words = line_of(command, rng)
        expected = expected_of(command, words)
        try:
            parsed = parse_arguments([*name.split(), *words])
        except UsageError as error:
            assert expected is None, (words, str(error))
            continue
        assert expected is not None, words
        accepted += 1
        for option in command.options:
            wanted = expected[option.name]
            wanted = () if wanted is None and option_info(option).kind.repeated else wanted
            if option.name == "progress" and parsed.quiet:
                continue  # a quiet command shows none
            assert getattr(parsed, option.name) == wanted, (words, option.name)
    assert accepted > LINES // len(COMMANDS) // 10, "the lines are not all refused"
