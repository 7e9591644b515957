"""Measure stores: a harvest beside `capture`, shuffled reading, memory, and Ray.

    python tests/bench/store.py

The model has GPT-2's shape and random weights. The harvest stores one point of 768 numbers in the
middle of the model, for 16 texts of 256 tokens. The files that are read were just written, so they
are still in memory. The memory is the peak of a process that harvests a model that computes almost
nothing, after a tenth of its tokens and at the end. `--ray` compares two workers of Ray with two
processes that are started by hand, each with one thread. Run it on a machine that does nothing
else.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

# When this file runs as a script, Python searches this folder for modules, and not the project.
sys.path.insert(0, str(ROOT := Path(__file__).parents[2]))

from hooks import HookedRunner, HookPoint
from interp.store import HarvestConfig, Ray, harvest
from models import Transformer, TransformerConfig
from tests.bench import timing

NAME = "blocks.6.resid_post"


class Table(nn.Module):
    """A model that takes almost no time: it looks up rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.point = nn.Embedding(1000, 768), HookPoint("batch pos d_model")

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens."""
        return self.point(self.rows(tokens))


def small() -> nn.Module:
    """Return a random model of GPT-2's shape."""
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=50257, n_ctx=1024, n_layers=12, n_heads=12, d_model=768)
    return Transformer(config).eval()


def tokens(count: int) -> list[list[int]]:
    """Return texts of 256 random tokens."""
    return torch.randint(
        0, 50257, (count, 256), generator=torch.Generator().manual_seed(1)
    ).tolist()


def speed(budget: float) -> None:
    """Print the time of a harvest relative to captures, and the speed of reading a store."""
    model, texts = small(), tokens(16)
    runner = HookedRunner(model)

    def captured() -> None:
        for batch in torch.tensor(texts).split(4):
            runner.capture(batch, names=NAME)

    def harvested() -> None:
        with tempfile.TemporaryDirectory() as out:
            harvest(model, texts, NAME, out, config=HarvestConfig(batch=4, per_file=8))

    taken_by = timing.ratios({"capture": captured, "harvest": harvested}, "capture", budget)
    print(f"harvest: {taken_by['harvest'][0]:.2f} s, {taken_by['harvest'][1]:.3f} of capture")
    with tempfile.TemporaryDirectory() as out:
        store = harvest(
            Table().eval(),
            torch.randint(0, 1000, (512, 512)),
            "point",
            out,
            config=HarvestConfig(batch=64),
        )
        size = len(store) * 768 * 4

        def read(window: int) -> int:
            return sum(len(x) for (x,) in store.batches(4096, 0, window=window))

        calls = {f"shuffled batches, window {n}": partial(read, n) for n in (2, 4, 16)}
        calls |= {
            "statistics": store.statistics,
            "statistics with covariances": partial(store.statistics, covariance=True),
        }
        for name, call in calls.items():
            taken = timing.ratios({"read": call}, "read", budget / 8)["read"][0]
            print(f"{name}: {size / 1e9 / taken:.2f} GB/s")


def memory(count: int) -> None:
    """Harvest `count` tokens, and print the peak memory after a tenth of them and at the end."""
    peaks = []

    def texts() -> object:
        for number in range(count // 250):
            if number in (count // 2500, count // 250 - 1):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            yield [(number + pos) % 1000 for pos in range(250)]

    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        harvest(
            Table().eval(),
            texts(),
            "point",
            out,
            config=HarvestConfig(per_file=16, dtype=torch.float16),
        )
        taken = time.perf_counter() - start
    print(
        f"{count:,} tokens in {taken:.0f} s: peak of {peaks[0]:.0f} MiB after a tenth, "
        f"{peaks[1]:.0f} MiB at the end"
    )


def job(out: str, shard: tuple[int, int]) -> None:
    """Run one job of the comparison with Ray."""
    torch.set_num_threads(1)
    harvest(
        small(),
        tokens(RAY_TEXTS),
        NAME,
        out,
        shard=shard,
        config=HarvestConfig(batch=4, per_file=2),
    )


RAY_TEXTS = 240


def by_ray() -> None:
    """Print the times of two workers of Ray and of two processes."""
    import ray

    def processes(out: str) -> None:
        command = (
            "from tests.bench.store import job; import sys; job(sys.argv[1], (int(sys.argv[2]), 2))"
        )
        started = [
            subprocess.Popen([sys.executable, "-c", command, out, str(n)], cwd=ROOT) for n in (0, 1)
        ]
        for each in started:
            assert each.wait() == 0

    def workers(out: str) -> None:
        harvest(
            small,
            tokens(RAY_TEXTS),
            NAME,
            out,
            executor=Ray(workers=2),
            config=HarvestConfig(batch=4, per_file=2),
        )

    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for _ in range(3):
        taken = []
        for call in (processes, workers):
            with tempfile.TemporaryDirectory() as out:
                start = time.perf_counter()
                call(out)
                taken.append(time.perf_counter() - start)
        print(
            f"two processes {taken[0]:.1f} s, two workers {taken[1]:.1f} s: "
            f"{taken[0] / taken[1]:.2f}"
        )
    ray.shutdown()


def main() -> None:
    """Run the measurements that the options select."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each number")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the harvest for memory")
    parser.add_argument("--ray", action="store_true", help="compare Ray's workers with processes")
    options = parser.parse_args()
    if options.ray:
        return by_ray()
    # Memory comes first, because a peak is that of the whole process so far.
    memory(options.tokens)
    return speed(options.budget)


if __name__ == "__main__":
    main()
