"""The protocol, metrics, patching, the lens and head scores, against computations written out by hand."""

import dataclasses
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


def test_metrics_by_hand():
    logits = torch.tensor([[[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]], [[1.0, 0.0, 0.0], [4.0, 1.0, 1.0]]])
    expected = torch.tensor([1 / 3, torch.e**4 / (torch.e**4 + 2 * torch.e)]).log()
    for given in (logits, logits.bfloat16()):
        assert logit_diff(2, 0, pos=0)(given).tolist() == [3.0, -1.0]
        assert logit_diff(0, 1)(given).tolist() == [0.0, 3.0]
        torch.testing.assert_close(log_prob(0)(given), expected)


@pytest.mark.parametrize("site", ["resid_pre", "attn_out", "mlp_out"])
def test_patching_by_layer_and_position_equals_splicing_by_hand(model, tokens, corrupted, site):
    metric = logit_diff(3, 11)
    result = activation_patching(model, tokens, corrupted, metric, site)
    assert result.axes == ("layer", "pos")
    assert result.values.shape == (3, 7)
    assert result.clean == pytest.approx(metric(model(tokens)).mean().item(), abs=1e-5)
    assert result.corrupted == pytest.approx(metric(model(corrupted)).mean().item(), abs=1e-5)
    for layer, pos in ((0, 2), (1, 2), (1, 6), (2, 6), (2, 0)):
        expected = metric(spliced(model, tokens, corrupted, site, layer, pos)).mean().item()
        assert result.values[layer, pos].item() == pytest.approx(expected, abs=1e-5)


def spliced(model, clean, corrupted, site, layer, pos):
    """The forward pass of both runs side by side, one position of one value taken across."""
    context = model.context(clean)
    runs = [model.input_resid(clean, context), model.input_resid(corrupted, context)]

    def cross(name, values, at):
        if name == site and at == layer:
            values[1] = values[1].clone()
            values[1][:, pos] = values[0][:, pos]
        return values

    for at, block in enumerate(model.blocks):
        runs = cross("resid_pre", runs, at)
        added = cross("attn_out", [block.attn(block.ln1(x), context) for x in runs], at)
        runs = [x + y for x, y in zip(runs, added, strict=True)]
        added = cross("mlp_out", [block.mlp(block.ln2(x)) for x in runs], at)
        runs = [x + y for x, y in zip(runs, added, strict=True)]
    return model.unembed(runs[1])


def test_patching_heads_adds_the_difference_of_their_outputs(model, tokens, corrupted):
    """In the last layer a head's patch moves attn_out by (z_clean - z_corrupted) W_O."""
    metric = log_prob(4)
    result = activation_patching(model, tokens, corrupted, metric, "z")
    assert result.axes == ("layer", "head")
    assert result.values.shape == (3, 2)
    _, clean = run_with_cache(model, tokens, names="*.z")
    _, bad = run_with_cache(model, corrupted, names=["blocks.2.attn.z", "blocks.2.resid_mid"])
    block = model.blocks[2]
    for head in range(2):
        difference = clean["z", 2][:, :, head] - bad["z", 2][:, :, head]
        mid = bad["resid_mid", 2] + difference @ model.W_O[2, head]
        logits = model.unembed(mid + block.mlp(block.ln2(mid)))
        expected = metric(logits).mean().item()
        assert result.values[2, head].item() == pytest.approx(expected, abs=1e-4)


def test_patching_whole_layers_in_float64_from_outputs_that_hold_logits(model, tokens, corrupted):
    class Wrapping(type(model)):
        def forward(self, tokens):
            return SimpleNamespace(logits=super().forward(tokens))

    metric, expected = logit_diff(3, 11), model.double()(tokens)
    model.__class__ = Wrapping
    result = activation_patching(model, tokens, corrupted, metric, over=("layer",))
    assert result.clean == pytest.approx(metric(expected).mean().item(), abs=1e-12)
    assert result.values.dtype == torch.float64
    # A whole stream is the clean run from there on.
    assert result.values.tolist() == pytest.approx([result.clean] * 3, abs=1e-12)


def test_normalized_and_plotted(model, tokens, corrupted):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    # Means over rows in half precision are coarse, and Matplotlib does not take bfloat16.
    result = activation_patching(model.bfloat16(), tokens, corrupted, lambda x: x[:, -1, 3])
    values = torch.tensor([1.0, 7.0, -2.0])
    known = dataclasses.replace(result, values=values, clean=5.0, corrupted=1.0)
    assert known.normalized().tolist() == [0.0, 1.5, -0.75]
    axes = result.plot().axes
    assert (axes[0].get_xlabel(), axes[0].get_ylabel()) == ("pos", "layer")
    assert (axes[0].images[0].get_array() == result.normalized().numpy()).all()
    image = dataclasses.replace(known, values=torch.tensor([[1.0, -7.0]])).plot().axes[0].images[0]
    assert image.get_clim() == (-2.0, 2.0)  # white is 0
    with pytest.raises(ValueError, match="layer"):  # a heat map of one axis
        dataclasses.replace(known, axes=("layer",)).plot()
    with pytest.raises(ValueError, match=str(result.corrupted)):
        dataclasses.replace(result, clean=result.corrupted).normalized()


def test_patching_refuses_dropout(model, tokens):
    model.blocks[1].attn.pattern_dropout.train()
    with pytest.raises(ModeError, match=r"model.eval\(\)"):
        activation_patching(model, tokens, tokens, log_prob(4))


def test_metrics_of_integers_and_of_one_number_for_all_rows(model, tokens, corrupted):
    def ranks(logits):
        return (logits[:, -1] > logits[:, -1, 3:4]).sum(-1)

    for metric, rows in ((ranks, 4), (lambda logits: ranks(logits).sum().item(), 1)):
        result = activation_patching(model, tokens, corrupted, metric, over=("layer",))
        clean, other = (ranks(model(text)).sum().item() / rows for text in (tokens, corrupted))
        assert (result.values.tolist(), result.corrupted) == ([clean] * 3, other)
        assert result.values.dtype == torch.float32


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"metric": lambda logits: logits[:, -1]}, r"\[4\].*\(4, 23\)"),
        ({"site": "resid"}, "attn_out.*'resid'"),
        ({"over": ("layer", "head")}, r"'pos'.*resid_pre.*\('layer', 'head'\)"),
        ({"over": ("layer", "layer")}, r"\('layer', 'layer'\)"),
        ({"corrupted": torch.zeros(4, 6, dtype=torch.int64)}, r"\(4, 7\) and \(4, 6\)"),
    ],
)
def test_patching_that_makes_no_sense(model, tokens, options, match):
    with pytest.raises(ValueError, match=match):
        activation_patching(model, tokens, **{"corrupted": tokens, "metric": log_prob(1)} | options)


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
