"""A model's small files, from one Hugging Face folder into another: as the new tensors are.

The configuration states what was changed: the type, the vocabulary, whether the head is the
embedding, and no quantization of which the numbers are written out. All else is kept, in its order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.errors import UsageError
from rankxform.formats.container import FLOAT8, FLOATS, content_bytes
from rankxform.layout.names import first_texts
from rankxform.operations.options import TYPES, WRITTEN_OUT
from rankxform.publish.folder_records import copied_files
from rankxform.request import Request
from rankxform.source.source import Source
from rankxform.statements import Finding, as_notice, as_warning
from rankxform.storage import user_files
from rankxform.storage.store import FOLDER, Store, store_at
from rankxform.storage.user_files import CONFIG, parse_config
from rankxform.values import NamedTuple, pattern_on_use

if TYPE_CHECKING:
    from .findings import TargetDraft

_HEAD = "lm_head.weight"
_TYPE_KEYS = ("torch_dtype", "dtype")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_TEXT = ((), ("text_config",), ("llm_config",), ("language_config",))
"""Sections of a configuration that may be of the text alone."""
_IMPORT = pattern_on_use(r"\s*from\s+\.(\w+)(?:\.\w+)*\s+import\b")


class OwnCompanions(NamedTuple):
    """A model's small files that go from one Hugging Face folder to another, by name."""

    contents: Mapping[str, bytes]
    at_dst: Mapping[str, bytes]  # what lies there so named, and was copied by no earlier run


def read_own_companions(request: Request, source: Source) -> OwnCompanions:
    """Return the small files of a source that go along with its tensors, and what lies there.

    They go where both are Hugging Face folders and no reference is named, whose files go instead.
    Files of code that they name are among them, and those that these import.
    """
    form = FORMS[request.dst_form or DEFAULT_FORM]
    if request.dst is None or not form.configured:
        return OwnCompanions({}, {})
    store, dst = store_at(source.where.path), store_at(request.dst)
    contents: dict[str, bytes] = {}
    is_copied = source.form.configured and request.like is None and request.map is None
    if is_copied and store.list("*").kind == FOLDER:
        names = user_files.companion_names(store)
        contents |= {name: store.read(name) for name in names}
        if request.config is not None:  # the one that is given goes
            contents[CONFIG] = user_files.read_config_bytes(request.config)
        documents = [data for name, data in contents.items() if name.endswith("config.json")]
        contents |= dict(_code_of(store, documents))
        if request.config is not None:
            contents.pop(CONFIG)
    names_there = {*contents, *user_files.companion_names(dst)} - copied_files(request.dst)
    at_dst = {name: dst.read(name) for name in names_there if dst.has(name)}
    return OwnCompanions(contents, at_dst)


