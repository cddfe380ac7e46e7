"""Write the man page and the bash completion from the table of commands.

`python packaging/generate.py` writes them; the tests compare them with what it would write.
"""

from __future__ import annotations

from dataclasses import Field
from pathlib import Path

import rankxform
from rankxform.cli.help import DESCRIPTION, EPILOG, row_of, value_of
from rankxform.cli.parser import COMMANDS, Command, verb_names
from rankxform.options import flags_of, option_info

HERE = Path(__file__).parent


def man() -> str:
    """The man page, a section for each command."""
    lines = [
        f'.TH RANKXFORM 1 "" "rankxform {rankxform.__version__}" "User commands"',
        ".SH NAME",
        "rankxform \\- move a distributed MindSpore checkpoint between parallel strategies",
        ".SH SYNOPSIS",
        ".B rankxform",
        "VERB [ARGUMENTS] [OPTIONS]",
        ".SH DESCRIPTION",
        *_paragraphs(DESCRIPTION),
    ]
    for name, command in COMMANDS.items():
        lines += [f".SH {name.upper()}", *_plain(command.summary)]
        for place in command.places:
            lines += [".TP", _bold(place.title.strip("[]")), *_plain(place.help)]
        for option in shown(command):
            flags = ", ".join(map(_bold, flags_of(option)))
            value = "" if _is_flag(option) else f" {value_of(option)}"
            lines += [".TP", flags + _escaped(value), *_plain(row_of(option)[1])]
        lines += [".PP", *_plain(command.epilog)] if command.epilog else []
        example = command.example
        lines += [".PP", "Example:", ".nf", *_plain(f"  {example}"), ".fi"] if example else []
    lines += [".SH NOTES", *_paragraphs(EPILOG)]
    return "\n".join(lines) + "\n"


def completion() -> str:
    """What bash completes: verbs, actions, options, values of options, and else files."""
    flags, values = [], []
    for name, command in COMMANDS.items():
        words = " ".join(["--help", *(flag for one in shown(command) for flag in flags_of(one))])
        flags.append(f'        "{name}") words="{words}" ;;')
        for option in shown(command):
            choices = " ".join(map(str, option_info(option).kind.choices))
            if choices:
                pattern = "|".join(f'"{name} {flag}"' for flag in flags_of(option))
                values.append(f'        {pattern}) words="{choices}" ;;')
    names = " ".join(verb_names())
    inner: dict[str, list[str]] = {}
    for name in COMMANDS:
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


def shown(command: Command) -> list[Field]:
    """Return the options that help shows of a command."""
    return [option for option in command.options if option_info(option).help]


def _is_flag(option: Field) -> bool:
    return option_info(option).kind.stands_for is not None


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
