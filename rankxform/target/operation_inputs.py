"""What the operations on the way need besides options: read on process 0, used by all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from itertools import takewhile
from pathlib import Path
from posixpath import dirname
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, CheckpointRef
from rankxform.errors import CheckpointError, RankxformError, RequestError, UsageError
from rankxform.layout.names import compile_regex
from rankxform.layout.strategy import Strategy
from rankxform.operations.base import OPERATIONS, OperationChain, Tensor
from rankxform.operations.cast import WRITTEN_OUT
from rankxform.operations.vocabulary import ResizeVocabulary
from rankxform.options import flag_of
from rankxform.planning.catalog import Catalog
from rankxform.planning.selection import apply_operations
from rankxform.request import Request
from rankxform.source.choose import form_at, list_and_select
from rankxform.statements import (
    CONFIGURATION,
    MODEL_SIZE,
    Finding,
    Statement,
    as_warning,
    contradictions,
    require,
)
from rankxform.storage import user_files
from rankxform.storage.posix import is_same_file
from rankxform.storage.store import address_of, is_path, store_at
from rankxform.values import dataclass, pattern_on_use

if TYPE_CHECKING:
    from rankxform.formats.map_table import MapTable
    from rankxform.operations.lora import LoraScaling
    from rankxform.operations.map import NameMap
    from rankxform.source.open import Source

_MOST_BLOCK = 1 << 20
_IS_SIZE = pattern_on_use(
    r"hidden_size|num_(?!nextn).*(heads|layers)|.*head_dim|.*intermediate_size|.*_lora_rank|.*experts"
)
"""Keys of a config.json whose values say how tensors are taken apart."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MANIFEST = "mindformers_adapter_config.json"
"""PEFT's, and that of MindFormers' PyNative trainer since 2.1.0."""

CHOICES = ("qkv", "gate_up")
"""The options that choose a step of a map."""


@dataclass(frozen=True)
class OperationInputs:
    """What files say of the operations: a mapping table, and the sizes of the model."""

    table: MapTable | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""  # what messages call the configuration
    lora: str | None = None  # an adapter's folder or file
    scaling: LoraScaling | None = None  # how much of it is added
    lora_strategy: str | Strategy | None = None  # how it is sharded
    inside: bool = False  # its tensors are the source's own
    # Files of the reference that belong to the model too.
    companions: Mapping[str, bytes] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()  # why one is not made
    # What other operations read, by their names.
    documents: Mapping[str, Any] = field(default_factory=dict)


def read_operation_inputs(request: Request, where: str) -> OperationInputs:
    """Read what the operations of a conversion of `where` need. Raises UsageError."""
    inputs = _with_adapter(request, where, _read_map(request, where))
    readers = {n: o.read for n, o in OPERATIONS.items() if hasattr(o, "read")}
    documents = {name: read(vars(request)) for name, read in readers.items()}
    inputs = _with_manifest(request, where, _with_companions(request, inputs))
    return replace(inputs, documents=documents)


def _read_map(request: Request, where: str) -> OperationInputs:
    if request.map is None:
        inputs = OperationInputs()
        has_use = request.dtype is not None or request.lora is not None
        config_and_path = _config(request, where) if has_use else None
        if config_and_path is not None:  # it may state a block's size
            inputs, request = OperationInputs(None, *config_and_path), replace(request, config=None)
        for name in ("config", "like", *CHOICES, "variant"):
            if getattr(request, name):
                raise UsageError(f"{flag_of(name)} is for --map", "give both")
        return inputs
    table = user_files.load_map_table(request.map)
    for name in CHOICES:
        if getattr(request, name) is not None and name not in table.choices:
            flag = flag_of(name)
            raise UsageError(f"{table.label} has no such choice", f"leave out {flag}")
    for name in _variants(request):
        if name not in table.variants:
            variants_text = ", ".join(table.variants) or "none"
            raise UsageError(f"--variant {name}: {table.label} has {variants_text}")
    if request.like is not None and not Path(request.like).is_dir():
        raise UsageError("no such folder", "give --like a published model", where=request.like)
    usual = where if request.like is None else str(Path(request.like))
    if is_path(usual):
        folder = Path(usual)
        folder = folder.parent if folder.is_file() else folder
        if not folder.is_dir():
            raise UsageError("no such folder", where=folder)
        usual = str(folder)
    read = _config(request, usual)
    if read is None:
        raise UsageError(
            f"{table.label} needs its sizes, and {usual} has none",
            "give --config, the model's config.json",
        )
    config, path = read
    _check_sizes(request, where, config, path)
    architectures = config.get("architectures")
    named = (
        [str(architecture) for architecture in architectures]
        if isinstance(architectures, list)
        else []
    )
    if table.architectures and named and not set(named) & set(table.architectures):
        raise UsageError(
            f"is of a {named[0]}; {table.label} is for {' and '.join(table.architectures)}",
            where=path,
        )
    return OperationInputs(table, config, path)


