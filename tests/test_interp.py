"""Patching, the lens and head scores, against computations written out by hand."""

import dataclasses

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookPoint, ModeError
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


def test_run_with_cache_is_the_runners(model, tokens):
    logits, cache = run_with_cache(model, tokens, names="blocks.*.attn.pattern")
    torch.testing.assert_close(logits, model(tokens), atol=1e-5, rtol=0)
    _, expected = HookedRunner(model).run_with_cache(tokens, names="blocks.*.attn.pattern")
    assert list(cache) == list(expected)
    assert len(cache) == 3
    assert all(torch.equal(cache[name], expected[name]) for name in cache)


def test_metrics_by_hand():
    logits = torch.tensor([[[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]], [[1.0, 0.0, 0.0], [4.0, 1.0, 1.0]]])
    assert logit_diff(2, 0, pos=0)(logits).tolist() == [3.0, -1.0]
    assert logit_diff(0, 1)(logits).tolist() == [0.0, 3.0]
    expected = torch.tensor([1 / 3, torch.e**4 / (torch.e**4 + 2 * torch.e)]).log()
    torch.testing.assert_close(log_prob(0)(logits), expected)


@pytest.mark.parametrize("site", ["resid_pre", "attn_out", "mlp_out"])
def test_patching_by_layer_and_position_equals_splicing_by_hand(model, tokens, corrupted, site):
    metric = logit_diff(3, 11)
    result = activation_patching(model, tokens, corrupted, metric, site)
    assert result.axes == ("layer", "pos")
    assert result.values.shape == (3, 7)
    assert result.clean == pytest.approx(metric(model(tokens)).mean().item(), abs=1e-5)
    assert result.corrupted == pytest.approx(metric(model(corrupted)).mean().item(), abs=1e-5)
    for layer, pos in ((0, 2), (1, 2), (1, 6), (2, 6), (2, 0)):
        values = spliced(model, tokens, corrupted, site, layer, pos)
        assert result.values[layer, pos].item() == pytest.approx(
            metric(values).mean().item(), abs=1e-5
        )


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
        assert result.values[2, head].item() == pytest.approx(
            metric(logits).mean().item(), abs=1e-4
        )


def test_patching_over_layers_only_takes_whole_activations(model, tokens, corrupted):
    metric = logit_diff(3, 11)
    result = activation_patching(model, tokens, corrupted, metric, "resid_pre", over=("layer",))
    assert result.values.tolist() == pytest.approx([result.clean] * 3, abs=1e-5)
    assert result.normalized().tolist() == pytest.approx([1, 1, 1], abs=1e-4)


def test_normalized_and_plotted(model, tokens, corrupted):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    result = activation_patching(model, tokens, corrupted, logit_diff(3, 11))
    share = result.normalized()
    known = dataclasses.replace(
        result, values=torch.tensor([1.0, 7.0, -2.0]), clean=5.0, corrupted=1.0
    )
    assert known.normalized().tolist() == [0.0, 1.5, -0.75]
    axes = result.plot().axes
    assert (axes[0].get_xlabel(), axes[0].get_ylabel()) == ("pos", "layer")
    assert (axes[0].images[0].get_array() == share.numpy()).all()
    with pytest.raises(ValueError, match="a heat map has two axes, not 1"):
        dataclasses.replace(result, values=result.values[0], axes=("pos",)).plot()
    with pytest.raises(ValueError, match="nothing to normalize by"):
        dataclasses.replace(result, clean=result.corrupted).normalized()


def test_patching_in_half_precision_can_be_plotted(model, tokens, corrupted):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    result = activation_patching(model.bfloat16(), tokens, corrupted, logit_diff(3, 11))
    assert result.values.dtype == torch.float32
    assert len(result.plot().axes[0].images) == 1


def test_patching_keeps_the_dtype_of_the_metric(model, tokens, corrupted):
    model, metric = model.double(), log_prob(4)
    result = activation_patching(model, tokens, corrupted, metric, over=("layer",))
    assert result.values.dtype == torch.float64
    # A whole stream is the clean run from there on.
    assert result.values.tolist() == pytest.approx([result.clean] * 3, abs=1e-12)


