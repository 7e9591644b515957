"""Mixtures of experts in a probe: the module of a block's experts, its router and its shared expert.

1. The experts of a block are the module that is called with vectors, numbers of experts, [row choice], and as many weights;
   or with all vectors once for each expert, already times their weights (`Copies`: these have no numbers and weights).
2. The router's logits are the last linear map before that call with a column for each expert.
3. A shared expert is the module whose output, times a gate or not, is the rest of what the MLP adds (`_wholes`).
4. When the points are there (`expert_points`), what they promise is checked by a few runs (`unequal`, `inert`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn

from models.attached.example import SHAPE
from models.attached.probe import Call
from models.attached.sums import Summand, agree, factors_of, is_close, is_same

Run = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Experts:
    """The experts of a block.

    Attributes:
        n: how many there are.
        module: the module that is called with numbers and weights, or with copies of all vectors; None if experts are
            called in another way.
        router: the module whose own code computes the logits; None if no map before the call has a column for each.
        shared: the output of the shared expert; None without one.
        gate: the module whose output, through a sigmoid, that of the shared expert is multiplied with.
        factor: what the MLP multiplies the sum of its experts with.
        has_rest: whether the MLP may add more than the experts and the shared one.
        reads_copies: whether each expert reads all vectors, times its weight.
        is_mapped: whether another map reads the sum of the experts before it is added.
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
        """Whether there is a point of what each expert adds."""
        return self.module is not None and not self.is_mapped

    @property
    def missing(self) -> dict[str, str]:
        """The points that are not there, and why."""
        hidden = "the MLP is a mixture of experts, whose hidden layers have no points"
        why = {"mlp.pre": hidden, "mlp.post": hidden}
        if self.router is None:
            why["mlp.router"] = "no linear map before the experts has a column for each"
        if self.module is None:
            called = "experts are not called with vectors, numbers and weights"
            why |= dict.fromkeys(("mlp.routing", "mlp.chosen", "mlp.experts", "mlp.shared"), called)
        if self.reads_copies:
            weighted = "experts read vectors that are already times their weights"
            why |= dict.fromkeys(("mlp.routing", "mlp.chosen"), weighted)
        if self.is_mapped:
            why["mlp.experts"] = "another map reads what experts give before it is added"
        if self.module is not None and self.has_rest and self.shared is None:
            why["mlp.shared"] = (
                "what the MLP adds beside its experts, if anything, is no module's output"
            )
        return why


def find(calls: Sequence[Call], added: Call | None) -> Experts | None:
    """The experts of a block, if it has some.

    Args:
        calls: those of modules inside the block.
        added: the one that gives what the MLP adds, or a norm of that.
    """
    numbered = ((call, n, False) for call in calls if (n := _number_of(call)))
    copied = ((call, n, True) for call in calls if (n := _number_of_copies(call)))
    called, n, copies = next(chain(numbered, copied), (None, 0, False))
    if called is None:
        known = (getattr(call.module, "num_experts", None) for call in calls)
        n = next((each for each in known if isinstance(each, int) and each > 1), 0)
    routers = [c for c in calls if n in c.maps and (called is None or c.began < called.began)]
    router = routers[-1].module if routers else None
    if called is None or called.output is None:
        return Experts(n, None, router) if n else None
    given = called.output.view(n, *SHAPE, -1) if copies else called.output[None]
    routed, sizes = given.sum(0), given.abs().sum(0)  # the model may add copies in another order
    later = [call for call in calls if called.ended < call.began]
    wholes, mapped = _wholes(added, later), _mapped(routed, later)
    factors = (1.0, *factors_of(*(call.module for call in calls)), 0.5)  # or a mean of two
    made = Experts(n, called.module, router, has_rest=True, reads_copies=copies)
    for (term, is_mapped), whole, factor in product(mapped, wholes, factors):
        if term.shape != whole.shape:
            continue
        fitting = replace(made, factor=factor, is_mapped=is_mapped)
        scaled, size = term * factor, (term if is_mapped else sizes) * factor
        if is_close(scaled, whole, size):
            return replace(fitting, has_rest=False)
        for shared, gate in _beside(calls, scaled, whole, size, dict.fromkeys((1.0, factor))):
            return replace(fitting, shared=shared, gate=gate)
    # What cannot be shown to be added as it is.
    is_other = mapped[-1][1] or not any(whole.shape == routed.shape for whole in wholes)
    return replace(made, is_mapped=bool(wholes) and is_other)


