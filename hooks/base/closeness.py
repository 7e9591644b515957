"""Comparisons of tensors, exactly or up to rounding, and the limits of rounding.

An operation rounds its result by up to a fraction `eps` of its size: 2.2e-16 in float64, 1.2e-7 in
float32, 9.8e-4 in float16 and 7.8e-3 in bfloat16. Two computations of the same value may differ by
a limit that depends on the operations between them:

| between the two values | they may differ by | of | in |
| --- | --- | --- | --- |
| no operation: a tensor was passed on or copied | 0 | | `is_same` |
| a few operations at each place | 8 eps | the sum of all terms' sizes at the place | `is_close` |
| a few operations, some of them in float32 | 8 eps of float32 | the largest | `float32_rounding` |
| a sum of a few terms, in the same order | 4 eps | the sum of all sizes | `sum_error` |
| a norm, in a different way | 32 eps of float32, at least 4 eps | the largest | `norm_rounding` |
| a block or embeddings, other kernels | 4 eps, at least 1e-5 | number + median | `are_reproduced` |
| attention or an MLP of a block | 16 eps, at least 1e-5 | number + median | `are_reproduced` |
| a module, with different kernels | 16 eps, or the caller's limit | the largest | `agree` |
| a sum of many terms, in a different order | 1000 eps, at most 0.03 | the largest | `is_rounding` |
| a difference of two means | 100 eps | the mean size | `is_cancelled` |
| n additions to the residual stream | 4 eps √n + 1e-4 | the largest | `stream_rounding` |
| a metric, in another batch | 10 √eps, or 16 eps of the model | 1 + number | `is_same_metric` |
| a metric of logits, in another run | 8 eps | 1 + number | `are_metric_rounding` |
| a module or a model, by different code | 1e-4, at least 16 eps | the largest | `code_rounding` |
| logits, in a different run | 1e-3, at least 16 eps | the largest | `run_rounding` |
| logits, in a different batch | 1e-3, or 0.05 in half precision | the largest | `logits_rounding` |
| numbers of a file in half precision | eps of bfloat16 | the largest | `file_rounding` |
| a whole model, in a different way | 1e-10, 1e-4, 1e-2, 1e-1 (below) | the largest | `model_gap` |

The limit is the second column times the third. In the third column, "number" is the absolute value
of the number that is compared, and "median" and "the largest" are the median and the largest
absolute value of all numbers. The limits of a whole model are for float64, float32, float16 and
bfloat16.

If a number may be a sum of larger terms that cancel, its limit is a fraction of the largest number.
The error of a sum grows with the size of its terms, even if the sum is small.
"""

import math
import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hooks.base._torch import FakeTensor
from hooks.base.transfer import to_device
from hooks.base.widening import HALF, at_least_float32

WRONG_SUM = 4.0
"""The least result of `sum_error` that is more than rounding."""

_MODEL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def is_same(one: Shaped[Tensor, "*axes"] | None, other: Shaped[Tensor, "*others"] | None) -> bool:
    """Return whether two tensors are equal in shape, dtype and every number; False if one is None.

    Use this to check whether a module read exactly the output of another module. No arithmetic lies
    between the two, so rounding cannot change the result.

    >>> is_same(torch.ones(2), torch.ones(2)), is_same(torch.ones(2), torch.ones(2).double())
    (True, False)
    """
    if one is None or other is None or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)


def is_close(
    value: Shaped[Tensor, "*axes"], expected: Shaped[Tensor, "*others"], *terms: Tensor
) -> bool:
    """Return whether a value equals the expected value up to rounding at each place.

    The limit is the rounding of a few operations.

    Args:
        value: the value.
        expected: the expected value, whose dtype determines the rounding. A value with a different
            shape is not close.
        terms: the terms, if the expected value is a sum. The terms may be larger than the sum, and
            so may the rounding of the terms.

    >>> value = torch.tensor([1.0])
    >>> is_close(value, torch.tensor([1.0 + 5e-7])), is_close(value, torch.tensor([1.1]))
    (True, False)
    """
    if value.shape != expected.shape:
        return False
    sizes = [expected.abs(), *(term.abs() for term in terms)]
    allowed = _operations_rounding(expected.dtype) * torch.stack(sizes).sum(0)
    return bool(((value.double() - expected.double()).abs() <= allowed.double()).all())


