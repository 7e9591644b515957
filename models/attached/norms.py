"""Norms of an attached model: what they divide by, found from their numbers."""

import contextlib
import copy
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hooks.shared import hooks_disabled
from models.attached.probe import Call
from models.attached.sums import HALF, agree, is_close
from models.norm import widened


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
        float32 = widened(output)
        bias = widened(self.module.bias) if self.bias else 0.0  # type: ignore[arg-type]
        return ((float32 - bias) * (before / after) + bias).to(output.dtype)

    def _centered(self, x: Tensor) -> Tensor:
        x = widened(x)
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
        gains = [widened(weight.to(x.device)), 1 + widened(weight.to(x.device))]
    shift = widened(bias.to(x.device)) if isinstance(bias, Tensor) else 0.0
    # Families compute norms in float32, also of float64 streams.
    best, norm = max(32 * torch.finfo(torch.float32).eps, 4 * torch.finfo(output.dtype).eps), None
    if _hands_on(call, x, output):
        return None
    for centered, eps in itertools.product((True, False), _epsilons(module)):
        candidate = TracedNorm(module, centered, eps, isinstance(bias, Tensor))
        shape = candidate._centered(x) / candidate.scale(x)
        for gain in gains:
            normed = shape * gain + shift
            error = (normed - widened(output)).abs().max() / normed.abs().max().clamp(min=1e-30)
            if error < best:
                best, norm = float(error.detach()), candidate
    return norm


def _in_float32(call: Call) -> tuple[Tensor, Tensor]:
    """What a module read and gave. Of half precision it is what a copy in float32 gives, as rounding hides what a norm does."""
    x, output = call.inputs[0], call.output
    assert output is not None
    made = _made_by_copy(call.module, x.float()) if output.dtype in HALF else None
    if made is None or made.dtype != torch.float32:
        return x, output
    return x.float(), made


def _hands_on(call: Call, x: Tensor, output: Tensor) -> bool:
    """Whether a module returns its input, as dropout does.

    A norm of a normed input returns it too, up to rounding. But if that input is doubled, its output stays the same.
    """
    if not is_close(output, x):
        return False
    twice = _made_by_copy(call.module, 2 * x)
    return twice is None or not agree(twice, output, 0.1)


def _made_by_copy(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a copy of a module gives on the CPU, in the precision of its input; None if that does not run."""
    with contextlib.suppress(Exception):  # weights of a kind that is no number, for instance
        made = hooks_disabled(copy.deepcopy(module).cpu().to(x.dtype), x)
        if isinstance(made, Tensor):
            return made.detach()
    return None


def _epsilons(module: nn.Module) -> list[float]:
    """The module's own small numbers, and those that families write into their code."""
    small = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    return list(dict.fromkeys([*small, 1e-5, 1e-6, 0.0]))
