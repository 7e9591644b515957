"""Queries and keys as linear functions of the stream, and changes of patterns.

They are compared with points of the model and with finite differences.
"""

import pytest
import torch

from hooks import HookedRunner
from interp.graph import Graph
from interp.graph.scores import BlockScores
from models import attach
from tests.attachable import made
from tests.decoders import FOREIGN, KINDS, KNOWN
from tests.interp.attending import FORMS, TEXT, model_of


def scores_of(model, text=TEXT, layer=1):
    graph = Graph(model)
    names = ["q", "k", "v", "scores", "pattern"]
    attention = graph.layers[layer].attention
    read = graph.names[attention.reads]
    names = [read, *(f"blocks.{layer}.attn.{name}" for name in names)]
    _, cache = HookedRunner(graph.model).run_with_cache(text, names=names)
    scores = BlockScores(graph.layers[layer], cache[read], graph.model.context(text))
    return scores, attention, cache, cache[read]


@pytest.mark.parametrize("form", FORMS)
def test_readings_and_constants_are_the_queries_and_keys(form):
    scores, attention, cache, stream = scores_of(model_of(form))
    read = attention.norm(stream)
    for name, side in (("q", scores.q), ("k", scores.k)):
        heads = [
            torch.einsum("bpd,bped->bpe", read, side.directions(head))
            for head in range(side.value.shape[2])
        ]
        values = torch.stack(heads, 2) + side.constant
        torch.testing.assert_close(values, cache[name, 1], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(side.value, cache[name, 1])
    for name in ("v", "scores", "pattern"):
        torch.testing.assert_close(getattr(scores, name), cache[name, 1])
    assert scores.part("k", 5)[1] == 5 * scores.k.value.shape[2] // 6
    assert scores.scale == pytest.approx(attention.sublayer.scale, rel=1e-12)


@pytest.mark.parametrize("form", ["norm of each head", "norm of all heads"])
def test_the_map_is_the_norm_with_a_fixed_scale_and_the_rotation(form):
    """The map from a projection to a query multiplies by gain / scale, and then rotates.

    The reference is the rotation of the model, which is linear.
    """
    model = model_of(form)
    scores, attention, _, stream = scores_of(model)
    attn, drawn = attention.sublayer, torch.randn(2, 5, 6, 4).double()
    x = attn.project(attention.norm(stream))[0]
    axes = (-1,) if attn.q_norm.first == -1 else (-2, -1)
    scale = (x.square().mean(axes, keepdim=True) + attn.q_norm.eps).sqrt()
    gain = attn.q_norm.weight if axes == (-1,) else attn.q_norm.weight.view(6, 4)
    expected = attn.rotary(drawn / scale * gain, model.context(TEXT).rotation)
    mapped = torch.einsum("bphei,bphi->bphe", scores.q.map, drawn)
    torch.testing.assert_close(mapped, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_changes_of_patterns_equal_derivatives(form):
    scores, attention, cache, _ = scores_of(model_of(form))
    torch.manual_seed(1)
    worth = torch.randn(3, *scores.pattern.shape).double()
    at_scores, of_q, of_k = scores.moved_by(worth)
    # A score is linear in the query and in the key. So the parts of either side add up to the
    # score, multiplied by its gradient.
    whole = torch.einsum("tbhij,bhij->t", at_scores, cache["scores", 1])
    for gradient, name in ((of_q, "q"), (of_k, "k")):
        torch.testing.assert_close(torch.einsum("tbphe,bphe->t", gradient, cache[name, 1]), whole)
    if "cap" not in form:
        mean = (cache["pattern", 1] * worth).sum(-1, keepdim=True)
        torch.testing.assert_close(at_scores, cache["pattern", 1] * (worth - mean))
        torch.testing.assert_close(at_scores.sum(-1), torch.zeros_like(at_scores[..., 0]))
    # The change of the softmax if scores move, by finite differences.
    drawn, step = torch.randn_like(scores.scores), 1e-5
    hidden = cache["pattern", 1] == 0
    patterns = []
    for sign in (1, -1):
        moved = attention.sublayer.cap(cache["scores", 1] + sign * step * drawn)
        patterns.append(moved.masked_fill(hidden, -torch.inf).softmax(-1))
    change = (patterns[0] - patterns[1]) / (2 * step)
    expected = torch.einsum("tbhij,bhij->t", worth, change)
    torch.testing.assert_close(
        torch.einsum("tbhij,bhij->t", at_scores, drawn), expected, rtol=1e-6, atol=1e-8
    )


@torch.no_grad()
@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", [*KINDS, *KNOWN])
def test_maps_of_attached_models_with_constant_scales_of_norms(kind, monkeypatch):
    """A change of the projections that does not change the scale of the norm moves queries and keys
    by the map. The reference is a finite difference of the model's own code.
    """
    if kind in FOREIGN:
        monkeypatch.setattr("models.attached.attached.FAMILIES", {})
    model, text = made(kind), TEXT[:1]
    # The steps are large, because many norms always compute in float32.
    step, share = 1e-2, 3e-3
    attach(model)
    scores, attention, cache, stream = scores_of(model, text)
    attn, context = attention.sublayer, Graph(model).model.context(text)
    for n, (name, side) in enumerate((("q", scores.q), ("k", scores.k))):
        torch.testing.assert_close(side.value, cache[name, 1])
        projected = [*attn.project(attention.norm(stream))]
        x = projected[n]
        torch.manual_seed(n)
        drawn = torch.randn_like(x)
        along = x - x.mean(-1, keepdim=True) if kind in ("cohere", "persimmon") else x
        drawn -= (
            along * (drawn * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)
        )
        seen = []

        def keep(value, at, seen=seen):
            seen.append(value.detach())

        for sign in (1, -1):
            moved = [*projected]
            moved[n] = x + sign * step * drawn
            with HookedRunner(attn).hooks({name: keep}):
                attn.mix(*moved, context)
        change = (seen[0] - seen[1]) / (2 * step)
        mapped = torch.einsum("bphei,bphi->bphe", side.map, drawn)
        tolerance = share * float(mapped.abs().max())
        torch.testing.assert_close(mapped, change, rtol=10 * share, atol=tolerance)
        # The query is the map of the projection plus a rest, which contains the bias of the norm
        # and the parts that the map cannot express.
        whole = torch.einsum("bphei,bphi->bphe", side.map, x) + side.rest
        torch.testing.assert_close(whole, side.value)
