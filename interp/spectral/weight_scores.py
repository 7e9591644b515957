"""Scores of heads from weights: composition, copying of tokens, attention by position."""

from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks import Point
from hooks.base import (
    Text,
    at_least_float32,
    require_choice,
    require_integer,
    seeded,
    to_device,
    without_gradients,
)
from interp.protocol import runner_of
from interp.results.result import Result
from interp.spectral.factored import FactoredMatrix
from interp.spectral.folded import FoldedWeights


@without_gradients
def composition_scores(
    model: nn.Module,
    kind: Literal["Q", "K", "V"],
    fold: bool = True,
    distance: int | None = None,
    draws: int = 100,
    seed: int = 0,
) -> Result:
    """Return the composition score of every head with every head of a later layer, 0 to 1.

    The method is from Elhage et al. 2021. A score is the Frobenius norm of a product over the
    product of the norms: |A B| / (|A| |B|). A is the OV circuit of the first head. B is a circuit
    of the later head: the QK circuit for Q, its transpose for K, and the OV circuit for V.

    Random matrices of the same shapes have a score above 0 too. `about["baseline"]` is the mean
    score of random heads with normally distributed weights, and `about["spread"]` is the standard
    deviation.

    Args:
        model: a `models.Transformer`, an attached model, or a model of your own with the
            weights that are used; see `LanguageModel`.
        kind: composition through the later head's queries, keys or values.
        fold: whether norms are folded into the weights; see `ov_circuit`.
        distance: the number of positions from the key to the query. Q and K need a distance if
            positions are rotary.
        draws: the number of random pairs of heads in the baseline.
        seed: the seed of the random heads.

    Returns:
        Scores [layer, head, to_layer, to_head, example], ratios of Frobenius norms, with one
        example. Scores are NaN if
        `to_layer` is not after `layer`.

    Raises:
        TypeError: if a weight or a norm is missing; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`); if
            positions are rotary, and the distance is not from 0 to n_ctx - 1; if kind is not `Q`,
            `K` or `V`; or if there are fewer than 2 draws.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = composition_scores(model, "K", draws=2)
    >>> scores.top(2)
    layer 2, head 3, to_layer 3, to_head 1  +0.1559
    layer 2, head 3, to_layer 3, to_head 3  +0.1374
    >>> round(scores.about["baseline"], 3)  # the mean score of random matrices
    0.092
    """
    require_choice("kind", kind, ("Q", "K", "V"))
    require_integer("draws", draws, 2)
    folded = FoldedWeights(model, fold, "W_Q", "W_K", "W_V", "W_O")
    first = later = FactoredMatrix(folded.values(), folded.written())
    if kind != "V":
        queries, keys = folded.queries_and_keys(distance)
        later = FactoredMatrix(queries, keys.mT)
    sources = _normed_rows(first)
    readers = _normed_rows(later if kind == "K" else later.mT)
    n_layers, n_heads = sources.shape[:2]
    scores = sources.new_full((n_layers, n_heads, n_layers, n_heads, 1), torch.nan)
    for layer in range(n_layers - 1):
        for head in range(n_heads):
            products = sources[layer, head] @ readers[layer + 1 :].mT
            scores[layer, head, layer + 1 :, :, 0] = torch.linalg.matrix_norm(products)
    generator = seeded(seed)
    shapes = (first[0, 0].left.shape, first[0, 0].right.shape)
    left, right = (torch.randn(2, draws, *shape, generator=generator) for shape in shapes)
    first_rows, later_rows = _normed_rows(FactoredMatrix(left, right))
    random = torch.linalg.matrix_norm(first_rows @ later_rows.mT)
    about = {"kind": kind, "fold": fold, "distance": distance, "draws": draws, "seed": seed}
    about |= {"baseline": random.mean().item(), "spread": random.std().item()}
    axes = ("layer", "head", "to_layer", "to_head", "example")
    return Result(scores, axes, unit="ratio of Frobenius norms", about=about)


def _normed_rows(matrix: FactoredMatrix) -> Float[Tensor, "*batch inner columns"]:
    """Return a matrix with few rows in place of each factored matrix, divided by its norm.

    The rows are in an orthonormal basis of the column space. Therefore a product with another
    matrix from the right has the same norm as the product of the whole matrix.
    """
    rows = torch.linalg.qr(matrix.left, mode="r").R @ matrix.right
    return rows / torch.linalg.matrix_norm(rows, keepdim=True)


