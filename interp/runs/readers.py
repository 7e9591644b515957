"""The values that each reader of a circuit reads, while its block runs."""

from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import all_to_device
from interp.graph.nodes import Layer


def stream_after(
    layer: Layer, before: Tensor, context: Any, readers: "Readers", values: dict[nn.Module, Tensor]
) -> Tensor:
    """The stream after a block."""
    attention, mlp = layer.attention, layer.mlp
    q, k, v = readers.projected(layer, before)
    after = before + attention.finished(attention.sublayer.mix(q, k, v, context))
    for writers in layer.attention_writers(values.__getitem__):
        readers.wrote(writers.vectors())
    if mlp is None:
        return after
    stream = before if layer.is_parallel else after
    mlp_out = mlp.branch(readers.seen(stream, slice(mlp.reader, mlp.reader + 1))[0])
    readers.wrote(mlp_out[None])
    return after + mlp_out


class Readers:
    """Streams as each reader sees them, while the writers write one after another.

    Args:
        source: what the writers add in the other run, [writer, batch or 1, pos, d_model].
        mask: [writer, reader] or [writer, reader, pos].
        stream: gives the shape.
    """

    def __init__(self, source: Tensor, mask: Tensor, stream: Tensor) -> None:
        self.source, self.mask = all_to_device((source, mask), stream.device)
        self.n = 0
        # Other - current. A graph keeps what was multiplied, so there it may not be written into.
        self.space = stream.new_empty(0 if mask.requires_grad else len(mask), *stream.shape)

    def move(self, device: torch.device) -> None:
        """Continues on another device."""
        held = self.source, self.mask, self.space
        self.source, self.mask, self.space = all_to_device(held, device)

    def wrote(self, current: Float[Tensor, "writer batch pos d_model"]) -> None:
        """The next writers have written."""
        rows = slice(self.n, self.n + len(current))
        self.n = rows.stop
        if self.mask.requires_grad:
            self.space = torch.cat([self.space, self.source[rows] - current])
        else:
            torch.sub(self.source[rows], current, out=self.space[rows])

    def seen(self, stream: Tensor, readers: slice) -> Float[Tensor, "reader batch pos d_model"]:
        """The stream as some readers see it."""
        mask, differences = self.mask[: self.n, readers], self.space[: self.n]
        if mask.ndim == 3:
            return stream + torch.einsum("wrp,wbpd->rbpd", mask, differences)
        flat = torch.addmm(stream.flatten()[None], mask.T, differences.flatten(1))
        return flat.view(-1, *stream.shape)

    def projected(self, layer: Layer, stream: Tensor) -> Iterator[Tensor]:
        """The queries, keys and values, each head from the stream as it sees it."""
        attn = layer.attention.sublayer
        # All at once: the matrix product is bound by reading the differences.
        seen = self.seen(stream, slice(layer.q.start, layer.v.stop))
        read = layer.attention.norm(seen.flatten(0, 1)).view(len(seen), -1, stream.shape[-1])
        weights = (attn.W_Q, attn.b_Q), (attn.W_K, attn.b_K), (attn.W_V, attn.b_V)
        sizes = [len(bias) for _, bias in weights]
        for rows, (weight, bias) in zip(read.split(sizes), weights, strict=True):
            heads = torch.baddbmm(bias[:, None], rows, weight)
            yield rearrange(heads, "head (batch pos) d -> batch pos head d", batch=len(stream))
