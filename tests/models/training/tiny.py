"""A model, a text and settings that are so small that a training run takes milliseconds."""

import torch

from models import TrainingConfig, Transformer, TransformerConfig

TEXT = torch.randint(5, (97,), generator=torch.Generator().manual_seed(2))


def tiny(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, n_ctx=8, n_layers=1, n_heads=2, d_model=6)
    return Transformer(TransformerConfig(**sizes | changes))


def config(**changes):
    return TrainingConfig(**dict(steps=7, batch_size=3, warmup=2, evaluate_every=3) | changes)
