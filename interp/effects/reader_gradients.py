"""Gradients at the readers of a graph, propagated back through their norms to the stream."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import all_to_device, at_least_float32, to_device, without_gradients
from hooks.shared import replay
from interp.graph import Graph
from interp.graph.norms import is_identity, linear_part


class StreamReaders(NamedTuple):
    """The readers of one stream through one norm: the heads of a block, its MLP, or the logits.

    Attributes:
        stream: the name of the point before the norm.
        norm: the norm.
        at: the name of the module at whose output the gradient is taken. For heads, this is the
            projection to queries, keys and values; for all other readers, the norm.
        weight: the projection of each head; None for the MLP, a mixer that is one node and the
            logits, which read the output of the norm.
        readers: the indices of the readers in the graph.
    """

    stream: str
    norm: Any
    at: str
    weight: Float[Tensor, "reader d_head d_model"] | None
    readers: slice


def readings(graph: Graph) -> Iterator[StreamReaders]:
    """Yield all readers of a graph in the order of computation."""
    names = {module: name for name, module in graph.model.named_modules()}
    for sublayer in graph.sublayers:
        branch = sublayer.branch
        at, weight = branch.norm, None
        if sublayer.is_divided:
            at = branch.sublayer.qkv
            weight = at.weight.unflatten(0, (-1, branch.sublayer.W_O.shape[1]))
        yield StreamReaders(
            stream=graph.names[branch.reads],
            norm=branch.norm,
            at=names[at],
            weight=weight,
            readers=sublayer.reads,
        )
    logits = len(graph.readers) - 1
    yield StreamReaders(
        stream=graph.needed[-1],
        norm=graph.model.ln_final,
        at="ln_final",
        weight=None,
        readers=slice(logits, logits + 1),
    )


class Pullback:
    """The gradient of each reader with respect to the stream, through that reader alone.

    A norm is `A x / scale(x) + constant`. So the gradient g before the norm is `A^T g / scale`
    minus the gradient of the scale times `x · A^T g / scale²`. For heads, `A` is multiplied into
    the projection once, because it is the same at all positions.

    Args:
        reading: the readers.
        stream: the stream before the norm.
        gradient: the gradient of the metric at the output of the projection, or of the norm.
        device: the device of the results.
    """

    @without_gradients
    def __init__(
        self,
        reading: StreamReaders,
        stream: Float[Tensor, "batch pos d_model"],
        gradient: Float[Tensor, "batch pos d"],
        device: torch.device,
    ) -> None:
        gradient = at_least_float32(gradient)
        stream = to_device(at_least_float32(stream), gradient.device)
        weight: Tensor | None = None
        slope: Tensor | None = None
        if not is_identity(reading.norm):
            scale, slope = _scale(reading.norm, stream)
            gradient = gradient / scale
            slope = slope / scale
        linear = linear_part(reading.norm, stream.shape[-1])
        if reading.weight is None:
            gradient = linear.before(gradient)
        else:
            weight = at_least_float32(linear.before(reading.weight))
        self.stream, self.gradient = all_to_device((stream, gradient), device)
        self.weight, self.slope = all_to_device((weight, slope), device)

    def __call__(
        self, example: int, pos: Int[Tensor, " n"], out: Float[Tensor, "reader n d_model"]
    ) -> None:
        """Write the gradients at some positions of an example into `out`.

        Args:
            example: the index of the example.
            pos: the positions.
            out: the memory for the result.
        """
        gradient = self.gradient[example, pos]
        if self.weight is None:
            out.copy_(gradient)
        else:
            by_head = rearrange(gradient, "n (head d_head) -> head n d_head", head=len(self.weight))
            torch.bmm(by_head, self.weight, out=out)
        if self.slope is not None:
            products = torch.einsum("rnd,nd->rn", out, self.stream[example, pos])
            out.addcmul_(products[..., None], self.slope[example, pos], value=-1)


class Pullbacks:
    """Pullbacks of consecutive readings, whose gradients are used in one matrix product.

    Args:
        parts: the indices of the readers of each pullback, and the pullback.

    Attributes:
        readers: the indices of the readers in the graph.
    """

    def __init__(self, parts: Sequence[tuple[slice, Pullback]]) -> None:
        self.readers = slice(parts[0][0].start, parts[-1][0].stop)
        self._parts = parts

    def __call__(
        self, example: int, pos: Int[Tensor, " n"], space: Float[Tensor, "most n d_model"]
    ) -> Float[Tensor, "reader n d_model"]:
        """Return the gradients at some positions of an example, written into `space`.

        Args:
            example: the index of the example.
            pos: the positions.
            space: memory for at least as many readers.
        """
        first = self.readers.start
        for readers, pullback in self._parts:
            pullback(example, pos, space[readers.start - first : readers.stop - first])
        return space[: self.readers.stop - first]


def _scale(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale by which a norm divides, and the gradient of the scale."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        scales: list[Tensor] = []
        replay(norm, (x,), {}, [(norm.scale, scales.append)])
        (slope,) = torch.autograd.grad(scales[0].sum(), x)
    return scales[0].detach(), slope
