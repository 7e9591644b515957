"""Activation patching: how the metric changes when values of one run are put into another."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from hooks.shared import without_gradients
from interp import edits
from interp.edits import Edit
from interp.inputs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.runs import Runs
from interp.runs.sites import Choice, Sites, Some


@without_gradients
@of_pairs
def activation_patching(
    model: nn.Module,
    pairs: Pairs,
    site: str = "resid_pre",
    over: Sequence[str] | None = None,
    *,
    direction: PatchingDirection = "denoising",
    edit: Edit | None = None,
    layers: Some = None,
    heads: Some = None,
    neurons: int | None = None,
    max_bytes: int = 2**30,
) -> Result:
    """Patch values of one run into another, one place at a time, and measure the effect on the metric.

    Denoising puts values of the clean run into the corrupted one, and shows what suffices for the answer.
    Noising puts values of the corrupted run into the clean one, and shows what the answer needs (Heimersheim
    & Nanda 2024, "How to use and interpret activation patching").

    Args:
        model: any model with the usual points.
        pairs: clean texts with the right answer, corrupted ones with another, and the metric. With `edit`
            corrupted texts are not needed.
        site: what to patch: any point of the model, such as `embed`, or `resid_pre`, `z` and `mlp.pre` of each layer.
        over: the axes of the result: `layer`, and those of `pos`, `span`, `head`, `neuron`, `query` and
            `key` that the site has. Without `layer` a patch acts in all layers at once. By default `layer`, and
            `head` or else `pos`.
        direction: denoising edits the corrupted run, noising the clean one; not with `edit`.
        edit: an edit of the clean run to make at each place instead, such as `edits.mean(cache)`.
        layers, heads: only this one or these; all by default. `heads` needs `head` in `over`.
        neurons: how many neighbouring neurons are one place; 1 by default. It needs `neuron` in `over`.
        max_bytes: see `sweep`.

    Returns:
        Effects [*over, example]. `base` is the metric of the edited run, `target` that of the other.

    Raises:
        ValueError: if texts, choices or the metric do not fit.
        UnknownNameError: if there is no such site, or the model lacks it; with close matches.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> activation_patching(model, pairs, "z", layers=0).top(1)
    layer 0, head 1  +1.134
    """
    if edit is not None and not isinstance(edit, Edit):
        raise TypeError(
            f"edit must be made by one of interp.edits, such as edits.zero(); got {edit!r} "
            "(sweep takes functions)"
        )
    if edit is not None and direction != "denoising":
        raise ValueError(f"an edit changes the clean run; got direction={direction!r} beside it")
    runs = Runs(model, pairs, direction if edit is None else None, max_bytes)
    sites = Sites(runs, Choice(site, over, layers, heads, neurons))
    put = partial(edits.replace, sites.values) if edit is None else edit.at
    about: dict[str, Any] = {} if edit is None else {"edit": repr(edit)}
    return sites.result(*runs.edited(sites.edits(put), stacklevel=5), **about)
