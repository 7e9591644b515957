"""The top k of a singular value decomposition against all of it: `python tests/bench/svd.py`.

Matrices are noise, on which the randomised method has the most to do; they are decomposed in float64, one
at a time and sixteen together. Prints how many times as fast it is, by size: above 1 it wins. Run it on an
otherwise idle machine.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

# Run as a script, Python puts this folder on the path, and not the project.
sys.path.insert(0, str(Path(__file__).parents[2]))

from interp.spectral import randomized_svd, svd
from tests.bench import timing

SIZES, BATCHES = (32, 64, 128, 256, 512), (1, 16)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for each number")
    options = parser.parse_args()
    print(f"k = {options.k}, {torch.get_num_threads()} threads")
    for batch in BATCHES:
        for size in SIZES:
            noise = torch.randn(batch, size, size, generator=torch.Generator().manual_seed(0))
            found = timing.ratios(
                {"top": partial(randomized_svd, noise, options.k), "all": partial(svd, noise)},
                base="top",
                budget=options.budget,
            )
            times = ", ".join(f"{name} {1e3 * found[name][0]:.2f} ms" for name in found)
            print(f"{batch:3} of {size:3} x {size:3}: {times}, {found['all'][1]:.2f} times as fast")


if __name__ == "__main__":
    main()
