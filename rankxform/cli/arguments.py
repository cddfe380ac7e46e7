"""Command-line arguments turned into a request; MindSpore's and MindFormers' spellings work too."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rankxform.errors import UsageError, did_you_mean
from rankxform.options import CONVERSIONS
from rankxform.request import Request

from .defaults import defaults, without_file
from .options import request_options
from .parser import COMMANDS, commands_with_actions, parser

EVERYTHING = "--help-all"
_ASKING = ("-h", "--help", EVERYTHING, "-V", "--version")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the verb and its options. Raises UsageError, or SystemExit after ``--help``."""
    words = list(argv)
    argv, program = _split(words)
    argv = [_plain(word) for word in argv]
    if argv and argv[0] == "help":
        argv = [*argv[1:], "--help"]
    is_script = bool(argv) and argv[0].startswith("--") and argv[0] not in _ASKING
    if is_script:
        argv.insert(0, "transform")
    asking = wants_help(argv)
    argv, file = without_file(argv)
    if is_script:
        argv = _as_script(argv)
    main_parser = parser(None if asking else argv[0], common=asking and EVERYTHING not in argv)
    if argv and argv[0].startswith("-n") and argv[0] not in _ASKING:
        raise UsageError("the verb comes first", "rankxform transform -n P ...")
    if argv and not argv[0].startswith("-"):
        _check_known(argv[0], COMMANDS, "there is no verb", "rankxform --help")
    options, unplaced_words = _parse_known(
        main_parser, [w if w != EVERYTHING else "--help" for w in argv]
    )
    default_options = (
        defaults(dict(commands_with_actions(main_parser))[argv[0]], argv, file)
        if _takes_defaults(options)
        else []
    )
    if default_options:
        argv[1:1] = [word for default in default_options for word in default.words]
        try:
            options, unplaced_words = _parse_known(main_parser, argv)
        except UsageError as error:
            origins_text = "; ".join(
                f"{' '.join(default.words)} is of {default.origin}" for default in default_options
            )
            error.say(error.parts._replace(details=origins_text))
            raise
    if unplaced_words:
        _refuse_unknown(main_parser, options, unplaced_words)
    if program and options.verb != "launch":
        raise UsageError(
            "arguments after -- are only accepted by `launch`", where=f"{' '.join(program)!r}"
        )
    by_script = is_script and any(word.startswith("--src-ckpt-dir") for word in argv)
    if by_script and options.format is None and options.dst_form is None:
        options.format = "ckpt"  # as the script writes, whatever it reads
    if getattr(options, "quiet", False) and options.progress == "auto":
        options.progress = "none"
    options.program, options.words, options.defaults = program, words, default_options
    return options


def _takes_defaults(options: argparse.Namespace) -> bool:
    """Tell whether options may come from a file or the environment: to one folder that is compared
    with its own manifest none is given."""
    alone = options.verb == "verify" and not (options.dst or options.dst_option)
    return options.verb in CONVERSIONS and not alone


