"""Points of experts: the router's logits, which experts it chose, their weights, and what each of them gives.

1. While somebody listens at `router`, the forward of the module that computes the logits runs under a mode that passes them
   through the point.
2. `routing` has the weights of all experts, 0 where one was not chosen. What an edit weighs besides is appended to the chosen.
3. `experts` comes from one more call, with weights 1. What an edit changes there is added to the output, times its weight.
4. Experts that read copies of all vectors have no numbers and weights: `experts` has what each of them gives.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hooks import HookPoint
from hooks.shared import Wire, is_listened_to
from models.attached.experts import Experts
from models.attached.wires import Computed, Replaced, fire, texts_read


class ExpertPoints(nn.Module):
    """The points of a block's experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.n = experts.n
        if experts.router is not None:
            meaning = "the router's logits, before anything is done with them"
            self.router = HookPoint("batch pos expert", meaning)
            experts.router.forward = RouterForward(self.router, experts.router, experts.n)
        if experts.reads_copies and experts.has_outputs:
            meaning = "what each expert adds, 0 where it was not chosen"
            self.experts = HookPoint("batch pos expert d_model", meaning)
        elif experts.module is not None and not experts.reads_copies:
            meaning = "weights of the experts, 0 where one was not chosen"
            self.routing = HookPoint("batch pos expert", meaning)
            self.chosen = HookPoint("batch pos choice", "numbers of the chosen experts")
            if experts.has_outputs:
                meaning = "what each chosen expert adds, before its weight"
                self.experts = HookPoint("batch pos choice d_model", meaning)
        if experts.shared is not None:
            self.shared = HookPoint("batch pos d_model", "what the shared expert adds")


class RouterForward(Replaced):
    """The forward of a module, which passes its linear map with `n` columns through a point.

    Args:
        point: the point.
        module: the module.
        n: the number of experts.
    """

    def __init__(self, point: HookPoint, module: nn.Module, n: int) -> None:
        super().__init__(module)
        self._point, self._n = point, n

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module's own forward."""
        if not is_listened_to(self._point):
            return self.inner(*args, **kwargs)
        with _Logits(self._point, self._n):
            return self.inner(*args, **kwargs)


class _Logits(TorchFunctionMode):
    def __init__(self, point: HookPoint, n: int) -> None:
        super().__init__()
        self._point, self._n = point, n

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result or, of the router's map, what the point gives."""
        output = func(*args, **(kwargs or {}))
        is_map = getattr(func, "__name__", "") == "linear" and output.shape[-1] == self._n
        return fire(self._point, output) if is_map else output


@dataclass(eq=False)
class Routing(Wire):
    """Passes the experts that each position goes to, and their weights, through points."""

    point: HookPoint
    chosen: HookPoint
    n: int

    def __call__(self, module: nn.Module, args: Any) -> Any:
        """The arguments with what the points give."""
        places = {part.is_floating_point(): at for at, part in enumerate(args[1:], 1)}
        chosen, weights = args[places[False]], args[places[True]]
        if is_listened_to(self.point):
            routing = weights.new_zeros(*weights.shape[:-1], self.n).scatter(-1, chosen, weights)
            new = fire(self.point, routing)
            weights = new.gather(-1, chosen)
            if new is not routing:
                others, more = _others(chosen, new)
                chosen, weights = torch.cat([chosen, others], -1), torch.cat([weights, more], -1)
        if is_listened_to(self.chosen):
            chosen = fire(self.chosen, chosen)
        changed = {places[False]: chosen, places[True]: weights}
        return tuple(changed.get(at, part) for at, part in enumerate(args))


def _others(chosen: Tensor, routing: Tensor) -> tuple[Tensor, Tensor]:
    """The experts that were not chosen and have a weight, and these weights; with gradients all, as any might get one."""
    is_other = torch.ones_like(routing, dtype=torch.bool).scatter(-1, chosen, False)
    if not routing.requires_grad:
        is_other &= routing != 0
    others = is_other.to(routing.dtype).topk(int(is_other.sum(-1).max()), -1).indices
    # A row with fewer than another has experts among these that are no others.
    return others, routing.gather(-1, others) * is_other.gather(-1, others)


@dataclass(eq=False)
class ChosenOutputs(Computed):
    """Passes what each chosen expert gives, times a factor, through a point."""

    factor: float = 1.0

    def passed(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        """The output with what the point changes; None if it changes nothing."""
        x, (chosen, weights) = args[0], sorted(args[1:], key=torch.is_floating_point)
        n, size = chosen.shape[-1], x.shape[-1]
        rows = x.reshape(-1, size).repeat_interleave(n, 0)
        each = [chosen.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1)]
        outputs = module.forward(rows, *(each if args[1] is chosen else each[::-1]))
        outputs = outputs.view(*chosen.shape, size) * self.factor
        new = fire(self.point, outputs)
        if new is outputs:
            return None
        weights = weights[..., None].to(outputs.dtype)
        before, after = (
            (part * weights).sum(-2).view_as(output) for part in (outputs.detach(), new)
        )
        # Alive through the point alone, or a gradient would count twice.
        change = (after - before.detach()) / self.factor
        return (output.detach() if new.requires_grad else output) + change


@dataclass(eq=False)
class Copies(Computed):
    """Passes what each expert gives, times a factor, through a point, where each reads all vectors."""

    n: int
    factor: float = 1.0

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """The output with what the point changes; None if it changes nothing."""
        outputs = output.view(self.n, *texts_read.get(), -1).movedim(0, -2) * self.factor
        new = fire(self.point, outputs)
        return None if new is outputs else (new / self.factor).movedim(-2, 0).reshape(output.shape)


@dataclass(eq=False)
class Gated(Computed):
    """Passes the output of a shared expert through a point, times its gate."""

    gate: nn.Module

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """The output with what the point changes; None if it changes nothing."""
        share = self.gate.forward(args[0]).sigmoid()
        gated = output * share
        new = fire(self.point, gated)
        return None if new is gated else new / share
