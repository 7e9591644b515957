"""Random crosscoders, and two models whose values differ."""

import torch

from interp.features import Crosscoder, JumpReLU
from models import Transformer, TransformerConfig

D, FEATURES = 12, 17
POINT = "blocks.1.resid_post"


def random_crosscoder(members=2, joint=True, seed=0):
    """Return a crosscoder with random weights in float64, whose features have thresholds."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    n_features = FEATURES if joint else FEATURES * members
    return Crosscoder(
        random(members, D, FEATURES),
        random(members, n_features, D) / 4,
        random(n_features) / 3,
        random(members, D),
        JumpReLU(random(n_features).abs()),
        names=[f"model {number}" for number in range(members)],
        points=[POINT] * members,
        center=random(members, D),
        scale=random(members).abs() + 0.4,
    )


def two_models():
    """Return two models in float64 that differ in one matrix."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        config = TransformerConfig(vocab_size=11, n_ctx=16, n_layers=3, n_heads=3, d_model=D)
        model = Transformer(config).double().eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.4)
        made.append(model)
    with torch.no_grad():
        made[1].blocks[0].mlp.W_out.mul_(2)
    return made
