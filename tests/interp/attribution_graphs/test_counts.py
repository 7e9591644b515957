"""Kernel starts and waits of an attribution graph (see `tests.counting`), which may not grow."""

import pytest
import torch
from torch import nn

from interp import attribution_graph
from interp.features import Dictionary, TopK
from models import Transformer, TransformerConfig
from tests.counting import counted


def dictionary(d_model=24, n_features=120):
    encoder, decoder = torch.randn(2, d_model, n_features)
    biases = torch.zeros(n_features), torch.zeros(d_model)
    return Dictionary(
        encoder, decoder.T, *biases, TopK(10, relu=False), reads="ln2.normalized", transcodes=True
    )


def job(model, dictionaries, text):
    transcoders = {f"blocks.{n}.mlp_out": part for n, part in enumerate(dictionaries)}
    return attribution_graph(model, text, transcoders, max_features=500, first=1, progress=False)


@pytest.mark.parametrize(
    ("n_layers", "n_pos", "starts", "waits"),
    [
        (2, 15, 620, 55),
        pytest.param(12, 15, 2119, 95, marks=pytest.mark.full),
    ],
)
def test_a_graph_starts_few_kernels(n_layers, n_pos, starts, waits):
    config = TransformerConfig(
        vocab_size=50, n_ctx=16, n_layers=n_layers, n_heads=12, d_model=24, d_mlp=40
    )
    torch.manual_seed(0)
    model = Transformer(config).eval().requires_grad_(False)
    dictionaries = nn.ModuleList(dictionary() for _ in range(n_layers))
    counts = counted(job, model, dictionaries, torch.randint(50, (1, n_pos)))
    assert counts.starts <= starts
    assert counts.waits <= waits
