"""The transformer, compared with GPT-2 of `transformers` and with numpy in float64."""

import copy
import math
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from hooks import HookedRunner
from models import KVCache, Transformer, TransformerConfig
from models.initialisation import initialise
from tests.reference import LLAMA, SIZES, Reference, randomised, some_tokens, variant

SMALL = dict(vocab_size=23, n_ctx=17, n_layers=3, n_heads=2, d_model=10)


def draw(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_equals_the_equations_in_float64(model, tokens):
    expected = torch.tensor(Reference(model)(tokens))
    torch.testing.assert_close(model.double()(tokens), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(model.float()(tokens), expected.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_a_run_starts_from_a_given_stream(model, tokens):
    runner, real = HookedRunner(model), torch.ones(4, 7, dtype=torch.bool)
    real[2, :3] = False
    with torch.no_grad():
        for mask in (None, real):
            logits, cache = runner.run_with_cache(tokens, attention_mask=mask, names="*.resid_p*")
            for layer in range(4):
                stream = cache["resid_pre", layer] if layer < 3 else cache["resid_post", 2]
                from_there = model(stream, starting_at_layer=layer, attention_mask=mask)
                assert torch.equal(from_there[real], logits[real])
    later = runner.capture(stream, starting_at_layer=2, names="blocks.2.attn.z")
    assert list(later) == ["blocks.2.attn.z"]
    for wrong, layer in ((stream, 4), (stream, -1), (tokens, 1), (stream[0], 1)):
        with pytest.raises(ValueError, match="starting_at_layer"):
            model(wrong, starting_at_layer=layer)


def test_a_model_knows_its_device_and_dtype(model):
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.to(torch.float64).dtype == torch.float64
    assert model.to("meta").device == torch.device("meta")


def test_the_steps_of_the_forward_pass(model, tokens):
    context = model.context(tokens)
    resid = model.input_resid(tokens, context)
    for block in model.blocks:
        resid = block(resid, context)
    assert torch.equal(model.unembed(resid), model(tokens))


# --- tokens, and which logits


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        ([(2, 3)], 23, "0 to 22; got 23 at row 2, position 3"),
        ([(3, 0), (1, 6)], -1, "-1 at row 1, position 6"),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(model, tokens, at, value, match):
    for place in at:
        tokens[place] = value
    for called in (model, variant("embed_scale")):
        with pytest.raises(ValueError, match=match):
            called(tokens)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (torch.zeros(5).long(), ValueError, r"\[5\]"),
        (torch.zeros(1, 2, 5).long(), ValueError, r"\[1, 2, 5\]"),
        (torch.zeros(2, 5), TypeError, "float32"),
        (torch.zeros(2, 5).bool(), TypeError, "bool"),
        ([[1, 2]], TypeError, "list"),
        (torch.zeros(1, 18).long(), ValueError, "17; got 18"),
    ],
)
def test_tokens_are_a_batch_of_integers_that_fits_the_context(model, wrong, error, match):
    with pytest.raises(error, match=match):
        model.context(wrong)
    # A model reads a list or a vector as texts.
    if not isinstance(wrong, list) and wrong.ndim > 1:
        with pytest.raises(error, match=match):
            model(wrong)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_tokens_may_have_any_integer_type(model, tokens, dtype):
    assert torch.equal(model(tokens.to(dtype)), model(tokens))


def test_logits_of_the_last_positions_only(monkeypatch):
    model, tokens, seen = variant("like gemma 2"), some_tokens(), []
    expected, unembed = model(tokens), model.unembed
    monkeypatch.setattr(
        model, "unembed", lambda resid: seen.append(resid.shape[1]) or unembed(resid)
    )
    for last in (1, 3, 7, 20):
        ours = model(tokens, last=last)
        torch.testing.assert_close(ours, expected[:, -last:], atol=1e-12, rtol=0)
        assert seen.pop() == min(last, 7)
    with pytest.raises(ValueError, match="-2"):
        model(tokens, last=-2)


@pytest.mark.parametrize("name", ["unembedding", "ln_final.scale", "logit_cap"])
def test_whoever_looks_at_the_last_steps_sees_every_position(name):
    model, tokens = variant("like gemma 2"), some_tokens()
    logits, cache = HookedRunner(model).run_with_cache(tokens, last=2, names=name)
    assert cache[name].shape[1] == 7
    torch.testing.assert_close(logits, model(tokens)[:, -2:], atol=1e-12, rtol=0)


# --- weights by name


@pytest.mark.parametrize("place", ["blocks[0].attn.W_V", "blocks[0].mlp.b_in", "W_K", "W_U"])
def test_an_assigned_weight_is_an_error_whose_remedy_works(place):
    model = Transformer(TransformerConfig(**SMALL))
    owner, _, name = f"model.{place}".rpartition(".")
    with pytest.raises(AttributeError, match="in place") as error:
        setattr(eval(owner), name, torch.ones(()))
    remedy = re.search(r"such as (.*) = value", str(error.value))[1]
    names = {"model": model, "attn": model.blocks[0].attn, "mlp": model.blocks[0].mlp}
    with torch.no_grad():
        exec(f"{remedy} = 1.5", names)
    weight = getattr(eval(owner), name)
    assert (weight if "blocks" in place or name == "W_U" else weight[0]).eq(1.5).all()


def test_weights_by_their_usual_names(model, tokens):
    x, attn, mlp = draw(4, 7, 10), model.blocks[1].attn, model.blocks[1].mlp
    by_name = [
        torch.einsum("bpm,hmd->bphd", x, getattr(model, f"W_{name}")[1])
        + getattr(model, f"b_{name}")[1]
        for name in "QKV"
    ]
    torch.testing.assert_close(torch.cat([part.flatten(2) for part in by_name], -1), attn.qkv(x))
    z, hidden = draw(4, 7, 2, 5, seed=4), draw(4, 7, 13, seed=5)
    out = torch.einsum("bphd,hdm->bpm", z, model.W_O[1]) + model.b_O[1]
    torch.testing.assert_close(out, attn.output(z.flatten(2)))
    torch.testing.assert_close(x @ model.W_in[1] + model.b_in[1], mlp.input(x))
    torch.testing.assert_close(hidden @ model.W_out[1] + model.b_out[1], mlp.output(hidden))
    assert torch.equal(model.W_E[tokens] + model.W_pos[:7], model.input_resid(tokens))
    torch.testing.assert_close(model.ln_final(x) @ model.W_U + model.b_U, model.unembed(x))


SHAPES = {
    "W_Q": (2, 6, 10, 8),
    **dict.fromkeys(("W_K", "W_V"), (2, 3, 10, 8)),
    "W_O": (2, 6, 8, 10),
    **dict.fromkeys(("W_gate", "W_in"), (2, 10, 13)),
    "W_out": (2, 13, 10),
    "b_Q": (2, 6, 8),
    **dict.fromkeys(("b_K", "b_V"), (2, 3, 8)),
    **dict.fromkeys(("b_gate", "b_in"), (2, 13)),
    **dict.fromkeys(("b_O", "b_out"), (2, 10)),
    "W_E": (23, 10),
    "W_U": (10, 23),
    "b_U": (23,),
}


@pytest.mark.parametrize("biased", [True, False])
def test_shapes_of_weights_with_grouped_heads_and_gates(biased):
    names = ("qkv_bias", "out_bias", "mlp_bias", "unembed_bias")
    model = randomised(TransformerConfig(**SIZES | LLAMA | dict.fromkeys(names, biased)))
    for name, shape in SHAPES.items():
        weight = getattr(model, name)
        assert weight.shape == shape, name
        assert bool(weight.any()) == (biased or name.startswith("W")), name
    # A gated MLP by hand: silu(x W_gate + b_gate) * (x W_in + b_in).
    x = draw(5, 7, 10)
    gate = F.silu(x @ model.W_gate[1] + model.b_gate[1])
    out = gate * (x @ model.W_in[1] + model.b_in[1]) @ model.W_out[1] + model.b_out[1]
    torch.testing.assert_close(out, model.blocks[1].mlp(x))


@pytest.mark.parametrize("name", ["W_pos", "W_gate", "b_gate", "W_pso"])
def test_weights_that_a_model_lacks(name):
    with pytest.raises(AttributeError, match=name):
        getattr(variant("sinusoidal"), name)


def test_weights_of_a_block_are_views_and_stacks_follow(model):
    attn, mlp = model.blocks[1].attn, model.blocks[1].mlp
    views = [(attn.qkv.weight, (attn.W_Q, attn.W_K, attn.W_V)), (attn.output.weight, (attn.W_O,))]
    views += [(attn.qkv.bias, (attn.b_Q, attn.b_K, attn.b_V)), (attn.output.bias, (attn.b_O,))]
    views += [(mlp.input.weight, (mlp.W_in,)), (mlp.output.weight, (mlp.W_out,))]
    views += [(mlp.input.bias, (mlp.b_in,)), (mlp.output.bias, (mlp.b_out,))]
    with torch.no_grad():
        for owner, parts in views:
            assert sum(part.numel() for part in parts) == owner.numel()
            for part in parts:
                part.fill_(7.0)
            assert (owner == 7).all()
    assert (model.W_Q[1] == 7).all()
    assert model.double().W_Q.dtype == torch.float64


# --- tied weights

TIED = ("token_embedding.weight", "unembedding.weight")


def is_tied(model):
    return model.unembedding.weight is model.token_embedding.weight


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_two_different_matrices_for_tied_weights_are_an_error(model, copy_of):
    untied = Transformer(model.config.replace(tied_unembed=False))
    assert not is_tied(untied)
    assert not torch.equal(untied.W_E, untied.W_U.T)
    for tied in (model, copy_of(model)):
        with pytest.raises(ValueError, match="unembedding.weight"):
            tied.load_state_dict(untied.state_dict())
        outer = nn.ModuleDict({"inner": tied})
        with pytest.raises(ValueError, match="inner.unembedding.weight"):
            outer.load_state_dict({f"inner.{n}": v for n, v in untied.state_dict().items()})
        with pytest.raises((RuntimeError, ValueError), match="unembedding.weight"):
            tied.load_state_dict(model.state_dict() | {TIED[1]: torch.zeros(5, 10)})
    untied.load_state_dict(untied.state_dict())


@pytest.mark.parametrize("absent", [*TIED, None])
@pytest.mark.parametrize("assign", [True, False])
def test_loaded_weights_stay_tied(model, tokens, absent, assign):
    with torch.no_grad():
        # NaN does not equal itself, but the weights are still tied.
        model.token_embedding.weight[22, 4] = torch.nan
    values = {f"inner.{n}": v for n, v in copied(model).items() if n != absent}
    fresh = Transformer(model.config).requires_grad_(absent is None)
    nn.ModuleDict({"inner": fresh}).load_state_dict(values, assign=assign)
    assert is_tied(fresh)
    assert fresh.W_E.requires_grad == (absent is None)
    assert fresh.requires_grad_().count_parameters() == model.count_parameters()
    torch.testing.assert_close(fresh.eval()(tokens), model(tokens), atol=0, rtol=0, equal_nan=True)


def test_weights_that_were_untied_by_hand_stay_untied(model, tokens):
    model.unembedding.weight = nn.Parameter(torch.randn(23, 10))
    expected = model(tokens)
    model.load_state_dict({}, strict=False)
    for assign in (False, True):
        model.load_state_dict(copied(model), assign=assign)
        assert torch.equal(model(tokens), expected)
    pruned = Transformer(model.config)
    prune.random_unstructured(pruned.token_embedding, "weight", 0.5)
    pruned.load_state_dict(pruned.state_dict())


@pytest.mark.usefixtures("unchecked")  # during tracing, sizes are tensors
def test_a_trace_is_the_model(model, tokens):
    with warnings.catch_warnings():
        # Tracing warns that sizes become constants, and that it is deprecated.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (tokens,), check_trace=False)
    assert torch.equal(traced(tokens.flip(0)), model(tokens.flip(0)))


# --- how weights start

WIDE = dict(vocab_size=301, n_ctx=203, n_layers=5, n_heads=4, d_model=128, tied_unembed=False)
GROUPED = WIDE | dict(n_kv_heads=1, d_head=24, d_mlp=100, mlp="gated", unembed_bias=True)


def matrices(model):
    """Yield every randomly drawn matrix with its name. Queries, keys and values are separate."""
    for name, parameter in model.named_parameters():
        if ".attn.qkv.weight" in name:
            heads, kv_heads = model.config.n_heads, model.config.n_kv_heads
            sizes = [n * model.config.d_head for n in (heads, kv_heads, kv_heads)]
            for part, weight in zip("qkv", parameter.split(sizes), strict=True):
                yield f"{name} {part}", weight
        elif parameter.ndim == 2:
            yield name, parameter


@pytest.mark.parametrize(
    ("sizes", "init"), [(WIDE, "gpt2"), (GROUPED, "gpt2"), (GROUPED, "normal")]
)
def test_initialisation_is_normal_and_gpt2_scales_outputs_down(sizes, init):
    for name, weight in matrices(Transformer(TransformerConfig(**sizes, init=init))):
        scaled = init == "gpt2" and name.endswith("output.weight")
        expected = 0.02 / math.sqrt(2 * 5) if scaled else 0.02
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(weight.mean().item()) < 4 * expected / math.sqrt(weight.numel()), name
        # A normal distribution has a few values beyond three standard deviations, and a uniform
        # distribution has none.
        assert (weight.abs() > 3 * expected).any(), name


@pytest.mark.parametrize("init", ["xavier", "kaiming"])
def test_initialisation_is_uniform_by_each_matrixs_sizes(init):
    for name, weight in matrices(Transformer(TransformerConfig(**GROUPED, init=init))):
        fan_out, fan_in = weight.shape
        # The variance is 2 / (in + out) or 2 / in. The variance of a uniform number is bound² / 3.
        bound = math.sqrt(6 / (fan_in + fan_out)) if init == "xavier" else math.sqrt(6 / fan_in)
        assert 0.98 * bound < weight.abs().max().item() <= bound, name
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("init", ["gpt2", "xavier", "kaiming"])
def test_a_trained_model_can_be_initialised_again(init, tied):
    changes = dict(init=init, tied_unembed=tied, qk_norm="head", embed_norm=True)
    config = TransformerConfig(**GROUPED | changes)
    trained = randomised(config)
    initialise(trained, trained.config)
    # The matrix has 301 rows of 128 numbers. Xavier and Kaiming draw from a uniform distribution.
    variance = {"gpt2": 0.02**2, "xavier": 2 / (301 + 128), "kaiming": 2 / 128}[init]
    assert trained.W_E.std().item() == pytest.approx(math.sqrt(variance), rel=0.05)
    assert is_tied(trained) == tied
    for name, parameter in trained.named_parameters():
        # Gains and biases have one axis.
        if parameter.ndim == 1:
            start = torch.full_like(parameter, float(name.endswith("weight")))
            assert torch.equal(parameter, start), name
        else:
            assert parameter.abs().max() < 0.5, name


# --- dropout, counts, precision


@pytest.mark.parametrize(
    "place",
    [
        "embed_dropout",
        "blocks.1.attn.pattern_dropout",
        "blocks.1.attn.output_dropout",
        "blocks.1.mlp.output_dropout",
    ],
)
@pytest.mark.parametrize("mlp", ["plain", "gated"])
def test_dropout_has_four_places_and_acts_in_training_only(place, mlp):
    model, tokens = variant("pre", dropout=0.5, mlp=mlp).train(), some_tokens()
    modules = {n: m for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert len(modules) == 1 + 3 * 2
    for name, module in modules.items():
        assert module.p == 0.5
        module.p = 0.5 if name == place else 0.0
    assert not torch.equal(model(tokens), model(tokens))
    with HookedRunner(model).hooks({"*.pattern": lambda value, point: None}):
        assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))
    modules[place].p = 0.0
    assert torch.equal(model.train()(tokens), model(tokens))


