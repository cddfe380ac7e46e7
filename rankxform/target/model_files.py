"""A model's small files, its config.json and tokenizer: what is read, copied, and of the tensors.

People write them by hand, copy them from elsewhere and change them, so that another content alone
proves nothing. They are another model's where architectures differ, or a size that tensors refute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from posixpath import dirname
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import ADAPTER_MANIFEST, DEFAULT_FORM, FORMS, CheckpointRef
from rankxform.errors import RankxformError, StorageError, UsageError
from rankxform.geometry.box import Shape
from rankxform.layout.names import first_texts
from rankxform.operations.base import OperationContext
from rankxform.operations.options import WRITTEN_OUT
from rankxform.publish.files import digest_of
from rankxform.publish.folder_records import copied_files
from rankxform.request import Request
from rankxform.source.place import form_at, list_and_select
from rankxform.statements import ACCEPT_CONTRADICTIONS, as_notice, as_warning
from rankxform.storage import user_files
from rankxform.storage.identity import is_same_file
from rankxform.storage.posix import AnyPath
from rankxform.storage.store import FILE, FOLDER, NOTHING, absolute, address_of, store_at
from rankxform.storage.user_files import CONFIG, META_SIZES, companion_names, parse_config

if TYPE_CHECKING:
    from rankxform.formats.map_table import MapTable
    from rankxform.operations.map import ModelSizes
    from rankxform.source.source import Source
    from rankxform.statements import Finding

    from .findings import TargetDraft
    from .stated_model import StatedModel
    from .target import Conversion, Target

ModelConfig = tuple[Mapping[str, Any], str]
"""A config.json, and where it is."""


# -- what is read for operations ------------------------------------------------------------------


class RequestContext(OperationContext):
    """What operations read of the files that a request names; on process 0."""

    def __init__(self, request: Request, where: str) -> None:
        """`where`: the source's absolute path, or its address."""
        self.options, self.request, self.where = vars(request), request, where
        self._configs: dict[str, ModelConfig | None] = {}

    @cached_property
    def config(self) -> ModelConfig | None:
        request = self.request
        if request.config is not None:
            return user_files.read_config(request.config), request.config
        folder = self.model_folder
        if request.map is not None and store_at(folder).list("*").kind != FOLDER:
            tries = () if request.like is None else ("give --like a published model",)
            raise UsageError("no such folder", *tries, where=folder)
        return self._config_in(folder)

    @property
    def model_folder(self) -> str:
        if self.request.like is not None:
            return self.request.like
        is_file = store_at(self.where).list("*").kind == FILE
        return dirname(self.where) if is_file else self.where

    def other_configs(self) -> Iterator[ModelConfig]:
        request, folders = self.request, [self.where]
        if request.like is not None and request.config is None:
            folders.append(request.like)  # a given one stands in the place of a reference's
        yield from filter(None, map(self._config_in, folders))
        store, label = store_at(self.where), address_of(self.where, META_SIZES)
        if store.has(META_SIZES):
            from rankxform.checkpoints.meta import sizes_of

            yield sizes_of(parse_config(store.read(META_SIZES), label)), label

    def _config_in(self, folder: str) -> ModelConfig | None:
        if folder not in self._configs:
            store, label = store_at(folder), address_of(folder, CONFIG)
            has_one = store.has(CONFIG)
            config = parse_config(store.read(CONFIG), label) if has_one else None
            self._configs[folder] = None if config is None else (config, label)
        return self._configs[folder]

    def place_of(self, path: str) -> str | None:
        place = absolute(path)
        return None if store_at(place).list("*").kind == NOTHING else place

    def config_at(self, place: str, name: str) -> ModelConfig | None:
        folder = dirname(place) if store_at(place).has("") else place
        store, label = store_at(folder), address_of(folder, name)
        return (parse_config(store.read(name), label), label) if store.has(name) else None

    def map_table(self, name: str) -> MapTable:
        return user_files.load_map_table(name)

    def adapter_manifest(self, place: str, step: str | None = None) -> ModelConfig | None:
        # It lies with each iteration, and above them that of the last to be saved.
        below, number = "", None
        with suppress(RankxformError, OSError):
            selected = list_and_select(CheckpointRef(place, step=step)).selected
            below = dirname(next(iter(selected.names.values()), ""))
            number = selected.step[0] if selected.step else None
        if (manifest := self.config_at(place, address_of(below, ADAPTER_MANIFEST))) is not None:
            return manifest
        above = self.config_at(place, ADAPTER_MANIFEST)
        return above if above and above[0].get("global_step", number) == number else None

    def states_its_strategy(self, place: str) -> bool:
        return store_at(place).has("") or form_at(CheckpointRef(place)).described

    @property
    def is_configured(self) -> bool:
        return FORMS[self.request.dst_form or DEFAULT_FORM].configured

    @property
    def is_served(self) -> bool:
        return FORMS[self.request.dst_form or DEFAULT_FORM].is_served

    def is_source(self, place: str) -> bool:
        return place == self.where or is_same_file(Path(place), Path(self.where))