def sum_error(total: Shaped[Tensor, "*axes"], *terms: Tensor) -> float:
    """Return the largest error of a sum of terms, in units of rounding.

    A unit is eps times the sum of the absolute values of all terms and of the total. The terms are
    added in order, in their precision. A result of `WRONG_SUM` or more may be smaller than the
    largest error.

    Args:
        total: the sum, of at least two axes. Its dtype determines the rounding.
        terms: the terms, of the shape of the sum.

    >>> one, other = torch.ones(2, 3), torch.full((2, 3), 0.1)
    >>> sum_error(one + other, one, other), sum_error(one, one, other) > WRONG_SUM
    (0.0, True)
    """
    error = 0.0
    # Most sums are already wrong in a single number, so check one number before all.
    for part in (slice(1), slice(None)):
        few = [term[part, part] for term in (*terms, total)]
        size = sum((term.abs() for term in few), torch.zeros_like(few[0]))
        limits = torch.finfo(total.dtype)
        roundings = (size * limits.eps).clamp(min=limits.tiny)
        error = float(((reduce(operator.add, few[:-1]) - few[-1]).abs() / roundings).max())
        if error >= WRONG_SUM:
            break
    return error


def agree(
    one: Shaped[Tensor, "*axes"] | None,
    other: Shaped[Tensor, "*others"] | None,
    tolerance: float = 1e-5,
) -> bool:
    """Return whether two values differ by at most a fraction of the largest number.

    The values are two computations of the output of one module.

    Args:
        one, other: the values; the largest number is the largest absolute value in `other`. Values
            with different shapes do not agree. None never agrees.
        tolerance: the fraction. The limit is never below the rounding of a module.

    >>> one = torch.tensor([1e-6, 1.0])
    >>> agree(one, torch.tensor([0.0, 1.0])), agree(one, torch.tensor([1e-6, 1.1]))
    (True, False)
    """
    if one is None or other is None or one.shape != other.shape:
        return False
    share = max(tolerance, module_rounding(other.dtype))
    return bool((one - other).abs().max() <= share * other.abs().max())


class TwoRuns(NamedTuple):
    """Some numbers of each tensor in a block's output, in order, in two runs of the block.

    Attributes:
        ours, theirs: the numbers of both runs. Tensors without numbers, such as tensors on the meta
            device, agree if their shapes and dtypes agree.
        precision: the allowed difference, as a fraction of the number plus the median; see
            `block_rounding` and `part_rounding`.
    """

    ours: Sequence[Tensor]
    theirs: Sequence[Tensor]
    precision: float


def are_reproduced(blocks: Sequence[TwoRuns]) -> list[bool]:
    """Return for each block whether its numbers are the same in both runs, up to rounding.

    NaN agrees with NaN. All blocks are compared together, so the host waits once for each device.

    >>> first, second = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])
    >>> are_reproduced([TwoRuns([first], [second], 1e-5), TwoRuns([first], [first], 1e-5)])
    [False, True]
    """
    agrees = [_is_alike(block) for block in blocks]
    # Numbers of one shape and dtype are compared in one stack.
    stacks: dict[tuple[Any, ...], list[tuple[int, Tensor, Tensor]]] = {}
    for number, (ours, theirs, precision) in enumerate(blocks):
        for first, second in zip(ours, theirs, strict=False):
            has_numbers = not (first.is_meta or isinstance(first, FakeTensor))
            if agrees[number] and has_numbers and first.numel():
                key = first.shape, first.dtype, first.device, precision
                stacks.setdefault(key, []).append((number, first, second))
    verdicts: dict[torch.device, list[Tensor]] = {}
    numbers: dict[torch.device, list[int]] = {}
    for (*_, device, precision), members in stacks.items():
        places, ours, theirs = zip(*members, strict=True)
        kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
        # Autocast of the caller would change the dtype of the stacks.
        with torch.autocast(kind, enabled=False):
            verdict = _numbers_agree(torch.stack([*ours, *theirs]), precision)
        verdicts.setdefault(device, []).append(verdict)
        numbers.setdefault(device, []).extend(places)
    for device, parts in verdicts.items():
        verdict_of_all = parts[0] if len(parts) == 1 else torch.cat(parts)
        for number, verdict in zip(numbers[device], verdict_of_all.tolist(), strict=True):
            agrees[number] &= verdict
    return agrees


