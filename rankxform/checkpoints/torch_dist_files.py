"""What a destination of Megatron-Core's torch_dist holds: keys, items, and the files beside them.

Megatron-Core asks for each tensor by the key that its own job would have saved it under
(megatron-core 0.16.1, `sharded_state_dict` of each module). Layers that are all alike are slices of
one tensor; norms are called after the matrix behind them where Transformer Engine fuses the two, or
would. It asks too for what a layer in 8 bits keeps beside its weights (`_extra_state`), which is
`[None]` for any other, and for the training's state (`common.pt`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.dcp_metadata import DcpMetadata, StoredItem
from rankxform.formats.pickles import PickleWriter
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import and_more
from rankxform.values import pattern_on_use

TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
_LAYER = pattern_on_use(r"(decoder\.layers\.)(?P<number>[0-9]{1,6})\.(?P<inner>.*)")
_IN_LAYER = (
    r"(?:input|pre_mlp)_layernorm"
    r"|self_attention\.(?:(?:q|k|kv)_layernorm|linear_(?:qkv|proj|q_proj|(?:q|kv)_(?:down|up)_proj))"
    r"|mlp\.(?:linear_fc[12]|router|experts\.experts\.linear_fc[12]|shared_experts\.linear_fc[12])"
)
_MODEL = pattern_on_use(
    r"(?:embedding\.(?:word|position)_embeddings|output_layer|decoder\.final_layernorm"
    rf"|decoder\.layers\.[0-9]+\.(?:{_IN_LAYER})"
    r"|mtp\.output_layer|mtp\.layers\.[0-9]+\.(?:[eh]norm|eh_proj|final_layernorm)"
    rf"|mtp\.layers\.[0-9]+\.transformer_layer\.(?:{_IN_LAYER}))"
    r"\.(?:weight|bias|expert_bias|gate_weight)"
    r"|(?:decoder|mtp)\.layers\.[0-9]+\.(?:transformer_layer\.)?mlp\.shared_experts\.gate_weight"
)
"""What is a weight of a GPTModel of Megatron-Core, in the names of `megatron_names`."""
_BLOCK = pattern_on_use(
    r"(?P<block>(?:decoder\.layers\.[0-9]+|mtp\.layers\.[0-9]+\.transformer_layer)\.)(?P<inner>.*)"
)
_LINEAR = pattern_on_use(r"(?P<module>.*\b(?:linear_\w+|eh_proj))\.weight")
_EXPERTS = "mlp.experts.experts."
_ATTENTION, _ATTENTION_OUTPUT = "self_attention.core_attention", "self_attention.linear_proj"
NO_STATE = b"\x80\x02]q\x00Na."
"""A pickle of `[None]`."""


def check_names(names: Iterable[str]) -> None:
    """Refuse what is no weight of a Megatron model. Raises CheckpointError."""
    unknown = [name for name in names if not _MODEL().fullmatch(name)]
    if unknown:
        raise CheckpointError(
            f"{unknown[0]!r} is no weight under Megatron's names{and_more(unknown, 'tensor')}",
            "--weights-only, if it is of an optimizer",
            "--map, if the names are another framework's",
            "--exclude, if no job asks for it",
        )


def stacked_names(shapes: Mapping[str, tuple[str, Shape]]) -> frozenset[str]:
    """Return the names of what is stored as a slice of all layers: of none, unless all are alike.

    shapes: type and shape of each tensor by name. Raises CheckpointError where types alone differ.
    """
    layers: dict[int, dict[str, tuple[str, Shape]]] = {}
    for name, typed_shape in shapes.items():
        if match := _LAYER().fullmatch(name):
            layers.setdefault(int(match["number"]), {})[match["inner"]] = typed_shape
    if not layers or sorted(layers) != [*range(len(layers))]:
        return frozenset()
    if any(layer != layers[0] for layer in layers.values()):
        shapes_alone = [{n: shape for n, (_, shape) in layer.items()} for layer in layers.values()]
        if all(layer == shapes_alone[0] for layer in shapes_alone):
            raise CheckpointError(
                "alike layers are one tensor of a torch_dist folder, and here types differ",
                "leave out --keep-dtype",
                "--dtype, which makes them one",
            )
        return frozenset()
    return frozenset(name for name in shapes if _LAYER().fullmatch(name))


def keys_of(names: Sequence[str], implementation: str | None) -> dict[str, str]:
    """Return by name the key that a job with this `--transformer-impl` has for a tensor.

    Raises UsageError where that depends on it and it is None.
    """
    inner_by_block: dict[str, set[str]] = {}
    for name in names:
        if match := _BLOCK().fullmatch(name):
            inner_by_block.setdefault(match["block"], set()).add(match["inner"])
    keys = dict[str, str]()
    for name in names:
        keys[name] = name
        if match := _BLOCK().fullmatch(name):
            inner = inner_by_block[match["block"]]
            fused, local = (
                match["block"] + _key(match["inner"], inner, is_fused=is_fused)
                for is_fused in (True, False)
            )
            if len({fused, local}) > 1 and implementation is None:
                raise UsageError(
                    f"Megatron calls {name!r} {fused!r} with Transformer Engine, and {local!r} "
                    "without",
                    f"--transformer-impl {TRANSFORMER_ENGINE}, Megatron's default",
                    f"--transformer-impl {LOCAL}",
                )
            keys[name] = local if implementation == LOCAL else fused
    return keys


def _key(name: str, inner: set[str], *, is_fused: bool) -> str:
    """Return what a layer calls one of its tensors. inner: the names of all of them."""
    module, _, leaf = name.rpartition(".")
    is_latent = "self_attention.linear_kv_up_proj.weight" in inner
    if module == "input_layernorm" and not is_latent:
        return f"self_attention.linear_qkv.layer_norm_{leaf}"
    if module == "pre_mlp_layernorm":
        has_matrix = "mlp.linear_fc1.weight" in inner
        if has_matrix if is_fused else not is_latent:
            return f"mlp.linear_fc1.layer_norm_{leaf}"
    if module in ("self_attention.q_layernorm", "self_attention.kv_layernorm"):
        matrix = module.replace("layernorm", "up_proj").replace(".", ".linear_")
        if is_fused and is_latent and f"{matrix}.weight" in inner:
            return f"{matrix}.layer_norm_{leaf}"
    return name


def stacked_key(key: str) -> tuple[str, int]:
    """Return the key of a tensor of all layers, and which of them a key is of.

    >>> stacked_key("decoder.layers.3.mlp.linear_fc2.weight")
    ('decoder.layers.mlp.linear_fc2.weight', 3)
    """
    match = _LAYER().fullmatch(key)
    assert match is not None
    return f"{match[1]}{match['inner']}", int(match["number"])


def restate(table: DcpMetadata, keys: Mapping[str, str], stacked: frozenset[str]) -> DcpMetadata:
    """Return a table of tensors by name as Megatron asks for them. stacked: see `stacked_names`."""
    layers = 1 + max((stacked_key(keys[name])[1] for name in stacked), default=-1)
    tensors: dict[str, tuple[str, Shape]] = {}
    items: dict[str, tuple[StoredItem, ...]] = {}
    for name, (dtype, shape) in table.tensors.items():
        key, stored_items = keys[name], table.items[name]
        if name in stacked:
            key, number = stacked_key(key)
            shape = (layers, *shape)
            in_layer = list[StoredItem]()
            for item in stored_items:
                assert item.box is not None
                box = Box((number, *item.box.start), (number + 1, *item.box.stop))
                in_layer.append(item._replace(box=box))
            stored_items = tuple(in_layer)
        tensors[key] = dtype, shape
        items[key] = (*items.get(key, ()), *stored_items)
    ordered = sorted(items)
    return DcpMetadata({k: tensors[k] for k in ordered}, {k: items[k] for k in ordered})


def extra_states(shapes: Mapping[str, Shape], stacked: frozenset[str]) -> Iterator[str]:
    """Yield the keys of what Megatron keeps beside weights, which it asks for.

    shapes: of all tensors, by name. stacked: see `stacked_names`.
    """
    layers = len({stacked_key(name)[1] for name in stacked})
    for name, shape in shapes.items():
        match = _LINEAR().fullmatch(name)
        if match is None:
            continue
        module, place = match["module"], [(0, 1)]
        if name in stacked:
            module, number = stacked_key(module)
            place = [(number, layers)]
        shards = [place]
        if _EXPERTS in name:
            outer = place if name in stacked else []
            shards = [[*outer, (expert, shape[0])] for expert in range(shape[0])]
        for shard in shards:
            numbers, counts = (".".join(str(pair[n]) for pair in shard) for n in range(2))
            yield f"{module}._extra_state/shard_{numbers}_{counts}"
            if module.endswith(_ATTENTION_OUTPUT):  # its job has one of the attention too
                attention = module.replace(_ATTENTION_OUTPUT, _ATTENTION)
                yield f"{attention}._extra_state/shard_{numbers}_{counts}"


def archive(pickled: bytes) -> bytes:
    """Return what torch.save makes of a pickle without tensors."""
    from zipfile import ZipFile, ZipInfo

    buffer = BytesIO()
    with ZipFile(buffer, "w") as out:
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            out.writestr(ZipInfo(f"archive/{name}"), data)  # its time is always the same
    return buffer.getvalue()


def training_state(iteration: int) -> bytes:
    """Return a `common.pt`."""
    writer = PickleWriter()
    writer.begin_dict()
    writer.values("iteration", iteration, "checkpoint_version", 3)
    writer.end_dict()
    return archive(writer.stop())