@pytest.mark.parametrize("name", ["sinusoidal", "like llama", "no positions"])
def test_a_context_beyond_that_of_the_training(name):
    model, tokens, cache = variant(name), some_tokens(shape=(2, 29)), KVCache()
    with pytest.raises(ValueError, match="17; got 29"):
        model(tokens)
    with pytest.raises(ValueError, match="got 29"):
        # A model with learned positions cannot be extended.
        variant("pre").extend_context(29)
    model.extend_context(29)
    expected = torch.tensor(Reference(model)(tokens))
    with torch.no_grad():
        pieces = [model(piece, kv_cache=cache) for piece in tokens.split([13, 16], 1)]
        for logits in (model(tokens), torch.cat(pieces, 1)):
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=0)
    with pytest.raises(ValueError, match="29; got 30"):
        model(some_tokens(shape=(1, 30)))


def test_every_parameter_counts_once(model):
    # The embeddings have 23*10 + 17*10 parameters. A block has two norms with 40, attention with
    # 4*10*10 + 40, and an MLP with 2*10*13 + 23. The last norm has 20.
    assert model.count_parameters() == 400 + 3 * (40 + 440 + 283) + 20
    model.blocks[0].requires_grad_(False)
    assert model.count_parameters() == 400 + 2 * (40 + 440 + 283) + 20


