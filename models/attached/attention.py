"""Attention of an attached model: a function that `transformers` calls with queries, keys and values."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookPoint, HookPoints
from hooks.base import library
from hooks.shared import carried, is_listened_to
from models.attached.configs import HOOKED, Kernel, kernel_name, kernel_of
from models.attached.past import (
    AttachedPast,
    Keys,
    cached_layer,
    first_new,
    number_of,
    passed,
    past_of,
    take_cache,
)
from models.attached.wires import fire
from models.dot_product import require_room_for_scores

Heads = Float[Tensor, "batch head query d_head"]


def register(kernels: Iterable[str]) -> None:
    """Tells `transformers` of this function, under a name of its own for each of the models' kernels.

    Raises:
        ImportError: if `transformers` is missing, or older than 5.6.
    """
    transformers = library("transformers")
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < (5, 6):
        raise ImportError(f"attach needs transformers 5.6 or later; got {version}")
    masks = library("transformers.masking_utils")
    for name in kernels:
        transformers.AttentionInterface.register(HOOKED + name, hooked_attention)
        if name in masks.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            mask = masks.ALL_MASK_ATTENTION_FUNCTIONS[name]
            masks.ALL_MASK_ATTENTION_FUNCTIONS.register(HOOKED + name, mask)


def hooked_attention(
    module: nn.Module, query: Heads, key: Keys, value: Keys, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attention of one module, through its points if it has any; see `AttentionPoints`."""
    if isinstance(attention_mask, Tensor):  # some families make it longer
        attention_mask = attention_mask[..., : key.shape[2]]
    points: AttentionPoints | None = carried(module, "hook_points")
    if points is None:
        return kernel_of(module)(module, query, key, value, attention_mask, **kwargs)
    return points.attend(module, query, key, value, attention_mask, **kwargs)


