"""A picture of the steps of a text: the text with coloured steps, and the matrix of effects."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from interp.plots.parts import axis_part, grid_part, headline, thinned
from interp.plots.view import View, limit_of

# The largest number of steps that a browser draws without a pause.
_MOST_STEPS = 400


def steps(words: Sequence[str], result: Any) -> View:
    """Draw a text, and colour each step by an effect.

    For a result with the axes `step` and `later`, each step is first coloured by its effect on the
    last step. After a click on a step, the later steps have the colours of its effects on them, and
    a second click on the step shows the first colours again. The matrix of all effects is below.
    Other results have one axis `step`. Steps without an effect are not coloured.

    Args:
        words: the text of each step, `Steps.words`.
        result: the result of `suppressed`, or an importance of `resampled`.

    Returns:
        The page, for `.save()`, `.show()` and notebooks. Colours are in the unit of the result.
        `.figure` is the plot of the effects.

    Raises:
        ValueError: if the result has other axes, or other steps than the text.

    >>> from interp import Steps, suppressed
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> read = Steps(model, "Open the file. Read it.", " Return it.")
    >>> steps(read.words, suppressed(model, read))
    View of effects (kind: suppressed, attention: all heads of all layers): .save("x.html") writes \
it, .show() opens it
    """
    axes = tuple(result.axes[:-1])
    if axes not in (("step",), ("step", "later")):
        raise ValueError(f"the result must have the axes step, or step and later; got {axes}")
    labels = [*result.labels["step"]]
    is_matrix = len(axes) == 2
    fits = set(labels) <= {*range(len(words))} and (not is_matrix or len(labels) == len(words))
    if not fits:
        raise ValueError(
            f"the result must be of the {len(words)} steps of the text; got {len(labels)} steps"
        )
    means = result.mean().detach().cpu()
    first = max(0, len(words) - _MOST_STEPS)
    values = torch.full((len(words), len(words)), torch.nan, dtype=means.dtype)
    at_first = torch.full((len(words),), torch.nan, dtype=means.dtype)
    if is_matrix:
        values = means
        at_first[:-1] = means[:-1, -1]
    else:
        at_first[labels] = means
    part = {
        "kind": "steps",
        "title": headline(result),
        "says": _says(is_matrix),
        "words": [*words[first:]],
        "first": first,
        "start": at_first[first:],
        "values": _later(values)[first:, first:] if is_matrix else None,
        "unit": result.unit,
        "limit": limit_of(at_first),
        "signed": bool((means < 0).any()),
        "note": thinned(len(words), len(words) - first, "steps"),
    }
    parts = [part]
    if is_matrix:
        rows, columns = (
            axis_part(axis, result.labels[axis], words=words, most=_MOST_STEPS) for axis in axes
        )
        title = "effect of each step (row) on each later step (column)"
        table = means[None, first:, first:]
        parts.append(grid_part(title, table, rows=rows, columns=columns, unit=result.unit))
    return View(headline(result), parts, result.plot)


def _says(is_matrix: bool) -> str:
    """Return the sentence above the text of a picture, which explains the colours.

    Args:
        is_matrix: whether the result has an effect of each step on each later step.
    """
    if not is_matrix:
        return "Each step has the colour of its effect."
    return (
        "Each step has the colour of its effect on the last step. Click a step to see its effects "
        "on later steps."
    )


def _later(values: Float[Tensor, "step later"]) -> Float[Tensor, "step later"]:
    """Return effects with NaN at steps that are not later, which are not coloured."""
    is_later = torch.ones_like(values, dtype=torch.bool).triu(1)
    return values.where(is_later, torch.nan)
