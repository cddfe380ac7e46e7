"""The table of commands, and what a command line means."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, NoReturn

from rankxform.derivation.options import DeriveOptions
from rankxform.errors import UsageError, did_you_mean
from rankxform.options import CONVERSIONS, GROUPS, flag_of, flags_of, option_info
from rankxform.request import all_options
from rankxform.statements import join, quote
from rankxform.values import NamedTuple

from . import options
from .options import CONFIG_FILE, EXCLUDED, Parsed, declared_options, option_named


class Place(NamedTuple):
    """An argument without a flag; its title is in brackets if it may be left out."""

    name: str
    title: str
    help: str
    is_required: bool = True


class Command(NamedTuple):
    """The command line of a verb, or of an action of one ("strategy derive")."""

    name: str
    summary: str
    example: str = ""
    places: tuple[Place, ...] = ()
    table: str = ""  # takes the options whose `verbs` contain it
    # Classes of options, all of which it takes, and names of options of the table.
    takes: tuple[type | str, ...] = ()
    required: tuple[str, ...] = ()  # options that have to be given
    ignored: tuple[type | str, ...] = ()  # classes and verbs whose other options are no error
    epilog: str = ""  # what help says below the options
    module: str = ""  # has run(options, team); imported when the command runs

    @property
    def options(self) -> list[Field[Any]]:
        """All options, in the order in which help shows them."""
        options = [field for field in all_options() if self.table in option_info(field).verbs]
        for part in self.takes:
            options += [option_named(part)] if isinstance(part, str) else declared_options(part)
        return sorted(options, key=lambda option: GROUPS.index(option_info(option).group))

    @property
    def ignored_options(self) -> list[Field[Any]]:
        """Options that are accepted, and mean nothing."""
        options: list[Field[Any]] = []
        for part in self.ignored:
            if isinstance(part, str):
                options += [field for field in all_options() if part in option_info(field).verbs]
            else:
                options += declared_options(part)
        return options


_SRC = Place("src", "SRC", "folder with rank_N/ folders, or one complete file", False)
_DST = Place("dst", "DST", "folder to write rank_N/ into", False)
_STRATEGY = Place("source", "STRATEGY", "a strategy file or folder")
_MAP = Place("map", "NAME", "a table's name, or a file (*.toml)")
_STRATEGIES = "--src-strategy output/strategy --dst-strategy new/strategy"
_CHECKING = ("config", "qkv", "gate_up", "weights_only", "exclude", "vocab", "step", "src_form")

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            "transform", "Convert a checkpoint.",
            f"rankxform transform -n 8 output/checkpoint new_ckpt \\\n      {_STRATEGIES}",
            (_SRC, _DST), "transform",
            (options.Folders, options.DryRun, options.Profile, options.Work, options.Start),
            ignored=(options.Script,),
        ),
        Command(
            "verify", "Compare a destination with its source, or with its own manifest.",
            f"rankxform verify -n 8 output/checkpoint new_ckpt \\\n      {_STRATEGIES}",
            (_SRC, Place("dst", "[DST]", "folder to verify; with one folder alone, it is compared "
                         "with its own manifest", False)),
            "verify", (options.Folders, options.Verifying, options.Work, options.Start),
            ignored=("transform", options.Profile),
        ),
        Command(
            "launch", "Convert a checkpoint if the job needs other shards, then start the job.",
            "mpirun -n 8 python -m rankxform launch --load trained/checkpoint \\\n"
            "      --src-strategy trained/strategy --dst-strategy new/strategy -- \\\n"
            "      python train.py --load_checkpoint {checkpoint}",
            (), "launch", (options.Launch, options.Strategies, options.Configuration, options.Work),
            required=("src",),
            epilog="-- PROGRAM ... replaces each process once the checkpoint is ready. "
            "{checkpoint} and {rank} in its arguments are filled in. LOAD_CHECKPOINT is set in "
            "its environment, and RANK_ID, RANK_SIZE and DEVICE_ID if they were not set.",
        ),
        Command(
            "follow", "Convert the steps of a training that DST lacks, each into DST/STEP.",
            f"rankxform follow -n 8 output/checkpoint converted --watch \\\n      {_STRATEGIES}",
            (_SRC, _DST._replace(help="folder with a folder for each step")), "transform",
            (options.Follow, options.Strategies, options.Configuration, options.Work,
             options.Start),
            epilog="With --step A,B only these steps are converted.",
        ),
        Command(
            "clean", "Remove what a stopped conversion left in DST, and keep what is complete.",
            "rankxform clean new_ckpt",
            (Place("dst", "DST", "folder, or address, of the conversion"),),
            takes=("endpoint_url", "storage_option", options.Json),
        ),
        Command(
            "plan", "Print what would be read, written and held; read headers and samples alone.",
            f"rankxform plan output/checkpoint \\\n      {_STRATEGIES}",
            (_SRC, _DST._replace(title="[DST]")), "plan",
            (options.Folders, options.Planning, options.Json),
        ),
        Command(
            "ranks", "Print the source ranks whose bytes each destination rank needs.",
            f"rankxform ranks {_STRATEGIES} --ranks 0-3",
            (Place("src", "[SRC]", "the checkpoint, for the exact choice among replicas", False),),
            takes=(options.Strategies, "ranks", "include", "exclude", "rename", "unmatched",
                 "src_pattern", "step", "suffix", "fallback", options.Json),
        ),
        Command(
            "merge", "Write the strategy files of all stages as one that MindSpore reads.",
            "rankxform merge output/strategy merged.ckpt",
            (Place("folder", "FOLDER", "the stages' strategy files, all protobuf or all JSON"),
             Place("target", "FILE", "the merged file; .json for JSON stages")),
            takes=(options.Merging, options.Json), module="rankxform.cli.strategy",
        ),
        Command(
            "strategy derive", "Write the strategy of a job that was never compiled.",
            takes=(options.Derivation, options.Shapes, DeriveOptions, options.Json),
            required=("output",),
        ),
        Command(
            "strategy explain",
            "Print which mesh axes shard what, by a strategy and the sizes of its job.",
            places=(_STRATEGY,),
            takes=("src_parallel", "src_config", "preset", options.Shapes, options.Json),
        ),
        Command(
            "strategy show", "Print stages, ranks, and how many parameters are sharded how.",
            places=(_STRATEGY,), takes=(options.Matrices, options.Json),
        ),
        Command(
            "strategy convert", "Write a strategy as protobuf, stage folder or JSON.",
            places=(_STRATEGY, Place("output", "OUT", options.OUTPUT_HELP)),
            takes=(options.Shapes, options.Json),
        ),
        Command(
            "strategy diff", "Print where two strategies give a rank different boxes.",
            places=(_STRATEGY._replace(title="A"), Place("other", "B", "another one")),
            takes=(options.Json,),
        ),
        Command(
            "strategy presets", "List the presets of known networks, or print one.",
            places=(Place("name", "[NAME]", "print its rules (default: list)", False),),
            takes=(options.Json,),
        ),
        Command("maps list", "List the tables that come with rankxform.", takes=(options.Json,)),
        Command(
            "maps show", "Print a table: what becomes what, and with which shapes.",
            places=(_MAP,), takes=(options.Json,),
        ),
        Command(
            "maps check",
            "Compare a table and config.json with a checkpoint's headers; print each name.",
            places=(_MAP, Place("src", "CKPT", "the checkpoint")),
            takes=(options.SourceStrategy, *_CHECKING, options.Json),
        ),
        Command(
            "inspect", "Print what a checkpoint file or folder, or a strategy, holds.",
            "rankxform inspect output",
            (Place("path", "PATH", "a checkpoint file or folder, or a strategy"),),
            takes=(options.Inspecting, options.Matrices, options.SourceStrategy, "src_pattern",
                   "step", "suffix", "fallback", "map", "config", "endpoint_url", "storage_option",
                   options.Json),
        ),
        Command(
            "hostfile", "Print a hostfile made from an HCCL rank table.",
            "rankxform hostfile rank_table.json --style mpich > hosts",
            (Place("table", "RANK_TABLE", "rank table (JSON), version 0, 1.0 or 1.2"),),
            takes=(options.Hosts, options.Json),
        ),
    )
}  # fmt: skip
"""The commands, in the order of --help; one from outside is an item more."""

VERBS = {
    "strategy": "Derive, explain, show, convert or compare strategies.",
    "maps": "List, print or check the tables of names that --map uses.",
}
"""The verbs that have actions."""

_ONCE = (
    "src_strategy", "dst_strategy", "src_pattern", "step", "map", "config", "like", "lora",
    "lora_strategy", "src_config", "dst_config", "config_file",
)  # fmt: skip
"""Options that name what is read or written; of others the last one holds, as wrappers rely on."""

_SCRIPT = (
    "--src-ckpt-strategy", "--dst-ckpt-strategy", "--src-ckpt-dir", "--dst-ckpt-dir", "--prefix",
)  # fmt: skip
"""The options of MindFormers' transform_ckpt.py, which takes abbreviations of them."""

