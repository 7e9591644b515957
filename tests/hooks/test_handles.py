"""Tests of hooks that `runner.add` adds, which stay until `handle.remove` removes them."""

import asyncio
import contextvars
import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookPoint, NeverFiredError

X = torch.tensor([2.0, -3.0, 5.0])


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = HookPoint("pos")
        self.out = HookPoint("pos")

    def forward(self, x):
        return self.out(self.into(x) * 2)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Doubled(), Doubled()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def runner():
    return HookedRunner(Stack().eval())


def add_one(value, point):
    return value + 1


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_hooks_stay_until_their_handle_is_removed(runner):
    handle = runner.add({"blocks.0.out": add_one})
    for _ in range(2):
        torch.testing.assert_close(runner.model(X), (X * 2 + 1) * 2)
    _, cache = runner.run_with_cache(X)
    torch.testing.assert_close(cache["out", 0], X * 2 + 1)
    _, lazy = runner.run_with_cache(X, lazy=True)
    handle.remove()
    handle.remove()
    torch.testing.assert_close(lazy["out", 0], X * 2 + 1)
    torch.testing.assert_close(runner.model(X), X * 4)
    assert not any(module._forward_hooks for module in runner.model.modules())


def test_hooks_of_a_with_act_after_hooks_that_stay(runner):
    runner.add({"blocks.1.out": add_one})
    with runner.hooks({"blocks.1.out": lambda value, point: value * 3}):
        torch.testing.assert_close(runner.model(X), (X * 4 + 1) * 3)
    torch.testing.assert_close(runner.model(X), X * 4 + 1)


def test_hooks_act_in_every_context_of_their_thread_and_in_no_other_thread(runner):
    async def run():
        return runner.model(X)

    handle = contextvars.Context().run(runner.add, {"blocks.0.into": add_one})
    changed = (X + 1) * 4
    torch.testing.assert_close(runner.model(X), changed)
    torch.testing.assert_close(asyncio.run(run()), changed)
    torch.testing.assert_close(contextvars.Context().run(runner.model, X), changed)
    torch.testing.assert_close(in_thread(lambda: runner.model(X)), X * 4)
    assert in_thread(lambda: runner.handles) == []
    in_thread(handle.remove)
    torch.testing.assert_close(runner.model(X), X * 4)


def test_a_hook_that_runs_the_model_is_not_called_again(runner):
    def own_output(value, point):
        return runner.model(X)

    runner.add({"blocks.1.out": own_output, "blocks.0.into": add_one})
    torch.testing.assert_close(runner.model(X), X * 4)


def test_handles_are_listed_by_every_runner_of_the_model(runner):
    first = runner.add({"blocks.*.out": add_one})
    second = HookedRunner(runner.model).add({"blocks.0.into": add_one}, receipts=True)
    assert HookedRunner(Stack()).handles == []
    assert HookedRunner(runner.model).handles == runner.handles == [first, second]
    assert "blocks.0.out, blocks.1.out" in repr(runner)
    runner.model(X)
    assert second.receipts[0].largest == 1
    first.remove()
    assert runner.handles == [second]
    assert "removed" in repr(first)


def test_hooks_that_no_run_reached_are_an_error_when_they_are_removed():
    model = Stack()
    model.unused = HookPoint("pos")
    runner = HookedRunner(model)
    handle = runner.add({"unused": add_one})
    runner.model(X)
    with pytest.raises(NeverFiredError, match="unused"):
        handle.remove()
    assert runner.handles == []
    runner.add({"unused": add_one}).remove()


def test_gradients_are_edited_too(runner):
    runner.add(backward={"blocks.0.out": lambda gradient, point: gradient * 5})
    x = X.clone().requires_grad_()
    runner.model(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 20.0))


def test_hooks_that_stay_do_not_keep_their_model():
    runner = HookedRunner(Stack())
    runner.add({"blocks.0.out": add_one})
    model = weakref.ref(runner.model)
    del runner
    gc.collect()
    assert model() is None


def double(value, point):
    return value * 2


def test_a_model_with_active_hooks_is_not_pickled():
    model = Stack()
    runner = HookedRunner(model)
    expected = model(X)
    saves = (pickle.dumps, lambda model: torch.save(model, io.BytesIO()))
    with runner.hooks({"*": double}):
        for save in saves:
            with pytest.raises(pickle.PicklingError, match="leave the `with` first"):
                save(model)
        torch.save(model.state_dict(), io.BytesIO())
        # A deep copy has the hooks while the `with` is open.
        copied = copy.deepcopy(model)
        assert torch.equal(copied(X), model(X))
        assert not torch.equal(copied(X), expected)
    assert torch.equal(copied(X), expected)
    handle = runner.add({"*": double})
    with pytest.raises(pickle.PicklingError, match="remove the handle"):
        pickle.dumps(model)
    handle.remove()
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), expected)
