"""Parameter names: how they are sorted, summarized and chosen by expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rankxform.errors import UsageError
from rankxform.statements import quote
from rankxform.values import pattern_on_use

STEPS = ("global_step", "step_num", "epoch_num")
"""Those that say how far a training was, the same in every file of a checkpoint."""
TRAINING_FACTS = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")
"""What MindFormers' `common.json` holds; every version reads these, and some refuse any other."""
CONSUMED = "consumed_samples"
"""What it states since 2.1.0, and earlier versions refuse to read."""

_NUMBERED = pattern_on_use(r"(?:^|\.)(\d{1,9})\.")


def natural_sort_key(name: str) -> list[str | tuple[int, str]]:
    """Return a key by which names are sorted as a person numbers them.

    >>> sorted(["part10", "part9"], key=natural_sort_key)
    ['part9', 'part10']
    """
    parts: list[str | tuple[int, str]] = list(re.split(r"([0-9]+)", name))
    for position in range(1, len(parts), 2):
        digits = str(parts[position]).lstrip("0")
        parts[position] = len(digits), digits
    return parts


def pattern_of(name: str) -> str:
    """Return a name with its numbers between dots as ``*``.

    >>> pattern_of("blocks.0.fc1.weight")
    'blocks.*.fc1.weight'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def is_extra_state(name: str) -> bool:
    """Tell whether a name is what a layer in 8 bits keeps beside its weights, which is none.

    >>> is_extra_state("mlp.linear_fc1._extra_state/shard_0_2")
    True
    """
    return name.partition("/")[0].rpartition(".")[2] == "_extra_state"


def patterns(names: Iterable[str]) -> list[str]:
    """Summarize names by pattern, numbers between dots replaced by ``*``, commonest first.

    >>> patterns(["blocks.0.w", "blocks.1.w", "head.0"])
    ['blocks.*.w (2)', 'head.0']
    """
    names_by_pattern: dict[str, list[str]] = {}
    for name in names:
        names_by_pattern.setdefault(pattern_of(name), []).append(name)
    ordered = sorted(names_by_pattern.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{pattern} ({len(n)})" if len(n) > 1 else n[0] for pattern, n in ordered]


def first_texts(texts: Sequence[object], most: int = 3) -> str:
    """Return the first of some texts, and how many others there are.

    >>> first_texts("abcde"), first_texts("ab", 1)
    ('a, b, c and 2 more', 'a and 1 more')
    """
    shown = ", ".join(map(str, texts[:most]))
    return shown + (f" and {len(texts) - most} more" if texts[most:] else "")


def and_more(names: Sequence[object], noun: str) -> str:
    """Say how many there are beside the first."""
    remaining_count = len(names) - 1
    plural = "s" if remaining_count > 1 else ""
    return f", and {remaining_count} {noun}{plural} more" if remaining_count > 0 else ""


def and_more_patterns(count: int) -> str:
    """Say that so many patterns are not shown."""
    return f"{count} more pattern" + ("" if count == 1 else "s")


def summarize_names(names: Iterable[str], most: int = 12) -> str:
    """Return the commonest patterns of `names`, and how many more there are, in one text."""
    shown = patterns(names)
    suffix = f" and {and_more_patterns(len(shown) - most)}" if len(shown) > most else ""
    return ", ".join(shown[:most]) + suffix


def option_to_exclude(names: Iterable[str], others: Iterable[str] | None = None) -> str:
    """Return the option that leaves out some names, and none of `others`.

    others: the other names that are there, by which modules and layers are known that have none of
    them; None: it is not known which.

    >>> option_to_exclude(["h.0.inv_freq", "h.1.inv_freq"])
    "--exclude '^h\\\\.(?:0|1)\\\\.inv_freq$'"
    >>> option_to_exclude(["h.0.inv_freq", "h.1.inv_freq", "v.0.w", "v.1.b"], ["h.0.w"])
    "--exclude '^h\\\\.\\\\d+\\\\.inv_freq$|^v\\\\.'"
    """
    used = {prefix for name in others or () for prefix in _prefixes(name)}
    numbers_by_place: dict[tuple[Sequence[str], Sequence[str]], list[str]] = {}
    for name in names:
        prefixes = [*_prefixes(name)]
        is_known = others is not None
        prefix = next((p for p in prefixes if is_known and p not in used), prefixes[-1])
        positions = [p for p, part in enumerate(prefix) if part.isdecimal()] or [0]
        number = prefix[positions[-1]]
        place = prefix[: positions[-1]], prefix[positions[-1] + 1 :]
        numbers = numbers_by_place.setdefault(place, [])
        if number not in numbers:
            numbers.append(number)
    expressions = []
    for (first_parts, last_parts), numbers in numbers_by_place.items():
        escaped_groups = (
            [part if part == _NUMBER else re.escape(part) for part in group]
            for group in (first_parts, numbers, last_parts)
        )
        head, alternatives, tail = escaped_groups
        number = alternatives[0] if len(numbers) == 1 else f"(?:{'|'.join(alternatives)})"
        text = r"\.".join([*head, number, *tail])
        is_whole_name = bool(last_parts) and not last_parts[-1]
        expressions.append(f"^{text[:-2]}$" if is_whole_name else rf"^{text}\.")
    return f"--exclude {quote('|'.join(expressions))}"


_NUMBER = r"\d+"


def _prefixes(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the beginnings of a name by its parts, with any numbers and then with its own.

    The last one has an empty part more: it is the name as a whole.
    """
    parts = (*name.split("."), "")
    lengths = [*range(1, len(parts) - 1), len(parts)]
    for with_numbers in (tuple(_NUMBER if p.isdecimal() else p for p in parts), parts):
        yield from (with_numbers[:length] for length in lengths)


def compile_regex(text: str, option: str) -> re.Pattern[str]:
    """Compile a regular expression that was given for `option`. Raises UsageError."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{option} {text!r}: {error}; expected a regular expression") from error


def layers_by_stage(stages: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return which layers each stage has by the first number in its names; "" for none.

    >>> layers_by_stage([["h.0.w", "h.1.w", "h.1.experts.5.w"], ["h.2.w", "head.w"], ["norm.w"]])
    ('0-1', '2', '')
    """
    layers = []
    for names in stages:
        numbers = {int(match[1]) for name in names if (match := _NUMBERED().search(name))}
        layers.append(format_ranges(sorted(numbers)))
    return tuple(layers)


def format_ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers shortly.

    >>> format_ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
