"""Small random models of several forms, with random transcoders for their MLPs."""

import torch
from torch import nn

from interp.features import CrossLayerTranscoder, Dictionary, TopK
from models import Transformer, TransformerConfig

FORMS = {
    "plain": {},
    "rms": {"norm": "rmsnorm", "positions": "rotary", "n_kv_heads": 2, "mlp": "gated"},
    "output": {"norm_place": "output"},
    "sandwich": {"norm_place": "sandwich", "norm": "rmsnorm", "logit_cap": 5.0},
    "parallel": {"parallel": True},
    "embedding norm": {"embed_norm": True},
    "both ways": {"causal": False, "mlp_norm": True},
    "window": {"window": 2, "attn_cap": 3.0, "mlp_bias": False},
}
TEXT = torch.tensor([[3, 1, 4, 1, 5]])
SIZES = {"vocab_size": 7, "n_ctx": 11, "n_layers": 3, "n_heads": 4, "d_model": 8, "d_mlp": 13}


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def model_of(form):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SIZES, **FORMS[form])).double().eval()
    # Draw the gains and biases too.
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return model


def transcoder(features=17, skip=False, reads="ln2.normalized", **more):
    W_skip = drawn(8, 8) if skip else None
    weights = drawn(8, features), drawn(features, 8), drawn(features), drawn(8)
    return Dictionary(*weights, TopK(5), W_skip=W_skip, reads=reads, transcodes=True, **more)


def across(reads):
    return CrossLayerTranscoder(
        [drawn(8, 17 + n) for n in range(3)],
        [drawn(17 + n, 3 - n, 8) for n in range(3)],
        [drawn(17 + n) for n in range(3)],
        drawn(3, 8),
        [TopK(5), TopK(4), nn.ReLU()],
        W_skip=None if reads == "resid_mid" else [drawn(8, 8) for n in range(3)],
        reads=reads,
    )


def skip_of(dictionaries, name):
    """Return the weights of the skip connection of the transcoder that writes at a point, or
    None.
    """
    if isinstance(dictionaries, CrossLayerTranscoder):
        return dictionaries.W_skip[int(name.split(".")[1])] if dictionaries.W_skip else None
    return dictionaries[name].W_skip if name in dictionaries else None


def transcoders(kind, reads):
    if kind.startswith("across"):
        return across(reads)
    return {
        "blocks.0.mlp_out": transcoder(
            skip=reads != "resid_mid", subtracts_b_dec=True, reads=reads
        ),
        "blocks.2.mlp_out": transcoder(19, reads=reads),
    }
