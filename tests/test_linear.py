"""Linear: the same map, in whatever way is fast, and with copies in the order that a processor reads."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from models.linear import Linear


@pytest.fixture(params=[2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def products(monkeypatch):
    """Which of the fast ways were gone: matrices cut in parts, oneDNN, or that with a copy."""
    gone, bmm, onednn = [], torch.bmm, torch.ops.mkldnn._linear_pointwise

    def by_onednn(x, weight, *rest):
        gone.append("prepacked" if weight.is_mkldnn else "oneDNN")
        return onednn(x, weight, *rest)

    monkeypatch.setattr(torch, "bmm", lambda *args: gone.append("split") or bmm(*args))
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", by_onednn)
    return gone


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch carries no oneDNN"
)


def linear(bias=True, d_in=257, d_out=515):
    """One of more than 2^17 numbers, whose rows neither two nor three threads share evenly."""
    made = Linear(d_in, d_out, bias).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def exactly(made, x):
    bias = None if made.bias is None else made.bias.double()
    return F.linear(x.double(), made.weight.double(), bias).float()


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 16


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_few_and_many_rows(threads, products, bias):
    for d_in, d_out, most in ((257, 515, 4), (257, 516, 4), (515, 257, 1)):
        made, x = linear(bias, d_in, d_out), draw(40, d_in)
        expected = exactly(made, x)
        with torch.no_grad():
            for rows in range(1, 41):
                torch.testing.assert_close(made(x[-rows:]), expected[-rows:], atol=2e-5, rtol=0)
        assert products == ["split"] * most + ["oneDNN"] * (40 - most)
        products.clear()


@needs_onednn
def test_linear_follows_weights_that_are_replaced():
    made, x = linear(bias=False), draw(9, 257)
    made.weight = torch.nn.Parameter(torch.cat([made.weight, made.weight[:4]]), requires_grad=False)
    with torch.no_grad():
        for rows in (1, 3, 9):
            ours = made(x[:rows])
            assert ours.shape == (rows, 519)
            torch.testing.assert_close(ours, exactly(made, x[:rows]), atol=2e-5, rtol=0)


def test_linear_without_onednn(monkeypatch, products):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    made, x = linear(), draw(7, 257)
    with torch.no_grad():
        assert torch.equal(made(x), F.linear(x, made.weight, made.bias))
    assert not products


@pytest.mark.usefixtures("threads")
def test_linear_keeps_the_leading_axes(products):
    made = linear()
    with torch.no_grad():
        for x in (draw(257), draw(3, 5, 257), draw(2, 1, 257), draw(257, 6).T, draw(5, 2, 257).transpose(0, 1)):  # fmt: skip
            ours = made(x)
            assert ours.shape == (*x.shape[:-1], 515)
            torch.testing.assert_close(ours, exactly(made, x), atol=1e-5, rtol=0)
        assert made(draw(2, 0, 257)).shape == (2, 0, 515)
    assert len(products) >= 5


@pytest.mark.usefixtures("threads")
def test_linear_with_fewer_rows_of_weights_than_threads(products):
    made, x = linear(d_in=2**17, d_out=1), draw(3, 2**17)
    with torch.no_grad():
        torch.testing.assert_close(made(x), exactly(made, x), atol=1e-3, rtol=0)


@pytest.mark.usefixtures("threads")
def test_when_linear_takes_the_plain_path(products, monkeypatch):
    made, x = linear(), draw(3, 257)
    with torch.enable_grad():
        assert torch.equal(made(x), F.linear(x, made.weight, made.bias))
        made.requires_grad_()
        made(x).sum().backward()
        torch.testing.assert_close(made.weight.grad, x.sum(0).expand(515, -1))
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert made(x).dtype == torch.bfloat16
        assert copy.deepcopy(made).double()(x.double()).dtype == torch.float64
        assert copy.deepcopy(made).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
        linear(d_in=256, d_out=511)(draw(3, 256))  # one row short of 2^17 numbers
        with FlopCounterMode(display=False) as counter:
            made(draw(33, 257))
        assert counter.get_total_flops() == 2 * 33 * 257 * 515
        mapped = torch.func.vmap(made)(draw(2, 7, 257))
        torch.testing.assert_close(mapped, exactly(made, draw(2, 7, 257)), atol=2e-5, rtol=0)
        _, along = torch.func.jvp(made, (x,), (x,))
        torch.testing.assert_close(along, exactly(made, x) - made.bias, atol=2e-5, rtol=0)
        turned = linear(d_in=515, d_out=257)
        turned.weight = torch.nn.Parameter(linear().weight.T, requires_grad=False)
        torch.testing.assert_close(turned(draw(3, 515)), exactly(turned, draw(3, 515)), atol=1e-5, rtol=0)  # fmt: skip
        with forward_ad.dual_level():
            # The weights may be what is derived by.
            twin = {name: p.detach() for name, p in made.named_parameters()}
            dual = forward_ad.make_dual(twin["weight"], torch.ones_like(twin["weight"]))
            wide = torch.func.functional_call(made, twin | {"weight": dual}, (draw(9, 257),))
            along = forward_ad.unpack_dual(wide).tangent
            torch.testing.assert_close(along, draw(9, 257).sum(1, keepdim=True).expand(-1, 515))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch speaks of other devices there
            with torch.backends.mkldnn.flags(enabled=False):
                made(draw(9, 257))
        with pytest.raises(RuntimeError, match="size|shape|mat"):
            made(draw(9, 2, 129))
        half = copy.deepcopy(made)
        half.weight = torch.nn.Parameter(made.weight.to("meta"), requires_grad=False)
        half(draw(9, 257))
        made.to("meta")(x.to("meta"))
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            linear()(x)
        assert not products
        linear(d_in=256, d_out=512)(draw(3, 256))
    assert products == ["split"]


@pytest.mark.usefixtures("unchecked")
def test_linear_refuses_vectors_of_another_size():
    with torch.no_grad(), pytest.raises(RuntimeError):
        linear()(draw(3, 258))
