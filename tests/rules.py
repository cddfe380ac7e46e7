"""For every rule what breaks it: one damage of a good place, and the rule that must speak.

A row names the rule, how it speaks, and a function that damages and calls. `tests/test_statements.py` sees
that the rule speaks so, that no other rule does at that severity, that every rule has a row, and that no
row names another rule. Rules over what was WRITTEN have a row for every form that is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rankxform
from rankxform import statements
from rankxform.statements import ERROR, NOTICE, WARNING, Finding
from tests import reference, reference_dcp, reference_forms
from tests.checkpoints import DATA
from tests.place import punch
from tests.reference_maps import Model

PARAMS = {
    "layers.0.w": ((16, 8), "Float32"),
    "layers.1.w": ((16, 8), "Float32"),
    "norm": ((8,), "Float32"),
}
SHARDED = ("layers.0.w", "layers.1.w")
ROWS = [{n: ([4], [0, -1] if n in SHARDED else [-1], 0, 0) for n in PARAMS}]
COLUMNS = [{n: ([4], [-1, 0] if n in SHARDED else [-1], 0, 0) for n in PARAMS}]
REPLICATED = [{n: ([4], [-1] * len(s), 0, 0) for n, (s, _) in PARAMS.items()}]
PAIRS = [{n: ([2, 2], [1, -1] if n in SHARDED else [-1], 0, 0) for n in PARAMS}]


def values(name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Return finite numbers that differ everywhere, and between tensors."""
    seed = sum(map(ord, name))
    return np.random.default_rng(seed).uniform(1, 2, shape).astype("<f4").view("<u4")


class Place:
    """A folder with strategies; `src` is written as it is asked for."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.src, self.dst = tmp, tmp / "src", tmp / "dst"

    def strategy(self, name: str, stages: Any, **options: Any) -> str:
        return reference.write_strategy(self.tmp / name, stages, **options)

    def ranks(self, stages: Any = ROWS, params: Any = PARAMS, **options: Any) -> str:
        """Write rank folders as SRC, and return their strategy."""
        options = {"make": values, "kind": "safetensors", **options}
        reference.write_checkpoint(self.src, stages, params, **options)
        return self.strategy("a.ckpt", stages)

    def shard(self, rank: int, kind: str = "safetensors") -> Path:
        return self.src / f"rank_{rank}" / f"checkpoint_{rank}.{kind}"

    def rewrite(self, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
        """Write a rank's file anew with other entries: {name: (type, words)}."""
        path = self.shard(rank)
        entries = {
            n: (d, np.frombuffer(data, reference.WORD[reference.ITEM[d]]).reshape(s))
            for n, (d, s, data) in reference.read_safetensors(path).items()
        }
        change(entries)
        path.unlink()
        reference.write_safetensors(path, entries)

    def whole(self, tensors: dict[str, tuple[int, ...]], files: int = 1) -> None:
        """Write a Hugging Face folder as SRC."""
        written = {n: ("Float32", values(n, s, "Float32")) for n, s in tensors.items()}
        reference_forms.write_huggingface(self.src, written, files)

    def convert(self, a: Any = None, b: Any = None, **options: Any) -> Any:
        return rankxform.transform(self.src, self.dst, a, b, fsync=False, progress=False, **options)

    def check(self, strategy: Any = None, **options: Any) -> None:
        rankxform.check(self.src, strategy, progress=False, **options)


class Row(NamedTuple):
    rule: str
    severity: str
    damage: Callable[[Place], None]


ALL: list[Row] = []


def row(rule: str, severity: str = ERROR) -> Callable[[Callable[[Place], None]], Any]:
    """Register what breaks a rule."""

    def register(damage: Callable[[Place], None]) -> Any:
        ALL.append(Row(rule, severity, damage))
        return damage

    return register


def listen(monkeypatch: Any, heard: list[tuple[str, str]]) -> None:
    """Note which rules speak, and how."""
    real = statements.rules_of

    def rules_of(need: str, *modules: Any) -> list[Any]:
        def listening(rule: Any) -> Any:
            def check(subject: Any) -> Any:
                for noticed in rule.check(subject):
                    if isinstance(noticed, Finding):
                        heard.append((rule.name, noticed.severity))
                    yield noticed

            return rule._replace(check=check)

        return [*map(listening, real(need, *modules))]

    monkeypatch.setattr(statements, "rules_of", rules_of)


# -- names ------------------------------------------------------------------------------------------


def written_by_us(place: Place, stages: Any = ROWS) -> Path:
    """Convert, and let what was written be SRC."""
    a = place.ranks()
    place.convert(a, place.strategy("b.ckpt", stages))
    shutil.rmtree(place.src)
    place.dst.rename(place.src)
    return place.src / "rankxform.json"


@row("a_manifest_can_be_read", NOTICE)
def _(place):
    written_by_us(place).write_text("{}")
    place.convert(place.tmp / "a.ckpt")


@row("manifest_strategy_agrees")
def _(place):
    written_by_us(place)
    place.convert(place.strategy("c.ckpt", COLUMNS))


@row("manifest_files_are_there")
def _(place):
    written_by_us(place)
    place.shard(1).unlink()
    place.convert()


@row("no_conversion_was_stopped")
def _(place):
    a = place.ranks()
    (place.src / ".rankxform").mkdir()
    (place.src / ".rankxform/job.json").write_text("{}")
    place.convert(a)


