"""FusedUnlessHooked: which form runs, and that the two agree."""

import threading

import pytest
import torch
from torch import nn

from hooks import FusedUnlessHooked, HookedRunner, HookPoint


class Square(nn.Module):
    """x², and which form computed it."""

    def __init__(self):
        super().__init__()
        self.root = HookPoint("batch")
        self.ran = []

    def _fused(self, x):
        self.ran.append("fused")
        return x * x

    @FusedUnlessHooked("root", fused=_fused)
    def explicit(self, x):
        """The explicit square."""
        self.ran.append("explicit")
        return self.root(x) ** 2

    def forward(self, x):
        return self.explicit(x)


def test_the_choice_is_made_at_each_call():
    model, x = Square(), torch.tensor([3.0])
    runner = HookedRunner(model)
    model(x)
    runner.run_with_cache(x, names="root")
    runner.run_with_hooks(x, hooks={"root": lambda value, point: None})
    model(x)
    assert model.ran == ["fused", "explicit", "explicit", "fused"]
    assert model.explicit.__doc__ == "The explicit square."


@pytest.mark.parametrize(
    "register",
    [
        lambda point: point.register_forward_hook(lambda *args: None),
        lambda point: point.register_forward_pre_hook(lambda *args: None),
        lambda point: point.register_full_backward_hook(lambda *args: None),
        lambda point: point.register_full_backward_pre_hook(lambda *args: None),
    ],
)
def test_the_users_own_hooks_count_as_listening(register):
    model = Square()
    handle = register(model.root)
    model(torch.tensor([3.0], requires_grad=True))
    handle.remove()
    model(torch.tensor([3.0]))
    assert model.ran == ["explicit", "fused"]


def test_a_listener_in_another_thread_does_not_count():
    model = Square()
    with HookedRunner(model).hooks({"root": lambda value, point: value * 0}):
        thread = threading.Thread(target=model, args=(torch.tensor([3.0]),))
        thread.start()
        thread.join()
        assert model(torch.tensor([3.0])).item() == 0
    assert model.ran == ["fused", "explicit"]


def test_only_the_hooked_layer_pays(model, runner, tokens, monkeypatch):
    layers = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counting(*args, **kwargs):
        layers.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr("models.attention.F.scaled_dot_product_attention", counting)
    runner.run_with_cache(tokens, names="blocks.1.attn.pattern")
    assert len(layers) == 2
    model(tokens)
    assert len(layers) == 5
