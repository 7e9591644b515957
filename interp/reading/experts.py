"""Loads of experts: the share of tokens that select each expert, or their weights."""

from typing import Any, Literal

import torch
from einops import rearrange
from torch import nn

from hooks import ActivationCache, CacheError, HookError
from hooks.base import at_least_float32, require_choice, stacked, to_device, without_gradients
from interp.inputs.cached import mask_of, text_of_values
from interp.inputs.copies import groups_of_cache
from interp.kinds import require_cache
from interp.protocol import of
from interp.results.result import Result


@without_gradients
def expert_load(
    model: nn.Module,
    cache: ActivationCache,
    over: Literal["pos"] | None = None,
    *,
    weighted: bool = False,
) -> Result:
    """Return the share of tokens that select each expert, or the mean weight of each expert.

    If a router selects k of n experts uniformly, each expert has a load of k / n. If the load of an
    expert over many texts is low, this expert changes the output little. Loads by position show
    which words select an expert.

    Args:
        model: the model of the run, attached.
        cache: the cache of a run that cached `routing`.
        over: `pos` for a load at each position. Default: the mean over the real tokens of each
            text.
        weighted: whether to return the mean weight instead of the share of tokens; the weight is 0
            where an expert was not selected.

    Returns:
        A result with the axes `layer`, `expert` and `example`, or `layer`, `expert`, `pos` and
        `example`. Loads are NaN at padding, and means leave them out.

    Raises:
        CacheError: if the cache is of another model, or has no `routing`.
        ValueError: if `over` is unknown, or layers have different numbers of experts.

    >>> from hooks import HookedRunner
    >>> from models import attach
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = dict(vocab_size=7, hidden_size=4, intermediate_size=8, num_hidden_layers=1)
    >>> heads = dict(num_attention_heads=2, num_key_value_heads=1)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=3)).eval()
    >>> attached = attach(model)
    >>> cache = HookedRunner(model).capture(torch.tensor([[3, 1, 4]]), names="*.routing")
    >>> load = expert_load(model, cache)
    >>> load.axes, load.mean().sum()  # each token selects two experts
    (('layer', 'expert', 'example'), tensor(2.))
    """
    require_choice("over", over, (None, "pos"))
    # Raise an error if the model and the cache are exchanged.
    of(model)
    require_cache(cache, model)
    try:
        names = cache.layer_names("routing")
    except HookError as error:
        raise CacheError(
            f"loads of experts need names='*.routing' and a model with experts: {error}"
        ) from None
    layers = map(at_least_float32, cache.layers("routing"))
    # The routing is 0 where an expert was not selected. A weight that rounds to 0 has no effect
    # either.
    loads = [layer if weighted else (layer != 0).to(layer) for layer in layers]
    if len(sizes := {load.shape[-1] for load in loads}) > 1:
        raise ValueError(f"all layers must have the same number of experts; got {sorted(sizes)}")
    values = rearrange(stacked(loads), "layer batch pos expert -> layer expert pos batch")
    *_, n_pos, batch = values.shape
    mask = mask_of(cache, (batch, n_pos))
    if mask is not None:
        values = values.masked_fill(~to_device(mask, values.device).mT, torch.nan)
    labels = {"layer": [*names], "expert": [*range(values.shape[1])]}
    unit, bounds = ("weight", None) if weighted else ("share of tokens", (0.0, 1.0))
    words = exists = None
    if over is None:
        values = values.nanmean(2)
    else:
        labels["pos"] = [*range(n_pos)]
        text = text_of_values(cache, (batch, n_pos))
        words = None if text is None else text.words(model)
        exists = None if mask is None else to_device(mask, values.device).mT[None, None].bool()
    about: dict[str, Any] = dict(unit=unit, bounds=bounds, words={"pos": words} if words else {})
    about["groups"] = groups_of_cache(cache, values)
    return Result(values, (*labels, "example"), labels=labels, exists=exists, **about)
