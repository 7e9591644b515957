"""Captured steps, and the benchmark's rows, which must compute the same things."""

import dataclasses
import functools

import pytest
import torch

from hooks import HookedRunner
from models import StaticKVCache, generate, trusted
from tests.bench.gpu import Bench, captured, captured_generation, runnable
from tests.bench.peers import Shape
from tests.gpu.kinds import gap, pair, tokens

TINY = Shape(layers=2, heads=2, d_model=32, vocab=101, batch=3, pos=13)
ROWS = [*Bench("cpu").rows]


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma"])
def test_a_captured_step_generates_the_same_tokens(where, kind):
    model, _ = pair(kind, where)
    continued = captured_generation(model, tokens().to(where))
    for text in (tokens(), tokens().flip(1)):
        expected = [row[13:] for row in generate(model, text, max_new_tokens=7)]
        assert continued(text.to(where), 7).tolist() == expected


@torch.no_grad()
def test_a_captured_run_fills_the_same_cache_again(where):
    model, exact = pair("gpt2", where)
    runner, text, names = HookedRunner(model), tokens().to(where), ["*.resid_post", "*.1.*.pattern"]
    kept = []

    def run():
        with trusted():
            kept[:] = runner.run_with_cache(text, names=names)

    repeat = captured(run, where)
    for other in (tokens().flip(0), tokens().flip(1)):
        text.copy_(other)
        repeat()
        logits, cache = HookedRunner(exact).run_with_cache(other, names=names)
        assert gap(kept[0], logits) < 1e-4
        assert all(gap(kept[1][name], value) < 1e-4 for name, value in cache.items())


@torch.no_grad()
def test_points_of_a_captured_step(where):
    """What a cached run keeps in the graph, each replay writes again."""
    model, _ = pair("llama", where)
    runner, text, names = (
        HookedRunner(model),
        tokens().to(where),
        ["*.resid_post", "blocks.1.attn.z"],
    )
    run = functools.partial(generate, model, max_new_tokens=5)
    _, expected = runner.run_with_cache(text, run=run, names=names)
    cache, token, kept = StaticKVCache(29), text[:, -1:].clone(), {}

    def read(new):
        logits, values = runner.run_with_cache(new, names=names, kv_cache=cache)
        kept.update(values)
        token.copy_(logits[:, -1:].argmax(-1))

    with trusted():
        read(text)
        repeat = captured(lambda: read(token), where)
        cache.reset()
        token.copy_(model(text, kv_cache=cache, last=1).argmax(-1))
        for pos in range(13, 17):
            repeat()
            for name, value in kept.items():
                assert gap(value[:, 0], expected[name][:, pos]) < 1e-4


@pytest.mark.parametrize("row", ROWS)
@torch.no_grad()
def test_rows_of_the_benchmark(where, row):
    prompts = dataclasses.replace(TINY, batch=1, new=5)
    calls = Bench(where, torch.float32, trained=TINY, prompts=prompts, long=(41, 64)).rows[row]()
    results = {name: call() for name, call in runnable(calls).items()}
    assert len(results) > 1
    if row == "forward":
        # Peers have other random weights.
        base, *ours = (logits for name, logits in results.items() if "transformers" not in name)
        assert all(torch.allclose(logits, base, atol=1e-5) for logits in ours)
    elif row == "decode":
        new = [torch.as_tensor(found)[:, -5:].tolist() for found in results.values()]
        assert all(found == new[0] for found in new[:2])
