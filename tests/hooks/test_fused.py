"""FusedUnlessHooked: tests of which form runs, the fused kernel or the explicit computation.

The tests of attention and norms check that both forms return the same values.
"""

import threading

import torch
from torch import nn

from hooks import FusedUnlessHooked, HookedRunner, HookPoint


class Square(nn.Module):
    """A module that computes x², and stores which form computed it in `ran`."""

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
    model(x)
    HookedRunner(model).run_with_cache(x, names="root")
    with HookedRunner(model).hooks({"root": lambda value, point: value * 0}):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        assert model(x).item() == 0
    model(x)
    model.root.register_full_backward_hook(lambda *args: None)  # a hook that the user registered
    model(x.requires_grad_())
    assert model.ran == ["fused", "explicit", "fused", "explicit", "fused", "explicit"]


def test_each_module_chooses_for_itself():
    model = nn.Sequential(Square(), Square()).eval()
    HookedRunner(model).run_with_cache(torch.tensor([3.0]), names="1.root")
    assert [part.ran for part in model] == [["fused"], ["explicit"]]


def test_any_hook_of_the_users_counts_whatever_its_attributes():
    class Kept:
        acts = ()

        def __call__(self, module, args, value):
            self.acts += (value.item(),)

    model, kept = Square().eval(), Kept()
    model.root.register_forward_hook(kept)
    model(torch.tensor([3.0]))
    assert kept.acts == (3.0,)
