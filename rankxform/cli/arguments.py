"""The arguments of a conversion turned into a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankxform.errors import UsageError
from rankxform.request import Request

from .options import Parsed, request_options
from .parser import spell_with_dashes


def build_request(options: Parsed) -> Request:
    """Turn the options of a conversion into a request. Raises UsageError."""
    values: dict[str, Any] = _with_config(options)
    if values.get("shapes"):
        if options.src or values.get("src_option"):
            raise UsageError("SRC and --shapes: a plan is of a checkpoint, or of shapes alone")
        src = ""
    else:
        src_argument = _SRC_OR_SHAPES if "shapes" in values else "SRC"
        src = _single_argument(src_argument, options.verb, values["src"], values.get("src_option"))
    dst = values.get("dst") or values.get("dst_option")
    writes = options.verb == "transform" and not options.dry_run
    if writes or options.verb in ("verify", "follow"):
        dst = _single_argument("DST", options.verb, values["dst"], values.get("dst_option"))
    return Request(
        src=src,
        dst=dst,
        src_strategy=values["src_strategy"],
        dst_strategy=options.dst_strategy,
        **request_options(options),
    )


def _with_config(options: Parsed) -> dict[str, Any]:
    """Return the options, with what --dst-config says of SRC, its strategy and DST.

    The configuration is the destination job's: it names the checkpoint that this job loads, and
    has it converted into its output folder. What the command line says goes before.
    """
    values = dict(vars(options))
    path = values.get("dst_config")
    if path is None or values.get("src") or values.get("src_option") or values.get("shapes"):
        return values
    from rankxform.derivation.inputs import read_config

    config = read_config(path)
    if config.load_checkpoint is None:
        raise UsageError(f"no SRC, and {path} has no load_checkpoint: which checkpoint?")
    values["src"] = config.load_checkpoint
    if values["src_strategy"] is None:
        values["src_strategy"] = config.src_strategy
    if "dst_option" in values and not (values.get("dst") or values["dst_option"]):
        if not config.auto_trans:
            raise UsageError(
                f"no DST, and {path} does not say auto_trans_ckpt: True: which folder?"
            )
        values["dst"] = str(Path(config.output_dir) / "transformed_checkpoint")
    return values


def notes_of_script(options: Parsed) -> list[str]:
    """Return what someone has to know who used the command line of MindSpore's or MindFormers'
    scripts."""
    notices = []
    if options.ignored and options.verb == "transform":
        flags = [f"--{flag[2:].replace('-', '_')}" for flag in options.ignored]  # as they spell it
        notices.append(f"{', '.join(flags)}: not needed, the work is shared among the processes")
    if any(spell_with_dashes(word).startswith("--dst-checkpoint-dir") for word in options.words):
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
