"""Conversions of numbers to at least float32.

Sums and norms in half precision would round after each step. They are computed in float32 and
rounded once, at the end, as PyTorch's own kernels do. Numbers in float64 are not converted.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

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


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype if it is at least as precise as float32, and float32 otherwise.

    >>> wide_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.promote_types(dtype, torch.float32)
