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
from tests.bench.shared import differentiated
from tests.counting import Starts, counted
from tests.pretended import DEVICE, Devices

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


def reference(model, clean, corrupted, mask):
    """Run two forward passes and one backward pass without hooks."""
    return differentiated(model, clean, corrupted)()


PATCHED = effects_by(activation_patching, "z", ("layer", "head"))
BY_POSITION = effects_by(activation_patching, "resid_pre", ("layer", "pos"))
ATTRIBUTED = effects_by(attribution_patching, "z", ("layer", "head"))
BY_INPUTS = edges(method="eap_ig_inputs", steps=4)
PADDED = torch.ones(8, 9).bool()
PADDED[2, :3] = PADDED[5, :1] = False
ROWS = {
    # name: the job, the number of examples, the mask, and the most starts and waits of both models.
    "two forwards and one backward": (reference, 8, None, (116, 2), (395, 2)),
    "patching z by head": (PATCHED, 8, None, (195, 8), (624, 8)),
    "patching padded texts": (PATCHED, 8, PADDED, (238, 14), (766, 14)),
    "patching by position": (BY_POSITION, 8, None, (394, 8), (2097, 8)),
    "attribution patching": (ATTRIBUTED, 8, None, (130, 7), (436, 7)),
    "attribution of padded texts": (ATTRIBUTED, 8, PADDED, (162, 11), (522, 11)),
    "edges of 1 example": (edges(), 1, None, (282, 9), (819, 9)),
    "edges of 8 examples": (edges(), 8, None, (282, 9), (819, 9)),
    "edges of padded texts": (edges(), 8, PADDED, (310, 13), (899, 13)),
    "edges of 32 examples": (edges(), 32, None, (282, 9), (819, 9)),
    "integrated gradients of edges": (BY_INPUTS, 8, None, (1107, 22), (3108, 22)),
}


def model_of(n_layers, n_heads):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, n_ctx=32, d_model=24, d_mlp=40)
    config = TransformerConfig(n_layers=n_layers, n_heads=n_heads, **sizes)
    return Transformer(config).eval().requires_grad_(False)


@pytest.mark.filterwarnings("ignore:scores of edges should add up")
@pytest.mark.parametrize(
    "size", [SMALL, pytest.param(LARGE, marks=pytest.mark.full)], ids=["small", "large"]
)
@pytest.mark.parametrize("row", ROWS)
def test_jobs_start_few_kernels_and_seldom_wait(row, size):
    job, n_examples, mask, *limits = ROWS[row]
    model = model_of(*size)
    clean = torch.randint(50, (n_examples, 9))
    counts = counted(job, model, clean, (clean + 1) % 50, mask)
    starts, waits = limits[size == LARGE]
    assert counts.starts <= starts
    assert counts.waits <= waits


@pytest.mark.parametrize(
    ("size", "n_pos", "starts"),
    [(SMALL, 14, 690), pytest.param(LARGE, 32, 7400, marks=pytest.mark.full)],
    ids=["small", "large"],
)
def test_patching_by_position_starts_few_kernels_for_each_position(size, n_pos, starts):
    model = model_of(*size)
    clean = torch.randint(50, (8, n_pos))
    counts = counted(BY_POSITION, model, clean, (clean + 1) % 50, None)
    assert counts.starts <= starts
    assert counts.waits <= 8


def test_each_further_group_of_edges_starts_the_same_number_of_kernels(monkeypatch):
    """With `max_bytes`, 8 texts of 9 tokens are 1, 2 or 4 groups."""
    monkeypatch.setattr("interp.effects.edge_scores._CPU_BYTES", 2**40)
    model = model_of(*SMALL)
    clean = torch.randint(50, (8, 9))
    # A position has a float32 stream for each of 16 writers and 40 readers, and 5 for each of 7
    # norms.
    bytes_of_text = 9 * (16 + 40 + 5 * 7) * 24 * 4
    starts = []
    for n_together in (8, 4, 2):
        with Starts() as counts:
            edges(max_bytes=n_together * bytes_of_text)(model, clean, (clean + 1) % 50, None)
        starts.append(counts.operations.total())
    one, two, four = starts
    assert one <= 310
    assert two - one <= 100
    assert four - two == 2 * (two - one)


def test_on_a_device_a_share_of_the_free_memory_bounds_the_groups_of_edges(monkeypatch):
    monkeypatch.setattr("interp.runs.memory._LEAST_BYTES", 0)
    clean = torch.randint(50, (8, 9))
    bytes_of_text = 9 * (16 + 40 + 5 * 7) * 24 * 4

    def starts(model, free, **options):
        monkeypatch.setattr("interp.runs.memory.free_memory", lambda device: free)
        with Starts() as counts:
            edges(**options)(model, clean, (clean + 1) % 50, None)
        return counts.operations.total()

    with Devices():
        model = model_of(*SMALL).to(DEVICE)
        whole = starts(model, free=2**40)
        two_groups = starts(model, free=2**40, max_bytes=4 * bytes_of_text)
        of_default = starts(model, free=8 * bytes_of_text)
    assert whole < two_groups == of_default
