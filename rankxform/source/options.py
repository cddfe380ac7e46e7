"""Which files a source is, and what of them is accepted: options."""

from __future__ import annotations

import re
from dataclasses import replace

from rankxform.checkpoints.base import DEFAULT_PATTERN, FORMS
from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    AFFECTS_FIT,
    AFFECTS_LOAD,
    GROUP_SELECTION,
    GROUP_SOURCE,
    TYPE_FLAG,
    TYPE_REPEATED,
    choice_of,
    option,
)
from rankxform.planning.selection import ERROR
from rankxform.statements import (
    ACCEPT_ABSENT,
    ACCEPT_CONTRADICTIONS,
    ACCEPT_EQUAL_SLICES,
    ACCEPT_EXTRA_RANKS,
    ACCEPT_NEW,
    ACCEPT_STEP,
)
from rankxform.values import dataclass

DOUBTS = (
    ACCEPT_ABSENT, ACCEPT_CONTRADICTIONS, ACCEPT_EQUAL_SLICES, ACCEPT_EXTRA_RANKS, ACCEPT_NEW,
    ACCEPT_STEP,
)  # fmt: skip
"""What may be doubted of a source: weights that no file holds, replicas that differ, shards that do
not, ranks beyond the strategy's, weights that the destination alone lists, files of two steps."""


def _doubt(text: str) -> str:
    doubt, _, pattern = text.partition(":")
    if doubt not in DOUBTS:
        raise ValueError(f"{text!r}: expected one of {', '.join(DOUBTS)}, and :REGEX or not")
    if doubt == ACCEPT_EXTRA_RANKS and pattern:
        raise ValueError(f"{text!r}: expected {doubt} alone; ranks have no names")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{text!r}: {error}; expected a regular expression") from error
    return text


DOUBT = replace(TYPE_REPEATED, read=_doubt, title="doubts")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Which files a source is, and what of them is accepted. See the help of each."""

    unlisted: str = option(
        ERROR, GROUP_SELECTION, "parameters in no strategy that differ between ranks: take one "
        "rank's (default: error)", AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_LOAD,
        kind=choice_of((ERROR, "take-one")),
    )  # fmt: skip
    src_form: str | None = option(
        None, GROUP_SOURCE, "form of SRC: rank folders (ranks), Checkpoint 2.0, unified "
        "safetensors, a distributed checkpoint, Hugging Face, or PyTorch's files (default: "
        "recognized)", AFFECTS_FIT, AFFECTS_COMPARISON, AFFECTS_LOAD, kind=choice_of(FORMS),
    )  # fmt: skip
    fallback: tuple[str, ...] = option(
        (), GROUP_SOURCE, "another place with files of SRC, for what SRC, and places named "
        "before, lack; repeatable, the best first",
        AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD, kind=TYPE_REPEATED, metavar="PLACE",
    )  # fmt: skip
    src_pattern: str = option(
        DEFAULT_PATTERN, GROUP_SOURCE, "where rank files lie in SRC (default: %(default)s)",
        AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD, metavar="PATTERN",
    )  # fmt: skip
    step: str | None = option(
        None, GROUP_SOURCE, "epoch and step to take, such as 10_73, or a step alone, or an "
        "iteration of Checkpoint 2.0; latest: the newest, an error if a rank lacks it (default: "
        "the newest that all ranks have; of launch: latest)", AFFECTS_FIT, AFFECTS_LOAD,
        metavar="STEP",
    )  # fmt: skip
    suffix: str | None = option(
        None, GROUP_SOURCE, "end of the files' names before .ckpt, such as _breakpoint",
        AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD, metavar="TEXT",
    )  # fmt: skip
    check_crc: bool = option(
        False,
        GROUP_SOURCE,
        "compare source files with the checksums they carry",
        AFFECTS_LOAD,
        kind=TYPE_FLAG,
    )
    accept: tuple[str, ...] = option(
        (), GROUP_SOURCE,
        "doubts that do not refuse SRC, which are said and noted: " + ", ".join(DOUBTS)
        + "; of the names that match alone; repeatable",
        AFFECTS_COMPARISON, AFFECTS_LOAD, kind=DOUBT, metavar="DOUBT[:REGEX]",
    )  # fmt: skip

    def accepts(self, doubt: str, name: str | None = None) -> bool:
        """Tell whether a doubt does not refuse a source: of a tensor, or of all that it is of."""
        for text in self.accept:
            accepted_doubt, _, pattern = text.partition(":")
            if accepted_doubt == doubt and (not pattern or (name and re.search(pattern, name))):
                return True
        return False
