"""TransformerConfig: errors that name field, value and rule; no field without effect or description."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from models import RotaryScaling, Transformer, TransformerConfig, config_of
from models.positions import Rotary
from tests.reference import SIZES, randomised, some_tokens

FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
SMALL = dict(vocab_size=23, n_ctx=17, n_layers=3, n_heads=2, d_model=10)
ROTARY = dict(positions="rotary", d_head=8)


def config(**changes):
    return TransformerConfig(**SMALL | changes)


# --- no dead fields

# What a field is changed to, beside which other values, and what that changes first of all:
# the names or shapes of parameters, logits of the same weights, training, or fresh weights.
EFFECTS = {
    "vocab_size": (29, {}, "parameters"),
    "n_ctx": (19, {}, "parameters"),
    "n_layers": (3, {}, "parameters"),
    "n_heads": (3, {}, "parameters"),
    "d_model": (12, {}, "parameters"),
    "n_kv_heads": (3, {}, "parameters"),
    "d_head": (4, {}, "parameters"),
    "d_mlp": (11, {}, "parameters"),
    "norm": ("rmsnorm", {}, "parameters"),
    "norm_place": ("post", {}, "logits"),
    "norm_eps": (0.3, {}, "logits"),
    "norm_learned": (False, {}, "parameters"),
    "norm_bias": (False, {}, "parameters"),
    "final_norm": (False, {}, "parameters"),
    "embed_norm": (True, {}, "parameters"),
    "embed_scale": (2.0, {}, "logits"),
    "positions": ("sinusoidal", {}, "parameters"),
    "rotary_theta": (7.0, dict(positions="rotary"), "logits"),
    "rotary_fraction": (0.5, dict(positions="rotary"), "logits"),
    "rotary_scaling": (RotaryScaling(kind="linear", factor=4.0), dict(positions="rotary"), "logits"),
    "qk_norm": ("head", {}, "parameters"),
    "qk_norm_learned": (False, dict(qk_norm="all"), "parameters"),
    "attn_scale": (0.2, {}, "logits"),
    "attn_scale_by_layer": (True, {}, "logits"),
    "attn_cap": (0.7, {}, "logits"),
    "logit_cap": (1.3, {}, "logits"),
    "window": (3, {}, "logits"),
    "window_layers": ((1,), dict(window=3), "logits"),
    "parallel": (True, {}, "logits"),
    "mlp": ("gated", {}, "parameters"),
    "activation": ("relu", {}, "logits"),
    "qkv_bias": (False, {}, "parameters"),
    "out_bias": (False, {}, "parameters"),
    "mlp_bias": (False, {}, "parameters"),
    "unembed_bias": (True, {}, "parameters"),
    "tied_unembed": (False, {}, "parameters"),
    "dropout": (0.4, {}, "training"),
    "init": ("xavier", {}, "fresh weights"),
}  # fmt: skip


def first_difference(one, other):
    tokens = some_tokens()
    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (one, other)]
    if shapes[0] != shapes[1]:
        return "parameters"
    other.load_state_dict(one.state_dict())
    if not torch.allclose(one(tokens), other(tokens), atol=1e-3):
        return "logits"
    torch.manual_seed(0)
    trained = one.train()(tokens)
    torch.manual_seed(0)
    if not torch.allclose(trained, other.train()(tokens), atol=1e-3):
        return "training"
    torch.manual_seed(0)
    fresh = Transformer(one.config)
    torch.manual_seed(0)
    if not torch.allclose(fresh.blocks[0].mlp.W_in, Transformer(other.config).blocks[0].mlp.W_in):
        return "fresh weights"
    return "nothing"


@pytest.mark.parametrize("name", EFFECTS)
def test_every_field_has_an_effect(name):
    value, beside, what = EFFECTS[name]
    base = TransformerConfig(**SIZES | beside)
    assert getattr(base, name) != value
    assert first_difference(randomised(base), randomised(base.replace(**{name: value}))) == what


def test_the_table_of_effects_is_whole():
    assert list(EFFECTS) == list(FIELDS)
    base = TransformerConfig(**SIZES)
    assert first_difference(randomised(base), randomised(base)) == "nothing"


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (dict(kind="linear", factor=2.0), dict(factor=3.0)),
        (dict(kind="linear", factor=2.0), dict(kind="llama3", original_n_ctx=50)),
        (dict(kind="llama3", factor=2.0, original_n_ctx=50), dict(kind="yarn")),
        (dict(kind="llama3", factor=2.0, original_n_ctx=50), dict(factor=3.0)),
        (dict(kind="llama3", factor=2.0, original_n_ctx=50), dict(original_n_ctx=90)),
        (dict(kind="llama3", factor=2.0, original_n_ctx=50), dict(low=0.1)),
        (dict(kind="llama3", factor=2.0, original_n_ctx=50), dict(high=9.0)),
        (dict(kind="yarn", factor=2.0, original_n_ctx=50), dict(factor=3.0)),
        (dict(kind="yarn", factor=2.0, original_n_ctx=50), dict(original_n_ctx=900)),
        (dict(kind="yarn", factor=2.0, original_n_ctx=100), dict(low=0.1)),
        (dict(kind="yarn", factor=2.0, original_n_ctx=100), dict(high=2.0)),
        (dict(kind="yarn", factor=2.0, original_n_ctx=50), dict(attention_factor=1.5)),
        (dict(kind="factors", factors=(1.0, 2.0, 3.0, 4.0)), dict(factors=(1.0, 2.0, 3.0, 5.0))),
    ],
)
def test_every_field_of_a_scaling_has_an_effect(base, change):
    def of(scaling):
        made = Rotary(config(**ROTARY, rotary_theta=50.0, rotary_scaling=RotaryScaling(**scaling)))
        return [*made.frequencies.tolist(), made.length]

    assert of(base) != of(base | change)


def described(cls):
    """Names before the colons of a docstring's Attributes."""
    section = inspect.getdoc(cls).split("Attributes:\n")[1].split("\n\n")[0]
    lines = re.findall(r"^    (\w[\w, ]*): ", section, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


@pytest.mark.parametrize("cls", [TransformerConfig, RotaryScaling])
def test_every_field_is_described_in_order(cls):
    assert described(cls) == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if get_origin(f.type) is Literal])
