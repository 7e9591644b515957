"""Models, pairs, and analyses of a user's own, which worker processes import."""

import os
import signal
from pathlib import Path

import torch

from hooks import HookedRunner
from interp import Pairs, activation_patching, direct_logit_attribution
from models import Transformer, TransformerConfig
from tests.shipped import pydoc

VOCAB, LAYERS, HEADS = 23, 2, 3
N, POS = 7, 5
CLEAN, CORRUPTED = torch.randint(VOCAB, (2, N, POS), generator=torch.Generator().manual_seed(1))
# A text occurs in two parts, with the same and with another corrupted text.
CLEAN[6], CLEAN[4] = CLEAN[1], CLEAN[0]
CORRUPTED[6] = CORRUPTED[1]
RIGHT, WRONG = torch.arange(3, 3 + N), torch.arange(12, 12 + N)
MASK = torch.ones(N, POS)
MASK[2, :2], MASK[5, :1] = 0, 0
PAIRS = Pairs(CLEAN, CORRUPTED, torch.stack([RIGHT, WRONG], 1), attention_mask=MASK)


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
