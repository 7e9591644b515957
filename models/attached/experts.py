"""Mixtures of experts: the router's logits, which experts it chose, their weights, and what each of them gives.

1. The experts of a block are the module that is called with vectors, numbers of experts, [row choice], and as many weights.
2. The router's logits are the last linear map before that call with a column for each expert (`find`). While somebody
   listens at `router`, the forward of the module that computes it runs under a mode that passes them through the point.
3. `routing` has the weights of all experts, 0 where one was not chosen. What an edit weighs besides is appended to the chosen.
4. `experts` comes from one more call, with weights 1. What an edit changes there is added to the output, times its weight.
5. A shared expert is the module whose output, times a gate or not, is the rest of what the MLP adds (`find`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hooks import HookPoint
from hooks.shared import Wire, is_listened_to
from models.attached.probe import SHAPE, Call
from models.attached.sums import agree, factors_of, is_close, is_same, rolled
from models.attached.wiring import Replaced, fire

Run = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Experts:
    """The experts of a block.

    Attributes:
        n: how many there are.
        module: the module that is called with numbers and weights; None if experts are called in another way.
        router: the module whose own code computes the logits; None if no map before the call has a column for each.
        shared: the module of the shared expert; None without one.
        gate: the module whose output, through a sigmoid, that of the shared expert is multiplied with.
        factor: what the MLP multiplies the sum of its experts with.
        has_rest: whether the MLP adds more than the experts and the shared one.
    """

    n: int
    module: nn.Module | None
    router: nn.Module | None
    shared: nn.Module | None = None
    gate: nn.Module | None = None
    factor: float = 1.0
    has_rest: bool = False

    @property
    def missing(self) -> dict[str, str]:
        """The points that are not there, and why."""
        hidden = "the MLP is a mixture of experts, whose hidden layers have no points"
        why = {"mlp.pre": hidden, "mlp.post": hidden}
        if self.router is None:
            why["mlp.router"] = "no linear map before the experts has a column for each"
        if self.module is None:
            called = "experts are not called with vectors, numbers and weights"
            why |= dict.fromkeys(("mlp.routing", "mlp.chosen", "mlp.experts"), called)
        elif self.has_rest and self.shared is None:
            why["mlp.shared"] = "what the MLP adds beside its experts is no module's output"
        return why


def find(calls: Sequence[Call], added: Call | None) -> Experts | None:
    """The experts of a block, if it has some.

    Args:
        calls: those of modules inside the block.
        added: the one that gives what the MLP adds, or a norm of that.
    """
    counts = ((call, _number_of(call)) for call in calls)
    called, n = next(((call, n) for call, n in counts if n), (None, 0))
    if called is None:
        known = (getattr(call.module, "num_experts", None) for call in calls)
        n = next((each for each in known if isinstance(each, int) and each > 1), 0)
    routers = [c for c in calls if n in c.maps and (called is None or c.began < called.began)]
    router = routers[-1].module if routers else None
    if called is None or called.output is None:
        return Experts(n, None, router) if n else None
    routed = called.output
    end = -1 if added is None else added.ended
    later = [call for call in calls if called.ended < call.began < end]  # a norm may come last
    wholes = [each for call in (added, *later) if call for each in (call.output, *call.inputs)]
    same_shape = [whole for whole in wholes if whole is not None and whole.shape == routed.shape]
    for factor in (1.0, *factors_of(*(call.module for call in calls))):
        scaled = routed * factor
        if any(is_close(scaled, whole) for whole in same_shape):
            return Experts(n, called.module, router, factor=factor)
        for shared, gate in (each for w in same_shape for each in _beside(calls, scaled, w)):
            return Experts(n, called.module, router, shared, gate, factor, has_rest=True)
    return Experts(n, called.module, router, has_rest=added is not None)


def _number_of(call: Call) -> int | None:
    """How many experts a call is of; None if it is of something else."""
    integers = [t for t in call.inputs if not t.is_floating_point() and t.shape[:2] == SHAPE]
    weights = [t for t in call.inputs if integers and t.shape == integers[0].shape]
    if len(weights) != 2 or len(call.inputs) != 3:
        return None
    stacked = (len(p) for p in call.module.parameters(recurse=False) if p.ndim == 3)
    n = getattr(call.module, "num_experts", None) or next(stacked, None)
    return n if isinstance(n, int) and int(integers[0].max()) < n else None


def _beside(
    calls: Sequence[Call], routed: Tensor, whole: Tensor
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """The modules whose output, times a gate or not, is what `whole` has besides `routed`."""
    outputs = [(call.module, call.output) for call in calls if call.output is not None]
    gates: list[tuple[nn.Module | None, Tensor]] = [(None, torch.ones(1, dtype=whole.dtype))]
    gates += [(gate, share.sigmoid()) for gate, share in outputs if share.shape == (*SHAPE, 1)]
    for module, output in outputs:
        for gate, share in gates if output.shape == whole.shape else ():
            if is_close(routed + output * share, whole, routed, output * share):
                yield module, gate


Broken = Iterator[tuple[int, str, str]]
"""Points that do not hold what they promise, each with its block and the reason."""


def unequal(mixtures: Mapping[int, Experts], run: Run, calls: Callable[..., Any]) -> Broken:
    """The points `experts` whose values, each times its weight, are not what the experts give together.

    Args:
        mixtures: the experts, by block.
        run: the logits and a cache of a run on a few tokens, given names and hooks.
        calls: the arguments of modules in such a run.
    """
    modules = {n: each.module for n, each in mixtures.items() if each.module is not None}
    if not modules:
        return
    parts = ("routing", "chosen", "experts")
    try:
        _, cache = run([f"blocks.{n}.mlp.{part}" for n in modules for part in parts])
    except Exception as error:  # code that takes no row with one expert alone (LongCat)
        why = f"they do not run one by one: {error}"
        yield from ((n, "experts", why) for n in modules)
        return
    arguments = calls([*modules.values()])
    for n, module in modules.items():
        routing, chosen, given = (cache[f"blocks.{n}.mlp.{part}"] for part in parts)
        total = (routing.gather(-1, chosen)[..., None] * given).sum(2)
        with torch.no_grad():
            output = module(*arguments[module][0])
        if not agree(total.view_as(output), output * mixtures[n].factor, 1e-4):
            yield n, "experts", "what each gives, times its weight, is not what they give together"


def inert(mixtures: Mapping[int, Experts], run: Run) -> Broken:
    """The points `router` whose edits change nothing, found by runs of one router of each kind; see `unequal`."""
    acts: dict[type[nn.Module], bool] = {}
    for n, each in mixtures.items():
        if each.router is None:
            continue
        if (kind := type(each.router)) not in acts:
            name, hook = f"blocks.{n}.resid_post", {f"blocks.{n}.mlp.router": rolled}
            before, after = (run([name], hooks)[1][name] for hooks in ({}, hook))
            acts[kind] = not is_same(before, after)
        if not acts[kind]:
            yield n, "router", "an edit of the logits does not reach what is chosen"


class ExpertPoints(nn.Module):
    """The points of a block's experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.n = experts.n
        if experts.router is not None:
            meaning = "the router's logits, before anything is done with them"
            self.router = HookPoint("batch pos expert", meaning)
            experts.router.forward = RouterForward(self.router, experts.router, experts.n)
        if experts.module is not None:
            meaning = "weights of the experts, 0 where one was not chosen"
            self.routing = HookPoint("batch pos expert", meaning)
            self.chosen = HookPoint("batch pos choice", "numbers of the chosen experts")
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
class Given(Wire):
    """Passes what each chosen expert gives, times a factor, through a point."""

    point: HookPoint
    factor: float = 1.0

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        """The output with what the point changes; None if nobody listens."""
        if not is_listened_to(self.point):
            return None
        x, (chosen, weights) = args[0], sorted(args[1:], key=torch.is_floating_point)
        n, size = chosen.shape[-1], x.shape[-1]
        rows = x.reshape(-1, size).repeat_interleave(n, 0)
        each = [chosen.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1)]
        given = module.forward(rows, *(each if args[1] is chosen else each[::-1]))
        given = given.view(*chosen.shape, size) * self.factor
        new = fire(self.point, given)
        if new is given:
            return None
        weights = weights[..., None].to(given.dtype)
        before, after = ((part * weights).sum(-2).view_as(output) for part in (given.detach(), new))
        # Alive through the point alone, or a gradient would count twice.
        change = (after - before.detach()) / self.factor
        return (output.detach() if new.requires_grad else output) + change


@dataclass(eq=False)
class Gated(Wire):
    """Passes the output of a shared expert through a point, times its gate."""

    point: HookPoint
    gate: nn.Module

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """The output with what the point gives; None if nobody listens."""
        if not is_listened_to(self.point):
            return None
        share = self.gate.forward(args[0]).sigmoid()
        gated = output * share
        new = fire(self.point, gated)
        return None if new is gated else new / share