def test_every_choice_is_described(name):
    about = inspect.getdoc(TransformerConfig).split(f"    {name}: ")[1].split("\n    ")
    lines = [about[0]]
    for line in about[1:]:
        if not line.startswith("    "):
            break
        lines.append(line)
    assert all(f"`{choice}`" in " ".join(lines) for choice in get_args(FIELDS[name].type))


# --- errors


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_another_type_is_refused_by_name(name):
    kind = FIELDS[name].type
    if get_origin(kind) is Literal:
        wrong = {3: rf"{name} is one of .*{get_args(kind)[-1]}, not 3"}
    else:
        wrong = {
            "vocab_size": {},
            "rotary_scaling": {"linear": "a RotaryScaling or None, not 'linear'"},
            "window_layers": {(1.0,): r"a tuple of ints, not \(1.0,\)"},
        }.get(name) or {
            int: {1.5: "an int, not 1.5", True: "an int, not True", "3": "an int, not '3'"},
            float: {"3": "a finite float, not '3'", True: "a finite float, not True"},
            bool: {1: "a bool, not 1", "no": "a bool, not 'no'"},
        }[kind]
        wrong = {value: f"^{name} is {rule}" for value, rule in wrong.items()}
    for value, match in wrong.items():
        with pytest.raises(ValueError, match=match):
            config(**{name: value})


