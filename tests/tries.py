"""What an error advises is tried, wherever a test provokes one: the same error may not return.

A try that begins with options is carried out: the call that failed is repeated with them, into a
copy of its destination. Tries in words, and those with placeholders (FILE), are left to the reader.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

import rankxform
from rankxform.errors import RankxformError
from rankxform.options import flag_of, option_info
from rankxform.options import flags_of as spellings
from rankxform.request import all_options

TESTS = Path(__file__).parent
FILES = frozenset((
    "checkpoints/test_checkpoint2.py", "checkpoints/test_dcp.py", "checkpoints/test_folders.py",
    "checkpoints/test_huggingface.py", "checkpoints/test_rank_folders.py", "conformance/test_forms.py",
    "formats/test_safetensors.py", "operations/test_select.py", "target/test_findings.py",
    "target/test_model_files.py",
    "conformance/test_operations.py", "derivation/test_inputs.py", "operations/test_base.py",
    "operations/test_cast.py", "operations/test_dequantize.py", "operations/test_lora.py",
    "operations/test_map.py", "operations/test_rename.py", "operations/test_vocabulary.py",
    "oracle/test_optimizers.py", "planning/test_build_catalog.py", "planning/test_parts.py",
    "planning/test_selection.py", "source/test_choose.py", "source/test_hints.py",
    "storage/test_source_reader.py", "target/test_own_companions.py", "test_cases.py",
    "test_errors.py", "test_statements.py", "trust/test_lies.py", "verbs/test_differing_replicas.py",
    "verbs/test_evidence.py",
))  # fmt: skip
"""Of the tests that provoke errors by calling `rankxform.transform`."""


def known():
    """Return the name of each option by its flags."""
    return {flag: one for one in all_options() for flag in {flag_of(one.name), *spellings(one)}}


def takes_value(flag):
    one = known().get(flag)
    return one is None or option_info(one).kind.stands_for is None


def flags_of(text):
    """Return the options that a try begins with; [] if it is in words, or has a placeholder."""
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    found = []
    while words and words[0].startswith("--"):
        flag = words.pop(0).rstrip(",")
        found.append(flag)
        if takes_value(flag) and "=" not in flag:
            if not words or re.fullmatch(r"[A-Z]+(\.\w+)?|REGEX.*|N", words[0].rstrip(",")):
                return []
            found.append(words.pop(0).rstrip(","))
    return found


def with_options(options, flags):
    """Return a call's options with more; those that are given once replace the earlier."""
    options, words, table = dict(options), [*flags], known()
    while words:
        flag, _, value = words.pop(0).partition("=")
        if flag not in table:
            return None
        name = table[flag].name
        if not takes_value(flag):
            options[name] = option_info(table[flag]).kind.stands_for
            continue
        value = value or words.pop(0)
        is_many = isinstance(table[flag].default, tuple)
        options[name] = (*options.get(name, ()), value) if is_many else value
    return options


@pytest.fixture(autouse=True)
def every_try_is_tried(request, monkeypatch):
    """Repeat a call of `rankxform.transform` that fails with what its error advises."""
    if os.path.relpath(request.path, TESTS) not in FILES:
        return
    call = rankxform.transform

    def transform(src, dst, src_strategy=None, dst_strategy=None, **options):
        try:
            return call(src, dst, src_strategy, dst_strategy, **options)
        except RankxformError as error:
            if isinstance(error, Warning) or "progress" in options:
                raise
            given = {"src_strategy": src_strategy, "dst_strategy": dst_strategy, **options}
            for text in error.parts.tries:
                again = tried(call, src, dst, given, text)
                same = again is not None and (again.what, again.where) == (
                    error.parts.what,
                    error.parts.where,
                )
                assert not same, f"{text!r} leads to the same error again: {again}"
            raise

    monkeypatch.setattr(rankxform, "transform", transform)


def tried(call, src, dst, given, text):
    """Return the error of a call with what a try says; None if it succeeds, or is in words."""
    flags = flags_of(text)
    options = with_options(given, flags) if flags else None
    if options is None:
        return None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = Path(folder) / "dst"
        if Path(dst).is_dir():
            shutil.copytree(dst, copy, symlinks=True)
        try:
            call(src, copy, **options)
        except RankxformError as error:
            where = error.parts.where.replace(str(copy), str(dst))
            return error.parts._replace(where=where)
    return None
