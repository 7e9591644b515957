"""Changes of a model after `attach`: an error, and the right numbers after a second `attach`."""

import copy

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError
from interp import compare_models, logit_lens, run_with_cache
from models import attach
from tests import tiny

pytest.importorskip("transformers", reason="needs the extra hf")

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
KINDS = {
    "llama": ("LlamaForCausalLM", dict(tie_word_embeddings=False)),
    "gpt2": ("GPT2LMHeadModel", dict(n_inner=17)),
    "phi3": ("Phi3ForCausalLM", {}),
    "neox": ("GPTNeoXForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        dict(final_logit_softcapping=3.0, sliding_window=3, attn_implementation="eager"),
    ),
    "granite": ("GraniteForCausalLM", dict(logits_scaling=2.0, residual_multiplier=0.7)),
    "cohere": ("CohereForCausalLM", dict(logit_scale=0.3)),
}


def made(kind):
    """Return a model with large random weights in float64, the same at each call."""
    name, sizes = KINDS[kind]
    return tiny.redraw(tiny.model(name, **sizes).double(), 0.3)


def new_head(model):
    head = copy.deepcopy(model.get_output_embeddings())
    head.weight = nn.Parameter(head.weight.flip(0).clone())
    model.set_output_embeddings(head)


def resized(model):
    model.resize_token_embeddings(29, mean_resizing=False)
    model.double().eval()


def without_cap(model):
    model.config.final_logit_softcapping = None


def other_divisor(model):
    model.config.logits_scaling = 2.5


def other_factor(model):
    model.logit_scale = 0.7


def other_residual(model):
    for layer in model.model.layers:
        layer.residual_multiplier = 0.9


def other_epsilon(model):
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.5)


def exchanged_mlps(model):
    layers = model.base_model.layers
    layers[0].mlp, layers[2].mlp = layers[2].mlp, layers[0].mlp


CHANGES = [
    ("llama", new_head),
    ("gpt2", new_head),
    ("llama", resized),
    ("gemma2", without_cap),
    ("granite", other_divisor),
    ("granite", other_residual),
    ("cohere", other_factor),
    ("llama", other_epsilon),
    ("gpt2", other_epsilon),
    ("phi3", exchanged_mlps),
    ("neox", exchanged_mlps),
]


@pytest.mark.parametrize(("kind", "change"), CHANGES)
@torch.no_grad()
def test_a_run_after_a_change_asks_for_attach_and_then_has_the_numbers_of_the_model(kind, change):
    plain = made(kind)
    change(plain)
    norms, states = [], []
    for name in ("norm", "ln_f", "final_layer_norm"):
        if norm := getattr(plain.base_model, name, None):
            norms.append(norm)
    handle = norms[0].register_forward_hook(lambda _, args, output: states.append(args[0]))
    logits = plain(TOKENS).logits
    handle.remove()
    model = made(kind)
    attach(model)
    change(model)
    with pytest.raises(HookError, match=r"call attach\(model\) again"):
        model(TOKENS)
    attach(model)
    output, cache = HookedRunner(model).run_with_cache(TOKENS)
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache["resid_post", -1], states[0], rtol=1e-4, atol=1e-5)
    lens = logit_lens(model, cache)
    wanted = logits[0].softmax(-1).max(-1).values
    torch.testing.assert_close(lens.probabilities[-1, 0, :, 0].double(), wanted, rtol=1e-5, atol=0)
    total = cache["resid_pre", 1] + cache["attn_out", 1] + cache["mlp_out", 1]
    torch.testing.assert_close(cache["resid_post", 1], total)


@pytest.mark.parametrize(("kind", "change"), CHANGES)
@torch.no_grad()
def test_a_lens_of_an_earlier_run_asks_for_attach(kind, change):
    model = made(kind)
    attach(model)
    _, cache = run_with_cache(model, TOKENS)
    change(model)
    with pytest.raises(HookError, match=r"call attach\(model\) again"):
        model.language_parts.unembed(cache["resid_post", -1])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "cohere"])
@torch.no_grad()
def test_models_that_differ_in_their_unembedding_are_not_equal(kind):
    change = dict(llama=new_head, gemma2=without_cap, granite=other_divisor, cohere=other_factor)[
        kind
    ]
    base, tuned = made(kind), made(kind)
    change(tuned)
    ours, theirs = (model(TOKENS).logits[0].log_softmax(-1) for model in (tuned, base))
    wanted = (ours.exp() * (ours - theirs)).sum(-1)
    base, tuned = made(kind), made(kind)
    attach(base)
    attach(tuned)
    change(tuned)
    with pytest.raises(HookError, match=r"call attach\(model\) again"):
        compare_models(tuned, base, TOKENS)
    attach(tuned)
    change = compare_models(tuned, base, TOKENS)
    torch.testing.assert_close(change.kl.values[:, 0].double(), wanted, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_switches_and_numbers_that_only_training_uses_may_change():
    model = made("llama")
    model.config.output_router_logits = False
    with attach(model) as attached:
        logits = model(TOKENS).logits
        model.config.attention_dropout = 0.5
        model.config.initializer_range = 0.3
        model.config.output_router_logits = True
        assert torch.equal(model(TOKENS).logits, logits)
        assert attach(model) is attached


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_factor_of_the_logits_is_the_factor_of_the_config_in_half_precision(dtype):
    sizes = dict(logits_scaling=1.5, residual_multiplier=0.7)
    model = tiny.redraw(tiny.model("GraniteForCausalLM", **sizes), 0.3).to(dtype)
    assert attach(model).unembed.factor == pytest.approx(1 / 1.5, rel=1e-9)
