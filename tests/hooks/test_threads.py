"""Hooks act in the thread or task that set them, and stop when their `with` ends,
however it ends.
"""

import asyncio
import contextvars
import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hooks import HookedRunner, NeverFiredError
from hooks.session import is_listened_to


def intervene(model, index, rounds=1, barrier=None):
    """Return logits and cached values of a run whose texts and edits depend only on `index`."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(23, (1 + index % 3, 7), generator=generator)
    edits = {
        f"blocks.{index % 3}.attn.z": lambda value, point: value * index,
        "blocks.*.mlp_out" if index % 2 else "ln_final.scale": lambda value, point: value + index,
    }
    names = ["blocks.*.attn.pattern", "*.resid_post", "*.scores"][index % 3]
    runner, results = HookedRunner(model), []
    for _ in range(rounds):
        if barrier:
            barrier.wait()
        with torch.no_grad(), runner.hooks(edits):
            logits, cache = runner.run_with_cache(tokens, names=names, lazy=index % 4 == 0)
        part = runner.capture(tokens, names="blocks.1.resid_mid")
        results.append([model(tokens), logits, *cache.values(), *part.values()])
    return results


def test_eight_interventions_at_once_equal_each_alone(model):
    count, rounds = 8, 12
    with ThreadPoolExecutor(1) as pool:
        alone = list(pool.map(lambda index: intervene(model, index)[0], range(count)))
    barrier = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        together = list(pool.map(lambda i: intervene(model, i, rounds, barrier), range(count)))
    for expected, results in zip(alone, together, strict=True):
        for values in results:
            assert len(values) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def times(factor):
    return {"0": lambda value, point: value * factor}


@pytest.fixture
def small():
    """A runner over a model that returns its input."""
    return HookedRunner(nn.Sequential(nn.Identity()))


ONE = torch.ones(1)


def test_tasks_have_the_hooks_of_the_code_that_started_them_while_those_are_open(small):
    model, found = small.model, {}

    async def main():
        entered, left = asyncio.Event(), asyncio.Event()

        async def other(name):
            found[name] = model(ONE).item()
            await left.wait()
            found[f"{name} later"] = model(ONE).item()

        async def owner():
            with small.hooks(times(3)):
                inner = asyncio.create_task(other("inside"))
                entered.set()
                await asyncio.sleep(0.01)
                found["owner"] = model(ONE).item()
                found["to_thread"] = (await asyncio.to_thread(model, ONE)).item()
            left.set()
            await inner

        async def stranger():
            await entered.wait()
            with small.hooks(times(5)):
                await asyncio.sleep(0)
                found["stranger"] = model(ONE).item()

        await asyncio.gather(owner(), stranger(), other("outside"))

    asyncio.run(main())
    edited = {"inside": 3, "owner": 3, "to_thread": 3, "stranger": 5}
    assert found == edited | dict.fromkeys(("inside later", "outside", "outside later"), 1)


def test_a_context_that_a_dead_thread_left_open_edits_nothing(small):
    contexts = []

    def leave_open():
        contexts.append(small.hooks(times(3)))
        contexts[0].__enter__()

    for target in (leave_open, lambda: contexts.append(small.model(ONE))):
        # The second thread gets the identifier of the first thread, which has ended.
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert contexts.pop() == 1
    contexts.clear()
    assert not small.model[0]._forward_hooks


def test_running_only_in_another_thread_is_an_error(small):
    def run_elsewhere():
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(is_listened_to, small.model).result()
            assert pool.submit(small.model, ONE).result() == 1

    with pytest.raises(NeverFiredError, match="0.*thread"), small.hooks(times(3)):
        run_elsewhere()
    with small.hooks(times(3)):
        run_elsewhere()
        assert small.model(ONE) == 3
    with small.hooks(times(3)), ThreadPoolExecutor(1) as pool:
        # The edit that is given in the other thread acts there, and the outer edit does not.
        edited = pool.submit(small.run_with_hooks, ONE, hooks=times(5))
        assert edited.result() == 5
    pair = HookedRunner(nn.Sequential(nn.Identity(), nn.Identity()).eval())
    with pair.hooks({"*": lambda value, point: value * 3}), ThreadPoolExecutor(1) as pool:
        assert pool.submit(pair.model, ONE).result() == 1
        # The capture stops before the second edited point, which is no error.
        assert pair.capture(ONE, names="0")["0"] == 3


@contextmanager
def suspended(small):
    with small.hooks(times(3)):
        yield


def test_a_generator_closed_while_a_hook_is_registered_does_not_block(small):
    """The garbage collector can close a generator at any time, also while a hook is registered."""
    generator = suspended(small)
    generator.__enter__()

    class Collecting(type(small.model._forward_hooks)):
        def __setitem__(self, key, hook):
            super().__setitem__(key, hook)
            nonlocal generator
            generator = None
            gc.collect()

    small.model._forward_hooks = Collecting()
    found = []
    thread = threading.Thread(
        target=lambda: found.append(small.run_with_hooks(ONE, hooks=times(5))), daemon=True
    )
    thread.start()
    thread.join(20)
    assert found == [5]
    assert small.model(ONE) == 1
    assert not any(module._forward_hooks for module in small.model.modules())


def test_a_context_lost_without_its_end_edits_nothing(small):
    context = small.hooks(times(3))
    context.__enter__()
    with small.hooks(times(5)):
        assert small.model(ONE) == 15
        del context
        assert small.model(ONE) == 5
    assert not any(module._forward_hooks for module in small.model.modules())


def test_a_copied_model_in_a_copied_context_is_not_edited_later(small):
    edits = small.hooks(times(3))
    with edits:
        model, context = copy.deepcopy(small.model), contextvars.copy_context()
        assert context.run(model, ONE) == 3
    assert context.run(model, ONE) == 1


def test_a_lazy_run_in_a_copied_context_is_not_edited_later(runner, tokens):
    name = "blocks.1.mlp_out"
    edits = runner.hooks({name: lambda value, point: value + 1})
    with edits:
        context = contextvars.copy_context()
    _, lazy = context.run(runner.run_with_cache, tokens, names=name, lazy=True)
    torch.testing.assert_close(lazy[name], runner.capture(tokens, names=name)[name])


def test_an_error_is_the_same_while_another_thread_registers_hooks(small):
    """After an error in a module, PyTorch iterates over its hooks, which another thread changes."""

    point = small.model[0]

    def register(*args):
        # Another thread could do this in the middle of the call.
        point.register_forward_hook(lambda *args: None)

    def run():
        with small.hooks({"0": lambda value, point: 1 / 0}):
            point.register_forward_hook(register, always_call=True)
            point.register_forward_hook(lambda *args: None)
            small.model(ONE)

    with pytest.raises(ZeroDivisionError):
        run()
