"""Sums of the residual stream: which module's output was added to it."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from models.attached.probe import Call

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Summand:
    """A value that is added to the stream: `factor` times the output of a module.

    The model may write into that output later.
    """

    module: nn.Module
    factor: float = 1.0
    is_overwritten: bool = False


def is_close(value: Tensor, wanted: Tensor, *terms: Tensor) -> bool:
    """Whether two tensors are equal up to rounding in each place, also that of the `terms` of a sum."""
    if value.shape != wanted.shape:
        return False
    sizes = [wanted.abs(), *(term.abs() for term in terms)]
    allowed = 8 * torch.finfo(wanted.dtype).eps * torch.stack(sizes).sum(0)
    return bool(((value.double() - wanted.double()).abs() <= allowed.double()).all())


def agree(one: Tensor | None, other: Tensor | None, tolerance: float = 1e-5) -> bool:
    """Whether two tensors are equal up to this share of the largest number, or up to rounding if that is more."""
    if one is None or other is None or one.shape != other.shape:
        return False
    share = max(tolerance, 16 * torch.finfo(other.dtype).eps)
    return bool((one - other).abs().max() <= share * other.abs().max())


def rolled(value: Tensor, point: object) -> Tensor:
    """An edit by which all numbers along the last axis move on by one."""
    return value.roll(1, -1)


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal in shape, type and every number.

    This asks whether a module read the very tensor that another one gave. No arithmetic stands between, so rounding cannot
    change the answer. Where some does, `is_close` and `agree` compare.
    """
    if one is None or other is None or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)


def summand(
    before: Tensor, after: Tensor, calls: Iterable[Call], factors: Iterable[float] = (1.0,)
) -> tuple[Call, Summand] | None:
    """The call whose output, times one of the factors, was added to `before` to give `after`.

    The sum is repeated in the model's precision, so that the right call gives the same bits. Of several that
    do, the last is taken.
    """
    best, explained = 4.0, None
    for factor in factors if before.shape == after.shape else ():
        for call in sorted(calls, key=lambda c: c.ended, reverse=True):
            output = call.output
            if output is None or output.shape != before.shape or output.dtype != before.dtype:
                continue
            term = output if factor == 1 else output * factor
            error = _error(after, before, term)
            if error < best and (error == 0 or _explains(term, after - before)):
                best, explained = error, (call, Summand(call.module, factor, call.is_overwritten))
    return explained


def _explains(term: Tensor, change: Tensor) -> bool:
    """Whether a term is most of a change. Beside a large stream, half precision takes any small term for the right one."""
    return bool((change - term).float().norm() <= 0.5 * change.float().norm())


def _error(after: Tensor, *terms: Tensor) -> float:
    """Return the largest error of a sum of terms, added in order, against `after`, in units of rounding."""
    error = 0.0
    for part in (slice(1), slice(None)):  # most are wrong at once
        few = [term[part, part] for term in (*terms, after)]
        size = sum((term.abs() for term in few), torch.zeros_like(few[0]))
        roundings = (size * torch.finfo(after.dtype).eps).clamp(min=torch.finfo(after.dtype).tiny)
        error = float(((reduce(torch.add, few[:-1]) - few[-1]).abs() / roundings).max())
        if error > 4:
            break
    return error


def factors_of(*owners: Any) -> list[float]:
    """The numbers that modules and configs hold, which a model may multiply with."""
    held = [v for owner in owners for v in vars(owner).values() if isinstance(v, float)]
    return [value for value in dict.fromkeys(held) if abs(value) > 1e-3 and value != 1]


def parallel(
    pre: Tensor, post: Tensor, calls: Iterable[Call], factors: Sequence[float] = (1.0,)
) -> list[tuple[Call, Summand]]:
    """The two calls whose outputs, each times one of the factors, are added to the stream together, in order."""
    latest = sorted(calls, key=lambda call: call.ended, reverse=True)
    fitting = [
        c for c in latest if c.output is not None and c.output.shape == pre.shape == post.shape
    ]
    best, explained = 4.0, list[tuple[Call, Summand]]()
    for second, first in itertools.combinations(fitting, 2):
        if first.ended >= second.began:
            continue
        pair = first, second
        outputs = [call.output for call in pair if call.output is not None]
        scales = _factors(outputs, post - pre, factors)
        terms = [x if scale == 1 else x * scale for x, scale in zip(outputs, scales, strict=True)]
        error = min(_error(post, *order) for order in itertools.permutations([*terms, pre]))
        if error < best:
            best = error
            explained = [
                (call, Summand(call.module, scale, call.is_overwritten))
                for call, scale in zip(pair, scales, strict=True)
            ]
    return explained


def _factors(terms: Sequence[Tensor], change: Tensor, factors: Sequence[float]) -> list[float]:
    """The factors that are nearest to those with which terms come closest to a change."""
    if len(factors) == 1:
        return [factors[0]] * len(terms)
    columns = torch.stack([term.double().flatten() for term in terms], 1)
    solution = torch.linalg.lstsq(columns, change.double().flatten()[:, None]).solution
    return [min(factors, key=lambda f: abs(f - best)) for best in solution[:, 0].tolist()]
