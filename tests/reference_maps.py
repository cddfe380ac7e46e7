"""Random models under Hugging Face's names and MindFormers', made with whole arrays in numpy.

Nothing of the package is imported, and no mapping table is read: what the two namings have in
common is written here as MindFormers' converters do it (mindformers 167a50de, `weight_converters`
and `toolkit/weight_convert`).
"""

from __future__ import annotations

import random

import numpy as np

from tests import reference
from tests.cases import _layout, _spread

WORDS = {"Float32": "<u4", "BFloat16": "<u2", "Float16": "<u2"}


class Model:
    """A random model of one kind. config: its config.json; hf, mf: {name: words} of each naming.

    dtype: of all parameters but `float32`, which are Float32. qkv, gate_up: how these are joined.
    variants: in which of its ways MindFormers has latent attention, experts and their bias.
    """

    def __init__(
        self, kind, seed, dtype="BFloat16", qkv="grouped", gate_up="interleaved", variants=0
    ):
        self.kind, self.dtype, self.qkv, self.gate_up = kind, dtype, qkv, gate_up
        self.mla = ("concat", "apart")[variants & 1]
        self.in_rows, self.bias = not variants & 2, ("router.", "")[variants >> 2 & 1]
        self._random = random.Random(f"{kind} {seed}")
        self._bits = np.random.default_rng(seed)
        self.hf, self.mf, self.float32 = {}, {}, set()
        pick = self._random.choice
        kv_heads = pick([1, 2, 4])
        heads = kv_heads * pick([1, 2, 8] if kv_heads < 4 else [1, 2])
        self.config = {
            "model_type": kind,
            "hidden_size": pick([16, 32]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": pick([4, 8]),
            "intermediate_size": pick([24, 40, 36]),
            "num_hidden_layers": pick([1, 2, 3]),
            "vocab_size": pick([40, 48]),
            "tie_word_embeddings": pick([True, False]),
        }
        getattr(self, "_" + kind)()

    # -- the parts that models have in common ---------------------------------------------------

    def new(self, *shape, float32=False):
        dtype = "Float32" if float32 else self.dtype
        return self._bits.integers(0, 1 << 16, shape).astype(WORDS[dtype])

    def same(self, hf, mf, *shape, float32=False):
        self.hf[hf] = self.mf[mf] = self.new(*shape, float32=float32)
        if float32:
            self.float32 |= {hf, mf}

    def both(self, names, mf, joined, *shapes):
        parts = [self.new(*shape) for shape in shapes]
        self.hf.update(zip(names, parts))
        self.mf[mf] = joined(*parts)

    def join_qkv(self, q, k, v):
        if self.qkv == "contiguous":
            return np.concatenate([q, k, v])
        groups = self.config["num_key_value_heads"]
        parts = [one.reshape(groups, -1, *q.shape[1:]) for one in (q, k, v)]
        return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])

    def join_gate_up(self, gate, up):
        if self.gate_up == "contiguous":
            return np.concatenate([gate, up])
        return np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])

    def around(self, head="output_layer.weight", embedding="embedding.word_embeddings.weight",
               norm="decoder.final_layernorm.weight"):  # fmt: skip
        c = self.config
        self.same("model.embed_tokens.weight", embedding, c["vocab_size"], c["hidden_size"])
        if not c["tie_word_embeddings"]:
            self.same("lm_head.weight", head, c["vocab_size"], c["hidden_size"])
        self.same("model.norm.weight", norm, c["hidden_size"])

    def norms(self, hf, mf):
        h = self.config["hidden_size"]
        self.same(f"{hf}.input_layernorm.weight", f"{mf}.input_layernorm.weight", h)
        self.same(f"{hf}.post_attention_layernorm.weight", f"{mf}.pre_mlp_layernorm.weight", h)

    def head_dim(self):
        c = self.config
        return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]

    def attention(self, hf, mf, bias=False, norm=False, fused="self_attention.linear_qkv",
                  out="self_attention.linear_proj"):  # fmt: skip
        c, d = self.config, self.head_dim()
        h, q, k = c["hidden_size"], c["num_attention_heads"] * d, c["num_key_value_heads"] * d
        for kind, inner in (("weight", (h,)), ("bias", ())) if bias else (("weight", (h,)),):
            names = [f"{hf}.self_attn.{p}_proj.{kind}" for p in "qkv"]
            shapes = [(rows, *inner) for rows in (q, k, k)]
            if isinstance(fused, str):
                self.both(names, f"{mf}.{fused}.{kind}", self.join_qkv, *shapes)
            else:
                for name, one, shape in zip(names, fused, shapes):
                    self.same(name, f"{mf}.{one}.{kind}", *shape)
        self.same(f"{hf}.self_attn.o_proj.weight", f"{mf}.{out}.weight", h, q)
        for one in "qk" if norm else "":
            own = f"{mf}.self_attention.{one}_layernorm.weight"
            self.same(f"{hf}.self_attn.{one}_norm.weight", own, d)

    def dense(self, hf, mf, f=None, hf_inner="mlp", mf_inner="mlp"):
        h, f = self.config["hidden_size"], f or self.config["intermediate_size"]
        names = [f"{hf}.{hf_inner}.{one}_proj.weight" for one in ("gate", "up")]
        joined = f"{mf}.{mf_inner}.linear_fc1.weight"
        self.both(names, joined, self.join_gate_up, (f, h), (f, h))
        self.same(f"{hf}.{hf_inner}.down_proj.weight", f"{mf}.{mf_inner}.linear_fc2.weight", h, f)

    def experts(self, hf, mf, count):
        h, f = self.config["hidden_size"], self.config["moe_intermediate_size"]
        first, second = [], []
        for e in range(count):
            gate, up, down = self.new(f, h), self.new(f, h), self.new(h, f)
            own = f"{hf}.mlp.experts.{e}"
            self.hf[f"{own}.gate_proj.weight"] = gate
            self.hf[f"{own}.up_proj.weight"] = up
            self.hf[f"{own}.down_proj.weight"] = down
            first.append(np.hstack([gate.T, up.T]))
            second.append(down.T)
        joined = np.vstack if self.in_rows else np.stack
        self.mf[f"{mf}.mlp.experts.weight1"] = joined(first)
        self.mf[f"{mf}.mlp.experts.weight2"] = joined(second)
        self.same(f"{hf}.mlp.gate.weight", f"{mf}.mlp.router.weight", count, h)

    def shared(self, hf, mf, count):
        own = f"{hf}.mlp.gate.e_score_correction_bias"
        self.same(own, f"{mf}.mlp.{self.bias}expert_bias", count, float32=True)
        c = self.config
        if c["n_shared_experts"]:
            f = c["n_shared_experts"] * c["moe_intermediate_size"]
            self.dense(hf, mf, f, "mlp.shared_experts", "mlp.shared_experts")

    # -- the models -----------------------------------------------------------------------------

    def decoder(self, bias=False, norm=False):
        self.around()
        for layer in range(self.config["num_hidden_layers"]):
            hf, mf = f"model.layers.{layer}", f"decoder.layers.{layer}"
            self.norms(hf, mf)
            self.attention(hf, mf, bias, norm)
            yield layer, hf, mf

    def _llama(self):
        if self._random.random() < 0.5:  # head_dim follows from the heads
            del self.config["head_dim"]
        for _, hf, mf in self.decoder():
            self.dense(hf, mf)

    def _qwen2(self):
        for _, hf, mf in self.decoder(bias=True):
            self.dense(hf, mf)

    def _qwen3(self):
        for _, hf, mf in self.decoder(norm=True):
            self.dense(hf, mf)

    def _glm4(self):
        h, f = self.config["hidden_size"], self.config["intermediate_size"]
        for _, hf, mf in self.decoder(bias=True):
            for one in ("post_self_attn_layernorm", "post_mlp_layernorm"):
                self.same(f"{hf}.{one}.weight", f"{mf}.{one}.weight", h)
            self.same(f"{hf}.mlp.gate_up_proj.weight", f"{mf}.mlp.linear_fc1.weight", 2 * f, h)
            self.same(f"{hf}.mlp.down_proj.weight", f"{mf}.mlp.linear_fc2.weight", h, f)

    def _moe_sizes(self, experts):
        self.config[experts] = self._random.choice([3, 4, 5])
        self.config["moe_intermediate_size"] = self._random.choice([12, 20])
        return self.config[experts]

    def _qwen3_moe(self):
        count = self._moe_sizes("num_experts")
        for _, hf, mf in self.decoder(norm=True):
            self.experts(hf, mf, count)

    def _mixed(self, layer, hf, mf, count):
        if layer < self.config["first_k_dense_replace"]:
            self.dense(hf, mf)
        else:
            self.experts(hf, mf, count)
            self.shared(hf, mf, count)

    def _glm4_moe(self):
        count = self._moe_sizes("n_routed_experts")
        pick = self._random.choice
        self.config.update(
            first_k_dense_replace=pick([0, 1]), n_shared_experts=pick([0, 1, 2]),
            use_qk_norm=pick([True, False]),
        )  # fmt: skip
        for layer, hf, mf in self.decoder(bias=True, norm=self.config["use_qk_norm"]):
            self._mixed(layer, hf, mf, count)

    def _latent(self, hf, mf):
        c = self.config
        h, heads, own = c["hidden_size"], c["num_attention_heads"], f"{mf}.self_attention"
        nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        down = {"q_a_proj": c["q_lora_rank"], "kv_a_proj_with_mqa": c["kv_lora_rank"] + rope}
        if self.mla == "concat":
            names = [f"{hf}.self_attn.{one}.weight" for one in down]
            shapes = [(rows, h) for rows in down.values()]
            self.both(names, f"{own}.linear_qkv.weight", lambda *parts: np.vstack(parts), *shapes)
            called = {"q_b": "linear_qb", "kv_b": "linear_kvb", "kv": "k_layernorm"}
        else:
            called = {"q_b": "linear_q_up_proj", "kv_b": "linear_kv_up_proj", "kv": "kv_layernorm"}
            for one, name in zip(down, ("linear_q_down_proj", "linear_kv_down_proj")):
                self.same(f"{hf}.self_attn.{one}.weight", f"{own}.{name}.weight", down[one], h)
        for a, b, *shape in (
            ("q_a_layernorm", "q_layernorm", c["q_lora_rank"]),
            ("q_b_proj", called["q_b"], heads * (nope + rope), c["q_lora_rank"]),
            ("kv_a_layernorm", called["kv"], c["kv_lora_rank"]),
            ("kv_b_proj", called["kv_b"], heads * (nope + v), c["kv_lora_rank"]),
            ("o_proj", "linear_proj", h, heads * v),
        ):
            self.same(f"{hf}.self_attn.{a}.weight", f"{own}.{b}.weight", *shape)

    def _deepseek_v3(self):
        count = self._moe_sizes("n_routed_experts")
        pick = self._random.choice
        self.config.update(
            first_k_dense_replace=pick([0, 1]), n_shared_experts=1, q_lora_rank=12, kv_lora_rank=8,
            qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
            num_nextn_predict_layers=pick([0, 1, 2]),
        )  # fmt: skip
        c = self.config
        self.around()
        for layer in range(c["num_hidden_layers"]):
            hf, mf = f"model.layers.{layer}", f"decoder.layers.{layer}"
            self.norms(hf, mf)
            self._latent(hf, mf)
            self._mixed(layer, hf, mf, count)
        h = c["hidden_size"]
        for one in range(c["num_nextn_predict_layers"]):
            hf, outer = f"model.layers.{c['num_hidden_layers'] + one}", f"mtp.layers.{one}"
            mf = f"{outer}.transformer_layer"
            self.norms(hf, mf)
            self._latent(hf, mf)
            self.experts(hf, mf, count)
            self.shared(hf, mf, count)
            self.same(f"{hf}.enorm.weight", f"{outer}.enorm.weight", h)
            self.same(f"{hf}.hnorm.weight", f"{outer}.hnorm.weight", h)
            self.same(f"{hf}.eh_proj.weight", f"{outer}.eh_proj.weight", h, 2 * h)
            self.same(f"{hf}.shared_head.norm.weight", f"{outer}.final_layernorm.weight", h)
            head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
            self.hf[f"{hf}.embed_tokens.weight"] = self.hf["model.embed_tokens.weight"]
            self.hf[f"{hf}.shared_head.head.weight"] = self.hf[head]
        if c["num_nextn_predict_layers"] and not c["tie_word_embeddings"]:
            self.mf["mtp.output_layer.weight"] = self.mf["output_layer.weight"]

    def _deepseek_v4(self):
        count, pick = self._moe_sizes("n_routed_experts"), self._random.choice
        layers, mtp = self.config["num_hidden_layers"], pick([0, 1])
        self.config.update(
            n_shared_experts=1, q_lora_rank=12, o_lora_rank=6, o_groups=pick([1, 2]), hc_mult=2,
            index_n_heads=2, index_head_dim=4, num_hash_layers=pick([0, 1]), num_experts_per_tok=2,
            num_nextn_predict_layers=mtp, tie_word_embeddings=False,
            num_attention_heads=pick([2, 4]),
            compress_ratios=[pick([0, 4, 128]) for _ in range(layers)] + [0] * mtp,
        )  # fmt: skip
        c, h = self.config, self.config["hidden_size"]
        self.same("embed.weight", "embedding.word_embeddings.weight", c["vocab_size"], h)
        self.same("head.weight", "output_layer.weight", c["vocab_size"], h)
        self.same("norm.weight", "decoder.final_layernorm.weight", h)
        self._hyper_head("", "decoder.")
        for layer in range(layers):
            hf, mf = f"layers.{layer}", f"decoder.layers.{layer}"
            self._sparse(hf, mf, count, c["compress_ratios"][layer])
            if layer < c["num_hash_layers"]:
                table = c["vocab_size"], 2
                self.same(f"{hf}.ffn.gate.tid2eid", f"{mf}.mlp.router.tid2eid", *table)
            else:
                self.same(f"{hf}.ffn.gate.bias", f"{mf}.mlp.expert_bias", count, float32=True)
        for hf, outer in [("mtp.0", "mtp.layers.0")] * mtp:
            mf = f"{outer}.transformer_layer"
            self._sparse(hf, mf, count, 0)
            self.same(f"{hf}.ffn.gate.bias", f"{mf}.mlp.expert_bias", count, float32=True)
            for a, b in (("enorm", "enorm"), ("hnorm", "hnorm"), ("norm", "final_layernorm")):
                self.same(f"{hf}.{a}.weight", f"{outer}.{b}.weight", h)
            names = [f"{hf}.{one}_proj.weight" for one in "eh"]
            self.both(names, f"{outer}.eh_proj.weight", lambda *x: np.hstack(x), (h, h), (h, h))
            self._hyper_head(f"{hf}.", f"{outer}.")

    def _hyper_head(self, hf, mf):
        n, h = self.config["hc_mult"], self.config["hidden_size"]
        for a, b, *shape in (("base", "hc_base", n), ("fn", "hc_fn.weight", n, n * h),
                             ("scale", "hc_scale", 1)):  # fmt: skip
            self.same(f"{hf}hc_head_{a}", f"{mf}hc_head.{b}", *shape, float32=True)

    def _sparse(self, hf, mf, count, ratio):
        """Add a layer of DeepSeek-V4, of which only the choice of experts is left."""
        c, n = self.config, self.config["hc_mult"]
        h, d, q = c["hidden_size"], c["head_dim"], c["q_lora_rank"]
        heads, o, core = (
            c["num_attention_heads"],
            c["o_groups"] * c["o_lora_rank"],
            "core_attention",
        )
        self.same(f"{hf}.attn_norm.weight", f"{mf}.input_layernorm.weight", h)
        self.same(f"{hf}.ffn_norm.weight", f"{mf}.pre_mlp_layernorm.weight", h)
        for a, b, *shape in (
            ("wq_a.weight", "linear_q_down_proj.weight", q, h),
            ("q_norm.weight", "q_layernorm.weight", q),
            ("wq_b.weight", "linear_q_up_proj.weight", heads * d, q),
            ("wkv.weight", "linear_kv_proj.weight", d, h),
            ("kv_norm.weight", "kv_layernorm.weight", d),
            ("wo_a.weight", "linear_o_group_proj", o, heads * d // c["o_groups"]),
            ("wo_b.weight", "linear_proj.weight", h, o),
        ):
            self.same(f"{hf}.attn.{a}", f"{mf}.self_attention.{b}", *shape)
        own = f"{mf}.self_attention.{core}"
        self.same(f"{hf}.attn.attn_sink", f"{own}.attn_sink", heads, float32=True)
        if ratio:
            self._compressor(f"{hf}.attn.", f"{own}.", ratio, d)
        if ratio == 4:
            size, index = c["index_head_dim"], c["index_n_heads"]
            a, b = f"{hf}.attn.indexer.", f"{own}.indexer."
            self.same(f"{a}wq_b.weight", f"{b}linear_wq_b.weight", index * size, q)
            self.same(f"{a}weights_proj.weight", f"{b}linear_weights_proj.weight", index, h)
            self._compressor(a, b, 4, size)
        self._routed(hf, mf, count)
        for one in ("attn", "ffn"):
            self.same(f"{hf}.hc_{one}_base", f"{mf}.{one}_hc.bias", (2 + n) * n, float32=True)
            name = f"{mf}.{one}_hc.mapping_proj.weight"
            self.same(f"{hf}.hc_{one}_fn", name, (2 + n) * n, n * h, float32=True)
            scale = self.hf[f"{hf}.hc_{one}_scale"] = self.new(3, float32=True)
            names = [f"{mf}.{one}_hc.alpha_{kind}" for kind in ("pre", "post", "res")]
            self.mf.update(zip(names, np.split(scale, 3)))
            self.float32 |= {f"{hf}.hc_{one}_scale", *names}

    def _compressor(self, hf, mf, ratio, size):
        h, width = self.config["hidden_size"], size * (2 if ratio == 4 else 1)
        self.same(f"{hf}compressor.ape", f"{mf}compressor.ape", ratio, width, float32=True)
        for one in ("wkv", "wgate"):
            name = f"{mf}compressor.linear_{one}.weight"
            self.same(f"{hf}compressor.{one}.weight", name, width, h)
        self.same(f"{hf}compressor.norm.weight", f"{mf}compressor.norm.weight", size)

    def _routed(self, hf, mf, count):
        h, f = self.config["hidden_size"], self.config["moe_intermediate_size"]
        parts = []
        for e in range(count):
            one = {"w1": self.new(f, h), "w2": self.new(h, f), "w3": self.new(f, h)}
            self.hf.update({f"{hf}.ffn.experts.{e}.{n}.weight": w for n, w in one.items()})
            parts.append(one)
        first = [np.hstack([one["w1"].T, one["w3"].T]) for one in parts]
        self.mf[f"{mf}.mlp.experts.weight1"] = np.stack(first)
        self.mf[f"{mf}.mlp.experts.weight2"] = np.stack([one["w2"].T for one in parts])
        self.same(f"{hf}.ffn.gate.weight", f"{mf}.mlp.router.weight", count, h)
        own, shared = f"{hf}.ffn.shared_experts", f"{mf}.mlp.shared_experts"
        names = [f"{own}.{one}.weight" for one in ("w1", "w3")]
        self.both(names, f"{shared}.linear_fc1.weight", self.join_gate_up, (f, h), (f, h))
        self.same(f"{own}.w2.weight", f"{shared}.linear_fc2.weight", h, f)

    def _legacy(self, **fused):
        self.around("lm_head.weight", "model.tok_embeddings.embedding_weight",
                    "model.norm_out.weight")  # fmt: skip
        h, f = self.config["hidden_size"], self.config["intermediate_size"]
        bias = self._random.random() < 0.5
        for layer in range(self.config["num_hidden_layers"]):
            one = f"model.layers.{layer}"
            self.same(f"{one}.input_layernorm.weight", f"{one}.attention_norm.weight", h)
            self.same(f"{one}.post_attention_layernorm.weight", f"{one}.ffn_norm.weight", h)
            self.attention(one, one, bias, out="attention.wo", **fused)
            self.same(f"{one}.mlp.down_proj.weight", f"{one}.feed_forward.w2.weight", h, f)
            yield one, h, f

    def _llama_legacy(self):
        for one, h, f in self._legacy(fused=[f"attention.w{p}" for p in "qkv"]):
            self.same(f"{one}.mlp.gate_proj.weight", f"{one}.feed_forward.w1.weight", f, h)
            self.same(f"{one}.mlp.up_proj.weight", f"{one}.feed_forward.w3.weight", f, h)

    def _llama_legacy_fused(self):
        for one, h, f in self._legacy(fused="attention.w_qkv"):
            names = [f"{one}.mlp.{p}_proj.weight" for p in ("gate", "up")]
            joined = f"{one}.feed_forward.w_gate_hidden.weight"
            self.both(names, joined, self.join_gate_up, (f, h), (f, h))

    # -- as a checkpoint --------------------------------------------------------------------------

    def params(self, side):
        """Return {name: (shape, dtype)} of one naming."""
        return {
            name: (words.shape, "Float32" if name in self.float32 else self.dtype)
            for name, words in getattr(self, side).items()
        }

    def tensors(self, side):
        """Return {name: (dtype, words)} of one naming."""
        return {n: (d, getattr(self, side)[n]) for n, (_, d) in self.params(side).items()}


KINDS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4", "glm4_moe", "llama_legacy",
    "llama_legacy_fused", "deepseek_v4",
)  # fmt: skip


def random_strategy(params, ranks, stages, seed):
    """Return random layouts, by stage, that shard each parameter evenly."""
    rng = random.Random(seed)
    names = list(params)
    rng.shuffle(names)
    return [
        {name: _even(params[name][0], ranks, rng) for name in sorted(some)}
        for some in _spread(names, stages, rng)
    ]


def _even(shape, ranks, rng):
    counting = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for _ in range(20):
        layout = _layout(len(shape), ranks, rng, False, True)
        slices = {}
        for rank in range(ranks):
            try:
                one = reference.shard(counting, layout, rank)
            except (ValueError, AssertionError, IndexError):
                break
            slices[one.tobytes()] = one.shape
        else:
            if len(set(slices.values())) == 1 and len(slices) * one.size == counting.size:
                return layout
    return [ranks], [-1] * len(shape), 0, 0