def _is_alike(block: TwoRuns) -> bool:
    """Return whether the tensors of two runs agree in number, shapes and dtypes."""
    ours = [(part.shape, part.dtype) for part in block.ours]
    theirs = [(part.shape, part.dtype) for part in block.theirs]
    return ours == theirs


def _numbers_agree(
    runs: Shaped[Tensor, "two_blocks *axes"], precision: float
) -> Bool[Tensor, " block"]:
    """Return for each block whether its numbers agree, as in `are_reproduced`.

    Args:
        runs: the numbers of all blocks in our run, followed by their numbers in the other run.
        precision: the allowed difference; see `TwoRuns`.
    """
    # One stack of both runs starts half as many kernels on a device as a stack of each run.
    both = runs.reshape(2, len(runs) // 2, -1).to(
        torch.complex128 if runs.is_complex() else torch.float64
    )
    ours, theirs = both
    our_sizes, their_sizes = both.abs()
    # The median is a typical number. The largest number is not: in some models a few numbers are a
    # thousand times larger than the rest.
    typical = their_sizes.nan_to_num(0, 0, 0).median(1, keepdim=True).values
    # If a number is infinite, so is the gap, unless both numbers are equal.
    is_near = (theirs - ours).abs() < precision * (typical + our_sizes)
    is_nan = both.isnan()
    return (is_near | (ours == theirs) | (is_nan[0] & is_nan[1])).all(1)


def is_rounding(
    one: Float[Tensor, "*axes"], other: Float[Tensor, "*axes"], dtype: torch.dtype | None = None
) -> Bool[Tensor, "*axes"]:
    """Return a mask of the numbers that differ by at most `sum_rounding` of the largest number.

    NaN equals NaN.

    Args:
        one, other: the numbers.
        dtype: the dtype of the computation. Default: the dtype of `other`.

    >>> other = torch.tensor([1.01, 1001.0, torch.inf, torch.nan])
    >>> is_rounding(torch.tensor([1.0, 1000.0, torch.inf, torch.nan]), other)
    tensor([ True, False,  True,  True])
    """
    other = to_device(other, one.device)
    size = sum_rounding(dtype or other.dtype) * other.nan_to_num(posinf=0, neginf=0).abs().max()
    return ((one - other).abs() <= size) | (one == other) | (one.isnan() & other.isnan())


def is_same_metric(
    one: Float[Tensor, " example"] | None,
    other: Float[Tensor, " example"] | None,
    model_dtype: torch.dtype,
) -> bool:
    """Return whether two metrics of the same texts, in two batches, agree up to rounding.

    Args:
        one, other: the metrics. None never agrees, and NaN never agrees.
        model_dtype: the dtype of the model. Two runs of one text in half precision differ by more
            than the rounding of the metric.

    >>> metric = torch.tensor([0.0, 1.0])
    >>> is_same_metric(metric, metric + 0.003, torch.float32)
    True
    >>> is_same_metric(metric, metric + 0.01, torch.float32)
    False
    """
    if one is None or other is None:
        return False
    share = max(10 * torch.finfo(other.dtype).eps ** 0.5, module_rounding(model_dtype))
    return torch.allclose(one, other, rtol=share, atol=share)


def is_cancelled(
    difference: Float[Tensor, "*axes"], size: Float[Tensor, "*axes"]
) -> Bool[Tensor, "*axes"]:
    """Return a mask that is True where a difference may be nothing but the rounding of its terms.

    Args:
        difference: differences of two numbers, or of two means.
        size: the absolute values of the two numbers, or their mean absolute values.

    >>> is_cancelled(torch.tensor([1e-6, 1e-3]), torch.tensor([1.0, 1.0]))
    tensor([ True, False])
    """
    return difference.abs() <= 100 * torch.finfo(difference.dtype).eps * size


def model_gap(
    actual: Float[Tensor, "*axes"], expected: Float[Tensor, "*axes"], dtype: torch.dtype
) -> tuple[float, float]:
    """Return the largest difference, and the limit of rounding in a whole model.

    Args:
        actual, expected: values of a model that were computed in two ways.
        dtype: the dtype of the model.
    """
    actual, expected = at_least_float32(actual), at_least_float32(expected)
    return (actual - expected).abs().max().item(), _MODEL[dtype] * expected.abs().max().item()


