"""The module that uses private parts of PyTorch. Each part has a test with its name.

Components have a test file of their own.
"""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as nn_module

from hooks.base import _torch

KINDS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_identity(kind, everywhere):
    """Hooks of every kind are called, on the module and on all modules. Without hooks, `Identity`
    returns its input.
    """
    identity, value, called = _torch.Identity(), torch.ones(2, requires_grad=True), []
    assert identity(value) is value
    owner, prefix = (nn_module, "register_module_") if everywhere else (identity, "register_")
    handle = getattr(owner, prefix + kind)(lambda *args: called.append(1))
    try:
        identity(value).sum().backward()
    finally:
        handle.remove()
    assert called == [1]
    assert identity(value) is value


@pytest.mark.parametrize("kind", KINDS)
def test_has_hooks_and_hooks_of(kind):
    module = nn.Linear(2, 3)
    handle = getattr(module, f"register_{kind}")(print)
    assert (_torch.has_hooks(module), _torch.hooks_of(module)) == (True, [print])
    handle.remove()
    assert (_torch.has_hooks(module), _torch.hooks_of(module)) == (False, [])


def test_children_and_state_of():
    norms = nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Sequential(nn.ReLU(), *norms))
    model.register_module("absent", None)
    assert list(_torch.children(model)) == [model[0], model[1]]
    expected = [model[0].weight, *norms[0].parameters(), *norms[0].buffers(), *norms[1].buffers()]
    assert list(map(id, _torch.state_of(model))) == list(map(id, expected))


def test_is_any_autocast_enabled():
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert _torch.is_any_autocast_enabled()
    with torch.autocast("cuda", torch.float16, enabled=False):
        assert not _torch.is_any_autocast_enabled()


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


def test_has_storage_and_is_unwatched():
    x, seen = torch.ones(3), []

    def look(x):
        seen.append((_torch.has_storage(x), _torch.is_unwatched(x)))
        return x.sum()

    look(x)
    look(x.clone().requires_grad_())
    with torch.autograd.forward_ad.dual_level():
        look(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(x)
    assert seen == [(True, True), (True, False), (True, False), *[(False, False)] * 3]


# The compiler gives warnings of its own.
@pytest.mark.filterwarnings("ignore")
def test_traced_as_constant():
    """Tracing calls the function once, and treats the answer as a constant.

    The compiler could not trace the body of this function.
    """
    answers = [True]

    @_torch.traced_as_constant
    def answer():
        return bool(sorted(answers, key=id)[0])

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        return x + 1 if answer() else x - 1

    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        answers[0] = False


def test_peak_bytes_of_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = torch.randn(3, 1, 2, 5, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention warns that it is not compiled.
        expected = flex_attention(q, k, v)
        output, peak = _torch.peak_bytes(lambda: flex_attention(q, k, v))
    assert torch.equal(output, expected)
    assert peak >= 2 * 5 * 16 * 4
