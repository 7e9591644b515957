"""Gradients at the readers of a graph, propagated back through their norms to the stream."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from hooks.base import all_to_device, at_least_float32, to_device, without_gradients
from hooks.shared import replay
from interp.graph import Graph
from interp.graph.norms import LinearPart, is_identity, kind_of_scale, linear_part


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


def readings_of(graph: Graph) -> Iterator[StreamReaders]:
    """Yield all readers of a graph in the order of computation."""
    names = {module: name for name, module in graph.model.named_modules()}
    for sublayer in graph.sublayers:
        branch = sublayer.branch
        at, weight = branch.norm, None
        if sublayer.is_divided:
            at = sublayer.divided.qkv
            qkv = cast(Tensor, at.weight)
            weight = qkv.unflatten(0, (-1, sublayer.divided.W_O.shape[1]))
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


class NormScale(NamedTuple):
    """The scale by which a norm divides a stream.

    Attributes:
        scale: the scale at each position.
        slope: the gradient of the scale with respect to the stream, divided by the scale.
    """

    scale: Float[Tensor, "batch pos 1"]
    slope: Float[Tensor, "batch pos d_model"]


class Pullbacks:
    """The gradient of each reader with respect to the stream, through that reader alone.

    A norm is `A x / scale(x) + constant`. So the gradient g before the norm is `A^T g / scale`
    minus the gradient of the scale times `x · A^T g / scale²`. For heads, `A` is multiplied into
    the projection once, because it is the same at all positions.

    Args:
        readings: the readers of each stream, in the order of computation.
        d_model: the size of the stream.
        device: the device of the results.
    """

    @without_gradients
    def __init__(
        self, readings: Sequence[StreamReaders], d_model: int, device: torch.device
    ) -> None:
        self._readings = readings
        self._device = device
        self._linear: list[LinearPart] = []
        self._weights: list[Tensor | None] = []
        for reading in readings:
            linear = linear_part(reading.norm, d_model)
            weight = None
            if reading.weight is not None:
                weight = to_device(at_least_float32(linear.before(reading.weight)), device)
            self._linear.append(linear)
            self._weights.append(weight)

    @without_gradients
    def scales(
        self, streams: Mapping[int, Float[Tensor, "batch pos d_model"]]
    ) -> dict[int, NormScale]:
        """Return the scale of each norm that is not an identity, by the index of its reading.

        The scales of norms that divide in the same way are computed together.

        Args:
            streams: the stream before each norm, at some positions of some texts, by the index of
                its reading.
        """
        together: dict[Hashable, list[int]] = {}
        for n, stream in streams.items():
            norm = self._readings[n].norm
            if not is_identity(norm):
                kind = (kind_of_scale(norm), stream.device, stream.dtype)
                together.setdefault(kind, []).append(n)
        scales: dict[int, NormScale] = {}
        for numbers in together.values():
            stack = torch.cat([at_least_float32(streams[n]) for n in numbers])
            whole = all_to_device(_scale(self._readings[numbers[0]].norm, stack), self._device)
            parts = zip(*(part.chunk(len(numbers)) for part in whole), strict=True)
            scales |= {n: NormScale(*part) for n, part in zip(numbers, parts, strict=True)}
        return scales

    def put(
        self,
        n: int,
        stream: Float[Tensor, "batch pos d_model"],
        gradient: Float[Tensor, "batch pos d"],
        scale: NormScale | None,
        out: Float[Tensor, "reader batch pos d_model"],
    ) -> None:
        """Write the gradients of the readers of one stream into `out`.

        Args:
            n: the index of the reading.
            stream: the stream before the norm, at some positions of some texts.
            gradient: the gradient of the metric at the output of the projection, or of the norm.
            scale: the scale of the norm, from `scales`; None for an identity.
            out: the memory for the result.
        """
        gradient = to_device(at_least_float32(gradient), self._device)
        if scale is not None:
            gradient = gradient / scale.scale
        weight = self._weights[n]
        if weight is None:
            out.copy_(self._linear[n].before(gradient))
        else:
            by_head = rearrange(
                gradient, "batch pos (head d_head) -> head (batch pos) d_head", head=len(weight)
            )
            torch.bmm(by_head, weight, out=out.flatten(1, 2))
        if scale is not None:
            stream = to_device(at_least_float32(stream), self._device)
            products = torch.einsum("rbpd,bpd->rbp", out, stream)
            out.addcmul_(products[..., None], scale.slope, value=-1)


def _scale(norm: Any, x: Tensor) -> NormScale:
    """Return the scale by which a norm divides vectors, and the gradient of the scale."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        scales: list[Tensor] = []
        replay(norm, (x,), {}, [(norm.scale, scales.append)])
        (slope,) = torch.autograd.grad(scales[0].sum(), x)
    scale = scales[0].detach()
    return NormScale(scale, slope.div_(scale))
