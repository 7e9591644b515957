"""Comparisons of tensors, bit by bit or up to rounding, and how large rounding may be.

An operation rounds its result by up to a share `eps` of its size: 2.2e-16 in float64, 1.2e-7 in float32, 9.8e-4 in float16 and
7.8e-3 in bfloat16. Two computations of one value may differ by more, the more operations stand between them:

| between the two values | they may differ by | of | in |
| --- | --- | --- | --- |
| nothing: a tensor was passed on or copied | 0 | | `is_same` |
| a few operations at each place | 8 eps | the sizes of all terms at that place | `is_close` |
| a block, by other kernels | 4 eps, at least 1e-5 | the number and the median number | `is_reproduced` |
| a module, by other kernels | 16 eps, or more if the caller says | the largest number | `agree` |
| a sum of many terms, in another order | 1000 eps, at most 0.03 | the largest number | `is_rounding` |
| a difference of two means | 100 eps | the mean size | `is_cancelled` |
| n additions to the residual stream | 4 eps √n + 1e-4 | the largest number | `stream_rounding` |
| a metric, in another batch | 10 √eps, or 16 eps of the model's dtype | 1 + the number | `metric_rounding` |
| logits, in another batch | 1e-3, or 0.05 in half precision | the largest number | `logits_rounding` |
| a whole model, by another way | 1e-10, 1e-4, 1e-2, 1e-1 in float64, float32, float16, bfloat16 | the largest number | `model_gap` |

Limits are shares of the largest number where a number is a sum of larger ones that cancel, so that its own size says nothing.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hooks.base._torch import FakeTensor
from hooks.base.transfer import to_device
from hooks.base.widening import HALF, at_least_float32

_MODEL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def is_same(one: Shaped[Tensor, "*axes"] | None, other: Shaped[Tensor, "*others"] | None) -> bool:
    """Return whether two tensors are equal in shape, dtype and every number; False if one is None.

    Use this to ask whether a module read the very tensor that another module gave. No arithmetic stands between the two, so
    rounding cannot change the answer.

    >>> is_same(torch.ones(2), torch.ones(2)), is_same(torch.ones(2), torch.ones(2).double())
    (True, False)
    """
    if one is None or other is None or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)


def is_close(
    value: Shaped[Tensor, "*axes"], expected: Shaped[Tensor, "*others"], *terms: Tensor
) -> bool:
    """Return whether a value is the expected one up to the rounding of a few operations at each place.

    Args:
        value: the value.
        expected: the expected value, whose dtype says how large rounding is. A value of another shape is not close.
        terms: the terms of a sum that is expected. They may be larger than the sum, and so may their rounding.

    >>> is_close(torch.tensor([1.0]), torch.tensor([1.0 + 5e-7])), is_close(torch.tensor([1.0]), torch.tensor([1.1]))
    (True, False)
    """
    if value.shape != expected.shape:
        return False
    sizes = [expected.abs(), *(term.abs() for term in terms)]
    allowed = 8 * torch.finfo(expected.dtype).eps * torch.stack(sizes).sum(0)
    return bool(((value.double() - expected.double()).abs() <= allowed.double()).all())


def agree(
    one: Shaped[Tensor, "*axes"] | None,
    other: Shaped[Tensor, "*others"] | None,
    tolerance: float = 1e-5,
) -> bool:
    """Return whether two values of a module differ by no more than a share of the largest number.

    Args:
        one, other: the values. A value of another shape, or None, does not agree.
        tolerance: the share. If the rounding of a module is more, that counts.

    >>> one = torch.tensor([1e-6, 1.0])
    >>> agree(one, torch.tensor([0.0, 1.0])), agree(one, torch.tensor([1e-6, 1.1]))
    (True, False)
    """
    if one is None or other is None or one.shape != other.shape:
        return False
    share = max(tolerance, module_rounding(other.dtype))
    return bool((one - other).abs().max() <= share * other.abs().max())


def is_reproduced(ours: Sequence[Tensor], theirs: Sequence[Tensor], precision: float) -> bool:
    """Return whether the numbers of a block are the same in another run, up to rounding. NaN agrees with NaN.

    Args:
        ours, theirs: some numbers of each tensor that the block gave, in order. Tensors without numbers, such as those
            on the meta device, agree if shape and dtype do.
        precision: how far they may differ, as a share; see `block_rounding`.

    >>> is_reproduced([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.0001])], 1e-5)
    False
    """
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(_numbers_agree(one, other, precision) for one, other in pairs)


def _numbers_agree(ours: Tensor, theirs: Tensor, precision: float) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    # Without numbers there is nothing more to compare.
    if ours.is_meta or isinstance(ours, FakeTensor) or not ours.numel():
        return True
    dtype = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    # The median, because in some models a few values are a thousand times larger than the others.
    typical = theirs.abs().nan_to_num(0, 0, 0).median().item()
    return torch.allclose(theirs, ours, rtol=precision, atol=precision * typical, equal_nan=True)


def is_rounding(
    one: Float[Tensor, "*axes"], other: Float[Tensor, "*axes"], dtype: torch.dtype | None = None
) -> Bool[Tensor, "*axes"]:
    """Return where numbers differ by no more than `sum_rounding` of the largest. NaN and NaN do not differ.

    Args:
        one, other: the numbers.
        dtype: the dtype in which they were computed; None for the dtype of `other`.

    >>> other = torch.tensor([1.01, 1001.0, torch.inf, torch.nan])
    >>> is_rounding(torch.tensor([1.0, 1000.0, torch.inf, torch.nan]), other)
    tensor([ True, False,  True,  True])
    """
    other = to_device(other, one.device)
    size = sum_rounding(dtype or other.dtype) * other.nan_to_num(posinf=0, neginf=0).abs().max()
    return ((one - other).abs() <= size) | (one == other) | (one.isnan() & other.isnan())


def is_cancelled(
    difference: Float[Tensor, "*axes"], size: Float[Tensor, "*axes"]
) -> Bool[Tensor, "*axes"]:
    """Return where a difference of two numbers, or of their means, is no more than rounding of their size.

    >>> is_cancelled(torch.tensor([1e-6, 1e-3]), torch.tensor([1.0, 1.0]))
    tensor([ True, False])
    """
    return difference.abs() <= 100 * torch.finfo(difference.dtype).eps * size


def model_gap(
    actual: Float[Tensor, "*axes"], expected: Float[Tensor, "*axes"], dtype: torch.dtype
) -> tuple[float, float]:
    """Return the largest difference, and the largest one that rounding in a whole model may cause.

    Args:
        actual, expected: values of a model that were computed in two ways.
        dtype: the dtype of the model.
    """
    actual, expected = at_least_float32(actual), at_least_float32(expected)
    return (actual - expected).abs().max().item(), _MODEL[dtype] * expected.abs().max().item()


def module_rounding(dtype: torch.dtype) -> float:
    """The share of the largest number by which a module may differ if other kernels compute it."""
    return 16 * torch.finfo(dtype).eps


def block_rounding(*dtypes: torch.dtype) -> float:
    """The share of a typical number by which a block may differ if other kernels compute it in these dtypes."""
    return max(1e-5, *(4 * torch.finfo(dtype).eps for dtype in dtypes))


def sum_rounding(dtype: torch.dtype) -> float:
    """The share of the largest number by which sums of many terms may differ if they are added in another order."""
    return min(0.03, 1000 * torch.finfo(dtype).eps)


def stream_rounding(dtype: torch.dtype, n: int) -> float:
    """The share of the largest number by which a sum of all parts may differ from a stream to which `n` were added.

    The stream is rounded after each addition, so errors grow as the square root of their number. Besides, float32 is allowed
    for, because some norms always compute in it.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(n) + 1e-4


def metric_rounding(dtype: torch.dtype, model_dtype: torch.dtype) -> float:
    """The share by which the metric of a text may differ in another batch.

    Args:
        dtype: the dtype of the metric.
        model_dtype: the dtype of the model. Two runs of one text in half precision differ more than their metric is rounded.
    """
    return max(10 * torch.finfo(dtype).eps ** 0.5, module_rounding(model_dtype))


def logits_rounding(dtype: torch.dtype) -> float:
    """The share of the largest logit by which logits of a text may differ in another batch."""
    return 0.05 if dtype in HALF else 1e-3