@pytest.mark.parametrize("part", ["", "blocks.1.attn.pattern_dropout"])
def test_analyses_refuse_dropout(model, tokens, part):
    model.get_submodule(part).train()
    for analysis in (
        lambda: activation_patching(model, tokens, tokens, log_prob(4)),
        lambda: logit_lens(model, tokens),
        lambda: previous_token_scores(model, tokens),
        lambda: induction_scores(model, repeated_tokens(23, 3), 3),
    ):
        with pytest.raises(ModeError, match=r"^an analysis needs .* call model.eval\(\) first$"):
            analysis()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"site": "resid"}, "a site is one of resid_pre, attn_out, mlp_out, z, not 'resid'"),
        ({"over": ("layer", "head")}, r"resid_pre is patched over \('layer', 'pos'\)"),
        ({"over": ("pos",)}, "resid_pre is patched over"),
        ({"over": ()}, "resid_pre is patched over"),
        ({"over": ("layer", "pos", "pos")}, "resid_pre is patched over"),
        ({"over": ("layer", "layer")}, "resid_pre is patched over"),
    ],
)
def test_patching_that_makes_no_sense(model, tokens, corrupted, options, match):
    with pytest.raises(ValueError, match=match):
        activation_patching(model, tokens, corrupted, log_prob(1), **options)


@pytest.mark.usefixtures("unchecked")
def test_patching_prompts_of_different_lengths_says_both(model, tokens):
    with pytest.raises(ValueError, match=r"not \(4, 7\) and \(4, 6\)"):
        activation_patching(model, tokens, tokens[:, :6], log_prob(1))


def test_the_lens_reads_the_stream_between_blocks(model, tokens):
    lens = logit_lens(model, tokens)
    context = model.context(tokens)
    resid = model.input_resid(tokens, context)
    expected = [model.unembed(resid)]
    for block in model.blocks:
        resid = block(resid, context)
        expected.append(model.unembed(resid))
    torch.testing.assert_close(lens.logits, torch.stack(expected))
    torch.testing.assert_close(lens.logits[-1], model(tokens))
    torch.testing.assert_close(lens.probabilities().sum(-1), torch.ones(4, 4, 7))


def test_the_lens_needs_an_unembedding(tokens):
    with pytest.raises(TypeError, match="logit_lens needs a model with `unembed`"):
        logit_lens(nn.Sequential(nn.Embedding(23, 3)), tokens)


class Fixed(nn.Module):
    """A model whose heads attend as told: weights [layer, head, query, key] at a few places."""

    def __init__(self, pattern):
        super().__init__()
        self.blocks = nn.ModuleList(FixedLayer(weights) for weights in pattern)

    def forward(self, tokens):
        for block in self.blocks:
            block(tokens)
        return tokens


class FixedLayer(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights
        self.pattern = HookPoint("batch head query key")

    def forward(self, tokens):
        return self.pattern(self.weights.expand(len(tokens), *self.weights.shape))


def test_head_scores_by_hand():
    pattern = torch.zeros(2, 3, 6, 6)
    for query in range(1, 6):
        pattern[0, 1, query, query - 1] = 0.5
    pattern[1, 2, 4, 3] = 1.0
    for query in range(3, 6):
        pattern[1, 0, query, query - 2] = 0.25
    pattern[0, 2, 2, 0] = 1.0
    model = Fixed(pattern).eval()
    tokens = torch.tensor([[3, 1, 4, 3, 1, 4], [0, 0, 2, 0, 0, 2]])
    previous = previous_token_scores(model, tokens)
    torch.testing.assert_close(previous, torch.tensor([[0, 0.5, 0], [0, 0, 0.2]]))
    # Period 3: queries 3, 4 and 5 have an earlier copy, whose next token is two back.
    induction = induction_scores(model, tokens, 3)
    torch.testing.assert_close(induction, torch.tensor([[0, 0, 0.0], [0.25, 0, 0]]))


def test_head_scores_that_make_no_sense(model, tokens):
    with pytest.raises(ValueError, match="a previous token needs two positions, not 1"):
        previous_token_scores(model, tokens[:, :1])
    with pytest.raises(ValueError, match="do not repeat with period 3"):
        induction_scores(model, tokens, 3)
    with pytest.raises(ValueError, match="period is 2 to 6 for 7 positions, not 7"):
        induction_scores(model, tokens, 7)


def test_repeated_tokens():
    tokens = repeated_tokens(23, period=5, batch=3, copies=2, seed=4)
    assert tokens.shape == (3, 10)
    assert torch.equal(tokens[:, :5], tokens[:, 5:])
    assert not torch.equal(tokens, repeated_tokens(23, 5, 3, 2, seed=5))
    assert tokens.max() < 23


def test_the_bundled_model_has_induction_and_previous_token_heads():
    from models import load

    model = load("pydoc-4l")
    tokens = repeated_tokens(model.config.vocab_size, 40)
    assert induction_scores(model, tokens, 40).max() > 0.3
    assert previous_token_scores(model, tokens).max() > 0.3
