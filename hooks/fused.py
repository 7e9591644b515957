"""FusedUnlessHooked: a fused kernel while nobody listens, the explicit computation otherwise."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn

from hooks.session import is_listened_to

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")


class FusedUnlessHooked:
    """Decorates the explicit form of a method, which passes its inner values through hook points.

    Each call runs `fused` in its place while nothing listens at those points in the calling thread.
    The two must be the same function up to rounding.

        class LayerNorm(nn.Module):
            def _fused(self, x):
                return F.layer_norm(x, ...)

            @FusedUnlessHooked("scale", fused=_fused)
            def normalize(self, x):
                centred = x - x.mean(-1, keepdim=True)
                return centred / self.scale(...) * self.weight + self.bias

    Args:
        points: names of what the fused form skips: the module's own hook points, or its children,
            which stand for whatever is inside them.
        fused: the fused method, with the arguments of the explicit one.
    """

    def __init__(self, *points: str, fused: Callable[..., object]) -> None:
        self.points = points
        self.fused = fused

    def __call__(self, explicit: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        """The method that chooses between `explicit` and the fused one at each call."""
        points, fused = self.points, self.fused

        @functools.wraps(explicit)
        def choose(module: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for point in points:
                if is_listened_to(module._modules[point]):  # type: ignore[arg-type]  # it is there
                    return explicit(module, *args, **kwargs)
            return fused(module, *args, **kwargs)  # type: ignore[return-value]  # R too

        return choose
