"""TransformerConfig: errors name the field and the value.

Every field has an effect and a description.
"""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from models import RotaryBase, RotaryScaling, Transformer, TransformerConfig, config_of
from tests.reference import SIZES, randomised, some_tokens

FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
SMALL = dict(vocab_size=23, n_ctx=17, n_layers=3, n_heads=2, d_model=10)
ROTARY = dict(positions="rotary", d_head=8)


def config(**changes):
    return TransformerConfig(**SMALL | changes)


# For each field: a changed value, the values of other fields that it needs, and the first thing
# that changes. This is the names or shapes of parameters, the logits with the same weights, the
# logits in training, or the weights of a new model.
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
    "rotary_scaling": (
        RotaryScaling(kind="linear", factor=4.0),
        dict(positions="rotary"),
        "logits",
    ),
    "qk_norm": ("head", {}, "parameters"),
    "qk_norm_learned": (False, dict(qk_norm="all"), "parameters"),
    "attn_scale": (0.2, {}, "logits"),
    "attn_scale_by_layer": (True, {}, "logits"),
    "attn_cap": (0.7, {}, "logits"),
    "logit_cap": (1.3, {}, "logits"),
    "window": (3, {}, "logits"),
    "window_layers": ((1,), dict(window=3), "logits"),
    "window_rotary": (
        RotaryBase(theta=3.0),
        dict(positions="rotary", window=3, window_layers=(1,)),
        "logits",
    ),
    "parallel": (True, {}, "logits"),
    "mlp": ("gated", {}, "parameters"),
    "activation": ("relu", {}, "logits"),
    "qkv_bias": (False, {}, "parameters"),
    "out_bias": (False, {}, "parameters"),
    "mlp_bias": (False, {}, "parameters"),
    "unembed_bias": (True, {}, "parameters"),
    "tied_unembed": (False, {}, "parameters"),
    "dropout": (0.4, {}, "training"),
    "dropout_place": ("hidden", dict(dropout=0.4), "training"),
    "init": ("xavier", {}, "fresh weights"),
    "eos_token_ids": ((2,), {}, "generation"),
    "vocab_size_out": (29, dict(tied_unembed=False), "parameters"),
    "rotary_pairs": ("adjacent", ROTARY, "logits"),
    "causal": (False, {}, "logits"),
    "mlp_norm": (True, {}, "parameters"),
}


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
    return "generation" if one.config.eos_token_ids != other.config.eos_token_ids else "nothing"


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_an_effect(name):
    value, beside, what = EFFECTS[name]
    base = TransformerConfig(**SIZES | beside)
    assert getattr(base, name) != value
    assert first_difference(randomised(base), randomised(base.replace(**{name: value}))) == what


