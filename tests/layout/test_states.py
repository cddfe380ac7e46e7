"""Which tensors are states: by the rest of their names, for whole families."""

from __future__ import annotations

import pytest

from rankxform.layout.states import OPTIMIZER, find_states, may_relate

WEIGHTS = {"emb.table": (10, 8), "fc1.weight": (4, 8), "fc1.bias": (4,), "norm.gamma": (4,)}


def rows(shape):
    return shape[:-1] if len(shape) > 1 else (1,)


def columns(shape):
    return (*shape[:-2], *shape[-1:]) if len(shape) > 1 else (1,)


# What optimizers of MindSpore 2.10 and MindFormers 1.3 to 2.1 save, as their real train cells have
# it: `{}` is the parameter's name. A family's shapes follow from the parameter's.
OPTIMIZERS = {
    "Adam": ({"moment1.{}": None, "moment2.{}": None}, ("beta1_power", "beta2_power")),
    "Adam amsgrad": ({"moment1.{}": None, "moment2.{}": None, "vhat.{}": None}, ("beta1_power",)),
    "AdamWeightDecay": ({"adam_m.{}": None, "adam_v.{}": None}, ("learning_rate",)),
    "Lamb": ({"lamb_m.{}": None, "lamb_v.{}": None}, ()),
    "Momentum": ({"moments.{}": None}, ("momentum",)),
    "SGD": ({"accum.{}": None, "stat.{}": None}, ("momentum",)),
    "LARS": ({"moments.{}": None}, ("fake_lr", "fake_param")),
    "Adagrad": ({"accum.{}": None}, ()),
    "Adadelta": ({"accum.{}": None, "accum_update.{}": None}, ()),
    "FTRL": ({"moments.{}": None, "linear.{}": None}, ()),
    "RMSProp": ({"mean_square.{}": None, "moment.{}": None, "mean_grad.{}": None}, ()),
    "Rprop": ({"prev.{}": None, "step_size.{}": None}, ()),
    "ASGD": ({"ax_.{}": None, "mu_{}": lambda s: (), "eta_{}": lambda s: ()}, ()),
    "AdaFactor": (
        {
            "exp_avg.{}": None, "exp_avg_sq_row_{}": rows, "exp_avg_sq_col_{}": columns,
            "exp_avg_sq_{}": lambda s: (1,) if len(s) > 1 else s,
        },
        ("afactor_step", "Parameter$1"),
    ),
    "Came": (
        {
            "exp_avg.{}": None, "exp_avg_sq_row_{}": rows, "exp_avg_sq_col_{}": columns,
            "exp_avg_insta_row_{}": rows, "exp_avg_insta_col_{}": columns,
        },
        ("afactor_step",),
    ),
    "experimental Adam": (
        {"exp_avg.{}": None, "exp_avg_sq.{}": None, "max_exp_avg_sq.{}": None}, ("state_step",)
    ),
    "experimental ASGD": ({"ax.{}": None}, ("step_t",)),
    "experimental Adamax": ({"exp_avg.{}": None, "exp_inf.{}": None}, ("step_t",)),
    "mint SGD": ({"momentum_buf.{}": None}, ("step_t",)),
    "PmaAdamW": ({"adam_m.{}": None, "adam_v.{}": None, "pma_weight_ema.{}": None}, ()),
    "Muon": ({"muon_m.{}": None, "main_param.{}": None}, ()),
    "gradients": ({"accu_grads.{}": None}, ("scale_sense",)),
}  # fmt: skip
TORCH = {
    "Adadelta": ("square_avg", "acc_delta"), "Adagrad": ("sum",), "Adamax": ("exp_avg", "exp_inf"),
    "AdamW amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "ASGD": ("ax", "eta", "mu"),
    "NAdam": ("exp_avg", "exp_avg_sq", "mu_product"), "Rprop": ("prev", "step_size"),
    "RMSprop": ("square_avg", "grad_avg", "momentum_buffer"), "SGD": ("momentum_buffer",),
    "LBFGS": ("d", "H_diag", "prev_flat_grad"), "Adafactor": ("row_var", "col_var", "variance"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_that_an_optimizer_of_mindspore_saves_is_found(name):
    families, counters = OPTIMIZERS[name]
    shapes, states = {**WEIGHTS, "global_step": (1,), **dict.fromkeys(counters, ())}, {}
    for text, shape_of in families.items():
        for weight, shape in WEIGHTS.items():
            shapes[text.format(weight)] = shape if shape_of is None else shape_of(shape)
            states[text.format(weight)] = weight
    found = find_states(shapes)
    assert {n for n in shapes if found.is_weight(n)} == {*WEIGHTS}
    assert {n: found.base_name(n) for n in states} == states
    assert found.counters == {"global_step", *counters}
    assert not found.copies and not found.unrelated and not found.numbered
    renamed = {found.of(n).name_for("new." + weight) for n, weight in states.items()}
    assert renamed == {t.format("new." + w) for t in families for w in WEIGHTS}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("root", ["optimizer.", "app.optim.", "optimizer.0."])
def test_all_that_an_optimizer_of_torch_saves_is_found(name, root):
    model = root.removesuffix("0.").removesuffix("optimizer.").removesuffix("optim.") + "model."
    shapes = {model + weight: shape for weight, shape in WEIGHTS.items()}
    for weight in WEIGHTS:
        for kind in (*TORCH[name], "step"):
            shapes[f"{root}state.{weight}.{kind}"] = ()
    shapes[f"{root}param_groups.0.lr"] = None
    found = find_states(shapes)
    assert {n for n in shapes if found.is_weight(n)} == {model + weight for weight in WEIGHTS}
    kinds = {
        found.kind(f"{root}state.{weight}.{kind}") for weight in WEIGHTS for kind in TORCH[name]
    }
    assert kinds == {*TORCH[name]}
    assert found.base_name(f"{root}state.fc1.bias.step") == model + "fc1.bias"


@pytest.mark.parametrize("root", ["optimizer.", "chained_0.optimizer.", "chained_1.optimizer."])
def test_megatrons_states_are_found_below_any_root(root):
    shapes = {**WEIGHTS, **{f"{root}state.exp_avg.{n}": s for n, s in WEIGHTS.items()}}
    found = find_states(shapes)
    assert {n for n in shapes if found.is_weight(n)} == {*WEIGHTS}
    assert found.of(f"{root}state.exp_avg.fc1.bias").parameter == "fc1.bias"


def test_below_a_root_nothing_is_a_weight_whatever_its_shape():
    shapes = {"model.w": (4, 4), "fsdp_checkpoint.optimizers.w.exp_avg": (4, 4)}
    shapes |= {"fsdp_checkpoint.optimizers.history": (4, 4), "optim.state.other.sum": (9,)}
    found = find_states({**shapes, "fsdp_checkpoint.model.w": (4, 4)})
    assert {n for n in shapes if found.is_weight(n)} == {"model.w"}
    assert found.kind("fsdp_checkpoint.optimizers.history") == OPTIMIZER


LIKE_STATES = [
    "stat.pool.weight", "accum.fc.weight", "moments.conv.weight", "optimizer.fc.weight", "linear.w",
    "encoder.memory_cache.weight", "attn.kv_cache_scale", "mlp.expert_load_bias", "prev.gate",
    "optimizer.net.0.weight", "optim.embedding", "mu_law.weight", "eta_net.w", "layers.0.exp_avg",
    "vhat.w1", "step_size.w", "ax.weight", "adam_m.head.w", "pma_weight_net.w", "moment.encoder.w",
    "main_param.scale_net.w", "momentum.fc.weight", "global_step.embed", "learning_rate.net.weight",
    "loss_scale.head", "model.optimizer_0.fc.weight", "h.expert_load.weight", "key_cache.proj",
    "exp_avg.conv1.weight", "exp_avg_sq_net.w", "lamb_m.block.w", "muon_m.block.w", "accum_update.w1",
    "mean_square.pool", "square_avg", "grad_avg", "momentum_buffer", "layers.1.square_avg",
    "optimizers.gru.weight_ih", "optim_0.rnn.weight",
]  # fmt: skip


def test_forty_weights_that_are_named_like_states_are_weights():
    assert len(LIKE_STATES) == 40
    shapes = {**dict.fromkeys(LIKE_STATES, (3, 5)), "layers.0.w": (3, 5)}
    found = find_states(shapes)
    assert all(found.is_weight(name) for name in shapes) and not found.copies
    for name in LIKE_STATES:  # each of them alone, too
        assert find_states({name: (3, 5), "layers.0.w": (3, 5)}).is_weight(name), name


def test_counters_have_few_axes():
    found = find_states({"momentum": (4, 4), "global_step": (1,), "learning_rate": (100,)})
    assert found.counters == {"global_step", "learning_rate"}


def test_half_of_a_family_decides_for_all_of_it():
    shapes = {**WEIGHTS, **{f"adam_m.{n}": s for n, s in WEIGHTS.items()}}
    found = find_states({**shapes, "adam_m.head.weight": (10, 8)})  # tied: in no file
    assert found.base_name("adam_m.head.weight") == "head.weight" and not found.unrelated
    few = {
        "w": (2, 2),
        "stat.w": (2, 2),
        "accum.w": (2, 2),
        **{f"stat.net.{i}": (2, 2) for i in range(3)},
    }
    found = find_states(few)
    assert found.of("stat.w") and found.is_weight("stat.net.0")
    assert found.unrelated == {"stat.*": ("stat.net.0", "stat.net.1", "stat.net.2")}


def test_a_source_of_states_alone_has_weights():
    shapes = {f"adam_m.{n}": s for n, s in WEIGHTS.items()}
    assert all(find_states(shapes).is_weight(name) for name in shapes)
    listed = find_states({**shapes, **dict.fromkeys(WEIGHTS)})  # a strategy lists the parameters
    assert not any(listed.is_weight(name) for name in shapes)


def test_numbers_that_name_no_parameter_are_told():
    found = find_states({"w": (2, 2), "adam_m.0": (2, 2), "adam_m.1": (2, 2)})
    assert found.numbered == ("adam_m.0", "adam_m.1")
    found = find_states({"0": (2, 2), "adam_m.0": (2, 2)})
    assert not found.numbered and found.base_name("adam_m.0") == "0"
    assert find_states({"model.w": (2,), "optimizer.state.0.exp_avg": (2,)}).numbered


@pytest.mark.parametrize("prefix", ["ema.", "teacher.", "model_ema.module.", "visual."])
def test_what_repeats_all_parameters_is_a_copy_and_no_state(prefix):
    shapes = {**WEIGHTS, **{prefix + n: s for n, s in WEIGHTS.items()}}
    found = find_states(shapes)
    assert found.copies == {prefix: tuple(prefix + n for n in WEIGHTS)}
    assert all(found.is_weight(name) for name in shapes)
    assert found.related[prefix + "fc1.bias"].parameter == "fc1.bias"


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("repeated", [1.0, 0.6])
@pytest.mark.parametrize("is_larger", [False, True])
@pytest.mark.parametrize(
    "prefix", ["teacher.", "stat.", "moments.", "exp_avg.", "optimizer.state."]
)
def test_one_stage_tells_weights_as_all_do(prefix, stages, repeated, is_larger):
    """Of the others names are known, and no shapes; a larger teacher's weights are its own."""
    layers = {f"layers.{n}.{name}": shape for n in range(24) for name, shape in WEIGHTS.items()}
    shapes = layers | {
        f"{prefix}{name}": (2 * shape[0], *shape[1:]) if is_larger else shape
        for name, shape in layers.items()
        if int(name.split(".")[1]) % 10 < 10 * repeated
    }
    in_whole = find_states(shapes)
    assert bool(in_whole.copies) == (prefix in ("teacher.", "stat.") and not is_larger)
    for stage in range(stages):
        own = {
            n for n in shapes if int(n.split("layers.")[1].split(".")[0]) * stages // 24 == stage
        }
        in_stage = find_states({n: shape if n in own else None for n, shape in shapes.items()})
        assert {n: in_stage.of(n) for n in own} == {n: in_whole.of(n) for n in own}


def test_what_may_relate_by_name():
    assert may_relate(["w", "ema.w"]) and may_relate(["a.b.w", "w"]) and may_relate(["adam_m.w"])
    assert not may_relate(["layers.0.w", "layers.1.w", "norm.w"])


def test_three_copies_are_told_apart():
    shapes = {p + n: s for p in ("", "ema.", "target.", "old.") for n, s in WEIGHTS.items()}
    assert {*find_states(shapes).copies} == {"ema.", "target.", "old."}


def test_a_norm_of_a_block_is_no_copy_of_the_models():
    shapes = {"norm.weight": (8,), "head.weight": (9, 8), "emb.weight": (9, 8)}
    shapes |= {f"layers.{i}.{n}": (8,) for i in range(4) for n in ("norm.weight", "b")}
    shapes |= {f"layers.{i}.post.norm.weight": (8,) for i in range(4)} | {"mtp.norm.weight": (8,)}
    assert not find_states(shapes).copies


def test_an_ordinary_word_alone_names_a_module():
    """FTRL's `linear` goes with `moments`, ASGD's `mu_` with `ax_`: alone they are a layer's."""
    shapes = {"bias": (1,), "linear.weight": (1, 8), "linear.bias": (1,), "embedding.w": (8, 4)}
    assert all(find_states(shapes).is_weight(name) for name in shapes)
    heads = {"head.w": (4, 8), "head.b": (4,), "mu_head.w": (4, 8), "mu_head.b": (4,), "e": (8, 8)}
    assert all(find_states(heads).is_weight(name) for name in heads)


def test_a_module_that_is_called_optimizer_has_states():
    shapes = {
        "optimizer.w": (8, 4),
        "a.w": (4, 4),
        "adam_m.optimizer.w": (8, 4),
        "adam_m.a.w": (4, 4),
    }
    found = find_states(shapes)
    assert {n for n in shapes if found.is_weight(n)} == {"optimizer.w", "a.w"}


def test_below_a_root_a_states_word_tells():
    found = find_states({"net.w": (8, 4), "optimizer.exp_avg.w": (8, 4)})
    assert not found.is_weight("optimizer.exp_avg.w")
    found = find_states({"module.w": (8, 4), "optimizer.exp_avg.w": (8, 4)})
    assert found.of("optimizer.exp_avg.w").name_for("module.v") == "optimizer.exp_avg.v"


def test_the_parameter_of_the_states_shape_comes_first():
    shapes = {"model.norm.w": (8,), "norm.w": (16,), "optimizer.state.norm.w.exp_avg": (16,)}
    assert find_states(shapes).base_name("optimizer.state.norm.w.exp_avg") == "norm.w"


def test_what_has_states_of_its_own_or_a_number_is_no_copy():
    shapes = {"0.weight": (8, 8), "1.0.weight": (8, 8)}
    assert not find_states(shapes).copies
    shapes = {f"{s}{n}": (8, 8) for s in ("", "adam_m.") for n in ("decoder.w", "mtp.decoder.w")}
    assert not find_states(shapes).copies
