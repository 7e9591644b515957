"""The private parts of PyTorch: one test for each, named after it. Components have a file of their own."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from hooks import _torch

REGISTER = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


@pytest.mark.parametrize("scope", ["module", "global"])
@pytest.mark.parametrize("register", REGISTER)
def test_identity(register, scope):
    """Any kind of hook is called, wherever it is registered; without one the input comes back."""
    identity, value, called = _torch.Identity(), torch.ones(2, requires_grad=True), []
    assert identity(value) is value
    everywhere = getattr(nn_module, register.replace("register_", "register_module_"))
    chosen = everywhere if scope == "global" else getattr(identity, register)
    handle = chosen(lambda *args: called.append(1))
    try:
        identity(value).sum().backward()
    finally:
        handle.remove()
    assert called == [1]
    assert identity(value) is value


@pytest.mark.parametrize("register", REGISTER)
def test_has_hooks_and_hooks_of(register):
    module = nn.Linear(2, 3)
    assert not _torch.has_hooks(module)
    handle = getattr(module, register)(print)
    assert _torch.has_hooks(module)
    assert _torch.hooks_of(module) == [print]
    handle.remove()
    assert not _torch.has_hooks(module)
    assert _torch.hooks_of(module) == []


def test_children_and_state_of():
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Sequential(nn.BatchNorm1d(3)))
    model.absent = None
    assert list(_torch.children(model)) == [model[0], model[1]]
    expected = [model[0].weight, *model[1][0].parameters(), *model[1][0].buffers()]
    assert [id(tensor) for tensor in _torch.state_of(model)] == [id(tensor) for tensor in expected]


def test_own_attributes():
    module = nn.BatchNorm1d(3)
    attributes, buffers = _torch.own_attributes(module)
    attributes["eps"], buffers["running_mean"] = 7.0, torch.ones(3)
    assert (module.eps, module.running_mean.tolist()) == (7.0, [1, 1, 1])


def test_version():
    tensor = torch.zeros(3)
    before = _torch.version(tensor)
    tensor[1:].add_(1)
    assert _torch.version(tensor) != before
    with torch.inference_mode():
        assert _torch.version(torch.zeros(3).add_(1)) == -1


def test_memory_of():
    for mode in (FakeTensorMode(), torch.inference_mode()):
        with mode:
            whole, other = torch.zeros(4), torch.zeros(4)
            assert _torch.memory_of(whole) == _torch.memory_of(whole[2:])
            assert _torch.memory_of(whole) != _torch.memory_of(other)


def test_has_storage():
    seen = []

    def look(x):
        seen.append(_torch.has_storage(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [False, False]
    assert _torch.has_storage(torch.ones(3))


def test_is_of_parameter():
    weight = nn.Parameter(torch.ones(2, 3))
    assert all(map(_torch.is_of_parameter, (weight, weight[0], weight.T[1:])))
    assert not any(map(_torch.is_of_parameter, (weight * 1, torch.ones(2)[0])))


def test_is_unwatched():
    x, seen = torch.ones(3), []

    def look(x):
        seen.append(_torch.is_unwatched(x))
        return x * 2

    look(x)
    with torch.no_grad():
        look(x)
    assert seen == [True, True]
    look(x.clone().requires_grad_())
    torch.func.jvp(look, (x,), (x,))
    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(lambda x: look(x).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert seen[2:] == [False] * 5


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
@pytest.mark.parametrize("biased", [True, False])
def test_linear_by_onednn(biased):
    x, weight, bias = torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(7) if biased else None
    exact = np.einsum("bpi,oi->bpo", x.double().numpy(), weight.double().numpy())
    exact += bias.double().numpy() if biased else 0
    given = _torch.linear_by_onednn(x, weight, bias)
    np.testing.assert_allclose(given.numpy(), exact, atol=1e-5)
    operations = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations.append(function.namespace)
            return function(*args, **(kwargs or {}))

    with Watch():
        watched = _torch.linear_by_onednn(x, weight, bias)
    np.testing.assert_allclose(watched.numpy(), exact, atol=1e-5)
    assert set(operations) == {"aten"}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_traced_as_constant():
    """Tracing calls the function, whose body it could not follow, and keeps the answer."""
    answers = [True]

    @_torch.traced_as_constant
    def answer():
        return bool(sorted(answers, key=id)[0])

    compiled = torch.compile(
        lambda x: x + 1 if answer() else x - 1, fullgraph=True, backend="eager"
    )
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    answers[0] = False
    assert compiled(torch.ones(2)).tolist() == [2, 2]