@pytest.mark.usefixtures("unchecked")
def test_a_list_of_layers_is_refused_and_an_int_passes_for_a_float():
    assert config(norm_eps=1, dropout=0).norm_eps == 1
    with pytest.raises(ValueError, match=r"window_layers is a tuple of ints, not \[0, 2\]"):
        config(window=2, window_layers=[0, 2])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(norm="layer_norm"), r"norm is one of layernorm, rmsnorm, none, not 'layer_norm'; did you mean 'layernorm'\?$"),
        (dict(norm="batch"), "norm is one of layernorm, rmsnorm, none, not 'batch'$"),
        (dict(norm_place="outputs"), r"norm_place is one of pre, post, .* did you mean 'output'\?"),
        (dict(positions="rotery"), r"positions is one of .* did you mean 'rotary'\?"),
        (dict(qk_norm="heads"), r"qk_norm is one of none, head, all, .* did you mean 'head'\?"),
        (dict(mlp="gate"), r"mlp is one of plain, gated, none, .* did you mean 'gated'\?"),
        (dict(activation="swilu"), r"activation is one of .* did you mean 'silu'\?"),
        (dict(init="Xavier"), r"init is one of gpt2, xavier, kaiming, .* did you mean 'xavier'\?"),
        *(({name: value}, f"^{name} is at least 1, not {value}$") for name in ("vocab_size", "n_ctx", "n_layers", "n_heads", "d_model") for value in (0, -1)),
        *(({name: -1}, f"^{name} is at least 0, not -1$") for name in ("n_kv_heads", "d_head", "d_mlp", "window")),
        *(({name: -0.1}, f"^{name} is at least 0, not -0.1$") for name in ("attn_scale", "attn_cap", "logit_cap")),
        *(({name: value}, f"^{name} is above 0, not {value}$") for name in ("norm_eps", "embed_scale") for value in (0.0, -1.0)),
        (ROTARY | dict(rotary_theta=-1.0), "rotary_theta is above 0, not -1.0"),
        (dict(dropout=1.0), "dropout is at least 0 and below 1, not 1.0"),
        (dict(dropout=-0.1), "dropout is at least 0 and below 1, not -0.1"),
        (dict(n_heads=3), r"d_model is a multiple of n_heads \(3\) unless d_head is given, not 10"),
        (dict(n_heads=20), r"d_model is a multiple of n_heads \(20\) unless d_head is given, not 10"),
        (dict(n_heads=5, n_kv_heads=2), r"n_kv_heads is a divisor of n_heads \(5\), not 2"),
        (dict(n_kv_heads=4), r"n_kv_heads is a divisor of n_heads \(2\), not 4"),
        (dict(positions="rotary"), "rotary_fraction is such that an even number of a head's 5 dimensions is rotated, not 1.0"),
        (ROTARY | dict(rotary_fraction=0.4), "of a head's 8 dimensions is rotated, not 0.4"),
        (ROTARY | dict(rotary_fraction=0.1), "of a head's 8 dimensions is rotated, not 0.1"),
        (ROTARY | dict(rotary_fraction=0.0), "rotary_fraction is above 0 and at most 1, not 0.0"),
        (ROTARY | dict(rotary_fraction=1.5), "rotary_fraction is above 0 and at most 1, not 1.5"),
        (dict(positions="sinusoidal", d_model=9, n_heads=1), "d_model is even where positions are sinusoidal, not 9"),
        *((ROTARY | {name: value}, f"^{name} is a finite float, not {value}$") for name in ("rotary_theta", "norm_eps", "embed_scale", "attn_scale", "attn_cap", "logit_cap", "dropout") for value in (float("inf"), float("nan"))),
        (dict(rotary_fraction=0.5), "rotary_fraction is 1.0 unless positions are rotary, not 0.5"),
        (dict(rotary_theta=5.0), "rotary_theta is 10000.0 unless positions are rotary, not 5.0"),
        (dict(norm="none", norm_place="sandwich"), "norm_place is 'pre' unless there is a norm, not 'sandwich'"),
        (dict(norm="none", norm_eps=0.1), "norm_eps is 1e-05 unless there is a norm, not 0.1"),
        (dict(qk_norm_learned=False), "qk_norm_learned is True unless there is a qk_norm, not False"),
        (dict(mlp="none", activation="silu"), "activation is 'gelu_tanh' unless there is an MLP, not 'silu'"),
        (dict(rotary_scaling=RotaryScaling(kind="linear", factor=2.0)), "rotary_scaling is None unless positions are rotary, not RotaryScaling"),
        (dict(window=2, window_layers=(0, 3)), r"window_layers is among the 3 layers, not \(0, 3\)"),
        (dict(window=2, window_layers=(-1,)), r"window_layers is among the 3 layers, not \(-1,\)"),
        (dict(window_layers=(1,)), r"window_layers is \(\) unless there is a window, not \(1,\)"),
        (dict(embed_norm=True, norm="none"), "embed_norm is False unless there is a norm, not True"),
        (dict(mlp="none", d_mlp=13), "d_mlp is 0 unless there is an MLP, not 13"),
        (dict(mlp="none", parallel=True), "parallel is False unless there is an MLP, not True"),
        (dict(norm_place="post", parallel=True), "parallel is False where norm_place is post, not True"),
        (dict(norm_place="post", mlp="none"), "norm_place is not post without an MLP, not 'post'"),
        (dict(norm_place="post", norm="none"), "norm_place is 'pre' unless there is a norm, not 'post'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_errors_name_field_value_and_rule(change, match):
    with pytest.raises(ValueError, match=match):
        config(**change)


@pytest.mark.parametrize(
    "change",
    [
        dict(window=2, window_layers=(0, 2)),
        dict(norm="none", norm_place="pre"),
        dict(norm="none", norm_learned=False, norm_bias=False, final_norm=False),
        dict(norm="rmsnorm", norm_bias=False),
        dict(mlp="none", mlp_bias=False),
        dict(norm_place="post", final_norm=False),
        dict(parallel=True, norm_place="sandwich"),
        dict(mlp="none", norm_place="output"),
        dict(mlp="none", d_mlp=0),
        dict(embed_norm=True),
        dict(n_heads=3, d_head=5),
        dict(n_heads=20, d_head=3, n_kv_heads=20),
        ROTARY | dict(rotary_fraction=0.25, rotary_scaling=RotaryScaling(kind="linear", factor=2.0)),
        dict(dropout=0.99),
        dict(vocab_size=1, n_ctx=1, n_layers=1, n_heads=1, d_model=1),
    ],
)  # fmt: skip
def test_what_is_allowed_runs(change):
    made = config(**change)
    tokens = torch.zeros(2, min(4, made.n_ctx), dtype=torch.int64)
    assert Transformer(made).eval()(tokens).isfinite().all()


def test_heads_may_be_narrower_than_the_stream():
    # 3 heads of width 3, which happens to be 10 // 3.
    assert Transformer(config(n_heads=3, d_head=3)).W_O.shape == (3, 3, 3, 10)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (dict(kind="lama3"), r"rotary_scaling.kind is one of linear, llama3, yarn, factors, not 'lama3'; did you mean 'llama3'\?"),
        (dict(kind="linear", factor=0.5), "rotary_scaling.factor is at least 1, not 0.5"),
        (dict(kind="llama3", factor=2.0), "rotary_scaling.original_n_ctx is at least 1 for llama3, not 0"),
        (dict(kind="yarn", factor=2.0), "rotary_scaling.original_n_ctx is at least 1 for yarn, not 0"),
        (dict(kind="llama3", original_n_ctx=9, low=4.0), r"rotary_scaling.low is above 0 and below high \(4.0\), not 4.0"),
        (dict(kind="yarn", original_n_ctx=9, low=-0.5), "rotary_scaling.low is above 0"),
        (dict(kind="llama3", original_n_ctx=9, high=0.5), r"rotary_scaling.low is above 0 and below high \(0.5\), not 1.0"),
        (dict(kind="yarn", original_n_ctx=9, high=-32.0), "rotary_scaling.low is above 0 and below high"),
        (dict(kind="yarn", original_n_ctx=9, attention_factor=-1.0), "rotary_scaling.attention_factor is at least 0, not -1.0"),
        (dict(kind="yarn", original_n_ctx=9.0), "rotary_scaling.original_n_ctx is an int, not 9.0"),
        (dict(kind="linear", factor="2"), "rotary_scaling.factor is a finite float, not '2'"),
        (dict(kind="linear", factor=float("inf")), "rotary_scaling.factor is a finite float, not inf"),
        (dict(kind="factors"), r"rotary_scaling.factors is one number above 0 a frequency, not \(\)"),
        (dict(kind="factors", factors=(1.0, 0.0)), r"rotary_scaling.factors is one number above 0 a frequency, not \(1.0, 0.0\)"),
        (dict(kind="factors", factors=(1.0, "2")), r"rotary_scaling.factors is a tuple of floats, not \(1.0, '2'\)"),
        (dict(kind="factors", factors=[1.0]), r"rotary_scaling.factors is a tuple of floats, not \[1.0\]"),
        (dict(kind="linear", factors=(1.0,)), r"rotary_scaling.factors is \(\) unless kind is factors, not \(1.0,\)"),
        (dict(kind="factors", factors=(1.0,), factor=2.0), "rotary_scaling.factor is 1.0 unless kind is linear, llama3 or yarn, not 2.0"),
        (dict(kind="linear", high=4.0), "rotary_scaling.high is 0.0 unless kind is llama3 or yarn, not 4.0"),
        (dict(kind="linear", original_n_ctx=9), "rotary_scaling.original_n_ctx is 0 unless kind is llama3 or yarn, not 9"),
        (dict(kind="llama3", original_n_ctx=9, attention_factor=1.5), "rotary_scaling.attention_factor is 0.0 unless kind is yarn, not 1.5"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_errors_of_a_scaling(values, match):
    with pytest.raises(ValueError, match=match):
        RotaryScaling(**values)


@pytest.mark.parametrize(("kind", "turns"), [("llama3", (1.0, 4.0)), ("yarn", (1.0, 32.0))])
def test_turns_are_the_published_ones_by_default(kind, turns):
    scaling = RotaryScaling(kind=kind, original_n_ctx=64)
    assert scaling.turns == turns
    assert RotaryScaling(kind=kind, original_n_ctx=64, high=9.0).turns == (1.0, 9.0)
    assert RotaryScaling(kind=kind, original_n_ctx=64, low=2.0).turns == (2.0, turns[1])


def test_there_is_one_divisor_a_frequency():
    scaling = RotaryScaling(kind="factors", factors=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match=r"rotary_scaling.*4"):
        config(**ROTARY, rotary_scaling=scaling)


# --- derived sizes, copies


def test_sizes_follow_from_others():
    made = config()
    assert (made.d_head, made.n_kv_heads, made.d_mlp) == (5, 2, 40)
    assert config(mlp="none").d_mlp == 0
    assert config(d_head=7, d_mlp=3, n_heads=6, n_kv_heads=3).d_head == 7
    assert (config(**ROTARY).d_rotary, config(**ROTARY, rotary_fraction=0.5).d_rotary) == (8, 4)


@pytest.mark.parametrize(
    ("name", "change", "idle"),
    [
        ("d12", dict(mlp="none"), dict(activation="gelu_tanh", d_mlp=0)),
        ("svd-64-2l", dict(mlp="none"), dict(activation="gelu_tanh", d_mlp=0)),
        ("transformer-rotary", dict(norm="none"), dict(norm_eps=1e-5, embed_norm=False)),
        ("d12_post_norm", dict(norm="none"), dict(norm_place="pre")),
        ("d12_post_norm_qk_norm", dict(qk_norm="none"), dict(qk_norm_learned=True, norm_eps=1e-6)),
    ],
)
def test_what_a_change_leaves_without_effect_goes_back_to_its_default(name, change, idle):
    changed = config_of(name, **change)
    assert {field: getattr(changed, field) for field in idle} == idle
    with pytest.raises(ValueError, match="unless there is an MLP, not 'relu'"):
        config_of(name, mlp="none", activation="relu")


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_become_pythons():
    made = config(n_layers=np.int64(2), norm_eps=np.float32(0.5), dropout=np.float64(0.25))
    assert made == config(n_layers=2, norm_eps=0.5, dropout=0.25)
    assert json.dumps(dataclasses.asdict(made))
    with pytest.raises(ValueError, match="n_layers is an int, not 2.0"):
        config(n_layers=np.float64(2))


def test_replacing_a_size_changes_what_followed_from_it():
    made = config()
    wider = made.replace(d_model=12)
    assert (wider.d_model, wider.d_head, wider.d_mlp, wider.n_kv_heads) == (12, 6, 48, 2)
    assert made.replace(n_heads=5) == config(n_heads=5)
    assert made.replace(n_heads=5).n_kv_heads == 5
    assert made.attn_scale == made.d_head**-0.5
    assert made.replace(n_heads=5).attn_scale == 2**-0.5
    assert config(d_head=9).attn_scale == 1 / 3
    assert config(attn_scale=0.7).replace(n_heads=5).attn_scale == 0.7
    assert made.replace(mlp="none").d_mlp == 0
    assert made.replace(mlp="none").replace(mlp="gated").d_mlp == 40
    assert made.replace(d_model=12, d_mlp=7).d_mlp == 7
    own = config(d_mlp=13, d_head=4, n_heads=6, n_kv_heads=3)
    wider = own.replace(d_model=12, n_layers=1)
    assert (wider.d_mlp, wider.d_head, wider.n_kv_heads, wider.n_layers) == (13, 4, 3, 1)
    assert made == config()


def test_replacing_is_checked():
    with pytest.raises(ValueError, match=r"multiple of n_heads \(3\)"):
        config().replace(n_heads=3)
    with pytest.raises(TypeError, match="n_layer"):
        config().replace(n_layer=3)
    with pytest.raises(ValueError, match="among the 1 layers"):
        config(window=2, window_layers=(1,)).replace(n_layers=1)


def test_windows_of_blocks():
    assert config().windows == (0, 0, 0)
    assert config(window=4).windows == (4, 4, 4)
    assert config(window=4, window_layers=(0, 2)).windows == (4, 0, 4)
    made = config(window=4)
    assert made.windows == (4, 4, 4)
    assert made.replace(window=5, n_layers=2).windows == (5, 5)


def test_a_config_is_frozen_equal_by_value_and_can_be_copied():
    made = config(**ROTARY, rotary_scaling=RotaryScaling(kind="linear", factor=2.0), window=2)
    for frozen, name in ((made, "d_model"), (made.rotary_scaling, "factor")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, 12)
    with pytest.raises(TypeError):
        TransformerConfig(23, 17, 3, 2, 10)
    assert made.windows == (2, 2, 2)
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.replace()):
        assert same == made
        assert hash(same) == hash(made)
    assert made != made.replace(window=3)
