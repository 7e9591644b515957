"""The worked numbers of tiny-transformer-handout.md, section 4.3: QK^T, S, A and Y.

They are computed with the formulas of section 4.2, without a mask and with a causal mask, and
compared with `models.scaled_dot_product_attention`. In a model, S is the hook point `scores`
(before the mask), A is `pattern`, and Y is `z`. A causal mask leaves the last row unchanged, not
the first as the handout says.

With --out it also draws the handout's figures: 1 (attention.png), 2 (cost.png), 4 (positions.png)
and 6 (temperature.png). `tiny_lm.py` draws figures 3 and 5, from a trained model. The script takes
some seconds.

    python examples/studies/handout.py --out out
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# For `commands`, which all examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from commands import attempt, figures_parser, require_matplotlib
from torch import Tensor

from models import causal_mask, scaled_dot_product_attention
from models.positions import Sinusoidal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
K = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
V = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
MASKS = {"no mask": torch.ones(3, 3, dtype=torch.bool), "causal mask": causal_mask(3)}


def worked(mask: Tensor) -> dict[str, Tensor]:
    """Return QK^T, the masked scores S, the weights A and the outputs Y, by their names."""
    products = Q @ K.T
    scores = (products / math.sqrt(K.shape[1])).where(mask, -torch.inf)
    weights = scores.softmax(-1)
    return {"QK^T": products, "S": scores, "A": weights, "Y": weights @ V}


def draw(found: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """Draw a row for each mask, and a heat map for each matrix. A matrix has one scale in all rows.

    Args:
        found: the matrices by their symbol, for each mask.
        path: the file of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), layout="constrained")
    grid = figure.subplots(len(found), 4)
    for row, (mask, matrices) in zip(grid, found.items(), strict=True):
        row[0].set_ylabel(f"{mask}\nquery")
        for axes, (symbol, matrix) in zip(row, matrices.items(), strict=True):
            largest = max(float(each[symbol].max()) for each in found.values())
            # Leave out the darkest colours, because they would hide the numbers.
            axes.imshow(matrix.numpy(), cmap="Blues", vmin=0, vmax=1.5 * largest)
            axes.set(title=f"${symbol}$", xlabel="dimension" if symbol == "Y" else "key")
            axes.set(xticks=range(matrix.shape[1]), yticks=range(matrix.shape[0]))
            for (query, column), value in np.ndenumerate(matrix.numpy()):
                axes.text(column, query, f"{value:.3f}", ha="center", va="center")
    figure.savefig(path, dpi=120)


def cost(axes: "Axes") -> None:
    """Draw figure 2: multiplications of one layer of width d, by the formulas of section 5.2."""
    length, width = np.arange(16, 2049), 256
    axes.plot(length, length * width**2, label="RNN: $T d^2$")
    axes.plot(length, length**2 * width, label="self-attention: $T^2 d$")
    axes.axvline(width, color="grey", linewidth=0.8, linestyle=":")
    axes.text(width * 1.05, length[0] ** 2 * width, "T = d", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="sequence length T", ylabel="multiplications")
    axes.set_title(f"Cost of one layer, d = {width}: attention's slope is twice an RNN's")
    axes.legend()


def positions(axes: "Axes") -> None:
    """Draw figure 4: entries of the sinusoidal encodings over positions.

    Entries with a smaller index i change faster from position to position.
    """
    waves = Sinusoidal(64)(torch.arange(64)[None])[0]
    for entry in (0, 8, 16, 24):
        length = 2 * math.pi * 10_000 ** (entry / 64)
        axes.plot(
            waves[:, entry].numpy(), label=f"i = {entry // 2}: {length:,.0f} positions a wave"
        )
    axes.set(xlabel="position", ylabel="$PE_{(pos, 2i)}$", title="Sinusoidal encodings, width 64")
    axes.set_ylim(-1.1, 1.8)
    axes.legend(loc="upper center", ncols=2)


def temperature(axes: "Axes") -> None:
    """Draw figure 6: the probability of the first of two classes at some temperatures."""
    gap = torch.linspace(-6, 6, 121)
    for value in (0.5, 1.0, 2.0):
        share = torch.stack([gap, torch.zeros(121)]).div(value).softmax(0)[0]
        axes.plot(gap.numpy(), share.numpy(), label=f"$\\tau$ = {value:g}")
    axes.set(xlabel="logit of class 1 minus logit of class 2", ylabel="probability of class 1")
    axes.set(title="Softmax of two classes: a low temperature decides", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()


def run(out: Path | None) -> None:
    """Print the matrices. If `out` is given, draw the figures there."""
    if out:
        require_matplotlib(out)
    found = {name: worked(mask) for name, mask in MASKS.items()}
    for name, matrices in found.items():
        print(f"--- {name} ---")
        for symbol, matrix in matrices.items():
            print(symbol, *(" ".join(f"{x:8.4f}" for x in row) for row in matrix), sep="\n")
        ours = scaled_dot_product_attention(Q, K, V, MASKS[name])
        torch.testing.assert_close(ours, matrices["Y"])
    if out:
        from matplotlib.figure import Figure

        draw(found, out / "attention.png")
        for one in (cost, positions, temperature):
            figure = Figure(figsize=(7, 4), layout="constrained")
            one(figure.subplots())
            figure.savefig(out / f"{one.__name__}.png", dpi=120)
        print(f"{out} has the handout's figures 1, 2, 4 and 6")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    return attempt(partial(run, figures_parser(__doc__).parse_args(arguments).out))


if __name__ == "__main__":
    sys.exit(main())
