"""The worked numbers of tiny-transformer-handout.md, section 4.3: QK^T, S, A and Y.

They are computed by the formulas of section 4.2, without a mask and with a causal one, and compared
with `models.scaled_dot_product_attention`. In a model, S is the hook point `scores` (before the mask),
A is `pattern`, and Y is `z`. A causal mask leaves the last row unchanged, not the first as the handout says.

python examples/handout.py --out out
"""

import argparse
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from commands import attempt
from torch import Tensor

from models import causal_mask, scaled_dot_product_attention

Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
K = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
V = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
MASKS = {"no mask": torch.ones(3, 3, dtype=torch.bool), "causal mask": causal_mask(3)}


def worked(mask: Tensor) -> dict[str, Tensor]:
    """QK^T, the masked scores S, the weights A and the outputs Y, by their names."""
    products = Q @ K.T
    scores = (products / math.sqrt(K.shape[1])).where(mask, -torch.inf)
    weights = scores.softmax(-1)
    return {"QK^T": products, "S": scores, "A": weights, "Y": weights @ V}


def draw(found: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """One row for each mask, one heat map for each matrix, with a scale for each symbol."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), layout="constrained")
    grid = figure.subplots(len(found), 4)
    for row, (mask, matrices) in zip(grid, found.items(), strict=True):
        row[0].set_ylabel(f"{mask}\nquery")
        for axes, (symbol, matrix) in zip(row, matrices.items(), strict=True):
            largest = max(float(each[symbol].max()) for each in found.values())
            # The darkest colours would hide the numbers.
            axes.imshow(matrix.numpy(), cmap="Blues", vmin=0, vmax=1.5 * largest)
            axes.set(title=f"${symbol}$", xlabel="dimension" if symbol == "Y" else "key")
            axes.set(xticks=range(matrix.shape[1]), yticks=range(matrix.shape[0]))
            for (query, column), value in np.ndenumerate(matrix.numpy()):
                axes.text(column, query, f"{value:.3f}", ha="center", va="center")
    figure.savefig(path, dpi=120)


def run(out: Path | None) -> None:
    """Prints the matrices and, with `out`, draws them."""
    found = {name: worked(mask) for name, mask in MASKS.items()}
    for name, matrices in found.items():
        print(f"--- {name} ---")
        for symbol, matrix in matrices.items():
            print(symbol, *(" ".join(f"{x:8.4f}" for x in row) for row in matrix), sep="\n")
        ours = scaled_dot_product_attention(Q, K, V, MASKS[name])
        torch.testing.assert_close(ours, matrices["Y"])
    if out:
        out.mkdir(parents=True, exist_ok=True)
        draw(found, out / "attention.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a directory for the figure; without it, none")
    sys.exit(attempt(partial(run, parser.parse_args().out)))
