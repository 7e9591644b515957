"""Activation patching: how the metric changes when values of one run are put into another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from hooks import ActivationCache
from hooks.shared import without_gradients
from interp import edits
from interp.edits import Edit
from interp.inputs.pairs import Pairs, PatchingDirection, of_pairs, pairs_for
from interp.inputs.texts import Text
from interp.measuring import Metric
from interp.protocol import is_of_text, runner_of
from interp.results.result import Result
from interp.runs.sites import (
    Choice,
    PatchPlace,
    Some,
    entries,
    labels_of,
    named,
    places_of,
    two_runs,
    worded,
)
from interp.runs.sweep import sweep_text


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
    runner, choice = runner_of(model), Choice(site, over, layers, heads, neurons)
    names = named(runner, choice)
    if edit is not None:
        if not isinstance(edit, Edit):
            raise TypeError(
                f"edit must be made by one of interp.edits, such as edits.zero(); got {edit!r} "
                "(sweep takes functions)"
            )
        if direction != "denoising":
            raise ValueError(
                f"an edit changes the clean run; got direction={direction!r} beside it"
            )
        pairs = pairs_for(model, pairs)
        text = pairs.text
        first = runner.capture(
            text.tokens, names=next(iter(names.values())), **text.arguments(model)
        )
        places = places_of(runner, choice, names, first, text)
        effects = _swept(model, [text], edit.at, names, places, pairs.metric, max_bytes)
        return replace(effects, about={**effects.about, "site": site, "edit": repr(edit)})
    runs = two_runs(runner, pairs, direction, names.values())
    effects = patched(model, runs.edited, runs.source, runs.cache, runs.metric, choice, max_bytes)
    return replace(effects, target=runs.target, about={**effects.about, **runs.about})


def patched(
    model: nn.Module,
    edited: Text,
    source: Text,
    cache: ActivationCache,
    metric: Metric,
    choice: Choice,
    max_bytes: int = 2**30,
) -> Result:
    """The effect of each value of one run, in a cache, on another run; see `activation_patching`.

    Args:
        model: the model.
        edited, source: the texts of the two runs.
        cache: the chosen points of the source's run.
        metric: a function from logits to a number per example.
        choice: the places.
        max_bytes: see `sweep`.
    """
    runner = runner_of(model)
    names = named(runner, choice)
    places = places_of(runner, choice, names, cache, edited, source)
    put = partial(edits.replace, cache)
    effects = _swept(model, [edited, source], put, names, places, metric, max_bytes)
    return replace(effects, about={**effects.about, "site": choice.site})


def _swept(
    model: nn.Module,
    texts: Sequence[Text],
    put: Callable[..., Edit],
    names: Mapping[int, str],
    places: Mapping[str, list[PatchPlace]],
    metric: Metric,
    max_bytes: int,
) -> Result:
    """The effects of what `put` makes at each place of the first text; words are of all texts."""
    swept = sweep_text(model, texts[0], entries(names, places, put), metric, max_bytes)
    labels = labels_of(places)
    return replace(
        swept,
        values=swept.values.view(*map(len, places.values()), -1),
        axes=(*places, "example"),
        labels=labels,
        words=worded(model, labels, *texts) if all(map(is_of_text, names.values())) else {},
    )
