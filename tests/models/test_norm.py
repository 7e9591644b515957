"""Norms: the fused and the explicit form, compared with numpy in float64 and PyTorch's modules."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hooks import HookedRunner
from interp.graph.norms import linear_part
from models import LayerNorm, RMSNorm

BATCH, POS, D = 3, 5, 7
LOOK = {"scale": lambda value, point: None}
FORMS = pytest.mark.parametrize("hooks", [{}, LOOK], ids=["fused", "explicit"])


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randomised(module, dtype=torch.float64):
    module.to(dtype)
    with torch.no_grad():
        for n, parameter in enumerate(module.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=n + 5))
    return module


def run(module, x, hooks):
    return HookedRunner(module).run_with_hooks(x, hooks=hooks)


def by_hand(module, x):
    """Return the scale (the divisor) and the output of a norm, computed one vector at a time."""
    x = x.detach().double().numpy()
    weight, bias = (
        np.full(D, default) if value is None else value.detach().double().numpy()
        for value, default in ((module.weight, 1.0), (getattr(module, "bias", None), 0.0))
    )
    scale, out = np.zeros((*x.shape[:-1], 1)), np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        mean = sum(x[at]) / D if isinstance(module, LayerNorm) else 0.0
        scale[at] = math.sqrt(sum((value - mean) ** 2 for value in x[at]) / D + module.eps)
        out[at] = (x[at] - mean) / scale[at] * weight + bias
    return torch.tensor(scale), torch.tensor(out)


MODULES = {
    "layernorm": lambda: LayerNorm(D, eps=0.2),
    "layernorm without bias": lambda: LayerNorm(D, eps=0.2, bias=False),
    "layernorm without weights": lambda: LayerNorm(D, eps=0.2, learned=False),
    "rmsnorm": lambda: RMSNorm(D, eps=0.2),
    "rmsnorm without weights": lambda: RMSNorm(D, eps=0.2, learned=False),
    "default layernorm": lambda: LayerNorm(D),
    "default rmsnorm": lambda: RMSNorm(D),
}
NORMS = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@NORMS
@FORMS
def test_equals_the_equations(make, hooks):
    module, x = randomised(make()), draw(BATCH, POS, D) * 2 + 1
    scale, expected = by_hand(module, x)
    torch.testing.assert_close(run(module, x, hooks), expected, atol=1e-13, rtol=0)
    out, cache = HookedRunner(module).run_with_cache(x, names="*")
    torch.testing.assert_close(cache["scale"], scale, atol=1e-13, rtol=0)
    torch.testing.assert_close(cache["normalized"], expected, atol=1e-13, rtol=0)
    assert torch.equal(out, cache["normalized"])


@NORMS
@pytest.mark.parametrize("write", [torch.Tensor.mul_, lambda value, n: value.data.mul_(n)])
def test_hooks_may_write_into_the_scale(make, write):
    module, x = randomised(make()).requires_grad_(False), draw(BATCH, POS, D)

    def quadruple(module, args, output):
        write(output, 4)

    module.scale.register_forward_hook(quadruple)
    _, expected = by_hand(module, x)
    offset = 0 if getattr(module, "bias", None) is None else module.bias
    torch.testing.assert_close(module(x), (expected - offset) / 4 + offset, atol=1e-13, rtol=0)


@FORMS
def test_equals_torchs_modules_by_default(hooks):
    x = draw(BATCH, POS, D, dtype=torch.float32) * 1e-3  # so small that the default eps matters
    for ours, theirs in ((LayerNorm(D), nn.LayerNorm(D)), (RMSNorm(D), nn.RMSNorm(D, eps=1e-6))):
        randomised(ours, torch.float32)
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(run(ours, x, hooks), theirs(x), atol=1e-6, rtol=1e-6)


@NORMS
@FORMS
def test_tiny_values_are_stable(make, hooks):
    module = make()
    x = torch.stack([torch.zeros(D), torch.linspace(1, 2, D) * 1e-25])[None].requires_grad_()
    out = run(module, x, hooks)
    out.square().sum().backward()
    assert out.abs().max() < 1e-20
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("make", list(MODULES.values())[:5], ids=list(MODULES)[:5])
@pytest.mark.parametrize("hooks", [{}, LOOK, {"scale": lambda value, point: value**3 + 2}])
def test_gradients(make, hooks):
    module, x = randomised(make()), draw(1, 2, D, seed=3).requires_grad_()
    torch.autograd.gradcheck(lambda x, *_: run(module, x, hooks), [x, *module.parameters()])


@NORMS
@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_matches_its_rounding(make, hooks, dtype):
    """The result is rounded to half precision once, at the end, with and without hooks.

    The largest number of float16 is 65504, so the squares of these values would not fit.
    """
    module, x = randomised(make(), dtype), (draw(BATCH, POS, D) * 300 + 500).to(dtype)
    _, expected = by_hand(module, x)
    out = run(module, x, hooks)
    assert out.dtype == dtype
    half_a_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), expected, rtol=half_a_step, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (LayerNorm(D), {"weight": 1.0, "bias": 0.0}),
        (LayerNorm(D, bias=False), {"weight": 1.0}),
        (LayerNorm(D, learned=False), {}),
        (RMSNorm(D), {"weight": 1.0}),
        (RMSNorm(D, learned=False), {}),
    ],
)
def test_weights_start_as_the_identity(module, names):
    found = {name: p.tolist() for name, p in module.named_parameters()}
    assert found == {name: [start] * D for name, start in names.items()}


@pytest.mark.parametrize("module", [LayerNorm(D), RMSNorm(D)])
def test_an_edit_of_the_scale_acts(module):
    x = draw(BATCH, POS, D, dtype=torch.float32)
    halved = run(module, x, {"scale": lambda scale, point: scale / 2})
    torch.testing.assert_close(halved, module(x) * 2)


@pytest.mark.parametrize(
    "make",
    [*MODULES.values(), lambda: nn.LayerNorm(D, eps=0.2), lambda: nn.RMSNorm(D, eps=0.2)],
    ids=[*MODULES, "torch's LayerNorm", "torch's RMSNorm"],
)
def test_the_linear_part_is_the_norm_without_its_scale(make):
    module, x = randomised(make()), draw(BATCH, POS, D)
    part = linear_part(module, D)
    centred = x - x.mean(-1, keepdim=True) if part.centres else x
    scale = (centred.square().mean(-1, keepdim=True) + getattr(module, "eps", 0.0)).sqrt()
    torch.testing.assert_close(part.after(x) / scale + part.bias, module(x), atol=1e-6, rtol=1e-6)


def test_a_norm_that_does_not_say_what_it_is_has_no_linear_part():
    with pytest.raises(TypeError, match="got Linear"):
        linear_part(nn.Linear(D, D), D)
