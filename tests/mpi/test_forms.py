"""Every form to every other, over random models, at several numbers of processes."""

from __future__ import annotations

import os
import random
from itertools import count, islice, product

import pytest

import rankxform
from tests import reference, reference_forms
from tests.cases import random_case
from tests.mpi_launch import world
from tests.reference_forms import FORMS, SHARDED

OWN = ("ranks", "checkpoint2", "unified", "huggingface")
STATED = ("checkpoint2", "unified")
"""Source and destination, of which the one states what the other keeps as tensors."""
DISTRIBUTED = ("dcp", "hyperparallel")
MODELS, FEWER = 10, 4
"""With one process, and with several; RANKXFORM_MODELS is for all. Ten models take 99.5 % of the
branches that 25 take."""


def with_states(case, seed):
    """Return a case with optimizer states, a tied embedding, and a strategy on both sides."""
    rng = random.Random(seed)
    for name in list(case.params):
        if rng.random() < 0.5:
            for state in ("adam_m.", "adam_v."):
                case.params[state + name] = case.params[name]
                for stage in (*case.src, *case.dst):
                    if name in stage:
                        stage[state + name] = stage[name]
    name = next(n for n in case.src[0] if "." in n and not n.startswith("adam"))
    if rng.random() < 0.5:
        for stages in (case.src, case.dst):
            own = next(stage[name] for stage in stages if name in stage)
            stages[0][name] = stages[-1][name] = own  # tied
    return case


def models():
    """Yield (seed, case) whose layouts every form can state."""
    for seed in count():
        case = with_states(random_case(seed, mindspore_agrees=False, whole=False), seed)
        if all(reference_forms.can_be_2(stages, case.params) for stages in (case.src, case.dst)):
            yield seed, case


@pytest.fixture(scope="module")
def cases():
    number = os.environ.get("RANKXFORM_MODELS", MODELS if world().size == 1 else FEWER)
    return list(islice(models(), int(number)))


def strategies(case, tmp):
    """Write both strategies; return them."""
    return (
        reference.write_stage_files(tmp / f"{side}_strategy", stages)
        for side, stages in (("src", case.src), ("dst", case.dst))
    )


def converted(src, dst, seed, case, here):
    """Convert a case from one form to another, and see that nothing is wrong."""
    if world().rank == 0:
        reference_forms.write_any(src, here / "src", case, seed)
        list(strategies(case, here))
    world().Barrier()
    a = str(here / "src_strategy") if src == "ranks" else None
    is_sharded = dst in ("ranks", "checkpoint2") or (dst in SHARDED and seed % 2)
    b = str(here / "dst_strategy") if is_sharded else None
    options = {
        "huggingface": {"max_shard": (1 << 30, 5000)[seed % 2]},
        "unified": {"max_part": (1 << 30, 5000)[seed % 2]},
        "checkpoint2": {"dedup": seed % 2 == 1, "prefix": ("", "llm")[seed % 3 == 0]},
        "dcp": {} if seed % 2 else {"max_part": 5000},
        "hyperparallel": {"iteration": seed} if seed % 2 else {"max_part": 5000},
        "ranks": {"format": "safetensors"},
    }[dst]
    told = {"read_method": ("auto", "two-phase")[seed % 5 == 0], "comm": world()}
    rankxform.transform(
        here / "src", here / "dst", a, b, dst_form=dst, fsync=False, verify=True,
        memory=(1 << 20, 64 << 20)[seed % 2], **options, **told,
    )  # fmt: skip
    wrong = []
    if world().rank == 0:
        lost = case.extras if src == "checkpoint2" and seed % 3 == 0 else ()
        more = reference_forms.counters(case, lost) if (src, dst) == STATED else {}
        wrong = reference_forms.wrong_in(dst, here / "dst", case, lost, more)
    assert world().bcast(wrong) == [], (seed, src, dst)
    assert rankxform.verify(here / "dst", comm=world()).same, seed
    own = b if dst == "ranks" or dst in DISTRIBUTED else None
    assert rankxform.verify(here / "src", here / "dst", a, own, **told).same, seed


@pytest.mark.sampled
@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize(("src", "dst"), list(product(OWN, OWN)))
def test_every_form_to_every_other(src, dst, cases, tmp):
    for seed, case in cases:
        converted(src, dst, seed, case, tmp / str(seed))


@pytest.mark.world(sizes=(1, 3))
def test_distributed_checkpoints_to_every_form_and_back(cases, tmp):
    pairs = [(a, b) for a, b in product(FORMS, FORMS) if {a, b} & {*DISTRIBUTED}]
    for number, (src, dst) in enumerate(pairs):
        seed, case = cases[number % len(cases)]
        converted(src, dst, seed, case, tmp / f"{src} {dst} {seed}")


@pytest.mark.sampled
@pytest.mark.world(sizes=(1, 3))
@pytest.mark.parametrize("seed", range(8))
def test_through_any_three_forms_and_back(seed, cases, tmp):
    _, case = cases[seed % len(cases)]
    rng = random.Random(seed)
    if world().rank == 0:
        reference_forms.write_any("ranks", tmp / "0", case)
        list(strategies(case, tmp))
    world().Barrier()
    a, b = str(tmp / "src_strategy"), str(tmp / "dst_strategy")
    before, of = tmp / "0", a
    for number, form in enumerate([*rng.choices(FORMS, k=3), "ranks"], 1):
        to = (a if number == 4 else b) if form == "ranks" or form in SHARDED else None
        after = tmp / str(number)
        rankxform.transform(
            before, after, of, to, dst_form=form, fsync=False, comm=world(),
            **({"format": "safetensors"} if form == "ranks" else {}),
        )  # fmt: skip
        before, of = after, to if form == "ranks" else None
    wrong = reference.wrong_slices(tmp / "4", case.src, case.params, "safetensors")
    assert wrong == []