@row("saved_strategy_agrees")
def _(place):
    place.src = place.tmp / "output" / "checkpoint"
    (place.tmp / "output" / "strategy").mkdir(parents=True)
    a = place.ranks()
    reference.write_strategy(place.tmp / "output/strategy/s_rank_0.ckpt", COLUMNS)
    place.convert(a)


@row("files_can_be_selected")
def _(place):
    place.src.mkdir()
    place.convert(place.strategy("a.ckpt", ROWS))


@row("given_strategy_agrees")
def _(place):
    reference_forms.write_checkpoint2(place.src, ROWS, PARAMS, {}, make=values)
    place.convert(place.strategy("c.ckpt", COLUMNS))


@row("a_strategy_is_given")
def _(place):
    place.ranks()
    place.convert()


@row("all_ranks_are_named")
def _(place):
    a = place.ranks()
    place.src = place.shard(2)
    place.convert(a)


@row("needed_files_are_there")
def _(place):
    names = ("x", "y")
    stages = [{n: ([2], [0, -1], 0, 0)} for n in names]
    a = place.ranks(stages, dict.fromkeys(names, ((4, 4), "Float32")))
    for rank in (0, 1):
        shutil.rmtree(place.src / f"rank_{rank}")
    place.convert(a, a, ranks=(0,))


@row("the_newest_step_is_complete", WARNING)
def _(place):
    for step in (1, 2):
        a = place.ranks(name=f"net-1_{step}")
    next((place.src / "rank_3").glob("*1_2*")).unlink()
    place.convert(a)


@row("no_ranks_are_beyond", WARNING)
def _(place):
    place.ranks(REPLICATED)
    two = [{n: ([2], layout, 0, 0) for n, (_, layout, *_) in REPLICATED[0].items()}]
    place.convert(place.strategy("c.ckpt", two))


@row("every_rank_has_a_file", NOTICE)
def _(place):
    a = place.ranks(REPLICATED)
    place.shard(1).unlink()
    place.convert(a)


# -- headers ----------------------------------------------------------------------------------------


@row("a_whole_tensor_is_in_one_file")
def _(place):
    for name in ("one", "two"):
        entries = {"w": ("Float32", values(name, (4, 4), "Float32"))}
        reference.write_safetensors(place.src / f"{name}.safetensors", entries)
    place.convert()


@row("loose_values_are_counters")
def _(place):
    shutil.copytree(DATA / "unified" / "out_noopt", place.src)
    loose = {"embedding.position.weight": ("Float32", np.zeros((4, 8), "<u4"))}
    reference.write_safetensors(place.src / "hyper_param.safetensors", loose)
    place.convert()


def changed_index(place, change):
    place.whole({"a": (4, 4), "b": (4, 4), "c": (4, 4), "d": (4, 4)}, 2)
    path = place.src / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    place.convert()


@row("an_index_names_the_file")
def _(place):
    def exchange(files):
        other = next(name for name in files if files[name] != files["a"])
        files["a"] = files[other]

    changed_index(place, exchange)


@row("what_is_listed_is_there")
def _(place):
    changed_index(place, lambda files: files.update(ghost=files["b"]))


@row("what_is_there_is_listed")
def _(place):
    place.whole({"a": (4, 4), "b": (4, 4)}, 2)
    path = min(place.src.glob("model-*.safetensors"))
    entries = {n: ("Float32", values(n, (4, 4), "Float32")) for n in ("a", "c")}
    path.unlink()
    reference.write_safetensors(path, entries)
    place.convert()


def checkpoint2(place, change, stages=ROWS):
    """Write a Checkpoint 2.0 of which a file's entries are changed."""
    reference_forms.write_checkpoint2(place.src, stages, PARAMS, {}, make=values)
    path = next(place.src.glob("iteration_*/llm-model-0000001-*"))
    entries = {
        n: (d, np.frombuffer(data, "<u4").reshape(s))
        for n, (d, s, data) in reference.read_safetensors(path).items()
    }
    change(entries)
    path.unlink()
    reference.write_safetensors(path, entries)
    place.convert()


@row("slices_are_as_declared")
def _(place):
    checkpoint2(place, lambda entries: entries.update(norm=("Int32", entries["norm"][1])))


@row("slices_are_listed")
def _(place):
    def copy(entries):
        entries["layers.1.w"] = entries["layers.0.w"]

    stages = [{n: ROWS[0][n] for n in names} for names in (PARAMS, ("layers.0.w", "norm"))]
    checkpoint2(place, copy, stages[::-1])


