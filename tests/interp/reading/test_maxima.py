"""The largest activations of many texts, compared with a search in runs of each text alone."""

import pytest
import torch

from hooks import HookedRunner, ModeError
from interp import max_activating

TEXTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [0], [2, 3, 8, 4, 6, 2, 6], [4, 3]]


def by_search(model, point, number):
    """Return all positions with their values, the largest first, from a separate run of each
    text.
    """
    found = []
    for text, tokens in enumerate(TEXTS):
        value = HookedRunner(model).capture(torch.tensor([tokens]), names=point)[point][0]
        found += [(number(v), text, pos, tuple(tokens)) for pos, v in enumerate(value)]
    return sorted(found, key=lambda place: -place[0])


DIRECTION = torch.randn(10, generator=torch.Generator().manual_seed(3))
KINDS = {
    "neuron": ("blocks.1.mlp.post", {"neuron": 7}, lambda v: v[7]),
    "head": ("blocks.2.attn.z", {"head": 1}, lambda v: v[1].norm()),
    "head along": (
        "blocks.0.attn.z",
        {"head": 0, "vector": DIRECTION[:5]},
        lambda v: v[0] @ DIRECTION[:5],
    ),
    "key head": ("blocks.1.attn.k", {"head": 1}, lambda v: v[1].norm()),
    "direction": ("blocks.1.resid_post", {"vector": DIRECTION}, lambda v: v @ DIRECTION),
    "norm": ("blocks.0.mlp_out", {}, lambda v: v.norm()),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "batch"), [(1, 3), (5, 2), (11, 16), (99, 4)])
def test_the_largest_of_all_places(model, kind, k, batch):
    point, options, number = KINDS[kind]
    found = max_activating(model, iter(TEXTS), point, k=k, batch=batch, **options)
    wanted = by_search(model, point, lambda v: float(number(v)))[:k]
    assert [place[1:4] for place in found] == [place[1:] for place in wanted]
    torch.testing.assert_close(
        [p.value for p in found], [p[0] for p in wanted], rtol=1e-4, atol=1e-5
    )


def test_the_largest_of_some_positions(model):
    point, options, number = KINDS["neuron"]
    places = max_activating(model, TEXTS, point, k=4, pos=[0, 3, 4], batch=4, **options)
    every = by_search(model, point, lambda v: float(number(v)))
    wanted = [place[1:] for place in every if place[2] in (0, 3, 4)][:4]
    assert [place[1:4] for place in places] == wanted


def test_of_equal_values_the_earlier_is_kept(model):
    texts = torch.tensor([[5, 6], [5, 7], [5, 8], [5, 9]])
    found = max_activating(model, texts, "blocks.0.resid_pre", k=3, vector=torch.zeros(10))
    assert [(p.text, p.pos) for p in found] == [(0, 0), (0, 1), (1, 0)]
    alone = max_activating(model, texts, "blocks.0.resid_pre", k=3, batch=1, vector=torch.zeros(10))
    assert alone == found


@pytest.mark.usefixtures("unchecked")
def test_places_that_do_not_exist_are_errors(model):
    for point, options, reason in (
        ("blocks.1.attn.z", {}, "got the axes batch pos head d_head"),
        ("blocks.1.attn.pattern", {"head": 1}, "got the axes batch query key"),
        ("blocks.1.mlp.post", {"neuron": 3, "vector": DIRECTION}, "got the axes batch pos"),
        ("blocks.1", {}, "no HookPoint"),
    ):
        with pytest.raises(ValueError, match=reason):
            max_activating(model, TEXTS, point, **options)
    for point, options, reason in (
        ("blocks.1.mlp.pots", {}, "close matches: blocks.1.mlp.post"),
        ("blocks.1.mlp_out", {"head": 1}, "no axis .*'head'"),
        ("*.mlp_out", {}, "close matches"),
    ):
        with pytest.raises(KeyError, match=reason):
            max_activating(model, TEXTS, point, **options)
    for texts, options, reason in (
        ([], {}, "got no text"),
        ([[3], []], {"batch": 1}, "text 1"),
        ([[0.5]], {}, "float32"),
        (TEXTS, {"k": 0}, "k must"),
        (TEXTS, {"batch": 0}, "got 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            max_activating(model, texts, "blocks.1.mlp_out", **options)
    with pytest.raises(ValueError, match="NaN"):
        max_activating(model, TEXTS, "blocks.1.mlp_out", vector=DIRECTION / 0 * 0)
    with pytest.raises(ModeError):
        max_activating(model.train(), TEXTS, "blocks.1.mlp_out")
