"""tiny-transformer-handout.md: its worked numbers, its small checks, and the shapes of its appendix."""

import math

import numpy as np
import pytest
import torch

from hooks import HookedRunner
from models import Transformer, TransformerConfig, build, causal_mask, scaled_dot_product_attention
from models.positions import Sinusoidal

# Section 4.3.
Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
K = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
V = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])


def close(ours, theirs, atol=1e-6):
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=ours.dtype), atol=atol, rtol=0)


# e^(1/√2) = 2.028115, e^(2/√2) = 4.113250. Rows of QKᵀ: 1 1 0, 0 1 1, 1 2 1.
E1, E2 = math.exp(1 / math.sqrt(2)), math.exp(2 / math.sqrt(2))
WHOLE = [
    [E1 / (2 * E1 + 1), E1 / (2 * E1 + 1), 1 / (2 * E1 + 1)],
    [1 / (2 * E1 + 1), E1 / (2 * E1 + 1), E1 / (2 * E1 + 1)],
    [E1 / (2 * E1 + E2), E2 / (2 * E1 + E2), E1 / (2 * E1 + E2)],
]
CAUSAL = [[1, 0, 0], [1 / (1 + E1), E1 / (1 + E1), 0], WHOLE[2]]
# As decimals, worked with paper and a table of exponentials.
PRINTED = {
    "whole": [[0.401112, 0.401112, 0.197776], [0.197776, 0.401112, 0.401112], [0.248255, 0.503490, 0.248255]],
    "causal": [[1, 0, 0], [0.330238, 0.669762, 0], [0.248255, 0.503490, 0.248255]],
}  # fmt: skip
OUTPUT = {
    "whole": [[0.994440, 1.0], [1.401112, 1.203336], [0.993020, 1.255235]],
    "causal": [[1.0, 0.0], [0.330238, 1.339523], [0.993020, 1.255235]],
}


def attention_of_the_example(model_mask):
    """The example as one head of a model's attention, all values seen through its points."""
    config = TransformerConfig(vocab_size=5, n_ctx=3, n_layers=1, n_heads=1, d_model=2, norm="none", positions="none", mlp="none", qkv_bias=False, out_bias=False)  # fmt: skip
    model = Transformer(config).eval()
    with torch.no_grad():
        model.blocks[0].attn.output.weight.copy_(torch.eye(2))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    hooks = {f"blocks.0.attn.{name}": lambda value, point, part=part: part[None, :, None].clone() for name, part in (("q", Q), ("k", K), ("v", V))}  # fmt: skip
    runner = HookedRunner(model)
    with runner.hooks(hooks):
        return runner.run_with_cache(tokens, query_key_mask=model_mask)[1]


@pytest.mark.parametrize("kind", ["whole", "causal"])
def test_the_worked_example(kind):
    expected = {"whole": WHOLE, "causal": CAUSAL}[kind]
    close(torch.tensor(expected), PRINTED[kind], 1e-6)
    close(torch.tensor(expected) @ V, OUTPUT[kind], 2e-6)
    mask = causal_mask(3) if kind == "causal" else None
    close(scaled_dot_product_attention(Q, K, V, mask), OUTPUT[kind], 2e-6)
    whole_numbers = (part.long() for part in (Q, K, V))
    close(scaled_dot_product_attention(*whole_numbers, mask), OUTPUT[kind], 2e-6)
    mixed = scaled_dot_product_attention(Q.int(), K.double(), V.long(), mask)
    close(mixed, OUTPUT[kind], 2e-6)
    additive = torch.zeros(3, 3) if mask is None else torch.where(mask, 0.0, -1e9)
    close(scaled_dot_product_attention(Q, K, V, additive), OUTPUT[kind], 2e-6)
    cache = attention_of_the_example(torch.ones(3, 3) if mask is None else None)
    products = [[1, 1, 0], [0, 1, 1], [1, 2, 1]]
    close(cache["scores", 0][0, 0] * math.sqrt(2), products)
    close(cache["scores", 0][0, 0], np.array(products) / math.sqrt(2))
    close(cache["pattern", 0][0, 0], expected)
    close(cache["z", 0][0, :, 0], OUTPUT[kind], 2e-6)
    close(cache["attn_out", 0][0], OUTPUT[kind], 2e-6)


def test_the_causal_mask_leaves_the_last_row_and_what_came_before():
    """Section 4.3 says the first row is left; it is the last that a causal mask leaves."""
    whole = scaled_dot_product_attention(Q, K, V)
    masked = scaled_dot_product_attention(Q, K, V, causal_mask(3))
    assert torch.equal(masked[2], whole[2])
    assert torch.equal(masked[0], V[0])
    assert (masked[:2] - whole[:2]).abs().max() > 0.1