@without_gradients
def copying_scores(model: nn.Module, fold: bool = True) -> Result:
    """Return the copying score of each head, from -1 to 1, computed from the weights alone.

    A head with a score near 1 raises the logits of the tokens that it attends to: it copies. A head
    with a score near -1 lowers these logits. The score is the sum of the real parts of the
    eigenvalues of the full OV circuit (see `full_circuits`), over the sum of their absolute values
    (Elhage et al. 2021). No matrix of vocab times vocab numbers is formed.

    Args:
        model: a `models.Transformer`, an attached model, or a model of your own with the
            weights that are used; see `LanguageModel`.
        fold: whether norms are folded into the weights; see `ov_circuit`. Default: True.

    Returns:
        A result with the axes `layer`, `head` and `example`, with one example. The unit is a share
        of the eigenvalues with its sign. The score is NaN for a head that writes nothing.

    Raises:
        TypeError: if a weight or a norm is missing; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`); or
            if the embedding and the unembedding have different numbers of tokens, because the
            circuit then has no eigenvalues.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = copying_scores(model)
    >>> scores.places([int(scores.mean().argmax())])  # the head that copies most
    layer 0, head 2  +0.6664
    >>> scores.top(1)  # the largest absolute value: a head that lowers the logits of tokens
    layer 1, head 1  -0.8607
    """
    folded = FoldedWeights(model, fold, "W_E", "W_V", "W_O", "W_U")
    embedding, unembedding = folded.embedding(), folded.unembedding()
    if len(embedding) != unembedding.shape[1]:
        raise ValueError(
            "the vocabularies of input and output must be the same for a copying score; got "
            f"{len(embedding)} and {unembedding.shape[1]} tokens"
        )
    # The circuit is W_E W_V W_O W_U, [vocab, vocab]. Apart from zeros, it has the same eigenvalues
    # as the smaller matrix W_V W_O (W_U W_E).
    written = folded.written() @ (unembedding @ embedding)
    eigenvalues = FactoredMatrix(folded.values(), written).eigenvalues()
    scores = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
    return Result(
        scores[..., None],
        ("layer", "head", "example"),
        unit="signed share of eigenvalues",
        about={"fold": fold},
    )


@without_gradients
def positional_scores(model: nn.Module, back: int = 1, n_pos: int = 64) -> Result:
    """Return each head's mean attention from a query to the key `back` positions before, without a
    text.

    The model runs once. All tokens have the mean embedding, and every block reads the stream that
    the first block reads. Heads then differ only in their attention by position: through learned,
    sinusoidal or rotary positions, masks and windows. The score of a head that ignores positions is
    the mean of 1 / (query + 1) over the counted queries (see `n_pos`). `back=0` is attention to the
    query's own position.

    Args:
        model: a model with `W_E` and the hook points `embed`, `resid_pre` and `pattern`.
        back: the number of positions from the key to the query. Default: 1.
        n_pos: the number of positions in the run, at most n_ctx. The mean is over the n_pos - back
            queries that have a key `back` positions before. Default: 64.

    Returns:
        Scores [layer, head, example], the share of attention from 0 to 1, with one example.

    Raises:
        TypeError: if the model has no `W_E`, `blocks` or `config`.
        ModeError: if the model is in training mode.
        UnknownNameError: if a hook point is missing.
        ValueError: if back is not 0 to n_pos - 1, or the model has fewer positions.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> positional_scores(model).top(1)
    layer 0, head 3  +0.4135
    """
    require_integer("n_pos", n_pos)
    require_integer("back", back, least=0, most=n_pos - 1)
    runner = runner_of(model)
    mean = FoldedWeights(model, False, "W_E").embedding().mean(0)
    first_stream: list[Tensor] = []

    def mean_embedding(embed: Tensor, point: Point) -> Tensor:
        return mean.to(embed).expand_as(embed)

    def stream_of_first_block(stream: Tensor, point: Point) -> Tensor:
        if not first_stream:
            first_stream.append(stream)
        return to_device(first_stream[0], stream.device)

    edits = {"embed": mean_embedding, "blocks.*.resid_pre": stream_of_first_block}
    tokens = torch.zeros(1, n_pos, dtype=torch.long)
    with runner.hooks(edits):
        arguments = Text(tokens).arguments(model)
        _, cache = runner.run_with_cache(tokens, names="blocks.*.attn.pattern", **arguments)
    attention = at_least_float32(cache.stack("pattern").diagonal(-back, dim1=-2, dim2=-1))
    return Result(
        rearrange(attention.mean(-1), "layer example head -> layer head example"),
        ("layer", "head", "example"),
        unit="share of attention",
        about={"back": back},
    )
