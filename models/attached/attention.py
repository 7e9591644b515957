"""Attention of an attached model, which passes its values through points.

1. Most modules call an attention function of `transformers`. It is replaced by `hooked_attention`.
   If neither `scores` nor `pattern` has a hook, the model's own kernel computes z
   (`AttentionPoints`).
2. A module may compute attention in its own code. If one of its points has a hook, its forward runs
   under a mode that sees PyTorch's functions (`TracedPoints`).
3. In this mode, the first product of batches of matrices is the product of queries and keys, the
   softmax returns the pattern, and the second product is the product of pattern and values.
   `F.scaled_dot_product_attention` is all three.
4. Each value is passed to its point with the point's axes. The result of the point is converted to
   the module's own layout.
5. The module may scale the product later, and add to it. `slope_of` finds the scale, once, in
   `attach`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from hooks import FusedUnlessHooked, HookError, HookPoint, HookPoints
from hooks.base import agree, at_least_float32, carried, is_same, tensors_in
from hooks.shared import is_listened_to
from models.attached.context import (
    AttachedPast,
    Keys,
    cached_layer,
    first_new,
    forget_further_keys,
    n_further_keys,
    passed,
    past_of,
    take_cache,
)
from models.attached.forward import Replaced, fire, rows_and_positions
from models.attached.original import Kernel, kernel_name, kernel_of
from models.attached.padding import KernelOptions, pattern_of, queries_without_keys
from models.attached.probe import ATTENTION, FUSED, ProbeRun, attention_part
from models.dot_product import require_room_for_scores

Heads = Float[Tensor, "batch head query d_head"]


def hooked_attention(
    module: nn.Module, query: Heads, key: Keys, value: Keys, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Return the attention of one module, computed through its points if it has any.

    The arguments are the arguments of an attention function of `transformers`; see
    `AttentionPoints.attend`.
    """
    # In some families, the mask is longer than the keys.
    if isinstance(attention_mask, Tensor):
        attention_mask = attention_mask[..., : key.shape[2]]
    points: AttentionPoints | None = carried(module, "hook_points")
    if points is None:
        return kernel_of(module)(module, query, key, value, attention_mask, **kwargs)
    return points.attend(module, query, key, value, attention_mask, **kwargs)