# --- errors


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "value"),
    [
        *(({name: 1.5}, "1.5") for name in ("n_layers", "d_model", "window")),
        (dict(n_ctx=True), "True"),
        (dict(n_heads="3"), "'3'"),
        (dict(norm_eps="3"), "'3'"),
        (dict(norm_eps=True), "True"),
        (dict(tied_unembed=1), "1"),
        (dict(parallel="no"), "'no'"),
        (dict(rotary_scaling="linear"), "'linear'"),
        (dict(window_layers=(1.0,)), "(1.0,)"),
        (dict(window_layers=[0, 2]), "[0, 2]"),
        (dict(n_layers=np.float64(2)), "2.0"),
        *(
            ({name: value}, str(value))
            for name in ("rotary_theta", "embed_scale", "attn_scale", "dropout")
            for value in (float("inf"), float("nan"))
        ),
        (dict(norm="layer_norm"), "'layer_norm'; did you mean 'layernorm'?"),
        (dict(norm="batch"), "'batch'"),
        (dict(positions="rotery"), "'rotery'; did you mean 'rotary'?"),
        *(
            ({name: value}, str(value))
            for name in ("vocab_size", "n_ctx", "n_layers", "n_heads", "d_model")
            for value in (0, -1)
        ),
        *(({name: -1}, "-1") for name in ("n_kv_heads", "d_head", "d_mlp", "window")),
        *(
            ({name: -0.1}, "-0.1")
            for name in ("norm_eps", "attn_scale", "attn_cap", "logit_cap", "dropout")
        ),
        (dict(dropout=1.0), "1.0"),
        (dict(d_model=10, n_heads=3), "a multiple of n_heads (3); got 10"),
        (dict(d_model=10, n_heads=20), "10"),
        (dict(n_kv_heads=2, n_heads=5), "n_heads (5); got 2"),
        (dict(n_kv_heads=4), "4"),
        (dict(rotary_fraction=1.0, positions="rotary"), "5 dimensions; got 1.0"),
        *(
            (dict(rotary_fraction=value, **ROTARY), f"8 dimensions; got {value}")
            for value in (0.4, 0.1, 0.0, 1.5)
        ),
        (dict(d_model=9, positions="sinusoidal", n_heads=1), "9"),
        (dict(window_layers=(0, 3), window=2), "the 3 layers; got (0, 3)"),
        (dict(window_layers=(-1,), window=2), "(-1,)"),
        (dict(parallel=True, norm_place="post"), "True"),
        (dict(norm_place="post", mlp="none"), "'post'"),
        (dict(rotary_theta=5.0), "unless positions are rotary; got 5.0"),
        (
            dict(
                rotary_theta=1.0,
                positions="rotary",
                rotary_scaling=RotaryScaling(kind="yarn", original_n_ctx=3),
            ),
            "above 1; got 1.0",
        ),
        (dict(norm_place="post", norm="none"), "unless there is a norm; got 'post'"),
        (dict(vocab_size_out=7), "vocab_size_out (7) than vocab_size; got True"),
        (dict(causal=False, window=2), "unless attention is causal; got 2"),
        (dict(positions="shortformer"), "use TransformerLens for such a model"),
        (dict(mlp="gated", mlp_norm=True), "unless the MLP is plain; got True"),
        (dict(rotary_pairs="adjacent"), "unless positions are rotary; got 'adjacent'"),
        (dict(qk_norm_learned=False), "unless there is a qk_norm; got False"),
        (dict(window_layers=(1,)), "unless there is a window; got (1,)"),
        (dict(dropout_place="hidden"), "unless there is dropout; got 'hidden'"),
        (dict(activation="silu", mlp="none"), "unless there is an MLP; got 'silu'"),
        (
            dict(rotary_scaling=RotaryScaling(kind="factors", factors=(1.0, 2.0, 3.0)), **ROTARY),
            "4 numbers, one for each frequency; got 3",
        ),
        (
            dict(window_rotary=RotaryBase(theta=5.0), positions="rotary", window=2),
            f"only some blocks have a window; got {RotaryBase(theta=5.0)}",
        ),
        (
            dict(window_rotary=RotaryBase(theta=5.0), window=2, window_layers=(1,)),
            f"only some blocks have a window; got {RotaryBase(theta=5.0)}",
        ),
        (
            dict(
                window_rotary=RotaryBase(
                    theta=5.0, scaling=RotaryScaling(kind="factors", factors=(1.0, 2.0))
                ),
                window=2,
                window_layers=(1,),
                **ROTARY,
            ),
            "4 numbers, one for each frequency; got 2",
        ),
    ],
)
def test_errors_name_field_and_value(change, value):
    with pytest.raises(ValueError, match=f"^.*{next(iter(change))}") as error:
        config(**change)
    assert str(error.value).endswith(value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("values", "ending"),
    [
        (dict(theta=0.0), "above 0; got 0.0"),
        (dict(theta="5"), "got '5'"),
        (
            dict(theta=1.0, scaling=RotaryScaling(kind="yarn", original_n_ctx=3)),
            "above 1; got 1.0",
        ),
        (dict(scaling="linear", theta=5.0), "got 'linear'"),
    ],
)
def test_errors_of_a_rotary_base(values, ending):
    with pytest.raises(ValueError, match=rf"^rotary_base\.{next(iter(values))} ") as error:
        RotaryBase(**values)
    assert str(error.value).endswith(ending)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("values", "ending"),
    [
        (dict(kind="lama3"), "'lama3'; did you mean 'llama3'?"),
        (dict(factor=0.5, kind="linear"), "0.5"),
        (dict(factor="2", kind="linear"), "'2'"),
        (dict(original_n_ctx=0, kind="llama3"), "0"),
        (dict(original_n_ctx=0, kind="yarn"), "0"),
        (dict(low=4.0, kind="llama3", original_n_ctx=9), "(4.0); got 4.0"),
        (dict(low=-0.5, kind="yarn", original_n_ctx=9), "-0.5"),
        (dict(factors=(), kind="factors"), "()"),
        (dict(factors=(1.0, 0.0), kind="factors"), "(1.0, 0.0)"),
        (dict(factors=(1.0, "2"), kind="factors"), "(1.0, '2')"),
    ],
)
def test_errors_of_a_scaling(values, ending):
    with pytest.raises(ValueError, match=rf"^rotary_scaling\.{next(iter(values))} ") as error:
        RotaryScaling(**values)
    assert str(error.value).endswith(ending)


