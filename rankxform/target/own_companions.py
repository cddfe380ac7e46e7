"""A model's small files, from one Hugging Face folder into another: as the new tensors are.

The configuration states what was changed: the type, the vocabulary, whether the head is the
embedding, and no quantization of which the numbers are written out. All else is kept, in its order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.formats.container import FLOAT8, FLOATS, content_bytes
from rankxform.layout.names import first_texts
from rankxform.operations.options import TYPES, WRITTEN_OUT
from rankxform.request import Request
from rankxform.source.open import Source
from rankxform.statements import Finding, as_notice, as_warning
from rankxform.storage import user_files
from rankxform.storage.posix import read_bytes
from rankxform.storage.store import is_path, scheme_of
from rankxform.storage.user_files import CONFIG, parse_config

from .model_files import unchanged_copies

if TYPE_CHECKING:
    from .findings import TargetDraft

_HEAD = "lm_head.weight"
_TYPE_KEYS = ("torch_dtype", "dtype")


def read_own_companions(request: Request, source: Source) -> dict[str, bytes]:
    """Return the small files of a source that go along with its tensors, by name.

    Where both are Hugging Face folders and no reference is named, whose files go instead. Files of
    code that the configuration names are among them; what lies at the destination stays there, if
    an earlier run did not copy it.
    """
    folder, form = Path(source.where.path), FORMS[request.dst_form or DEFAULT_FORM]
    is_copied = source.form.configured and form.configured and request.like is None
    if request.dst is None or not is_copied or scheme_of(request.dst) or request.map is not None:
        return {}
    if not is_path(source.where.path) or not folder.is_dir():
        return {}
    names = user_files.companion_names(folder)
    companions = {name: read_bytes(folder / name) for name in names}
    config = parse_config(companions.get(CONFIG, b"{}"), str(folder / CONFIG))
    classes = config.get("auto_map")
    for named in classes.values() if isinstance(classes, dict) else ():
        for name in named if isinstance(named, list) else [named]:
            is_here = isinstance(name, str) and re.fullmatch(r"\w+(\.\w+)+", name)
            file = f"{name.partition('.')[0]}.py" if is_here else ""  # else of another repository
            if file and (folder / file).is_file():
                companions[file] = read_bytes(folder / file)
    if request.config is not None:  # the one that is given goes
        companions.pop(CONFIG, None)
    dst = Path(request.dst)  # where others may lie, which somebody means
    ours = unchanged_copies(dst)
    return {n: data for n, data in companions.items() if n in ours or not (dst / n).exists()}


def adapt_companions(
    companions: Mapping[str, bytes], draft: TargetDraft
) -> tuple[dict[str, bytes], list[Finding]]:
    """Return a source's small files as they go with what is made of it, and what to know of them.

    A part of a model gets the configuration of all of it, with a warning of what is not so.
    """
    request, label = draft.request, f"{draft.source.where.path}/{CONFIG}"
    findings, adapted = list[Finding](), dict(companions)
    if CONFIG in companions:
        config = parse_config(companions[CONFIG], label)
        if request.include or request.exclude:
            from .stated_model import refuted

            shapes = {tensor.name: tensor.shape for tensor in draft.tensors_written}
            text = refuted(config, shapes, is_part=False)
            if text:
                findings.append(as_warning(f"{label}: goes along unchanged, but {text}"))
        else:
            changes = {
                (section, key): value
                for (section, key), value in _changes(config, draft)
                if (config[section] if section else config).get(key) != value
            }
            adapted[CONFIG] = _with_changes(companions[CONFIG], changes)
            if changes:
                keys = dict.fromkeys(key for _, key in changes)
                findings.append(
                    as_notice(f"{CONFIG} goes along, with another {first_texts([*keys])}")
                )
    code = [name for name in companions if name.endswith(".py")]
    if code:
        findings.append(as_notice(f"{first_texts(code)}: code that {CONFIG} names, goes along"))
    return adapted, findings


def _changes(
    config: Mapping[str, Any], draft: TargetDraft
) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield what a configuration states otherwise than the tensors: section, key, and the value;
    None where an entry is to be left out."""
    weights = [tensor for tensor in draft.tensors_written if tensor.is_weight]
    src_types = {p.dtype for p in draft.catalog.parameters if p.is_weight}
    types = {tensor.dtype for tensor in weights}
    nbytes: dict[str, int] = {}
    for tensor in weights:
        if tensor.dtype in FLOATS:
            size = content_bytes(tensor.dtype, tensor.shape)
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + size
    is_written_out = src_types.intersection(FLOAT8) and not types.intersection(FLOAT8)
    if is_written_out and "quantization_config" in config:
        yield ("", "quantization_config"), None
    src_names = {parameter.name for parameter in draft.catalog.parameters}
    has_new_head = _HEAD in {tensor.name for tensor in weights} - src_names
    names = {TYPES[short]: name for name, short in WRITTEN_OUT.items()}
    dtype = names.get(max(nbytes, key=nbytes.__getitem__, default=""))
    is_quantized = bool(config.get("quantization_config")) and types.intersection(FLOAT8)
    for section in ("", "text_config"):
        entries = config.get(section) if section else config
        if not isinstance(entries, Mapping):
            continue
        for key in _TYPE_KEYS:
            is_known = dtype and not is_quantized and entries.get(key) in WRITTEN_OUT
            if is_known:
                yield (section, key), dtype
        if draft.request.vocab is not None and type(entries.get("vocab_size")) is int:
            yield (section, "vocab_size"), draft.request.vocab
        if has_new_head and entries.get("tie_word_embeddings") is True:
            yield (section, "tie_word_embeddings"), False


def _with_changes(content: bytes, changes: Mapping[tuple[str, str], Any]) -> bytes:
    """Return a document with other values, its keys in their order and indented as they were."""
    if not changes:
        return content
    config = json.loads(content)
    for (section, key), value in changes.items():
        entries = config[section] if section else config
        if value is None:
            del entries[key]
        else:
            entries[key] = value
    match = re.match(rb"\{\r?\n([ \t]+)", content)
    text = json.dumps(
        config, indent=match[1].decode() if match else None, ensure_ascii=content.isascii()
    )
    return (text + ("\n" if content.endswith(b"\n") else "")).encode()
