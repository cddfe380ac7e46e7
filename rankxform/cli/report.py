"""What the command prints of a conversion: before it, and after it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rankxform
from rankxform.display.terminal import labelled_lines, shown_path
from rankxform.display.units import (
    format_buffer,
    format_count,
    format_seconds,
    format_size,
    read_and_needed,
    table,
)
from rankxform.errors import StorageError
from rankxform.layout.names import format_ranges, patterns, summarize_names
from rankxform.layout.states import state_of_name
from rankxform.metrics import cores
from rankxform.storage.posix import free_bytes
from rankxform.storage.store import scheme_of

if TYPE_CHECKING:
    from rankxform.job.report import Report
    from rankxform.layout.strategy import Strategy
    from rankxform.planning.catalog import Catalog
    from rankxform.planning.selection import LeftOut
    from rankxform.request import Request
    from rankxform.source.opening import Source
    from rankxform.target.target import Target

_LONG_SECONDS = 10.0
"""From how long a run on more processes is worth a word."""


def header(source: Source, target: Target, processes: int, verdict: Sequence[str] = ()) -> str:
    """Say which files were found and what is about to happen; behind warnings the verdict."""
    src, dst = source.where.path, target.planner.dst
    some, every = len(target.ranks), dst.ranks
    made = (
        format_count(every, "rank") if some == every else f"{some} of {format_count(every, 'rank')}"
    )
    if target.arrangement.parts:
        number = format_count(len(target.files), "file")
        made = f"{target.form.title}, {number}" + (f" of {made}" if every > 1 else "")
    derived = []
    if target.derived is not None:
        from .strategy_report import derived_table

        derived = [derived_table(target.derived), ""]
    total = sum(index.size for index in source.indexes.values())
    return "\n".join(
        (
            *warnings(target.warnings),
            *verdict,
            *derived,
            f"rankxform {rankxform.__version__}, {format_count(processes, 'process')}",
            labelled_lines(
                "from",
                f"{shown_path(src) or 'shapes alone'}: {_found(source)}{_step(source)}"
                + (f", {format_size(total)}" if src else ""),
                catalog_words(target.planner.catalog),
            ),
            labelled_lines(
                "to",
                f"{shown_path(target.dst)}: {made}" if target.dst else made,
                strategy_words(dst),
            ),
            *([labelled_lines("names", target.map_in_words)] if target.map_in_words else []),
        )
    )


def needs(request: Request, target: Target, nbytes: int, processes: int) -> list[str]:
    """Say how much is about to be written, and how much is free; on one node.

    Whether that is enough is found when the files are made: those of an earlier run are continued.
    """
    if target.dst is None or scheme_of(target.dst) or not nbytes:
        return []
    try:
        free = f" ({format_size(free_bytes(target.folder))} free)"
    except StorageError:  # what is wrong is met again, where all processes hear of it
        free = ""
    each = " a process" if processes > 1 else ""
    return [
        labelled_lines(
            "to write",
            f"{format_size(nbytes)}{free}, {format_buffer(request.memory)} of buffers{each}",
        )
    ]


def samples_in_words(evidence: Mapping[str, int | None]) -> str:
    """Say on what a source's strategy stands, by bytes that were compared."""
    told, percent = format_count(evidence.get("samples") or 0, "sample"), evidence.get("percent")
    return told if not percent else f"{told}, of kinds that hold {percent} % of the bytes"


def _found(source: Source) -> str:
    description = source.selected.description
    if description is None:
        selected, files = source.selected, f", {format_count(len(source.indexes), 'file')}"
        found = format_count(len({*map(selected.rank_of, source.indexes)}), "rank")
        return found + (files if selected.ranks else "")
    ranks = len({description.ranks[file] for file in source.indexes if file in description.ranks})
    found = f"{source.form.title}, {format_count(len(source.indexes), 'file')}"
    return found + (f" of {format_count(ranks, 'rank')}" if ranks > 1 else "")


def _step(source: Source) -> str:
    step = source.selected.step
    if not step:
        return ""
    if len(step) == 1:
        return f", iteration {step[0]}"
    return f", epoch {step[0]} step {step[1]}"


def warnings(texts: Sequence[str]) -> list[str]:
    """Write warnings, which are said first and last."""
    return [labelled_lines("WARNING:", text) for text in texts]


def notes(texts: Sequence[str]) -> list[str]:
    """Write what to know."""
    return [labelled_lines("note", text) for text in texts]


def strategy_words(strategy: Strategy) -> str:
    """Name a strategy, and what it describes."""
    if strategy.label == "none":
        return "no strategy: whole tensors"
    return f"{shown_path(strategy.label)}: {strategy.extent}"


def catalog_words(catalog: Catalog) -> str:
    """Name what describes a source, and what that is."""
    if catalog.strategy is not None:
        return strategy_words(catalog.strategy)
    return f"{shown_path(catalog.label)}: {catalog.extent}"