HELP_FLAGS = ("-h", "--help", "--help-all", "-V", "--version")


def verb_names() -> list[str]:
    """Return all verbs, in the order of --help."""
    return [*dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)]


def wants_help(argv: Sequence[str]) -> bool:
    """Whether these arguments only print something that needs no MPI."""
    argv, _ = split_program(argv)
    return not argv or argv[0] == "help" or any(word in HELP_FLAGS for word in argv)


def split_program(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the command's own and those of the program for `launch`."""
    position = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:position]), list(argv[position + 1 :])


def parse_arguments(argv: Sequence[str]) -> Parsed:
    """Return what a command line means. Raises UsageError."""
    line, program = split_program(argv)
    line = [spell_with_dashes(word) for word in line]
    is_script = line[0].startswith("--")
    if is_script:
        line = ["transform", *map(_written_out, line)]
    command, words = command_of(line)
    values, ignored_flags = _parse_words(command, words)
    is_alone = command.name == "verify" and not values.keys() & {"dst", "dst_option"}
    takes_defaults = command.name in CONVERSIONS and not is_alone  # its manifest has all
    defaults = _add_defaults(command, values) if takes_defaults else []
    if program and command.name != "launch":
        raise UsageError(
            "arguments after -- are only accepted by `launch`", where=f"{' '.join(program)!r}"
        )
    verb, _, action = command.name.partition(" ")
    options = {option.name: option.default for option in command.options}
    options |= {place.name: None for place in command.places}
    parsed = Parsed(**options | values, verb=verb, action=action, program=program)
    parsed.words, parsed.defaults, parsed.ignored = list(argv), defaults, ignored_flags
    by_script = is_script and any(word.startswith("--src-ckpt-dir") for word in line)
    if by_script and parsed.format is None and parsed.dst_form is None:
        parsed.format = "ckpt"  # as the script writes, whatever it reads
    if values.get("quiet") and parsed.progress == "auto":
        parsed.progress = "none"
    return parsed


