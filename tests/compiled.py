"""The compiled strategy files of tests/data, each with the configuration that it was compiled for.

A family is one network's files: what each pair of them says can be compared. `program` tells apart
files of a family whose networks call shard() differently: from one of them the other cannot be
derived, and nothing in the file shows it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path

from rankxform.derivation import rules
from rankxform.derivation.mesh import Parallel
from rankxform.derivation.request import DeriveRequest, Extent
from rankxform.derivation.rules import rule_of
from rankxform.derivation.stages import StageLayers
from rankxform.formats.container import item_size
from rankxform.layout.layout import same_boxes
from rankxform.layout.states import NEVER_SAVED, state_of_name
from rankxform.layout.strategy import merge_records
from rankxform.storage import user_files

DATA = Path(__file__).parent / "data"
REAL, TUTORIALS, MODELS, DERIVE = (
    DATA / name for name in ("real_strategies", "tutorials", "models", "derive")
)


@dataclass(frozen=True)
class Compiled:
    """A compiled strategy: its files, the sizes of its job, and what a user of it would know."""

    family: str
    name: str
    files: tuple[Path, ...]
    shapes: Path
    sizes: Parallel
    program: str = ""
    predict: bool = False
    facts: dict = field(default_factory=dict, compare=False, hash=False)

    def __str__(self):
        return f"{self.family}:{self.name}"

    @property
    def strategy(self):
        return _strategy(self.files)

    @property
    def extents(self):
        return _extents(self.shapes)


@cache
def _strategy(files):
    return merge_records([user_files.read_strategy_file(path) for path in files], files[0].name)


@cache
def _extents(path):
    if path.suffix == ".json":
        document = json.loads(path.read_text())
        params = document.get("params") or document["shapes"]
        known = {
            name: (one["full_shape"], one["dtype"]) if isinstance(one, dict) else (one, "Float32")
            for name, one in params.items()
        }
    else:
        lines = re.findall(r"PARAM (\S+) \(([\d, ]*)\) (\w+)", path.read_text())
        known = {n: ([int(d) for d in s.replace(",", " ").split()], t) for n, s, t in lines}
    return {n: Extent(tuple(s), prod(s) * item_size(t)) for n, (s, t) in known.items()}


def _job(text, opt=None, threshold=0, **more):
    sizes = {k: int(v) for k, v in (one.split("=") for one in text.split(","))}
    return Parallel(**sizes, optimizer_shard=opt, threshold=threshold, **more)


def _transformer():
    folder = REAL / "C_transformer"
    facts = {
        "opt_on": ("",),
        "places": {"layers": "net.blocks", "first": ("embed",), "last": ("head",)},
    }
    for name, file, sizes in (
        ("dp2mp4_opt", "strategy/strategy_0.ckpt", _job("dp=2,mp=4", True)),
        ("dp2mp2pp2_opt", "merged_strategy.ckpt", _job("dp=2,mp=2,pp=2", True)),
        ("dp1mp4", "strategy/strategy_0.ckpt", _job("dp=1,mp=4", True)),
        ("dp2mp2pp2_noopt", "merged_strategy.ckpt", _job("dp=2,mp=2,pp=2", False)),
    ):
        yield Compiled(
            "transformer", name, (folder / name / file,), folder / name / "shapes.json", sizes,
            facts=facts,
        )  # fmt: skip


def _mlp():
    """One MLP under many shard() calls; `program` says which."""
    for folder, name, file, sizes, program in (
        ("A_mlp", "src8_momentum", "strategy/strategy_0.ckpt", _job("dp=8", False), "src8"),
        ("A_mlp", "dst4_momentum", "strategy/strategy_0.ckpt", _job("dp=4", True, 64), "dst4"),
        ("A_mlp", "predict2", "strategy/strategy_0.ckpt", _job("dp=2", False), "predict2"),
        ("B_pipeline", "pp2x4_t0", "merged_strategy.ckpt", _job("dp=4,pp=2", True), "plain"),
        ("B_pipeline", "pp2x4_mp", "merged_strategy.ckpt", _job("dp=4,pp=2", True), "mp"),
        ("E_optshard", "ows2_dp8", "strategy/strategy_0.ckpt", _job("dp=8", 2), "plain"),
        ("E_optshard", "optall_rep", "strategy/strategy_0.ckpt", _job("dp=8", True), "rep"),
    ):  # fmt: skip
        where = REAL / folder / name
        yield Compiled(
            "mlp", name, (where / file,), where / "shapes.json", sizes, program=program,
            predict=name == "predict2", facts={"opt_on": ("",)},
        )  # fmt: skip
    where = TUTORIALS / "model_transformation"
    for name, sizes, program in (
        ("src_strategy", _job("dp=8", False), "tutorial_src"),
        ("dst_strategy", _job("dp=4", True, 64), "dst4"),
        ("dst_strategy_threshold0", _job("dp=4", True), "dst4"),
    ):
        yield Compiled(
            "mlp", f"tutorial_{name}", (where / f"{name}.ckpt",), where / "params.txt", sizes,
            program=program, facts={"opt_on": ("",)},
        )  # fmt: skip
    where = TUTORIALS / "model_transformation_pipeline"
    for name, sizes in (
        ("src_pipeline_strategy_merged", _job("dp=4,pp=2", True, 64)),
        ("dst_pipeline_strategy", _job("dp=4", False)),
    ):
        yield Compiled(
            "mlp", f"tutorial_{name}", (where / f"{name}.ckpt",), where / "params.txt", sizes,
            program="tutorial_pipeline", facts={"opt_on": ("",)},
        )  # fmt: skip


def _nested():
    same_map = {"n5": "n2", "n6": "n4"}
    for name in ("n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"):
        where = REAL / "D_nested" / name
        yield Compiled(
            "nested", name, (where / "strategy/strategy_0.ckpt",), where / "shapes.json",
            _job("dp=8", name in same_map), program=same_map.get(name, name),
            facts={"opt_on": ("",)},
        )  # fmt: skip


def _small():
    for folder, names, program in (
        ("F_misc_bmm3d", ("bmm3d", "bmm3d_opt"), lambda name: ""),
        ("F_misc_odd", ("odd", "odd_mp"), lambda name: name),
    ):
        for name in names:
            where = REAL / folder / name
            sizes = _job("dp=4,mp=2" if name == "odd_mp" else "dp=8", name.endswith("_opt"))
            yield Compiled(
                folder, name, (where / "strategy/strategy_0.ckpt",), where / "shapes.json",
                sizes, program=program(name), facts={"opt_on": ("",)},
            )  # fmt: skip


def _resilience():
    where = TUTORIALS / "resilience_train_and_predict"
    facts = {
        "opt_on": (r"\.(weight|bias|gamma|beta)$",),
        "opt_off": ("embedding_table",),
        "places": {"first": ("embedding",), "last": ("head",)},
    }
    same = {"vocab_emb_dp": True}  # the network replicates its tables in every job
    for name, sizes, predict in (
        ("src_strategy", _job("dp=2,mp=4", True, 64, **same), False),
        ("src_strategy_as_shipped_no_optshard", _job("dp=2,mp=4", False, **same), False),
        ("dst_strategy", _job("dp=1,mp=4", False, **same), False),
        ("src_pipeline_strategy_merged", _job("dp=1,mp=4,pp=2", False, **same), False),
    ):
        yield Compiled(
            "resilience", name, (where / f"{name}.ckpt",), where / "params.txt", sizes,
            predict=predict, facts=facts,
        )  # fmt: skip


def _llama():
    where = MODELS / "llama2_7b"
    for name, file, sizes, predict in (
        ("dp8_opt", "src_dp8mp1pp1_opt.ckpt", _job("dp=8", True, 64, vocab_emb_dp=True), False),
        ("dp2mp4_opt", "dst_dp2mp4pp1_opt.ckpt",
         _job("dp=2,mp=4", True, 64, vocab_emb_dp=True), False),
        ("mp2_predict", "dst_dp1mp2pp1_predict.ckpt",
         _job("dp=1,mp=2", False, vocab_emb_dp=True), True),
        ("mp4_predict", "dst_dp1mp4pp1_predict.ckpt",
         _job("dp=1,mp=4", False, vocab_emb_dp=False), True),
        ("mp2pp2", "tutorial4_4p_dp1mp2pp2/merged_ckpt_strategy.ckpt",
         _job("dp=1,mp=2,pp=2", True, 64, vocab_emb_dp=True), False),
        ("dp2pp4", "tutorial4_8p_dp2mp1pp4/merged_ckpt_strategy.ckpt",
         _job("dp=2,pp=4", True, 64, vocab_emb_dp=True), False),
    ):  # fmt: skip
        yield Compiled(
            "llama2_7b", name, (where / file,), where / "params.txt", sizes, predict=predict,
            facts={"preset": "llama_legacy"},
        )  # fmt: skip
    where = MODELS / "llama2_13b" / "tutorial4_16p_dp2mp4pp2"
    yield Compiled(
        "llama2_13b", "dp2mp4pp2", (where / "merged_ckpt_strategy.ckpt",), where / "params.txt",
        _job("dp=2,mp=4,pp=2", True, 64, vocab_emb_dp=True), facts={"preset": "llama_legacy"},
    )  # fmt: skip


def _deepseek():
    where = MODELS / "deepseek_v3"
    flags = {"vocab_emb_dp": False, "use_seq_parallel": True}
    large = "full671b_1024p_dp16mp4pp16ep8"
    for family, name, file, shapes, sizes, offset in (
        ("deepseek_tiny", "dp2mp2pp2ep2",
         "tiny4L_8p_dp2mp2pp2ep2/merged_ckpt_strategy.ckpt", "tiny4L_8p_dp2mp2pp2ep2",
         _job("dp=2,mp=2,pp=2,ep=2", True, 64, **flags), ()),
        ("deepseek_tiny", "dp4mp2ep4_ows2",
         "tiny4L_8p_dp4mp2pp1ep4_optws2/ckpt_strategy_rank_0.ckpt",
         "tiny4L_8p_dp4mp2pp1ep4_optws2", _job("dp=4,mp=2,ep=4", 2, 64, **flags), ()),
        ("deepseek_671b", "1024", f"{large}/merged_ckpt_strategy.ckpt", large,
         _job("dp=16,mp=4,pp=16,ep=8", True, 64, **flags), (1,) * 13 + (0,) * 3),
        ("deepseek_671b", "512", "dst_512p_dp16mp4pp8ep32/merged_ckpt_strategy.ckpt", large,
         _job("dp=16,mp=4,pp=8,ep=32", True, 64, **flags), (1,) * 5 + (0,) * 3),
    ):  # fmt: skip
        yield Compiled(
            family, name, (where / file,), where / shapes / "params.txt", sizes,
            facts={"preset": "deepseek_v3", "places": {"offset": offset}},
        )  # fmt: skip


def _derive():
    """One small transformer; tuple, Layout style and experts are programs of their own."""
    facts = {
        "opt_on": ("",),
        "unsharded": frozenset({"cp"}),
        "places": {"layers": "blocks", "first": ("embed",), "last": ("ln_f|head",)},
    }
    for path in sorted(DERIVE.glob("*.json")):
        name, _, stage = path.stem.partition("@")
        if stage == "1":
            continue
        known = json.loads(path.read_text())["parallel"]
        files = [DERIVE / f"{name}.ckpt"]
        if stage:
            files = [DERIVE / f"{name}@{n}.ckpt" for n in range(known["pp"])]
        sizes = {key: known[key] for key in ("dp", "mp", "pp", "cp", "ep") if key in known}
        job = Parallel(
            **sizes, threshold=known["thr"],
            optimizer_shard=known.get("ows") or bool(known["opt"]),
        )  # fmt: skip
        family = "moe" if "moe" in known else "tied" if "tied" in known else "small"
        family = "wide" if known["thr"] else family
        style = "Layout" if "layout" in known else "tuple"
        yield Compiled(family, name, tuple(files), path, job, program=style, facts=facts)


COMPILED = [
    *_transformer(), *_mlp(), *_nested(), *_small(), *_resilience(), *_llama(), *_deepseek(),
    *_derive(),
]  # fmt: skip


def pairs():
    """Return every ordered pair of one family's files."""
    return [
        (src, dst)
        for src in COMPILED
        for dst in COMPILED
        if src is not dst and src.family == dst.family
    ]