@row("a_rank_has_a_tensor_once")
def _(place):
    for part in range(2):
        entries = {"w": ("Float32", values(f"{part}", (4, 4), "Float32"))}
        for rank in range(2):
            path = place.src / f"model-rank-{rank}-part-{part}.safetensors"
            reference.write_safetensors(path, entries)
    a = place.strategy("a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    place.convert(a, src_pattern="model-rank-{rank}-part-*")


@row("tensors_can_be_read")
def _(place):
    tensors = {"output_layer.weight": ("Float32", values("w", (4, 4), "Float32"))}
    tensors["optimizer.distributed.dp_group_idx_0.gbuf"] = tensors["output_layer.weight"]
    reference_dcp.write_dcp(place.src, tensors)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (place.src / "metadata.json").write_text(json.dumps(backend))
    place.convert(dst_form="huggingface")


@row("tensors_can_be_read")
def _(place):
    """Parts of a parameter of which no table says how they lie in it."""
    names = [f"layers.0.mixer.in_proj.weight.{part}" for part in ("z", "x", "new")]
    tensors = {n: ("Float32", values(n, (4, 4), "")) for n in (*names, "output_layer.weight")}
    reference_dcp.write_dcp(place.src, tensors)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (place.src / "metadata.json").write_text(json.dumps(backend))
    place.convert(dst_form="huggingface")


@row("extra_names_are_known")
def _(place):
    a = place.ranks()
    entries = {"new": ("Float32", values("new", (4, 8), "Float32"))}
    reference.write_safetensors(place.src / "rank_4/checkpoint_4.safetensors", entries)
    place.convert(a)


@row("no_name_is_damaged")
def _(place):
    """A byte of a replicated tensor's name: it became a tensor of every destination rank."""
    a = place.ranks()
    place.rewrite(2, lambda entries: entries.update(nrrm=entries.pop("norm")))
    place.convert(a)


@row("statements_agree", WARNING)
def _(place):
    place.whole({"a": (4, 4), "b": (4, 4)}, 2)
    path = place.src / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] = 1000
    path.write_text(json.dumps(index))
    place.convert()


@row("unequal_slices_are_said", NOTICE)
def _(place):
    """Of torch.chunk's rows, under a strategy without their numbers; the last rank has none."""
    for rank, rows in enumerate((2, 2, 1, 0)):
        entries = {"w": ("Float32", values(f"{rank}", (rows, 4), ""))}
        reference.write_safetensors(place.src / f"rank_{rank}/c_{rank}.safetensors", entries)
    place.convert(place.strategy("a.ckpt", [{"w": ([4], [0, -1], 0, 0)}]))


# -- samples ----------------------------------------------------------------------------------------


@row("files_carry_checksums", NOTICE)
def _(place):
    a = place.ranks()
    place.convert(a, place.strategy("b.ckpt", ROWS), crc=True)
    place.src, place.dst = place.dst, place.tmp / "again"
    place.convert(a)


@row("files_carry_checksums")
def _(place):
    place.convert(place.ranks(), check_crc=True)


@row("content_was_written", WARNING)
def _(place):
    params = {f"layers.{n}.w": ((1024, 1024), "Float32") for n in range(4)}
    a = place.ranks([dict.fromkeys(params, ([2], [0, -1], 0, 0))], params)
    punch(place.shard(1), 1 << 18, 3 << 19)
    place.convert(a)


@row("content_is_usual", WARNING)
def _(place):
    def change(entries):
        words = entries["layers.0.w"][1].copy()
        words[:] = 0x7FC00000
        entries["layers.0.w"] = "Float32", words

    a = place.ranks()
    place.rewrite(0, change)
    place.convert(a)


@row("matrices_were_filled", WARNING)
def _(place):
    """A tensor of one rank, beside others of its kind."""
    a = place.ranks()
    place.rewrite(2, lambda entries: entries.update({
        "layers.1.w": ("Float32", np.full_like(entries["layers.1.w"][1], 1 << 31))}))  # fmt: skip
    place.convert(a)


@row("matrices_were_filled", WARNING)
def _(place):
    """All of one rank's matrices."""
    a = place.ranks()
    place.rewrite(2, lambda entries: entries.update(
        {n: (d, w * (n not in SHARDED)) for n, (d, w) in entries.items()}))  # fmt: skip
    place.convert(a)


@row("matrices_were_filled", WARNING)
def _(place):
    """Experts of a layer, both matrices of each, in one file."""
    names = [f"layers.{n}.experts.{e}.{w}.weight" for n in (0, 1) for e in (0, 1)
             for w in ("up_proj", "down_proj")]  # fmt: skip
    entries = {n: ("Float32", values(n, (8, 8), "") * (".1.e" not in n))
               for n in names}  # fmt: skip
    reference_forms.write_huggingface(place.src, entries)
    place.convert()


@row("slices_end_in_numbers", WARNING)
def _(place):
    """Rows that were padded, of tensors of two lengths."""
    for rank in range(2):
        entries = {n: ("Float32", values(f"{n}{rank}", shape, ""))
                   for n, shape in (("q.weight", (8, 4)), ("k.weight", (4, 4)), ("k.bias", (4,)))}  # fmt: skip
        for _, words in entries.values():
            words[2:] *= 1 - rank
        reference.write_safetensors(place.src / f"rank_{rank}/c_{rank}.safetensors", entries)
    place.convert(r"shard:^[qk]\.=0@2")


def with_copies(place, change=lambda entries: None, listed=("a", "b", "c", "d")):
    """Convert a folder with an index, of whose first file the second has copies, some changed."""
    tensors = {n: ("Float32", values(n, (8, 8), "")) for n in "abcd"}
    copies = dict(tensors)
    change(copies)
    parts = {"x.safetensors": {n: tensors[n] for n in "abc"}, "y.safetensors": copies}
    for file, entries in parts.items():
        reference.write_safetensors(place.src / file, entries)
    files = {n: "./y.safetensors" if n == "d" else "z/..//x.safetensors" for n in listed}
    index = {"metadata": {}, "weight_map": files}
    (place.src / "model.safetensors.index.json").write_text(json.dumps(index))
    place.convert()


