"""Casts, adapters, vocabulary, masters and 8-bit floats, on the way between strategies."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError, UsageError
from rankxform.planning.transfers import Reach
from rankxform.source import copies
from rankxform.verbs import work
from tests import reference, reference_forms
from tests.mpi.conftest import as_nodes
from tests.mpi_launch import world
from tests.reference_maps import random_strategy
from tests.reference_values import FAMILIES, WORDS, adapter_of, exactly, ulp, values, words

# Values are random bits, of which some are no numbers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no numbers|.*value is zero:rankxform.RankxformWarning"
)


def write(folder, arrays, types, ranks, stages, seed, states=()):
    """Write rank folders with a random strategy; return its file."""
    params = {n: (a.shape, types[n]) for n, a in arrays.items()}
    layouts = random_strategy(
        {n: p for n, p in params.items() if not n.startswith(tuple(states) or "\0")},
        ranks, stages, seed,
    )  # fmt: skip
    for some in layouts:
        some.update(
            {s + n: one for n, one in list(some.items()) for s in states if s + n in params}
        )
    reference.write_stage_files(folder / "strategy", layouts)
    reference.write_checkpoint(
        folder / "src", layouts, params, None, "safetensors", make=lambda n, s, d: arrays[n]
    )
    return str(folder / "strategy")


def whole(folder):
    return reference_forms.read_huggingface(folder)


@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_floating_parameters_change_their_type_and_states_do_not(dtype, tmp):
    bits = np.random.default_rng(3)
    to = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}[dtype]
    types = {"a": "Float32", "b": "Float32", "h": "Float16", "q": "BFloat16", "n": "Int32"}
    routers = "router.bias", "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"
    types |= {"adam_m.a": "Float32", **dict.fromkeys(routers, "Float32")}
    arrays = {
        n: bits.integers(0, 1 << 32, (8, 12), dtype=np.uint32).astype(WORDS.get(d, "<u4"))
        for n, d in types.items()
    }
    for name, array in arrays.items() if to == "Float16" else ():  # all below 2, but not these
        if types[name] in ("Float32", "BFloat16"):
            top = 8 * array.itemsize - 16
            array &= ~array.dtype.type(0x4000 << top)
            array[:2] |= array.dtype.type(0x7F80 << top)  # infinite, if the rest is zero; or a NaN
            array[1] &= array.dtype.type(0xFF80 << top)
    if world().rank == 0:
        write(tmp, arrays, types, 4, 2, 1, ("adam_m.",))
    world().Barrier()
    options = {
        "dtype": dtype, "keep_dtype": "router.bias$", "src_strategy": tmp / "strategy", "comm": world(),
    }  # fmt: skip
    rankxform.transform(
        tmp / "src", tmp / "dst", dst_form="huggingface", verify=True, fsync=False, **options
    )
    assert rankxform.verify(tmp / "dst", comm=world()).same
    assert rankxform.verify(tmp / "src", tmp / "dst", **options).same
    loaded = rankxform.load(tmp / "src", rank=0, **options)
    found = whole(tmp / "dst")
    for name, array in arrays.items():
        kept = name in ("n", "adam_m.a", *routers) or types[name] == to
        if kept:
            want = array
        elif types[name] == "Float32":
            want = words(array.view("<f4"), to)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                want = words(values(array, types[name]).astype("<f4"), to)
        own = types[name] if kept else to
        if not kept:  # the sign of a NaN between 16-bit types is the converter's affair
            nan = np.isnan(values(want, own))
            have = found[name][1]
            assert np.array_equal(nan, np.isnan(values(have, own)))
            assert np.array_equal(have[~nan], want[~nan])
        else:
            assert found[name][1].tobytes() == want.tobytes()
        assert found[name][0] == own
        assert loaded.dtypes[name] == own


@pytest.mark.sampled
@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("dtype", ["BFloat16", "Float32", "Float16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nodes", [1, 2])
def test_an_adapter_is_added_within_half_an_ulp(family, dtype, nodes, tmp, monkeypatch):
    """With several nodes, each has some of the files on a disk of its own."""
    bits, rng = np.random.default_rng(7), random.Random(f"{family} {dtype}")
    shapes = {f"layers.{n}.{m}": (16, 24) for n in range(2) for m in ("up", "down")}
    types = {f"{module}.weight": dtype for module in shapes} | {"norm.weight": dtype}
    arrays = {n: words(bits.normal(0, 1, (16, 24)), dtype) for n in types}
    rank, alpha = rng.choice([2, 4]), 6
    lora = adapter_of(family, shapes, rng.choice([dtype, "Float32"]), rank, bits)
    kind = "Float32" if next(iter(lora.values())).dtype == "<u4" else dtype
    place = "file" if family == "peft" else rng.choice(["ranks", "file", "same"])
    method = rng.choice(["auto", "two-phase", "ranges"])
    if world().rank == 0:
        extra = lora if place == "same" else {}
        write(tmp, arrays | extra, types | dict.fromkeys(extra, kind), 4, 1, rng.random())
        if place == "ranks":
            write(tmp / "lora", lora, dict.fromkeys(lora, kind), 4, 1, rng.random())
        elif place == "file":
            tensors = {n: (kind, a) for n, a in lora.items()}
            reference.write_safetensors(tmp / "lora" / "adapter_model.safetensors", tensors)
        if family == "peft":
            stated = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
            (tmp / "lora" / "adapter_config.json").write_text(json.dumps(stated))
    world().Barrier()
    options = {"lora": tmp / "src" if place == "same" else tmp / "lora", "comm": world()}
    options["read_method"] = method
    if place == "ranks":
        options |= {"lora": tmp / "lora" / "src", "lora_strategy": tmp / "lora" / "strategy"}
    if family != "peft":
        options |= {"lora_alpha": alpha, "lora_rank": rank}
    options = {k: str(v) if k in ("lora", "lora_strategy") else v for k, v in options.items()}
    a = tmp / "strategy"
    if nodes <= world().size:
        as_nodes(monkeypatch, nodes, family + dtype)
    planned = rankxform.plan(tmp / "src", a, dst_form="huggingface", prove=True, **options)
    verify = nodes == 1 or dtype == "Float16"  # checksums are sent too
    report = rankxform.transform(
        tmp / "src", tmp / "dst", a, dst_form="huggingface", verify=verify, fsync=False,
        **options,
    )  # fmt: skip
    if 1 < nodes <= world().size and not verify:
        assert (planned.bytes_read, planned.bytes_sent) == (report.bytes_read, report.bytes_sent)
    assert rankxform.verify(tmp / "src", tmp / "dst", a, **options).same
    found = whole(tmp / "dst")
    assert set(found) == set(arrays)
    assert found["norm.weight"][1].tobytes() == arrays["norm.weight"].tobytes()
    a_end, b_end, prefix = FAMILIES[family]
    for module in shapes:
        name = f"{module}.weight"
        factors = (values(lora[prefix + module + end], kind) for end in (a_end, b_end))
        want = exactly(values(arrays[name], dtype), *factors, alpha / rank)
        have = values(found[name][1], dtype)
        assert found[name][0] == dtype
        assert (np.abs(have - want) <= 0.5 * ulp(want, dtype) * (1 + 2**-12)).all(), name


def adapter_on_two_nodes(tmp, monkeypatch, shape, rank):
    """Write a matrix and an adapter, on disks of two nodes; return the options that add it."""
    bits = np.random.default_rng(8)
    arrays = {"up.weight": words(bits.normal(0, 1, shape), "Float32")}
    lora = adapter_of("mcore", {"up": shape}, "Float32", rank, bits)
    if world().rank == 0:
        write(tmp, arrays, dict.fromkeys(arrays, "Float32"), 4, 1, 1)
        write(tmp / "lora", lora, dict.fromkeys(lora, "Float32"), 4, 1, 1)
    world().Barrier()
    as_nodes(monkeypatch, 2, 3)
    places = {"lora": str(tmp / "lora" / "src"), "lora_strategy": str(tmp / "lora" / "strategy")}
    return {**places, "lora_alpha": 1, "lora_rank": rank, "comm": world()}


@pytest.mark.world(sizes=(3,))
def test_an_adapter_that_crosses_between_nodes_fits_the_memory(tmp, monkeypatch):
    options = adapter_on_two_nodes(tmp, monkeypatch, (2048, 256), 128)
    with pytest.raises(UsageError, match="process 0 needs 1,179,648 bytes.*; raise --memory to 3M"):
        rankxform.transform(
            tmp / "src", tmp / "dst", tmp / "strategy", memory=1 << 20, dst_form="huggingface",
            **options,
        )  # fmt: skip
    world().Barrier()  # process 0 removes the empty folder
    assert not list((tmp / "dst").glob("*.safetensors"))


def _lacks_one(plan):
    return replace(plan, transfers=plan.transfers[:-1])


def _has_one_twice(plan):
    return replace(plan, transfers=[*plan.transfers, plan.transfers[-1]])


def _leaves_too_little(plan):
    return replace(plan, nbytes=0)


@pytest.mark.world(sizes=(3,))
@pytest.mark.parametrize("change", [_lacks_one, _has_one_twice, _leaves_too_little])
def test_an_adapter_that_is_not_brought_as_it_is_needed_is_refused(change, tmp, monkeypatch):
    options = adapter_on_two_nodes(tmp, monkeypatch, (64, 32), 4)
    options |= {"dst_form": "huggingface", "read_method": "ranges", "fsync": False}
    planned = work._plan_operands

    def changed(conversion, assignment, process):
        plan = planned(conversion, assignment, process)
        return change(plan) if plan is not None and plan.transfers else plan

    monkeypatch.setattr(work, "_plan_operands", changed)
    text = "would hold" if change is _leaves_too_little else "is not brought the factors"
    with pytest.raises(RankxformError, match=f"the plan is wrong: process . {text}"):
        rankxform.transform(tmp / "src", tmp / "dst", tmp / "strategy", verify=True, **options)
    assert not list((tmp / "dst").glob("*.safetensors"))


@pytest.mark.world(sizes=(2,))
@pytest.mark.parametrize("private", ["src", "lora"])
@pytest.mark.parametrize("kind", ["scales of its blocks", "DoRA needs whole rows"])
def test_operands_in_source_and_adapter_take_files_that_all_see(kind, private, tmp, monkeypatch):
    bits = np.random.default_rng(4)
    is_dora = kind.startswith("DoRA")
    base = {
        n: ("Float32", words(bits.normal(0, 1, (16, 24)), "Float32")) for n in ("m.weight", "n")
    }
    if not is_dora:
        base["q.weight"] = "F8_E4M3", bits.integers(0, 100, (256, 256)).astype("u1")
        base["q.weight_scale_inv"] = "Float32", np.full((2, 2), 1.5, "<f4").view("<u4")
    lora = adapter_of("peft", {"m": (16, 24)}, "Float32", 2, bits)
    if is_dora:
        lora["base_model.model.m.lora_magnitude_vector"] = words(np.ones(16), "Float32")
    stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "use_dora": is_dora}
    if world().rank == 0:
        reference_forms.write_huggingface(tmp / "src", base, 2)
        tensors = {n: ("Float32", a) for n, a in lora.items()}
        reference.write_safetensors(tmp / "lora" / "adapter_model.safetensors", tensors)
        (tmp / "lora" / "adapter_config.json").write_text(json.dumps(stated))
    world().Barrier()
    as_nodes(monkeypatch, 2, 0)
    find_reach = copies.find_reach

    def reach_of(team, paths, *others):
        reach, findings = find_reach(team, paths, *others)
        is_private = f"/{private}/" in str(next(iter(paths.values())))
        return (reach, findings) if is_private else (Reach.full(reach.node, paths), findings)

    monkeypatch.setattr(copies, "find_reach", reach_of)
    options = {"dst_form": "huggingface", "dtype": "bf16", "lora": str(tmp / "lora")}
    with pytest.raises(RankxformError, match=f"--lora: .*{kind}.*not (all|every) process"):
        rankxform.transform(tmp / "src", tmp / "dst", comm=world(), **options)


@pytest.mark.world(sizes=(2, 3))
@pytest.mark.parametrize("seed", range(3))
def test_operands_of_unequal_size_leave_all_processes_the_same_tiles(seed, tmp, monkeypatch):
    """Each process makes another stage, of which one has a much larger adapter than the other."""
    bits = np.random.default_rng(seed)
    shapes = {"up": (2048, 256), "down": (256, 256), "mid": (1024, 256)}
    arrays = {f"{n}.weight": words(bits.normal(0, 1, s), "Float32") for n, s in shapes.items()}
    lora = adapter_of("mcore", shapes, "Float32", 64, bits)
    names = [f"{n}.weight" for n in shapes]
    rows = [dict.fromkeys(names, ([4], [0, -1], 0, 0))]
    columns = [{name: ([2], [-1, 0], 0, 0)} for name in names]
    if world().rank == 0:
        for place, tensors, some in ((tmp / "src", arrays, rows), (tmp / "lora", lora, None)):
            params = {n: (one.shape, "Float32") for n, one in tensors.items()}
            reference.write_checkpoint(
                place, some, params, None, "safetensors",
                make=lambda name, shape, dtype, tensors=tensors: tensors[name],
            )  # fmt: skip
        reference.write_strategy(tmp / "a.ckpt", rows)
        reference.write_stage_files(tmp / "b", columns)
    world().Barrier()
    options = {"lora": str(tmp / "lora"), "lora_strategy": "none", "lora_alpha": 1, "lora_rank": 64,
               "read_method": "two-phase", "fsync": False}  # fmt: skip
    from mpi4py import MPI

    if world().rank == 0:
        rankxform.transform(
            tmp / "src", tmp / "one", tmp / "a.ckpt", tmp / "b", comm=MPI.COMM_SELF, **options
        )
    world().Barrier()
    as_nodes(monkeypatch, 2, seed)
    rankxform.transform(
        tmp / "src", tmp / "dst", tmp / "a.ckpt", tmp / "b", memory=2 << 20, comm=world(), **options
    )
    for path in (tmp / "one").rglob("*.safetensors"):
        assert (tmp / "dst" / path.relative_to(tmp / "one")).read_bytes() == path.read_bytes()


@pytest.mark.filterwarnings("ignore:.*beside .* that it has:rankxform.RankxformWarning")
@pytest.mark.filterwarnings("ignore:.*stays as it is:rankxform.RankxformWarning")
@pytest.mark.world(sizes=(1, 2))
@pytest.mark.parametrize("fill", ["zeros", "repeat-last"])
def test_a_vocabulary_gets_padding_and_loses_it_again(fill, tmp):
    bits = np.random.default_rng(2)
    names = ["embedding.word_embeddings.weight", "output_layer.weight", "other.weight"]
    arrays = {n: bits.integers(1, 1 << 16, (40, 6)).astype("<u2") for n in names}
    arrays |= {f"adam_m.{n}": arrays[n] + np.uint16(1) for n in names}
    types = dict.fromkeys(arrays, "BFloat16")
    params = {n: ((48 if "other" not in n else 40, 6), "BFloat16") for n in arrays}
    if world().rank == 0:
        a = write(tmp, arrays, types, 4, 1, 5, ("adam_m.",))
        layouts = random_strategy(params, 8, 1, 6)
        reference.write_stage_files(tmp / "wide", layouts)
    world().Barrier()
    a, b = str(tmp / "strategy"), str(tmp / "wide")
    options = {"comm": world(), "fsync": False}
    report = rankxform.transform(
        tmp / "src", tmp / "dst", a, b, vocab=48, vocab_fill=fill, format="safetensors",
        verify=True, **options,
    )  # fmt: skip
    assert any("--vocab: other.weight: the shape is" in text for text in report.warnings)
    if world().rank == 0:

        def padded(name, shape, dtype):
            more = np.zeros((shape[0] - 40, 6), "<u2")
            if fill == "repeat-last" and not name.startswith("adam"):
                more = np.repeat(arrays[name][-1:], shape[0] - 40, 0)
            return np.concatenate([arrays[name], more])

        assert (
            reference.wrong_slices(tmp / "dst", layouts, params, "safetensors", make=padded) == []
        )
    world().Barrier()
    rankxform.transform(tmp / "dst", tmp / "back", b, vocab=40, dst_form="huggingface", **options)
    found = whole(tmp / "back")
    assert {n: a.tobytes() for n, (_, a) in found.items()} == {
        n: a.tobytes() for n, a in arrays.items()
    }
    with pytest.raises(RankxformError, match="rows 39 to 47 are not padding"):
        rankxform.transform(tmp / "dst", tmp / "no", b, vocab=39, comm=world())
    rankxform.transform(tmp / "src", tmp / "cut", a, vocab=39, vocab_cut=True, **options)


@pytest.mark.filterwarnings("ignore:.*beside .* that it has:rankxform.RankxformWarning")
@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("method", ["auto", "two-phase"])
def test_ranks_of_nothing_but_padding_get_zeros(method, tmp):
    bits = np.random.default_rng(9)
    array = bits.integers(1, 1 << 16, (12, 6)).astype("<u2")
    layouts = [{"lm_head.weight": ([8], [0, -1], 0, 0)}]
    if world().rank == 0:
        reference_forms.write_huggingface(tmp / "src", {"lm_head.weight": ("BFloat16", array)})
        reference.write_stage_files(tmp / "strategy", layouts)
    world().Barrier()
    options = {"vocab": 64, "read_method": method, "comm": world()}
    b = str(tmp / "strategy")
    for dtype in (None, "fp32"):
        params = {"lm_head.weight": ((64, 6), "Float32" if dtype else "BFloat16")}
        want = np.zeros((64, 6), "<u4" if dtype else "<u2")
        want[:12] = array.astype("<u4") << 16 if dtype else array
        if dtype:
            want[:12][np.isnan(want[:12].view("<f4"))] = 0x7FC00000
        dst = tmp / str(dtype)
        rankxform.transform(
            tmp / "src", dst, None, b, format="safetensors", fsync=False, verify=True, dtype=dtype,
            **options,
        )  # fmt: skip
        if world().rank == 0:
            make = {"make": lambda n, s, d, own=want: own}
            assert reference.wrong_slices(dst, layouts, params, "safetensors", **make) == []
        assert rankxform.verify(tmp / "src", dst, None, b, dtype=dtype, **options).same
        rank = 1 + world().rank
        slices = rankxform.load(tmp / "src", None, b, rank=rank, dtype=dtype, **options)
        part = np.ascontiguousarray(slices["lm_head.weight"])
        assert part.tobytes() == want[8 * rank : 8 * rank + 8].tobytes()


@pytest.mark.filterwarnings("ignore:.*masters looked at", "ignore:.*have no master")
@pytest.mark.world(sizes=(1, 2))
def test_masters_take_the_place_of_parameters(tmp):
    bits = np.random.default_rng(4)
    arrays = {n: bits.integers(0, 1 << 16, (8, 6)).astype("<u2") for n in ("a", "b", "c")}
    types = dict.fromkeys(arrays, "BFloat16")
    for name in ("a", "b"):
        arrays[f"main_param.{name}"] = bits.integers(0, 1 << 32, (8, 6)).astype("<u4")
        types[f"main_param.{name}"] = "Float32"
    if world().rank == 0:
        write(tmp, arrays, types, 4, 1, 5, ("main_param.",))
    world().Barrier()
    rankxform.transform(
        tmp / "src", tmp / "dst", tmp / "strategy", dst_form="huggingface", masters=True,
        weights_only=True, fsync=False, comm=world(),
    )  # fmt: skip
    found = whole(tmp / "dst")
    assert {n: d for n, (d, _) in found.items()} == {
        "a": "Float32",
        "b": "Float32",
        "c": "BFloat16",
    }
    for name, own in (("a", "main_param.a"), ("b", "main_param.b"), ("c", "c")):
        assert found[name][1].tobytes() == arrays[own].tobytes()


def float8(code):
    """Return the value of an F8_E4M3 code, from its definition."""
    sign, exponent, mantissa = -1 if code & 128 else 1, (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    return sign * ((8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9)


@pytest.mark.world(sizes=(1, 2))
@pytest.mark.parametrize("method", ["auto", "two-phase"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_blocks_of_8_bit_floats_are_multiplied_by_their_factors(method, nodes, tmp, monkeypatch):
    bits = np.random.default_rng(6)
    codes = bits.integers(0, 256, (200, 300)).astype("u1")
    codes[(codes & 0x7F) == 0x7F] = 1
    scales = bits.uniform(1e-3, 2, (2, 3)).astype("<f4")
    tensors = {
        "m.weight": ("F8_E4M3", codes),
        "m.weight_scale_inv": ("Float32", scales.view("<u4")),
        "norm": ("BFloat16", codes[:, 0].astype("<u2")),
    }
    params = {"m.weight": ((200, 300), "BFloat16"), "norm": ((200,), "BFloat16")}
    layouts = random_strategy(params, 4, 1, 3)
    if world().rank == 0:
        reference_forms.write_huggingface(tmp / "src", tensors, files=2)
        reference.write_stage_files(tmp / "strategy", layouts)
    world().Barrier()
    if nodes <= world().size:
        as_nodes(monkeypatch, nodes, 1)
    options = {"dtype": "bf16", "comm": world(), "read_method": method}
    b = tmp / "strategy"
    rankxform.transform(
        tmp / "src", tmp / "dst", None, b, format="safetensors", fsync=False, verify=True, **options
    )
    assert rankxform.verify(tmp / "src", tmp / "dst", None, b, **options).same
    if world().rank == 0:
        table = np.array([float8(n) for n in range(256)], "<f4")
        factors = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :300]
        want = {"m.weight": words(table[codes] * factors, "BFloat16"), "norm": tensors["norm"][1]}
        assert (
            reference.wrong_slices(
                tmp / "dst", layouts, params, "safetensors", make=lambda n, s, d: want[n]
            )
            == []
        )
