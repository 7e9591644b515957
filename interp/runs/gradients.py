"""Gradients of a metric at the points of one run, and the checks of these gradients.

1. Run the model once, with a function of autograd at each point that passes the value on
   (`Gradients`).
2. A backward pass (`Gradients.backward`) hands the gradient at each point to the caller, from the
   last point to the first. It can be repeated, for example with points that pass no gradient on.
3. Check the gradients: NaN is an error (`require_numbers`); a point that no gradient reached is a
   warning (`warn_of_unread`), and so is a metric that is flat at this run (`warn_of_flat`).
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import HookedRunner, HookError, Point
from hooks.base import (
    NEVER_FIRED,
    Text,
    module_rounding,
    require_fired,
    to_device,
    warn,
    wide_dtype,
    with_first_tensor,
)
from hooks.shared import Session, first_tensor, point_of
from interp.inputs.token_positions import last_real
from interp.measuring import Metric, evaluate, last_of
from interp.protocol import logits_of

Receive = Callable[[str, Tensor], object]
"""Called with the name of a point and the gradient there, of the shape of its value."""


class Gradients:
    """A run of a model, and the gradients of the summed metric at some points of it.

    A text does not affect the metric of another text, so the gradient of the sum holds the gradient
    of each example. Weights need no gradients and get none.

    Args:
        runner: the runner of the model.
        text: what the model reads.
        metric: a function from logits to a number per example.
        names: exact names of points or other modules.

    Attributes:
        base: the metric of the run, in float32 at least.
        values: the value at each point.

    Raises:
        ValueError: if PyTorch's inference mode is on, or the metric has no gradient.
        HookError: if a point fires twice, its value has no floating dtype, or gradients are off
            there.
        NeverFiredError: if the run does not reach a point.
    """

    base: Float[Tensor, " batch"]

    def __init__(
        self, runner: HookedRunner, text: Text, metric: Metric, names: Iterable[str]
    ) -> None:
        if torch.is_inference_mode_enabled():
            raise ValueError("gradients must be possible; got PyTorch's inference mode")
        self.values: dict[str, Tensor] = {}
        self._router = _GradientRouter()
        # The graph reaches every point from here, also where no weight needs a gradient.
        self._start = torch.zeros((), requires_grad=True)
        points = [_point(runner, name) for name in dict.fromkeys(names)]
        with torch.enable_grad(), Session() as session:
            for point in points:
                session.after(point.module, partial(self._watch, point))
            output = runner.model(text.tokens, **text.arguments(runner.model))
            require_fired([point.name for point in points], {*self.values}, NEVER_FIRED)
            mask = text.of_logits.attention_mask
            read = last_real(logits_of(output), last_of(metric, mask), mask)
            if read.requires_grad:
                read.register_hook(self._router.left)
            metrics = evaluate(metric, read, len(read))
            self._total = metrics.sum()
        if not self._total.requires_grad:
            raise ValueError(
                f"the metric must depend on the points through a graph; got none from {metric!r}"
            )
        self.base = metrics.detach()

    def backward(self, receive: Receive, dropped: Collection[str] = (), last: bool = True) -> None:
        """Run one backward pass, and hand on the gradient at each point, the last point first.

        A point that the metric does not depend on is left out.

        Args:
            receive: called with each name and gradient.
            dropped: points that pass no gradient on. They receive zeros.
            last: whether no further backward pass follows, so that memory can be freed on the way.

        Raises:
            HookError: if a kernel, such as one of quantised weights, would drop gradients.
        """
        self._router.receive, self._router.dropped = receive, dropped
        with warnings.catch_warnings():
            # PyTorch only warns, once, and takes the gradient of such a kernel for 0.
            warnings.filterwarnings("error", ".*an autograd kernel was not registered", UserWarning)
            try:
                torch.autograd.grad(
                    self._total, self._start, retain_graph=not last, allow_unused=True
                )
            except UserWarning as dropping:
                kernel = str(dropping).partition(": ")[0]
                raise HookError(
                    f"gradients must pass through all kernels; {kernel} drops them"
                ) from None
            finally:
                self._router.receive = None

    def is_flat(self) -> bool:
        """Whether the last backward pass began with a gradient at the logits that is rounding of 0."""
        steepest = self._router.steepest
        if steepest is None:  # the metric does not read the logits
            return False
        return float(steepest) <= module_rounding(wide_dtype(steepest.dtype))

    def _watch(self, point: Point, output: Any) -> Any:
        value = first_tensor(output, point)
        if not value.is_floating_point():
            raise HookError(f"gradients need floating values; got {value.dtype} at {point}")
        if not torch.is_grad_enabled():
            raise HookError(
                f"gradients must be on at {point}; got no_grad, or checkpointing with use_reentrant=True"
            )
        if point.name in self.values:
            raise HookError(f"{point.name} fired twice; a run has one value per name")
        self.values[point.name] = value.detach()
        on_the_way = partial(self._router.passed, point.name)
        node = _node(value, to_device(self._start, value.device), on_the_way)
        return with_first_tensor(output, node)


def _point(runner: HookedRunner, name: str) -> Point:
    known = runner.points
    return known[name] if name in known else point_of(name, runner.model.get_submodule(name))


class _GradientRouter:
    """Receiver of the gradients at points. The graph holds it, so it must not hold the graph."""

    receive: Receive | None = None
    dropped: Collection[str] = ()
    steepest: Tensor | None = None

    def left(self, gradient: Tensor) -> None:
        """The way back begins at the logits."""
        self.steepest = gradient.abs().amax()

    def passed(self, name: str, gradient: Tensor) -> Tensor:
        if name in self.dropped:
            gradient = torch.zeros_like(gradient)
        if self.receive is not None:
            self.receive(name, gradient)
        return gradient


class _Node(torch.autograd.Function):
    """A value, whose gradient is handed to a function on its way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, start: Tensor, on_the_way: Any) -> Tensor:
        ctx.on_the_way = on_the_way
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.on_the_way(gradient), None, None


_node: Callable[..., Tensor] = _Node.apply


def require_numbers(name: str, effects: Float[Tensor, "..."]) -> None:
    """Refuse NaN. In the order of a backward pass, the error names the point where NaN began.

    Raises:
        ValueError: if a number is NaN.
    """
    if effects.isnan().any():
        raise ValueError(f"gradients must be numbers; going back, the first NaN is at {name}")


def warn_of_unread(names: Sequence[str]) -> None:
    """Warn once of points that no gradient reached."""
    if names:
        more = f" and {len(names) - 1} more points" if len(names) > 1 else ""
        warn(f"the metric does not depend on {names[0]}{more}: effects there are 0")


def warn_of_flat(run: Gradients) -> None:
    """Warn if the metric has no gradient at the run, after a backward pass."""
    if run.is_flat():
        warn(
            "the metric has no gradient at the base run, where it is smallest or largest: these estimates are "
            "rounding. integrated_gradients, or method='eap_ig_inputs' of edges, takes gradients along the way",
        )
