"""Mixtures of experts: the modules of a block's experts, found in a run, and their points.

1. All experts of a block are one module. It is called with vectors, the indices of the experts that
   were selected for each vector, and their weights. Or it is called with a copy of all vectors for
   each expert, already multiplied by the weight of this expert (`ExpertCopies`). Then it gets no
   indices and no weights.
2. The router's logits are the output of a linear map with a column for each expert: the last one
   before that call.
3. The MLP's output is the sum of the experts, or this sum plus the output of another module, the
   shared expert. A gate may multiply the shared expert (`_explained`).
4. If `router` has a hook, the forward of the module that computes the logits runs under a mode of
   PyTorch that passes the logits through the point.
5. `routing` contains the weights of all experts, with 0 for experts that were not selected. If an
   edit gives a weight to another expert, this expert is appended to the selected ones.
6. `experts` is computed by one more call, with weights 1. The change by an edit is multiplied by
   the weight and added to the output. Experts that read copies of all vectors return these outputs
   directly.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hooks import HookPoint
from hooks.base import is_close, is_same
from hooks.shared import Wire, is_listened_to
from models.attached.forward import Computed, Replaced, fire, texts_read
from models.attached.original import SHAPE
from models.attached.parts import Summand, factors_of
from models.attached.probe import Call


@dataclass(frozen=True)
class Experts:
    """The experts of a block.

    Attributes:
        n: the number of experts.
        module: the module that is called with indices and weights, or with copies of all vectors;
            None if the experts are called in another way.
        router: the module whose own code computes the logits; None if no linear map before the call
            has a column for each expert.
        shared: the shared expert, whose output is added to the sum of the experts; None without a
            shared expert.
        gate: the module whose output, after a sigmoid, multiplies the output of the shared expert;
            None without a gate.
        factor: the factor by which the MLP multiplies the sum of its experts.
        has_rest: whether the MLP may add more than the experts and the shared expert.
        reads_copies: whether each expert reads a copy of all vectors, multiplied by the weight of
            this expert.
        is_mapped: True if another module may map the sum of the experts before this sum is added to
            the stream.
    """

    n: int
    module: nn.Module | None
    router: nn.Module | None
    shared: Summand | None = None
    gate: nn.Module | None = None
    factor: float = 1.0
    has_rest: bool = False
    reads_copies: bool = False
    is_mapped: bool = False

    @property
    def has_outputs(self) -> bool:
        """True if there is a point with the output of each expert."""
        return self.module is not None and not self.is_mapped

    @property
    def left_out(self) -> dict[str, str]:
        """The reason for each missing point of the MLP, by its name."""
        hidden = "the MLP is a mixture of experts, whose hidden layers have no points"
        why = {"mlp.pre": hidden, "mlp.post": hidden}
        if self.router is None:
            why["mlp.router"] = "no linear map before the experts has a column for each expert"
        if self.module is None:
            called = "experts are not called with vectors, indices and weights"
            why |= dict.fromkeys(("mlp.routing", "mlp.chosen", "mlp.experts", "mlp.shared"), called)
        if self.reads_copies:
            weighted = "experts read vectors that are already multiplied by their weights"
            why |= dict.fromkeys(("mlp.routing", "mlp.chosen"), weighted)
        if self.is_mapped:
            why["mlp.experts"] = "another module maps the output of the experts before it is added"
        if self.module is not None and self.has_rest and self.shared is None:
            why["mlp.shared"] = (
                "the rest of the MLP's output, if any, is not the output of a module"
            )
        return why


def experts_of(calls: Sequence[Call], added: Call | None) -> Experts | None:
    """Return the experts of a block; None without experts.

    Args:
        calls: the calls of modules inside the block.
        added: the call whose output the MLP adds to the stream, or the call of a norm of that
            output.
    """
    called, n, copies = _call_of_experts(calls)
    before = [call for call in calls if called is None or call.began < called.began]
    routers = [call.module for call in before if n in call.maps]
    router = routers[-1] if routers else None
    if called is None or called.output is None:
        return Experts(n, None, router) if n else None
    experts = Experts(n, called.module, router, has_rest=True, reads_copies=copies)
    outputs = called.output.view(n, *SHAPE, -1) if copies else called.output[None]
    later = [call for call in calls if called.ended < call.began]
    return _explained(experts, outputs, calls=calls, later=later, wholes=_wholes(added, later))


def _call_of_experts(calls: Sequence[Call]) -> tuple[Call | None, int, bool]:
    """Return the call of the experts, their number, and whether they read copies of all vectors.

    If the experts are called in another way, the call is None. The number is 0 without experts.
    """
    for call in calls:
        if n := _number_of(call):
            return call, n, False
    for call in calls:
        if n := _number_of_copies(call):
            return call, n, True
    for call in calls:
        stated = getattr(call.module, "num_experts", None)
        if isinstance(stated, int) and stated > 1:
            return None, stated, False
    return None, 0, False


def _explained(
    experts: Experts,
    outputs: Tensor,
    calls: Sequence[Call],
    later: Sequence[Call],
    wholes: Sequence[Tensor],
) -> Experts:
    """Return the experts of an MLP with the formula of the MLP's output.

    The output is a factor times the sum of the experts, plus the output of a shared expert, if the
    MLP has one. The function tries factors and shared experts until the formula equals the output
    of the run. If nothing fits, the result has the factor 1 and no shared expert.

    Args:
        experts: the experts, without a factor and a shared expert.
        outputs: the outputs of the experts' call, [copy, batch, pos, d_model]. Their sum over the
            copies is the sum of the experts.
        calls: the calls of modules inside the block.
        later: the calls after the experts.
        wholes: the tensors that may be the complete sum.
    """
    # The model may add the copies in another order, so the tolerance is relative to the sum of
    # their absolute values.
    routed = outputs.sum(0)
    sizes = outputs.abs().sum(0)
    mapped = _mapped(routed, later)
    # The factor 0.5 is for models that return the mean of the experts and the shared expert.
    factors = (1.0, *factors_of(*(call.module for call in calls)), 0.5)
    for (term, is_mapped), whole, factor in product(mapped, wholes, factors):
        if term.shape != whole.shape:
            continue
        fitting = replace(experts, factor=factor, is_mapped=is_mapped)
        scaled = term * factor
        size = (term if is_mapped else sizes) * factor
        if is_close(scaled, whole, size):
            return replace(fitting, has_rest=False)
        scales = dict.fromkeys((1.0, factor))
        for shared, gate in _beside(calls, routed=scaled, whole=whole, size=size, scales=scales):
            return replace(fitting, shared=shared, gate=gate)
    # No sum fits. If a later module changes the sum of the experts, or no whole has its shape,
    # another map may stand between the experts and the stream, so they get no point.
    is_other = mapped[-1][1] or not any(whole.shape == routed.shape for whole in wholes)
    return replace(experts, is_mapped=bool(wholes) and is_other)


def _wholes(added: Call | None, later: Sequence[Call]) -> list[Tensor]:
    """Return the tensors that may be the complete sum of the experts and the shared expert.

    The first is the tensor that is added to the stream. Norms, dropouts and other modules may have
    computed it from the sum, so their inputs follow.
    """
    wholes = [] if added is None else [added.output, *added.inputs]
    for call in reversed(later):
        # The call must return the same tensor, so there is no rounding.
        if any(is_same(call.output, whole) for whole in wholes):
            wholes += call.inputs
    return [whole for whole in wholes if whole is not None]


def _mapped(routed: Tensor, later: Sequence[Call]) -> list[tuple[Tensor, bool]]:
    """Return the sum of the experts, and the values that later modules compute from it in a chain.

    The first module of the chain reads the sum, and each further module reads the output of the
    module before.

    Returns:
        Pairs of a value, and whether it differs from the sum.
    """
    terms = [(routed, False)]
    for call in later:
        value, is_other = terms[-1]
        # The module must read the same tensor, as in `_wholes`.
        if call.output is not None and any(is_same(read, value) for read in call.inputs):
            terms.append((call.output, is_other or not is_close(call.output, value)))
    return terms


def _number_of(call: Call) -> int | None:
    """Return the number of experts if a module was called with vectors, indices and weights.

    For any other call, the result is None.
    """
    indices = [
        tensor
        for tensor in call.inputs
        if not tensor.is_floating_point() and tensor.shape[:2] == SHAPE
    ]
    if not indices or len(call.inputs) != 3:
        return None
    if sum(tensor.shape == indices[0].shape for tensor in call.inputs) != 2:
        return None
    n = getattr(call.module, "num_experts", None) or _n_stacked(call.module)
    return n if isinstance(n, int) and int(indices[0].max()) < n else None


def _n_stacked(module: nn.Module) -> int:
    """Return the length of a module's first parameter with three axes: its number of experts.

    Without such a parameter, the result is 0.
    """
    parameters = module.parameters(recurse=False)
    return next((len(parameter) for parameter in parameters if parameter.ndim == 3), 0)


def _number_of_copies(call: Call) -> int | None:
    """Return the number of experts if a module was called with a copy of all vectors for each one.

    For any other call, the result is None.
    """
    if len(call.inputs) != 1 or call.output is None or call.output.ndim != 2:
        return None
    n = _n_stacked(call.module)
    has_copies = len(call.output) == n * SHAPE[0] * SHAPE[1]
    return n if has_copies and call.inputs[0].shape == call.output.shape else None


def _beside(
    calls: Sequence[Call], routed: Tensor, whole: Tensor, size: Tensor, scales: Iterable[float]
) -> Iterator[tuple[Summand, nn.Module | None]]:
    """Yield the possible shared experts: modules with `routed + output * factor == whole`.

    The factor is one of `scales`, or the sigmoid of the output of a gate.

    Args:
        calls: the calls of modules inside the block.
        routed: the sum of the experts, times its own factor, [batch, pos, d_model].
        whole: the tensor that may be the complete output of the MLP.
        size: the sum of the absolute values of the terms of `routed`, for the limit of rounding.
        scales: the numbers that may be the factor.

    Yields:
        The module with its scale, and the gate. Without a gate, it is None. With a gate, the scale
        is 1.
    """
    outputs = [(call, call.output) for call in calls if call.output is not None]
    shares: list[tuple[nn.Module | None, float, Tensor | float]]
    shares = [(None, scale, scale) for scale in scales]
    shares += [
        (call.module, 1.0, share.sigmoid()) for call, share in outputs if share.shape == (*SHAPE, 1)
    ]
    for call, output in outputs:
        for gate, scale, share in shares if output.shape == whole.shape else ():
            if is_close(routed + output * share, whole, routed, size, output * share):
                yield Summand(call.module, scale, call.is_overwritten), gate


class ExpertPoints(nn.Module):
    """The points of a block's experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.n = experts.n
        if experts.router is not None:
            meaning = "the router's logits, before any other operation"
            self.router = HookPoint("batch pos expert", meaning)
            experts.router.forward = RouterForward(self.router, experts.router, experts.n)
        if experts.reads_copies and experts.has_outputs:
            meaning = "the output of each expert; 0 if it was not selected"
            self.experts = HookPoint("batch pos expert d_model", meaning)
        elif experts.module is not None and not experts.reads_copies:
            meaning = "weights of the experts; 0 for experts that were not selected"
            self.routing = HookPoint("batch pos expert", meaning)
            self.chosen = HookPoint("batch pos choice", "indices of the selected experts")
            if experts.has_outputs:
                meaning = "the output of each selected expert, before its weight"
                self.experts = HookPoint("batch pos choice d_model", meaning)
        if experts.shared is not None:
            self.shared = HookPoint("batch pos d_model", "the output of the shared expert")


