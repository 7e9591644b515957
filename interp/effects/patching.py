"""Activation patching and sweeps: effects of replaced or edited values, each as in its own run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtyping import Shaped
from torch import Tensor, nn

from hooks import Hooks
from hooks.base import Texts, shown, shows_progress, without_gradients
from interp import edits
from interp.edits import Edit
from interp.measuring import Metric
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.runs import Runs
from interp.runs.sites import Choice, Sites, Some


@shows_progress
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
    progress: bool = True,
) -> Result:
    """Patch values of one run into another, one place at a time, and measure the effect.

    Denoising puts values of the clean run into the corrupted one, and shows what suffices for the
    answer. Noising puts values of the corrupted run into the clean one, and shows what the answer
    needs (Heimersheim & Nanda 2024, "How to use and interpret activation patching").

    Args:
        model: any model with the usual points.
        pairs: clean texts with the right answer, corrupted ones with another, and the metric. With
            `edit` corrupted texts are not needed.
        site: what to patch: any point of the model, such as `embed`, or `resid_pre`, `z` and
            `mlp.pre` of each layer.
        over: the axes of the result: `layer`, and those of `pos`, `span`, `head`, `neuron`, `query`
            and `key` that the site has. By default `layer`, and `head` or else `pos`. Without
            `layer`, each patch changes all layers at once: `over="head"` patches head 3 of every
            layer together, and the result prints "head 3 of all 4 layers". Most people mean
            `over=["layer", "head"]`.
        direction: denoising edits the corrupted run, noising the clean one; not with `edit`.
        edit: an edit of the clean run to make at each place instead, such as `edits.mean(cache)`.
        layers, heads: only this one or these; all by default. `heads` needs `head` in `over`.
        neurons: how many neighbouring neurons are one place; 1 by default. It needs `neuron` in
            `over`.
        max_bytes: see `sweep`.
        progress: whether to show a bar after two seconds.

    Returns:
        Effects [*over, example]. `base` is the metric of the edited run, `target` that of the
        other.

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
            f"edit must be made by one of interp.edits, such as edits.zero(); got {shown(edit)} "
            "(sweep takes functions)"
        )
    if edit is not None and direction != "denoising":
        raise ValueError(f"an edit changes the clean run; got direction={direction!r} beside it")
    choice = Choice(site=site, over=over, layers=layers, heads=heads, neurons=neurons)
    runs = Runs(model, pairs, direction if edit is None else None, max_bytes)
    sites = Sites(runs, choice)
    put = partial(edits.replace, sites.values) if edit is None else edit.at
    about: dict[str, Any] = {} if edit is None else {"edit": repr(edit)}
    return sites.result(*runs.edited(sites.edits(put)), **about)


@shows_progress
@without_gradients
def sweep(
    model: nn.Module,
    texts: Texts | Pairs,
    edits: Sequence[Hooks],
    metric: Metric | None = None,
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Result:
    """Measure the effect of each edit on the metric, each as if it had a run of its own.

    A run is resumed where it begins to differ from the unedited one: at the first block and the
    first position that its edits touch. Earlier keys and values are those of the unedited run, and
    logits are computed only at the positions that the metric reads. Runs that are resumed share
    forward passes as further rows of the batch. Effects equal those of separate runs up to
    rounding, 1e-5 of the largest value in float32.

    Functions of your own are called with the rows of one batch, in any order of the runs. They may
    depend on any position, so their runs begin at the first one. In a model without the steps
    `input_resid`, `blocks` and `unembed`, edited runs share whole forward passes. Where hooks act
    on the model already, each edited run has a forward pass of its own.

    Args:
        model: the model, in evaluation mode.
        texts: the texts, or a mapping of all arguments of a run, as a processor gives; or pairs, of
            which the clean texts are run.
        edits: for each run what `run_with_hooks` takes as `hooks`.
        metric: a function from logits to a number per example; see `interp.metrics`. By default
            that of the pairs.
        attention_mask: which tokens of a tensor [batch, pos] are not padding.
        max_bytes: bounds the memory that the sweep takes beyond the model and one unedited run.
            What functions of your own take is not counted.
        progress: whether to show a bar after two seconds.

    Returns:
        Effects [edit, example], metric(edited) - metric(unedited), in the metric's unit. They print
        what was edited.

    Warns:
        UserWarning: if effects are NaN, because the metric of an edited run is, or two infinities
            cancel.

    Raises:
        ValueError: if there are no edits, `max_bytes` is too small for one edited run, or the
            metric of the unedited run is not one number per example.
        EditError: if an edit does not fit.
        ModeError: if the model is in training mode.
        NeverFiredError: if a run did not reach an edited point.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> from interp import edits
    >>> without_mlps = [{f"blocks.{n}.mlp_out": edits.zero()} for n in (0, 3)]
    >>> sweep(model, pairs, without_mlps).top(2)
    edit 0 'blocks.0.mlp_out: edits.zero()'  -9.01
    edit 1 'blocks.3.mlp_out: edits.zero()'  -1.602
    """
    if not isinstance(texts, Pairs):
        texts = Pairs(texts, attention_mask=attention_mask)
    elif attention_mask is not None:
        raise ValueError("pairs have their own mask; got another")
    _check_edits(edits)
    runs = Runs(model, texts if metric is None else texts.measured_by(metric), None, max_bytes)
    base, effects = runs.edited(edits)
    result = runs.result(effects, {"edit": range(len(edits))}, base)
    return replace(result, words={"edit": [*map(_described, edits)]})


def _described(edit: Hooks) -> str:
    """An entry of a sweep in a few words."""
    pairs = edit.items() if isinstance(edit, Mapping) else edit
    named = ([getattr(part, "__name__", part) for part in pair] for pair in pairs)
    text = ", ".join(f"{point}: {change}" for point, change in named)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_edits(entries: Sequence[Hooks]) -> None:
    if isinstance(entries, Mapping):
        raise TypeError(
            "edits must be a list, with an entry for each run; got one mapping: [edits]"
        )
    if callable(entries) or not isinstance(entries, Sequence):
        rule = "edits must be a list, with an entry for each run, as [{'blocks.0.attn.z': edits.zero()}]"
        raise TypeError(f"{rule}; got {shown(entries)}")
    for entry in entries:
        if callable(entry):
            raise TypeError(
                f"an entry of edits must say where, as {{'blocks.*.attn.z': {entry!r}}}; got {entry!r}"
            )
    if not entries:
        raise ValueError("a sweep needs at least one edit; got none")
