"""Weights of models with LoRA adapters, against `merge_and_unload` of peft."""

import copy

import pytest
import torch

peft = pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("transformers", reason="needs the extra hf")

from interp.protocol import of  # noqa: E402 - after the check for the libraries
from models import attach, from_hf  # noqa: E402
from tests.models.attached.kinds import TOKENS, made  # noqa: E402

# `peft` warns that it sets fan_in_fan_out for GPT-2, and about an old name of transformers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:.is_gradient"),
    # Other cases run with --full.
    pytest.mark.sampled(3),
]

WEIGHTS = ["W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_U"]


def adapted(model, **options):
    torch.manual_seed(1)
    settings = {"target_modules": "all-linear", "init_lora_weights": False, "r": 2} | options
    return peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_weight_views_contain_the_adapters_as_they_are_now(kind):
    model = adapted(made(kind))
    before = copy.deepcopy(model)
    attach(model)
    for change in (1.0, -3.0):
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(change)
        twin = copy.deepcopy(before)
        for name, weight in twin.named_parameters():
            if "lora_B" in name:
                weight.mul_(change)
        merged = from_hf(twin.merge_and_unload())
        for name in WEIGHTS:
            views = getattr(of(model), name)
            torch.testing.assert_close(views, getattr(merged, name), rtol=0, atol=1e-12)
    with model.disable_adapter():
        torch.testing.assert_close(of(model).W_O, from_hf(made(kind)).W_O, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_a_plain_copy_contains_the_adapters(kind):
    model = adapted(made(kind), r=3)
    model.add_adapter(
        "second",
        peft.LoraConfig(
            target_modules=["down_proj", "c_fc"], init_lora_weights=False, use_rslora=True
        ),
    )
    model.base_model.set_adapter(["default", "second"])
    model.eval()
    expected = model(TOKENS).logits
    # The RMSNorm of transformers computes in float32.
    tolerance = 1e-5 if kind == "llama" else 1e-12
    torch.testing.assert_close(from_hf(model)(TOKENS), expected, rtol=0, atol=tolerance)


@torch.no_grad()
def test_the_weights_of_a_copy_are_not_the_weights_of_the_model():
    model = adapted(made("llama"))
    copied = from_hf(model)
    expected = copied(TOKENS)
    for weight in model.parameters():
        weight.zero_()
    torch.testing.assert_close(copied(TOKENS), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (dict(use_dora=True), "DoRA"),
        (dict(target_modules=["embed_tokens"]), "Embedding"),
        (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), "ModulesToSave"),
    ],
)
def test_other_kinds_of_lora_raise_an_error_with_the_kind_and_the_way(config, kind):
    model = adapted(made("llama"), **config)
    with attach(model), pytest.raises(ValueError, match=rf"{kind}.* at .*merge"):
        of(model).W_O  # noqa: B018 - reading the weight raises
    merged = model.merge_and_unload()
    attach(merged)
    assert of(merged).W_O.shape == (3, 2, 6, 12)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "ia3"),
        (lambda: peft.VeraConfig(target_modules=["o_proj"]), "vera"),
        (
            lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "prefix_tuning",
        ),
    ],
)
def test_other_adapters_raise_an_error_with_the_kind(config, kind):
    model = peft.get_peft_model(made("llama"), config()).eval()
    with pytest.raises(ValueError, match=rf"{kind}.* at .*attach the base model"):
        from_hf(model)


@torch.no_grad()
def test_adapters_that_are_off_or_merged_may_be_of_any_kind():
    model = adapted(made("llama"), use_dora=True)
    expected = model(TOKENS).logits
    with model.disable_adapter():
        off = from_hf(model)(TOKENS)
    plain = made("llama")(TOKENS).logits
    torch.testing.assert_close(off, plain, rtol=0, atol=1e-5)
    model.merge_adapter()
    torch.testing.assert_close(from_hf(model)(TOKENS), expected, rtol=0, atol=1e-5)
    with model.disable_adapter(), pytest.raises(ValueError, match="unmerge_adapter"):
        from_hf(model)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
def test_a_bias_of_an_adapter_needs_a_bias_of_the_map():
    model = adapted(made("llama"), target_modules=["o_proj"], lora_bias=True)
    with pytest.raises(ValueError, match=r"o_proj without a bias"):
        from_hf(model)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_virtual_tokens_of_a_family_without_a_table_raise_an_error():
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(made("bloom"), config).eval()
    with attach(model), pytest.raises(ValueError, match="that read the stream and return"):
        of(model).plain()
