"""Parts of a block that the tensors of a run reveal: terms, norms and hidden layers.

1. A term is a module's output, times a factor, that was added to the stream (`summand`,
   `parallel`).
2. A norm is a module whose output is its input over a scale (`norm_of`).
3. A hidden layer is the output of a module without weights, times a gate or not, that a later
   linear map reads (`hidden_of`).
"""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hooks.base import HALF, agree, at_least_float32, is_close, is_same
from hooks.shared import hooks_disabled
from models.attached.probe import Call


@dataclass(frozen=True)
class Summand:
    """A value that is added to the stream: `factor` times the output of a module.

    The model may write into that output later.
    """

    module: nn.Module
    factor: float = 1.0
    is_overwritten: bool = False


def summand(
    before: Tensor, after: Tensor, calls: Iterable[Call], factors: Iterable[float] = (1.0,)
) -> tuple[Call, Summand] | None:
    """The call whose output, times one of the factors, was added to `before` to give `after`.

    The sum is repeated in the model's precision, so that the right call gives the same bits. Of
    several that do, the last is taken.
    """
    best = 4.0
    explained = None
    for factor in factors if before.shape == after.shape else ():
        for call in sorted(calls, key=lambda c: c.ended, reverse=True):
            output = call.output
            if output is None or output.shape != before.shape or output.dtype != before.dtype:
                continue
            term = output if factor == 1 else output * factor
            error = _error(after, before, term)
            if error < best and (error == 0 or _explains(term, after - before)):
                best = error
                explained = (call, Summand(call.module, factor, call.is_overwritten))
    return explained


def _explains(term: Tensor, change: Tensor) -> bool:
    """Return whether a term is most of a change.

    Beside a large stream, half precision takes any small term for the right one.
    """
    return bool((change - term).float().norm() <= 0.5 * change.float().norm())


def _error(after: Tensor, *terms: Tensor) -> float:
    """Return the largest error of a sum of terms, added in order, against `after`, in units of rounding."""
    error = 0.0
    for part in (slice(1), slice(None)):  # one number rules out most sums
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
    best = 4.0
    explained = list[tuple[Call, Summand]]()
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


