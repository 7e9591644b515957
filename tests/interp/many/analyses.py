"""Functions that worker processes import: models, and analyses of a user's own."""

import os
import signal
from pathlib import Path

import torch

from hooks import HookedRunner
from interp import activation_patching, direct_logit_attribution
from models import Transformer, TransformerConfig
from tests.shipped import pydoc

VOCAB, LAYERS, HEADS = 23, 2, 3


def make_model():
    """Return a small model with the same random weights in every process."""
    config = TransformerConfig(
        vocab_size=VOCAB, n_ctx=11, n_layers=LAYERS, n_heads=HEADS, d_model=12, d_mlp=20
    )
    generator = torch.Generator().manual_seed(3)
    model = Transformer(config).eval().double()
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 2
    return model


def direct(model, texts, right):
    """Run the model on texts, and return the direct attribution of a token of each text."""
    _, cache = HookedRunner(model).run_with_cache(texts, lazy=True)
    return direct_logit_attribution(model, cache, right=right, pos=-1)


def patched_once(model, pairs, count):
    """Patch pairs, but end this process at the second call ever.

    `count` is a file that gets a line at each call.
    """
    with Path(count).open("a") as file:
        file.write("call\n")
    if len(Path(count).read_text().splitlines()) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return activation_patching(model, pairs, "z")


def make_pydoc_at_second_call(count):
    """Return a shipped model, but end this process at the first call ever.

    `count` is a file that gets a line at each call.
    """
    with Path(count).open("a") as file:
        file.write("call\n")
    if len(Path(count).read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return pydoc()