def read_stated_model(source: Source) -> StatedModel | None:
    """Return what a Hugging Face folder's configuration states; None if it has none, or one that
    says nothing."""
    from .stated_model import StatedModel

    place = source.where.path
    if not source.form.configured:
        return None
    store, label = store_at(place), address_of(place, CONFIG)
    if not store.has(CONFIG):
        return None
    with suppress(RankxformError):
        config = parse_config(store.read(CONFIG), label)
        named, sizes = config.get("architectures"), None
        architectures = {*map(str, named)} if isinstance(named, list) else set[str]()
        model_type = config.get("model_type")
        words = architectures or ({model_type} if isinstance(model_type, str) else {""})
        for name in user_files.map_names(words):
            table = user_files.load_map_table(name)
            is_of_type = not architectures and model_type in table.model_types
            if is_of_type or architectures.intersection(table.architectures):
                from rankxform.operations.map import ModelSizes

                with suppress(RankxformError):  # it is a kind that the table is not for
                    sizes = sizes or ModelSizes(table, config, label)
        return StatedModel(config, label, sizes)
    return None


# -- what goes with the destination ---------------------------------------------------------------


def read_companions(
    context: RequestContext, sizes: ModelSizes | None, config: ModelConfig | None
) -> tuple[dict[str, bytes], list[Finding]]:
    """Return small files that go with the destination, by name, and why one is not made.

    These are a reference's, in a folder that has such files, and what MindFormers' trainer knows
    an adapter by, without which it loads no base. sizes: of a map, if one is asked for. Raises
    UsageError.
    """
    request, where = context.request, context.where
    if request.dst is None:
        return {}, []
    companions: dict[str, bytes] = {}
    findings: list[Finding] = []
    if FORMS[request.dst_form or DEFAULT_FORM].configured:
        if request.like is not None:
            companions = user_files.companions(request.like)
        if request.config is not None:  # the one that was given, not the reference's
            companions.pop(CONFIG, None)
            content = _with_type(user_files.read_config_bytes(request.config), sizes, config)
            if content is not None:
                companions[CONFIG] = content
            elif sizes is not None:
                findings.append(as_warning(
                    f"{sizes.label}: states no model_type, and {sizes.table.label} is not for one "
                    f"model only; no {CONFIG} is written of it"
                ))  # fmt: skip
    manifest = None
    if request.lora is None:
        manifest = context.adapter_manifest(where, request.step)
    name = FORMS[request.dst_form or DEFAULT_FORM].adapter_manifest if manifest else ""
    if manifest is not None and name:
        companions[name] = user_files.read_config_bytes(manifest[1])
    elif manifest is not None:
        text = f"{manifest[1]}: says what the adapter is for, and the destination gets no such file"
        findings.append(as_warning(text))
    return companions, findings


def _with_type(
    content: bytes, sizes: ModelSizes | None, model_config: ModelConfig | None
) -> bytes | None:
    """Return a configuration with the model's type, by which libraries know what it is of.

    None where neither it nor the map says that.
    """
    if sizes is None or model_config is None or model_config[0].get("model_type"):
        return content
    config, table = model_config[0], sizes.table
    types = dict(zip(table.architectures, table.model_types))
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        architectures = [*types][: 1 if len(types) == 1 else 0]
    name = next((architecture for architecture in architectures if architecture in types), None)
    if name is None:
        return None
    typed_config = {**config, "architectures": [name], "model_type": types[name]}
    return (json.dumps(typed_config, indent=2) + "\n").encode()


def configuration_doubts(draft: TargetDraft) -> Iterator[Finding]:
    """Yield what the model's configuration states otherwise than the destination's tensors."""
    resolved, request = draft.resolved, draft.request
    config, label = resolved.config or ({}, "")
    if request.map is None and CONFIG in resolved.companions:
        from .own_companions import stated_otherwise

        label = request.config or f"{request.like}/{CONFIG}"
        config = parse_config(resolved.companions[CONFIG], label)
        yield from stated_otherwise(f"{label}: goes along, but ", config, draft)
        return
    if resolved.companions and config.get("quantization_config"):
        yield as_notice(
            f"{label}: its quantization_config is copied, and the destination's tensors are "
            "not quantized; remove it from DST/config.json"
        )
    vocab_size = config.get("vocab_size", request.vocab)
    has_own = resolved.own_companions is not None and CONFIG in resolved.own_companions.contents
    if request.vocab not in (None, vocab_size) and not has_own:
        yield as_notice(
            f"{label}: states vocab_size {vocab_size}, and the destination "
            f"has {request.vocab} rows; change the configuration that goes with it"
        )
    dtype = config.get("torch_dtype", config.get("dtype", request.dtype))
    has_dtype = isinstance(dtype, str) and WRITTEN_OUT.get(dtype, dtype) == request.dtype
    if resolved.companions and request.dtype and not has_dtype:
        yield as_notice(
            f"{label}: states torch_dtype {dtype}, and the destination's tensors are "
            f"{request.dtype}; change DST/config.json"
        )


