"""Measure how time and memory grow with the length of the text and the depth of the model.

    python tests/bench/growth.py [JOB ...]

There is one thread, one text, 4 heads, d_model 128, a vocabulary of 1,000 and random weights. Each
cell of the table runs in its own process. It is the faster of two calls, after a call on a short
text, and the memory that one call adds at its peak. The last columns are exponents of growth: 1 is
linear. They compare the two longest texts in the deeper model, and the two depths at the middle
length.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# When this file runs as a script, Python searches this folder for modules, and not the project.
sys.path.insert(0, str(Path(__file__).parents[2]))

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    attribution_graph,
    attribution_patching,
    direct_logit_attribution,
    edge_attribution,
    head_scores,
    logit_lens,
    plots,
    svd_targets,
)
from interp.features import Dictionary, TopK
from interp.store import HarvestConfig, harvest
from models import Transformer, TransformerConfig
from tests.bench import timing

LENGTHS, DEPTHS, VOCAB, D_MODEL, FEATURES = (128, 512, 2048), (4, 16), 1000, 128, 512
Job = Callable[[Transformer, torch.Tensor], object]


def lazy(model: Transformer, tokens: torch.Tensor) -> Any:
    """Return the lazy cache of a run."""
    return HookedRunner(model).run_with_cache(tokens, lazy=True)[1]


def pairs(tokens: torch.Tensor) -> Pairs:
    """Return the text, and a copy with another first token."""
    corrupted = tokens.clone()
    corrupted[:, 0] = (corrupted[:, 0] + 1) % VOCAB
    return Pairs(tokens, corrupted, torch.tensor([[3, 5]]))


def graph(model: Transformer, tokens: torch.Tensor) -> object:
    """Return an attribution graph with random transcoders of 64 features, 8 of them active."""
    drawn = torch.Generator().manual_seed(0)
    dictionaries = {}
    for layer in range(model.config.n_layers):
        encoder, decoder = (
            torch.randn(*size, generator=drawn) / D_MODEL**0.5
            for size in ((D_MODEL, FEATURES), (FEATURES, D_MODEL))
        )
        zeros = torch.zeros(FEATURES), torch.zeros(D_MODEL)
        dictionaries[f"blocks.{layer}.mlp_out"] = Dictionary(
            encoder, decoder, *zeros, TopK(8), reads="ln2.normalized"
        )
    return attribution_graph(model, tokens, dictionaries, max_features=64)


def harvested(model: Transformer, tokens: torch.Tensor) -> object:
    """Harvest one point of four texts to disk."""
    with tempfile.TemporaryDirectory() as folder:
        return harvest(
            model,
            [*tokens.expand(4, -1).tolist()],
            "blocks.1.mlp_out",
            folder,
            config=HarvestConfig(batch=1),
        )


JOBS: dict[str, Job] = {
    "forward": lambda model, tokens: model(tokens),
    "lazy cache": lazy,
    "capture in the middle": lambda model, tokens: HookedRunner(model).capture(
        tokens, names=f"blocks.{model.config.n_layers // 2}.resid_post"
    ),
    "full cache": lambda model, tokens: HookedRunner(model).run_with_cache(tokens, mode="full"),
    "logit lens": lambda model, tokens: logit_lens(model, lazy(model, tokens)),
    "scores of heads": lambda model, tokens: head_scores(
        model, lazy(model, tokens), "previous_token"
    ),
    "picture of patterns": lambda model, tokens: plots.patterns(model, lazy(model, tokens)),
    "SVD targets of a layer": lambda model, tokens: svd_targets(model, lazy(model, tokens), [1]),
    "direct attribution": lambda model, tokens: direct_logit_attribution(
        model, lazy(model, tokens), right=3, pos=-1
    ),
    "patching of heads": lambda model, tokens: activation_patching(
        model, pairs(tokens), site="z", over=("layer", "head")
    ),
    "attribution patching": lambda model, tokens: attribution_patching(
        model, pairs(tokens), site="z", over=("layer", "head")
    ),
    "edge attribution": lambda model, tokens: edge_attribution(model, pairs(tokens)),
    "attribution graph": graph,
    "harvest": harvested,
}


def cell(job: str, depth: int, length: int) -> tuple[float, float]:
    """Return the seconds and the MiB of one call in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = TransformerConfig(
        vocab_size=VOCAB,
        n_ctx=max(LENGTHS),
        n_layers=depth,
        n_heads=4,
        d_model=D_MODEL,
        positions="rotary",
    )
    model = Transformer(config).eval().requires_grad_(False)
    tokens = torch.randint(VOCAB, (1, length))
    JOBS[job](model, tokens[:, :32])
    peak = timing.peak_in_this_process(lambda: JOBS[job](model, tokens))
    return min(timing.seconds(lambda: JOBS[job](model, tokens)) for _ in range(2)), peak


def main() -> None:
    """Print the table of the given jobs. Default: all jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--cell", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [job for job in options.jobs if job not in JOBS]:
        parser.error(f"jobs are {', '.join(JOBS)}, not {', '.join(unknown)}")
    if options.cell:
        print(*cell(options.jobs[0], *options.cell))
        return
    sizes = [(depth, length) for depth in DEPTHS for length in LENGTHS]
    heads = "".join(f"{f'{depth} x {length}':>16}" for depth, length in sizes)
    print(f"seconds, MiB by layers x tokens\n{'':<24}{heads}   length: s  MiB   depth: s  MiB")
    for job in options.jobs or JOBS:
        found = {size: measured(job, *size) for size in sizes}
        cells = "".join(f"{seconds:9.3f} {mib:6.0f}" for seconds, mib in found.values())
        by_length = zip(found[16, 512], found[16, 2048], strict=True)
        by_depth = zip(found[4, 512], found[16, 512], strict=True)
        exponents = [
            math.log(max(more, 1e-9) / max(less, 1e-9), 4)
            for pair in (by_length, by_depth)
            for less, more in pair
        ]
        print(f"{job:<24}{cells}{''.join(f'{one:8.2f}' for one in exponents)}", flush=True)


def measured(job: str, depth: int, length: int) -> tuple[float, float]:
    """Return the seconds and the MiB of one call in a new process."""
    command = [sys.executable, __file__, job, "--cell", str(depth), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, mib = map(float, done.stdout.split()[-2:])
    return seconds, mib


if __name__ == "__main__":
    main()