@dataclass(frozen=True)
class TracedNorm:
    """A norm, `out = (x - mean) / scale * gain + bias` along the last axis.

    Attributes:
        module: the norm.
        centered: whether the mean is subtracted.
        eps: what is added to the mean square.
        bias: whether the module's bias is added.
    """

    module: nn.Module
    centered: bool
    eps: float
    bias: bool

    def scale(self, x: Tensor) -> Tensor:
        """The scale that the norm divides by, [batch, pos, 1], in float32 at least."""
        return (self._centered(x).square().mean(-1, keepdim=True) + self.eps).sqrt()

    def rescaled(self, output: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """The output if the scale were `after` instead of `before`."""
        float32 = at_least_float32(output)
        bias = at_least_float32(self.module.bias) if self.bias else 0.0  # type: ignore[arg-type]
        return ((float32 - bias) * (before / after) + bias).to(output.dtype)

    def _centered(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        return x - x.mean(-1, keepdim=True) if self.centered else x


def norm_of(call: Call) -> TracedNorm | None:
    """The norm that a module computed in this call, or None if it is none that we know."""
    module, output = call.module, call.output
    if output is None or len(call.inputs) != 1 or call.inputs[0].shape != output.shape:
        return None
    if any(True for _ in module.children()):
        return None  # a sublayer and its norm, of which half precision may hide the first
    x, output = _in_float32(call)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    for part in (weight, bias):
        # On `meta` if it is kept elsewhere until the module runs.
        if isinstance(part, Tensor) and (part.is_meta or part.shape != x.shape[-1:]):
            return None
    gains: list[Tensor | float] = [1.0]
    if isinstance(weight, Tensor):
        gains = [at_least_float32(weight.to(x.device)), 1 + at_least_float32(weight.to(x.device))]
    shift = at_least_float32(bias.to(x.device)) if isinstance(bias, Tensor) else 0.0
    # Families compute norms in float32, also of float64 streams.
    best = max(32 * torch.finfo(torch.float32).eps, 4 * torch.finfo(output.dtype).eps)
    norm = None
    if _hands_on(call, x, output):
        return None
    for centered, eps in itertools.product((True, False), _epsilons(module)):
        candidate = TracedNorm(module, centered, eps, isinstance(bias, Tensor))
        shape = candidate._centered(x) / candidate.scale(x)
        for gain in gains:
            normed = shape * gain + shift
            error = (normed - at_least_float32(output)).abs().max() / normed.abs().max().clamp(
                min=1e-30
            )
            if error < best:
                best = float(error.detach())
                norm = candidate
    return norm


def _in_float32(call: Call) -> tuple[Tensor, Tensor]:
    """Return the input and output of a module; in half precision, the output of a copy in float32.

    Rounding to half precision hides what a norm does.
    """
    x, output = call.inputs[0], call.output
    assert output is not None
    made = _made_by_copy(call.module, x.float()) if output.dtype in HALF else None
    if made is None or made.dtype != torch.float32:
        return x, output
    return x.float(), made


def _hands_on(call: Call, x: Tensor, output: Tensor) -> bool:
    """Return whether a module returns its input, as dropout does.

    A norm of a normed input returns it too, up to rounding. But if that input is doubled, its
    output stays the same.
    """
    if not is_close(output, x):
        return False
    twice = _made_by_copy(call.module, 2 * x)
    return twice is None or not agree(twice, output, 0.1)


def _made_by_copy(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a copy of a module on the CPU; None if the copy does not run.

    It has the precision of the input.
    """
    with contextlib.suppress(Exception):  # weights of a kind that is no number, for instance
        made = hooks_disabled(copy.deepcopy(module).cpu().to(x.dtype), x)
        if isinstance(made, Tensor):
            return made.detach()
    return None


def _epsilons(module: nn.Module) -> list[float]:
    """The module's own small numbers, and those that families write into their code."""
    small = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    return list(dict.fromkeys([*small, 1e-5, 1e-6, 0.0]))


class Hidden(NamedTuple):
    """The modules of a hidden layer.

    Attributes:
        act, post: the nonlinearity, and the map that reads what it makes.
        linear: the module whose output the nonlinearity's is multiplied with; None without a gate.
    """

    act: nn.Module
    post: nn.Module
    linear: nn.Module | None = None


def hidden_of(
    added: Call, calls: Sequence[Call], others: Sequence[Call], attention: nn.Module | None
) -> Hidden | None:
    """The hidden layer of an MLP; None if it does not show.

    Args:
        added: the call that gives what the MLP adds.
        calls: those of the block.
        others: the calls whose outputs other sublayers add.
        attention: the module that attends, which has no part in it.
    """
    began = max([call.ended for call in others if call.ended < added.began], default=-1)
    attending = [call for call in calls if call.module is attention]
    inside = [call for call in calls if began < call.began <= added.ended]
    for attends in attending:
        inside = [call for call in inside if not is_in(call, attends)]
    hidden = None
    for call in inside:
        if _is_nonlinearity(call, added):
            hidden = _around(call, inside, added) or hidden
    return hidden


def is_in(inner: Call, outer: Call) -> bool:
    """Return whether one call is part of another, or the same."""
    return outer.began <= inner.began and inner.ended <= outer.ended


def _is_nonlinearity(call: Call, added: Call) -> bool:
    """Return whether the module has no weights and computes something new of the same shape, but no norm."""
    x, y = call.inputs[0] if call.inputs else None, call.output
    if x is None or y is None or x.shape != y.shape:
        return False
    if added.output is None or x.shape[:2] != added.output.shape[:2]:
        return False
    plain = all(weight.numel() == 1 for weight in call.module.parameters())
    # What hands on its input, as dropout does, computes nothing that could be rounded.
    return plain and not is_same(x, y) and norm_of(call) is None


def _around(act: Call, calls: Sequence[Call], added: Call) -> Hidden | None:
    """The hidden layer of a nonlinearity."""
    y = act.output
    assert y is not None
    for last in calls:
        hidden = last.inputs[0] if last.inputs else None
        has_weights = any(True for _ in last.module.parameters())
        if hidden is None or last.began < act.ended or not has_weights or hidden.shape != y.shape:
            continue
        # Where others add to it, as experts may, these are not all neurons. Without them it is the
        # same tensor.
        if not any(is_same(last.output, whole) for whole in (added.output, *added.inputs)):
            continue
        linear = None
        for other in calls:
            u = other.output
            is_factor = u is not None and u.shape == y.shape and other is not act
            if is_factor and u is not None and is_close(y * u, hidden) and not is_same(y, hidden):
                linear = other.module
        return Hidden(act.module, last.module, linear)
    return None