def summary(
    done: Report, verify: Callable[[], str], verbose: bool = False, quiet: bool = False
) -> str:
    """Say what was moved, what was left out, what deserves a look, and how to go on.

    verify: returns the command that compares every byte. verbose: with names; quiet: the last line
    alone.
    """
    told = [] if quiet else _told(done, verbose)
    if done.files_kept == len(done.files):
        last = f"{format_count(done.files_kept, 'file')} complete already; nothing was written"
    else:
        linked = f" ({done.files_linked} linked to equal ones)" if done.files_linked else ""
        made = format_count(len(done.files) - done.files_kept, "file")
        before = ""
        if done.bytes_before:
            before = f", of which {format_size(done.bytes_before)} had been written before"
        last = (
            f"{format_size(done.bytes_written + done.bytes_before)} in {made}{linked}{before}, "
            f"{format_seconds(done.seconds)}, "
            f"{format_size(done.bytes_written / max(done.seconds, 1e-9))}/s"
        )
    lines = [*told, labelled_lines("done", last)]
    if not quiet:
        lines += [labelled_lines("next", *_next(done, verify))]
    return "\n".join(lines + warnings(done.warnings))


def _told(done: Report, verbose: bool) -> list[str]:
    """Say what was read, what was not written, and what to know."""
    if done.files_kept == len(done.files):
        return []
    lines = []
    if done.files_kept or done.files_continued:
        kept = format_count(done.files_kept, "file")
        text = f"an earlier run: {kept} complete, {done.files_continued} begun"
        lines.append(labelled_lines("continued", text))
    if done.placement:
        lines.append(labelled_lines("placed", done.placement))
    sent = f"; sent {format_size(done.bytes_sent)} between processes" if done.bytes_sent else ""
    text = (
        f"{read_and_needed(done.bytes_read, done.bytes_needed)}{sent}; peak memory "
        f"{format_size(done.peak_memory_bytes)} a process"
    )
    lines.append(labelled_lines("read", text))
    if done.strategy:
        lines.append(labelled_lines("strategy", f"of the destination: {shown_path(done.strategy)}"))
    if done.bytes_compared:
        names = done.compared_names
        some = ", ".join(names if verbose else names[:4]) + (", ..." if names[4:] else "")
        text = f"between ranks, all bytes: {some} ({format_size(done.bytes_compared)})"
        lines.append(labelled_lines("compared", text))
    return [*lines, *left_out(done.left_out, done.absent, verbose), *notes(done.notices)]


def left_out(left: Sequence[LeftOut], absent: Sequence[str], verbose: bool = False) -> list[str]:
    """Say what is not written; the names of all patterns only if `verbose`."""
    lines = [
        _some("left out", one.names, one.families, f"{format_size(one.nbytes)}; {one.why}", verbose)
        for one in left
    ]
    if absent:
        states = {name: state for name in absent if (state := state_of_name(name)) is not None}
        families = {name: state.family for name, state in states.items()}
        why = "in the strategies, not in the checkpoint"
        lines.append(_some("absent", absent, families, why, verbose))
    return lines


def _some(
    label: str, names: Sequence[str], families: Mapping[str, str], why: str, verbose: bool
) -> str:
    """Say what names there are: states by their family, the others by pattern."""
    counts = Counter(families[name] for name in names if name in families)
    others = [name for name in names if name not in families]
    shown = [f"{family} ({count:,})" for family, count in counts.items()]
    shown += [summarize_names(others, 3)] if others else []
    return labelled_lines(
        label, f"{', '.join(shown)}: {why}", *(f"  {name}" for name in patterns(names) if verbose)
    )


def verify_command(source: Source, target: Target, request: Request, processes: int) -> str:
    """Return the command that compares every byte of a destination, as it can be pasted here."""
    from rankxform.target.manifest import verify_options

    number = ["-n", str(processes)] if processes > 1 else []
    words = [source.where.path, target.dst or "DST", *verify_options(request, source, target)]
    if request.ranks:
        words += ["--ranks", format_ranges(request.ranks).replace(" ", "")]
    shown = [shown_path(word) if word.startswith("/") else word for word in words]
    shown[:2] = [f"./{one}" if one.startswith("-") else one for one in shown[:2]]
    return shlex.join(["rankxform", "verify", *number, *shown])


def _next(done: Report, verify: Callable[[], str]) -> list[str]:
    """Say how to go on: how to check the destination, and how a slow run would be faster."""
    if done.form != "ranks":
        load = f"load {done.dst}"
    elif done.dst_ranks == 1 < done.src_ranks:
        load = f"one complete file, for one device: {done.files[0]} (--dst-strategy: for more)"
    else:
        container = Path(done.files[0]).suffix.removeprefix(".") if done.files else ""
        load = f"in the job's YAML, load_checkpoint: {done.dst}, auto_trans_ckpt: False"
        load += f", load_ckpt_format: {container}" if container != "ckpt" else ""
    check = shlex.join(["rankxform", "verify", shown_path(done.dst)])
    lines = [load, check if done.fingerprints else verify()]
    if done.processes == 1 and done.seconds > _LONG_SECONDS and (here := cores()) > 1:
        lines.append(f"{here} cores are here; rankxform transform -n {here} ... uses them all")
    return lines


def profile(done: Report) -> str:
    """Write the seconds that each process spent in each phase."""
    names = [n for n in done.phases[0] if any(seconds[n] >= 5e-5 for seconds in done.phases)]
    rows = [
        (process, *(f"{seconds[n]:.4f}" for n in names), f"{sum(seconds.values()):.4f}")
        for process, seconds in enumerate(done.phases)
    ]
    moved = f"moved in {done.move_seconds:.4f} s, from the finished plan to the last file's name"
    return f"\n{table(('process', *names, 'all'), rows)}\n{moved}"