def _check_sizes(request: Request, where: str, config: Mapping[str, Any], path: str) -> None:
    """Refuse configurations that state sizes of a model otherwise. Raises UsageError."""
    configs_by_label = {path: config}
    config_folders = [where]  # a given one stands in the place of a reference's
    if request.like is not None and request.config is None:
        config_folders.append(request.like)
    for folder in config_folders:
        store = store_at(folder)
        if not is_path(folder) or Path(folder).is_dir():
            name = address_of(folder, user_files.CONFIG)
            if name not in configs_by_label and store.has(user_files.CONFIG):
                configs_by_label[name] = user_files.parse_config(
                    store.read(user_files.CONFIG), name
                )
    facts = (
        Statement(MODEL_SIZE, key, value, CONFIGURATION, label)
        for label, declared_config in configs_by_label.items()
        for key, value in declared_config.items()
        if type(value) is int and _IS_SIZE().fullmatch(key)
    )
    require(pair.finding._replace(error=UsageError) for pair in contradictions(facts))


def _config(request: Request, folder: str) -> tuple[dict[str, Any], str] | None:
    """Return the model's configuration, given or in a folder, and where it is; None if nowhere."""
    if request.config is not None:
        path = Path(request.config)
        return user_files.read_config(path), str(path)
    store = store_at(folder)
    if not store.has(user_files.CONFIG):
        return None
    name = address_of(folder, user_files.CONFIG)
    return user_files.parse_config(store.read(user_files.CONFIG), name), name


def _with_companions(request: Request, inputs: OperationInputs) -> OperationInputs:
    """Add the small files of a reference that a Hugging Face folder has too, or a config.json."""
    if request.dst is None or not FORMS[request.dst_form or DEFAULT_FORM].configured:
        return inputs
    companions = {} if request.like is None else user_files.companions(Path(request.like))
    if request.config is None:
        return replace(inputs, companions=companions) if companions else inputs
    typed_config = _with_type(inputs, user_files.read_config_bytes(Path(request.config)))
    if typed_config is not None:  # the one that was given, not the reference's
        return replace(inputs, companions={**companions, user_files.CONFIG: typed_config})
    assert inputs.table is not None
    companions.pop(user_files.CONFIG, None)
    doubt = (
        f"{inputs.label}: states no model_type, and {inputs.table.label} is not for one model only"
    )
    finding = as_warning(f"{doubt}; no {user_files.CONFIG} is written of it")
    return replace(inputs, companions=companions, findings=(finding,))


def _with_type(inputs: OperationInputs, written: bytes) -> bytes | None:
    """Return a configuration with the model's type, by which libraries know what it is of.

    None where neither it nor the map says that.
    """
    table, config = inputs.table, inputs.config
    if table is None or config.get("model_type"):
        return written
    types = dict(zip(table.architectures, table.model_types))
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        architectures = [*types][: 1 if len(types) == 1 else 0]
    name = next((architecture for architecture in architectures if architecture in types), None)
    if name is None:
        return None
    typed_config = {**config, "architectures": [name], "model_type": types[name]}
    return (json.dumps(typed_config, indent=2) + "\n").encode()


def _with_manifest(request: Request, where: str, inputs: OperationInputs) -> OperationInputs:
    """Add what MindFormers' trainer knows an adapter by, where the destination is read by it.

    Without it the trainer loads no base. Raises UsageError.
    """
    is_read = request.lora is None and is_path(where)
    path = _manifest_at(Path(where), request.step) if is_read else None
    if path is None or request.dst is None:
        return inputs
    if request.dst_form == "checkpoint2":
        adapter_files = {ADAPTER_MANIFEST: user_files.read_config_bytes(path)}
        return replace(inputs, companions={**inputs.companions, **adapter_files})
    doubt = f"{path}: says what the adapter is for, and the destination gets no such file"
    return replace(inputs, findings=(*inputs.findings, as_warning(doubt)))