def test_equal_scores_give_an_average_over_positions():
    """The specs' correction of section 5.3: zero queries, not identity projections, average."""
    config = TransformerConfig(vocab_size=5, n_ctx=9, n_layers=1, n_heads=2, d_model=6, qkv_bias=False, out_bias=False, norm="none")  # fmt: skip
    model = Transformer(config).eval()
    attn = model.blocks[0].attn
    x = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attn.W_Q.zero_()
        for part in (attn.W_K, attn.W_V):
            part.copy_(torch.eye(6).unflatten(1, (2, 3)).transpose(0, 1))
        attn.output.weight.copy_(torch.eye(6))
        everything = torch.ones(5, 5)
        close(attn(x, everything), x.mean(1, keepdim=True).expand(-1, 5, -1))
        close(attn(x), torch.stack([x[:, : n + 1].mean(1) for n in range(5)], 1))  # fmt: skip
        attn.W_Q.copy_(attn.W_K)
        difference = attn(x, everything) - x.mean(1, keepdim=True)
    assert difference.abs().max() > 0.1


# --- appendix B: one block, three tokens, by hand


def test_a_block_by_hand():
    """B=1, T=3, d_model=4, H=2, d_ff=8; LayerNorms without weights, weights of zeros, ones and twos.

    Each step is worked from the one before, in numpy or as numbers.
    """
    config = TransformerConfig(vocab_size=3, n_ctx=3, n_layers=1, n_heads=2, d_model=4, d_mlp=8, norm_eps=1e-12, norm_learned=False, positions="sinusoidal", activation="relu", tied_unembed=False, final_norm=False, qkv_bias=False, out_bias=False)  # fmt: skip
    model = Transformer(config).eval().double()
    block = model.blocks[0]
    eye = torch.eye(4).double()
    with torch.no_grad():
        # Token n is the unit vector n; queries are doubled, keys and values are as they come.
        model.token_embedding.weight.copy_(torch.eye(3, 4))
        block.attn.qkv.weight.copy_(torch.cat([2 * eye, eye, eye]))
        block.attn.output.weight.copy_(eye.flip(0))  # the output map reverses
        block.mlp.input.weight.copy_(torch.cat([eye, -eye]))
        block.mlp.input.bias.fill_(0.5)
        block.mlp.output.weight.copy_(torch.cat([eye, eye], 1))
        block.mlp.output.bias.fill_(0.25)
        model.unembedding.weight.copy_(torch.eye(3, 4))
        logits, cache = HookedRunner(model).run_with_cache(torch.tensor([[2, 0, 1]]))

    def same(name, expected, atol=1e-6):
        value = cache[name].numpy()
        np.testing.assert_allclose(value, np.broadcast_to(expected, value.shape), atol=atol)
        return np.asarray(expected, dtype=float)

    same("embed", [[[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]])
    # sin and cos of 0, 1, 2, then of 0, 0.01, 0.02.
    same("pos_embed", [[[0, 1, 0, 1], [0.841471, 0.540302, 0.0099998, 0.99995], [0.909297, -0.416147, 0.0199987, 0.9998]]])  # fmt: skip
    x = np.array([[0, 1, 1, 1], [1.841471, 0.540302, 0.0099998, 0.99995], [0.909297, 0.583853, 0.0199987, 0.9998]])  # fmt: skip
    same("blocks.0.resid_pre", x[None])

    def norm(x):
        centred = x - x.sum(-1, keepdims=True) / 4
        return centred / np.sqrt((centred**2).sum(-1, keepdims=True) / 4)

    # The first row has mean 3/4 and variance 3/16: -√3, and three times 1/√3.
    same("blocks.0.ln1.scale", [[[math.sqrt(3) / 4], [0.672123], [0.383724]]], 2e-6)
    y = norm(x)
    np.testing.assert_allclose(y[0], [-math.sqrt(3), *[1 / math.sqrt(3)] * 3])
    same("blocks.0.ln1.normalized", y[None], 2e-5)
    # The heads are the first and the last two dimensions.
    heads = [slice(0, 2), slice(2, 4)]
    same("blocks.0.attn.q", 2 * np.stack([y[:, h] for h in heads], 1)[None], 5e-5)
    same("blocks.0.attn.k", np.stack([y[:, h] for h in heads], 1)[None], 2e-5)
    same("blocks.0.attn.v", np.stack([y[:, h] for h in heads], 1)[None], 2e-5)
    scores = np.stack([2 * y[:, h] @ y[:, h].T / math.sqrt(2) for h in heads])
    # Position 0 with itself: 2 (3 + 1/3) / √2, and 2 (1/3 + 1/3) / √2.
    np.testing.assert_allclose(scores[:, 0, 0], [4.714045, 0.942809], atol=1e-6)
    same("blocks.0.attn.scores", scores[None], 1e-4)
    pattern, z = np.zeros((2, 3, 3)), np.zeros((3, 2, 2))
    for head, part in enumerate(heads):
        for query in range(3):
            weights = np.exp(scores[head, query, : query + 1])
            pattern[head, query, : query + 1] = weights / weights.sum()
            z[query, head] = pattern[head, query] @ y[:, part]
    same("blocks.0.attn.pattern", pattern[None], 1e-4)
    same("blocks.0.attn.z", z[None], 1e-4)
    attn_out = z.reshape(3, 4)[:, ::-1]
    same("blocks.0.attn_out", attn_out[None], 1e-4)
    # What position 0 reads is its own vector, reversed.
    np.testing.assert_allclose(attn_out[0], [*[1 / math.sqrt(3)] * 3, -math.sqrt(3)])
    mid = x + attn_out
    same("blocks.0.resid_mid", mid[None], 1e-4)
    y = norm(mid)
    same("blocks.0.ln2.normalized", y[None], 1e-3)
    pre = np.concatenate([y + 0.5, 0.5 - y], 1)
    same("blocks.0.mlp.pre", pre[None], 1e-3)
    post = np.maximum(pre, 0)
    same("blocks.0.mlp.post", post[None], 1e-3)
    mlp_out = post[:, :4] + post[:, 4:] + 0.25
    same("blocks.0.mlp_out", mlp_out[None], 1e-3)
    same("blocks.0.resid_post", (mid + mlp_out)[None], 1e-3)
    np.testing.assert_allclose(logits[0].numpy(), (mid + mlp_out)[:, :3], atol=1e-3)


# --- positions


def test_sinusoids_of_the_formula_and_lower_i_is_faster():
    """The specs' correction of section 7.2: wavelengths grow with i."""
    waves = Sinusoidal(6)(torch.arange(4)[None])[0]
    for pos in range(4):
        angles = [pos, pos / 10_000 ** (2 / 6), pos / 10_000 ** (4 / 6)]
        close(waves[pos], [f(a) for a in angles for f in (math.sin, math.cos)])
    steps = waves[1] - waves[0]
    assert steps[0] > steps[2] > steps[4] > 0


def test_without_positions_the_order_before_a_token_does_not_matter():
    """Section 7.1: dog bites man, man bites dog."""
    tokens = torch.tensor([[3, 1, 4, 2]])
    for positions, matters in (("none", False), ("sinusoidal", True)):
        model = build("tiny-lm", n_layers=1, d_model=8, positions=positions).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.3)
            difference = (model(tokens) - model(tokens[:, [1, 0, 2, 3]]))[:, -1].abs().max()
        assert (difference > 1e-4) == matters


