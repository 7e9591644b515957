"""Plans: they give the exact number of bytes of a cache, and compute nothing."""

import threading

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, Planned

OPTIONS = [
    {},
    {"names": ["embed", "blocks.*.attn.z"], "dtype": torch.bfloat16},
    {"pos": [1, 5], "mode": "full"},
    {"names": ["blocks.0.resid_post", "blocks.1.resid_pre"]},
    {"lazy": True},
    {"mode": "residual", "pos": [False, True] * 3 + [True]},
]


@pytest.mark.sampled(4)
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


class Memo(nn.Module):
    """A model that stores tensors in many places, and writes into its buffers."""

    def __init__(self):
        super().__init__()
        self.inner, self.mask, self.memo, self.calls = nn.Linear(2, 2), None, {}, [0]
        self.norm = nn.BatchNorm1d(2)
        # This tensor is not a leaf of the autograd graph.
        self.product = self.inner.weight * 2
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        self.mask = self.fresh = self.memo["mask"] = torch.ones(2)
        self.table = self.table + 1
        self.calls[0] += 1
        return self.inner(x) @ self.product * self.mask


# PyTorch warns when `.grad` of a tensor that is not a leaf is read.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_plan_leaves_the_model_as_it_was():
    model, x, hooked = Memo(), torch.ones(3, 2), []
    model.register_forward_hook(lambda module, args, output: torch.cat([output, output]))
    model.norm.register_forward_hook(lambda module, args, output: hooked.append(len(output)))
    whole = nn.Sequential(model, model.norm, model.norm).train()
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    table, attributes = model.table, set(vars(model))
    plan = HookedRunner(whole).plan(x, names=["0", "0.inner"])
    assert {name: value.shape for name, value in plan.values.items()} == {
        "0": (6, 2),
        "0.inner": (3, 2),
    }
    assert hooked == [6, 6], "the user's hooks act"
    assert (model.mask, model.memo, model.calls, set(vars(model))) == (None, {}, [0], attributes)
    assert model.table is table
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert HookedRunner(model).plan(x, names="inner").nbytes == 3 * 2 * 4
    assert whole(x).shape == (6, 2)


def test_a_forward_that_was_replaced(model, runner, tokens):
    """A plan runs a copy of the model. A replaced forward must run the copied modules there."""
    attn = model.blocks[1].attn
    forward, strength = attn.forward, [0]

    def stronger(x, context, *, by=3):
        strength[0] += 1
        return forward(x, context) * by

    attn.forward = lambda *args: stronger(*args)
    assert runner.plan(tokens).nbytes == runner.run_with_cache(tokens)[1].nbytes
    assert strength == [1], "by the run, not the plan"


def test_an_edit_that_reads_a_lazy_cache(runner, tokens):
    _, eager = runner.run_with_cache(tokens)
    _, lazy = runner.run_with_cache(tokens, lazy=True)
    with runner.hooks({"blocks.1.mlp_out": lambda value, point: lazy["mlp_out", 2]}):
        assert list(runner.plan(tokens, names="blocks.1.*").values)
    torch.testing.assert_close(lazy["mlp_out", 2], eager["mlp_out", 2])


def test_a_model_with_a_generator_is_planned_and_draws_nothing():
    model = nn.Sequential(nn.Identity()).eval()
    model.generator = torch.Generator()
    model.forward = lambda x: model[0](x + torch.rand(3, generator=model.generator))
    before = model.generator.get_state()
    assert HookedRunner(model).plan(torch.ones(3), names="0").nbytes == 12
    assert torch.equal(model.generator.get_state(), before)


def counting():
    model = nn.Sequential(nn.Identity())
    model.forward = lambda x: model[0](x[x > 0])
    return model


@pytest.mark.parametrize(
    ("make", "x", "match"),
    [
        (counting, torch.ones(3), "nonzero"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), torch.ones(3), "Uninitialized"),
        (lambda: nn.Sequential(nn.Identity()), threading.Lock(), "lock"),
    ],
)
def test_runs_that_cannot_be_planned(make, x, match):
    with pytest.raises(HookError, match=match):
        HookedRunner(make().eval()).plan(x, names="0")
