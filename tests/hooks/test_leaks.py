"""Random nesting, edits and errors: the model does not change, and memory is freed."""

import gc
import subprocess
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hooks import HookedRunner, HookError
from tests.hooks.registered import hooks_of

POINTS = [
    "embed",
    "blocks.*.attn.pattern",
    "blocks.1.attn.z",
    "blocks.0.ln1.scale",
    "blocks.2",
    "*",
]
EDITS = {
    "leave": lambda value, point: None,
    "scale": lambda value, point: value * 1.5,
    "write": lambda value, point: [value.zero_()].clear(),
    "shape": lambda value, point: value[..., :1].repeat_interleave(3, -1),
}


# A context to nest: a selector, an edit, and the number of the call at which the edit raises an
# error.
CONTEXT = st.tuples(st.sampled_from(POINTS), st.sampled_from(list(EDITS)), st.integers(0, 12))
RUNS = {
    "eager": {},
    "lazy": {"lazy": True},
    "grads": {"grads": True},
    "graph": {"grads": True, "detach": False},
}
KINDS = st.sampled_from([*RUNS, "capture", "plan"])


@pytest.mark.usefixtures("unchecked")
def test_fuzz(model, tokens):
    runner, calls, seen = HookedRunner(model), [], set()
    model.blocks[1].attn.register_forward_hook(lambda *args: calls.append(1))
    model.register_forward_pre_hook(lambda *args: None)
    before, plain = hooks_of(model), model(tokens)

    @given(st.lists(CONTEXT, max_size=4), st.sampled_from(POINTS), KINDS, st.booleans())
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    def run(nested, selector, kind, frozen):
        model.requires_grad_(not frozen)
        gc.disable()
        try:
            kept = cached(runner, tokens, nested, selector, kind)
            assert not [ref for ref in kept if ref() is not None], "alive without the collector"
            seen.update([kind] if kept else [])
        finally:
            gc.enable()
        assert hooks_of(model) == before
        assert torch.equal(model(tokens), plain)

    run()
    assert calls
    assert seen == {*RUNS, "capture"}


def raising(edit, at):
    """Return a hook that applies an edit, and raises an error at its call number `at`."""
    countdown = iter(range(at, -100, -1))

    def hook(value, point):
        if next(countdown) == 0:
            raise ZeroDivisionError
        return EDITS[edit](value, point)

    return hook


def cached(runner, tokens, nested, selector, kind):
    """Run the model under nested contexts, and return weak references to everything it cached."""
    kept = []
    try:
        with ExitStack() as stack:
            for at, edit, raises_at in nested:
                stack.enter_context(runner.hooks({at: raising(edit, raises_at)}))
            if kind == "plan":
                runner.plan(tokens, names=selector)
            elif kind == "capture":
                cache = runner.capture(tokens, names=selector)
                kept += map(weakref.ref, cache.values())
            else:
                logits, cache = runner.run_with_cache(tokens, names=selector, **RUNS[kind])
                if "grads" in RUNS[kind]:
                    logits.sum().backward()
                    kept += map(weakref.ref, cache.grads.values())
                kept += map(weakref.ref, cache.values())
    except (ZeroDivisionError, HookError):
        pass
    return kept


STATM = Path("/proc/self/statm")

GROWTH = """
import torch
from pathlib import Path
from hooks import HookedRunner, HookPoint

runner = HookedRunner(torch.nn.Sequential(torch.nn.Linear(5, 7), HookPoint("batch d")).eval())
x = torch.ones(2, 5)

@torch.no_grad()
def resident(runs):
    for _ in range(runs):
        with runner.hooks({"0": lambda value, point: value * 1.5}):
            runner.run_with_cache(x, names="1")
    return int(Path("/proc/self/statm").read_text().split()[1])

before = resident(1000)
print(resident(10_000) / before)
"""


@pytest.mark.full
@pytest.mark.skipif(not STATM.exists(), reason="reads resident memory from /proc, which is Linux's")
def test_ten_thousand_cached_runs_do_not_grow_by_a_hundredth():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.01