def strictly(src, dst):
    """Return what is known from two configurations, shapes and thresholds alone."""
    return DeriveRequest(
        src.strategy, dst.sizes, src.sizes, extents=src.extents, predict=dst.predict,
        places=StageLayers(offset=dst.facts.get("places", {}).get("offset", ())),
    )  # fmt: skip


def with_facts(src, dst):
    """Return what a user of this network can say besides, or what its preset knows."""
    facts = dst.facts
    places = dict(facts.get("places", {}))
    said = [(n, where) for where in ("first", "last") for n in places.pop(where, ())]
    placed = tuple(rule_of({"names": n, "stage": where}, "a rule") for n, where in said)
    preset = facts.get("preset")
    return replace(
        strictly(src, dst),
        preset=rules.load_preset(preset) if preset else None,
        opt_on=tuple(map(re.compile, facts.get("opt_on", ()))),
        opt_off=tuple(map(re.compile, facts.get("opt_off", ()))),
        unsharded=facts.get("unsharded", frozenset()),
        places=StageLayers(**places, placed=placed),
    )


def on_same_mesh(src, dst):
    """Return what is known if the user says that a stage's ranks stay arranged as they are."""
    return replace(with_facts(src, dst), keep_mesh=True)


def compare(found, wanted):
    """Say how a derived strategy compares with the compiler's: exact, boxes, or what differs.

    Parameters must be the same, on the same stages. Optimizer states are compared where both list
    them: those that the source does not have, nothing shows.
    """
    if (found.stage_size, len(found.stages)) != (wanted.stage_size, len(wanted.stages)):
        return f"differs: {found.extent}, not {wanted.extent}"
    verdict = "exact"
    for stage, (ours, theirs) in enumerate(zip(found.stages, wanted.stages)):
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                if state_of_name(name) and _states(found) != _states(wanted):
                    continue
                return f"differs: {name!r} of stage {stage} is listed once"
            if ours[name] == theirs[name]:
                continue
            if not same_boxes(ours[name], theirs[name]):
                return f"differs: {name!r} of stage {stage}: {ours[name]} not {theirs[name]}"
            verdict = "boxes"
    return verdict


def _states(strategy):
    return {strategy.states.kind(name) for name in strategy.stages_of}


def same_mesh(src, dst):
    """Tell whether "the mesh stays" would be a true thing to say of two jobs."""
    alike = all(src.sizes[axis] == dst.sizes[axis] for axis in ("dp", "mp", "cp", "ep"))
    return alike and src.program == dst.program


def from_preset(one):
    """Return what is known from a preset, the sizes, and shapes as a whole checkpoint has them."""
    names = {name for layouts in one.strategy.stages for name in layouts}
    extents = {
        name: one.extents.get(name) or one.extents[state_of_name(name).parameter]
        for name in sorted(names)
        if not name.startswith(f"{NEVER_SAVED}.")
    }
    return replace(with_facts(one, one), source=None, src=None, extents=extents)
