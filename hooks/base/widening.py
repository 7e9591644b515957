"""Conversions of numbers to at least float32.

Sums and norms in half precision would round after each step. They are computed in float32 and
rounded once, at the end, as PyTorch's own kernels do. Numbers in float64 are not converted.
"""

import copy
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from hooks.base.nested import mapped

HALF = (torch.bfloat16, torch.float16)
"""The dtypes of half precision."""


def at_least_float32(values: Shaped[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return values in float32 if they are integers or in half precision.

    Other dtypes do not change.

    >>> at_least_float32(torch.tensor([1, 2])).dtype
    torch.float32
    >>> at_least_float32(torch.tensor([0.5]).double()).dtype
    torch.float64
    """
    return values.to(wide_dtype(values.dtype))


def widened(value: Any) -> Any:
    """Return nested containers with each tensor in half precision in float32.

    >>> widened({"x": torch.tensor([0.5]).half(), "n": torch.tensor([1])})
    {'x': tensor([0.5000]), 'n': tensor([1])}
    """

    def changed(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALF else leaf

    return mapped(value, changed)


def widened_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module in half precision, with its weights in float32."""
    return copy.deepcopy(module).float()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype if it is at least as precise as float32, and float32 otherwise.

    >>> wide_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.promote_types(dtype, torch.float32)
