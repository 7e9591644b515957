"""Controls for dictionaries: whether another seed finds the same features, and what activates them beside neurons."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import Index, Texts, require_integer, shows_progress, to_device, without_gradients
from interp.features.dictionary import Dictionary
from interp.inputs.copies import unseen
from interp.inputs.texts import batches
from interp.numbers.ranks import largest_rows
from interp.protocol import runner_of


def stability(one: Dictionary, other: Dictionary) -> Float[Tensor, " feature"]:
    """Return, for each feature of `one`, the largest cosine of its decoder row with a row of `other`.

    For two seeds of the same training: 1 if the other found the same feature. Compare the mean with that of random
    directions of this number and size, `stability(one, random)`.

    Raises:
        ValueError: if they write vectors of different sizes.

    >>> eye, zero = torch.eye(2), torch.zeros(2)
    >>> turned = Dictionary(eye, torch.tensor([[1.0, 1.0], [0.0, 2.0]]), zero, zero, nn.ReLU())
    >>> stability(Dictionary(eye, eye, zero, zero, nn.ReLU()), turned)
    tensor([0.7071, 1.0000])
    """
    if one.d_out != other.d_out:
        raise ValueError(f"both must write vectors of one size; got {one.d_out} and {other.d_out}")
    rows, others = (nn.functional.normalize(d.W_dec.float(), dim=1) for d in (one, other))
    return (rows @ others.mT).amax(1)


@shows_progress
@without_gradients
def purity(
    model: nn.Module,
    texts: Texts,
    point: str,
    *,
    k: int = 20,
    pos: Index | None = None,
    batch: int = 16,
    progress: bool = True,
) -> Float[Tensor, " unit"]:
    """Return, for each unit of a point, how uniform the tokens are where it is largest.

    It is the share of the most common token among the `k` positions with the largest values. Units are features, inside
    `splice`, or neurons, so that both can be compared. Copies of a text count once, because they would
    have the same tokens.

    Args:
        model: any model in evaluation mode.
        texts: the texts.
        point: a point with the axes batch, pos and one more, such as `blocks.1.resid_post.features` or `blocks.1.mlp.post`.
        k: how many positions count.
        pos: the positions of each text that are read; None for all.
        batch: how many texts are read together.
        progress: whether to show a bar after two seconds.

    Returns:
        Shares between 0 and 1; NaN for units that are positive at fewer than `k` positions.

    Raises:
        UnknownNameError: if there is no such point.
        ValueError: if it has other axes, `k` is below 1, or there is no text.

    >>> from models import load
    >>> purity(load("pydoc-4l"), ["aaab", "bbba"], "blocks.0.mlp.post", k=2).shape
    torch.Size([512])
    """
    require_integer("k", k)
    runner = runner_of(model)
    values, tokens, seen = torch.empty(0), torch.empty(0), set[str]()
    for _, text in batches(texts, model, batch):
        value = runner.capture(text.tokens, names=point, **text.arguments(model))[point]
        if value.ndim != 3:
            raise ValueError(
                f"the point must have the axes batch, pos and one more; got {[*value.shape]} at {point}"
            )
        kept = to_device(text.at(pos) & unseen(text, seen)[:, None], value.device)
        rows = value[kept]
        here = to_device(text.tokens, value.device)[kept][:, None].expand_as(rows)
        # The best so far, and those of this batch.
        rows, here = torch.cat([values.to(rows), rows]), torch.cat([tokens.to(here), here])
        best = largest_rows(rows, k)
        values, tokens = rows.gather(0, best), here.gather(0, best)
    share = (tokens == tokens.mode(0).values).float().mean(0)
    is_known = (values > 0).all(0) & (len(values) == k)
    return share.where(is_known, torch.nan)
