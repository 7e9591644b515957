"""Kernel starts and waits of scores of heads (see `tests.counting`), which may not grow again."""

import pytest
import torch

from interp import head_scores, run_with_cache
from models import Transformer, TransformerConfig
from tests.counting import counted


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "starts"),
    [(3, 4, 63), pytest.param(12, 12, 198, marks=pytest.mark.full)],
)
def test_scores_of_a_lazy_cache_start_few_kernels_and_wait_twice(n_layers, n_heads, starts):
    """The run that makes the cache is not counted."""

    def cached(model, tokens):
        return run_with_cache(model, tokens, lazy=True)[1]

    def scored(model, tokens):
        return head_scores(model, cached(model, tokens), "induction")

    config = TransformerConfig(
        vocab_size=50, n_ctx=16, n_layers=n_layers, n_heads=n_heads, d_model=24, d_mlp=40
    )
    torch.manual_seed(0)
    model = Transformer(config).eval().requires_grad_(False)
    tokens = torch.randint(10, (8, 9))
    whole, run = (counted(job, model, tokens) for job in (scored, cached))
    assert whole.starts - run.starts <= starts
    # The host waits for the tokens, and once for the check of all layers.
    assert whole.waits - run.waits <= 2
