"""The protocol, the lens and head scores, against computations written out by hand."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import interp
from hooks import HookPoint, ModeError
from interp import (
    activation_patching,
    induction_scores,
    log_prob,
    logit_diff,
    logit_lens,
    previous_token_scores,
    repeated_tokens,
    run_with_cache,
)


@pytest.fixture
def corrupted(tokens):
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 7) % 23
    return changed


def test_a_transformer_has_every_part_of_the_protocol(model):
    protocol = interp.LanguageModel
    parts = [*protocol.__annotations__, *(n for n in vars(protocol) if not n.startswith("_"))]
    assert len(parts) == 12
    assert interp.protocol.of(model, *parts) is model
    assert all(hasattr(model.config, size) for size in interp.protocol.Sizes.__annotations__)
    with pytest.raises(TypeError, match=r"got Linear without W_V and W_O .*from_hf"):
        interp.protocol.of(nn.Linear(2, 3), "weight", "W_V", "W_O")


def test_patching_takes_outputs_that_hold_logits_in_float64(model, tokens, corrupted):
    class Wrapping(type(model)):
        def forward(self, tokens):
            return SimpleNamespace(logits=super().forward(tokens))

    metric, expected = logit_diff(3, 11), model.double()(tokens)
    model.__class__ = Wrapping
    found = activation_patching(model, tokens, corrupted, metric, over=("layer",))
    # A whole stream is the clean run from there on.
    wanted = metric(expected).detach()
    torch.testing.assert_close(found.base + found.values, wanted.expand(3, -1), rtol=0, atol=1e-12)


def test_patching_refuses_dropout(model, tokens):
    model.blocks[1].attn.pattern_dropout.train()
    with pytest.raises(ModeError, match=r"model.eval\(\)"):
        activation_patching(model, tokens, tokens, log_prob(4))


def predictions(model, tokens):
    """Probabilities [layer, batch, pos, vocab] by the forward pass and an unembedding in float64."""
    with torch.no_grad():
        context = model.context(tokens)
        streams = [model.input_resid(tokens, context)]
        for block in model.blocks:
            streams.append(block(streams[-1], context))
        x = torch.stack(streams).double()
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
        x = x * model.ln_final.weight.double() + model.ln_final.bias.double()
        exponentials = (x @ model.unembedding.weight.double().T).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_lens_is_a_float64_unembedding_of_the_stream(model, tokens, lazy, monkeypatch):
    _, cache = run_with_cache(model, tokens, names=["*.resid_pre", "*.resid_post"], lazy=lazy)
    monkeypatch.setattr(interp.reading.lens, "_LOGITS_AT_ONCE", 23 * 5 + 1)
    unembed, sizes = model.unembed, []
    monkeypatch.setattr(model, "unembed", lambda x: sizes.append(x.shape) or unembed(x))
    targets = tokens.roll(-1, 1)
    lens = logit_lens(model, cache, tokens, targets=targets, top_k=4)
    # Five rows at most, though layer, batch and pos make 112.
    assert {size[:2] for size in sizes} == {(1, 5), (1, 2)}
    expected = predictions(model, tokens)
    best = expected.sort(descending=True)
    close = dict(atol=1e-6, rtol=1e-5, check_dtype=False)
    assert torch.equal(lens.tokens, best.indices[..., :4])
    torch.testing.assert_close(lens.probabilities, best.values[..., :4], **close)
    wanted = expected.gather(-1, targets.expand(4, 4, 7)[..., None])
    torch.testing.assert_close(lens.target_probabilities, wanted[..., 0], **close)
    assert torch.equal(lens.target_ranks, (expected > wanted).sum(-1))
    followed = logit_lens(model, cache)
    predicted = model(tokens).argmax(-1)
    assert torch.equal(followed.tokens[-1, ..., 0], predicted)
    wanted = expected.gather(-1, predicted.expand(4, 4, 7)[..., None])[..., 0]
    torch.testing.assert_close(followed.target_probabilities, wanted, **close)


def test_the_lens_is_in_float32_for_half_precision(model, tokens):
    _, cache = run_with_cache(model.bfloat16(), tokens, names=["*.resid_pre", "*.resid_post"])
    lens = logit_lens(model, cache, top_k=23)
    assert (lens.probabilities.double().sum(-1) - 1).abs().max() < 1e-6
    with torch.no_grad():
        expected = model.unembed(cache["resid_pre", 1]).double().softmax(-1).max(-1).values.float()
    torch.testing.assert_close(lens.probabilities[1, ..., 0], expected)


def test_the_lens_needs_an_unembedding_and_the_whole_stream(model, tokens):
    _, cache = run_with_cache(model, tokens, names="*.resid_pre")
    with pytest.raises(TypeError, match="Linear.*unembed"):
        logit_lens(nn.Linear(2, 3), cache)
    with pytest.raises(KeyError, match="resid_post"):
        logit_lens(model, cache)


class Fixed(nn.Module):
    """A model whose heads attend as told: weights [layer, head, query, key] at a few places."""

    def __init__(self, pattern):
        super().__init__()
        self.weights = pattern
        self.blocks = nn.ModuleList(nn.Module() for _ in pattern)
        for block in self.blocks:
            block.pattern = HookPoint("batch head query key")

    def forward(self, tokens):
        for block, weights in zip(self.blocks, self.weights, strict=True):
            block.pattern(weights.expand(len(tokens), *weights.shape))
        return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_scores_by_hand(dtype):
    pattern = torch.zeros(2, 3, 6, 6, dtype=dtype)
    for query in range(1, 6):
        pattern[0, 1, query, query - 1] = 0.5
    pattern[1, 2, 4, 3] = 1.0
    for query in range(3, 6):
        pattern[1, 0, query, query - 2] = 0.25
    pattern[0, 2, 2, 0] = 1.0
    model = Fixed(pattern)
    tokens = torch.tensor([[3, 1, 4, 3, 1, 4], [0, 0, 2, 0, 0, 2]])
    _, cache = run_with_cache(model, tokens, names="*.pattern")
    previous = previous_token_scores(model, cache, tokens)
    torch.testing.assert_close(previous, torch.tensor([[0, 0.5, 0], [0, 0, 0.2]]))
    # Period 3: queries 3, 4 and 5 have an earlier copy, whose next token is two back.
    induction = induction_scores(model, cache, tokens)
    torch.testing.assert_close(induction, torch.tensor([[0, 0, 0.0], [0.25, 0, 0]]))


def test_head_scores_that_make_no_sense(model):
    tokens = repeated_tokens(23, period=3, batch=2)
    _, cache = run_with_cache(model, tokens, names="*.pattern")
    _, part = run_with_cache(model, tokens, names="*.pattern", positions=slice(2, 5))
    for score in (previous_token_scores, induction_scores):
        with pytest.raises(ValueError, match="3 queries and 6 keys"):
            score(model, part, tokens)
    with pytest.raises(ValueError, match="1 queries"):
        previous_token_scores(model, run_with_cache(model, tokens[:, :1], names="*.pattern")[1])
    for wrong in (tokens.sort().values, tokens[:, :5], torch.full((2, 6), 9)):
        with pytest.raises(ValueError, match=str(wrong[0, :3].tolist())[1:-1]):
            induction_scores(model, cache, wrong)
    for other in (tokens[:1], tokens.repeat(1, 2)):
        with pytest.raises(ValueError, match=re.escape(str(tuple(other.shape)))):
            induction_scores(model, cache, other)
