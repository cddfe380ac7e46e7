"""Derived strategies against the compiler's own files; tests/data/derive/verdicts.txt says which
pairs are derivable, and from what."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rankxform.derivation import rules
from rankxform.derivation.derive import derive
from rankxform.derivation.mesh import Parallel, parse_parallel
from rankxform.derivation.request import DeriveRequest, Extent
from rankxform.derivation.rules import parse_rule, rule_of
from rankxform.derivation.stages import StageLayers
from rankxform.errors import DerivationError, UsageError
from rankxform.layout.layout import Layout
from rankxform.layout.states import state_of_name
from rankxform.layout.strategy import Strategy
from tests.compiled import (
    COMPILED,
    DERIVE,
    compare,
    from_preset,
    on_same_mesh,
    pairs,
    same_mesh,
    strictly,
    with_facts,
)

BY_NAME = {str(one): one for one in COMPILED}
WAYS = {"strict": strictly, "facts": with_facts, "same": on_same_mesh}


def expected():
    found = {}
    for line in (DERIVE / "verdicts.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            src, dst, *verdicts = line.split()
            found[src, dst] = dict(zip(WAYS, verdicts))
    return found


EXPECTED = expected()


def verdict(given, wanted):
    try:
        return compare(derive(given).strategy, wanted)
    except DerivationError:
        return "refused"


def test_the_table_of_verdicts_is_of_all_pairs():
    assert set(EXPECTED) == {(str(src), str(dst)) for src, dst in pairs()}


@pytest.mark.sampled
@pytest.mark.parametrize(("src", "dst"), EXPECTED, ids=[f"{a}->{b}" for a, b in EXPECTED])
def test_a_derived_strategy_is_the_compilers(src, dst):
    a, b = BY_NAME[src], BY_NAME[dst]
    for way, wanted in EXPECTED[src, dst].items():
        if wanted == "-":
            assert not same_mesh(a, b)
            continue
        found = verdict(WAYS[way](a, b), b.strategy)
        assert found.split(":")[0] == wanted, f"{way}: {found}"


def test_no_derivation_is_wrong_where_the_program_is_the_same():
    """Of other programs nothing in the source tells; they are in the table to be seen."""
    wrong = [
        pair
        for pair, found in EXPECTED.items()
        if BY_NAME[pair[0]].program == BY_NAME[pair[1]].program and "differs" in found.values()
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [str(one) for one in COMPILED if "preset" in one.facts])
def test_a_preset_alone_gives_every_entry(name):
    one = BY_NAME[name]
    found = derive(from_preset(one)).strategy
    assert compare(found, one.strategy) == "exact"
    assert [set(layouts) for layouts in found.stages] == [set(s) for s in one.strategy.stages]


def other_sizes(sizes):
    """Yield every other way to state as many ranks, with and without experts."""
    ranks = sizes.ranks
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for dp in divisors:
        for mp in divisors:
            for cp in divisors:
                if ranks % (dp * mp * cp) == 0:
                    for ep in {1, 2, sizes.ep}:
                        one = replace(sizes, dp=dp, mp=mp, cp=cp, ep=ep, pp=ranks // (dp * mp * cp))
                        if one != sizes:
                            yield one


MISSTATED = ("transformer", "resilience", "llama2_7b", "deepseek_tiny", "small", "tied", "wide")


@pytest.mark.sampled
@pytest.mark.parametrize("family", MISSTATED)
def test_misstated_sizes_are_refused_or_change_nothing(family):
    """Every other product of dp, mp and pp is refused, even with all that a user can say.

    A product of dp and cp gives the boxes of any other, and experts may be stated of a network
    without them; these are refused, or what is derived is right.
    """
    asked = 0
    for src in (one for one in COMPILED if one.family == family):
        same = [one for one in COMPILED if one.family == family and one.program == src.program]
        small = len(src.strategy.stages_of) < 500
        for sizes in other_sizes(src.sizes):
            plain = (sizes.cp, sizes.ep) == (src.sizes.cp, src.sizes.ep)
            for dst in same if plain and small else same[:2]:
                found = verdict(replace(with_facts(src, dst), src=sizes), dst.strategy)
                assert found == "refused" or (not plain and found in ("exact", "boxes")), sizes
                asked += plain
    assert asked


def mutated(strategy, name, layout):
    """Return a strategy with another layout of a parameter and its states."""
    stages = tuple(
        {
            n: layout if n == name or getattr(state_of_name(n), "parameter", None) == name else one
            for n, one in layouts.items()
        }
        for layouts in strategy.stages
    )
    return replace(strategy, stages=stages)


class TestMutations:
    src = BY_NAME["llama2_7b:dp2mp4_opt"]
    dst = BY_NAME["llama2_7b:mp2pp2"]

    @property
    def given(self):
        return with_facts(self.src, self.dst)

    def refused(self, given):
        with pytest.raises(DerivationError) as caught:
            derive(given)
        return str(caught.value)

    def test_nothing_is_refused_as_it_is(self):
        assert derive(self.given).strategy.derived

    def test_two_rules_with_each_others_specs(self):
        preset = self.given.preset
        sharded = [one for one in preset.rules if one.spec in ((("mp",), ()), ((), ("mp",)))]
        for rule in sharded:
            if rule.replicated_if:
                continue
            swapped = tuple(replace(one, spec=one.spec[::-1]) if one is rule else one
                            for one in preset.rules)  # fmt: skip
            text = self.refused(replace(self.given, preset=replace(preset, rules=swapped)))
            assert "contradicts the source" in text

    def test_a_rule_with_the_other_optimizer_flag(self):
        preset = self.given.preset
        for rule in preset.rules:
            if rule.spec == ((),) or rule.optimizer is None:
                continue  # norms are below the threshold: either flag gives the same
            rules = tuple(replace(one, optimizer=not one.optimizer) if one is rule else one
                          for one in preset.rules)  # fmt: skip
            text = self.refused(replace(self.given, preset=replace(preset, rules=rules)))
            assert "contradicts the source" in text

    @pytest.mark.parametrize(
        ("name", "layout"),
        [
            ("model.layers.3.attention.wq.weight", Layout((2, 4), ((), (0,)), 4, -1)),
            ("model.layers.3.attention.wq.weight", Layout((2, 4), ((1,), ()), 1, -1)),
            ("model.layers.3.attention.wo.weight", Layout((2, 4), ((), ()), 1, -1)),
            ("model.layers.3.attention.wo.weight", Layout((2, 2, 2), ((), (0,)), 2, -1)),
            ("model.layers.0.ffn_norm.weight", Layout((2, 4), ((0,),))),
        ],
    )
    def test_one_entry_of_the_source_changed(self, name, layout):
        source = mutated(self.src.strategy, name, layout)
        assert name in self.refused(replace(self.given, source=source))

    def test_a_state_that_is_sharded_unlike_its_parameter(self):
        stage = {**self.src.strategy.stages[0]}
        stage["adam_m.lm_head.weight"] = Layout((2, 4), ((0,), ()))
        text = self.refused(replace(self.given, source=replace(self.src.strategy, stages=(stage,))))
        assert "adam_m.lm_head.weight" in text

    def test_an_unknown_name(self):
        stage = {**self.src.strategy.stages[0], "model.adapter.weight": Layout((2, 4), ((0,), ()))}
        text = self.refused(replace(self.given, source=replace(self.src.strategy, stages=(stage,))))
        assert "has no rule for it" in text
        assert "model.adapter.weight" in text

    def test_a_shape_of_another_network(self):
        extents = dict(self.src.extents)
        name = "model.layers.5.feed_forward.w2.weight"
        extents[name] = Extent(extents[name].shape[::-1], extents[name].nbytes)
        assert name in self.refused(replace(self.given, extents=extents))


def simple(layouts, sizes, dst, extents=None, **more):
    """Return a question about a strategy of one stage, of parameters of 128 x 128 or 128."""
    if extents is None:
        extents = {n: Extent((128,) * len(one.tensor_map), 1 << 20) for n, one in layouts.items()}
    source = Strategy((layouts,), next(iter(layouts.values())).ranks, "S")
    return DeriveRequest(source, parse_parallel(dst, "dst"), parse_parallel(sizes, "src"),
                 extents=extents, **more)  # fmt: skip


ROWS, COLUMNS = ((0,), ()), ((), (0,))


def placed(layers=None, counts=(), **stages):
    """What a rules file says of the pipeline: the stage of the parameters that match."""
    rules = (rule_of({"names": n, "stage": where}, "a rule") for n, where in stages.items())
    return StageLayers(layers, counts, placed=tuple(rules))


class TestRefusals:
    """Each refusal names its answer, and the answer is taken."""

    def refused(self, given, *texts):
        with pytest.raises(DerivationError) as caught:
            derive(given)
        for text in texts:
            assert text in str(caught.value)
        return str(caught.value)

    def test_all_reasons_are_given_at_once(self):
        layouts = {"a.w": Layout((8,), ((), ()), 1, -1), "b.w": Layout((8,), ((), ()))}
        text = self.refused(simple(layouts, "dp=8", "dp=2,mp=2,pp=2"), "for 3 reasons")
        for option in ("--rule", "--preset FILE.toml", "--optimizer-shard"):
            assert option in text

    def test_sizes_that_are_not_the_strategys(self):
        layouts = {"w": Layout((2, 4), ROWS)}
        self.refused(simple(layouts, "dp=4,mp=4", "dp=2"), "8 ranks", "16 ranks", "--src-parallel")

    def test_an_axis_that_cannot_be_seen_is_answered_by_a_rule(self):
        layouts = {"w": Layout((8,), ((), ()))}
        given = simple(layouts, "dp=8", "dp=2,mp=4", predict=True)
        self.refused(given, "mp is 1 in the source", "--rule")
        for text, tensor_map in (("w=(tp, None)", ROWS), ("w=(None, tp)", COLUMNS)):
            found = derive(replace(given, rules=(parse_rule(text),))).strategy
            assert found.stages[0]["w"] == Layout((2, 4), tensor_map)

    def test_a_network_with_rules_of_its_own(self):
        layouts = {"w": Layout((2, 2, 2), ((), (1,))), "v": Layout((2, 4), ROWS)}
        given = simple(layouts, "dp=2,mp=4", "dp=4,mp=2", predict=True)
        self.refused(given, "fits no mesh of dp=2,mp=4", "--dst-parallel same")
        kept = derive(replace(given, keep_mesh=True, src=None)).strategy
        assert kept.stages[0] == layouts

    def test_experts_that_look_like_tensor_parallel(self):
        layouts = {"w": Layout((2, 2), ROWS), "experts.w": Layout((2, 2), ROWS),
                   "x": Layout((2, 1, 2), ROWS)}  # fmt: skip
        given = simple(layouts, "dp=2,mp=2,ep=2", "dp=1,mp=2,ep=1", predict=True)
        self.refused(given, "tuple(mp, None) or expert(ep, None)")
        rules = (parse_rule("experts=expert"), parse_rule("^w=tuple"))
        found = derive(replace(given, rules=rules)).strategy.stages[0]
        assert found["experts.w"].counts == (1, 1)
        assert found["w"].counts == (2, 1)

    def test_an_optimizer_that_is_not_stated(self):
        layouts = {"w": Layout((2, 4), ROWS, 4, -1)}
        given = simple(layouts, "dp=2,mp=4", "dp=4,mp=2")
        self.refused(given, "--optimizer-shard on")
        for shard, size in ((False, 0), (True, -1), (2, 2)):
            dst = replace(given.dst, optimizer_shard=shard)
            assert derive(replace(given, dst=dst)).strategy.stages[0]["w"].opt_size == size

    def test_a_parameter_whose_part_in_the_optimizer_is_not_visible(self):
        layouts = {"w": Layout((2, 4), ROWS), "v": Layout((2, 4), ROWS)}
        given = simple(layouts, "dp=2,mp=4", "dp=4,mp=2")
        given = replace(given, dst=replace(given.dst, optimizer_shard=True))
        self.refused(given, "--opt-on REGEX or --opt-off REGEX")
        said = replace(given, opt_on=(re.compile("w"),), opt_off=(re.compile("v"),))
        found = derive(said).strategy.stages[0]
        assert (found["w"].opt_shards, found["v"].opt_shards) == (4, 1)

    def test_the_users_word_against_what_the_source_shows(self):
        layouts = {"w": Layout((2, 4), ROWS, 4, -1)}
        given = simple(layouts, "dp=2,mp=4", "dp=4,mp=2", opt_off=(re.compile("w"),))
        given = replace(given, dst=replace(given.dst, optimizer_shard=True))
        self.refused(given, "contradicts the source")

    def test_shapes_that_decide_and_are_not_known(self):
        layouts = {"w": Layout((2, 4), ROWS, 4, -1)}
        given = simple(layouts, "dp=2,mp=4", "dp=4,mp=2", extents={})
        given = replace(given, dst=replace(given.dst, optimizer_shard=True))
        self.refused(given, "--shapes")

    def test_a_source_threshold_that_cannot_be(self):
        layouts = {"w": Layout((2, 4), ROWS, 4, -1)}
        small = {"w": Extent((128, 128), 1 << 15)}
        given = simple(layouts, "dp=2,mp=4", "dp=4,mp=2", extents=small)
        given = replace(given, dst=replace(given.dst, optimizer_shard=True))
        self.refused(given, "--src-threshold")
        src = replace(given.src, threshold=32)
        assert derive(replace(given, src=src)).strategy.stages[0]["w"] == Layout((4, 2), ROWS)

    def test_a_dimension_that_does_not_divide(self):
        layouts = {"w": Layout((2, 4), ROWS)}
        extents = {"w": Extent((12, 8), 1 << 20)}
        given = simple(layouts, "dp=2,mp=4", "dp=1,mp=8", extents=extents, predict=True)
        self.refused(given, "axis 0 of shape [12, 8] does not divide by 8")

    def test_context_parallel_that_grows(self):
        layouts = {"w": Layout((2, 4), ROWS)}
        given = simple(layouts, "dp=2,mp=4", "dp=1,mp=4,cp=2", predict=True)
        self.refused(given, "--unsharded cp")
        found = derive(replace(given, unsharded=frozenset({"cp"}))).strategy
        assert found.stages[0]["w"] == layouts["w"]

    def test_what_may_be_a_vocabulary(self):
        layouts = {"w": Layout((2, 4), ROWS), "embed": Layout((2, 4), ((), ()))}
        given = simple(layouts, "dp=2,mp=4", "dp=4,mp=2", predict=True)
        self.refused(given, "embed", "vocab_emb_dp=true or vocab_emb_dp=false")
        dst = replace(given.dst, vocab_emb_dp=True)
        self.refused(replace(given, dst=dst), "not stated in the source and true")
        both = replace(given, dst=dst, src=replace(given.src, vocab_emb_dp=True))
        assert derive(both).strategy.stages[0]["embed"] == Layout((4, 2), ((), ()))

    def test_a_table_that_two_stages_share(self):
        stages = (
            {"embed": Layout((2,), ((), ()), 1, -1), "h.0.w": Layout((2,), ((), ()), 1, -1)},
            {"embed": Layout((2,), ((), ()), 1, -1), "h.1.w": Layout((2,), ((), ()), 1, -1)},
        )
        extents = {n: Extent((128, 128), 1 << 20) for some in stages for n in some}
        given = DeriveRequest(Strategy(stages, 2, "S"), Parallel(dp=4, pp=2, optimizer_shard=True),
                      Parallel(dp=2, pp=2), extents=extents)  # fmt: skip
        self.refused(given, "shared by two pipeline stages", "--opt-on")
        found = derive(replace(given, opt_on=(re.compile("embed"),))).strategy
        assert [some["embed"].opt_shards for some in found.stages] == [4, 4]

    def test_what_pipeline_stage_is_not_known(self):
        layouts = {name: Layout((2,), ((), ())) for name in ("e", "h.0.w", "h.1.w", "f")}
        given = simple(layouts, "dp=2", "dp=1,pp=2", predict=True)
        self.refused(given, "stage = 'first'")
        places = placed(e="first", f="last")
        found = derive(replace(given, places=places)).strategy
        assert [list(some) for some in found.stages] == [["e", "h.0.w"], ["h.1.w", "f"]]

    def test_layers_that_do_not_spread(self):
        layouts = {f"h.{n}.w": Layout((2,), ((), ())) for n in range(5)}
        given = simple(layouts, "dp=2", "dp=1,pp=2", predict=True)
        self.refused(given, "5 layers do not spread over 2 stages", "--layers-per-stage")
        found = derive(replace(given, places=StageLayers(counts=(1, 4)))).strategy
        assert [len(some) for some in found.stages] == [1, 4]

    def test_an_embedding_in_uneven_rows(self):
        layouts = {"w": Layout((2, 2), ROWS, split_rows=(3, 5), split_offsets=(0, 3))}
        self.refused(simple(layouts, "dp=2,mp=2", "dp=1"), "uneven rows")
        kept = simple(layouts, "dp=2,mp=2", "dp=4", keep_mesh=True)
        assert derive(kept).strategy.stages[0] == layouts
        on = replace(kept, dst=replace(kept.dst, optimizer_shard=True))
        self.refused(on, "uneven rows")

    def test_a_stage_that_would_be_empty_or_less(self):
        layouts = {name: Layout((2,), ((), ())) for name in ("h.0.w", "h.1.w", "e")}
        given = simple(layouts, "dp=2", "dp=1,pp=2", predict=True)
        for counts, text in (
            ((2, 0), "stage 1 would hold no parameter"),
            ((3, -1), "a negative number"),
        ):
            self.refused(replace(given, places=placed(counts=counts, e="first")), text)
        one = replace(given, dst=Parallel(), places=StageLayers(counts=(1, 1)))
        self.refused(one, "--layers-per-stage lists several stages")

    def test_two_lists_that_the_stages_divide(self):
        layout = Layout((2,), ((), ()))
        stages = tuple(
            {f"{list_}.{n}.w": layout for list_ in ("model.h", "trace.model.h") for n in some}
            for some in ((0, 1), (2, 3))
        )
        given = DeriveRequest(Strategy(stages, 2, "S"), Parallel(dp=2, pp=4), Parallel(dp=2, pp=2),
                      predict=True)  # fmt: skip
        self.refused(given, "[preset] layers")
        self.refused(replace(given, places=StageLayers(layers="model.h")), "trace.model.h.*.w",
                     "several pipeline stages divide another list")  # fmt: skip

    def test_layers_within_a_numbered_container(self):
        names = ("net.0.table", *(f"net.1.h.{n}.w" for n in range(4)), "net.2.gamma", "net.3.w")
        layouts = {name: Layout((2,), ((), ())) for name in names}
        given = simple(layouts, "dp=2", "dp=1,pp=2", predict=True)
        self.refused(given, "there is net or net.1.h")
        places = placed(layers="net.1.h", table="first", **{r"net\.[23]": "last"})
        found = derive(replace(given, places=places)).strategy
        assert [list(some) for some in found.stages] == [list(names[:3]), list(names[3:])]

    def test_experts_that_are_numbered_are_no_layers(self):
        names = [f"h.{n}.experts.{e}.w" for n in range(2) for e in range(4)]
        layouts = {name: Layout((2,), ((), ())) for name in names}
        found = derive(simple(layouts, "dp=2", "dp=1,pp=2", predict=True)).strategy
        assert [list(some) for some in found.stages] == [names[:4], names[4:]]

    def test_a_source_threshold_that_was_not_stated(self):
        """A parameter without a shard may be below it, unless a smaller one has a shard."""
        layouts = {"a.w": Layout((4, 2), ROWS, 2, -1), "b.w": Layout((4, 2), ROWS)}
        for nbytes, known in ((1 << 18, False), (1 << 21, True)):
            extents = {"a.w": Extent((128, 128), 1 << 20), "b.w": Extent((128, 128), nbytes)}
            given = simple(layouts, "dp=4,mp=2", "dp=2,mp=4", extents=extents)
            given = replace(given, dst=replace(given.dst, optimizer_shard=True))
            if known:
                assert derive(given).strategy.stages[0]["b.w"].opt_shards == 1
            else:
                self.refused(given, "--opt-on REGEX")
        src = replace(given.src, threshold=64)
        given = replace(given, src=src, extents=extents)
        assert derive(given).strategy.stages[0]["b.w"].opt_shards == 1

    def test_more_expert_ranks_than_experts(self):
        one = BY_NAME["deepseek_tiny:dp4mp2ep4_ows2"]
        given = from_preset(one)
        wide = replace(given, dst=replace(given.dst, dp=256, ep=512))
        self.refused(wide, "256 experts do not divide by ep=512")

    def test_layers_of_which_some_hold_experts(self):
        names = ["h.0.attn", "h.0.mlp", *(f"h.{n}.{w}" for n in (1, 2, 3)
                                          for w in ("attn", "experts.0.w", "experts.1.w"))]  # fmt: skip
        layouts = {name: Layout((2,), ((), ())) for name in names}
        found = derive(simple(layouts, "dp=2", "dp=1,pp=2", predict=True)).strategy
        assert [len(some) for some in found.stages] == [5, 6]

    def test_what_is_said_of_other_parameters_leaves_the_layers_where_they_are(self):
        layout = Layout((2,), ((), ()))
        stages = ({"e": layout, "h.0.w": layout}, {f"h.{n}.w": layout for n in (1, 2, 3)})
        given = DeriveRequest(Strategy(stages, 2, "S"), Parallel(dp=2, pp=2), Parallel(dp=2, pp=2),
                      predict=True, places=placed(**{"^e": "last"}))  # fmt: skip
        found = derive(given).strategy
        assert [sorted(some) for some in found.stages] == [
            ["h.0.w"], ["e", "h.1.w", "h.2.w", "h.3.w"]
        ]  # fmt: skip

    def test_nothing_to_derive(self):
        self.refused(DeriveRequest(None, Parallel(dp=2)), "there is no parameter")


def test_what_the_source_shows_of_the_optimizers_shard_size():
    """A parameter without a shard takes no part only if its rows would have divided."""
    seen = {"a": Layout((4, 2), ROWS, 2, 4), "b": Layout((8,), ((),))}
    for rows, size, known in ((64, None, False), (60, 4, True)):
        layouts = dict(seen)
        if known:  # one that 8 ranks hold, in 4 shards, shows that the size is 4
            layouts["c"] = Layout((8,), ((),), 1, 4)
        extents = {"a": Extent((64, 8), 1 << 20), "b": Extent((rows,), 1 << 20),
                   "c": Extent((64,), 1 << 20)}  # fmt: skip
        given = simple(layouts, "dp=4,mp=2", "dp=2,mp=4", extents=extents)
        given = replace(given, dst=replace(given.dst, optimizer_shard=size or True))
        if known:
            assert derive(given).strategy.stages[0]["b"].opt_shards == 1
        else:
            with pytest.raises(DerivationError, match="--opt-on REGEX or --opt-off"):
                derive(given)


def test_a_configuration_that_states_the_layers_goes_before_the_source():
    stages = tuple({f"h.{n}.w": Layout((2,), ((), ())) for n in some} for some in ((0, 1, 2), (3,)))
    given = DeriveRequest(Strategy(stages, 2, "S"), Parallel(dp=2, pp=2), Parallel(dp=2, pp=2),
                  predict=True)  # fmt: skip
    found = derive(given)
    assert found.strategy.stages == stages
    assert "where the source has them" in " ".join(found.assumptions)
    assert found.assumptions[0].startswith("The destination's job has dp="), found.assumptions
    found = derive(replace(given, places=StageLayers(from_config=True)))
    assert [len(some) for some in found.strategy.stages] == [2, 2]


class TestRulesFiles:
    """A rules file of one's own may say how the pipeline divides a known network."""

    def test_what_is_said_goes_before_what_it_extends(self):
        text = b"""
            [preset]
            extends = "llama_legacy"
            offset = [0, 1, 0]
            interleave = 2
            [[rules]]
            names = "head"
            stage = "last"
            """
        own, llama = (
            rules.parse_rules(text, "own.toml", rules.load_preset),
            rules.load_preset("llama_legacy"),
        )
        assert own.rules[1:] == llama.rules and own.requires == llama.requires
        assert (own.layers, own.complete, own.proven) == (llama.layers, True, llama.proven)
        assert (own.offset, own.interleave) == ((0, 1, 0), 2)
        assert [rule.stage for rule in own.stage_rules] == ["last"] and llama.stage_rules == ()

    def test_the_layers_alone(self):
        own = rules.parse_rules(b"[preset]\nlayers = 'net.h'\n", "own.toml", rules.load_preset)
        assert own.layers == "net.h" and not own.complete and own.rules == ()

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("extends = 'other.toml'", "the name of a preset of rankxform's"),
            ("extends = 'nothing'", "there is no preset"),
            ("offset = ['1']", "offset: expected a number"),
            ("interleave = 0", "expected a number from 1 on"),
            ("version = 2", "expected [[rules]]"),
        ],
    )
    def test_what_it_cannot_say(self, text, why):
        with pytest.raises(UsageError, match=re.escape(why)):
            rules.parse_rules(f"[preset]\n{text}\n".encode(), "own.toml", rules.load_preset)