def _parse_known(
    main_parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words that are none and have no place."""
    options, extra_words = main_parser.parse_known_args(argv)
    return options, _place_extra_words(main_parser, options, extra_words) if extra_words else []


def _place_extra_words(
    main_parser: argparse.ArgumentParser, options: argparse.Namespace, extra_words: Sequence[str]
) -> list[str]:
    """Give arguments that stand behind options their places; return what has none.

    The parser looks for all of a verb's arguments where the first of them is.
    """
    names = " ".join(filter(None, (options.verb, getattr(options, "action", None))))
    verb = dict(commands_with_actions(main_parser)).get(names)
    free = [] if verb is None else [
        action for action in verb._get_positional_actions()
        if action.nargs == "?" and getattr(options, action.dest) is None
    ]  # fmt: skip
    unplaced_words = []
    for word in extra_words:
        if free and not word.startswith("-"):
            setattr(options, free.pop(0).dest, word)
        else:
            unplaced_words.append(word)
    return unplaced_words


_REMOVED = {
    "--check-replicas": ("rankxform inspect --replicas SRC --src-strategy A, before it",),
    "--log": ("> FILE 2>&1, which keeps the exit code",),
}
"""Options that there were, and what takes their place."""


def _check_known(word: str, valid_words: Iterable[str], message: str, see: str) -> None:
    """Raise UsageError for what is not known, with the nearest that is."""
    if word in valid_words:
        return
    if word in _REMOVED:
        raise UsageError(f"{message} {word} any more", *_REMOVED[word])
    suggestion = did_you_mean(word, valid_words)
    if word in ("--src", "--dst"):
        suggestion += " SRC and DST themselves are given without an option"
    raise UsageError(f"{message} {word}{suggestion} (see: {see})")


def _refuse_unknown(
    main_parser: argparse.ArgumentParser, options: argparse.Namespace, unknown_words: Sequence[str]
) -> NoReturn:
    """Raise UsageError for arguments that a verb, or its action, does not take."""
    verb = " ".join(filter(None, (options.verb, getattr(options, "action", None))))
    see = f"rankxform {verb} --help-all"
    for word in unknown_words:
        if word.startswith("--"):
            flags = dict(commands_with_actions(main_parser))[verb]._option_string_actions
            _check_known(word.partition("=")[0], flags, f"{verb} has no option", see)
    if verb == "launch" and unknown_words[0].startswith("-n"):
        raise UsageError(
            "launch takes no -n: the launcher starts as many processes as the job has",
            "mpirun -n 8 python -m rankxform launch --load CKPT ... -- python train.py",
        )
    words = " ".join(unknown_words)
    if verb == "launch":
        raise UsageError("the program stands behind --", f"launch ... -- {words}", where=words)
    raise UsageError(
        f"{verb} takes no such arguments; strategies are given by --src-strategy "
        f"and --dst-strategy (see: {see})",
        where=words,
    )


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the command's own and those of the program for `launch`."""
    position = argv.index("--") if "--" in argv else len(argv)
    return argv[:position], argv[position + 1 :]


def wants_help(argv: Sequence[str]) -> bool:
    """Whether these arguments only print something that needs no MPI."""
    argv, _ = _split(list(argv))
    return not argv or argv[0] == "help" or any(w in _ASKING for w in argv)


def _plain(word: str) -> str:
    """Spell an option with dashes."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def build_request(options: argparse.Namespace) -> Request:
    """Turn the options of a conversion into a request. Raises UsageError."""
    facts: dict[str, Any] = _with_config(options)
    if facts.get("shapes"):
        if options.src or facts.get("src_option"):
            raise UsageError("SRC and --shapes: a plan is of a checkpoint, or of shapes alone")
        src = ""
    else:
        src_argument = _SRC_OR_SHAPES if "shapes" in facts else "SRC"
        src = _single_argument(src_argument, options.verb, facts["src"], facts.get("src_option"))
    dst = facts.get("dst") or facts.get("dst_option")
    if options.verb == "verify" or (options.verb == "transform" and not options.dry_run):
        dst = _single_argument("DST", options.verb, facts["dst"], facts["dst_option"])
    return Request(
        src=src,
        dst=dst,
        src_strategy=facts["src_strategy"],
        dst_strategy=options.dst_strategy,
        **request_options(options),
    )


def _with_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options, with what --dst-config says of SRC, its strategy and DST.

    The configuration is the destination job's: it names the checkpoint that this job loads, and
    has it converted into its output folder. What the command line says goes before.
    """
    facts = dict(vars(options))
    path = facts.get("dst_config")
    if path is None or facts.get("src") or facts.get("src_option") or facts.get("shapes"):
        return facts
    from rankxform.derivation.inputs import read_config

    config = read_config(path)
    if config.load_checkpoint is None:
        raise UsageError(f"no SRC, and {path} has no load_checkpoint: which checkpoint?")
    facts["src"] = config.load_checkpoint
    if facts["src_strategy"] is None:
        facts["src_strategy"] = config.src_strategy
    if "dst_option" in facts and not (facts.get("dst") or facts["dst_option"]):
        if not config.auto_trans:
            raise UsageError(
                f"no DST, and {path} does not say auto_trans_ckpt: True: which folder?"
            )
        facts["dst"] = str(Path(config.output_dir) / "transformed_checkpoint")
    return facts


_SCRIPT = (
    "--src-ckpt-strategy", "--dst-ckpt-strategy", "--src-ckpt-dir", "--dst-ckpt-dir", "--prefix",
)  # fmt: skip
"""The options of MindFormers' transform_ckpt.py, which takes abbreviations of them."""


def _as_script(argv: Sequence[str]) -> list[str]:
    """Return a command line of MindFormers' script with its options written out."""
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        matches = [f for f in _SCRIPT if len(flag) > len("--") and f.startswith(flag)]
        words.append((matches[0] if len(matches) == 1 else flag) + equals + value)
    return words


IGNORED = (
    "--rank-id", "--world-size", "--transform-process-num", "--process-num", "--transform-by-rank",
)  # fmt: skip
"""Options of MindSpore's and MindFormers' scripts that mean nothing here."""


def ignored_options(options: argparse.Namespace) -> list[str]:
    """Return the options of other tools that were given and mean nothing here."""
    names = [flag[2:].replace("-", "_") for flag in IGNORED]  # as they are spelt there
    return [f"--{name}" for name in names if getattr(options, name, None) is not None]


def notes_of_script(options: argparse.Namespace) -> list[str]:
    """Return what someone has to know who used the command line of MindSpore's or MindFormers'
    scripts."""
    flags, notices = ignored_options(options), []
    if flags:
        notices.append(f"{', '.join(flags)}: not needed, the work is shared among the processes")
    if any(_plain(word).startswith("--dst-checkpoint-dir") for word in options.words):
        notices.append(
            "rank_N lies in DST; transform_checkpoint.py makes a folder called like SRC there"
        )
    return notices


_SRC_OR_SHAPES = "SRC or --shapes"
_WHAT = {
    "SRC": "SRC, the checkpoint's folder or file",
    "DST": "DST, the folder for the result",
    _SRC_OR_SHAPES: "SRC, the checkpoint's folder or file; or give --shapes to plan without one",
}


def _single_argument(argument: str, verb: str, positional: str | None, option: str | None) -> str:
    if positional and option:
        raise UsageError(f"{argument} is given twice: {positional} and {option}")
    if not positional and not option:
        raise UsageError(
            f"{verb} has no {argument}",
            f"name {_WHAT[argument]}",
            details=f"see: rankxform {verb} --help",
        )
    return positional or option or ""
