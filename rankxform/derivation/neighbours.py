"""Questions near one that the files contradict: one statement changed, or up to three."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from time import monotonic
from types import MappingProxyType
from typing import Any

from rankxform.errors import DerivationError, UsageError
from rankxform.values import NamedTuple

from .request import Derived, DeriveRequest
from .rules import ShardingRule

_THRESHOLDS = 0, 64
"""KiB: what examples state, and MindSpore's default."""

_MOST_SECONDS, _MORE_SECONDS = 20.0, 3.0
"""For advice, while all other processes wait for the error; for more of it."""

_KEYS = {
    "vocab_emb_dp": "vocab_emb_dp: {}",
    "optimizer_shard": "parallel.enable_parallel_optimizer: {}",
    "threshold": "parallel.parallel_optimizer_config.parallel_optimizer_threshold: {}",
    "sizes": "data_parallel: {}, model_parallel: {}",
}
_OPTIONS = {
    "vocab_emb_dp": "vocab_emb_dp={}",
    "optimizer_shard": "--optimizer-shard {}",
    "threshold": "--threshold {}",
    "sizes": "dp={},mp={}",
}


class Change(NamedTuple):
    """A statement that is changed: of what, how it would be written, the sizes that become others,
    and the rule that is left out."""

    subject: str
    words: str
    sizes: Mapping[str, Any] = MappingProxyType({})
    rule: ShardingRule | None = None


def fitting_changes(
    request: DeriveRequest, derive: Callable[[DeriveRequest], Derived]
) -> list[str]:
    """Return the changes by which strategies can be derived, of one statement, two or three; one of
    those that lead to the same strategy.

    derive: raises DerivationError or UsageError where the files are not as a question says. It may
    take long where there are many parameters: what is not tried in time is not named.
    """
    changes, fitting = [*_changes(request)], dict[str, str]()
    until, enough = monotonic() + _MOST_SECONDS, list[tuple[Change, ...]]()
    for number in (1, 2, 3):
        for combination in combinations(changes, number):
            is_known = any(all(change in combination for change in few) for few in enough)
            if is_known or len({c.subject for c in combination}) < number or monotonic() > until:
                continue
            sizes = {name: n for change in combination for name, n in change.sizes.items()}
            removed = [change.rule for change in combination]
            rules = tuple(r for r in request.rules if all(r is not rule for rule in removed))
            with suppress(DerivationError, UsageError):
                changed_request = replace(request, dst=replace(request.dst, **sizes), rules=rules)
                stages = derive(changed_request).strategy.stages
                enough.append(combination)
                fitting.setdefault(repr(stages), _in_words(combination, request.dst_flag))
        if fitting:  # others that fit too are said, if they are found soon
            until = min(until, monotonic() + _MORE_SECONDS)
    return [*fitting.values()]


def _in_words(changes: Sequence[Change], flag: str) -> str:
    is_elsewhere = [c.rule is not None or c.words.startswith("--") for c in changes]
    sizes_text = ", ".join(c.words for c, is_option in zip(changes, is_elsewhere) if not is_option)
    texts = [f"{sizes_text} in {flag}"] if sizes_text else []
    return " and ".join(
        [*texts, *(c.words for c, is_option in zip(changes, is_elsewhere) if is_option)]
    )


def _changes(request: DeriveRequest) -> Iterator[Change]:
    parallel, is_config = request.dst, request.dst_flag.endswith("-config")
    words = _KEYS if is_config else _OPTIONS
    for rule in request.rules:
        yield Change(rule.label, f"without {rule.label}", rule=rule)
    for value in {True, False} - {parallel.vocab_emb_dp}:
        text = words["vocab_emb_dp"].format(str(value).lower())
        yield Change("vocab_emb_dp", text, {"vocab_emb_dp": value})
    for is_sharded in {True, False, parallel.optimizer_shard} - {None}:
        answers = ("true", "on") if is_sharded else ("false", "off")
        text = words["optimizer_shard"].format(answers[0 if is_config else 1])
        is_stated = is_sharded == parallel.optimizer_shard
        if not is_stated and (is_sharded or parallel.shards):
            yield Change("optimizer", text, {"optimizer_shard": is_sharded})
        for threshold in _THRESHOLDS if is_sharded else ():
            if 1024 * threshold != parallel.threshold_bytes:
                limit = words["threshold"].format(threshold)
                both = limit if is_stated else f"{text}{', ' if is_config else ' '}{limit}"
                sizes = {"optimizer_shard": is_sharded, "threshold": threshold}
                yield Change("optimizer", both, sizes)
    ranks = parallel.dp * parallel.mp
    for mp in range(1, ranks + 1):
        if ranks % mp == 0 and mp != parallel.mp:
            text = words["sizes"].format(ranks // mp, mp)
            yield Change("sizes", text, {"dp": ranks // mp, "mp": mp})