def _code_of(store: Store, documents: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of code that documents name, and those beside them that these import."""
    modules: list[str] = []
    for document in documents:
        with suppress(UsageError):
            classes = parse_config(document, CONFIG).get("auto_map")
            for named in classes.values() if isinstance(classes, dict) else ():
                names = named if isinstance(named, list) else [named]
                texts = [name for name in names if isinstance(name, str)]
                # Others are of another repository.
                modules += [t.partition(".")[0] for t in texts if re.fullmatch(r"\w+(\.\w+)+", t)]
    for position, module in enumerate(modules):  # which grow
        name = f"{module}.py"
        if module not in modules[:position] and store.has(name):
            code = store.read(name)
            yield name, code
            lines = code.decode(errors="replace").splitlines()
            modules += [match[1] for match in map(_IMPORT().match, lines) if match]


def adapt_companions(
    own_companions: OwnCompanions, draft: TargetDraft
) -> tuple[dict[str, bytes], list[Finding]]:
    """Return a source's small files as they go with what is made of it, and what to know of them.

    A part of a model gets the configuration of all of it, with a warning of what is not so; and
    with one too, what others have put at the destination stays there.
    """
    request, label = draft.request, f"{draft.source.where.path}/{CONFIG}"
    findings, adapted = list[Finding](), dict(own_companions.contents)
    content, content_there = adapted.get(CONFIG), own_companions.at_dst.get(CONFIG)
    if content is not None:
        try:
            config = parse_config(content, label)
        except UsageError as error:
            config = {}
            findings.append(as_warning(f"{label}: goes along unchanged, but {error.parts.what}"))
        if request.include or request.exclude:
            text = f"{label}: goes along unchanged, but "
            findings += stated_otherwise(text, config, draft)
        else:
            changes = dict(_changes(config, draft))
            adapted[CONFIG] = content = _with_changes(content, changes)
            words = {None: "no {}"}
            texts = [
                words.get(value, "another {}").format(path[-1]) for path, value in changes.items()
            ]
            if texts:
                text = first_texts([*dict.fromkeys(texts)])
                findings.append(as_notice(f"{CONFIG} goes along, with {text}"))
    if content_there not in (None, content) and CONFIG not in draft.resolved.companions:
        assert content_there is not None
        label = f"{request.dst}/{CONFIG}"
        with suppress(UsageError):
            config = parse_config(content_there, label)
            text = f"{label}: lies there and stays, but "  # its sizes are compared where it lies
            findings += stated_otherwise(text, config, draft, sizes=False)
    written = {n: data for n, data in adapted.items() if n not in own_companions.at_dst}
    code = [name for name in written if name.endswith(".py")]
    if code:
        findings.append(as_notice(f"{first_texts(code)}: code that {CONFIG} names, goes along"))
    return written, findings


def stated_otherwise(
    head: str, config: Mapping[str, Any], draft: TargetDraft, *, sizes: bool = True
) -> list[Finding]:
    """Return what a configuration says that is not so of the tensors written, behind `head`.

    A type alone is a notice: people change it, and mean it.
    """
    from .stated_model import refuted

    texts, has_types_alone = [], True
    for path, value in _changes(config, draft):
        entry: Any = config
        for key in path:
            entry = entry[key]
        has_types_alone = has_types_alone and path[-1] in _TYPE_KEYS
        now = "its numbers are written out" if value is None else f"it is {value}"
        texts.append(f"{'.'.join(path)} is {'stated' if value is None else entry}, and {now} here")
    shapes = {tensor.name: tensor.shape for tensor in draft.tensors_written}
    size = refuted(config, shapes, is_part=False) if sizes and draft.request.vocab is None else ""
    if size:
        texts, has_types_alone = [*texts, size], False
    say = as_notice if has_types_alone else as_warning
    return [say(head + "; ".join(texts))] if texts else []


def _changes(
    config: Mapping[str, Any], draft: TargetDraft
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what a configuration states otherwise than the tensors: the keys that lead to it, and
    what it is; None where an entry is to be left out."""
    weights = [tensor for tensor in draft.tensors_written if tensor.is_weight]
    src_types = {p.dtype for p in draft.catalog.parameters if p.is_weight}
    types = {tensor.dtype for tensor in weights}
    nbytes: dict[str, int] = {}
    for tensor in weights:
        if tensor.dtype in FLOATS:
            size = content_bytes(tensor.dtype, tensor.shape)
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + size
    is_written_out = src_types.intersection(FLOAT8) and not types.intersection(FLOAT8)
    src_names = {parameter.name for parameter in draft.catalog.parameters}
    has_new_head = _HEAD in {tensor.name for tensor in weights} - src_names
    has_new_head &= not FORMS[draft.request.dst_form or DEFAULT_FORM].is_served
    names = {TYPES[short]: name for name, short in WRITTEN_OUT.items()}
    dtype = names.get(max(nbytes, key=nbytes.__getitem__, default=""))
    is_quantized = bool(config.get("quantization_config")) and types.intersection(FLOAT8)
    is_cast = len(nbytes) == 1 and src_types != types  # all parts of the model
    sections: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), config)]
    for path, entries in sections:  # which grow
        is_text = path in _TEXT
        for key, value in entries.items():
            if key in _QUANTIZATION_KEYS:
                if is_written_out:
                    yield (*path, key), None
            elif isinstance(value, Mapping):
                sections.append(((*path, key), value))
            elif key in _TYPE_KEYS and isinstance(value, str) and (is_text or is_cast):
                word = value.removeprefix("torch.")
                if dtype and not is_quantized and word in {*WRITTEN_OUT} - {dtype}:
                    yield (*path, key), value.replace(word, dtype)
            elif is_text and key == "vocab_size" and type(value) is int:
                if draft.request.vocab not in (None, value):
                    yield (*path, key), draft.request.vocab
            elif is_text and key == "tie_word_embeddings" and value is True and has_new_head:
                yield (*path, key), False


def _with_changes(content: bytes, changes: Mapping[tuple[str, ...], Any]) -> bytes:
    """Return a document with other values, its keys in their order and indented as they were."""
    if not changes:
        return content
    config = json.loads(content)
    for path, value in changes.items():
        entries = config
        for key in path[:-1]:
            entries = entries[key]
        if value is None:
            del entries[path[-1]]
        else:
            entries[path[-1]] = value
    match = re.match(rb"\{\r?\n([ \t]+)", content)
    indent, end = match[1].decode() if match else None, "\n" if content.endswith(b"\n") else ""
    try:
        return (json.dumps(config, indent=indent, ensure_ascii=content.isascii()) + end).encode()
    except UnicodeEncodeError:  # half a character, which only an escape can state
        return (json.dumps(config, indent=indent) + end).encode()
