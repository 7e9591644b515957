"""Attention by code of its own: the scale of its product, and whether its points hold what they promise."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hooks import ActivationCache
from models.attached.probe import kind_of
from models.attached.sums import agree

POINTS = ("q", "k", "v", "scores", "pattern", "z")


def slope_of(forward: Callable[..., Any], args: Any, kwargs: Any) -> float:
    """The factor that a module's forward puts on the product of queries and keys; NaN if that is not one number."""
    try:
        with torch.enable_grad(), _Slope():
            forward(*args, **kwargs)
    except _Found as found:
        return float(found.args[0])
    return math.nan


class _Found(BaseException):
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
            _Found: at the softmax, with the derivative if it is one number.
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
        raise _Found(float(slopes[0]) if same else math.nan)


def problem_of(
    cache: ActivationCache, layer: int, read: Sequence[Tensor] | None = None
) -> str | None:
    """The first promise of a layer's points that their values break; None if there is none.

    Args:
        cache: the values of all its points in one run.
        layer: the layer.
        read: what modules read after that in the same run. One must read z.
    """
    values = [cache[f"blocks.{layer}.attn.{name}"] for name in POINTS]
    eps = torch.finfo(values[-1].dtype).eps
    q, k, v, scores, pattern, z = (value.float().cpu() for value in values)
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
    products = torch.einsum("bqhd,bkhd->bhqk", q, k)
    scale = (products * scores).sum() / products.square().sum()
    equal = partial(agree, tolerance=max(1e-4, 16 * eps))
    sums, joined = pattern.sum(-1), z.flatten(2)
    checks = {
        "scores are no multiple of q·k": equal(products * scale, scores),
        "rows of pattern do not sum to 1": equal(sums, torch.ones_like(sums)),
        "z is not pattern·v": equal(torch.einsum("bhqk,bkhd->bqhd", pattern, v), z),
        "no map reads z": read is None or any(equal(part.float(), joined) for part in read),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)
