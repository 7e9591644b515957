"""Tests of `without_adapter`: one model of peft is the model to edit and the source of values.

Each analysis must equal the same analysis of two separate models, the merged model and its base.
"""

import copy

import pytest
import torch

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    compare_models,
    edge_attribution,
    edge_patching,
    integrated_gradients,
    path_patching,
    without_adapter,
)
from models import attach
from tests.attachable import TOKENS, made

peft = pytest.importorskip("peft", reason="needs peft")
# peft reads an attribute that transformers has deprecated, and warns about GPT-2's weights.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient", "ignore:fan_in_fan_out")

TARGETS = {
    "llama": ["q_proj", "o_proj", "down_proj"],
    "gpt2": ["c_attn", "attn.c_proj", "mlp.c_proj"],
}
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
PAIRS = Pairs(dict(input_ids=TOKENS, attention_mask=MASK), answers=[5, 2, 11])

ANALYSES = {
    "activation_patching": lambda model, source: activation_patching(
        model, PAIRS, "z", source=source
    ),
    "attribution_patching": lambda model, source: attribution_patching(
        model, PAIRS, "mlp_out", source=source
    ),
    "integrated_gradients": lambda model, source: integrated_gradients(
        model, PAIRS, "resid_post", ["layer"], source=source, steps=4
    ),
    "edge_patching": lambda model, source: edge_patching(
        model, PAIRS, ["a0.h1->m1", "m0->logits", "a0.h2->a1.h0<q>"], source=source
    ),
    "path_patching": lambda model, source: path_patching(
        model, PAIRS, "logits", ["a0.h3", "m0"], source=source
    ),
    "edge_attribution": lambda model, source: edge_attribution(model, PAIRS, source=source),
}


def models_of(name):
    """Return a model with a random adapter, the merged model, and the base, all with points."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=TARGETS[name], init_lora_weights=False
    )
    adapted = peft.get_peft_model(made(name).double(), config).eval()
    adapted.double()
    merged = copy.deepcopy(adapted).merge_and_unload()
    models = adapted, merged, made(name).double()
    for model in models:
        attach(model)
    return models


@pytest.fixture(scope="module", params=TARGETS)
def three(request):
    return models_of(request.param)


@pytest.mark.filterwarnings("ignore:.*should add up:UserWarning")
@pytest.mark.parametrize("name", ANALYSES)
def test_one_model_with_its_adapter_off_equals_two_models(three, name):
    adapted, merged, base = three
    before = adapted(TOKENS).logits
    two = ANALYSES[name](merged, base)
    one = ANALYSES[name](adapted, without_adapter(adapted))
    scale = two.values.abs().max()
    assert scale > 1e-3
    torch.testing.assert_close(one.values, two.values, atol=1e-6 * scale, rtol=0)
    torch.testing.assert_close(one.base, two.base, atol=1e-6, rtol=0)
    torch.testing.assert_close(one.target, two.target, atol=1e-6, rtol=0)
    assert not torch.allclose(one.base, one.target, atol=1e-3)
    assert one.about["source"] == f"{type(adapted).__name__} without its adapter"
    # The adapter is on again, and no hook is left.
    assert torch.equal(adapted(TOKENS).logits, before)
    assert not HookedRunner(adapted).handles


def test_texts_without_a_metric_are_measured_by_the_divergence_from_the_base(three):
    adapted, _, base = three
    with torch.no_grad():
        ours, theirs = adapted(TOKENS).logits, base(TOKENS).logits
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    wanted = (log_p.exp() * (log_p - log_q)).sum(-1).mean(1)
    result = activation_patching(
        adapted, TOKENS, "resid_post", ["layer"], source=without_adapter(adapted)
    )
    torch.testing.assert_close(result.base, wanted)
    # The last stream of the base has the predictions of the base.
    torch.testing.assert_close(result.values[-1], -wanted)


def test_the_base_of_a_comparison_may_be_the_model_without_its_adapter(three):
    adapted, _, base = three
    one = compare_models(adapted, without_adapter(adapted), TOKENS)
    two = compare_models(adapted, base, TOKENS)
    torch.testing.assert_close(one.kl.values, two.kl.values, atol=1e-6, rtol=0)


def test_the_adapter_is_on_after_an_error(three):
    adapted = three[0]
    before = adapted(TOKENS).logits
    failing = HookedRunner(adapted).hooks({"blocks.0.mlp_out": lambda value, point: 1 / 0})
    with failing, pytest.raises(ZeroDivisionError):
        activation_patching(adapted, PAIRS, "z", source=without_adapter(adapted))
    assert torch.equal(adapted(TOKENS).logits, before)


def test_models_without_an_adapter_are_refused():
    with pytest.raises(ValueError, match="no adapter"):
        without_adapter(made("llama"))
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        without_adapter("llama")