def are_metric_rounding(
    differences: Float[Tensor, "place example"], metric: Float[Tensor, " example"]
) -> Bool[Tensor, " place"]:
    """Return whether all differences of a metric are at most its rounding, at each place.

    The metric is computed from logits, whose rounding is at least the rounding of 1. A difference
    of this size cannot be distinguished from 0.

    Args:
        differences: the metric in other runs of the same texts, minus the metric.
        metric: the metric of each example.

    >>> are_metric_rounding(torch.tensor([[1e-6, -1e-6], [1.0, -1.0]]), torch.tensor([9.0, 10.0]))
    tensor([ True, False])
    """
    limits = _operations_rounding(differences.dtype) * (1 + metric.abs())
    return (differences.abs() <= limits).all(-1)


def _operations_rounding(dtype: torch.dtype) -> float:
    """Return the limit of rounding for a few operations, as a fraction of the terms' sizes."""
    return 8 * torch.finfo(dtype).eps


def float32_rounding() -> float:
    """Return the limit of rounding for a few operations in float32, in any dtype.

    The limit is a fraction of the largest number. Use it for numbers in float64 that were computed
    from numbers in float32, such as means.
    """
    return _operations_rounding(torch.float32)


def norm_rounding(dtype: torch.dtype) -> float:
    """Return the limit of rounding for the output of a norm that is computed in a different way.

    The limit is a fraction of the largest number. Families compute norms in float32, also for
    streams in float64.
    """
    return max(32 * torch.finfo(torch.float32).eps, 4 * torch.finfo(dtype).eps)


def module_rounding(dtype: torch.dtype) -> float:
    """Return the limit of rounding for a module with different kernels.

    The limit is a fraction of the largest number.
    """
    return 16 * torch.finfo(dtype).eps


def block_rounding(*dtypes: torch.dtype) -> float:
    """Return the limit of rounding for a block or embeddings, with other kernels.

    The limit for a number is this fraction of the number plus the median of all numbers.
    """
    return max(1e-5, *(4 * torch.finfo(dtype).eps for dtype in dtypes))


def part_rounding(*dtypes: torch.dtype) -> float:
    """Return the limit of rounding for a part of a block, such as attention, in these dtypes.

    The output of a part is smaller than the residual stream that the part is added to, so the limit
    is a larger fraction than for a block.
    """
    return max(1e-5, *(16 * torch.finfo(dtype).eps for dtype in dtypes))


def sum_rounding(dtype: torch.dtype) -> float:
    """Return how far a sum of many numbers may change by rounding, if their order changes.

    The limit is a fraction of the largest number.
    """
    return min(0.03, 1000 * torch.finfo(dtype).eps)


def stream_rounding(dtype: torch.dtype, n: int) -> float:
    """Return the limit of rounding between a residual stream and the sum of all its parts.

    The limit is for a stream after `n` additions, and it is a fraction of the largest number. The
    stream is rounded after each addition, so errors grow as the square root of `n`. For every
    dtype, the limit is at least 1e-4: some norms compute in float32 even if the stream has more
    digits.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(n) + 1e-4


def code_rounding(dtype: torch.dtype) -> float:
    """Return how far two implementations of the same module or model may differ by rounding.

    The limit is a fraction of the largest number. A wrong part changes the numbers by far more.
    """
    return max(1e-4, module_rounding(dtype))


def run_rounding(dtype: torch.dtype) -> float:
    """Return the limit of rounding for the logits of the same texts in a different run.

    The run may have hooks, which use different kernels, or more arguments, such as positions. The
    limit is a fraction of the largest logit.
    """
    return max(1e-3, module_rounding(dtype))


def file_rounding() -> float:
    """Return the limit of rounding for numbers that a file may contain in half precision.

    The limit is a fraction of the largest number.
    """
    return torch.finfo(torch.bfloat16).eps


def logits_rounding(dtype: torch.dtype) -> float:
    """Return the limit of rounding for the logits of a text in a different batch.

    The limit is a fraction of the largest logit.
    """
    return 0.05 if dtype in HALF else 1e-3
