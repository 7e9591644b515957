"""Tiny models of a few kinds, in several forms: copied, saved, subclassed or with an adapter."""

import copy
import io

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

GPT2 = dict(vocab_size=23, n_positions=19, n_embd=12, n_layer=3, n_head=2, n_inner=17)
SIZES = dict(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=17,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    max_position_embeddings=19,
    pad_token_id=None,
    eos_token_id=None,
)
BART = dict(vocab_size=23, d_model=12, encoder_attention_heads=2, decoder_attention_heads=2)
KINDS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", SIZES),
    "gemma3": ("Gemma3ForCausalLM", SIZES | dict(sliding_window=3)),
    "bloom": ("BloomForCausalLM", dict(vocab_size=23, hidden_size=12, n_layer=3, n_head=2)),
    "bert": ("BertForMaskedLM", SIZES),
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])


def made(kind, config=None, attention=None, dtype=torch.float64):
    """Return a model with large random weights, the same at each call."""
    name, sizes = KINDS[kind]
    maker = getattr(transformers, name)
    config = maker.config_class(**sizes) if config is None else config
    if attention:
        config._attn_implementation = attention
    torch.manual_seed(0)
    model = maker(config).eval().to(dtype)
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
