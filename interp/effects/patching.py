"""Activation patching and sweeps: effects of replaced or edited values, one run for each edit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from hooks import ActivationCache, Hooks, Mode
from hooks.base import (
    Texts,
    are_metric_rounding,
    padding_messages,
    shown,
    shows_progress,
    warn,
    without_gradients,
)
from interp.edits import Edit
from interp.inputs.cached import text_of
from interp.inputs.copies import digests
from interp.measuring import Metric
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.models import Source
from interp.runs.runs import Runs, runs_of
from interp.runs.sites import Choice, Sites, Some
from interp.runs.sweep import effects_of_edits


@shows_progress
@without_gradients
@of_pairs
def activation_patching(
    model: nn.Module,
    pairs: "Pairs | Texts",
    site: str = "resid_pre",
    over: Sequence[str] | None = None,
    *,
    direction: PatchingDirection = "denoising",
    edit: "Edit | None" = None,
    source: Source | None = None,
    layers: Some = None,
    heads: Some = None,
    neurons: int | None = None,
    max_bytes: int | None = None,
    progress: bool = True,
) -> Result:
    """Return the effect of patching values of one run into another, one place at a time.

    Denoising patches clean values into the corrupted run, and finds the values that are sufficient
    for the answer. Noising patches corrupted values into the clean run, and finds the values that
    are necessary for the answer (Heimersheim & Nanda 2024, "How to use and interpret activation
    patching").

    By default, clean values replace values of the corrupted run (`direction="denoising"`), which
    shows the parts that restore the answer. Analyses of nodes, edges, paths and circuits do the
    reverse by default.

    Args:
        model: any model with the usual points.
        pairs: clean texts with the right answer, corrupted texts with another answer, and the
            metric. With `edit`, corrupted texts are not needed.
        site: the point to patch: any point of the model, such as `embed`, or a point that each
            layer has, such as `resid_pre`, `z` or `mlp.pre`.
        over: the axes of the result: `layer`, and any of `pos`, `span`, `head`, `neuron`, `query`
            and `key` that the site has. Default: `layer`, and `head` if the site has heads,
            otherwise `pos`. If the pairs have spans, the default is `layer` and `span`, or `layer`,
            `head` and `span`. Without `layer`, each patch changes all layers at once: `over="head"`
            patches head 3 of every layer together, and the result prints "head 3 of all 4 layers".
            Most people need `over=["layer", "head"]`. Index i of `pos` is column i of the padded
            batch. The effect of a text is 0 where its column is padding, and means over examples
            leave it out; see `exists` of `Result`. For texts of unequal length, `span` compares
            positions with the same meaning. If the clean and the corrupted text of a pair have
            unequal lengths, `span` is needed.
        direction: `denoising` edits the corrupted run, `noising` edits the clean run. It is not
            used with `edit`.
        edit: an edit, such as `edits.mean(cache)`, that is made at each place of the clean run
            instead of patching values of another run. `attribution_patching(..., edit=)` estimates
            these effects from one backward pass. Default: None.
        source: another model with the same points, such as the model before its fine-tuning; or
            `without_adapter(model)`, the same model of peft with its adapter switched off. Its
            values on the clean texts are patched into the run of `model` on these texts. Corrupted
            texts and `direction` are not used. `pairs` may then be texts; without a metric, the
            metric is KL(source || model) in nats, the mean over positions. Default: None.
        layers, heads: the layers or heads to patch, one or several. Default: all. `heads` needs
            `head` in `over`.
        neurons: the number of neighbouring neurons in one place. Default: 1. It needs `neuron` in
            `over`.
        max_bytes: a bound on the memory of the runs in bytes, not counting the model; see `sweep`.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Effects [*over, example], metric(patched) - metric(base), in the metric's unit. `base` is
        the metric of the edited run before the edit, and `target` is the metric of the other run.

    Raises:
        ValueError: if texts, choices or the metric do not fit.
        TypeError: if `edit` was not made by a function of `interp.edits`, or `pairs` are texts
            without a source model.
        UnknownNameError: if the site does not exist or the model lacks it; the error names close
            matches.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> activation_patching(model, pairs, "z", layers=0).top(1)
    layer 0, head 1  +1.134
    """
    choice = Choice(site=site, over=over, layers=layers, heads=heads, neurons=neurons)
    runs = runs_of(model, pairs, direction=direction, source=source, edit=edit)
    sites = Sites(runs, choice, edit)
    base, effects = effects_of_edits(runs, sites.edits(), max_bytes, of_rows=runs.has_source)
    return sites.result(base, effects)


@shows_progress
@without_gradients
def sweep(
    model: nn.Module,
    texts: "Texts | Pairs",
    edits: "Sequence[Hooks] | Mapping[str, Hooks]",
    metric: "Metric | None" = None,
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    direction: PatchingDirection | None = None,
    max_bytes: int | None = None,
    progress: bool = True,
) -> Result:
    """Return the effect of each edit on the metric, as if each edit had a separate run.

    An edited run begins where it first differs from the unedited run: at the first block and the
    first position that the edits of this run change. Earlier keys and values are taken from the
    unedited run, and logits are computed only at the positions that the metric reads. Resumed runs
    share forward passes as additional rows of the batch. The effects equal the effects of separate
    runs up to rounding, 1e-5 of the largest value in float32.

    Functions that you pass as edits are called with the rows of one batch; the order of the runs is
    not defined. A function may read any position, so its run begins at the first position. In a
    model without the steps `input_resid`, `blocks` and `unembed`, edited runs share whole forward
    passes. If hooks are already active on the model, each edited run has a separate forward pass.

    Args:
        model: the model, in evaluation mode.
        texts: the texts, or a mapping of all arguments of a run, as returned by a processor; or
            pairs, whose clean texts are run. To edit the corrupted texts of pairs, pass
            `direction="denoising"`.
        edits: the hooks of each run, in the form of the argument `hooks` of `run_with_hooks`: a
            list, or a mapping from a name of your own to the hooks of each run.
        metric: a function from logits to one number for each example; see `interp.metrics`.
            Default: the metric of the pairs.
        attention_mask: 1 for tokens and 0 for padding, if `texts` is a tensor [batch, pos].
        direction: the texts of the pairs that the edits change, for edits that put in values of the
            other texts: `denoising` runs the corrupted texts, and `noising` runs the clean texts.
            `target` is then the metric of the other texts. Default: the clean texts, without a
            target.
        max_bytes: a bound on the memory of the sweep in bytes, not counting the model, one unedited
            run and the memory of functions that you pass. Default: 1 GiB on the CPU; half of the
            free memory on a GPU, at least 512 MiB and at most 8 GiB.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Effects [edit, example], metric(edited) - metric(unedited), in the metric's unit. The labels
        of `edit` are the names or, for a list, numbers; the printed result then describes each
        edit.

    Warns:
        UserWarning: if effects are NaN, because the metric of an edited run is NaN, or because two
            infinities are subtracted. Also if all effects are about 0, and all edits put values of
            a cache of the edited texts into the run of these texts.

    Raises:
        ValueError: if there are no edits, `max_bytes` is too small for one edited run, or the
            metric of the unedited run is not one number for each example. With `direction`, also if
            there are no corrupted texts.
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

    The hooks of a run may change several points at once, and the runs may have names:

    >>> runs = {"two heads": {f"blocks.{n}.attn.z": edits.zero(head=1) for n in (0, 3)}}
    >>> sweep(model, pairs, runs | {"an MLP": without_mlps[0]}).top(2)
    edit an MLP     -9.01
    edit two heads  -4.805

    Values of another model with the same points are read from a cache of that model:

    >>> import copy
    >>> from interp import run_with_cache
    >>> tuned = copy.deepcopy(model)  # a stand-in for a fine-tuned model
    >>> tuned.blocks[2].mlp.output.weight.data *= 1.3
    >>> _, cache = run_with_cache(model, pairs.clean, names="*.mlp_out")
    >>> undone = [{f"blocks.{n}.mlp_out": edits.replace(cache)} for n in (2, 3)]
    >>> sweep(tuned, pairs, undone).top(2)
    edit 1 'blocks.3.mlp_out: edits.replace(cache)'  +0.3502
    edit 0 'blocks.2.mlp_out: edits.replace(cache)'  +0.2437
    """
    if not isinstance(texts, Pairs):
        texts = Pairs(texts, attention_mask=attention_mask)
    elif attention_mask is not None:
        raise ValueError(padding_messages.second_mask("pairs, which contain their own mask"))
    names: Sequence[str] = ()
    if isinstance(edits, Mapping):
        _check_names(edits)
        names, edits = [*edits], [*edits.values()]
    _check_edits(edits)
    pairs = texts if metric is None else texts.measured_by(metric)
    runs = Runs(model, pairs, direction=direction)
    if direction is not None:
        runs.source([Mode.none])
    base, effects = effects_of_edits(runs, edits, max_bytes)
    _warn_of_own_values(runs, edits, base, effects)
    if names:
        return runs.result(effects, {"edit": names}, base)
    result = runs.result(effects, {"edit": range(len(edits))}, base)
    return replace(result, words={"edit": _descriptions(edits)})


def _warn_of_own_values(
    runs: Runs,
    entries: Sequence[Hooks],
    base: Float[Tensor, " row"],
    effects: Float[Tensor, "edit row"],
) -> None:
    """Warn if all edits put values of the edited texts into the run of the same texts.

    Args:
        runs: the texts.
        entries: the edits.
        base: the metric of the unedited run.
        effects: the effects of the edits.
    """
    caches: dict[int, ActivationCache] = {}
    for entry in entries:
        for _, hook in entry.items() if isinstance(entry, Mapping) else entry:
            if not isinstance(hook, Edit) or hook.name not in ("replace", "interchange"):
                return
            if hook.source is None or not isinstance(hook.source.values, ActivationCache):
                return
            caches[id(hook.source.values)] = hook.source.values
    # Rounding adds up over the layers. In half precision, the limit is large already.
    n_roundings = 1 if effects.dtype in (torch.float16, torch.bfloat16) else 100
    if not are_metric_rounding(effects / n_roundings, base).all():
        return
    texts = digests(runs.edited_prompts)
    for cache in caches.values():
        text = text_of(cache)
        if text is None or digests(text) != texts:
            return
    advice = "take the values from other texts"
    if runs.direction == "denoising":
        advice = 'pass direction="noising" to edit the clean texts'
    elif runs.pairs.other is not None:
        advice = 'pass direction="denoising" to edit the corrupted texts'
    warn(
        "all effects are about 0: all edits put values of the edited texts into a run of the same "
        f"texts; {advice}"
    )


def _descriptions(edits: Sequence[Hooks]) -> list[str]:
    """Return a description of each entry of a sweep.

    A description of more than 70 characters leaves out the arguments of edits and, if this is not
    enough, all changes but the first, unless descriptions would then be equal.
    """
    whole = [", ".join(_described(edit)) for edit in edits]
    shortened = [
        text if len(text) <= _LONGEST else _shortened(edit)
        for text, edit in zip(whole, edits, strict=True)
    ]
    return shortened if len({*shortened}) == len({*whole}) else whole


_LONGEST = 70
"""A description with more characters is long."""


def _shortened(edit: Hooks) -> str:
    """Return a long description of an entry in a short form."""
    first, *others = changes = _described(edit, in_short=True)
    text = ", ".join(changes)
    return text if len(text) <= _LONGEST or not others else f"{first} and {len(others)} more"


def _described(edit: Hooks, in_short: bool = False) -> list[str]:
    """Return the point and the edit of each change of an entry of a sweep.

    Args:
        edit: the entry.
        in_short: whether to leave out the arguments of edits, except their places.
    """
    changes = edit.items() if isinstance(edit, Mapping) else edit
    parts = []
    for point, change in changes:
        # Functions and modules are shown by name.
        point_name = getattr(point, "__name__", point)
        text = getattr(change, "__name__", change)
        if in_short and isinstance(change, Edit):
            text = change.short()
        parts.append(f"{point_name}: {text}")
    return parts


def _check_names(runs: Mapping[str, Hooks]) -> None:
    """Check that a mapping has the hooks of a run for each name, and is not the hooks of one run.

    Raises:
        TypeError: if a value is not the hooks of a run, or a key is not a text.
    """
    if any(callable(hooks) for hooks in runs.values()):
        raise TypeError(
            "edits must be a list with an entry for each run, or a mapping of names to runs; got "
            "one mapping; write [edits]"
        )
    for name in runs:
        if not isinstance(name, str):
            raise TypeError(f"the names of runs must be texts; got {shown(name)}")


def _check_edits(entries: Sequence[Hooks]) -> None:
    """Check that the edits of a sweep are a list of mappings or pairs, one for each run."""
    if callable(entries) or not isinstance(entries, Sequence):
        rule = (
            "edits must be a list with an entry for each run, such as [{'blocks.0.attn.z': "
            "edits.zero()}]"
        )
        raise TypeError(f"{rule}; got {shown(entries)}")
    for entry in entries:
        if callable(entry):
            raise TypeError(
                f"an entry of edits must name the points, such as {{'blocks.*.attn.z': "
                f"{entry!r}}}; got {entry!r}"
            )
    if not entries:
        raise ValueError("a sweep needs at least one edit; got none")