def _manifest_at(where: Path, step: str | None = None) -> Path | None:
    """Return what MindFormers' PyNative trainer says of an adapter; None if nothing lies there.

    It lies with each iteration, and above them that of the last to be saved.
    """
    folder = where.parent if where.is_file() else where
    step_folder, number = folder, None
    with suppress(RankxformError, OSError):
        _, _, selected = list_and_select(CheckpointRef(str(folder), step=step))
        step_folder = folder / dirname(next(iter(selected.names.values()), ""))
        number = selected.step[0] if selected.step else None
    if (step_folder / ADAPTER_MANIFEST).is_file():
        return step_folder / ADAPTER_MANIFEST
    above = folder / ADAPTER_MANIFEST
    if not above.is_file() or user_files.read_config(above).get("global_step", number) != number:
        return None
    return above


def _with_adapter(request: Request, src: str, inputs: OperationInputs) -> OperationInputs:
    """Add what is known of an adapter. Raises UsageError."""
    numbers = {"lora_alpha": request.lora_alpha, "lora_rank": request.lora_rank}
    flags = {name: flag_of(name) for name in (*numbers, "lora_strategy")}
    if request.lora is None:
        for name, flag in flags.items():
            if getattr(request, name) is not None:
                raise UsageError(f"{flag} is for --lora", "give both")
        return inputs
    from rankxform.operations.lora import LoraScaling, positive

    where = Path(request.lora).absolute()
    if not where.exists():
        raise UsageError("no such adapter", where=where)
    path = (where if where.is_dir() else where.parent) / ADAPTER_CONFIG
    requested_flags = [flags[name] for name, value in numbers.items() if value is not None]
    manifest_path = None if path.is_file() else _manifest_at(where)
    if manifest_path is not None:
        if requested_flags:
            raise UsageError(
                f"{manifest_path} states both", f"leave out {' and '.join(requested_flags)}"
            )
        scaling = LoraScaling.of_mindformers(
            user_files.read_config(manifest_path), str(manifest_path)
        )
    elif path.is_file():
        if requested_flags:
            raise UsageError(f"{path} states both", f"leave out {' and '.join(requested_flags)}")
        scaling = LoraScaling.of(user_files.read_config(path), str(path))
    elif not positive(request.lora_alpha) or not request.lora_rank:
        raise UsageError(
            f"{where} has no {ADAPTER_CONFIG}, and without them it is not known how "
            "much is to be added",
            "give --lora-alpha and --lora-rank, as the adapter was trained",
        )
    else:
        scaling = LoraScaling(float(request.lora_alpha or 0), request.lora_rank)
    strategy: str | Strategy | None = request.lora_strategy
    if strategy is None and where.is_dir() and not form_at(CheckpointRef(str(where))).described:
        strategy = request.src_strategy
    return replace(
        inputs,
        lora=str(where),
        scaling=scaling,
        lora_strategy=strategy,
        inside=is_path(src) and is_same_file(where, Path(src)),
    )


def build_operations(
    request: Request,
    inputs: OperationInputs,
    adapter: Catalog | None = None,
    items: str = "",
    training: Mapping[str, Any] | None = None,
) -> OperationChain:
    """Return what becomes of the source's tensors; the same on every process.

    items: how the source keeps what is no tensor. training: what it states of the training.
    """
    adapter_operation = None
    if adapter is not None:
        from rankxform.operations.lora import LoraOperation

        assert inputs.scaling is not None
        shapes = {p.src_name: p.shape for p in adapter.parameters}
        adapter_operation = LoraOperation(
            shapes, inputs.scaling, str(inputs.lora), inside=inputs.inside
        )
    form = FORMS[request.dst_form or DEFAULT_FORM]
    ready = {
        "mapping": name_map(request, inputs),
        "adapter": adapter_operation,
        "block": _block(inputs),
        "scheme": _scheme(inputs),
        "items": (items, form.items),
        "training": training if form.counters and request.dst is not None else None,
    }
    return OperationChain.of({**vars(request), **inputs.documents, **ready})


def _block(inputs: OperationInputs) -> tuple[int, int] | None:
    """Return the rows and columns of a block of 8-bit floats, if the configuration states them."""
    quantization = inputs.config.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if size is None:
        return None
    good = isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size)
    if not good or not all(0 < n < _MOST_BLOCK for n in size):
        raise UsageError(f"weight_block_size is {size!r}; expected two numbers", where=inputs.label)
    return size[0], size[1]


