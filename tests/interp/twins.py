"""Pairs of a random plain model and a TransformerLens model with the same weights."""

import warnings

import pytest
import torch

from tests.reference import D_HEAD, D_MODEL, HEADS, LAYERS, N_CTX, VOCAB, variant

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TransformerLens causes warnings when it is imported
    lens = pytest.importorskip("transformer_lens", reason="needs TransformerLens 2")

FORMS = {
    "pre": {},
    "attention only": {"attn_only": True},
    "parallel": {"parallel_attn_mlp": True, "n_key_value_heads": 1},
    "like llama": {
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "rotary_dim": D_HEAD,
        "n_key_value_heads": 3,
        "gated_mlp": True,
        "act_fn": "silu",
    },
}


def twins(form):
    """Return a model and the TransformerLens model with the same weights, in float64."""
    ours = variant(form)
    sizes = dict(n_layers=LAYERS, n_heads=HEADS, d_model=D_MODEL, d_head=D_HEAD, d_mlp=13)
    sizes |= dict(d_vocab=VOCAB, n_ctx=N_CTX, act_fn="gelu_new", normalization_type="LN")
    config = lens.HookedTransformerConfig(
        **sizes | FORMS[form], dtype=torch.float64, device="cpu", seed=0
    )
    theirs = lens.HookedTransformer(config).eval()
    theirs.load_state_dict(weights_for(theirs.state_dict(), ours))
    return ours, theirs


def weights_for(state, model):
    """Yield the weights of our model by the names of TransformerLens.

    Weights that our model does not have, such as some biases, are zero.
    """
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        if last in ("mask", "IGNORE") or "rotary" in last:
            continue
        found = torch.zeros_like(value)
        if path == "unembed" or "embed" in path:
            found = getattr(model, last, found)
        elif last in ("w", "b"):
            norm = model.get_submodule(path)
            found = norm.weight if last == "w" else norm.bias
        else:
            # In TransformerLens, the weights of shared key heads begin with an underscore.
            layer = int(path.split(".")[1])
            stacked = getattr(model, last.lstrip("_"), None)
            found = found if stacked is None else stacked[layer]
        state[name] = found.detach().clone().view_as(value)
    return state


def close(ours, theirs):
    scale = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * scale)
