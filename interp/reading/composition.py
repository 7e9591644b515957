"""Composition of heads: how much of what one head writes is in what a later head reads."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.shared import require_choice, require_whole, without_gradients
from interp.reading.folded import FoldedWeights
from interp.results.result import Result
from interp.spectral.factored import FactoredMatrix


@without_gradients
def composition_scores(
    model: nn.Module,
    kind: Literal["Q", "K", "V"],
    fold: bool = True,
    distance: int | None = None,
    draws: int = 100,
    seed: int = 0,
) -> Result:
    """The composition scores of every head with every head of a later layer (Elhage et al. 2021).

    They are the Frobenius norm of a product over the product of the norms: |A B| / (|A| |B|), 0 to 1. A is
    the OV circuit of the first head. B is, of the later head, the QK circuit for Q, its transpose for K
    and the OV circuit for V.

    Random matrices of the same shapes have a score above 0 too: `about["baseline"]` is the mean over
    draws of heads whose weights are normally distributed, and `about["spread"]` their standard deviation.

    Args:
        model: see `LanguageModel`.
        kind: through the later head's queries, keys or values.
        fold, distance: see `qk_circuit`. A distance is needed for Q and K where positions are rotary.
        draws: how many random pairs of heads the baseline has.
        seed: the seed of these draws.

    Returns:
        Scores [layer, head, to_layer, to_head, example], with one example. They are NaN where `to_layer`
        is not later.

    Raises:
        TypeError, ValueError: as for `qk_circuit`; or if kind is none of the three, or there are
            fewer than 2 draws.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> composition_scores(model, "K", draws=2).select(layer=0, to_layer=1).values.shape  # head, to_head, example
    torch.Size([4, 4, 1])
    """
    require_choice("kind", kind, "QKV")
    require_whole("draws", draws, 2)
    folded = FoldedWeights(model, fold, "W_Q", "W_K", "W_V", "W_O")
    first = later = FactoredMatrix(folded.values(), folded.written())
    if kind != "V":
        queries, keys = folded.queries_and_keys(distance)
        later = FactoredMatrix(queries, keys.mT)
    sources, readers = _scores_of_rows(first), _scores_of_rows(later if kind == "K" else later.mT)
    n_layers, n_heads = sources.shape[:2]
    scores = sources.new_full((n_layers, n_heads, n_layers, n_heads, 1), torch.nan)
    for layer in range(n_layers - 1):
        for head in range(n_heads):
            products = sources[layer, head] @ readers[layer + 1 :].mT
            scores[layer, head, layer + 1 :, :, 0] = torch.linalg.matrix_norm(products)
    generator = torch.Generator().manual_seed(seed)
    left, right = first[0, 0].left.shape, first[0, 0].right.shape
    drawn = [torch.randn(2, draws, *shape, generator=generator) for shape in (left, right)]
    one, other = _scores_of_rows(FactoredMatrix(*drawn))
    random = torch.linalg.matrix_norm(one @ other.mT)
    about = {"kind": kind, "fold": fold, "distance": distance, "draws": draws, "seed": seed}
    about |= {"baseline": random.mean().item(), "spread": random.std().item()}
    return Result(scores, ("layer", "head", "to_layer", "to_head", "example"), about=about)


def _scores_of_rows(matrix: FactoredMatrix) -> Float[Tensor, "*batch inner columns"]:
    """Matrices of norm 1 and few rows, by an orthonormal basis of rows: products keep their norms."""
    rows = torch.linalg.qr(matrix.left, mode="r").R @ matrix.right
    return rows / torch.linalg.matrix_norm(rows, keepdim=True)
