"""Controls for dictionaries: the same features with another seed, and neurons in place of features.

`stability` measures whether another seed finds the same features. `purity` compares how uniform the
tokens are that activate features and neurons.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import (
    Index,
    Texts,
    require_integer,
    shown,
    shows_progress,
    to_device,
    without_gradients,
)
from interp.features.dictionary import Dictionary
from interp.inputs.copies import unseen
from interp.inputs.texts import batches
from interp.kinds import require_made
from interp.numbers.ranks import largest_rows
from interp.protocol import runner_of


def stability(one: Dictionary, other: Dictionary) -> Float[Tensor, " feature"]:
    """Return the cosine of each feature of `one` with the most similar feature of `other`.

    Features are compared by their decoder rows.

    If the dictionaries come from two seeds of the same training, the value is 1 for a feature that
    both seeds found. Compare the mean with `stability(one, random)`, where `random` has the same
    number of random directions of the same size.

    Args:
        one: the dictionary whose features are compared.
        other: the dictionary that is searched for similar features.

    Returns:
        The cosines [feature], from -1 to 1, in the order of the features of `one`.

    Raises:
        ValueError: if the two dictionaries write vectors of different sizes.

    >>> eye, zero = torch.eye(2), torch.zeros(2)
    >>> turned = Dictionary(eye, torch.tensor([[1.0, 1.0], [0.0, 2.0]]), zero, zero, nn.ReLU())
    >>> stability(Dictionary(eye, eye, zero, zero, nn.ReLU()), turned)
    tensor([0.7071, 1.0000])
    """
    require_made("one", one, Dictionary)
    require_made("other", other, Dictionary)
    if one.d_out != other.d_out:
        raise ValueError(
            "both dictionaries must write vectors of the same size; "
            f"got {one.d_out} and {other.d_out}"
        )
    rows, others = (
        nn.functional.normalize(dictionary.W_dec.float(), dim=1) for dictionary in (one, other)
    )
    return (rows @ others.mT).amax(1)


@shows_progress
@without_gradients
def purity(
    model: nn.Module,
    texts: "Texts",
    point: str,
    *,
    k: int = 20,
    pos: "Index | None" = None,
    batch: int = 16,
    progress: bool = True,
) -> Float[Tensor, " unit"]:
    """Return the purity of each unit of a point: the share of its most common token.

    The share is taken among the `k` positions where the unit has the largest values. The units are
    features (inside `splice`) or neurons, so the two can be compared. Copies of a text count once,
    because they have the same tokens.

    Args:
        model: any model in evaluation mode.
        texts: the texts.
        point: a point with the axes batch, pos and one more, such as `blocks.1.resid_post.features`
            or `blocks.1.mlp.post`.
        k: the number of positions that count. Default: 20.
        pos: the positions of each text that are read. Position 0 is the first token that is not
            padding, and negative positions count from the last. Default: all positions.
        batch: the number of texts in a batch. Default: 16.
        progress: whether to show a bar or, outside a terminal, lines of progress. Default: True.

    Returns:
        A share between 0 and 1 for each unit, or NaN if the unit is positive at fewer than `k`
        positions.

    Raises:
        UnknownNameError: if the point does not exist.
        ValueError: if the point has other axes, `k` is below 1, or there is no text.

    >>> from models import load
    >>> purity(load("pydoc-4l"), ["aaab", "bbba"], "blocks.0.mlp.post", k=2)[:6]
    tensor([0.5000, 1.0000, 1.0000, 1.0000,    nan,    nan])
    """
    require_integer("k", k)
    runner = runner_of(model)
    values = torch.empty(0)
    tokens = torch.empty(0)
    digests = set[str]()
    for _, text in batches(texts, model, batch):
        value = runner.capture(text.tokens, names=point, **text.arguments(model))[point]
        if value.ndim != 3:
            raise ValueError(
                f"the point must have the axes batch, pos and one more; got {[*value.shape]} at "
                f"{point}"
            )
        is_read = to_device(text.at(pos) & unseen(text, digests)[:, None], value.device)
        rows = value[is_read]
        read_tokens = to_device(text.tokens, value.device)[is_read][:, None].expand_as(rows)
        # Select the largest values among the largest ones so far and the values of this batch.
        rows = torch.cat([values.to(rows), rows])
        read_tokens = torch.cat([tokens.to(read_tokens), read_tokens])
        best = largest_rows(rows, k)
        values, tokens = rows.gather(0, best), read_tokens.gather(0, best)
    if not len(tokens):
        raise ValueError(f"pos must select a token of at least one text; got {shown(pos)}")
    share = (tokens == tokens.mode(0).values).float().mean(0)
    is_known = (values > 0).all(0) & (len(values) == k)
    return share.where(is_known, torch.nan)
