"""Small random models of every kind on any device, and the same models in float64 as references."""

import copy
import functools

import torch

SIZES = dict(vocab_size=101, n_ctx=600, n_layers=2, n_heads=6, d_model=96, d_mlp=88)
ROTARY = dict(positions="rotary", norm="rmsnorm", mlp="gated", activation="silu", qkv_bias=False)
KINDS = {
    "gpt2": {},
    "llama": ROTARY | dict(n_kv_heads=2),
    "mistral": ROTARY | dict(n_kv_heads=3, window=5),
    "qwen": ROTARY | dict(n_kv_heads=1, qk_norm="head"),
    "olmo": ROTARY | dict(norm_place="output", qk_norm="all", tied_unembed=False),
    "gemma": ROTARY
    | dict(n_kv_heads=2, norm_place="sandwich", window=7, window_layers=(0,), embed_scale=9.8)
    | dict(attn_cap=5.0, logit_cap=9.0),
    "neox": dict(positions="rotary", parallel=True, rotary_fraction=0.25),
    "handout": dict(positions="sinusoidal", norm_place="post", final_norm=False),
    "odd heads": ROTARY | dict(n_heads=3, d_head=14, n_kv_heads=1),
    "attention only": dict(mlp="none", d_mlp=0, norm="none", final_norm=False),
}
# The largest allowed difference from float64, as a share of the largest logit.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@functools.cache
def on_cpu(kind):
    """Return the model of a kind on the CPU, in float64."""
    from models import Transformer, TransformerConfig

    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SIZES | KINDS[kind])).double().eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.1)
    return model


def pair(kind, where, dtype=torch.float32):
    """Return a model on a device in a dtype, and a copy with the same weights in float64."""
    model = copy.deepcopy(on_cpu(kind)).to(dtype)
    exact = copy.deepcopy(model).double()
    return model.to(where), exact


def tokens(batch=3, pos=13):
    return torch.randint(101, (batch, pos), generator=torch.Generator().manual_seed(1))


def gap(found, exact):
    """Return the largest difference, as a share of the largest value."""
    exact = exact.double().cpu()
    return ((found.double().cpu() - exact).abs().max() / exact.abs().max()).item()
