"""The transformer against independent references: transformers' GPT-2 and numpy in float64."""

import math

import numpy as np
import pytest
import torch

from models import Transformer, TransformerConfig


def numpy_forward(model, tokens):
    """GPT-2's equations in float64, written from the paper, one head at a time."""
    w = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    config = model.config
    d_head = config.d_model // config.n_heads

    def norm(x, at):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        gain, bias = w[f"{at}.weight"], w[f"{at}.bias"]
        return (x - mean) / np.sqrt(variance + config.norm_eps) * gain + bias

    def linear(x, at):
        return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    rows = []
    for row in tokens.numpy():
        x = w["token_embedding.weight"][row] + w["position_embedding.weight"][: len(row)]
        for layer in range(config.n_layers):
            at = f"blocks.{layer}"
            y = norm(x, f"{at}.ln1")
            q, k, v = (linear(y, f"{at}.attn.{part}") for part in ("query", "key", "value"))
            heads = []
            for head in range(config.n_heads):
                part = slice(head * d_head, (head + 1) * d_head)
                scores = q[:, part] @ k[:, part].T / math.sqrt(d_head)
                scores[np.triu_indices(len(row), 1)] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
            x = x + linear(np.concatenate(heads, -1), f"{at}.attn.output")
            y = gelu(linear(norm(x, f"{at}.ln2"), f"{at}.mlp.input"))
            x = x + linear(y, f"{at}.mlp.output")
        rows.append(norm(x, "ln_final") @ w["unembedding.weight"].T)
    return torch.tensor(np.stack(rows))


def test_equals_the_equations_in_float64(model, tokens):
    expected = numpy_forward(model, tokens)
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
            parts = transposed(theirs[f"h.{n}.attn.c_attn.{kind}"]).chunk(3)
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                ours[f"blocks.{n}.attn.{name}.{kind}"] = part
            for name, theirs_name in (
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
    resid = model.input_resid(tokens)
    for block in model.blocks:
        resid = block(resid)
    assert torch.equal(model.unembed(resid), model(tokens))


def test_weights_by_their_usual_names(model, tokens):
    x = torch.randn(4, 7, 10, generator=torch.Generator().manual_seed(3))
    attn, mlp = model.blocks[1].attn, model.blocks[1].mlp
    for name, layer in (("Q", attn.query), ("K", attn.key), ("V", attn.value)):
        weight, bias = getattr(model, f"W_{name}")[1], getattr(model, f"b_{name}")[1]
        by_head = torch.einsum("bpm,hmd->bphd", x, weight) + bias
        torch.testing.assert_close(by_head.flatten(2), layer(x))
    z = torch.randn(4, 7, 2, 5, generator=torch.Generator().manual_seed(4))
    out = torch.einsum("bphd,hdm->bpm", z, model.W_O[1]) + model.b_O[1]
    torch.testing.assert_close(out, attn.output(z.flatten(2)))
    torch.testing.assert_close(x @ model.W_in[1] + model.b_in[1], mlp.input(x))
    hidden = torch.randn(4, 7, 13, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(hidden @ model.W_out[1] + model.b_out[1], mlp.output(hidden))
    assert torch.equal(model.W_E[tokens] + model.W_pos[:7], model.input_resid(tokens))
    torch.testing.assert_close(model.ln_final(x) @ model.W_U, model.unembed(x))


def test_weight_views_never_go_stale(model):
    view, before = model.blocks[0].attn.W_Q, model.W_Q
    with torch.no_grad():
        model.blocks[0].attn.query.weight.mul_(2)
    assert view.data_ptr() == model.blocks[0].attn.query.weight.data_ptr()
    assert torch.equal(model.W_Q[0], 2 * before[0])
    assert model.double().W_Q.dtype == torch.float64


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=301, n_ctx=203, n_layers=5, n_heads=4, d_model=128)
    model = Transformer(config)
    scaled = 0.02 / math.sqrt(2 * 5)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert torch.equal(parameter, torch.full_like(parameter, float((".ln" in name and name.endswith("weight")) or name == "ln_final.weight")))  # fmt: skip
            continue
        expected = scaled if name.endswith("output.weight") else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(parameter.mean().item()) < 4 * expected / math.sqrt(parameter.numel())


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


def test_a_sequence_longer_than_the_context_says_both_lengths(model):
    with pytest.raises(ValueError, match="18 tokens do not fit the context of 17"):
        model(torch.zeros(1, 18, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_layers": 0}, "n_layers is at least 1, not 0"),
        ({"d_model": 10.5}, r"d_model is a int, not 10.5"),
        ({"n_heads": 3}, r"d_model is a multiple of n_heads \(3\), not 10"),
        ({"dropout": 1.0}, "dropout is at least 0 and below 1, not 1.0"),
        ({"norm_eps": 0.0}, "norm_eps is above 0, not 0.0"),
        ({"tied_unembed": 1}, "tied_unembed is a bool, not 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_config_names_field_value_and_rule(change, match):
    sizes = dict(vocab_size=23, n_ctx=17, n_layers=1, n_heads=2, d_model=10)
    with pytest.raises(ValueError, match=match):
        TransformerConfig(**sizes | change)


def test_config_is_frozen_and_fills_in_the_mlp():
    config = TransformerConfig(vocab_size=23, n_ctx=17, n_layers=1, n_heads=2, d_model=10)
    assert (config.d_mlp, config.d_head) == (40, 5)
    with pytest.raises(AttributeError):
        config.d_model = 12
