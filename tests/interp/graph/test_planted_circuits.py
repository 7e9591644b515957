"""Circuits whose edges are known, because their weights are written by hand: found, and measured."""

import pytest
import torch

from interp import Pairs, edge_attribution, edge_patching, faithfulness
from interp.effects.evaluation import auroc, completeness, minimality
from interp.graph import Graph
from interp.graph.circuit import Circuit
from interp.graph.circuits import above, greedy, top
from models import Transformer, TransformerConfig
from tests.interp.reading.test_planted import END, TEXTS, B, C, D, E, induction

DIGITS, YES, NO, SUM = 7, 12, 13, 14


@torch.no_grad()
def comparison(sharp):
    """Heads 0 and 2 fetch the digits at positions 1 and 3, and the MLP compares their sum with 6.

    Head 1 fetches the digit at position 2, which nobody reads.
    """
    config = TransformerConfig(
        vocab_size=DIGITS, n_ctx=5, n_layers=1, n_heads=3, d_head=5, d_model=DIGITS + 5 + 4, d_mlp=2,
        norm="none", final_norm=False, tied_unembed=False, attn_scale=1.0, activation="relu",
    )  # fmt: skip
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
    # A ramp from 0 to 1 around a sum of 5.5, as steep as it is sharp.
    mlp.W_in[SUM] = sharp
    mlp.b_in.copy_(0.5 - 5.5 * sharp + torch.tensor([0.0, -1.0]))
    mlp.W_out[0, YES], mlp.W_out[1, YES] = 1.0, -1.0
    model.unembedding.weight[1, YES] = 1.0
    return model


def induction_pairs():
    """Texts that differ in what is copied, in the earlier copy of the last token, or in that token."""
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
        induction, induction_pairs, 1000.0, 3.0,
        ["input->a0.h1<v>", "a0.h1->a1.h2<k>", "input->a1.h2<q>", "input->a1.h2<v>", "a1.h2->logits"],
    ),
    "comparison": (
        comparison, comparison_pairs, 1.0, 0.05,
        ["input->a0.h0<v>", "input->a0.h2<v>", "a0.h0->m0", "a0.h2->m0", "m0->logits"],
    ),
}  # fmt: skip


CASES = pytest.mark.parametrize("name", KNOWN)


def case(name, is_saturated):
    make, pairs, sharp, soft, edges = KNOWN[name]
    model = make(sharp if is_saturated else soft)
    graph = Graph(model)
    return model, pairs(), graph, Circuit(graph, edges)


@CASES
def test_exact_patching_finds_exactly_the_edges(name):
    model, pairs, graph, known = case(name, is_saturated=True)
    found = edge_patching(model, pairs)
    assert auroc(found, known) == 1
    assert above(graph, found, 1e-9) == greedy(graph, found, len(known), signed=True) == known


@CASES
def test_gradients_find_them_where_nothing_is_saturated(name):
    model, pairs, graph, known = case(name, is_saturated=False)
    for method in ("eap", "eap_ig_inputs", "eap_ig_activations"):
        found = edge_attribution(model, pairs, method=method)
        assert auroc(found, known) == 1
        assert top(graph, found, len(known)) == known


@CASES
def test_gradients_miss_edges_where_something_is_saturated(name):
    model, pairs, graph, known = case(name, is_saturated=True)
    found = edge_attribution(model, pairs)
    assert auroc(found, known) < 0.9
    assert not {*known} <= {*above(graph, found, 1e-9)}


@CASES
def test_the_known_circuit_is_faithful_complete_and_minimal(name):
    model, pairs, graph, known = case(name, is_saturated=True)
    own, random = faithfulness(model, pairs, known).mean().tolist()
    assert own == pytest.approx(1, abs=0.01)
    assert abs(random) < 0.5
    rest = completeness(model, pairs, known)
    torch.testing.assert_close(rest.values, torch.zeros_like(rest.values), atol=1e-9, rtol=0)
    assert (minimality(model, pairs, known).mean() > 0.1).all()
    wider = known | Circuit(graph, ["input->m0"] if name == "comparison" else ["a0.h0->a1.h2<k>"])
    assert faithfulness(model, pairs, wider).mean()[0] == pytest.approx(own)
