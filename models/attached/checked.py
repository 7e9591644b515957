"""Whether the points of attention hold what they promise, one module at a time; the scale of its product."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hooks.base import mapped, tensors_in, without_gradients
from hooks.shared import Session, carried
from models.attached.probe import kind_of
from models.attached.sums import HALF, agree

POINTS = ("q", "k", "v", "scores", "pattern", "z")


def slope_of(forward: Callable[..., Any], args: Any, kwargs: Any) -> float:
    """The factor that a module's forward puts on the product of queries and keys; NaN if that is not one number."""
    try:
        with torch.enable_grad(), _Slope():
            forward(*args, **kwargs)
    except _SoftmaxReached as reached:
        return float(reached.args[0])
    return math.nan


class _SoftmaxReached(BaseException):
    """Ends a run at the softmax, and holds the slope there."""


class _Slope(TorchFunctionMode):
    """Finds the derivative of what the softmax reads by the product, where the pattern is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self._product: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result.

        Raises:
            _SoftmaxReached: at the softmax, with the derivative if it is one number.
        """
        output, kind = func(*args, **(kwargs or {})), kind_of(func, args, kwargs)
        if kind == "product" and self._product is None:
            precise = torch.promote_types(output.dtype, torch.float32)
            self._product = output.detach().to(precise).requires_grad_()
            return self._product.clone()
        if kind != "softmax" or self._product is None:
            return output
        scores = args[0]
        # Different weights, so that no other order of the places has the same slopes.
        weights = torch.linspace(1, 2, scores.numel(), dtype=scores.dtype, device=scores.device)
        weights = weights.view(scores.shape)
        (slopes,) = torch.autograd.grad(scores, self._product, weights)
        slopes = (slopes.reshape(scores.shape) / weights)[output > 0]
        same = torch.allclose(slopes, slopes[:1], rtol=1e-5, atol=0)
        raise _SoftmaxReached(float(slopes[0]) if same else math.nan)


def in_float32(module: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """A copy of a module in half precision, with its arguments, in float32; themselves where they are precise.

    In half precision rounding may hide a term of attention, or look like one.
    """
    held = [*module.parameters(), *tensors_in((args, kwargs))]
    if not any(tensor.dtype in HALF for tensor in held):
        return module, args, kwargs

    def widened(leaf: Any) -> Any:
        is_half = isinstance(leaf, Tensor) and leaf.dtype in HALF
        return leaf.float() if is_half else leaf

    return copy.deepcopy(module).float(), mapped(args, widened), mapped(kwargs, widened)


@without_gradients
def has_other_terms(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether attention gives something else where its scores and its pattern are listened to."""
    module, args, kwargs = in_float32(module, args, kwargs)
    points: Any = carried(module, "hook_points")
    output = next(tensors_in(module(*args, **kwargs)))
    with Session() as session:
        session.after(points.pattern, lambda pattern: None)
        explicit = next(tensors_in(module(*args, **kwargs)))
    return not agree(explicit, output, 1e-4)


@without_gradients
def problem_of(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """The first promise that the points of attention by code of its own break; None if there is none.

    Args:
        module: the attention module, with `TracedPoints`.
        args, kwargs: its arguments in some run.
    """
    traced: Any = carried(module, "hook_points")
    module, args, kwargs = in_float32(module, args, kwargs)
    values, read = _values_of(module, args, kwargs, edits=False)
    traced.scale = carried(module, "hook_points").scale
    edited, _ = _values_of(module, args, kwargs, edits=True)
    return _broken(values, read) or _broken(edited)


def _values_of(
    module: nn.Module, args: Any, kwargs: Any, edits: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The values at the points of one run, and what modules read, or may read, of it. Edits turn what can be edited."""
    points: Any = carried(module, "hook_points")
    values: dict[str, Tensor] = {}
    read: list[Tensor] = []
    with Session() as session:
        for name in POINTS:
            if edits and name not in ("scores", "z"):
                session.after(getattr(points, name), lambda value: value.roll(1, -1))
            session.after(getattr(points, name), partial(values.__setitem__, name))
        for part in module.modules():
            session.before(part, lambda *arguments: read.extend(tensors_in(arguments)))
        read += tensors_in(module(*args, **kwargs))
    return values, read


def _broken(values: Mapping[str, Tensor], read: Sequence[Tensor] | None = None) -> str | None:
    """The first promise that values break. One of the tensors that are `read` must be z."""
    eps = torch.finfo(values["z"].dtype).eps
    q, k, v, scores, pattern, z = (values[name].float().cpu() for name in POINTS)
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
    products = torch.einsum("bqhd,bkhd->bhqk", q, k)
    scale = (products * scores).sum() / products.square().sum()
    equal = partial(agree, tolerance=max(1e-4, 16 * eps))
    sums, joined = pattern.sum(-1), z.flatten(2)
    flat = [part.reshape(joined.shape) for part in read or () if part.numel() == joined.numel()]
    checks = {
        "scores are no multiple of q·k": equal(products * scale, scores),
        "rows of pattern do not sum to 1": equal(sums, torch.ones_like(sums)),
        "z is not pattern·v": equal(torch.einsum("bhqk,bkhd->bqhd", pattern, v), z),
        "no map reads z": read is None or any(equal(part.float().cpu(), joined) for part in flat),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)