def test_half_precision_and_copies(model, tokens):
    half = copy.deepcopy(model).bfloat16()
    assert half(tokens).dtype == torch.bfloat16
    error = (half(tokens).float() - model(tokens)).abs().max()
    assert 0 < error < 0.05 * model(tokens).abs().max()
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_a_scale_of_embeddings_is_rounded_to_their_dtype():
    """The scale is rounded to the dtype of the embeddings, as in the training of Gemma.

    In bfloat16, the square root of 10 is 3.15625.
    """
    model = randomised(TransformerConfig(**SIZES, embed_scale=math.sqrt(10))).bfloat16()
    tokens = some_tokens()
    assert torch.equal(model.token_embedding(tokens), model.W_E[tokens] * 3.15625)


@pytest.mark.parametrize("mlp", ["plain", "gated"])
def test_dropout_may_be_after_the_activation_instead(mlp):
    """model-architecture.md has dropout in embeddings, patterns and the hidden layer of the MLP.

    It has no dropout after sublayers.
    """
    model = variant("pre", dropout=0.75, dropout_place="hidden", mlp=mlp).train()
    places = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout)]
    ends = ("attn.pattern_dropout", "mlp.hidden_dropout")
    assert places == ["embed_dropout", *(f"blocks.{n}.{end}" for n in (0, 1) for end in ends)]
    part, read = model.blocks[1].mlp, []
    part.output.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with HookedRunner(part).hooks({"post": lambda value, point: torch.ones_like(value)}):
        part(draw(5, 7, 10).double())
    # Dropout multiplies the kept values by 1 / (1 - 0.75).
    assert read[0].unique().tolist() == [0.0, 4.0]