class RouterForward(Replaced):
    """The forward of a module that passes its linear map with `n` columns through a point.

    Args:
        point: the point.
        module: the module.
        n: the number of experts.
    """

    def __init__(self, point: HookPoint, module: nn.Module, n: int) -> None:
        super().__init__(module)
        self._point = point
        self._n = n

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own forward."""
        if not is_listened_to(self._point):
            return self.inner(*args, **kwargs)
        with _Logits(self._point, self._n):
            return self.inner(*args, **kwargs)


class _Logits(TorchFunctionMode):
    """Passes the router's linear map, which has `n` columns, through a point."""

    def __init__(self, point: HookPoint, n: int) -> None:
        super().__init__()
        self._point = point
        self._n = n

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the function's result; for the router's map, return the result of the point."""
        output = func(*args, **(kwargs or {}))
        is_map = getattr(func, "__name__", "") == "linear" and output.shape[-1] == self._n
        return fire(self._point, output) if is_map else output


@dataclass(eq=False)
class Routing(Wire):
    """Passes the selected experts of each position, and their weights, through points."""

    point: HookPoint
    chosen: HookPoint
    n: int

    def __call__(self, module: nn.Module, args: Any) -> Any:
        """Return the arguments with the results of the points."""
        index_of = {part.is_floating_point(): at for at, part in enumerate(args[1:], 1)}
        chosen = args[index_of[False]]
        weights = args[index_of[True]]
        if is_listened_to(self.point):
            routing = weights.new_zeros(*weights.shape[:-1], self.n).scatter(-1, chosen, weights)
            new = fire(self.point, routing)
            weights = new.gather(-1, chosen)
            if new is not routing:
                others, more = _others(chosen, new)
                chosen = torch.cat([chosen, others], -1)
                weights = torch.cat([weights, more], -1)
        if is_listened_to(self.chosen):
            chosen = fire(self.chosen, chosen)
        changed = {index_of[False]: chosen, index_of[True]: weights}
        return tuple(changed.get(at, part) for at, part in enumerate(args))


def _others(chosen: Tensor, routing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts that were not selected but have a weight, and their weights.

    A hook may give a weight to any expert. If `routing` needs gradients, all experts that were not
    selected are returned, because the gradient by a weight of 0 is needed too.
    """
    is_other = torch.ones_like(routing, dtype=torch.bool).scatter(-1, chosen, False)
    if not routing.requires_grad:
        is_other &= routing != 0
    others = is_other.to(routing.dtype).topk(int(is_other.sum(-1).max()), -1).indices
    # All positions need the same number of experts. Positions with fewer are filled with experts
    # that were already selected, with the weight 0.
    return others, routing.gather(-1, others) * is_other.gather(-1, others)