@pytest.mark.parametrize(
    "change",
    [
        dict(window=2, window_layers=(0, 2)),
        dict(norm="none", norm_learned=False, norm_bias=False, final_norm=False),
        dict(mlp="none", norm_place="output"),
        dict(parallel=True, norm_place="sandwich"),
        dict(n_heads=20, d_head=3, n_kv_heads=20),
        ROTARY
        | dict(rotary_fraction=0.25, rotary_scaling=RotaryScaling(kind="linear", factor=2.0)),
        dict(vocab_size=1, n_ctx=1, n_layers=1, n_heads=1, d_model=1, dropout=0.99),
    ],
)
def test_allowed_configs_run(change):
    made = config(**change)
    tokens = torch.zeros(2, min(4, made.n_ctx), dtype=torch.int64)
    assert Transformer(made).eval()(tokens).isfinite().all()


# --- derived sizes, copies


@pytest.mark.parametrize(("kind", "turns"), [("llama3", (1.0, 4.0)), ("yarn", (1.0, 32.0))])
def test_turns_are_the_published_ones_by_default(kind, turns):
    assert RotaryScaling(kind=kind, original_n_ctx=64).turns == turns
    assert RotaryScaling(kind=kind, original_n_ctx=64, high=9.0).turns == (1.0, 9.0)
    assert RotaryScaling(kind=kind, original_n_ctx=64, low=2.0).turns == (2.0, turns[1])


def test_sizes_follow_from_others():
    made = config()
    assert (made.d_head, made.n_kv_heads, made.d_mlp) == (5, 2, 40)
    assert made.attn_scale == made.d_head**-0.5
    assert config(d_head=9).attn_scale == 1 / 3
    assert config(mlp="none").d_mlp == 0
    own = config(d_head=3, d_mlp=3, n_heads=6, n_kv_heads=3)
    assert (own.d_head, own.d_mlp, own.n_kv_heads) == (3, 3, 3)
    assert Transformer(own).W_O.shape == (3, 6, 3, 10)
    assert (config(**ROTARY).d_rotary, config(**ROTARY, rotary_fraction=0.5).d_rotary) == (8, 4)
    assert made.windows == (0, 0, 0)
    assert config(window=4).replace(window=5, n_layers=2).windows == (5, 5)
    assert config(window=4, window_layers=(0, 2)).windows == (4, 0, 4)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_become_pythons():
    made = config(n_layers=np.int64(2), norm_eps=np.float32(0.5), dropout=np.float64(0.25))
    assert made == config(n_layers=2, norm_eps=0.5, dropout=0.25)
    assert json.dumps(dataclasses.asdict(made))
    assert config(norm_eps=1, dropout=0).norm_eps == 1


def test_replacing_a_size_changes_the_sizes_that_depend_on_it():
    made = config()
    wider = made.replace(d_model=12)
    assert (wider.d_model, wider.d_head, wider.d_mlp, wider.n_kv_heads) == (12, 6, 48, 2)
    assert made.replace(n_heads=5) == config(n_heads=5)
    assert made.replace(n_heads=5).attn_scale == 2**-0.5
    assert config(attn_scale=0.7).replace(n_heads=5).attn_scale == 0.7
    assert made.replace(mlp="none").d_mlp == 0
    assert made.replace(mlp="none").replace(mlp="gated").d_mlp == 40
    assert made.replace(d_model=12, d_mlp=7).d_mlp == 7
    own = config(d_mlp=13, d_head=4, n_heads=6, n_kv_heads=3)
    wider = own.replace(d_model=12, n_layers=1)
    assert (wider.d_mlp, wider.d_head, wider.n_kv_heads, wider.n_layers) == (13, 4, 3, 1)
    assert made == config()
    assert config_of("d12", mlp="none").d_mlp == 0
    # A field without an effect returns to its default.
    assert made.replace(activation="relu").replace(mlp="none").activation == "gelu_tanh"
    rotary = config(**ROTARY, rotary_theta=5.0, rotary_scaling=RotaryScaling(kind="linear"))
    assert rotary.replace(positions="learned") == config(**ROTARY | {"positions": "learned"})
    # `d_head` is given, because the default 10 / 3 is not an integer. `replace` must keep it.
    odd = config(n_heads=3, d_head=3)
    assert odd.replace(n_layers=1) == config(n_heads=3, d_head=3, n_layers=1)
    with pytest.raises(ValueError, match="10"):
        made.replace(n_heads=3)
    with pytest.raises(TypeError, match="n_layer"):
        made.replace(n_layer=3)


def test_a_config_is_frozen_equal_by_value_and_can_be_copied():
    made = config(**ROTARY, rotary_scaling=RotaryScaling(kind="linear", factor=2.0), window=2)
    for frozen, name in ((made, "d_model"), (made.rotary_scaling, "factor")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, 12)
    assert made.windows == (2, 2, 2)
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.replace()):
        assert same == made
        assert hash(same) == hash(made)
    assert made != made.replace(window=3)
