"""Write the man page and the bash completion from the command's parser.

`python packaging/generate.py` writes them; the tests compare them with what it would write.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rankxform
from rankxform.cli.parser import COMMANDS, command_named, commands_with_actions, parser

HERE = Path(__file__).parent


def man() -> str:
    """The man page, a section for each verb."""
    whole = parser()
    lines = [
        f'.TH RANKXFORM 1 "" "rankxform {rankxform.__version__}" "User commands"',
        ".SH NAME",
        "rankxform \\- move a distributed MindSpore checkpoint between parallel strategies",
        ".SH SYNOPSIS",
        ".B rankxform",
        "VERB [ARGUMENTS] [OPTIONS]",
        ".SH DESCRIPTION",
        *_paragraphs(str(whole.description)),
    ]
    for name, verb in commands_with_actions(whole):
        lines += [f".SH {name.upper()}", *_plain(str(verb.description))]
        for action in shown(verb):
            flags = ", ".join(map(_bold, action.option_strings)) or _bold(_value(action))
            value = "" if action.nargs == 0 or not action.option_strings else f" {_value(action)}"
            lines += [".TP", flags + _escaped(value), *_plain((action.help or "") % vars(action))]
        example = command_named(name).EXAMPLE if name in COMMANDS else ""
        if example:
            lines += [".PP", "Example:", ".nf", *_plain(f"  {example}"), ".fi"]
    lines += [".SH NOTES", *_paragraphs(str(whole.epilog))]
    return "\n".join(lines) + "\n"


def completion() -> str:
    """What bash completes: verbs, actions, options, values of options, and else files."""
    whole = parser()
    flags, values = [], []
    for name, verb in commands_with_actions(whole):
        words = " ".join(flag for one in shown(verb) for flag in one.option_strings)
        flags.append(f'        "{name}") words="{words}" ;;')
        for one in shown(verb):
            if one.choices and one.option_strings:
                choices = " ".join(map(str, one.choices))
                pattern = "|".join(f'"{name} {flag}"' for flag in one.option_strings)
                values.append(f'        {pattern}) words="{choices}" ;;')
    names = " ".join(dict.fromkeys(name.split()[0] for name, _ in commands_with_actions(whole)))
    inner: dict[str, list[str]] = {}
    for name, _ in commands_with_actions(whole):
        first, _, action = name.partition(" ")
        if action:
            inner.setdefault(first, []).append(action)
    actions = [f'        {verb}) words="{" ".join(some)}" ;;' for verb, some in inner.items()]
    return "\n".join(
        [
            "# Completion for bash: source it, or put it where bash-completion looks.",
            "_rankxform() {",
            '    local word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} words=""',
            '    case "$verb" in',
            f"        {'|'.join(inner)})",
            '            [ "$COMP_CWORD" -gt 2 ] && verb="$verb ${COMP_WORDS[2]}" ;;',
            "    esac",
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))',
            "        return",
            "    fi",
            '    case "$verb ${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            "    esac",
            '    [ -z "$words" ] && case "$verb" in',
            *actions,
            "    esac",
            '    [ -z "$words" ] && [ "${word:0:1}" = - ] && case "$verb" in',
            *flags,
            "    esac",
            '    if [ -n "$words" ]; then',
            '        COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "    else",
            '        COMPREPLY=($(compgen -f -- "$word"))',
            "        compopt -o filenames 2> /dev/null",
            "    fi",
            "}",
            "complete -F _rankxform rankxform",
            "",
        ]
    )


def shown(verb: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what help shows of a verb's arguments."""
    return [one for one in verb._actions if one.help is not argparse.SUPPRESS]


def _value(action: argparse.Action) -> str:
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    return str(action.metavar or choices or action.dest.upper())


def _bold(text: str) -> str:
    return f"\\fB{_escaped(text)}\\fR"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def _paragraphs(text: str) -> list[str]:
    """Lines that are filled, but for those that are indented."""
    lines = []
    for line in _plain(text):
        lines += [".PP"] if not line else [".nf", line, ".fi"] if line.startswith("  ") else [line]
    return lines


def _plain(text: str) -> list[str]:
    lines = (_escaped(line) for line in text.splitlines())
    return [f"\\&{line}" if line[:1] in (".", "'") else line for line in lines]


FILES = {"rankxform.1": man, "rankxform.bash": completion}

if __name__ == "__main__":
    for name, make in FILES.items():
        (HERE / name).write_text(make())
