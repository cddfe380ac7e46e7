"""Tensors that are hardly weights of a model, as jobs save them by mistake.

By names and full shapes alone: emptied matrices of ZeRO-3, flat parameters of FSDP, names that a
wrapper has put before a model's own, adapters beside the layers that they are for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from shlex import quote

from rankxform.geometry.box import Shape
from rankxform.layout.names import pattern_of, summarize_names

from .catalog import Catalog

_FLAT = ("flat_param", "_flat_param", "_fsdp_flat_param")
_WRAPPERS = (
    # what stands in a name, the tool, the rule that takes it away
    ("_orig_mod.", "torch.compile", r"_orig_mod\.="),
    ("_fsdp_wrapped_module.", "FSDP", r"_fsdp_wrapped_module\.="),
    ("_checkpoint_wrapped_module.", "activation checkpointing", r"_checkpoint_wrapped_module\.="),
    ("base_model.model.", "PEFT", r"^base_model\.model\.="),
    ("module.", "DistributedDataParallel", r"^module\.="),
)
_ANYWHERE = 3  # of these wrappers the first ones may stand anywhere in a name, the others begin it


def unusual_tensors(shapes: Mapping[str, Shape], names: Collection[str]) -> Iterator[str]:
    """Yield, as warnings, what is hardly meant. `shapes` are the source's weights, full and by
    name; `names` are those that they get at the destination.
    """
    empty = [name for name, shape in shapes.items() if shape == (0,)]
    if len(empty) > 1 and 2 * len(empty) >= len(shapes):
        yield (
            f"{len(empty)} of {len(shapes)} weights are empty, such as {empty[0]!r}: saved without "
            "being gathered (ZeRO-3); zero_to_fp32.py makes whole ones"
        )
    flat = [n for n in shapes if n.rpartition(".")[2] in _FLAT or n.startswith("buffer_0_bucket_")]
    if flat:
        yield (
            f"{summarize_names(flat, 2)} hold many parameters in one row, without their names; "
            "save full or sharded state dicts"
        )
    is_adapter = bool(shapes) and all("lora_" in name for name in shapes)
    if is_adapter and any(name.startswith("base_model.model.") for name in shapes):
        yield (
            f"all {len(shapes)} tensors are an adapter's, such as {next(iter(shapes))!r}; --lora "
            "merges it into the model that is given as SRC"
        )
        return
    for number, (text, tool, rule) in enumerate(_WRAPPERS):
        if number < _ANYWHERE:
            wrapped = [name for name in names if text in name]
        else:
            wrapped = [name for name in names if name.startswith(text)]
        if wrapped and 2 * len(wrapped) >= len(names):
            example_text = f"such as {wrapped[0]!r}"
            yield f"names have {tool}'s {text} in them, {example_text}; --rename {quote(rule)}"
    layers = [name for name in shapes if ".base_layer." in name]
    if layers and any("lora_a" in name.lower() for name in shapes):
        yield (
            f"an adapter lies beside {len(layers)} layers, such as {layers[0]!r}, and is not "
            "merged; PEFT's merge_and_unload() does that before saving"
        )


def types_by_file(catalog: Catalog) -> Iterator[str]:
    """Yield, as warnings, tensors of one kind that have another type in other files.

    Files of one checkpoint are saved alike: one that was not is of another.
    """
    files_by_type: dict[str, dict[str, set[int]]] = {}
    for parameter in catalog.parameters:
        if parameter.is_weight and parameter.shape:
            of_kind = files_by_type.setdefault(pattern_of(parameter.name), {})
            of_kind.setdefault(parameter.dtype, set()).update(parameter.holders)
    for kind, files in files_by_type.items():
        (a, in_a), (b, in_b), *_ = [*files.items(), ("", set[int]()), ("", set[int]())]
        if in_a and in_b and in_a.isdisjoint(in_b):
            first, second = catalog.paths[min(in_a)], catalog.paths[min(in_b)]
            yield f"{kind} is {a} in {first}, and {b} in {second}"
            return