# --- appendix A: the shapes, by name; one size each


def test_the_shapes_of_the_appendix():
    b, t, v, d, heads, d_head, d_ff = 3, 5, 23, 14, 2, 7, 11
    config = TransformerConfig(vocab_size=v, n_ctx=17, n_layers=1, n_heads=heads, d_model=d, d_mlp=d_ff, positions="sinusoidal")  # fmt: skip
    model = Transformer(config).eval()
    logits, cache = HookedRunner(model).run_with_cache(torch.randint(v, (b, t)))
    assert logits.shape == (b, t, v)
    shapes = {
        **dict.fromkeys(("embed", "pos_embed", "resid_pre", "resid_post", "attn_out"), (b, t, d)),
        **dict.fromkeys(("q", "k", "v", "z"), (b, t, heads, d_head)),
        **dict.fromkeys(("scores", "pattern"), (b, heads, t, t)),
        "mlp.post": (b, t, d_ff),
    }
    for name, shape in shapes.items():
        key = name if name.endswith("embed") else (name, 0)
        assert cache[key].shape == shape, name
    q, k, value = (cache[name, 0].transpose(1, 2) for name in "qkv")
    z = scaled_dot_product_attention(q, k, value, causal_mask(t))
    close(z, cache["z", 0].transpose(1, 2))