def _wholes(added: Call | None, later: Sequence[Call]) -> list[Tensor]:
    """The tensors that may be the whole sum: the one that is added, and those that norms or dropouts made it of.

    The last one comes first.
    """
    wholes = [] if added is None else [added.output, *added.inputs]
    for call in reversed(later):
        # This asks for the same tensor, so rounding cannot change it.
        if any(is_same(call.output, whole) for whole in wholes):
            wholes += call.inputs
    return [whole for whole in wholes if whole is not None]


def _mapped(routed: Tensor, later: Sequence[Call]) -> list[tuple[Tensor, bool]]:
    """The sum of the experts, then what each module in a row makes of the one before; and whether it differs from the sum."""
    terms = [(routed, False)]
    for call in later:
        value, is_other = terms[-1]
        # As for `_wholes`.
        if call.output is not None and any(is_same(read, value) for read in call.inputs):
            terms.append((call.output, is_other or not is_close(call.output, value)))
    return terms


def _number_of(call: Call) -> int | None:
    integers = [t for t in call.inputs if not t.is_floating_point() and t.shape[:2] == SHAPE]
    weights = [t for t in call.inputs if integers and t.shape == integers[0].shape]
    if len(weights) != 2 or len(call.inputs) != 3:
        return None
    stacked = (len(p) for p in call.module.parameters(recurse=False) if p.ndim == 3)
    n = getattr(call.module, "num_experts", None) or next(stacked, None)
    return n if isinstance(n, int) and int(integers[0].max()) < n else None


def _number_of_copies(call: Call) -> int | None:
    """How many experts a call is of that reads a copy of all vectors for each; None if it is of something else."""
    if len(call.inputs) != 1 or call.output is None or call.output.ndim != 2:
        return None
    stacked = (len(p) for p in call.module.parameters(recurse=False) if p.ndim == 3)
    n, rows = next(stacked, 0), len(call.output)
    return (
        n if rows == n * SHAPE[0] * SHAPE[1] and call.inputs[0].shape == call.output.shape else None
    )


def _beside(
    calls: Sequence[Call], routed: Tensor, whole: Tensor, size: Tensor, scales: Iterable[float]
) -> Iterator[tuple[Summand, nn.Module | None]]:
    """The outputs that, times a gate or one of the scales, are what `whole` has besides `routed`, whose terms have a size."""
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


Broken = Iterator[tuple[int, str, str]]
"""Points that do not hold what they promise, each with its block and the reason."""


def unequal(mixtures: Mapping[int, Experts], run: Run, calls: Callable[..., Any]) -> Broken:
    """The points `experts` whose values, each times its weight, are not what the experts give together.

    Args:
        mixtures: the experts, by block.
        run: the logits and a cache of a run on a few tokens, given names and hooks.
        calls: the arguments of modules in such a run.
    """
    modules: dict[int, nn.Module] = {
        n: module
        for n, each in mixtures.items()
        if (module := each.module) is not None and each.has_outputs and not each.reads_copies
    }
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
        routing, chosen, outputs = (cache[f"blocks.{n}.mlp.{part}"] for part in parts)
        total = (routing.gather(-1, chosen)[..., None] * outputs).sum(2)
        with torch.no_grad():
            output = module(*arguments[module][0])
        if not agree(total.view_as(output), output * mixtures[n].factor, 1e-4):
            yield n, "experts", "what each gives, times its weight, is not what they give together"


def inert(mixtures: Mapping[int, Experts], run: Run) -> Broken:
    """The points `router` whose edits change nothing, found by runs of one router of each kind; see `unequal`.

    If an edit reaches nothing, both runs do the same arithmetic and give the same bits. So rounding cannot make it look as
    if it acted. The weights of the experts show that it acts even if all experts compute the same.
    """
    acts: dict[type[nn.Module], bool] = {}
    for n, each in mixtures.items():
        if each.router is None:
            continue
        if (kind := type(each.router)) not in acts:
            has_weights = each.module is not None and not each.reads_copies
            name = f"blocks.{n}.mlp.routing" if has_weights else f"blocks.{n}.resid_post"
            hook = {f"blocks.{n}.mlp.router": _reordered}
            before, after = (run([name], hooks)[1][name] for hooks in ({}, hook))
            acts[kind] = not is_same(before, after)
        if not acts[kind]:
            yield n, "router", "an edit of the logits does not reach what is chosen"


def _reordered(logits: Tensor, point: object) -> Tensor:
    """An edit after which other logits are the largest, also where all were equal."""
    steps = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return logits.roll(1, -1) + steps
