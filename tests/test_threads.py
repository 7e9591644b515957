"""Hooks belong to the thread that set them: eight at once each get what they would alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from hooks import HookedRunner


def intervene(model, index, rounds=1, barrier=None):
    """Logits and cached values under an intervention that only `index` decides."""
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