class AttentionPoints(HookPoints):
    """The points of one attention module.

    If neither `scores` nor `pattern` has a hook, the model's own kernel computes z. If the config
    asks for a kernel other than eager or sdpa, the points `scores` and `pattern` are left out,
    because such a kernel may apply rules that are not in the mask, for example a window.

    Args:
        module: the attention module.
        kernel: the attention function of the module. Default: the function that the module's config
            asks for.

    Attributes:
        kernel: the attention function.
        is_lent: whether later modules attend to the same keys and values.
    """

    acts_through = "z"
    """The point through which all other points change the output; see `hooks.replay.early_ends`."""
    is_lent = False
    keys = "pos", "key"
    """The names of the axis of keys: in keys and values, and in scores."""

    def __init__(self, module: nn.Module, kernel: Kernel | None = None) -> None:
        super().__init__(module)
        self.kernel = kernel or kernel_of(module)
        pos, key = self.keys
        self.q = HookPoint("batch pos head d_head", "queries as they enter the dot product")
        self.k = HookPoint(f"batch {pos} kv_head d_head", "keys as they enter the dot product")
        self.v = HookPoint(f"batch {pos} kv_head d_head", "values")
        if kernel or kernel_name(module.config) in ("eager", "sdpa"):
            self.scores = HookPoint(
                f"batch head query {key}",
                "q·k·scale before the mask: not zero above the diagonal",
            )
            self.pattern = HookPoint(
                f"batch head query {key}", "softmax of the masked scores over keys"
            )
        self.z = HookPoint("batch pos head d_head", "pattern·v, before the output projection")

    @property
    def layer(self) -> Any:
        """The index of the layer of a cache that belongs to the module, or None."""
        return getattr(self.module, "layer_idx", getattr(self.module, "layer_id", None))

    def plain(self, argument: Any) -> Any:
        """Return a copy of this layer's keys and values in a cache, for a later run of the module.

        See `past_of`.

        Args:
            argument: the cache that the module got.
        """
        return past_of(argument, self.layer)

    def attend(
        self, module: nn.Module, query: Heads, key: Keys, value: Keys, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return z, [batch, query, head, d_head], and the pattern or None.

        Args:
            module: the attention module.
            query, key, value: the operands of attention, [batch, head, pos, d_head].
            mask: the mask that the module computed, or None.
            kwargs: the options of the module's attention function; see `KernelOptions`.
        """
        cache, layer_cache, new = self.cached(key, query.shape[2])
        is_both = key is value
        query = fire(self.q, query.transpose(1, 2)).transpose(1, 2)
        through = partial(passed, new=new, cache=cache, is_lent=self.is_lent, is_both=is_both)
        key = through(self.k, key, cached=getattr(layer_cache, "keys", None))
        value = through(self.v, value, cached=getattr(layer_cache, "values", None))
        end = key.shape[2]
        if hasattr(self, "scores") and (
            is_listened_to(self.scores) or is_listened_to(self.pattern)
        ):
            # Leave out the free places of a static cache, because the points show only real keys.
            end = new.stop + n_further_keys()
        if end < key.shape[2]:
            key, value = key[:, :, :end], value[:, :, :end]
            mask = mask[..., :end] if isinstance(mask, Tensor) else mask
        mix = self._mix if hasattr(self, "scores") else self._fused
        z, pattern = mix(module, query, key, value, mask, **kwargs)
        forget_further_keys()
        return fire(self.z, z), pattern

    def cached(self, key: Keys, n_pos: int) -> tuple[Any, Any, range]:
        """Return the cache of this call, this layer's part of the cache, and the new positions.

        The cache and the part are None in a call without a cache. The new positions are a range of
        indices of `key`.

        Args:
            key: the keys of all positions.
            n_pos: the number of new positions.
        """
        cache = take_cache()
        layer_cache = None if isinstance(cache, AttachedPast) else cached_layer(cache, self.layer)
        start = first_new(key, n_pos, cache=cache, layer=self.layer) - n_further_keys()
        return cache, layer_cache, range(start, start + n_pos)

    def _fused(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return z and the pattern or None, from the model's own kernel."""
        return self.kernel(module, *args, **kwargs)

    @FusedUnlessHooked("scores", "pattern", fused=_fused)
    def _mix(
        self, module: nn.Module, query: Heads, key: Keys, value: Keys, mask: Any, /, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return z and the pattern.

        These are the operations of the eager kernels, in the same order, so the numbers are the
        same.
        """
        require_room_for_scores(query, key)
        options = KernelOptions.of(module, kwargs)
        groups = query.shape[1] // key.shape[1]
        key, value = (_repeated(part, groups) for part in (key, value))
        scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
        computed = torch.matmul(query, key.transpose(2, 3)) * scaling
        scores = _fire_own(self.scores, computed)
        pattern = pattern_of(
            scores, mask, options=options, dtype=query.dtype, is_edited=scores is not computed
        )
        pattern = _fire_own(self.pattern, pattern)
        weights = F.dropout(pattern, options.dropout, module.training).to(value.dtype)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), pattern


class CrossPoints(AttentionPoints):
    """The points of attention to an encoder.

    The axis of keys is `encoder_pos`: the encoder's positions, padding included. A cache stores the
    keys as they were before edits, so an edit acts again in each step of a generation.
    """

    keys = "encoder_pos", "encoder_pos"

    def cached(self, key: Keys, n_pos: int) -> tuple[Any, Any, range]:
        """Return no cache, because all keys are present in each call."""
        take_cache()
        return None, None, range(key.shape[2])


def _fire_own(point: HookPoint, value: Float[Tensor, "batch head query key"]) -> Tensor:
    """Pass the columns of positions through a point, and leave the columns of further keys."""
    n_further = n_further_keys()
    if not n_further:
        return fire(point, value)
    own = value[..., :-n_further]
    new = fire(point, own)
    return value if new is own else torch.cat([new, value[..., -n_further:]], -1)


def further_keys(module: nn.Module, probe: ProbeRun) -> nn.Module | None:
    """Return the module inside attention whose output is appended to the keys of positions.

    The result is None if attention has no such module. In a run on a short text, the output of the
    module may be empty.

    Args:
        module: the attention module.
        probe: a run.
    """
    keys = next((keys for attending, keys in probe.keys if attending is module), None)
    attends = next((call for call in probe.single if call.module is module), None)
    if keys is None or attends is None or not attends.inputs or attends.inputs[0].ndim != 3:
        return None
    n_pos = attends.inputs[0].shape[1]
    for call in probe.single:
        output = call.output
        is_inside = attends.began < call.began and call.ended < attends.ended
        if not is_inside or output is None or output.ndim != 4:
            continue
        further = keys[:, :, n_pos:].to(output)
        # The keys are copied, so the bits are equal.
        if further.shape == output.shape and is_same(further, output):
            return call.module
    return None


def _repeated(part: Tensor, groups: int) -> Tensor:
    """Return keys or values with each head repeated for each of its `groups` query heads."""
    return part if groups == 1 else part.repeat_interleave(groups, 1)


FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
OPERANDS = ("batch1", "batch2", "mat2", "other", "tensor2")


class TracedPoints(AttentionPoints):
    """The points of an attention module that calls no attention function of `transformers`.

    Such a module multiplies queries and keys in its own forward. In a run with hooks, the
    operations of this forward are observed (`TracedForward`), and their values are passed through
    the points.

    Args:
        module: the attention module.

    Attributes:
        scale: the factor by which the module multiplies the product of queries and keys; NaN if
            there is no single factor. None before the first run with hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, _fused)
        self.scale: float | None = None
        module.forward = TracedForward(self)


class TracedCross(CrossPoints, TracedPoints):
    """The points of attention to an encoder in a module with its own attention code."""


class TracedForward(Replaced):
    """The forward of an attention module, which passes its values through points with hooks.

    Args:
        points: the points.
    """

    def __init__(self, points: TracedPoints) -> None:
        super().__init__(points.module)
        self._points = points

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own forward.

        Raises:
            HookError: if the module does not compute attention as it did in `attach`.
        """
        if not is_listened_to(self._points):
            take_cache()
            return self.inner(*args, **kwargs)
        # The factor is still unknown in the first run, which is in `attach`.
        if self._points.scale is None:
            self._points.scale = slope_of(self.inner, args, kwargs)
        passing = _Passing(self._points, next(tensors_in((args, kwargs))))
        with passing:
            output = self.inner(*args, **kwargs)
        if passing.expected:
            raise _changed(self._points)
        return output


def _changed(points: TracedPoints) -> HookError:
    """Return the error for a module that computes attention in another way than in `attach`."""
    kind = type(points.module).__name__
    return HookError(
        f"attention must call the same functions as in attach; {kind} calls different ones"
    )


class _Passing(TorchFunctionMode):
    """Passes the values of one forward of an attention module through points.

    Args:
        points: the points.
        stream: the input of the module, [batch, pos, d_model], for its number of rows and positions
            and its precision.

    Attributes:
        expected: the kinds of PyTorch's functions that the module has not called yet, in the order
            of attention: a product of matrices, a softmax, another product. The tuple is empty when
            the attention has been computed.
    """

    def __init__(self, points: TracedPoints, stream: Tensor) -> None:
        super().__init__()
        self.points = points
        self.expected: tuple[str, ...] = ATTENTION
        self._batch, self._n_pos = rows_and_positions(stream)
        self._dtype = stream.dtype
        self._new: range | None = None
        # The scores after a hook; None if no hook has changed them.
        self._edited: Tensor | None = None
        self._steps = (self._scores, self._pattern, self._z)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the function's result, with the changes of the points."""
        kind = attention_part(func, args, kwargs)
        kwargs = kwargs or {}
        if kind == FUSED and self.expected == ATTENTION:
            self.expected = ()
            return self._fused(*args, **kwargs)
        if kind not in self.expected[:1]:
            return func(*args, **kwargs)
        step = self._steps[-len(self.expected)]
        self.expected = self.expected[1:]
        return step(func, *args, **kwargs)

    def _fused(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of PyTorch's fused attention, [batch, head, query, d_head].

        The queries, the keys, the values and the result pass through their points. If a hook needs
        `scores` or `pattern`, the result is computed in steps instead of by the fused kernel.

        Args:
            args, kwargs: the arguments of `scaled_dot_product_attention`.
        """
        named = dict(zip(FUSED_ARGUMENTS, args, strict=False)) | kwargs
        query, key, value, mask = (named.pop(name, None) for name in FUSED_ARGUMENTS[:4])
        named["scaling"] = named.pop("scale", None)
        named["dropout"] = named.pop("dropout_p", 0.0)
        named.setdefault("is_causal", False)
        z, _ = self.points.attend(self.points.module, query, key, value, mask, **named)
        return z.transpose(1, 2)

    def _scores(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the product of queries and keys, with the changes of `q`, `k` and `scores`."""
        points = self.points
        if not points.scale or math.isnan(points.scale):
            raise _changed(points)
        *added, query, key = _operands(args, kwargs)
        self._cache = take_cache()
        if isinstance(points, CrossPoints):
            self._cache = None
            self._new = range(key.shape[-1])
        self._layer_cache = cached_layer(self._cache, points.layer)
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
        # `baddbmm` returns beta * added + alpha * product. If `beta` is 0, `added` may contain any
        # numbers, even NaN, so it must not be multiplied.
        beta = kwargs.get("beta", 1) if added else 0
        return new + added[0] * beta if beta else new

    def _pattern(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of the module's softmax, after hooks at the point `pattern`."""
        weights = self._softmax(func, *args, **kwargs)
        # A softmax with another number of elements comes from a hook inside the module.
        if weights.numel() != self._n_places:
            raise _changed(self.points)
        # Most modules convert the weights next, so the point shows the converted ones.
        pattern = weights.to(self._dtype)
        new = self._over_keys(self.points.pattern, pattern)
        return weights if new is pattern else new.to(weights.dtype)

    def _softmax(self, func: Any, masked: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's softmax. If an edit removed all keys of a query, its pattern is 0."""
        edited = self._edited
        if edited is None or masked.numel() != self._n_places:
            return func(masked, *args, **kwargs)
        by_head = self._by_head(masked)
        # If the module caps scores, a key at -inf becomes finite, so mask it again.
        free = by_head.shape[-1] - edited.shape[-1]
        removed = pad(torch.isneginf(edited), [0, free], value=False)
        by_head = by_head.masked_fill(removed, -torch.inf)
        without_keys = queries_without_keys(edited, by_head[..., : edited.shape[-1]])
        masked = by_head.masked_fill(without_keys, 0).reshape(masked.shape)
        weights = func(masked, *args, **kwargs)
        return self._by_head(weights).masked_fill(without_keys, 0).reshape(weights.shape)

    def _z(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the product of pattern and values, after the hooks at the points `v` and `z`."""
        *others, value = _operands(args, kwargs)
        value = self._passed(self.points.v, "values", value)
        return self._by_position(self.points.z, func(*others, value, **kwargs))

    def _by_head(self, value: Tensor) -> Tensor:
        """Return a value with its texts and heads as two axes. Some modules join these axes."""
        return value if value.ndim == 4 else value.unflatten(0, (self._batch, -1))

    def _by_position(self, point: HookPoint, value: Tensor) -> Tensor:
        """Pass a value through a point with the axes [batch, pos, head, d_head]."""
        shown = self._by_head(value).transpose(1, 2)
        new = fire(point, shown)
        return value if new is shown else new.transpose(1, 2).reshape(value.shape)

    def _over_keys(self, point: HookPoint, value: Tensor) -> Tensor:
        """Pass a value through a point with the axes [batch, head, query, key]."""
        assert self._new is not None
        # In a static cache, the places after the last position are free.
        shown, free = self._by_head(value).tensor_split([self._new.stop], -1)
        new = fire(point, shown)
        return value if new is shown else torch.cat([new, free], -1).reshape(value.shape)

    def _passed(self, point: HookPoint, name: str, operand: Tensor) -> Tensor:
        """Return an operand of a product, with its new keys or values as they leave a point.

        See `passed`.

        Args:
            point: the point.
            name: the name of the tensor in the cache: `keys` or `values`.
            operand: the keys or values of all positions, with the key axis before the last one.
        """
        keys = self._by_head(operand)
        cached = getattr(self._layer_cache, name, None)
        if isinstance(cached, Tensor) and cached.shape == keys.shape and cached.dtype != keys.dtype:
            # The operand is a copy of the cached tensor in another precision. An edit must be
            # written to the cached tensor.
            keys = cached
        # The keys pass first, so their call finds the range of the new positions. `first_new`
        # compares an operand with the cached keys, so it cannot find the range from the values.
        if self._new is None:
            start = first_new(keys, self._n_pos, cache=self._cache, layer=self.points.layer)
            self._new = range(start, start + self._n_pos)
        after = passed(
            point,
            keys,
            new=self._new,
            cached=cached,
            cache=self._cache,
            is_lent=self.points.is_lent,
        )
        return after.to(operand.dtype).reshape(operand.shape)


def _operands(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a product in order, and remove the named ones from `kwargs`."""
    return [*args, *(kwargs.pop(name) for name in OPERANDS if name in kwargs)]


def _fused(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return z, [batch, query, head, d_head], from PyTorch's fused function."""
    kwargs["scale"] = kwargs.pop("scaling")
    kwargs["dropout_p"] = kwargs.pop("dropout")
    z = F.scaled_dot_product_attention(query, key, value, mask, **kwargs)
    return z.transpose(1, 2), None


def slope_of(forward: Callable[..., Any], args: Any, kwargs: Any) -> float:
    """Return the factor by which a module's forward multiplies the product of queries and keys.

    The result is NaN if there is no single factor.
    """
    try:
        with torch.enable_grad(), _Slope():
            forward(*args, **kwargs)
    except _SoftmaxReached as reached:
        return float(reached.args[0])
    return math.nan


class _SoftmaxReached(BaseException):
    """Ends a run at the softmax, and carries the factor."""


class _Slope(TorchFunctionMode):
    """Finds the factor of the product of queries and keys in the softmax's input.

    The factor is the derivative of the softmax's input by the product. It is read where the pattern
    is not zero, because masked scores do not depend on the product.
    """

    def __init__(self) -> None:
        super().__init__()
        self._product: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the function's result.

        Raises:
            _SoftmaxReached: at the softmax. It carries the factor, or NaN if the elements have
                different factors.
        """
        output = func(*args, **(kwargs or {}))
        kind = attention_part(func, args, kwargs)
        if kind == "product" and self._product is None:
            self._product = at_least_float32(output.detach()).requires_grad_()
            return self._product.clone()
        if kind != "softmax" or self._product is None:
            return output
        scores = args[0]
        # Each element has its own weight. With equal weights, a module that moves elements to other
        # places would have the same slopes as a module that leaves them in place.
        weights = torch.linspace(1, 2, scores.numel(), dtype=scores.dtype, device=scores.device)
        weights = weights.view(scores.shape)
        (slopes,) = torch.autograd.grad(scores, self._product, weights)
        slopes = (slopes.reshape(scores.shape) / weights)[output > 0]
        is_one_factor = agree(slopes, slopes[:1].expand_as(slopes))
        raise _SoftmaxReached(float(slopes[0]) if is_one_factor else math.nan)
