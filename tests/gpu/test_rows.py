"""The rows of the benchmark for a GPU: the compared calls compute the same numbers."""

import dataclasses

import pytest
import torch

from tests.bench.gpu import Bench, runnable
from tests.bench.peers import Shape

TINY = Shape(layers=2, heads=2, d_model=32, vocab=101, batch=3, pos=13)
ROWS = [*Bench("cpu").rows]


@pytest.mark.parametrize("row", ROWS)
@torch.no_grad()
def test_rows_of_the_benchmark(where, row):
    shapes = dict(trained=TINY, prompts=dataclasses.replace(TINY, batch=1, new=5), pairs=TINY)
    calls = Bench(where, torch.float32, **shapes, long=(41, 64)).rows[row]()
    # Compiling for a CPU takes a minute.
    with torch.compiler.set_stance("default" if where == "cuda" else "force_eager"):
        results = {name: call() for name, call in runnable(calls).items()}
    assert results
    if row == "forward":
        # The models of other libraries have other random weights.
        base, *ours = (logits for name, logits in results.items() if "transformers" not in name)
        assert all(torch.allclose(logits, base, atol=1e-5) for logits in ours)
    elif row == "analyses":
        for n in (1, 8, 32):
            edges = results[f"edge attribution of {n} example{'s' if n > 1 else ''}"]
            assert edges.axes == ("edge", "example")
            assert edges.values.shape[1] == n
    elif row == "decode":
        assert len(results["hookscope"][0]) == 13 + 5
        static = [rows for name, rows in results.items() if name.startswith("hookscope, static")]
        assert static == [results["hookscope"]] * len(static)
