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
    def forward(self, x):
        self.ran.append("explicit")
        return self.root(x) ** 2


def test_the_choice_is_made_at_each_call_and_in_each_thread():
    model, x = Square().eval(), torch.tensor([3.0])
    runner = HookedRunner(model)
    model(x)
    runner.run_with_cache(x, names="root")
    with runner.hooks({"root": lambda value, point: value * 0}):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        assert model(x).item() == 0
    model(x)
    model.root.register_full_backward_hook(lambda *args: None)  # the user's own
    model(x.requires_grad_())
    assert model.ran == ["fused", "explicit", "fused", "explicit", "fused", "explicit"]


@pytest.mark.parametrize("names", ["*.scores", "*.scale", "*"])
def test_fused_and_explicit_agree_in_value_and_gradient(model, runner, tokens, names):
    def run(hooks):
        model.zero_grad()
        logits = runner.run_with_hooks(tokens, hooks=hooks)
        logits.log_softmax(-1)[:, :, 5].sum().backward()
        return logits, {name: p.grad.clone() for name, p in model.named_parameters()}

    fused, fused_gradients = run({})
    explicit, explicit_gradients = run({names: lambda value, point: None})
    torch.testing.assert_close(explicit, fused, atol=1e-5, rtol=0)
    for name, gradient in fused_gradients.items():
        torch.testing.assert_close(explicit_gradients[name], gradient, atol=3e-5, rtol=1e-5)


def test_dropout_acts_in_both_forms(tokens):
    from models import Transformer, TransformerConfig

    sizes = dict(vocab_size=23, n_ctx=17, n_layers=1, n_heads=2, d_model=10)
    runner = HookedRunner(Transformer(TransformerConfig(**sizes, dropout=0.5)).train())
    for hooks in ({}, {"*.pattern": lambda value, point: None}):
        one, other = (runner.run_with_hooks(tokens, hooks=hooks) for _ in range(2))
        assert not torch.equal(one, other)
