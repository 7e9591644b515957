"""Plans: exact to the byte, and nothing is computed."""

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError

OPTIONS = [
    {},
    {"mode": "residual"},
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
        assert planned.shape == tuple(value.shape)
        assert planned.axes == cache.axes(name)
        assert planned.dtype == value.dtype
        assert planned.nbytes == value.nbytes


def test_nothing_is_computed():
    wide = nn.Sequential(nn.Linear(3, 2**21), nn.ReLU()).eval()
    image = torch.ones(2**14, 3)
    plan = HookedRunner(wide).plan(image)
    assert plan.nbytes == 2 * 2**14 * 2**21 * 4, "more than this machine's memory"


def test_a_model_too_large_to_run_can_be_planned():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20), nn.ReLU()).eval()
    plan = HookedRunner(model).plan(torch.empty(3, 2**20, device="meta"), names="0")
    assert plan.nbytes == 3 * 2**20 * 4


def test_a_model_whose_shapes_depend_on_numbers_is_an_error():
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            return self.inner(x[x > 0])

    with pytest.raises(HookError, match="depend on no tensor's numbers"):
        HookedRunner(Filter()).plan(torch.ones(3), names="inner")


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