# -- what lies there already ----------------------------------------------------------------------


def check_model_files(conversion: Conversion) -> list[str]:
    """Refuse to write tensors beside another model's config.json; return what to know.

    Files that an earlier run copied there go with its tensors (`publish.files`). Raises
    StorageError.
    """
    request, target = conversion.request, conversion.target
    if request.dst is None or not target.form.configured:
        return []
    folder = target.folder
    existing_names = [
        n for n in companion_names(store_at(str(folder))) if n not in target.companions
    ]
    shapes = {parameter.name: parameter.shape for parameter in target.planner.selection.parameters}
    model_config = own_config(conversion)
    is_part = bool(request.include or request.exclude)
    copied = [name for name in existing_names if name in copied_files(folder)]
    if copied and request.overwrite and not is_of(folder, model_config, shapes):
        return [f"{folder}: {first_texts(copied)} go with the tensors for which they were copied"]
    existing_names = [name for name in existing_names if name not in copied]
    if CONFIG in existing_names and not request.accepts(ACCEPT_CONTRADICTIONS, CONFIG):
        reason = of_another(folder, model_config, shapes, is_part=is_part)
        if reason:
            raise StorageError(
                f"is of another model than what is written here: {reason}",
                "remove it",
                "choose another folder",
                f"--accept {ACCEPT_CONTRADICTIONS}:config.json keeps it",
                where=folder / CONFIG,
            )
    return (
        [f"{folder}: {first_texts(existing_names)} lay there already, and stay as they are"]
        if existing_names
        else []
    )


def stale(conversion: Conversion) -> frozenset[str]:
    """Return the small files of an earlier model that are to be removed with its tensors."""
    request, target = conversion.request, conversion.target
    if request.dst is None or not target.form.configured or not request.overwrite:
        return frozenset()
    shapes = {parameter.name: parameter.shape for parameter in target.planner.selection.parameters}
    if is_of(target.folder, own_config(conversion), shapes):
        return frozenset()
    return copied_files(target.folder)


def new_copies(target: Target) -> dict[str, str]:
    """Return the digests of the small files that are written beside a target's tensors, by name.

    Those that somebody else put there stay theirs, even if they are the same.
    """
    ours = copied_files(target.folder)
    return {
        name: digest_of(content)
        for name, content in target.companions.items()
        if name in ours or not (target.folder / name).is_file()
    }


def is_of(
    folder: Path, model_config: tuple[Mapping[str, Any], str], shapes: Mapping[str, Shape]
) -> bool:
    """Tell whether a folder's config.json is of some tensors for sure: of the same architecture, or
    of the size of their embedding."""
    if not (folder / CONFIG).is_file() or of_another(folder, model_config, shapes, is_part=True):
        return False
    from .stated_model import EMBEDDING

    return bool(model_config[0]) or any(EMBEDDING().fullmatch(name) for name in shapes)


def own_config(conversion: Conversion) -> tuple[Mapping[str, Any], str]:
    """Return the configuration of the model that is converted, and where it is; {} if none is."""
    request, source, target = conversion.request, conversion.source, conversion.target
    with suppress(RankxformError):
        if CONFIG in target.companions:
            given_label = request.config or f"{request.like}/{CONFIG}"
            is_own = CONFIG in target.own_companions
            label = f"{source.where.path}/{CONFIG}" if is_own else given_label
            return parse_config(target.companions[CONFIG], label), label
        if source.form.configured and request.map is None:
            label = address_of(source.where.path, CONFIG)
            return parse_config(store_at(source.where.path).read(CONFIG), label), label
    return {}, ""


def of_another(
    place: AnyPath,
    model_config: tuple[Mapping[str, Any], str],
    shapes: Mapping[str, Shape],
    *,
    is_part: bool = False,
) -> str:
    """Return why a place's config.json is not of some tensors, in words; "" if it may be.

    model_config: the configuration that the tensors should have, and where it is. is_part: the
    tensors are not all that the model has.
    """
    label = address_of(str(place), CONFIG)
    try:
        folder_config = parse_config(store_at(str(place)).read(CONFIG), label)
    except RankxformError as error:
        return error.parts.what
    config, label = model_config
    for key in ("architectures", "model_type"):
        if folder_config.get(key) and config.get(key) and folder_config[key] != config[key]:
            return f"{key} is {folder_config[key]!r}, and {config[key]!r} in {label}"
    from .stated_model import refuted

    return "" if folder_config == config else refuted(folder_config, shapes, is_part=is_part)
