"""Fit the Jacobian lens: the mean Jacobian from the stream of each layer to the final stream.

1. Run a text, and record the autograd graph from the stream entering the first block to the final
   stream.
2. Sum an entry of the final stream over positions, and take the gradient of the sum with respect to
   each layer's stream. This is a row of the layer's Jacobian. As many rows are computed together as
   the memory allows.
3. Take the mean over the positions of the layer's stream, then over texts (Gurnee et al. 2026).
"""

import functools
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import (
    Text,
    Texts,
    at_least_float32,
    config_hash,
    peak_bytes,
    require_integer,
    require_kind,
    shows_progress,
    stacked,
)
from interp.inputs.copies import digests
from interp.inputs.texts import batches
from interp.reading.affine import for_fit
from interp.reading.jacobian import JacobianLens


@shows_progress
def jacobian_lens(
    model: nn.Module,
    texts: Texts,
    *,
    skip: int = 16,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> JacobianLens:
    """Return the mean Jacobian from the stream that enters each block to the stream after all
    blocks.

    J of a text is the mean over positions t of the sum over positions p >= t of d(final stream at
    p) / d(stream at t). Both t and p run from `skip` to the last position but one. The lens is the
    mean over texts (Gurnee et al. 2026, "Verbalizable Representations Form a Global Workspace in
    Language Models"). After the last layer J is the identity, so the lens has no matrix there.

    The fit runs the model. Each text needs one forward pass, and one backward pass for each of the
    d_model entries. As many backward passes run together, by vmap, as the memory allows.

    Args:
        model: a model in evaluation mode with `resid_pre` and `resid_post` in each block. Its
            weights need no gradients, and receive none.
        texts: strings or tokens, which are read once, one at a time. About a hundred texts of 128
            tokens each are enough for a usable lens.
        skip: the number of first positions that are left out, because heads attend to them when no
            other key matters. Default: 16.
        max_bytes: the most memory beyond the model and the lens, in bytes. Default: 2**30.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The lens, with a Jacobian [d_model, d_model] for each block.

    Raises:
        ValueError: if there are no texts, a text has fewer than `skip` + 2 tokens, `skip` is
            negative, `max_bytes` is too small for one backward pass, or PyTorch's inference mode is
            on.
        UnknownNameError: if the model has no such points.
        ModeError: if the model is in training mode.

    >>> from models import Transformer, TransformerConfig
    >>> _ = torch.manual_seed(0)
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> model = Transformer(config).eval()
    >>> jacobian_lens(model, [[3, 1, 4, 1], [5, 2, 6]], skip=0)
    JacobianLens [layer 2, d_model 4], mean of 2 texts, standard error 0.0094 to 0.015 of a matrix
    """
    require_integer("skip", skip, 0)
    require_kind("max_bytes", max_bytes, (int, float), "a number of bytes")
    runner, names = for_fit(model)
    total = torch.zeros(())
    squares = torch.zeros(())
    times = Counter[str]()
    for number, text in batches(texts, model, 1):
        if text.tokens.shape[1] < skip + 2:
            raise ValueError(
                f"a text must have at least {skip + 2} tokens, for skip={skip}; "
                f"got {text.tokens.shape[1]} in text {number}"
            )
        jacobians = _jacobians(runner, names, tokens=text.tokens, skip=skip, max_bytes=max_bytes)
        squares = squares + jacobians.flatten(1).norm(dim=1) ** 2
        # Add in place: the memory may not be enough for a third tensor of all Jacobians.
        total = jacobians.add_(total)
        times.update(digests(text))
    count = times.total()
    weight = total / count
    return JacobianLens(
        weight=weight,
        bias=torch.zeros_like(weight[..., 0]),
        config_hash=config_hash(model),
        n_texts=count,
        squares=squares / count,
        n_different=count**2 / sum(copies**2 for copies in times.values()),
    )


def _jacobians(
    runner: HookedRunner,
    names: Sequence[str],
    tokens: Int[Tensor, "1 pos"],
    skip: int,
    max_bytes: int,
) -> Float[Tensor, "layer d_model d_model"]:
    """Return the Jacobians of one text."""
    (*streams, final), forward = peak_bytes(lambda: _streams_of_run(runner, names, tokens))
    size = final.shape[-1]
    jacobians = at_least_float32(final.new_zeros(len(streams), size, size))
    first_row = 0
    at_once = 1
    while first_row < size:
        rows = range(first_row, min(first_row + at_once, size))
        compute = functools.partial(_jacobian_rows, streams, final, rows=rows, skip=skip)
        values, backward = peak_bytes(compute)
        jacobians[:, rows] = values.to(jacobians)
        # The first row is computed alone, to measure the memory that a row needs.
        if first_row == 0:
            if (least := forward + backward) > max_bytes:
                raise ValueError(
                    f"max_bytes must be at least {least:,} for a text of {tokens.shape[1]} tokens; "
                    f"got {max_bytes:,}"
                )
            at_once = (max_bytes - forward) // backward
        first_row = rows.stop
    return jacobians


def _jacobian_rows(
    streams: Sequence[Float[Tensor, "1 pos d_model"]],
    final: Float[Tensor, "1 pos d_model"],
    rows: range,
    skip: int,
) -> Float[Tensor, "layer row d_model"]:
    """Return some rows of the Jacobians of one text."""
    directions = final.new_zeros(len(rows), *final.shape)
    directions[range(len(rows)), :, skip:-1, rows] = 1
    gradients = torch.autograd.grad(
        final, streams, directions, retain_graph=True, is_grads_batched=True
    )
    return stacked(at_least_float32(gradient[:, 0, skip:-1]).mean(1) for gradient in gradients)


def _streams_of_run(
    runner: HookedRunner, names: Sequence[str], tokens: Int[Tensor, "1 pos"]
) -> list[Tensor]:
    """Return the stream entering each block and the final stream, in one autograd graph."""

    def leaf(value: Tensor, point: object) -> Tensor:
        return value.detach().requires_grad_()

    with torch.enable_grad(), runner.hooks({names[0]: leaf}):
        arguments = Text(tokens).arguments(runner.model)
        cache = runner.capture(tokens, names=names, detach=False, **arguments)
    return [cache[name] for name in names]