class AttentionPoints(HookPoints):
    """The points of one attention module.

    While nobody listens at `scores` or `pattern`, the model's own kernel computes z. Kernels other than
    eager and sdpa may have rules of their own beside the mask, so there these two are left out.

    Args:
        module: the attention module.
        kernel: its attention function; the one that its config asks for, if not given.

    Attributes:
        kernel: see above.
        is_lent: whether later modules attend to the same keys and values.
    """

    is_lent = False
    keys = "pos", "key"
    """What the axis of keys is called, at keys and values and at scores."""

    def __init__(self, module: nn.Module, kernel: Kernel | None = None) -> None:
        super().__init__(module)
        self.kernel = kernel or kernel_of(module)
        pos, key = self.keys
        self.q = HookPoint("batch pos head d_head", "queries as they enter the dot product")
        self.k = HookPoint(f"batch {pos} kv_head d_head", "keys as they enter the dot product")
        self.v = HookPoint(f"batch {pos} kv_head d_head", "values")
        if kernel or kernel_name(module.config) in ("eager", "sdpa"):
            self.scores = HookPoint(
                f"batch head query {key}", "q·k·scale before the mask: not zero above the diagonal"
            )
            self.pattern = HookPoint(
                f"batch head query {key}", "softmax of the masked scores over keys"
            )
        self.z = HookPoint("batch pos head d_head", "pattern·v, before the output projection")

    def plain(self, argument: Any) -> Any:
        """The part that a later run of the module needs of a cache of keys and values; see `past_of`."""
        return past_of(argument, number_of(self.module))

    def attend(
        self, module: nn.Module, query: Heads, key: Keys, value: Keys, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """z, [batch, query, head, d_head], and the pattern or None."""
        cache, held, new = self.cached(key, query.shape[2])
        query = fire(self.q, query.transpose(1, 2)).transpose(1, 2)
        key = passed(self.k, key, new, getattr(held, "keys", None), cache, self.is_lent)
        value = passed(self.v, value, new, getattr(held, "values", None), cache, self.is_lent)
        end = key.shape[2]
        if hasattr(self, "scores") and (
            is_listened_to(self.scores) or is_listened_to(self.pattern)
        ):
            end = new.stop  # no free places
        if end < key.shape[2]:
            key, value = key[:, :, :end], value[:, :, :end]
            mask = mask[..., :end] if isinstance(mask, Tensor) else mask
        mix = self._mix if hasattr(self, "scores") else self._fused
        z, pattern = mix(module, query, key, value, mask, **kwargs)
        return fire(self.z, z), pattern

    def cached(self, key: Keys, n_pos: int) -> tuple[Any, Any, range]:
        """The cache of this call, its part that holds these keys, and the places of those of the `n_pos` new positions."""
        cache, layer = take_cache(), number_of(self.module)
        held = None if isinstance(cache, AttachedPast) else cached_layer(cache, layer)
        start = first_new(key, n_pos, cache, layer)
        return cache, held, range(start, start + n_pos)

    def _fused(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return self.kernel(module, *args, **kwargs)

    @FusedUnlessHooked("scores", "pattern", fused=_fused)
    def _mix(
        self,
        module: nn.Module,
        query: Heads,
        key: Keys,
        value: Keys,
        mask: Any,
        /,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        """The operations of the eager kernels, in their order, so that numbers are the same."""
        require_room_for_scores(query, key)
        groups = query.shape[1] // key.shape[1]
        key, value = (_repeated(part, groups) for part in (key, value))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        computed = torch.matmul(query, key.transpose(2, 3)) * scaling
        scores = fire(self.scores, computed)
        masked = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        if scores is not computed:
            # The cap would make a key that an edit has set to -inf visible again.
            masked = masked.masked_fill(torch.isneginf(scores), -torch.inf)
        if mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            mask = _causal(masked) if causal and query.shape[2] > 1 else None
        masked = masked if position_bias is None else masked + position_bias
        masked = _masked(masked, mask)
        without_keys = None if scores is computed else queries_without_keys(scores, masked)
        if without_keys is not None:
            masked = masked.masked_fill(without_keys, 0)
        if s_aux is None:
            precision = torch.promote_types(masked.dtype, torch.float32)
            pattern = F.softmax(masked, -1, dtype=precision).to(query.dtype)
        else:
            pattern = _softmax_with_sink(masked, s_aux)
        if without_keys is not None:
            pattern = pattern.masked_fill(without_keys, 0)
        pattern = fire(self.pattern, pattern)
        weights = F.dropout(pattern, dropout, module.training).to(value.dtype)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), pattern


class CrossPoints(AttentionPoints):
    """The points of attention to an encoder, whose keys are along an axis `encoder_pos`: the encoder's positions, padding included.

    A cache keeps its keys as the encoder gave them, so an edit acts in each step of a generation anew.
    """

    keys = "encoder_pos", "encoder_pos"

    def cached(self, key: Keys, n_pos: int) -> tuple[Any, Any, range]:
        """No cache: all keys are there in each call."""
        take_cache()
        return None, None, range(key.shape[2])


def queries_without_keys(
    scores: Float[Tensor, "batch head query key"], masked: Float[Tensor, "batch head query key"]
) -> Bool[Tensor, "batch head query 1"]:
    """Return the queries for which edits of the scores left no key that the mask lets them see.

    Softmax would give NaN there or, because the kernels mask with the lowest finite number, attend to
    masked keys. These queries attend to nothing instead, as in a plain transformer.

    Args:
        scores: edited scores. Edits set keys to -inf, as `edits.knockout` does.
        masked: the same scores after the mask.
    """
    lowest = torch.finfo(masked.dtype).min / 2
    has_lost_keys = torch.isneginf(scores).any(-1, keepdim=True)
    return has_lost_keys & (masked.amax(-1, keepdim=True) <= lowest)


def _repeated(part: Tensor, groups: int) -> Tensor:
    return part if groups == 1 else part.repeat_interleave(groups, 1)


def _causal(scores: Tensor) -> Tensor:
    # Where there is no mask, queries and keys begin at the same position; more keys are free places.
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        # A row without keys becomes uniform, as in the eager kernels.
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """The weights of the keys where each head has a sink that takes the rest (gpt-oss)."""
    sink = sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    joined = torch.cat([scores, sink], -1)
    joined = joined - joined.amax(-1, keepdim=True)
    return F.softmax(joined, -1, dtype=joined.dtype)[..., :-1]
