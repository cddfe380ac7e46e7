"""A model's tensors as vLLM's sharded_state has them, for some tensor-parallel ranks.

From Hugging Face's names to those that vLLM 0.24 to 0.33 saves: each tensor stands once, under the
smallest of its modules' paths, before weights are processed for a device. What ranks hold of a
fused matrix, such as their queries, keys and values, is put one rank after another, so that equal
slices along an axis are the ranks' own (`rankxform.checkpoints.vllm` says along which). Established
with vLLM's own classes of 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import FLOATS
from rankxform.geometry.pieces import Assembly, concatenate, pile
from rankxform.layout.names import and_more

from .base import ModelOperation, OperationContext, Tensor
from .composing import Composer
from .experts import APART
from .serving_names import NEWEST, check_version, naming_of

VOCABULARY_PADDING = 64
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SCALARS = "_k_scale", "_v_scale", "_q_scale", "_prob_scale"
_DENSE = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Glm4ForCausalLM",
}
_ROUTERS = {
    "Qwen3MoeForCausalLM": ("mlp.experts.gate.", "mlp.experts.gate."),
    "DeepseekV2ForCausalLM": ("mlp.experts.gate.", ""),
    "DeepseekV3ForCausalLM": ("mlp.experts.gate.", "mlp.experts.gate."),
    "Glm4MoeForCausalLM": ("mlp.gate.", "mlp.experts.routed_experts."),
    "MixtralForCausalLM": ("block_sparse_moe.gate.", ""),
}
"""By architecture what stands before a router's weight, and before its correction bias."""
ARCHITECTURES = *_DENSE, *_ROUTERS
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_NO_WEIGHT = "rotary_emb.inv_freq"
_CORRECTION = ".e_score_correction_bias"
_EXACT_ROUTER = "mlp.gate.weight", "Glm4MoeForCausalLM"
"""What vLLM keeps in Float32 whatever the model's type."""
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ATTENTION = "self_attn."
_UNCHANGED = re.compile(
    r"(input|post_attention|post_self_attn|post_mlp)_layernorm\.weight"
    r"|self_attn\.((o_proj\.(weight|bias))|([qk]_norm\.weight)|(kv_a_layernorm\.weight)"
    r"|(kv_b_proj\.weight))|mlp\.down_proj\.(weight|bias)"
)
_LATENT = re.compile(r"self_attn\.(q_a_layernorm|q_b_proj|q_proj|o_proj)\.weight")
"""What stands below `mla_attn.` in a model with latent attention."""