@dataclass(eq=False)
class ChosenOutputs(Computed):
    """Passes the output of each selected expert, times a factor, through a point."""

    factor: float = 1.0

    def passed(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        """Pass the output of each selected expert through the point, and return the new output.

        The result is None if no hook changes a value.

        Args:
            module: the module of all experts.
            args: its arguments: the vectors, the selected experts and their weights.
            output: its output, the weighted sum over the selected experts.
        """
        x = args[0]
        chosen, weights = sorted(args[1:], key=torch.is_floating_point)
        size = x.shape[-1]
        # The module returns only the weighted sum over the experts of a vector. To get the output
        # of a single expert, pass the vector with this expert alone, and with the weight 1.
        rows = x.reshape(-1, size).repeat_interleave(chosen.shape[-1], 0)
        choices = [chosen.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1)]
        outputs = module.forward(rows, *(choices if args[1] is chosen else choices[::-1]))
        outputs = outputs.view(*chosen.shape, size) * self.factor
        new = fire(self.point, outputs)
        if new is outputs:
            return None
        weights = weights[..., None].to(outputs.dtype)
        before, after = (
            (part * weights).sum(-2).view_as(output) for part in (outputs.detach(), new)
        )
        # Detach the old sum. Otherwise, the gradient would go through the sum and, a second time,
        # through the point.
        change = (after - before.detach()) / self.factor
        return (output.detach() if new.requires_grad else output) + change


@dataclass(eq=False)
class ExpertCopies(Computed):
    """Passes the output of each expert, times a factor, through a point.

    This class is for a module that is called with one copy of all vectors for each expert.

    Attributes:
        n: the number of experts.
        factor: the factor by which the MLP multiplies the sum of its experts.
    """

    n: int
    factor: float = 1.0

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the output with the changes of the point; None if nothing changes."""
        outputs = output.view(self.n, *texts_read.get(), -1).movedim(0, -2) * self.factor
        new = fire(self.point, outputs)
        return None if new is outputs else (new / self.factor).movedim(-2, 0).reshape(output.shape)


@dataclass(eq=False)
class GatedExpert(Computed):
    """Passes the output of a shared expert through a point, times its gate."""

    gate: nn.Module

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the output with the changes of the point; None if nothing changes."""
        share = self.gate.forward(args[0]).sigmoid()
        gated = output * share
        new = fire(self.point, gated)
        return None if new is gated else new / share
