"""Runs of pairs, compared with the model itself."""

import copy
import itertools
import types

import pytest
import torch

from hooks import HookedRunner, ModeError
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    edits,
    jacobian_lens,
    sweep,
    tuned_lens,
)
from interp.features.places import have_one_value
from interp.metrics import log_prob
from interp.report import derive_corruption
from interp.runs.runs import Runs
from interp.runs.sweep import effects_of_edits
from tests.streams import made

CLEAN, OTHER = torch.randint(23, (2, 3, 7), generator=torch.Generator().manual_seed(1))
ANSWERS = torch.tensor([[4, 9], [0, 22], [7, 1]])


def difference(logits, rows=slice(None)):
    right, wrong = logits[:, -1].gather(1, ANSWERS[rows]).unbind(1)
    return right - wrong


@pytest.mark.parametrize("direction", ["denoising", "noising", None])
def test_each_text_has_its_run(direction):
    model, pairs = made(), Pairs(CLEAN, OTHER, ANSWERS)
    runs = Runs(model, pairs, direction)
    run, source = (OTHER, CLEAN) if direction == "denoising" else (CLEAN, OTHER)
    assert torch.equal(runs.text.tokens, run)
    values = runs.cache(["embed"])["embed"], runs.source(["embed"])["embed"]
    assert all(map(torch.equal, values, (model.W_E[run], model.W_E[source])))
    for metric, tokens in ((runs.base, run), (runs.target, source)):
        torch.testing.assert_close(metric, difference(model(tokens)))


def test_an_edited_run_passes_gradients_and_a_sweep_does_not():
    model, vector = made(), torch.ones(14, dtype=torch.float64, requires_grad=True)
    runs = Runs(model, Pairs(CLEAN, OTHER, ANSWERS), "noising")
    hooks = {"blocks.1.resid_pre": edits.add(vector, pos=2)}
    logits = runs.logits(hooks, torch.tensor([2, 0]))
    with torch.no_grad():
        stream = model.input_resid(CLEAN[[2, 0]])
        context = model.context(CLEAN[[2, 0]])
        stream = model.run_block(0, stream, context)
        stream[:, 2] += vector
        for layer in range(1, len(model.blocks)):
            stream = model.run_block(layer, stream, context)
        torch.testing.assert_close(logits, model.unembed(stream))
    assert torch.autograd.grad(logits.sum(), vector)[0].any()
    base, effects = effects_of_edits(runs, [hooks])
    assert not effects.requires_grad
    torch.testing.assert_close((base + effects[0])[[2, 0]], difference(logits, [2, 0]))


def test_runs_are_refused_without_their_texts():
    model, alone = made(), Pairs(CLEAN, answers=ANSWERS)
    assert torch.equal(Runs(model, alone, "noising").text.tokens, CLEAN)
    for ask in (lambda: Runs(model, alone, "denoising"), lambda: Runs(model, alone).other):
        with pytest.raises(ValueError, match="corrupted texts"):
            ask()
    with pytest.raises(ModeError):
        Runs(made().train(), alone)
    with pytest.raises(TypeError, match="Pairs"):
        Runs(model, CLEAN)


def test_equal_texts_give_a_warning_with_the_number_of_the_example():
    model = made()
    clean = torch.tensor([[3, 1, 4], [1, 5, 2], [6, 5, 3]])
    other = torch.tensor([[3, 1, 5], [1, 5, 2], [6, 5, 3]])
    for analysis in (activation_patching, attribution_patching):
        with pytest.warns(UserWarning, match="text of example 1, 2 are equal"):
            effects = analysis(model, Pairs(clean, other, metric=log_prob(3)), "z", over="layer")
        assert effects.values[..., 0].abs().max() > 1e-4
        assert effects.values[..., 1:].abs().max() < 1e-12
    # The corrupted texts are not used.
    pairs = Pairs(clean, clean, metric=log_prob(3))
    assert activation_patching(model, pairs, "z", over="layer", edit=edits.zero()).values.any()


def test_effects_that_are_nan_give_a_warning():
    def broken():
        runs = itertools.count()
        # The metric is a number only in the first run, which is unedited.
        return lambda logits: logits[:, -1, 3] * (torch.nan if next(runs) else 1.0)

    given = made(), Pairs(CLEAN, metric=broken()), [{"embed": edits.zero()}]
    with pytest.warns(UserWarning, match="1 of 1 edits .*NaN"):
        assert sweep(*given).values.isnan().all()
    given = made(), Pairs(CLEAN, metric=broken()), "embed", ["pos"]
    with pytest.warns(UserWarning, match="7 of 7 edits .*NaN"):
        assert activation_patching(*given, edit=edits.zero()).values.isnan().all()


@pytest.fixture
def recurrent():
    """An attached model without attention, and a copy that is not attached.

    The model runs only with `use_cache=False`.
    """
    attachable = pytest.importorskip("tests.attachable")
    models = pytest.importorskip("models")
    config = attachable.config_of("jamba")
    config.attn_layer_period, config.attn_layer_offset = 9, 8
    model = attachable.made("jamba", config=config)
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="LinearAttention"):
        # With a cache, the model itself fails.
        twin(CLEAN + 3)
    with models.attach(model):
        yield types.SimpleNamespace(model=model, twin=twin)


def test_a_model_that_runs_only_without_a_cache_is_patched(recurrent):
    clean, other = CLEAN + 3, OTHER + 3
    pairs = Pairs(clean, other, ANSWERS)
    with torch.no_grad():
        stream = recurrent.twin(clean, use_cache=False, output_hidden_states=True).hidden_states[1]
        base = difference(recurrent.twin(other, use_cache=False).logits)
        expected = []
        for pos in range(clean.shape[1]):

            def patched(module, args, output, pos=pos):
                output[:, pos] = stream[:, pos]
                return output

            handle = recurrent.twin.model.layers[0].register_forward_hook(patched)
            expected.append(difference(recurrent.twin(other, use_cache=False).logits) - base)
            handle.remove()
    result = activation_patching(recurrent.model, pairs, "resid_post")
    torch.testing.assert_close(result.values[0], torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert attribution_patching(recurrent.model, pairs, "resid_post").values.any()


def test_every_analysis_runs_a_model_without_a_cache(recurrent):
    model, clean = recurrent.model, CLEAN + 3
    texts, point = clean.tolist(), "blocks.0.resid_post"
    assert tuned_lens(model, texts, steps=2).losses.isfinite().all()
    assert jacobian_lens(model, texts[:1], skip=0).weight.isfinite().all()
    assert have_one_value(point, "blocks.1.resid_pre", HookedRunner(model))
    corrupted = derive_corruption(model, clean[:1], log_prob(4))
    assert (corrupted != clean[:1]).sum() == 1


def test_the_users_choice_of_use_cache_stays(recurrent):
    def asked(use_cache):
        texts = {"input_ids": CLEAN + 3, "use_cache": use_cache}
        return activation_patching(recurrent.model, Pairs(texts, OTHER + 3, ANSWERS), "resid_post")

    assert asked(False).values.any()
    with pytest.raises(ValueError, match="LinearAttention"):
        asked(True)
