"""The protocol and the lens, compared with computations by hand."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import interp
from hooks import CacheError, HookedRunner, ModeError
from interp import Pairs, activation_patching, log_prob, logit_diff, logit_lens, run_with_cache
from interp.graph import Graph
from tests import tiny
from tests.interp.predictions import predictions

# The functions whose texts are the parts of a model that an analysis needs.
NEEDING = ("of", "plain")


@pytest.fixture
def corrupted(tokens):
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 7) % 23
    return changed


def test_a_transformer_has_every_part_of_the_protocol(model):
    protocol = interp.LanguageModel
    parts = [*protocol.__annotations__, *(n for n in vars(protocol) if not n.startswith("_"))]
    assert len(parts) == 14
    assert interp.protocol.of(model, *parts) is model
    assert all(hasattr(model.config, size) for size in interp.protocol.Sizes.__annotations__)
    with pytest.raises(TypeError, match=r"got Linear without W_V and W_O .*from_hf"):
        interp.protocol.of(nn.Linear(2, 3), "weight", "W_V", "W_O")


def test_no_analysis_needs_an_optional_part_of_the_protocol():
    """`test_suppressing` runs a model without `in_pieces`."""
    members = vars(interp.LanguageModel).items()
    (optional,) = [name for name, value in members if hasattr(value, "is_optional")]
    assert optional == "in_pieces"
    folder = Path(interp.__file__).parent
    for tree in [ast.parse(file.read_text()) for file in folder.rglob("*.py")]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in NEEDING:
                assert optional not in [ast.unparse(part).strip("'") for part in node.args]
            assert not (isinstance(node, ast.Attribute) and node.attr == optional)


def test_patching_accepts_outputs_with_logits_in_float64(model, tokens, corrupted):
    class Wrapping(type(model)):
        def forward(self, tokens):
            return SimpleNamespace(logits=super().forward(tokens))

    metric, expected = logit_diff(3, 11), model.double()(tokens)
    model.__class__ = Wrapping
    found = activation_patching(model, Pairs(tokens, corrupted, metric=metric), over=("layer",))
    # Patching the whole stream before a layer gives the logits of the clean run.
    wanted = metric(expected).detach()
    torch.testing.assert_close(found.base + found.values, wanted.expand(3, -1), rtol=0, atol=1e-12)


def test_patching_refuses_dropout(model, tokens):
    model.blocks[1].attn.pattern_dropout.train()
    with pytest.raises(ModeError, match=r"model.eval\(\).*module blocks.1.attn.pattern_dropout"):
        activation_patching(model, Pairs(tokens, tokens, metric=log_prob(4)))


@pytest.mark.parametrize("lazy", [False, True])
def test_the_lens_is_a_float64_unembedding_of_the_stream(model, tokens, lazy, monkeypatch):
    _, cache = run_with_cache(model, tokens, names=["*.resid_pre", "*.resid_post"], lazy=lazy)
    monkeypatch.setattr(interp.reading.affine, "_LOGITS_AT_ONCE", 23 * 4 * 5 + 1)
    unembed, sizes = model.unembed, []
    monkeypatch.setattr(model, "unembed", lambda x: sizes.append(x.shape) or unembed(x))
    targets = tokens.roll(-1, 1)
    lens = logit_lens(model, cache, targets=targets, top_k=4)
    # Each unembedding gets at most five positions of the seven, to save memory.
    assert {size[:2] for size in sizes} == {(4, 5), (4, 3)}
    expected = predictions(model, tokens)
    best = expected.sort(descending=True)
    close = dict(atol=1e-6, rtol=1e-5, check_dtype=False)
    assert torch.equal(lens.tokens, best.indices[..., :4])
    torch.testing.assert_close(lens.probabilities, best.values[..., :4], **close)
    wanted = expected.gather(-1, targets.expand(4, 4, 7)[..., None])
    torch.testing.assert_close(lens.target_probabilities, wanted[..., 0], **close)
    assert torch.equal(lens.target_ranks, (expected > wanted).sum(-1))
    logs = expected.log()
    torch.testing.assert_close(lens.entropy, -(expected * logs).sum(-1), **close)
    torch.testing.assert_close(lens.kl, (expected[-1] * (logs[-1] - logs)).sum(-1), **close)
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


def test_wrong_arguments_of_the_lens_are_errors(model, tokens):
    _, cache = run_with_cache(model, tokens)
    with pytest.raises(TypeError, match="Linear.*unembed"):
        logit_lens(nn.Linear(2, 3), cache)
    with pytest.raises(CacheError, match=r"names=.*resid_post.*close matches"):
        logit_lens(model, run_with_cache(model, tokens, names="*.resid_pre")[1])
    with pytest.raises(CacheError, match=r"batch, pos, d_model.*\[7, 10\]"):
        logit_lens(model, cache.at(batch=1))
    for wrong in (tokens[:1], tokens[:, 2:]):
        with pytest.raises(ValueError, match=r"targets must have .*\[4, 7\]; got"):
            logit_lens(model, cache, targets=wrong)
    other = type(model)(model.config.replace(n_ctx=19))
    with pytest.raises(CacheError, match="config hash"):
        logit_lens(other, cache)


def test_the_lens_of_some_positions_is_part_of_the_whole(model, tokens):
    part, whole = (
        logit_lens(model, run_with_cache(model, tokens, mode="residual", **options)[1])
        for options in ({"pos": [5, 2]}, {})
    )
    torch.testing.assert_close(part.kl, whole.kl[..., [5, 2]])


@pytest.mark.parametrize(
    "analysis",
    [
        *(interp.activation_patching, interp.attribution_patching, interp.top_attributions),
        *(interp.edge_attribution, interp.path_patching),
    ],
)
def test_an_analysis_of_a_model_that_is_not_attached_says_attach(analysis):
    model = tiny.model("GPT2LMHeadModel")
    pairs = interp.Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[3, 5, 4]]), [6])
    with pytest.raises(TypeError, match="models.attach"):
        analysis(model, pairs)


def test_printed_objects_are_short_and_name_their_kind(model, tokens):
    from models import KVCache

    cache = run_with_cache(model, tokens, mode="full")[1]
    spectra = interp.svd_targets(model, cache), interp.spectral.svd(torch.ones(2, 3, 5))
    parts = interp.decompose(model, cache, neurons=True)
    runner = HookedRunner(model)
    plan = runner.plan(tokens)
    for value in (*spectra, parts, runner, runner.points, plan, Graph(model), KVCache()):
        printed = repr(value)
        assert len(printed.splitlines()) <= 40
        assert len(printed) < 4000
        assert "object at" not in printed
    assert "wvwo [3, 2, 10, 10]" in repr(spectra[0])