def _scheme(inputs: OperationInputs) -> str:
    """Return what the configuration calls the model's quantization; "" if it states none."""
    quantization = inputs.config.get("quantization_config")
    experts = inputs.config.get("expert_dtype")
    method = str(quantization.get("quant_method") or "") if isinstance(quantization, dict) else ""
    return f"{method}, experts {experts}" if method and isinstance(experts, str) else method


def tied_duplicates(tensors: Iterable[Tensor]) -> tuple[tuple[str, str], ...]:
    """Return the source tensors that are left out as the same as another, with that one.

    Steps of parameters only where one of them is written.
    """
    all_tensors = [*tensors]
    written = {s.name for t in all_tensors if not t.dropped for s in t.sources}
    return tuple(
        (tensor.sources[0].name, tensor.same_as)
        for tensor in all_tensors
        if tensor.same_as and (tensor.state is None or tensor.same_as in written)
    )


def truncated_vocab(derivation: OperationChain, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the source tensors that lose rows of the vocabulary."""
    return tuple(
        tensor.sources[0].name
        for operation in derivation.compositions
        if isinstance(operation, ResizeVocabulary)
        for tensor in operation.cut(tensors)
    )


def name_map(request: Request, inputs: OperationInputs) -> NameMap | None:
    """Return the map, with the model's sizes, if one is asked for. Raises UsageError."""
    if inputs.table is None:
        return None
    from rankxform.operations.map import ModelSizes, NameMap

    sizes = ModelSizes(inputs.table, inputs.config, inputs.label)
    choices = {name: value for name in CHOICES if (value := getattr(request, name))}
    choices |= _variants(request)
    excluded = [compile_regex(text, "--exclude") for text in request.exclude]
    return NameMap(sizes, choices, excluded, free_rows=request.vocab is not None)


def _variants(request: Request) -> dict[str, str]:
    """Return the ways that are asked for, by variant. Raises UsageError."""
    pairs = [text.partition("=") for text in request.variant]
    for name, equals, way in pairs:
        if not (name and equals and way):
            raise UsageError(f"--variant {name!r}: expected NAME=WAY, such as mla=apart")
    return {name: way for name, _, way in pairs}


MINDFORMERS_FORMS = ("ranks", "checkpoint2", "unified")
"""Forms that only MindFormers' jobs write; a single file is one of rank folders."""

_MEGATRON = {"qkv": "grouped", "gate_up": "contiguous"}
"""How Megatron-Core joins them: q, k and v of a group together, gate before up."""


def settle_map(request: Request, inputs: OperationInputs, source: Source, dst: object) -> Request:
    """Return the request with what names and forms tell of a map: variants, and how tensors join.

    Variants are told by the names that are there: the source's, or those that the destination's
    strategy lists. Joining is told by the form whose tensors are joined, the source's or the
    destination's: MindFormers joins them as its defaults say, Megatron otherwise, and other forms
    may be anybody's. Raises UsageError where no form tells.
    """
    if inputs.table is None or not (inputs.table.variants or inputs.table.choices):
        return request
    from rankxform.formats.map_table import MINDFORMERS

    try:
        tensors = _tensors_before_a_map(request, source)
        if inputs.table.variants:
            request = _with_variants(request, inputs, tensors, dst)
        mapping = name_map(request, inputs)
        assert mapping is not None
        names = [tensor.name for tensor in tensors if tensor.is_weight]
        is_source = mapping.naming_of(names) == MINDFORMERS
    except (RequestError, CheckpointError):
        return request  # what is wrong with the names, the map says
    if request.like is not None and is_source:
        return request  # the reference decides
    form = source.form if is_source else FORMS[request.dst_form or DEFAULT_FORM]
    unsaid = [name for name in mapping.choices if getattr(request, name) is None]
    if not unsaid or form.name in MINDFORMERS_FORMS or (form.configured and not is_source):
        return request  # what has Hugging Face's names gets no others in such a folder
    if form.name == "torch_dist":
        lies = {name: _MEGATRON.get(name) if name in unsaid else None for name in CHOICES}
        qkv, gate_up = request.qkv or lies["qkv"], request.gate_up or lies["gate_up"]
        return replace(request, qkv=qkv, gate_up=gate_up)
    tries = [
        " ".join(f"{flag_of(name)} {[*inputs.table.choices[name]][number]}" for name in unsaid)
        for number in (0, 1)
    ]
    where = source.where.path if is_source else f"--dst-form {form.name}"
    raise UsageError(
        f"{inputs.table.label} joins tensors, and a {form.title} checkpoint does not say how",
        f"{tries[0]}, as MindFormers joins them",
        f"{tries[1]}, as most others do",
        where=where,
    )


def _with_variants(
    request: Request, inputs: OperationInputs, tensors: Sequence[Tensor], dst: object
) -> Request:
    mapping = name_map(request, inputs)
    assert mapping is not None
    axes = {tensor.name: len(tensor.shape) for tensor in tensors}
    for layouts in dst.stages if isinstance(dst, Strategy) else ():
        axes |= {n: len(d.tensor_map) for n, d in layouts.items() if not d.may_be_nested}
    ways = {**mapping.told(axes), **_variants(request)}
    return replace(request, variant=tuple(f"{name}={way}" for name, way in ways.items()))


def _tensors_before_a_map(request: Request, source: Source) -> list[Tensor]:
    """Return the source's tensors as a map takes them. Raises RequestError."""
    options = {**vars(request), "mapping": True}
    earlier_factories = takewhile(
        lambda item: item[0] not in ("dequantize", "mapping"), OPERATIONS.items()
    )
    operations = (make(options) for _, make in earlier_factories)
    catalog = source.require_catalog()
    derivation = OperationChain(
        (operation for operation in operations if operation is not None),
        catalog.states,
    )
    return [tensor for tensor in apply_operations(catalog, derivation) if not tensor.dropped]


def assumptions(
    request: Request, inputs: OperationInputs, derivation: OperationChain
) -> Iterator[str]:
    """Yield what no file records and is taken to be so."""
    if inputs.companions and inputs.config.get("quantization_config"):
        yield (
            f"{inputs.label}: its quantization_config is copied, and the destination's tensors are "
            "not quantized; remove it from DST/config.json"
        )
    if (
        request.vocab is not None
        and inputs.config.get("vocab_size", request.vocab) != request.vocab
    ):
        yield (
            f"{inputs.label}: states vocab_size {inputs.config['vocab_size']}, and the destination "
            f"has {request.vocab} rows; change the configuration that goes with it"
        )
    config_dtype = inputs.config.get("torch_dtype", inputs.config.get("dtype", request.dtype))
    if (
        inputs.companions
        and WRITTEN_OUT.get(config_dtype, config_dtype) != request.dtype
        and request.dtype
    ):
        yield (
            f"{inputs.label}: states torch_dtype {config_dtype}, and the destination's tensors are "
            f"{request.dtype}; change DST/config.json"
        )
    mapping = map_operation(inputs, derivation)
    requested_variants = _variants(request)
    untold = (
        [f"{n}={way}" for n, way in mapping.variants.items() if n not in requested_variants]
        if mapping
        else []
    )
    if mapping and untold:
        yield (
            f"{mapping.table.label}: MindFormers gets {', '.join(untold)}, as in its "
            "configurations (--variant chooses; a destination's strategy tells)"
        )
    choices = mapping.choices if mapping else {}
    unsaid = [n for n in choices if getattr(request, n) is None]
    if mapping and unsaid and request.like is None:
        in_words = ", ".join(f"{name} {choices[name]}" for name in unsaid)
        flags = " and ".join(map(flag_of, unsaid))
        yield (
            f"{mapping.table.label}: takes {in_words}, as MindFormers does by default; no file "
            f"records it ({flags} choose; on the way to Hugging Face, --like compares)"
        )


def map_in_words(inputs: OperationInputs, derivation: OperationChain) -> str | None:
    """Return which map is applied, and what it takes that no file records."""
    mapping = map_operation(inputs, derivation)
    if mapping is None:
        return None
    choices = ", ".join(f"{name} {value}" for name, value in mapping.choices.items())
    return f"{mapping.table.label} by {mapping.sizes.label}" + (f": {choices}" if choices else "")


def map_operation(inputs: OperationInputs, derivation: OperationChain) -> NameMap | None:
    """Return the map among the operations, if there is one."""
    if inputs.table is None:
        return None
    from rankxform.operations.map import NameMap

    return next(
        (operation for operation in derivation.compositions if isinstance(operation, NameMap)), None
    )
