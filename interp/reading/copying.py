"""Scores of heads from weights: whether they copy tokens, and whether they attend by position."""

import torch
from einops import rearrange
from torch import Tensor, nn

from hooks import Point
from hooks.shared import require_whole, to_device, without_gradients
from interp.numbers.precision import at_least_float32
from interp.protocol import runner_of
from interp.reading.folded import FoldedWeights
from interp.results.result import Result
from interp.spectral.factored import FactoredMatrix


@without_gradients
def copying_scores(model: nn.Module, fold: bool = True) -> Result:
    """Scores of how far each head raises the logits of the tokens that it attends to: -1 to 1, by weights.

    The sum of the real parts of the eigenvalues of the full OV circuit, over the sum of their sizes
    (Elhage et al. 2021): 1 if all are positive, as in a head that copies; see `full_circuits`. No matrix of
    vocab times vocab numbers is formed.

    Args:
        model: see `LanguageModel`.
        fold: see `ov_circuit`.

    Returns:
        Scores [layer, head, example], with one example. NaN for a head that writes nothing.

    Raises:
        TypeError, ValueError: as for `ov_circuit`; or if the embedding and the unembedding have
            different numbers of tokens: such a circuit has no eigenvalues.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> copying_scores(model).top(1)
    layer 1, head 1  -0.8607
    """
    folded = FoldedWeights(model, fold, "W_E", "W_V", "W_O", "W_U")
    embedding, unembedding = folded.embedding(), folded.unembedding()
    if len(embedding) != unembedding.shape[1]:
        raise ValueError(
            "the vocabularies of input and output must be the same for a copying score; got "
            f"{len(embedding)} and {unembedding.shape[1]} tokens"
        )
    # The eigenvalues of E V O U are those of V O (U E), apart from zeros.
    written = folded.written() @ (unembedding @ embedding)
    eigenvalues = FactoredMatrix(folded.values(), written).eigenvalues()
    scores = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
    return Result(scores[..., None], ("layer", "head", "example"), about={"fold": fold})


@without_gradients
def positional_scores(model: nn.Module, back: int = 1, n_pos: int = 64) -> Result:
    """Attention, 0 to 1, to the position `back` before the query, from positions alone, without a text.

    It runs the model once. All tokens have the mean embedding, and every block reads what the first one
    reads, so that heads differ only in how they attend by position: through learned, sinusoidal or rotary
    positions, masks and windows. Attention that takes no notice of positions has the mean of
    1 / (query + 1). `back=0` is attention to the query's own position.

    Args:
        model: a model with `W_E` and the hook points `embed`, `resid_pre` and `pattern`.
        back: how many positions.
        n_pos: how many positions there are, at most n_ctx; the mean is over the n_pos - back queries
            that have such a key.

    Returns:
        Scores [layer, head, example], with one example.

    Raises:
        TypeError: if the model lacks `W_E`, `blocks` or `config`.
        ModeError: if the model is in training mode.
        UnknownNameError: if it lacks such a hook point.
        ValueError: if back is not 0 to n_pos - 1, or the model has fewer positions.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> positional_scores(model).top(1)
    layer 0, head 3  +0.4135
    """
    require_whole("back", back, 0, n_pos - 1)
    runner, mean = runner_of(model), FoldedWeights(model, False, "W_E").embedding().mean(0)
    first: list[Tensor] = []

    def mean_embedding(embed: Tensor, point: Point) -> Tensor:
        return mean.to(embed).expand_as(embed)

    def of_the_first(stream: Tensor, point: Point) -> Tensor:
        if not first:
            first.append(stream)
        return to_device(first[0], stream.device)

    edits = {"embed": mean_embedding, "blocks.*.resid_pre": of_the_first}
    tokens = torch.zeros(1, n_pos, dtype=torch.long)
    with runner.hooks(edits):
        _, cache = runner.run_with_cache(tokens, names="blocks.*.attn.pattern")
    attention = at_least_float32(cache.stack("pattern").diagonal(-back, dim1=-2, dim2=-1))
    return Result(
        rearrange(attention.mean(-1), "layer example head -> layer head example"),
        ("layer", "head", "example"),
        about={"back": back},
    )