@row("an_index_decides", WARNING)
def _(place):
    with_copies(place, lambda copies: copies.update(b=("Float32", values("B", (8, 8), ""))))


@row("an_index_decides", NOTICE)
def _(place):
    with_copies(place)


@row("an_index_decides", WARNING)
def _(place):
    """A file that the index does not name at all."""
    place.whole({"a": (8, 8), "b": (8, 8), "c": (8, 8)}, 2)
    entries = {n: ("Float32", values(n * 2, (8, 8), "")) for n in "abc"}
    reference.write_safetensors(place.src / "model.safetensors", entries)
    place.convert()


@row("files_are_of_one_step")
def _(place):
    def step(rank):
        return {"global_step": ("Int32", np.array([100 - (rank == 2)], "<i4").view("<u4"))}

    place.convert(place.ranks(extras=step))


@row("an_adapter_is_trained", WARNING)
def _(place):
    place.whole({"q.weight": (8, 8)})
    lora = place.tmp / "lora"
    factors = {
        "q.lora_A.weight": values("a", (2, 8), ""),
        "q.lora_B.weight": np.zeros((8, 2), "<u4"),
    }
    entries = {f"base_model.model.{n}": ("Float32", words) for n, words in factors.items()}
    reference.write_safetensors(lora / "adapter_model.safetensors", entries)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    place.convert(lora=lora)


@row("pattern_slices_differ")
def _(place):
    names = ("layers.0.k_proj.weight", "layers.0.up_proj.weight")
    repeated, sharded = ({n: ([4], [axis, -1], 0, 0)} for n, axis in zip(names, (-1, 0)))
    place.ranks([repeated | sharded], dict.fromkeys(names, ((16, 8), "Float32")))
    place.convert(r"shard:^layers\.=0@4")


@row("replicas_are_equal")
def _(place):
    a = place.ranks(REPLICATED)
    for rank in range(4):
        place.rewrite(rank, lambda entries, rank=rank: entries.update(
            {n: (d, w + rank) for n, (d, w) in entries.items()}))  # fmt: skip
    place.convert(a)


@row("slices_differ")
def _(place):
    place.ranks(REPLICATED)
    narrow = {n: ((64, 8) if n in SHARDED else s, d) for n, (s, d) in PARAMS.items()}
    assert narrow  # every rank's file has what four slices should be
    place.convert(place.strategy("c.ckpt", ROWS))


@row("unlisted_values_agree")
def _(place):
    place.ranks([{"w": ([2], [0, -1], 0, 0)}], {"w": ((64, 64), "Float32")})
    place.convert("none")


