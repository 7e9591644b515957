"""Activation patching: how the metric changes when values of one run are put into another."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache
from interp import edits
from interp.edits import Edit
from interp.metrics import Metric, measure
from interp.pairs import Pairs, as_pairs
from interp.protocol import logits_of, runner_of
from interp.results.result import Result
from interp.sites import (
    Choice,
    Direction,
    Place,
    compared,
    entries,
    labels_of,
    metric_of,
    named,
    places_of,
    texts_of,
)
from interp.sweeps.sweep import sweep
from interp.texts import Text


@torch.no_grad()
def activation_patching(
    model: nn.Module,
    clean: Int[Tensor, "batch pos"] | Pairs,
    corrupted: Int[Tensor, "batch pos"] | None = None,
    metric: Metric | None = None,
    site: str = "resid_pre",
    over: Sequence[str] | None = None,
    *,
    direction: Direction = "denoising",
    edit: Edit | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    neurons: int | None = None,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    max_bytes: int = 2**30,
    exact: Literal["resume", "rerun"] = "resume",
) -> Result:
    """The effect on the metric of putting values of one run into another, one place at a time.

    Denoising puts values of the clean run into the corrupted one, and shows what suffices for the answer.
    Noising puts values of the corrupted run into the clean one, and shows what the answer needs (Heimersheim
    & Nanda 2024, "How to use and interpret activation patching").

    Args:
        model: any model with the usual points.
        clean: tokens with the right answer, or pairs of texts.
        corrupted: tokens with another answer; None with pairs or with `edit`.
        metric: a function from logits to a number per example; by default that of the pairs.
        site: what to patch, one of `SITES`.
        over: the axes of the result: `layer`, and those of `pos`, `span`, `head`, `neuron`, `query` and
            `key` that the site has. Without `layer` a patch acts in all layers at once.
        direction: denoising edits the corrupted run, noising the clean one; not with `edit`.
        edit: an edit of the clean run to make at each place instead, such as `edits.mean(cache)`.
        layers, heads: only these; all by default. `heads` needs `head` in `over`.
        neurons: how many neighbouring neurons are one place; 1 by default. It needs `neuron` in `over`.
        attention_mask: which tokens are not padding, in both runs; pairs have their own.
        max_bytes, exact: see `sweep`.

    Returns:
        Effects [*over, example]. `base` is the metric of the edited run, `target` that of the other.

    Raises:
        ValueError: if texts, choices or the metric do not fit.
        UnknownNameError: if there is no such site, or the model lacks it; with close matches.
        ModeError: if the model is in training mode.
    """
    metric = metric_of(clean, metric)
    runner, choice = runner_of(model), Choice(site, over, layers, heads, neurons)
    names = named(runner, choice)
    limits: dict[str, Any] = {"max_bytes": max_bytes, "exact": exact}
    if edit is not None:
        if corrupted is not None or direction != "denoising":
            raise ValueError(
                "an edit changes the clean run alone; got corrupted tokens or a direction"
            )
        if isinstance(clean, Pairs):
            text = texts_of(as_pairs(clean, None, attention_mask))[0]
        else:
            text = Text(clean, attention_mask)
        first = runner.capture(text.tokens, names=next(iter(names.values())), **text.kwargs)
        places = places_of(choice, names, first, text)
        found = _swept(model, text, edit.at, names, places, metric, limits)
        return dataclasses.replace(found, about={**found.about, "site": site, "edit": repr(edit)})
    edited, source = compared(clean, corrupted, direction, attention_mask)
    output, cache = runner.run_with_cache(source.tokens, names=[*names.values()], **source.kwargs)
    target = measure(metric, logits_of(output), source.mask)
    found = patched(model, edited, source, cache, metric, choice, **limits)
    about = {**found.about, "direction": direction}
    return dataclasses.replace(found, target=target, about=about)


def patched(
    model: nn.Module,
    edited: Text,
    source: Text,
    cache: ActivationCache,
    metric: Metric,
    choice: Choice,
    **limits: Any,
) -> Result:
    """The effect of each value of one run, in a cache, on another run; see `activation_patching`.

    Args:
        model: the model.
        edited, source: the texts of the two runs.
        cache: the chosen points of the source's run.
        metric: a function from logits to a number per example.
        choice: the places.
        limits: for `sweep`.
    """
    names = named(runner_of(model), choice)
    places = places_of(choice, names, cache, edited, source)
    put = partial(edits.replace, cache)
    found = _swept(model, edited, put, names, places, metric, limits)
    return dataclasses.replace(found, about={**found.about, "site": choice.site})


def _swept(
    model: nn.Module,
    text: Text,
    put: Callable[..., Edit],
    names: Mapping[int, str],
    places: Mapping[str, list[Place]],
    metric: Metric,
    limits: Mapping[str, Any],
) -> Result:
    given = entries(names, places, put)
    found = sweep(model, text.tokens, given, metric, text.mask, **limits)
    sizes = map(len, places.values())
    return dataclasses.replace(
        found,
        values=found.values.view(*sizes, -1),
        axes=(*places, "example"),
        labels=labels_of(places),
    )
