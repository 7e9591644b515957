"""Gradients of a metric at the points of one run, and the checks of these gradients.

1. Run the model once, with an autograd function at each point that returns the value unchanged
   (`Gradients`).
2. A backward pass (`Gradients.backward`) passes the gradient at each point to the caller, from the
   logits back to the input. The pass can be repeated, for example with points that block the
   gradient.
3. Check the gradients: NaN is an error (`require_numbers`). A point that no gradient reached is a
   warning (`warn_of_unread`). A metric whose gradient is 0 at this run is a warning
   (`warn_of_flat`).
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
    Piece,
    Text,
    module_rounding,
    piece_is_known,
    piece_read,
    require_fired,
    require_gradients,
    to_device,
    warn,
    wide_dtype,
    with_first_tensor,
)
from hooks.shared import Session, first_tensor, point_of
from interp.inputs.token_positions import last_real
from interp.measuring import Metric, last_of, metric_of_examples
from interp.numbers.precision import has_nan
from interp.protocol import logits_of

Receive = Callable[[str, Tensor], object]
"""A function that is called with the name of a point and the gradient at the point."""


class Gradients:
    """A run of a model, and the gradients of the summed metric at some of its points.

    A text does not affect the metric of another text, so the gradient of the sum contains the
    gradient of each example. The weights need no gradients and receive none.

    Args:
        runner: the runner of the model.
        text: the texts of the run.
        metric: a function from logits to one number for each example.
        names: exact names of points or other modules.

    Attributes:
        base: the metric of the run, in at least float32.
        values: the value at each point.
        pieces: the texts that each point reads, with their padding.

    Raises:
        ValueError: if PyTorch's inference mode is active, or the metric has no gradient.
        HookError: if a point fires twice, its value has no floating dtype, or gradients are
            disabled at the point.
        NeverFiredError: if the run does not reach a point.
    """

    base: Float[Tensor, " batch"]

    def __init__(
        self, runner: HookedRunner, text: Text, metric: Metric, names: Iterable[str]
    ) -> None:
        require_gradients()
        self.values: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self._whole = Piece(None, text.attention_mask)
        self._router = _GradientRouter()
        # The function at each point has this tensor as a second input. The tensor needs a gradient,
        # so autograd records the run even if no weight needs a gradient.
        self._start = torch.zeros((), requires_grad=True)
        points = [_point(runner, name) for name in dict.fromkeys(names)]
        with torch.enable_grad(), Session() as session:
            for point in points:
                session.after(point.module, partial(self._watch, point))
            output = runner.model(text.tokens, **text.arguments(runner.model))
            require_fired([point.name for point in points], {*self.values}, NEVER_FIRED)
            mask = text.of_logits.mask_on_cpu()
            logits = last_real(logits_of(output), last_of(metric, mask), mask)
            if logits.requires_grad:
                logits.register_hook(self._router.record_steepest)
            metrics = metric_of_examples(metric, logits, len(logits), mask)
            self._total = metrics.sum()
        if not self._total.requires_grad:
            raise ValueError(
                "the metric must be differentiable with respect to the points; got no graph from "
                f"{metric!r}"
            )
        self.base = metrics.detach()

    def backward(self, receive: Receive, dropped: Collection[str] = (), last: bool = True) -> None:
        """Run one backward pass, and call `receive` with the gradient at each point.

        The pass goes from the logits to the input, so the last point of the model comes first.

        `receive` is not called for a point that the metric does not depend on.

        Args:
            receive: a function that is called with the name of a point and the gradient at this
                point.
            dropped: the names of the points that block the gradient: the gradient at these points
                is set to 0.
            last: whether this is the last backward pass, so that memory can be freed.

        Raises:
            HookError: if a kernel would drop gradients, such as a kernel for quantised weights.
        """
        self._router.receive = receive
        self._router.dropped = dropped
        with warnings.catch_warnings():
            # PyTorch would only warn, once in a process, and use 0 as the gradient of the kernel.
            warnings.filterwarnings("error", ".*an autograd kernel was not registered", UserWarning)
            try:
                torch.autograd.grad(
                    self._total, self._start, retain_graph=not last, allow_unused=True
                )
            except UserWarning as warning:
                kernel = str(warning).partition(": ")[0]
                raise HookError(
                    f"all kernels must propagate gradients; {kernel} drops them"
                ) from None
            finally:
                self._router.receive = None

    def is_flat(self) -> bool:
        """Return True if the gradient of the metric is 0 at all logits of the run.

        The metric is then, for example, at a minimum or a maximum, and the gradients at all points
        are only rounding. Gradients as small as rounding errors count as 0.

        The result is False before the first backward pass. It is also False if the metric is not
        computed from the logits at all, because no gradient then reaches the logits.
        """
        steepest = self._router.steepest
        if steepest is None:
            return False
        return float(steepest) <= module_rounding(wide_dtype(steepest.dtype))

    def _watch(self, point: Point, output: Any) -> Any:
        """Store the value of a point, and return the output with the value in a `_Node`.

        Raises:
            HookError: if the value cannot have a gradient, or the point fires twice.
        """
        value = first_tensor(output, point)
        if not value.is_floating_point():
            raise HookError(
                f"gradients need values with a floating dtype; got {value.dtype} at {point}"
            )
        if not torch.is_grad_enabled():
            raise HookError(
                f"gradients must be enabled at {point}; got no_grad, "
                "or checkpointing with use_reentrant=True"
            )
        if point.name in self.values:
            raise HookError(f"each point must fire once in a run; {point.name} fired twice")
        self.values[point.name] = value.detach()
        self.pieces[point.name] = piece_read() if piece_is_known() else self._whole
        pass_on = partial(self._router.pass_on, point.name)
        node = _node(value, to_device(self._start, value.device), pass_on)
        return with_first_tensor(output, node)


def _point(runner: HookedRunner, name: str) -> Point:
    """Return the point with a name, or a point for the output of another module."""
    if name in runner.points:
        return runner.points[name]
    return point_of(name, runner.model.get_submodule(name))


class _GradientRouter:
    """The receiver of the gradients at points, which passes them on to the caller.

    The autograd graph refers to the receiver. If the receiver also referred to the graph, neither
    would be freed without the garbage collector. So this class is not a part of `Gradients`.

    Attributes:
        receive: the function that receives each gradient; None outside of a backward pass.
        dropped: the names of the points that block the gradient.
        steepest: the largest absolute gradient at the logits.
    """

    receive: Receive | None = None
    dropped: Collection[str] = ()
    steepest: Tensor | None = None

    def record_steepest(self, gradient: Tensor) -> None:
        """Record the largest gradient at the logits, where the backward pass begins."""
        self.steepest = torch.linalg.vector_norm(gradient, torch.inf)

    def pass_on(self, name: str, gradient: Tensor) -> Tensor:
        """Pass the gradient at a point to `receive`, and return it for the backward pass.

        Args:
            name: the name of the point.
            gradient: the gradient.
        """
        if name in self.dropped:
            gradient = torch.zeros_like(gradient)
        if self.receive is not None:
            self.receive(name, gradient)
        return gradient


class _Node(torch.autograd.Function):
    """An identity whose gradient is passed through a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, start: Tensor, pass_on: Any) -> Tensor:
        ctx.pass_on = pass_on
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pass_on(gradient), None, None


_node: Callable[..., Tensor] = _Node.apply


def require_numbers(name: str, effects: Float[Tensor, "..."]) -> None:
    """Check that no effect at a point is NaN.

    Check the points in the order of the backward pass. Then the error names the point where the
    first NaN was computed.

    Args:
        name: the name of the point.
        effects: the effects at the point.

    Raises:
        ValueError: if a number is NaN.
    """
    if has_nan(effects):
        raise ValueError(
            f"gradients must not be NaN; in the backward pass, the first NaN is at {name}"
        )


def warn_of_unread(names: Sequence[str]) -> None:
    """Warn about the points that no gradient reached, in a single warning."""
    if names:
        other_points = f" and {len(names) - 1} more points" if len(names) > 1 else ""
        warn(f"the metric does not depend on {names[0]}{other_points}; their effects are 0")


def warn_of_flat(run: Gradients) -> None:
    """Warn after a backward pass if the gradient of the metric is 0 at the run."""
    if run.is_flat():
        warn(
            "the metric has a minimum or maximum at the base run, so its gradient is 0 and these "
            "estimates are rounding; use integrated_gradients, or method='eap_ig_inputs' for "
            "edges, which take gradients along a path",
        )
