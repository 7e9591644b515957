"""Kernel starts and waits of analyses (see `tests.counting`), which may not grow again.

Each job has limits for a small model and, with --full, for 12 layers of 12 heads.
"""

import pytest
import torch

from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    edge_attribution,
    log_prob,
)
from models import Transformer, TransformerConfig
from tests.counting import counted

SMALL, LARGE = (3, 4), (12, 12)


def effects_by(analysis, site, over):
    def job(model, clean, corrupted, mask):
        pairs = Pairs(clean, corrupted, metric=log_prob(0), attention_mask=mask)
        return analysis(model, pairs, site, over)

    return job


def edges(**options):
    def job(model, clean, corrupted, mask):
        pairs = Pairs(clean, corrupted, metric=log_prob(0), attention_mask=mask)
        return edge_attribution(model, pairs, **options)

    return job


PATCHED = effects_by(activation_patching, "z", ("layer", "head"))
BY_POSITION = effects_by(activation_patching, "resid_pre", ("layer", "pos"))
ATTRIBUTED = effects_by(attribution_patching, "z", ("layer", "head"))
BY_INPUTS = edges(method="eap_ig_inputs", steps=4)
PADDED = torch.ones(8, 9).bool()
PADDED[2, :3] = PADDED[5, :1] = False
ROWS = {
    # name: the job, the number of examples, the mask, and the most starts and waits of both models.
    "patching z by head": (PATCHED, 8, None, (210, 8), (640, 8)),
    "patching padded texts": (PATCHED, 8, PADDED, (320, 14), (1120, 14)),
    "patching by position": (BY_POSITION, 8, None, (430, 8), (2200, 8)),
    "attribution patching": (ATTRIBUTED, 8, None, (140, 7), (440, 8)),
    "attribution of padded texts": (ATTRIBUTED, 8, PADDED, (185, 11), (545, 11)),
    "edges of 1 example": (edges(), 1, None, (310, 10), (900, 10)),
    "edges of 8 examples": (edges(), 8, None, (310, 10), (900, 10)),
    "edges of padded texts": (edges(), 8, PADDED, (360, 15), (1000, 15)),
    "edges of 32 examples": (edges(), 32, None, (310, 10), (900, 10)),
    "integrated gradients of edges": (BY_INPUTS, 8, None, (1150, 25), (3200, 25)),
}


@pytest.mark.filterwarnings("ignore:scores of edges should add up")
@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(LARGE, marks=pytest.mark.full)], ids=["small", "large"]
)
@pytest.mark.parametrize("row", ROWS)
def test_jobs_start_few_kernels_and_seldom_wait(row, size):
    job, n_examples, mask, *limits = ROWS[row]
    n_layers, n_heads = size
    config = TransformerConfig(
        vocab_size=50, n_ctx=16, n_layers=n_layers, n_heads=n_heads, d_model=24, d_mlp=40
    )
    torch.manual_seed(0)
    model = Transformer(config).eval().requires_grad_(False)
    clean = torch.randint(50, (n_examples, 9))
    counts = counted(job, model, clean, (clean + 1) % 50, mask)
    starts, waits = limits[size == LARGE]
    assert counts.starts <= starts
    assert counts.waits <= waits
