"""Linear: the same map with and without gradients, and under whatever follows single operations."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from models.linear import LARGE, Linear

D_IN, D_OUT = 257, 515
ATOL = 2e-5


def linear(bias=True, dtype=torch.float32):
    """One of more than 2^17 numbers."""
    assert D_IN * D_OUT > LARGE
    made = Linear(D_IN, D_OUT, bias).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made.to(dtype)


def exactly(made, x):
    bias = None if made.bias is None else made.bias.double()
    return F.linear(x.double(), made.weight.double(), bias).float()


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 16


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_of_any_leading_axes_and_strides(bias, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    made = linear(bias)
    stored_by_column = copy.deepcopy(made)
    stored_by_column.weight = torch.nn.Parameter(made.weight.T.contiguous().T, requires_grad=False)
    inputs = [draw(D_IN), draw(2, D_IN), draw(3, 5, D_IN), draw(D_IN, 6).T, draw(5, 2, D_IN).transpose(0, 1)]  # fmt: skip
    with torch.no_grad():
        for x in inputs:
            for module in (made, stored_by_column):
                out = module(x)
                assert out.shape == (*x.shape[:-1], D_OUT)
                torch.testing.assert_close(out, exactly(made, x), atol=ATOL, rtol=0)
        assert made(draw(2, 0, D_IN)).shape == (2, 0, D_OUT)


def test_gradients_change_results_by_rounding_only():
    made, x = linear(), draw(40, D_IN)
    with torch.no_grad():
        without = made(x)
    made.requires_grad_()
    recorded = made(x)
    recorded.sum().backward()
    assert (recorded - without).abs().max() < 2e-6 * recorded.abs().max()
    torch.testing.assert_close(made.weight.grad, x.sum(0).expand(D_OUT, -1))


@pytest.mark.usefixtures("unchecked")  # sizes are tensors, while a graph is traced
@torch.no_grad()
def test_whatever_follows_operations_sees_a_plain_product():
    made, x = linear(), draw(3, D_IN)
    expected = exactly(made, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
    for dtype in (torch.float64, torch.bfloat16):
        assert linear(dtype=dtype)(x.to(dtype)).dtype == dtype
    with FlopCounterMode(display=False) as counter:
        made(x)
    assert counter.get_total_flops() == 2 * 3 * D_IN * D_OUT
    mapped = torch.func.vmap(made)(x[:, None])
    torch.testing.assert_close(mapped[:, 0], expected, atol=ATOL, rtol=0)
    _, along = torch.func.jvp(made, (x,), (x,))
    torch.testing.assert_close(along, expected - made.bias, atol=ATOL, rtol=0)
    with forward_ad.dual_level():  # the weights may be what is derived by
        dual = forward_ad.make_dual(made.weight.detach(), torch.ones_like(made.weight))
        along = torch.func.functional_call(made, {"weight": dual}, (x,))
        tangent = forward_ad.unpack_dual(along).tangent
        torch.testing.assert_close(tangent, x.sum(1, keepdim=True).expand(-1, D_OUT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of being outdated
        traced = torch.jit.trace(linear(), (x,))
    torch.testing.assert_close(traced(x), expected, atol=ATOL, rtol=0)
    assert made.to("meta")(x.to("meta")).shape == (3, D_OUT)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(3, 258), (2, 258), (9, 2, 129), (4, 514)])
def test_vectors_of_another_size_are_refused(shape):
    with torch.no_grad(), pytest.raises(RuntimeError):
        linear()(draw(*shape))
