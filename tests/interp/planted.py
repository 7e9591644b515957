"""Models whose circuit is known, because their weights are written by hand."""

import torch

from interp import Pairs
from interp.graph import Graph
from interp.graph.circuit import Circuit
from models import Transformer, TransformerConfig

V, N = 13, 11
# The residual stream has four parts: the token, its position, the token before it, and the answer.
TOKEN, PLACE, BEFORE, ANSWER = (
    slice(0, V),
    slice(V, V + N),
    slice(V + N, 2 * V + N),
    slice(2 * V + N, 3 * V + N),
)
PREVIOUS, INDUCTION = (0, 1), (1, 2)


@torch.no_grad()
def attention_only(n_tokens, n_ctx, d_head, d_model):
    """Return a model of two layers with three heads, without MLPs, norms and biases.

    All weights are 0.
    """
    config = TransformerConfig(
        vocab_size=n_tokens,
        n_ctx=n_ctx,
        n_layers=2,
        n_heads=3,
        d_head=d_head,
        d_model=d_model,
        norm="none",
        final_norm=False,
        mlp="none",
        tied_unembed=False,
        qkv_bias=False,
        out_bias=False,
        attn_scale=1.0,
    )
    model = Transformer(config).double().eval()
    for weights in model.parameters():
        weights.zero_()
    return model


@torch.no_grad()
def induction(sharp=100.0):
    """Return a model with a known induction circuit.

    Head 1 of layer 0 copies the token before into the stream. Head 2 of layer 1 attends to the
    positions where the token before equals the current token, and copies the token at these
    positions to the answer. All other weights are 0.
    """
    model = attention_only(n_tokens=V, n_ctx=N, d_head=V, d_model=3 * V + N)
    model.token_embedding.weight[:, TOKEN] = torch.eye(V)
    model.position_embedding.weight[:, PLACE] = torch.eye(N)
    model.unembedding.weight[:, ANSWER] = torch.eye(V)
    reads = {PREVIOUS: (PLACE, PLACE, BEFORE), INDUCTION: (TOKEN, BEFORE, ANSWER)}
    for (layer, head), (query, key, out) in reads.items():
        attn = model.blocks[layer].attn
        size = query.stop - query.start
        # For the head that attends to the token before, the query of a position is the key of the
        # position before it.
        match = torch.eye(size).roll(1, 0) if head == PREVIOUS[1] else torch.eye(size)
        attn.W_Q[head, query, :size] = sharp * match
        attn.W_K[head, key, :size] = torch.eye(size)
        attn.W_V[head, TOKEN] = torch.eye(V)
        attn.W_O[head, :, out] = torch.eye(V)
    return model


# Texts in which B follows A, and W follows D. The last token is A, so the answer is B. Tokens from
# 5 on are only fillers.
A, B, C, D, W, E = 0, 1, 2, 3, 4, 5
TEXTS = torch.tensor(
    [[x, x, 8, A, B, y, z, D, W, y, A] for x, y, z in ((6, 7, 9), (10, 6, 6), (12, 11, 10))]
)
END = N - 1


DIGITS, YES, NO, SUM = 7, 12, 13, 14


@torch.no_grad()
def comparison(sharp):
    """Return a model that compares the sum of two digits with 6.

    Heads 0 and 2 copy the digits at positions 1 and 3, and the MLP compares their sum with 6. Head
    1 copies the digit at position 2, which no later component reads.
    """
    config = TransformerConfig(
        vocab_size=DIGITS,
        n_ctx=5,
        n_layers=1,
        n_heads=3,
        d_head=5,
        d_model=DIGITS + 5 + 4,
        d_mlp=2,
        norm="none",
        final_norm=False,
        tied_unembed=False,
        attn_scale=1.0,
        activation="relu",
    )
    model = Transformer(config).double().eval()
    for weights in model.parameters():
        weights.zero_()
    model.token_embedding.weight[:, :DIGITS] = torch.eye(DIGITS)
    model.position_embedding.weight[:, DIGITS:YES] = torch.eye(5)
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    for head, (pos, out) in enumerate([(1, SUM), (2, SUM + 1), (3, SUM)]):
        attn.W_Q[head, DIGITS + 4, 0] = 100.0
        attn.W_K[head, DIGITS + pos, 0] = 1.0
        attn.W_V[head, :DIGITS, 0] = torch.arange(DIGITS).double()
        attn.W_O[head, 0, out] = 1.0
    # The MLP computes a ramp from 0 to 1 around a sum of 5.5. `sharp` is its slope.
    mlp.W_in[SUM] = sharp
    mlp.b_in.copy_(0.5 - 5.5 * sharp + torch.tensor([0.0, -1.0]))
    mlp.W_out[0, YES], mlp.W_out[1, YES] = 1.0, -1.0
    model.unembedding.weight[1, YES] = 1.0
    return model


def induction_pairs():
    """Return pairs of texts of three kinds: they differ in the token that is copied, in the earlier
    copy of the last token, or in the last token.
    """
    kinds = []
    for pos, token in ((4, C), (3, E), (END, D)):
        corrupted = TEXTS.clone()
        corrupted[:, pos] = token
        kinds.append(corrupted)
    return Pairs(TEXTS.repeat(3, 1), torch.cat(kinds), torch.tensor([[B, C]] * 9))


def comparison_pairs():
    digits = torch.tensor([[0, 6, 3, 5, 1], [2, 4, 1, 3, 1], [1, 5, 0, 2, 3], [3, 3, 6, 6, 2]])
    others = torch.tensor([[0, 0, 1, 1, 1], [2, 1, 5, 2, 1], [1, 0, 4, 0, 3], [3, 1, 2, 0, 2]])
    return Pairs(digits, others, torch.tensor([[1, 0]] * 4))


KNOWN = {
    "induction": (
        induction,
        induction_pairs,
        1000.0,
        3.0,
        [
            "input->a0.h1<v>",
            "a0.h1->a1.h2<k>",
            "input->a1.h2<q>",
            "input->a1.h2<v>",
            "a1.h2->logits",
        ],
    ),
    "comparison": (
        comparison,
        comparison_pairs,
        1.0,
        0.05,
        ["input->a0.h0<v>", "input->a0.h2<v>", "a0.h0->m0", "a0.h2->m0", "m0->logits"],
    ),
}


def case(name, is_saturated):
    make, pairs, sharp, soft, edges = KNOWN[name]
    model = make(sharp if is_saturated else soft)
    graph = Graph(model)
    return model, pairs(), graph, Circuit(graph, edges)
