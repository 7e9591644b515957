"""The transformer against independent references: transformers' GPT-2 and numpy in float64."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

from hooks import HookedRunner
from models import Transformer, TransformerConfig
from models.transformer import initialise
from tests.reference import LLAMA, SIZES, Reference, randomised, some_tokens, variant


def test_equals_the_equations_in_float64(model, tokens):
    expected = torch.tensor(Reference(model)(tokens))
    torch.testing.assert_close(model.double()(tokens), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(model.float()(tokens), expected.float(), atol=1e-4, rtol=1e-4)


def transposed(value):
    return value.T if value.ndim == 2 else value


def test_equals_the_gpt2_of_transformers(tokens):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=23,
            n_positions=17,
            n_embd=10,
            n_layer=3,
            n_head=2,
            n_inner=13,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).eval()
    theirs = {
        name.removeprefix("transformer."): value * 3
        for name, value in reference.state_dict().items()
    }
    reference.load_state_dict({f"transformer.{n}": v for n, v in theirs.items() if n != "lm_head.weight"}, strict=False)  # fmt: skip
    ours = {
        "token_embedding.weight": theirs["wte.weight"],
        "unembedding.weight": theirs["wte.weight"],
        "position_embedding.weight": theirs["wpe.weight"],
        "ln_final.weight": theirs["ln_f.weight"],
        "ln_final.bias": theirs["ln_f.bias"],
    }
    for n in range(3):
        for kind in ("weight", "bias"):
            ours[f"blocks.{n}.ln1.{kind}"] = theirs[f"h.{n}.ln_1.{kind}"]
            ours[f"blocks.{n}.ln2.{kind}"] = theirs[f"h.{n}.ln_2.{kind}"]
            # Conv1D holds [in, out], Linear [out, in].
            for name, theirs_name in (
                ("attn.qkv", "attn.c_attn"),
                ("attn.output", "attn.c_proj"),
                ("mlp.input", "mlp.c_fc"),
                ("mlp.output", "mlp.c_proj"),
            ):
                ours[f"blocks.{n}.{name}.{kind}"] = transposed(
                    theirs[f"h.{n}.{theirs_name}.{kind}"]
                )
    config = TransformerConfig(vocab_size=23, n_ctx=17, n_layers=3, n_heads=2, d_model=10, d_mlp=13)
    model = Transformer(config).eval()
    model.load_state_dict(ours)
    with torch.no_grad():
        theirs = reference(tokens, output_hidden_states=True)
        torch.testing.assert_close(model(tokens), theirs.logits, atol=1e-5, rtol=0)


def test_no_position_sees_a_later_token(model, tokens):
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 23
    difference = (model(tokens) - model(changed)).abs().amax((0, 2))
    assert not difference[:4].any()
    assert difference[4:].all()


def test_the_steps_of_the_forward_pass(model, tokens):
    context = model.context(tokens)
    resid = model.input_resid(tokens, context)
    for block in model.blocks:
        resid = block(resid, context)
    assert torch.equal(model.unembed(resid), model(tokens))


def test_rows_of_a_batch_do_not_mix(model, tokens):
    for row in range(len(tokens)):
        torch.testing.assert_close(model(tokens[[row]])[0], model(tokens)[row], atol=1e-5, rtol=0)


# --- tokens, and which logits


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        ([(2, 3)], 23, "tokens are 0 to 22; 1 of 28 are not, the first is 23 at row 2, position 3"),
        ([(3, 0), (1, 6)], -1, "0 to 22; 2 of 28 are not, the first is -1 at row 1, position 6"),
        ([(0, 0)], 10**9, "the first is 1000000000 at row 0, position 0"),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(model, tokens, at, value, match):
    for place in at:
        tokens[place] = value
    with pytest.raises(ValueError, match=match):
        model(tokens)
    scaled = variant("embed_scale")
    with pytest.raises(ValueError, match=match):
        scaled(tokens)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (torch.zeros(5).long(), r"shape \[batch, pos\], not torch.int64 of shape \(5,\)"),
        (torch.zeros(1, 2, 5).long(), r"not torch.int64 of shape \(1, 2, 5\)"),
        (torch.zeros(2, 5), r"tokens are integers .* not torch.float32 of shape \(2, 5\)"),
        (torch.zeros(2, 5).bool(), "not torch.bool"),
        (torch.zeros(2, 5, dtype=torch.complex64), "not torch.complex64"),
        ([[1, 2]], "not a list"),
    ],
)
def test_tokens_are_a_batch_of_integers(model, wrong, match):
    for call in (model, model.context):
        with pytest.raises(ValueError, match=match):
            call(wrong)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_tokens_may_have_any_integer_type(model, tokens, dtype):
    assert torch.equal(model(tokens.to(dtype)), model(tokens))


def test_a_sequence_longer_than_the_context_says_both_lengths(model):
    assert model(torch.zeros(1, 17, dtype=torch.int64)).shape == (1, 17, 23)
    with pytest.raises(ValueError, match="18 tokens do not fit the context of 17"):
        model(torch.zeros(1, 18, dtype=torch.int64))


@pytest.mark.parametrize("name", ["pre", "like gemma 2", "no final norm"])
def test_logits_of_the_last_positions_only(name):
    model, tokens = variant(name), some_tokens()
    expected = model(tokens)
    for last in (0, 1, 3, 7, 20):
        ours = model(tokens, last=last)
        torch.testing.assert_close(ours, expected[:, -last:], atol=1e-12, rtol=0)
        assert ours.shape[1] == (min(last, 7) or 7)


@pytest.mark.parametrize(
    "name", ["unembedding", "ln_final.scale", "ln_final.normalized", "logit_cap"]
)
def test_whoever_looks_at_the_last_steps_sees_every_position(name):
    model, tokens = variant("like gemma 2"), some_tokens()
    logits, cache = HookedRunner(model).run_with_cache(tokens, last=2, names=name)
    assert cache[name].shape[1] == 7
    torch.testing.assert_close(logits, model(tokens)[:, -2:], atol=1e-12, rtol=0)
    sizes = []
    model.get_submodule(name).register_forward_hook(lambda *args: sizes.append(args[2].shape[1]))
    model(tokens, last=2)
    assert sizes == [7]


def test_only_the_last_positions_are_unembedded(model, tokens, monkeypatch):
    seen = []
    unembed = model.unembed
    monkeypatch.setattr(model, "unembed", lambda resid: seen.append(resid.shape) or unembed(resid))
    model(tokens, last=2)
    assert seen == [(4, 2, 10)]


# --- weights by name


def test_weights_by_their_usual_names(model, tokens):
    x = torch.randn(4, 7, 10, generator=torch.Generator().manual_seed(3))
    attn, mlp = model.blocks[1].attn, model.blocks[1].mlp
    by_name = [
        torch.einsum("bpm,hmd->bphd", x, getattr(model, f"W_{name}")[1])
        + getattr(model, f"b_{name}")[1]
        for name in "QKV"
    ]
    torch.testing.assert_close(torch.cat([part.flatten(2) for part in by_name], -1), attn.qkv(x))
    z = torch.randn(4, 7, 2, 5, generator=torch.Generator().manual_seed(4))
    out = torch.einsum("bphd,hdm->bpm", z, model.W_O[1]) + model.b_O[1]
    torch.testing.assert_close(out, attn.output(z.flatten(2)))
    torch.testing.assert_close(x @ model.W_in[1] + model.b_in[1], mlp.input(x))
    hidden = torch.randn(4, 7, 13, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(hidden @ model.W_out[1] + model.b_out[1], mlp.output(hidden))
    resid = model.input_resid(tokens)
    assert torch.equal(model.W_E[tokens] + model.W_pos[:7], resid)
    torch.testing.assert_close(model.ln_final(x) @ model.W_U + model.b_U, model.unembed(x))


SHAPES = {
    "W_Q": (2, 6, 10, 8),
    "W_K": (2, 3, 10, 8),
    "W_V": (2, 3, 10, 8),
    "W_O": (2, 6, 8, 10),
    "W_gate": (2, 10, 13),
    "W_in": (2, 10, 13),
    "W_out": (2, 13, 10),
    "b_Q": (2, 6, 8),
    "b_K": (2, 3, 8),
    "b_V": (2, 3, 8),
    "b_O": (2, 10),
    "b_gate": (2, 13),
    "b_in": (2, 13),
    "b_out": (2, 10),
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
    x = torch.randn(5, 7, 10, generator=torch.Generator().manual_seed(3))
    gate = F.silu(x @ model.W_gate[1] + model.b_gate[1])
    out = gate * (x @ model.W_in[1] + model.b_in[1]) @ model.W_out[1] + model.b_out[1]
    torch.testing.assert_close(out, model.blocks[1].mlp(x))


@pytest.mark.parametrize("name", ["W_pos", "W_gate", "b_gate"])
def test_weights_that_a_model_lacks(name):
    model = variant("sinusoidal")
    with pytest.raises(AttributeError, match=f"^this model has no {name}: a part"):
        getattr(model, name)
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match="has no attribute 'W_pso'"):
        model.W_pso  # noqa: B018  # the error is of reading it
    assert variant("gated").W_pos.shape == (17, 10)


def test_two_matrices_are_refused_where_one_is_tied(model):
    untied = Transformer(model.config.replace(tied_unembed=False)).state_dict()
    with pytest.raises(
        ValueError, match="^unembedding.weight is not token_embedding.weight, and in this"
    ):
        model.load_state_dict(untied)
    outer = torch.nn.ModuleDict({"inner": model})
    with pytest.raises(ValueError, match="^inner.unembedding.weight is not inner.token_embedding"):
        outer.load_state_dict({f"inner.{name}": value for name, value in untied.items()})
    Transformer(model.config.replace(tied_unembed=False)).load_state_dict(untied)


def test_what_was_untied_by_hand_stays_so(model, tokens):
    model.unembedding.weight = torch.nn.Parameter(torch.randn(23, 10))
    expected = model(tokens)
    model.load_state_dict({}, strict=False)
    model.load_state_dict(model.state_dict())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert torch.equal(model(tokens), expected)
    pruned = Transformer(model.config)
    prune.random_unstructured(pruned.token_embedding, "weight", 0.5)
    pruned.load_state_dict(pruned.state_dict())


def test_tied_weights_that_are_no_numbers_are_tied(model):
    with torch.no_grad():
        model.token_embedding.weight[3, 4] = torch.nan
    copied = Transformer(model.config)
    copied.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert copied.unembedding.weight is copied.token_embedding.weight
    with pytest.raises(RuntimeError, match="size mismatch for unembedding.weight"):
        copied.load_state_dict(model.state_dict() | {"unembedding.weight": torch.zeros(5, 10)})


@pytest.mark.parametrize("kept", ["token_embedding.weight", "unembedding.weight"])
@pytest.mark.parametrize("assign", [True, False])
def test_one_name_of_tied_weights_is_enough(model, tokens, kept, assign):
    names = {"token_embedding.weight", "unembedding.weight"}
    values = {n: v.clone() for n, v in model.state_dict().items() if n not in names - {kept}}
    fresh = Transformer(model.config).eval()
    fresh.load_state_dict(values, strict=False, assign=assign)
    assert torch.equal(fresh(tokens), model(tokens))
    assert fresh.unembedding.weight is fresh.token_embedding.weight


def test_assigned_weights_are_tied_again(model, tokens):
    expected, count = model(tokens), model.count_parameters()
    fresh = torch.nn.ModuleDict({"inner": Transformer(model.config)})
    values = {f"inner.{name}": value.clone() for name, value in model.state_dict().items()}
    fresh.load_state_dict(values, assign=True)
    made = fresh["inner"]
    assert made.unembedding.weight is made.token_embedding.weight
    assert made.count_parameters() == count
    assert torch.equal(made.eval()(tokens), expected)


@pytest.mark.usefixtures("unchecked")  # sizes are tensors, while a graph is traced
def test_a_trace_is_the_model(model, tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that become constants, and of being outdated
        traced = torch.jit.trace(model, (tokens,), check_trace=False)
    assert torch.equal(traced(tokens.flip(0)), model(tokens.flip(0)))


def test_weights_of_a_block_are_views(model):
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


def test_weight_views_never_go_stale(model):
    view, before = model.blocks[0].attn.W_Q, model.W_Q
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(2)
    assert torch.equal(view, 2 * before[0])
    assert torch.equal(model.W_Q[0], 2 * before[0])
    assert model.double().W_Q.dtype == torch.float64


# --- how weights start

WIDE = dict(vocab_size=301, n_ctx=203, n_layers=5, n_heads=4, d_model=128, tied_unembed=False)
GROUPED = WIDE | dict(n_kv_heads=1, d_head=24, d_mlp=100, mlp="gated", unembed_bias=True)


def matrices(model):
    """Every drawn matrix by name, queries, keys and values apart."""
    for name, parameter in model.named_parameters():
        if ".attn.qkv.weight" in name:
            heads, kv_heads = model.config.n_heads, model.config.n_kv_heads
            sizes = [n * model.config.d_head for n in (heads, kv_heads, kv_heads)]
            for part, weight in zip("qkv", parameter.split(sizes), strict=True):
                yield f"{name} {part}", weight
        elif parameter.ndim == 2:
            yield name, parameter


def test_initialisation_is_gpt2s():
    for sizes in (WIDE, GROUPED):
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(**sizes))
        for name, weight in matrices(model):
            expected = 0.02 / math.sqrt(2 * 5) if name.endswith("output.weight") else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(weight.mean().item()) < 4 * expected / math.sqrt(weight.numel()), name
            # Normal, not uniform: a few of so many are beyond three standard deviations.
            assert (weight.abs() > 3 * expected).any(), name


@pytest.mark.parametrize("init", ["xavier", "kaiming"])
def test_initialisation_is_uniform_by_each_matrixs_sizes(init):
    torch.manual_seed(0)
    model, bounds = Transformer(TransformerConfig(**GROUPED, init=init)), set()
    for name, weight in matrices(model):
        if "embedding" in name and "un" not in name:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
            continue
        fan_out, fan_in = weight.shape
        # Variance 2 / (in + out), or 2 / in; that of a uniform number is bound² / 3.
        bound = math.sqrt(6 / (fan_in + fan_out)) if init == "xavier" else math.sqrt(6 / fan_in)
        assert 0.98 * bound < weight.abs().max().item() <= bound, name
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
        bounds.add(round(bound, 6))
    assert len(bounds) >= 3


@pytest.mark.parametrize("init", ["gpt2", "xavier", "kaiming"])
def test_vectors_start_at_zero_and_gains_at_one(init):
    model = Transformer(TransformerConfig(**GROUPED, init=init, qk_norm="head", embed_norm=True))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            gain = name.endswith("weight")
            assert torch.equal(parameter, torch.full_like(parameter, float(gain))), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("init", ["gpt2", "xavier", "kaiming"])
def test_a_trained_model_can_be_initialised_again(init, tied):
    config = TransformerConfig(**GROUPED | dict(init=init, tied_unembed=tied, qk_norm="head"))
    fresh, trained = Transformer(config), randomised(config)
    torch.manual_seed(3)
    initialise(fresh)
    torch.manual_seed(3)
    initialise(trained)
    assert trained.W_E.std().item() == pytest.approx(0.02, rel=0.05)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, fresh.get_parameter(name)), name


def test_tied_weights_are_one_tensor_and_untied_are_two():
    sizes = dict(vocab_size=23, n_ctx=17, n_layers=1, n_heads=2, d_model=10)
    tied, untied = Transformer(TransformerConfig(**sizes)), Transformer(TransformerConfig(**sizes, tied_unembed=False))  # fmt: skip
    assert tied.unembedding.weight is tied.token_embedding.weight
    assert untied.unembedding.weight is not untied.token_embedding.weight
    assert not torch.equal(untied.unembedding.weight, untied.token_embedding.weight)


def test_dropout_acts_in_training_only(tokens):
    sizes = dict(vocab_size=23, n_ctx=17, n_layers=1, n_heads=2, d_model=10)
    model = Transformer(TransformerConfig(**sizes, dropout=0.3))
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


@pytest.mark.parametrize("place", ["embed_dropout", "blocks.1.attn.pattern_dropout", "blocks.1.attn.output_dropout", "blocks.1.mlp.dropout"])  # fmt: skip
@pytest.mark.parametrize("mlp", ["plain", "gated"])
def test_dropout_has_four_places(place, mlp):
    model, tokens = variant("pre", dropout=0.5, mlp=mlp).train(), some_tokens()
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert {name.rpartition("blocks.")[2].lstrip("01.") for name in modules} == {"embed_dropout", "attn.pattern_dropout", "attn.output_dropout", "mlp.dropout"}  # fmt: skip
    for name, module in modules.items():
        assert module.p == 0.5
        module.p = 0.5 if name == place else 0.0
    assert not torch.equal(model(tokens), model(tokens))
    modules[place].p = 0.0
    assert torch.equal(model(tokens), model(tokens))


def test_every_parameter_counts_once(model):
    # 23*10 + 17*10; a block: two norms, 4*10*10 + 40, 2*10*13 + 23; the last norm.
    assert model.count_parameters() == 400 + 3 * (40 + 440 + 283) + 20
    model.blocks[0].requires_grad_(False)
    assert model.count_parameters() == 400 + 2 * (40 + 440 + 283) + 20


def test_half_precision_and_copies(model, tokens):
    half = copy.deepcopy(model).bfloat16()
    assert half(tokens).dtype == torch.bfloat16
    error = (half(tokens).float() - model(tokens)).abs().max()
    assert 0 < error < 0.05 * model(tokens).abs().max()
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_a_scale_of_embeddings_is_rounded_as_they_are():
    """As Gemma was trained: in bfloat16, the square root of 10 is 3.15625."""
    model = randomised(TransformerConfig(**SIZES, embed_scale=math.sqrt(10))).bfloat16()
    tokens = some_tokens()
    embed = model.token_embedding(tokens)
    assert torch.equal(embed, model.W_E[tokens] * 3.15625)
