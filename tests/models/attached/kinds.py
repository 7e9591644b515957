"""Tiny models of a few kinds, in several forms: copied, saved, subclassed or with an adapter."""

import copy
import io

import pytest
import torch

from tests import tiny

pytest.importorskip("transformers", reason="needs the extra hf")

KINDS = {
    "gpt2": ("GPT2LMHeadModel", dict(n_inner=17)),
    "llama": ("LlamaForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", dict(sliding_window=3)),
    "bloom": ("BloomForCausalLM", {}),
    "bert": ("BertForMaskedLM", {}),
}
"""The class of each kind, and the sizes that differ from `tiny.SIZES`."""
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])


def made(kind, config=None, attention=None, dtype=torch.float64):
    """Return a model with large random weights, the same at each call."""
    name, sizes = KINDS[kind]
    config = tiny.config(name, **sizes) if config is None else config
    if attention:
        config._attn_implementation = attention
    torch.manual_seed(0)
    model = tiny.named(name)(config).eval().to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator, dtype=value.dtype) * 0.3)
    return model


def in_form(model, form):
    if form == "copied":
        return copy.deepcopy(model)
    if form == "saved":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    if form == "subclass":
        model.__class__ = type("Renamed", (type(model),), {})
    if form == "adapter":
        peft = pytest.importorskip("peft", reason="needs peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=2)
        return peft.get_peft_model(model, config).eval()
    return model
