"""Models of every form with random gains and biases."""

import torch

from models import TransformerConfig
from tests.reference import randomised

LAYERS, HEADS, D_MODEL, D_HEAD, D_MLP, VOCAB, N_CTX = 3, 6, 14, 4, 11, 23, 17


def built(dtype=torch.float64, scale=0.5, **fields):
    """Return a model whose parameters are all random: gains around 1, biases around 0."""
    sizes = dict(vocab_size=VOCAB, n_ctx=N_CTX, n_layers=LAYERS, n_heads=HEADS, d_model=D_MODEL)
    config = TransformerConfig(**(sizes | dict(d_head=D_HEAD) | fields))
    if config.norm != "none":
        config = config.replace(norm_eps=1e-3)
    if config.mlp != "none":
        config = config.replace(d_mlp=D_MLP)
    return randomised(config, seed=5, scale=scale).to(dtype)
