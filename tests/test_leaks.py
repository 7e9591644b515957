"""Fuzzing: whatever is nested, edited or raised, the model is left as it was and memory is freed."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hooks import HookedRunner, HookError

POINTS = [
    "embed",
    "pos_embed",
    "blocks.*.attn.pattern",
    "blocks.1.attn.z",
    "blocks.0.ln1.scale",
    "blocks.*.mlp_out",
    "ln_final.normalized",
    "blocks.2",
    "*",
]
EDITS = {
    "leave": lambda value, point: None,
    "scale": lambda value, point: value * 1.5,
    "write": lambda value, point: [value.zero_()].clear(),
    "shape": lambda value, point: value[..., :1].repeat_interleave(3, -1),
}


class Boom(Exception):
    """Raised by an edit."""


def hooks_of(model):
    return [
        (list(m._forward_hooks.items()), list(m._forward_pre_hooks.items()))
        for m in model.modules()
    ]


@st.composite
def layers(draw):
    """Contexts to nest: (selector, edit, the call at which it raises)."""
    one = st.tuples(st.sampled_from(POINTS), st.sampled_from(list(EDITS)), st.integers(0, 12))
    return draw(st.lists(one, min_size=1, max_size=4))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("frozen", [True, False])
def test_fuzz(model, tokens, frozen):
    runner = HookedRunner(model)
    model.requires_grad_(not frozen)
    calls = []
    model.blocks[1].attn.register_forward_hook(lambda *args: calls.append(1))
    model.register_forward_pre_hook(lambda *args: None)
    before, plain = hooks_of(model), model(tokens)

    @given(
        nested=layers(),
        selector=st.sampled_from(POINTS),
        kind=st.sampled_from(["eager", "lazy", "capture", "grads", "plan"]),
    )
    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        derandomize=True,
        database=None,
    )
    def run(nested, selector, kind):
        kept = []
        gc.collect()
        gc.disable()
        try:
            nest(runner, tokens, list(nested), selector, kind, kept)
            alive = [ref for ref in kept if ref() is not None]
            assert not alive, "tensors of a dropped cache are alive without the garbage collector"
        finally:
            gc.enable()
        assert hooks_of(model) == before
        assert torch.equal(model(tokens), plain)

    run()
    assert calls


def nest(runner, tokens, nested, selector, kind, kept):
    """Runs under the nested contexts and keeps weak references to what was cached."""
    try:
        if nested:
            at, edit, raises_at = nested.pop()
            counter = iter(range(1000))

            def hook(value, point):
                if next(counter) == raises_at:
                    raise Boom
                return EDITS[edit](value, point)

            with runner.hooks({at: hook}):
                nest(runner, tokens, nested, selector, kind, kept)
            return
        if kind == "plan":
            runner.plan(tokens, names=selector)
            return
        if kind == "capture":
            cache = runner.capture(tokens, names=selector)
        else:
            options = {} if kind == "eager" else {kind: True}
            logits, cache = runner.run_with_cache(tokens, names=selector, **options)
            if kind == "grads":
                logits.sum().backward()
                kept += [weakref.ref(value) for value in cache.grads.values()]
        kept += [weakref.ref(value) for value in cache.values()]
    except (Boom, HookError):
        pass


def test_a_dropped_cache_frees_its_tensors_at_once(model, runner, tokens):
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"lazy": True}, {"grads": True}, {"detach": False, "grads": True}):
            logits, cache = runner.run_with_cache(tokens, **options)
            if "grads" in options:
                logits.sum().backward()
            values = [weakref.ref(value) for value in cache.values()]
            values += [
                weakref.ref(value) for value in (cache.grads if "grads" in options else {}).values()
            ]
            assert all(ref() is not None for ref in values if "lazy" not in options)
            del logits, cache
            assert [ref for ref in values if ref() is not None] == [], options
        cache = runner.capture(tokens, names="blocks.1.*")
        values = [weakref.ref(value) for value in cache.values()]
        del cache
        assert [ref for ref in values if ref() is not None] == []
    finally:
        gc.enable()


STATM = Path("/proc/self/statm")

GROWTH = """
import torch
from pathlib import Path
from hooks import HookedRunner
from models import Transformer, TransformerConfig

sizes = dict(vocab_size=23, n_ctx=7, n_layers=1, n_heads=1, d_model=4, d_mlp=6)
runner = HookedRunner(Transformer(TransformerConfig(**sizes)).eval())
tokens = torch.randint(23, (2, 5))

@torch.no_grad()
def resident(runs):
    for _ in range(runs):
        with runner.hooks({"blocks.0.mlp_out": lambda value, point: value * 1.5}):
            runner.run_with_cache(tokens, names="blocks.*.resid_post")
    return int(Path("/proc/self/statm").read_text().split()[1])

before = resident(1000)
print(resident(10_000) / before)
"""


@pytest.mark.skipif(not STATM.exists(), reason="reads resident memory from /proc, which is Linux's")
def test_ten_thousand_cached_runs_do_not_grow_by_a_hundredth():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.01
