"""Attention by code of its own: its products and its softmax, passed through points.

1. While somebody listens at a point of the module, its forward runs under a mode that sees PyTorch's functions.
2. The first product of batches of matrices is of queries and keys, the softmax gives the pattern, the second
   product is of pattern and values. `F.scaled_dot_product_attention` is all three.
3. Each value goes to its point with the point's axes; what the point gives goes on in the module's own layout.
4. The module may scale the product later, and add to it. `slope_of` finds the scale, once, at attach.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from hooks import HookError, HookPoint
from hooks.base import tensors_in
from hooks.shared import is_listened_to
from models.attached.attention import AttentionPoints, CrossPoints, queries_without_keys
from models.attached.checked import slope_of
from models.attached.past import cached_layer, first_new, number_of, passed, take_cache
from models.attached.probe import ATTENTION, FUSED, kind_of
from models.attached.wires import Replaced, fire, rows_of

FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
OPERANDS = ("batch1", "batch2", "mat2", "other", "tensor2")


class TracedPoints(AttentionPoints):
    """The points of an attention module with code of its own.

    Args:
        module: the attention module.

    Attributes:
        scale: what the module multiplies the product of queries and keys with; NaN where it makes none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, _fused)
        self.scale: float | None = None
        module.forward = TracedForward(self)


class TracedCross(CrossPoints, TracedPoints):
    """The points of attention to an encoder, with code of its own."""