@row("unlisted_tensors_are_no_slices", WARNING)
def _(place):
    """A bias of a sharded weight."""
    params = {f"l.{n}.{kind}": (shape, "Float32") for n in range(2)
              for kind, shape in (("weight", (8, 4)), ("bias", (8,)))}  # fmt: skip
    rows = {n: ([2], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in params.items()}

    def make(name, shape, dtype):
        return values(name, shape, dtype) * (name != "l.1.bias")

    place.ranks([rows], params, make=make)
    del rows["l.1.bias"]
    place.convert(place.strategy("c.ckpt", [rows]))


@row("unlisted_tensors_are_no_slices", WARNING)
def _(place):
    """A norm behind a matrix whose slices have as many rows."""
    params = {"mixer.in_proj.weight": ((16, 4), "Float32"), "mixer.norm.weight": ((16,), "Float32")}
    rows = {n: ([4], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in params.items()}
    place.ranks([rows], params, make=lambda name, shape, dtype: values(
        name, shape, dtype) if len(shape) > 1 else np.full(shape, 0x3F800000, "<u4"))  # fmt: skip
    del rows["mixer.norm.weight"]
    place.convert(place.strategy("c.ckpt", [rows]))


@row("unlisted_tensors_are_no_slices", NOTICE)
def _(place):
    """A constant of which nothing says that it is a slice; slices of other layers do not."""
    params = {f"l.{n}.{kind}": (shape, "Float32") for n in range(2)
              for kind, shape in (("w", (8, 4)), ("scale", (8,)))}  # fmt: skip
    rows = {n: ([2], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in params.items()}
    place.ranks([rows], params, make=lambda name, shape, dtype: values(
        name, shape, dtype) if name != "l.1.scale" else np.ones(shape, "<u4"))  # fmt: skip
    del rows["l.1.scale"]
    place.convert(place.strategy("c.ckpt", [rows]))


@row("extra_ranks_are_left_over")
def _(place):
    params = {
        n: ((s[0] * 2, *s[1:]), d) if n in SHARDED else (s, d) for n, (s, d) in PARAMS.items()
    }
    eight = [{n: ([8], [0, -1] if n in SHARDED else [-1], 0, 0) for n in params}]
    place.ranks(eight, params)
    place.convert(place.strategy("c.ckpt", ROWS))


# -- the request, its strategies and maps -----------------------------------------------------------


def usual(words):
    """Return words as BFloat16 or Float32 values from 1 to 2."""
    if words.itemsize == 2:
        return "BFloat16", words & 0x7F | 0x3F80
    return "Float32", words & 0x7FFFFF | 0x3F800000


def model_of(place, name, naming="mf"):
    """Write a model's tensors as SRC, of usual values, and return it."""
    model = Model(name, 1)
    tensors = {n: usual(np.asarray(words)) for n, words in getattr(model, naming).items()}
    reference_forms.write_huggingface(place.src, tensors)
    return model


@row("naming_is_another")
def _(place):
    model = model_of(place, "qwen3", "hf")
    (place.src / "config.json").write_text(json.dumps(model.config))
    place.convert(map="qwen3", dst_form="huggingface")


@row("loose_values_stay_whole")
def _(place):
    loose = {"x": ("Float32", values("x", (1,), "Float32"))}
    tensors = {"w": ("Float32", values("w", (4, 4), "Float32"))}
    reference_forms.write_unified(place.src, tensors, loose)
    place.convert(
        None, place.strategy("b.ckpt", [{"w": ([1], [-1, -1], 0, 0), "x": ([1], [0], 0, 0)}])
    )


@row("shapes_agree")
def _(place):
    shapes = {n: s for n, (s, _) in PARAMS.items()} | {"norm": (16,)}
    b = place.strategy("b.json", PAIRS, kind="json", shapes=shapes)
    place.convert(place.ranks(), b)


@row("weights_are_there")
def _(place):
    place.ranks()
    more = [{**ROWS[0], "layers.2.w": ([4], [0, -1], 0, 0)}]
    place.convert(place.strategy("c.ckpt", more))


@row("new_weights_are_meant")
def _(place):
    more = [{**PAIRS[0], "layers.2.w": ([2, 2], [1, -1], 0, 0)}]
    place.convert(place.ranks(), place.strategy("b.ckpt", more))


NUMBERED = {"w": (2, 2), "adam_m.0": (2, 2), "adam_m.1": (2, 2)}


@row("states_are_no_weights")
def _(place):
    place.whole(NUMBERED)
    place.convert(weights_only=True)


@row("patterns_shard", NOTICE)
def _(place):
    place.ranks()
    place.convert(r"shard:^layers\.=0@4")


def fused(place, name):
    names = [f"layers.{n}.{kind}" for n in (0, 1) for kind in (name, "w")]
    stages = [dict.fromkeys(names, ([2], [0, -1], 0, 0))]
    shapes = {n: (16, 8) if n.endswith(name) else (8, 8) for n in names}
    place.ranks(stages, {n: (s, "Float32") for n, s in shapes.items()})
    place.convert("shard:layers=0@2")


@row("fused_rows_are_stated", WARNING)
def _(place):
    fused(place, "attn.qkv_proj.weight")


@row("fused_rows_are_stated", WARNING)
def _(place):
    fused(place, "mlp.gate_up_proj.weight")


@row("fused_rows_are_stated", WARNING)
def _(place):
    """Of a gated unit by what goes behind it."""
    names = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
    rows, columns = ([2], [0, -1], 0, 0), ([2], [-1, 0], 0, 0)
    shapes = ((32, 8), (8, 16))
    place.ranks([dict(zip(names, (rows, columns)))],
                {n: (s, "Float32") for n, s in zip(names, shapes)})  # fmt: skip
    place.convert("shard:linear_fc1=0,linear_fc2=1@2")


@row("training_facts_have_a_place", NOTICE)
def _(place):
    """Megatron's folder states its step by its name alone."""
    tensors = {"output_layer.weight": ("Float32", values("w", (4, 4), "Float32"))}
    iteration = place.src / "iter_0000007"
    reference_dcp.write_dcp(iteration, tensors)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (iteration / "metadata.json").write_text(json.dumps(backend))
    (place.src / "latest_checkpointed_iteration.txt").write_text("7")
    place.convert(check_crc=True)


@row("a_model_has_its_configuration", NOTICE)
def _(place):
    place.convert(place.ranks(), dst_form="huggingface")


@row("options_have_an_effect", NOTICE)
def _(place):
    place.convert(place.ranks(), weights_only=True)


@row("configurations_state_tensors", NOTICE)
def _(place):
    model = model_of(place, "qwen3")
    config = place.tmp / "config.json"
    config.write_text(json.dumps({**model.config, "torch_dtype": "float32"}))
    options = {"map": "qwen3", "qkv": "grouped", "gate_up": "interleaved", "dtype": "bf16"}
    place.convert(config=config, dst_form="huggingface", **options)


def small_model(place, change, table="qwen3", **options):
    """Convert a model's folder of which the tensors or the configuration are changed."""
    model = model_of(place, table, "hf")
    path, config = place.src / "model.safetensors", model.config
    entries = {
        n: (d, np.frombuffer(data, reference.WORD[reference.ITEM[d]]).reshape(s))
        for n, (d, s, data) in reference.read_safetensors(path).items()
    }
    config["architectures"] = [{"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
                                "deepseek_v3": "DeepseekV3ForCausalLM"}[table]]  # fmt: skip
    change(entries, config)
    path.unlink()
    reference.write_safetensors(path, entries)
    (place.src / "config.json").write_text(json.dumps(config))
    if options:
        place.check()
    else:
        place.convert(dst_form="huggingface")


def of_layer(entries, layer):
    return [name for name in entries if f".layers.{layer}." in name]


def drop_last_layer(entries, config):
    for name in of_layer(entries, config["num_hidden_layers"] - 1):
        del entries[name]


def keep_some_rows(entries, config):
    for name in [n for n in entries if "k_proj" in n or "v_proj" in n]:
        dtype, words = entries[name]
        entries[name] = dtype, np.ascontiguousarray(words[: len(words) // 2])


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """A layer that a table's rules make."""
    small_model(place, drop_last_layer)


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """Rows of one rank, where a table gives them."""
    small_model(place, keep_some_rows)


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """A layer that predicts further words, of which none is stated."""

    def change(entries, config):
        for name in [n for n in entries if f".layers.{config['num_hidden_layers']}." in n]:
            del entries[name]
        config["num_nextn_predict_layers"] = 0
        name = f"model.layers.{config['num_hidden_layers']}.enorm.weight"
        entries[name] = entries["model.norm.weight"]

    small_model(place, change, "deepseek_v3")


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """A layer of a model of which no table knows."""

    def change(entries, config):
        config["architectures"] = ["UnknownForCausalLM"]
        drop_last_layer(entries, config)

    small_model(place, change)


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """The head of a model of which no table knows."""

    def change(entries, config):
        config.update(architectures=["UnknownForCausalLM"], tie_word_embeddings=False)
        entries.pop("lm_head.weight", None)

    small_model(place, change)


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """An expert of a model of which no table knows."""

    def change(entries, config):
        config["architectures"] = ["UnknownForCausalLM"]
        numbers = {int(n.split(".experts.")[1].split(".")[0]) for n in entries if ".experts." in n}
        for name in [n for n in entries if f".experts.{max(numbers)}." in n]:
            del entries[name]

    small_model(place, change, "qwen3_moe")


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """Keys whose rows do not divide the queries', of a model of which no table knows."""

    def change(entries, config):
        config["architectures"] = ["UnknownForCausalLM"]
        for name in [n for n in entries if "k_proj.weight" in n or "v_proj.weight" in n]:
            dtype, words = entries[name]
            entries[name] = dtype, np.ascontiguousarray(words[:-1])

    small_model(place, change)


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """A quantization of which nothing is left."""
    quantization = {"quantization_config": {"quant_method": "bitsandbytes"}}
    small_model(place, lambda entries, config: config.update(quantization))


@row("tensors_are_as_configured", WARNING)
def _(place):
    small_model(place, drop_last_layer, check=True)


@row("patterns_match", WARNING)
def _(place):
    place.convert(place.ranks(), dtype="bf16", keep_dtype=("nothing",))


@row("tensors_are_not_of_an_engine")
def _(place):
    from tests.checkpoints.test_vllm import Sample

    Sample("llama", place.tmp).convert(place.tmp / "hf", place.src)
    place.convert(dst_form="huggingface")


GATED = {"decoder.layers.0.mlp.linear_fc1.weight": (8, 4)}


@row("gate_and_up_lie_as_jobs_have_them")
def _(place):
    """Of a checkpoint of which nobody knows who wrote it, to Megatron."""
    place.whole(GATED)
    place.convert(dst_form="torch_dist")


@row("gate_and_up_lie_as_jobs_have_them", WARNING)
def _(place):
    place.whole(GATED)
    place.convert(dst_form="torch_dist", accept=("contradictions",))


@row("gate_and_up_lie_as_jobs_have_them", NOTICE)
def _(place):
    """Of Megatron, to ranks that may be MindFormers'."""
    tensors = {n: ("Float32", values(n, shape, "")) for n, shape in GATED.items()}
    reference_dcp.write_dcp(place.src, tensors)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (place.src / "metadata.json").write_text(json.dumps(backend))
    place.convert(check_crc=True)


@row("operations_fit", NOTICE)
def _(place):
    place.whole({"q.weight": (8, 8)})
    entries = {f"base_model.model.q.lora_{m}.weight": ("Float32", values(m, s, ""))
               for m, s in (("A", (2, 8)), ("B", (8, 2)))}  # fmt: skip
    reference.write_safetensors(place.tmp / "lora/adapter_model.safetensors", entries)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (place.tmp / "lora/adapter_config.json").write_text(json.dumps(config))
    place.convert(lora=place.tmp / "lora")


@row("operations_fit", NOTICE)
def _(place):
    """A few rows that --vocab adds."""
    place.whole({"lm_head.weight": (128, 4)})
    place.convert(vocab=130)


@row("operations_fit", WARNING)
def _(place):
    """More rows than an eighth of those that are there."""
    place.whole({"lm_head.weight": (8, 4)})
    place.convert(vocab=32, vocab_fill="repeat-last")


@row("operations_fit", WARNING)
def _(place):
    """A state for which MindSpore has no name, beside some that it names."""
    states = {f"optimizer.state.{n}.{kind}": (4, 4) for n in "ab" for kind in (
        "exp_avg", "exp_avg_sq", "exp_avg_slow")}  # fmt: skip
    place.whole({"a": (4, 4), "b": (4, 4), **states})
    place.convert(names="mindspore")


@row("states_belong_to_parameters", WARNING)
def _(place):
    place.whole(NUMBERED)
    place.convert()


@row("states_have_a_place", WARNING)
def _(place):
    params = dict.fromkeys(("w", "muon_m.w"), ((16, 8), "Float32"))
    stages = [dict.fromkeys(params, ([2], [0, -1], 0, 0))]
    a = place.ranks(stages, params)
    place.convert(a, place.strategy("b.ckpt", [{"w": ([4], [0, -1], 0, 0)}]))


@row("weights_are_usual", WARNING)
def _(place):
    place.whole({"a": (0,), "b": (0,), "norm": (2,)})
    place.convert()


@row("weights_are_usual", WARNING)
def _(place):
    """A wrapper that no list names."""
    place.whole({f"_forward_module.layers.{n}.w": (4, 4) for n in range(3)})
    place.convert()


@row("tensors_are_as_the_model_states", WARNING)
def _(place):
    """Layers of which no model has so many: their names are not worked out."""
    small_model(place, lambda entries, config: config.update(num_hidden_layers=10**6))


@row("weights_are_usual", WARNING)
def _(place):
    """Two wrappers, one in the other."""
    place.whole({f"module.module.layers.{n}.w": (4, 4) for n in range(3)})
    place.convert()


@row("weights_are_usual", WARNING)
def _(place):
    """An adapter of Megatron-Bridge beside its layers."""
    module = "layers.0.linear_proj"
    place.whole({f"{module}.to_wrap.weight": (4, 4), f"{module}.adapter.linear_in.weight": (2, 4),
                 f"{module}.adapter.linear_out.weight": (4, 2)})  # fmt: skip
    place.convert()


@row("the_request_is_meant", WARNING)
def _(place):
    model = model_of(place, "llama_legacy")
    del model.config["model_type"]
    (place.tmp / "config.json").write_text(json.dumps(model.config))
    place.convert(map="llama_legacy", config=place.tmp / "config.json", dst_form="huggingface")


# -- content (inspect --check) ----------------------------------------------------------------------


@row("ranks_have_files", WARNING)
def _(place):
    place.ranks()
    place.shard(1).unlink()
    place.check()


@row("files_hold_their_slices")
def _(place):
    """Cut off between two tensors."""
    strategy = place.ranks()
    place.rewrite(1, lambda entries: entries.pop("layers.0.w"))
    place.check(strategy)


@row("tensors_are_usual", WARNING)
def _(place):
    place.whole({"a": (0,), "b": (0,), "norm": (2,)})
    place.check()


@row("all_replicas_are_equal")
def _(place):
    stages = [{**REPLICATED[0], "large": ([4], [-1, -1], 0, 0)}]
    place.ranks(stages, {**PARAMS, "large": ((256, 256), "Float32")})

    def change(entries):
        words = entries["large"][1].copy()
        words[200, 3] += 1
        entries["large"] = "Float32", words

    place.rewrite(1, change)
    place.check(place.strategy("c.ckpt", stages), full=True)


@row("checksums_match")
def _(place):
    tensors = {"w": ("Float32", np.arange(24, dtype="<u4").reshape(6, 4))}
    reference_dcp.write_dcp(place.src, tensors)
    path = max(place.src.glob("*.distcp"), key=os.path.getsize)
    data = path.read_bytes()
    path.write_bytes(
        data.replace(b"\x17\0\0\0", b"\x16\0\0\0").replace(
            b"\x05\0\0\0\x06\0\0\0", b"\x04\0\0\0\x06\0\0\0"
        )
    )
    place.check(full=True)


def experts_of(place, change):
    """Check two layers of four experts in one file, of which some are changed."""
    entries = {f"layers.{n}.experts.{e}.{w}.weight": ("Float32", values(f"{n}{e}{w}", (32, 32), ""))
               for n in (0, 1) for e in range(4) for w in ("up_proj", "down_proj")}  # fmt: skip
    change(entries)
    reference_forms.write_huggingface(place.src, entries)
    place.check(full=True)


@row("matrices_are_filled", WARNING)
def _(place):
    """One expert's matrix that ends its branch, beside others that are not zero."""
    name = "layers.1.experts.2.down_proj.weight"
    experts_of(
        place, lambda entries: entries.update({name: (entries[name][0], entries[name][1] * 0)})
    )


@row("matrices_are_filled", WARNING)
def _(place):
    """Experts in the place of others."""

    def exchange(entries):
        for name in [n for n in entries if ".experts.3." in n]:
            entries[name] = entries[name.replace(".3.", ".1.")]

    experts_of(place, exchange)


@row("matrices_are_filled", WARNING)
def _(place):
    """A file whose end was lost, and filled."""

    def cut(entries):
        *_, before, last = sorted(entries)
        words = entries[before][1].copy()
        words[7:] = 0
        entries[before], entries[last] = ("Float32", words), ("Float32", entries[last][1] * 0)

    experts_of(place, cut)


def filled_with(place, word):
    place.whole({"a": (4, 4), "b": (4, 4)})
    entries = {
        "a": ("Float32", np.full((4, 4), word, "<u4")),
        "b": ("Float32", values("b", (4, 4), "")),
    }
    (place.src / "model.safetensors").unlink()
    reference.write_safetensors(place.src / "model.safetensors", entries)
    place.check(full=True)


@row("values_are_numbers")
def _(place):
    filled_with(place, 0x7FC00000)


@row("values_are_finite", WARNING)
def _(place):
    filled_with(place, 0x7F800000)


@row("all_parts_were_written", WARNING)
def _(place):
    place.whole({"a": (1024, 1024), "b": (4, 4)})
    punch(place.src / "model.safetensors", 1 << 18, 3 << 19)
    place.check()


@row("nothing_is_left_over", WARNING)
def _(place):
    place.whole({"a": (4, 4), "b": (4, 4)})
    (place.src / "other.safetensors.tmp").write_bytes(b"x")
    place.check()


# -- what was written, in every form ----------------------------------------------------------------

FORMS = {
    "ranks": {}, "checkpoint2": {"iteration": 7}, "unified": {"max_part": 600},
    "huggingface": {"max_shard": 600}, "dcp": {"max_part": 600},
    "hyperparallel": {"max_part": 600, "iteration": 7},
    "vllm": {"tensor_parallel": 2, "max_shard": 40000}, "torch_dist": {"max_part": 600},
}  # fmt: skip
"""Every form that is written, with the options of a conversion into several files."""


class WrittenPlace(Place):
    """DST in one form, by a conversion of which fingerprints are kept."""

    def __init__(self, tmp: Path, form: str) -> None:
        super().__init__(tmp)
        self.form = form
        self.a, self.b = self.ranks(), self.strategy("b.ckpt", PAIRS)
        self.write()
        self.manifest = next(self.dst.rglob("rankxform.json"))
        self.folder = self.manifest.parent
        self.record = json.loads(self.manifest.read_text())
        self.files = sorted(self.folder / name for name in self.record["files"])

    def write(self) -> Any:
        if self.form == "vllm":  # of a published model's names
            from tests.checkpoints.test_vllm import Sample

            src = Sample("llama", self.tmp).src
            told = {"dst_form": "vllm", "verify": True, **FORMS["vllm"]}
            return rankxform.transform(src, self.dst, progress=False, **told)
        if self.form == "torch_dist":  # of Megatron's names
            src = Path(__file__).parent / "data/formats/megatron/llama/torch_dist"
            told = {"dst_form": "torch_dist", "verify": True, **FORMS["torch_dist"]}
            return rankxform.transform(src, self.dst, progress=False, **told)
        b = self.b if self.form in ("ranks", "checkpoint2") else None
        options = {"dst_form": self.form, "verify": True, **FORMS[self.form]}
        return self.convert(self.a, b, **options)

    def verify(self) -> Any:
        return rankxform.verify(self.dst, progress=False)


class WrittenRow(NamedTuple):
    rule: str
    severity: str
    damage: Callable[[WrittenPlace], Path | None]
    forms: tuple[str, ...]


WRITTEN: list[WrittenRow] = []


def written(rule: str, severity: str = ERROR, forms: Iterable[str] = FORMS) -> Callable[[Any], Any]:
    """Register what breaks a rule over what was written; it returns the file that is meant, if any.

    forms: those whose files have what is damaged.
    """

    def register(damage: Any) -> Any:
        WRITTEN.append(WrittenRow(rule, severity, damage, (*forms,)))
        return damage

    return register


@written("listed_files_are_there")
def _(place):
    place.files[-1].unlink()
    return place.files[-1]


@written("files_have_their_size")
def _(place):
    with place.files[-1].open("ab") as file:
        file.write(b"\0")
    return place.files[-1]


@written("headers_are_as_written")
def _(place):
    """What the file says first of itself: the length of a header, a magic number, a tag."""
    path = place.files[-1]
    data = bytearray(path.read_bytes())
    data[:4] = bytes(byte ^ 255 for byte in data[:4])
    keep_times(path, bytes(data))
    return path


@written("content_is_unchanged", forms=FORMS.keys() - {"dcp", "torch_dist"})
def _(place):
    """One bit of a tensor, of which the file carries no checksum of its own."""
    path = place.files[-1]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    keep_times(path, bytes(data))
    return path


@written("carried_checksums_match", forms=["dcp", "torch_dist"])
def _(place):
    """What an item of a .distcp says of its bytes; other files carry none here."""
    if place.form == "torch_dist":
        words = reference_dcp.read_items(place.folder)[0]["output_layer.weight"][1].tobytes()
    else:
        largest = max(PARAMS, key=lambda n: np.prod(PARAMS[n][0]))
        words = values(largest, PARAMS[largest][0], "").tobytes()
    path = next(path for path in place.files if words in path.read_bytes())
    data = path.read_bytes()
    keep_times(path, data.replace(words, bytes([words[0] ^ 1]) + words[1:]))
    return path


@written("nothing_else_is_there")
def _(place):
    path = place.files[-1]
    stray = path.with_name(f"stray{path.suffix}")
    stray.write_bytes(path.read_bytes())
    return stray


@written("companions_are_as_written", forms=FORMS.keys() - {"ranks", "vllm"})
def _(place):
    path = place.folder / min(place.record["companions"])
    path.write_bytes(path.read_bytes() + b"\n")
    return path


@written("all_files_were_made", WARNING)
def _(place):
    place.manifest.write_text(json.dumps({**place.record, "ranks": len(place.files) + 1}))


@written("model_files_are_as_copied", WARNING)
def _(place):
    place.manifest.write_text(json.dumps({**place.record, "beside": {"config.json": "0"}}))


def keep_times(path: Path, data: bytes) -> None:
    modified = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(modified, modified))