def spell_with_dashes(word: str) -> str:
    """Return an option as the tables spell it.

    >>> spell_with_dashes("--src_strategy=a_b")
    '--src-strategy=a_b'
    """
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _written_out(word: str) -> str:
    """Return an argument of MindFormers' script with its option written out."""
    flag, equals, value = word.partition("=")
    matches = [f for f in _SCRIPT if len(flag) > len("--") and f.startswith(flag)]
    return (matches[0] if len(matches) == 1 else flag) + equals + value


def command_of(line: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command that a line begins with, and its other words. Raises UsageError."""
    verb, *words = line
    if verb.startswith("-n"):
        raise UsageError("the verb comes first", "rankxform transform -n P ...")
    if verb in COMMANDS and " " not in verb:
        return COMMANDS[verb], words
    actions = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{verb} ")]
    if not actions:
        refuse_unknown(verb, verb_names(), "there is no verb", "rankxform --help")
    if words and not is_flag(words[0]):
        action = words.pop(0)
    elif "list" in actions:
        action = "list"
    else:
        raise UsageError(f"{verb}: which action? {', '.join(actions)}", f"rankxform {verb} --help")
    if action not in actions:
        suggestion = did_you_mean(action, actions)
        raise UsageError(f"ACTION {action!r} is none of {', '.join(actions)}{suggestion}")
    return COMMANDS[f"{verb} {action}"], words


def is_flag(word: str) -> bool:
    """Tell whether a word of a command line is an option; "-" and negative numbers are values."""
    flag = word.partition("=")[0]
    return flag[:1] == "-" and flag[1:] != "" and not re.search(r"\s|^-\d*\.?\d+$", flag)


def _parse_words(command: Command, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the given values by name, and the flags that mean nothing. Raises UsageError."""
    flags = {flag: option for option in command.options for flag in flags_of(option)}
    ignored = {flag: option for option in command.ignored_options for flag in flags_of(option)}
    values: dict[str, Any] = {}
    placed: list[str] = []
    ignored_flags: list[str] = []
    queue = deque(words)
    while queue:
        word = queue.popleft()
        if not is_flag(word):
            placed.append(word)
            continue
        flag, equals, value = word.partition("=")
        text = value if equals else None
        if not word.startswith("--") and len(flag) > 2:
            flag, text = word[:2], word[2:]
        option = flags.get(flag) or ignored.get(flag)
        if option is None:
            _refuse_flag(command, flag, [*flags, *ignored], word, queue[0] if queue else "N")
        stands_for = option_info(option).kind.stands_for
        if stands_for is not None and text is not None:
            if word.startswith("--") or word[2:3] in ("", "="):
                raise UsageError(f"{flag} takes no value", f"{flag} in the place of {word}")
            queue.appendleft(f"-{text}")  # -vn2
        elif stands_for is None and text is None:
            if not queue or is_flag(queue[0]):
                raise UsageError(
                    f"{flag} has no value", details=f"see: rankxform {command.name} --help-all"
                )
            text = queue.popleft()
        if flag in flags:
            store_value(values, option, flag, stands_for if stands_for is not None else text)
        else:
            ignored_flags.append(flag)
    _place_words(command, values, placed)
    return values, ignored_flags


def store_value(values: dict[str, Any], option: Field[Any], flag: str, raw_value: Any) -> None:
    """Add a value of an option: of its text, or what a flag stands for. Raises UsageError."""
    name, kind = option.name, option_info(option).kind
    excluded = EXCLUDED.get(name)
    if excluded in values:
        raise UsageError(f"{flag} and --{excluded} exclude each other", "leave one out")
    if kind.stands_for is not None:
        values[name] = raw_value
        return
    try:
        value = kind.parse(raw_value)
    except ValueError as error:
        raise UsageError(f"{flag} {error}") from error
    if kind.choices and value not in kind.choices:
        choices = ", ".join(map(str, kind.choices))
        raise UsageError(
            f"{flag} {value!r} is none of {choices}{did_you_mean(str(value), kind.choices)}"
        )
    if kind.repeated:
        values[name] = (*values.get(name, ()), value)
    elif name in _ONCE and values.get(name, value) != value:
        raise UsageError(f"{flag} is given twice: {values[name]} and {value}", f"give one {flag}")
    else:
        values[name] = value


def _place_words(command: Command, values: dict[str, Any], words: Sequence[str]) -> None:
    """Give the words that are no options their places, wherever they stand. Raises UsageError."""
    for place, word in zip(command.places, words):
        values[place.name] = word
    extra_words = words[len(command.places) :]
    if extra_words:
        text = " ".join(extra_words)
        if command.name == "launch":
            is_loaded = "load" not in values and Path(words[0]).is_dir()
            program = join(words[is_loaded:])
            loads = (f"--load {quote(words[0])}",) if is_loaded else ()
            raise UsageError(
                "the program stands behind --" if program else "a checkpoint is given by --load",
                " ".join(["launch ...", *loads, *(["--", program] if program else ())]),
                where=text,
            )
        has_strategies = any(option.name == "dst_strategy" for option in command.options)
        text_of_strategies = "strategies are given by --src-strategy and --dst-strategy"
        raise UsageError(
            f"{command.name} takes no such arguments",
            *([text_of_strategies] if has_strategies else []),
            where=text,
            details=f"see: rankxform {command.name} --help-all",
        )
    needs = [(place.name, place.title, place.help) for place in command.places if place.is_required]
    for option in command.options:
        if option.name in command.required:
            facts = option_info(option)
            needs.append((option.name, f"{flags_of(option)[0]} {facts.metavar}", facts.help))
    for name, title, text in needs:
        if name not in values:
            raise UsageError(
                f"{command.name} has no {title}",
                f"give {title}: {text}",
                details=f"see: rankxform {command.name} --help",
            )


def _refuse_flag(
    command: Command, flag: str, flags: Iterable[str], word: str, number: str
) -> NoReturn:
    """Raise UsageError for an option that a command does not take. number: the word behind it."""
    if command.name == "launch" and flag == "-n":
        raise UsageError(
            "launch takes no -n: the launcher starts as many processes as the job has",
            f"mpirun -n {word[2:] or number} before the same command without it",
        )
    see = f"rankxform {command.name} --help-all"
    shown = word if flag[1] != "-" else flag
    if command.name == "launch":  # the program's, perhaps
        see = f"{see}; options of the program stand behind --"
    refuse_unknown(shown, [*flags, *HELP_FLAGS], f"{command.name} has no option", see)


def refuse_unknown(word: str, known_words: Iterable[str], message: str, see: str) -> NoReturn:
    """Raise UsageError for what is not known, with the nearest that is."""
    suggestion = did_you_mean(word, known_words)
    if word in ("--src", "--dst"):
        suggestion += " SRC and DST themselves are given without an option"
    raise UsageError(f"{message} {word}{suggestion} (see: {see})")


# -- options from a file and from the environment -------------------------------------------------


class DefaultOption(NamedTuple):
    """An option that was not given on the command line: its words there, and what states it."""

    words: tuple[str, ...]
    origin: str


_PREFIX = "RANKXFORM_"
_OF_ONE_CALL = ("json", "config_file")


def _flags_elsewhere(command: Command) -> dict[str, Field[Any]]:
    """Return the options that something else than the command line may state, by flag."""
    shown = [option for option in command.options if option_info(option).help]
    options = [option for option in shown if option.name not in _OF_ONE_CALL]
    return {
        flag: option
        for option in [*options, *command.ignored_options]
        for flag in flags_of(option)
        if flag.startswith("--")
    }


def _add_defaults(command: Command, values: dict[str, Any]) -> list[DefaultOption]:
    """Add what the environment or a file states, and the command line does not; return it.

    The file is what ``--config-file`` names, else the first ``rankxform.toml`` here and in the
    folders above. Raises UsageError.
    """
    flags = _flags_elsewhere(command)
    ignored_names = {option.name for option in command.ignored_options} - values.keys()
    stated_names = {*values, *(EXCLUDED[name] for name in values if name in EXCLUDED)}
    stated_names |= ignored_names - {option.name for option in command.options}
    file = values.get("config_file", os.environ.get(f"{_PREFIX}CONFIG_FILE"))
    paths = (folder / CONFIG_FILE for folder in (Path.cwd(), *Path.cwd().parents))
    path = Path(file) if file is not None else next((p for p in paths if p.is_file()), None)
    environment = (
        (flag, value, variable)
        for variable, value in sorted(os.environ.items())
        if (flag := flag_of(variable.removeprefix(_PREFIX).lower())) in flags
        and variable.startswith(_PREFIX)
    )
    defaults: list[DefaultOption] = []
    for flag, value, origin in (*environment, *(_stated_in(path, command) if path else ())):
        option = flags[flag]
        if option.name in stated_names:
            continue
        stated_names.add(option.name)
        texts = _texts_of(option, flag, value, origin)
        words = tuple(flag if text is True else f"{flag}={text}" for text in texts)
        try:
            for text in texts:
                stands_for = option_info(option).kind.stands_for
                store_value(values, option, flag, stands_for if text is True else text)
        except UsageError as error:
            origins = [*defaults, DefaultOption(words, origin)]
            details = "; ".join(f"{' '.join(d.words)} is of {d.origin}" for d in origins)
            error.say(error.parts._replace(details=details))
            raise
        if words:
            defaults.append(DefaultOption(words, origin))
    return defaults


def _stated_in(path: Path, command: Command) -> Iterator[tuple[str, Any, str]]:
    """Yield flag, value and origin of what a file states; what is in the verb's table first.

    What stands above all tables may be an option of another verb.
    """
    from rankxform.formats.documents import parse_toml
    from rankxform.storage.posix import read_bytes

    if not path.is_file():
        raise UsageError("no such file of options", where=path)
    document = parse_toml(read_bytes(path), str(path))
    tables = {name: table for name, table in document.items() if isinstance(table, dict)}
    for name in tables:
        if name not in verb_names():
            raise UsageError(
                f"there is no verb {name}{did_you_mean(name, verb_names())}", where=path
            )
    common = {name: value for name, value in document.items() if name not in tables}
    flags, flags_of_others = _flags_elsewhere(command), set[str]()
    for table, is_of_verb in ((tables.get(command.name, {}), True), (common, False)):
        first_keys: dict[str, str] = {}  # by the option's name
        for key, value in table.items():
            flag = flag_of(key.replace("-", "_"))
            if flag in flags:
                if (first_key := first_keys.setdefault(flags[flag].name, key)) != key:
                    raise UsageError(f"{first_key} and {key} are one option", where=path)
                yield flag, value, str(path)
                continue
            if not is_of_verb and not flags_of_others:
                verbs = map(COMMANDS.__getitem__, (*CONVERSIONS, "follow"))
                flags_of_others = {f for verb in verbs for f in _flags_elsewhere(verb)}
            if is_of_verb or flag not in flags_of_others:
                message = f"{command.name} has no option {flag}{did_you_mean(flag, flags)}"
                raise UsageError(message, where=path)


def _texts_of(option: Field[Any], flag: str, value: Any, origin: str) -> list[Any]:
    """Return a stated value as the command line has it; True of a flag that is on. Raises
    UsageError."""
    kind = option_info(option).kind
    if kind.stands_for is not None:
        on = {"true": True, "1": True, "false": False, "0": False, "": False}
        is_on = value if isinstance(value, bool) else on.get(str(value).lower())
        if is_on is None:
            raise UsageError(f"{flag} is {value!r}; expected true or false", where=origin)
        return [True] if is_on else []
    if isinstance(value, (dict, bool)):
        raise UsageError(f"{flag} is {value!r}; expected its value", where=origin)
    values = value if isinstance(value, list) else [value]
    if not values:
        return []
    return [*map(str, values)] if kind.repeated else [",".join(map(str, values))]
