"""Kernel starts and waits of analyses (see `tests.counting`), which may not grow again.

Each job has limits for a small model and, with --full, for 12 layers of 12 heads.
"""

import pytest
import torch

from interp import Pairs, activation_patching, log_prob
from models import Transformer, TransformerConfig
from tests.counting import counted

SMALL, LARGE = (3, 4), (12, 12)


def patched(site, over):
    def job(model, clean, corrupted):
        return activation_patching(model, Pairs(clean, corrupted, metric=log_prob(0)), site, over)

    return job


ROWS = {
    # name: the job, the number of examples, and the most starts and waits of both models.
    "patching z by head": (patched("z", ("layer", "head")), 8, (220, 9), (850, 10)),
    "patching by position": (patched("resid_pre", ("layer", "pos")), 8, (430, 9), (2400, 10)),
}


@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(LARGE, marks=pytest.mark.full)], ids=["small", "large"]
)
@pytest.mark.parametrize("row", ROWS)
def test_jobs_start_few_kernels_and_seldom_wait(row, size):
    job, n_examples, *limits = ROWS[row]
    n_layers, n_heads = size
    config = TransformerConfig(
        vocab_size=50, n_ctx=16, n_layers=n_layers, n_heads=n_heads, d_model=24, d_mlp=40
    )
    torch.manual_seed(0)
    model = Transformer(config).eval().requires_grad_(False)
    clean = torch.randint(50, (n_examples, 9))
    counts = counted(job, model, clean, (clean + 1) % 50)
    starts, waits = limits[size == LARGE]
    assert counts.starts <= starts
    assert counts.waits <= waits
