"""The worked example of tiny-transformer-handout.md, with and without a causal mask."""

import math

import numpy as np
import pytest
import torch

from hooks import HookedRunner
from models import Transformer, TransformerConfig, causal_mask, scaled_dot_product_attention

# The matrices of section 4.3.
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
# The outputs as decimals, computed by hand.
OUTPUT = {
    "whole": [[0.994440, 1.0], [1.401112, 1.203336], [0.993020, 1.255235]],
    "causal": [[1.0, 0.0], [0.330238, 1.339523], [0.993020, 1.255235]],
}


def attention_of_the_example(model_mask):
    """Return the values at the points of a model whose only head computes the example."""
    config = TransformerConfig(
        vocab_size=5,
        n_ctx=3,
        n_layers=1,
        n_heads=1,
        d_model=2,
        norm="none",
        positions="none",
        mlp="none",
        qkv_bias=False,
        out_bias=False,
    )
    model = Transformer(config).eval()
    with torch.no_grad():
        model.blocks[0].attn.output.weight.copy_(torch.eye(2))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    hooks = {
        f"blocks.0.attn.{name}": lambda value, point, part=part: part[None, :, None].clone()
        for name, part in (("q", Q), ("k", K), ("v", V))
    }
    runner = HookedRunner(model)
    with runner.hooks(hooks):
        return runner.run_with_cache(tokens, query_key_mask=model_mask)[1]


@pytest.mark.parametrize("kind", ["whole", "causal"])
def test_the_worked_example(kind):
    expected = {"whole": WHOLE, "causal": CAUSAL}[kind]
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