class TracedForward(Replaced):
    """The forward of an attention module, which passes its values through points while somebody listens.

    Args:
        points: the points.
    """

    def __init__(self, points: TracedPoints) -> None:
        super().__init__(points.module)
        self._points = points

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module's own forward.

        Raises:
            HookError: if it does not compute attention as it did at attach.
        """
        if not is_listened_to(self._points):
            take_cache()
            return self.inner(*args, **kwargs)
        if self._points.scale is None:  # at attach
            self._points.scale = slope_of(self.inner, args, kwargs)
        passing = _Passing(self._points, next(tensors_in((args, kwargs))))
        with passing:
            output = self.inner(*args, **kwargs)
        if passing.left:
            raise _changed(self._points)
        return output


def _changed(points: TracedPoints) -> HookError:
    what = type(points.module).__name__
    return HookError(
        f"attention must be computed by the functions it had at attach; {what} has others"
    )


class _Passing(TorchFunctionMode):
    """Passes the values of one forward through points.

    Args:
        points: the points.
        stream: what the module reads, [batch, pos, d_model].

    Attributes:
        left: the functions to come.
    """

    def __init__(self, points: TracedPoints, stream: Tensor) -> None:
        super().__init__()
        self.points = points
        self.left: tuple[str, ...] = ATTENTION
        self._batch, self._n_pos = rows_of(stream)
        self._dtype = stream.dtype
        self._new: range | None = None
        # The scores, if a hook has changed them.
        self._edited: Tensor | None = None
        self._steps = (self._scores, self._pattern, self._z)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result, with what the points give."""
        kwargs, kind = kwargs or {}, kind_of(func, args, kwargs)
        if kind == FUSED and self.left == ATTENTION:
            self.left = ()
            return self._fused(*args, **kwargs)
        if kind not in self.left[:1]:
            return func(*args, **kwargs)
        step, self.left = self._steps[-len(self.left)], self.left[1:]
        return step(func, *args, **kwargs)

    def _fused(self, *args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(FUSED_ARGUMENTS, args, strict=False)) | kwargs
        query, key, value, mask = (named.pop(name, None) for name in FUSED_ARGUMENTS[:4])
        named["scaling"], named["dropout"] = named.pop("scale", None), named.pop("dropout_p", 0.0)
        named.setdefault("is_causal", False)
        z, _ = self.points.attend(self.points.module, query, key, value, mask, **named)
        return z.transpose(1, 2)

    def _scores(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        points = self.points
        if not points.scale or math.isnan(points.scale):
            raise _changed(points)
        *added, query, key = (*args, *(kwargs.pop(n) for n in OPERANDS if n in kwargs))
        self._cache, self._number = take_cache(), number_of(points.module)
        if isinstance(points, CrossPoints):
            self._cache, self._new = None, range(key.shape[-1])
        self._held = cached_layer(self._cache, self._number)
        query = self._by_position(points.q, query)
        key = self._passed(points.k, "keys", key.mT).mT
        product = func(*added, query, key, **kwargs)
        self._n_places = product.numel()
        if not is_listened_to(points.scores):
            return product
        plain = torch.matmul(query, key) * kwargs.get("alpha", 1) if added else product
        scores = plain * points.scale
        new = self._over_keys(points.scores, scores)
        if new is scores:
            return product
        assert self._new is not None
        self._edited = self._by_head(new)[..., : self._new.stop]
        new = new / points.scale
        beta = kwargs.get("beta", 1) if added else 0  # with 0 the first argument may hold anything
        return new + added[0] * beta if beta else new

    def _pattern(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        weights = self._softmax(func, *args, **kwargs)
        if weights.numel() != self._n_places:  # of a hook inside the module
            raise _changed(self.points)
        pattern = weights.to(self._dtype)  # most modules do so next
        new = self._over_keys(self.points.pattern, pattern)
        return weights if new is pattern else new.to(weights.dtype)

    def _softmax(self, func: Any, masked: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The module's softmax. Queries that lost all keys by an edit attend to nothing."""
        edited = self._edited
        if edited is None or masked.numel() != self._n_places:
            return func(masked, *args, **kwargs)
        by_head = self._by_head(masked)
        # The module may have capped scores, which makes a key at -inf visible again.
        free = by_head.shape[-1] - edited.shape[-1]
        removed = pad(torch.isneginf(edited), [0, free], value=False)
        by_head = by_head.masked_fill(removed, -torch.inf)
        without_keys = queries_without_keys(edited, by_head[..., : edited.shape[-1]])
        masked = by_head.masked_fill(without_keys, 0).reshape(masked.shape)
        weights = func(masked, *args, **kwargs)
        return self._by_head(weights).masked_fill(without_keys, 0).reshape(weights.shape)

    def _z(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        *others, value = (*args, *(kwargs.pop(n) for n in OPERANDS if n in kwargs))
        value = self._passed(self.points.v, "values", value)
        return self._by_position(self.points.z, func(*others, value, **kwargs))

    def _by_head(self, value: Tensor) -> Tensor:
        """With rows and heads apart, which some modules have as one axis."""
        return value if value.ndim == 4 else value.unflatten(0, (self._batch, -1))

    def _by_position(self, point: HookPoint, value: Tensor) -> Tensor:
        shown = self._by_head(value).transpose(1, 2)
        new = fire(point, shown)
        return value if new is shown else new.transpose(1, 2).reshape(value.shape)

    def _over_keys(self, point: HookPoint, value: Tensor) -> Tensor:
        assert self._new is not None
        # Places after the last position are free, in a static cache.
        shown, free = self._by_head(value).tensor_split([self._new.stop], -1)
        new = fire(point, shown)
        return value if new is shown else torch.cat([new, free], -1).reshape(value.shape)

    def _passed(self, point: HookPoint, name: str, operand: Tensor) -> Tensor:
        keys, held = self._by_head(operand), getattr(self._held, name, None)
        if isinstance(held, Tensor) and held.shape == keys.shape and held.dtype != keys.dtype:
            keys = held  # the operand is a copy in another precision
        if self._new is None:  # not yet for values, of which the cache's keys are no part
            start = first_new(keys, self._n_pos, self._cache, self._number)
            self._new = range(start, start + self._n_pos)
        after = passed(point, keys, self._new, held, self._cache, self.points.is_lent)
        return after.to(operand.dtype).reshape(operand.shape)


def _fused(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    kwargs["scale"], kwargs["dropout_p"] = kwargs.pop("scaling"), kwargs.pop("dropout")
    z = F.scaled_dot_product_attention(query, key, value, mask, **kwargs)
    return z.transpose(1, 2), None
