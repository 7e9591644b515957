"""Plans: exact to the byte, and nothing is computed."""

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, Planned

OPTIONS = [
    {},
    {"names": ["embed", "blocks.*.attn.z"], "dtype": torch.bfloat16},
    {"positions": [1, 5], "mode": "full"},
    {"names": ["blocks.0.resid_post", "blocks.1.resid_pre"]},
    {"lazy": True},
    {"mode": "residual", "windows": torch.eye(4, 7, dtype=torch.bool)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_a_real_run_to_the_byte(runner, tokens, options):
    _, cache = runner.run_with_cache(tokens, **options)
    bytes_kept = cache.nbytes
    plan = runner.plan(tokens, **options)
    assert plan.nbytes == bytes_kept
    assert list(plan.values) == list(cache)
    for name, value in cache.items():
        planned = plan.values[name]
        assert planned == Planned(tuple(value.shape), cache.axes(name), value.dtype, value.nbytes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_run_larger_than_memory_can_be_planned(device):
    wide = nn.Sequential(nn.Linear(3, 2**21, device=device), nn.ReLU()).eval()
    plan = HookedRunner(wide).plan(torch.empty(2**14, 3, device=device))
    assert plan.nbytes == 2 * 2**14 * 2**21 * 4


def test_a_model_whose_shapes_depend_on_numbers_is_an_error():
    model = nn.Sequential(nn.Identity())
    model.forward = lambda x: model[0](x[x > 0])
    with pytest.raises(HookError, match="number"):
        HookedRunner(model).plan(torch.ones(3), names="0")


def test_a_model_that_memoises_tensors_is_left_as_it_was():
    class Memo(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.mask, self.other = nn.Identity(), None, 3
            self.register_buffer("table", torch.zeros(2))

        def forward(self, x):
            self.mask = torch.ones(2)
            self.fresh = torch.ones(2)
            self.table = self.table + 1
            return self.inner(x) * self.mask * self.fresh

    model = Memo()
    table = model.table
    assert HookedRunner(model).plan(torch.ones(2), names="inner").nbytes == 8
    assert model.mask is None
    assert model.table is table
    assert not hasattr(model, "fresh")
    assert model(torch.ones(2)).tolist() == [1.0, 1.0]
