"""Transformers that are not models of `transformers`.

`attach` finds their points by the same tests of values, or at modules that the user names.
"""

import copy

import pytest
import torch
from torch import nn

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    direct_logit_attribution,
    edge_attribution,
    edits,
    logit_lens,
)
from models import attach

D, HEADS, VOCAB = 12, 3, 23
TOKENS = torch.tensor([[3, 1, 4, 15, 9], [2, 6, 5, 3, 22]])


class Mixing(nn.Module):
    """Attention in a class with an unusual name.

    With `einsum`, it computes its products by einsum, a form that `attach` does not recognise.
    """

    def __init__(self, einsum):
        super().__init__()
        self.einsum, self.qkv, self.out = einsum, nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        batch, n, _ = x.shape
        q, k, v = self.qkv(x).view(batch, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if self.einsum else q @ k.mT
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        pattern = (scores * (D // HEADS) ** -0.5).masked_fill(~causal, -1e9)
        pattern = (
            pattern.exp() / pattern.exp().sum(-1, keepdim=True)
            if self.einsum
            else pattern.softmax(-1)
        )
        z = torch.einsum("bhqk,bhkd->bhqd", pattern, v) if self.einsum else pattern @ v
        return self.out(z.transpose(1, 2).reshape(batch, n, D))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, 3 * D), nn.GELU(), nn.Linear(3 * D, D)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self, einsum, scaled):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mixing, self.ffn = Mixing(einsum), FeedForward()
        self.share = nn.Parameter(torch.tensor(0.3)) if scaled else None

    def forward(self, x):
        x = x + self.mixing(self.n1(x))
        added = self.ffn(self.n2(x))
        return x + (added if self.share is None else added * self.share)


class Mine(nn.Module):
    """A language model without a config."""

    def __init__(self, einsum=False, scaled=False, listed=True):
        super().__init__()
        layers = [Layer(einsum, scaled) for _ in range(2)]
        self.token, self.place = nn.Embedding(VOCAB, D), nn.Embedding(7, D)
        self.layers = (nn.ModuleList if listed else nn.Sequential)(
            *([layers] if listed else layers)
        )
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, idx):
        x = self.token(idx) + self.place(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mine(**options):
    torch.manual_seed(0)
    return Mine(**options).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "roles"),
    [
        ({}, {}),
        ({}, dict(blocks="layers.*", attn="mixing", mlp="ffn")),
        ({}, dict(blocks="layers")),
        (dict(listed=False), dict(blocks="layers.*")),
        (dict(einsum=True), dict(attn="mixing", mlp="ffn")),
    ],
)
def test_points_and_edits_are_the_models_own(options, roles):
    model = mine(**options)
    twin, plain = copy.deepcopy(model), model(TOKENS)
    with attach(model, **roles) as attached:
        assert torch.equal(model(TOKENS), plain)
        runner = HookedRunner(model)
        has_heads = "blocks.0.attn.z" in runner.points
        assert has_heads != ("attn" in attached.left_out)
        assert has_heads == ("einsum" not in options)
        _, cache = runner.run_with_cache(TOKENS, names=["*_out", "*resid*", "*embed", "*.mlp.*"])
        x = twin.token(TOKENS)
        assert torch.equal(cache["embed"], x)
        x = x + twin.place(torch.arange(5))
        for n, layer in enumerate(twin.layers):
            assert torch.equal(cache["resid_pre", n], x)
            added = layer.mixing(layer.n1(x))
            assert torch.equal(cache["attn_out", n], added)
            x = x + added
            assert torch.equal(cache["resid_mid", n], x)
            hidden = layer.ffn.up(layer.n2(x))
            assert torch.equal(cache["mlp.pre", n], hidden)
            assert torch.equal(cache["mlp.post", n], layer.ffn.act(hidden))
            x = x + layer.ffn(layer.n2(x))
            assert torch.equal(cache["resid_post", n], x)
        handle = twin.layers[1].mixing.register_forward_hook(lambda module, args, out: out * 0)
        without = twin(TOKENS)
        handle.remove()
        hooks = {"blocks.1.attn_out": edits.zero()}
        assert torch.equal(runner.run_with_hooks(TOKENS, hooks=hooks), without)
        lens = logit_lens(model, runner.run_with_cache(TOKENS, lazy=True)[1])
        assert lens.tokens[-1, ..., 0].tolist() == plain.argmax(-1).tolist()
    assert {*vars(model)} == {*vars(twin)}


def test_analyses_of_a_transformer_without_a_config():
    model = mine()
    plain = model(TOKENS)
    pairs = Pairs(TOKENS, (TOKENS + 1) % VOCAB, torch.tensor([[1, 2], [3, 4]]))
    with attach(model), torch.no_grad():
        cache = HookedRunner(model).run_with_cache(TOKENS)[1]
        parts = direct_logit_attribution(model, cache, right=3, pos=-1)
        torch.testing.assert_close(parts.values.sum(0), plain[:, -1, 3])
        assert activation_patching(model, pairs, "z").values.shape == (2, HEADS, 2)
    with attach(model):
        edges = edge_attribution(model, pairs)
        assert edges.values.isfinite().all()
        assert (edges.values != 0).any()


class TwoLists(Mine):
    """A model with a second, shorter list of layers after its blocks.

    Some models have such layers to predict later tokens.
    """

    def __init__(self):
        super().__init__()
        self.later = nn.ModuleList([Layer(False, False)])

    def forward(self, idx):
        return super().forward(idx) + self.later[0](self.token(idx)).sum(-1, keepdim=True)


@torch.no_grad()
def test_the_larger_of_two_lists_has_the_points():
    model = TwoLists().eval()
    with attach(model):
        runner = HookedRunner(model)
        assert not [name for name in runner.points if name.startswith(("vision", "audio"))]
        _, cache = runner.run_with_cache(TOKENS, names="*.resid_pre")
        assert len(cache) == 2
        assert torch.equal(
            cache["resid_pre", 0], model.token(TOKENS) + model.place(torch.arange(5))
        )


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Mine has no list"):
        attach(mine(listed=False))
    with pytest.raises(ValueError, match=r"'layer\.\*' .*has token, place"):
        attach(mine(), blocks="layer.*")
    with pytest.raises(ValueError, match=r"'attention' must .*n1, n2"):
        attach(mine(), attn="attention")
    for wrong in (dict(attn="n1"), dict(mlp="mixing.qkv")):
        with pytest.raises(
            ValueError, match="must be a sublayer whose output is added to the stream"
        ):
            attach(mine(), **wrong)
    with pytest.raises(
        ValueError, match=r"'ffn' must be a sublayer whose output is added to the stream"
    ):
        attach(mine(scaled=True), attn="mixing", mlp="ffn")


def test_a_model_of_ones_own_is_attached_again():
    model = mine()
    with attach(model, mlp="ffn") as attached:
        assert attach(model, mlp="ffn") is attached
        assert attach(model) is not attached
    assert not hasattr(model, "blocks")