class ServedModel(NamedTuple):
    """What config.json says of a model, as far as ranks depend on it."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    is_tied: bool
    is_latent: bool
    label: str  # of the config.json
    version: int  # of vLLM, the second number
    platform: str | None


def read(context: OperationContext) -> ServedModel:
    """Return what the operation needs of files. Raises UsageError."""
    if not context.is_served:
        text = "--tensor-parallel is for --dst-form vllm, and the destination is of another form"
        raise UsageError(text, "leave out --tensor-parallel")
    if context.options["experts"] not in (None, APART):
        raise UsageError("--experts: vLLM has experts in tensors of its own", "leave out --experts")
    if context.config is None:
        raise UsageError(
            f"--tensor-parallel needs the model's sizes, and {context.model_folder} has none",
            "give --config, the model's config.json",
        )
    config, label = context.config
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"is of a {architecture or 'model without a name'}, and vLLM's folders are known of "
            f"{', '.join(ARCHITECTURES)}",
            "--dst-form huggingface, which vLLM reads of any model",
            where=label,
        )
    if config.get("quantization_config"):
        raise UsageError(
            "is of a quantized model, whose state in vLLM depends on the device",
            "--dst-form huggingface",
            where=label,
        )
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if type(layers) is not int or type(heads) is not int or heads < 1:
        raise UsageError("states no num_hidden_layers or num_attention_heads", where=label)
    return ServedModel(
        architecture,
        layers,
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or (config.get("hidden_size") or 0) // heads,
        bool(config.get("tie_word_embeddings")),
        config.get("kv_lora_rank") is not None,
        label,
        check_version(context.options["vllm_version"] or NEWEST, context.options["platform"]),
        context.options["platform"],
    )


def make(options: Mapping[str, Any]) -> ModelOperation:
    """Return the operation that is asked for."""
    return Serve(
        options["inputs"]["serving"],
        options["tensor_parallel"],
        has_stages=(options["pipeline_parallel"] or 1) > 1,
        has_whole_experts=options["expert_parallel"],
    )


class Serve(ModelOperation):
    """Makes the tensors that vLLM's ranks slice equally."""

    renames = True

    def __init__(
        self, model: ServedModel, ranks: int, *, has_stages: bool, has_whole_experts: bool
    ) -> None:
        self._model, self._ranks, self._composer = model, ranks, Composer()
        self._has_stages, self._has_whole_experts = has_stages, has_whole_experts
        if model.heads % ranks:
            raise UsageError(
                f"--tensor-parallel {ranks}: {model.heads} heads ({model.label}) cannot be divided "
                "by it",
                "--tensor-parallel N that divides them",
            )

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        by_name = {tensor.name: tensor for tensor in tensors if not tensor.dropped}
        dropped = [tensor for tensor in tensors if tensor.dropped]
        for name in [name for name in by_name if name.endswith(_NO_WEIGHT)]:
            dropped.append(replace(by_name.pop(name), dropped="left out: no weight of the model"))
        odd = [t for t in by_name.values() if t.dtype not in FLOATS or t.related is not None]
        if odd:
            raise CheckpointError(
                f"{odd[0].name!r} is {odd[0].dtype}{and_more(odd, 'tensor')}, and vLLM's state has "
                "weights alone, in floating types",
                "--weights-only",
                "--dst-form huggingface",
            )
        new_tensors, used_names = list[Tensor](), set[str]()
        for new, parts in self._served_tensors(by_name):
            new_tensors.append(new)
            used_names.update(parts)
        if self._has_whole_experts and not any("experts" in t.name for t in new_tensors):
            raise UsageError("--expert-parallel: the model has no experts", "leave it out")
        beyond = [n for n in by_name if n not in used_names and self._is_beyond(n)]
        dropped += [
            replace(by_name[n], dropped="of layers behind the model, which vLLM serves apart")
            for n in beyond
        ]
        if unknown := [name for name in by_name if name not in used_names and name not in beyond]:
            raise CheckpointError(
                f"vLLM's {self._model.architecture} has no {unknown[0]!r}"
                f"{and_more(unknown, 'such tensor')}",
                "--map, if the names are not Hugging Face's",
                "--exclude, if it is none of the model's",
            )
        return [*self._as_the_version_names(new_tensors), *dropped]

    def _as_the_version_names(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        model = self._model
        naming = naming_of(model.version, model.platform, model.architecture)
        for tensor in tensors:
            if (name := naming(tensor.name)) is not None:
                yield tensor.renamed(name)

    def _is_beyond(self, name: str) -> bool:
        match = _LAYER.fullmatch(name)
        return match is not None and int(match[1]) >= self._model.layers

    def _served_tensors(
        self, by_name: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
        """Yield the tensors that are made, each with the names of what it is made of."""
        embedding = by_name.get(_EMBEDDING)
        if embedding is None:
            raise CheckpointError(
                f"holds no {_EMBEDDING!r}", "--map, if the names are not Hugging Face's"
            )
        head = None if self._model.is_tied else by_name.get(_HEAD)
        if head is None and not self._model.is_tied:
            text = f"holds no {_HEAD!r}, and {self._model.label} does not tie it to the embedding"
            raise CheckpointError(text, "--config FILE of this model, if that is another's")
        # what is tied stands once, under the smaller name, but for a head in another stage
        if head is not None or self._has_stages:
            yield self._padded(embedding, _EMBEDDING), (_EMBEDDING,)
        yield self._padded(head or embedding, _HEAD), (_EMBEDDING, _HEAD)
        if (norm := by_name.get("model.norm.weight")) is None:
            raise CheckpointError("holds no 'model.norm.weight'", "copy it again")
        yield norm, (norm.name,)
        layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in by_name.items():
            if match := _LAYER.fullmatch(name):
                layers.setdefault(int(match[1]), {})[match[2]] = tensor
        for layer in range(self._model.layers):
            if layer not in layers:
                raise CheckpointError(f"holds nothing of layer {layer}", "copy it again")
            prefix = f"model.layers.{layer}."
            new_ends = set[str]()
            for new, ends in self._layer(prefix, layers[layer]):
                new_ends.add(new.name.removeprefix(prefix))
                yield new, tuple(prefix + end for end in ends)
            self._check_layer(prefix, new_ends)

    def _check_layer(self, prefix: str, ends: Collection[str]) -> None:
        """Refuse a layer without what vLLM asks of each. Raises CheckpointError, UsageError."""
        attention = f"{_ATTENTION}{'mla_attn.' if self._model.is_latent else ''}o_proj.weight"
        joined = "kv_b_proj" if self._model.is_latent else "qkv_proj"
        is_of_experts = any("routed_experts" in end for end in ends)
        required_ends = ["input_layernorm.weight", "post_attention_layernorm.weight", attention]
        required_ends += [f"{_ATTENTION}{joined}.weight"]
        if is_of_experts:
            required_ends += [f"{_ROUTERS[self._model.architecture][0]}weight"]
        else:
            required_ends += ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"]
        missing = [end for end in required_ends if end not in ends]
        if missing:
            raise CheckpointError(
                f"lacks what makes {prefix}{missing[0]}, without which vLLM does not start",
                "copy it again",
                "leave out --exclude and --include",
            )

    def _padded(self, tensor: Tensor, name: str) -> Tensor:
        """Return a vocabulary with the rows that vLLM pads with zeros."""
        rows = -(-tensor.shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
        self._check(rows, name)
        how = "vocabulary", rows
        return self._composer.compose(
            name, [tensor], how, lambda parts: parts[0].resized_rows(rows)
        )

    def _check(self, rows: int, name: str) -> None:
        if rows % self._ranks:
            raise UsageError(
                f"--tensor-parallel {self._ranks}: {rows} rows of {name!r} cannot be divided by it",
                "--tensor-parallel N that divides them",
            )

    def _rows(self, assembly: Assembly, rank: int, name: str) -> Assembly:
        self._check(assembly.shape[0], name)
        rows = assembly.shape[0] // self._ranks
        return assembly.rows(rank * rows, (rank + 1) * rows)

    def _by_rank(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return what ranks hold of several matrices, one rank after another."""

        def build(assemblies: list[Assembly]) -> Assembly:
            ranks = range(self._ranks)
            return concatenate([self._rows(a, rank, name) for rank in ranks for a in assemblies])

        return self._composer.compose(name, parts, "by rank", build)

    def _attention(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return queries, keys and values rank by rank; ranks share heads of keys and values."""
        heads, ranks = self._model.kv_heads, self._ranks
        rows = tuple(n * self._model.head_dim for n in (self._model.heads, heads, heads))
        if rows != tuple(part.shape[0] for part in parts):
            has = " and ".join(f"{part.name!r} {part.shape[0]} rows" for part in parts[:2])
            raise CheckpointError(
                f"{has}, and {self._model.label} makes them {rows[0]} and {rows[1]}",
                "--config FILE of this model, if that is another's",
            )
        if (heads % ranks if ranks < heads else ranks % heads) or parts[1].shape[0] % heads:
            raise UsageError(
                f"--tensor-parallel {ranks}: {heads} heads of keys and values "
                f"({self._model.label}) cannot be shared equally",
                "--tensor-parallel N that divides them, or that they divide",
            )

        def build(assemblies: list[Assembly]) -> Assembly:
            query, *shared = assemblies
            of_ranks = []
            for rank in range(ranks):
                of_ranks.append(self._rows(query, rank, name))
                for assembly in shared:
                    rows = assembly.shape[0] // min(heads, ranks)
                    first = rank * min(heads, ranks) // ranks * rows
                    of_ranks.append(assembly.rows(first, first + rows))
            return concatenate(of_ranks)

        return self._composer.compose(name, parts, ("attention", heads), build)

    def _experts(
        self, prefix: str, experts: Mapping[tuple[int, str], Tensor]
    ) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
        """Yield the two tensors of a layer's experts. Raises CheckpointError where one lacks."""
        count = 1 + max(number for number, _ in experts)
        for target, kinds in (
            ("w13_weight", ("gate_proj", "up_proj")),
            ("w2_weight", ("down_proj",)),
        ):
            keys = [(number, kind) for number in range(count) for kind in kinds]
            if missing := [key for key in keys if key not in experts]:
                number, kind = missing[0]
                text = f"holds no {kind} of expert {number} of {prefix}, and {count} experts"
                raise CheckpointError(text, "copy it again")
            parts = [experts[key] for key in keys]
            name = f"{prefix}routed_experts.{target}"
            is_cut = len(kinds) > 1 and not self._has_whole_experts
            per_expert = len(kinds)

            def build(
                assemblies: list[Assembly], is_cut: bool = is_cut, per_expert: int = per_expert
            ) -> Assembly:
                starts = range(0, len(assemblies), per_expert)
                by_expert = [assemblies[n : n + per_expert] for n in starts]
                if is_cut:
                    ranks = range(self._ranks)
                    by_expert = [
                        [self._rows(half, rank, prefix) for rank in ranks for half in halves]
                        for halves in by_expert
                    ]
                return pile([concatenate(halves) for halves in by_expert])

            new = self._composer.compose(name, parts, target, build)
            yield new, tuple(part.name for part in parts)

    def _layer(
        self, prefix: str, layer: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
        """Yield a layer's tensors, each with the ends of the names of what it is made of."""
        ends_of = {tensor.name: end for end, tensor in layer.items()}
        experts: dict[str, dict[tuple[int, str], Tensor]] = {}
        for end, tensor in layer.items():
            if match := _EXPERT.fullmatch(end):
                kind = _PARTS.get(match[3], match[3])
                experts.setdefault(match[1], {})[int(match[2]), kind] = tensor
            elif (new_end := self._renamed(end)) is not None:
                new = tensor.renamed(prefix + new_end)
                if end.endswith(_CORRECTION) or (end, self._model.architecture) == _EXACT_ROUTER:
                    new = replace(new, dtype="Float32", keeps_dtype=True)
                yield new, (end,)
        for module, of_module in experts.items():
            for new, names in self._experts(prefix + module, of_module):
                yield new, tuple(ends_of[name] for name in names)
        for target, ends, join in self._joins(layer):
            parts = [layer[end] for end in ends]
            yield join(prefix + target, parts), ends
        scales = "self_attn.mla_attn.mla_attn." if self._model.is_latent else "self_attn.attn."
        sources = next(iter(layer.values())).sources[:1]
        for scalar in _SCALARS:
            constant = Tensor(
                f"{prefix}{scales}{scalar}", "Float32", (), sources, Assembly((), (), 1.0),
                keeps_dtype=True,
            )  # fmt: skip
            yield constant, ()

    def _joins(self, layer: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        """Yield what is made of several tensors: its name, theirs, and how."""
        for kind in ("weight", "bias"):
            of_attention = tuple(f"{_ATTENTION}{x}_proj.{kind}" for x in "qkv")
            if not self._model.is_latent and all(end in layer for end in of_attention):
                yield f"{_ATTENTION}qkv_proj.{kind}", of_attention, self._attention
            halves = tuple(f"mlp.{x}_proj.{kind}" for x in ("gate", "up"))
            if all(end in layer for end in halves):
                yield f"mlp.gate_up_proj.{kind}", halves, self._by_rank
        if "mlp.gate_up_proj.weight" in layer:
            yield "mlp.gate_up_proj.weight", ("mlp.gate_up_proj.weight",), self._halves
        shared = tuple(f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up"))
        if all(end in layer for end in shared):
            yield "mlp.experts._shared_experts._layer.gate_up_proj.weight", shared, self._by_rank
        latent = tuple(f"{_ATTENTION}{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa"))
        if all(end in layer for end in latent):
            yield f"{_ATTENTION}fused_qkv_a_proj.weight", latent, self._one_after_another
        elif latent[1] in layer:
            yield latent[1], latent[1:], self._one_after_another

    def _halves(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return gate and up, which are one matrix, rank by rank."""
        (tensor,), rows = parts, parts[0].shape[0] // 2
        assemblies = (tensor.made_of.rows(n * rows, (n + 1) * rows) for n in range(2))
        halves = [replace(tensor, shape=a.shape, assembly=a) for a in assemblies]
        return self._by_rank(name, halves)

    def _one_after_another(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        return self._composer.compose(name, parts, "one after another", concatenate)

    def _renamed(self, end: str) -> str | None:
        """Return what vLLM calls a tensor of a layer that is taken as it is; None of others."""
        if self._model.is_latent and _LATENT.fullmatch(end):
            return end.replace(_ATTENTION, "self_attn.mla_attn.")
        if _UNCHANGED.fullmatch(end):
            return end
        weight, bias = _ROUTERS.get(self._model.architecture, ("", ""))
        for module in ("mlp.gate.", "block_sparse_moe.gate."):
            if end == f"{module}weight" and weight:
                return f"{weight}weight"
            if end == f"{module}e_score_correction_bias" and bias:
                return f"{bias}e_score_correction_bias"
        if end == "mlp.shared_experts.down_proj.weight" and weight:
            return "mlp.experts._shared_experts._layer.down_proj.weight"
        return None
