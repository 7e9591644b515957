"""Small random models with every form of attention."""

import torch

from models import Transformer, TransformerConfig

TEXT = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 0, 3, 3]])
SIZES = {"vocab_size": 7, "n_ctx": 11, "n_layers": 2, "n_heads": 6, "d_head": 4, "d_model": 10}
ROTARY = {"positions": "rotary", "norm": "rmsnorm", "n_kv_heads": 3}
FORMS = {
    "plain": {},
    "grouped": ROTARY,
    "partial rotation": {"positions": "rotary", "rotary_pairs": "adjacent", "rotary_fraction": 0.5},
    "norm of each head": ROTARY | {"qk_norm": "head"},
    "norm of all heads": ROTARY | {"qk_norm": "all", "rotary_pairs": "adjacent"},
    "cap and window": {"attn_cap": 3.0, "window": 2},
    "both ways": {"causal": False},
}


def model_of(form):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SIZES, **FORMS[form], d_mlp=13)).double().eval()
    # Draw the gains and biases too.
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return model
