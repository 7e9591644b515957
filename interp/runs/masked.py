"""Masked runs: forward passes in which each reader sees some writers as in another run.

The algorithm, after the edge masks of Bhaskar et al. 2024, "Finding Transformer Circuits with Edge
Pruning":

1. Take from the source what each writer adds there [writer, batch, pos, d_model].
2. Go through the blocks of the model with the plain residual stream (`_stream_after`), and after
   each writer keep its difference, source - current (`_Streams.append`).
3. Before each block, give every head its own stream: the plain one plus the sum over writers of
   mask [writer, reader] times difference. One matrix product makes the streams of all heads
   (`_Streams.seen`).
4. Norm and project each head's stream, run attention once, and give the MLP its own stream
   likewise.
5. Read the logits from the stream that the unembedding sees.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    all_to_device,
    progress_of,
    require_kind,
    shown,
    to_device,
    without_gradients,
)
from hooks.shared import Session
from interp.graph.circuit import Circuit
from interp.graph.graph import Graph
from interp.graph.nodes import Layer
from interp.measuring import evaluate
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.runs.rows import Batch
from interp.runs.runs import Runs

EdgeMask = Shaped[Tensor, "writer reader"] | Shaped[Tensor, "writer reader pos"]
"""For each edge how much of it is replaced: numbers from 0, none, to 1, all. Entries that are no
edge do not count.
"""

CircuitSource = (
    Literal["pair", "zero"] | ActivationCache | Float[Tensor, "writer _batch pos d_model"]
)
"""The source of replaced values: the other text of each pair, another run of texts with the same
positions, what each writer adds (`Graph.contributions`, or `Graph.mean` of several texts), or
zeros.
"""

# More examples at a time are slower: what the readers of a block see leaves the processor's cache.
_QUICK = 2**28


def run_circuit(
    model: nn.Module,
    pairs: Pairs,
    circuit: EdgeMask | Iterable[str],
    source: CircuitSource = "pair",
    *,
    direction: PatchingDirection = "noising",
    split_embeddings: bool = False,
    max_bytes: int = 2**30,
) -> Float[Tensor, "batch pos vocab"]:
    """Run a circuit, and return the logits: every edge outside of it carries values of another run.

    Each reader sees the stream plus, over the edges to it, `mask * (source - current)` of the
    writer. So a run without masked edges is that of the text, one with every edge masked is that of
    the source, and any number of edges take one forward pass. What a reader passes on is computed
    from what it saw.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: the texts. Corrupted ones are needed if the source is `pair`.
        circuit: the edges to keep, as a `Circuit` or by name, or a mask of the edges to replace.
            Gradients flow to a mask; freeze the model's weights if theirs are not wanted.
        source: where replaced values come from; see `CircuitSource`.
        direction: noising runs the clean texts, denoising the corrupted ones.
        split_embeddings: see `Graph`.
        max_bytes: bounds the memory beyond the model, the source and the result, where no gradient
            is recorded. Examples that do not fit together run one after another.

    Raises:
        ValueError: if circuit, mask or source do not fit, a source for all examples meets padding
            on the left, or `max_bytes` is too small for one example.
        UnknownNameError: if the circuit has a node that the model lacks.
        HookError: if hooks act on the model, because a value is not computed once here.
        ModeError: if the model is in training mode.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> clean, corrupted = torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]])
    >>> logits = run_circuit(model, Pairs(clean, corrupted), circuit=[])  # every edge is replaced
    >>> torch.allclose(logits, model(corrupted), atol=1e-5)
    True
    """
    graph = Graph(model, split_embeddings)
    return MaskedRuns(graph, pairs, source, direction, max_bytes).logits(circuit)


class MaskedRuns:
    """Masked runs of the same texts.

    Args:
        graph: the graph of the model.
        pairs, source, direction, max_bytes: see `run_circuit`.

    Attributes:
        graph: the graph of the model.
        runs: the texts and the metric.
    """

    def __init__(
        self,
        graph: Graph,
        pairs: Pairs,
        source: CircuitSource = "pair",
        direction: PatchingDirection = "noising",
        max_bytes: int = 2**30,
    ) -> None:
        self.graph, self._model = graph, graph.model
        self.runs = Runs(graph.runner().model, pairs, direction, max_bytes)
        self._text = self.runs.text
        self._source = self._checked(source)
        self.runs.reads_other = isinstance(source, str) and source == "pair"
        self._held: Tensor | None = None  # the source of all examples, if these run together

    def logits(self, circuit: EdgeMask | Iterable[str]) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of one circuit."""
        return self._run(circuit, self._model.unembed)

    def metric(self, circuit: EdgeMask | Iterable[str]) -> Float[Tensor, " batch"]:
        """Return the metric of one circuit, from logits only where the metric reads them.

        Args:
            circuit: see `run_circuit`.

        Raises:
            ValueError: as for `run_circuit`, or if the metric is not one number per example.
        """
        metric = self.runs.metric
        batch = Batch(self._text, metric)
        read = batch.read(self._run(circuit, lambda stream: stream))
        with torch.set_grad_enabled(read.requires_grad):
            return evaluate(metric, self._model.unembed(read), len(read))

    def _checked(self, source: CircuitSource) -> Tensor | str:
        writers, (size, n_pos) = self.graph.writers, self._text.tokens.shape
        if isinstance(source, str):
            if source not in ("pair", "zero"):
                raise ValueError(
                    f"source must be 'pair', 'zero', a cache or a tensor; got {shown(source)}"
                )
            has_other = self.runs.pairs.corrupted is not None
            if source == "pair" and not (has_other and self._text.is_aligned_with(self.runs.other)):
                raise ValueError(
                    "source='pair' needs corrupted texts whose positions correspond: give those, or another source"
                )
            return source
        sources = (ActivationCache, Tensor)
        require_kind("source", source, sources, "'pair', 'zero', a cache or a tensor")
        added = self.graph.contributions(source) if isinstance(source, ActivationCache) else source
        width = self._model.config.d_model
        fits = [(len(writers), rows, n_pos, width) for rows in (size, 1)]
        if added.shape not in fits:
            raise ValueError(
                f"source must be [writer, batch, pos, d_model], {[*fits[0]]}; got {[*added.shape]}"
            )
        real = self._text.real
        if len(added[0]) < size and (real[:, 1:] & ~real[:, :-1]).any():
            raise ValueError(
                "a source for all examples needs texts padded on the right; got padding before a token"
            )
        return added

    def _mask(self, circuit: EdgeMask | Iterable[str]) -> Tensor:
        """The mask of what is replaced, 0 where there is no edge."""
        if isinstance(circuit, Circuit):
            self.graph.require(circuit.graph.identity)
        mask = circuit if isinstance(circuit, Tensor) else self.graph.mask(circuit)
        shape, n_pos = self.graph.allowed.shape, self._text.tokens.shape[1]
        if mask.shape not in (shape, (*shape, n_pos)):
            raise ValueError(
                f"a mask must be [writer, reader], {[*shape]}, or with a last axis of {n_pos} positions; "
                f"got {[*mask.shape]}"
            )
        if mask.dtype == torch.bool:
            raise ValueError(
                "a mask must be of numbers, 1 where an edge is replaced; got booleans: give the Circuit itself"
            )
        if not ((mask >= 0) & (mask <= 1)).all():
            raise ValueError("a mask must be of numbers from 0 to 1; got others")
        weight = self._model.blocks[0].attn.W_O
        mask = to_device(mask, weight.device).to(weight.dtype)
        allowed = to_device(self.graph.allowed, weight.device)
        return mask * (allowed if mask.ndim == 2 else allowed[..., None])

    def _run(
        self, circuit: EdgeMask | Iterable[str], read: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch pos _size"]:
        """Apply `read` to the stream that the logits see, some examples at a time."""
        self.graph.runner()
        mask, results = self._mask(circuit), []
        size, bytes_each = len(self._text.tokens), self._bytes_of_one()
        fit = size if mask.requires_grad else self.runs.max_bytes // bytes_each
        if self._held is None and fit >= size:
            self._held = self._source_of(slice(None))
        n = size if mask.requires_grad else max(1, min(fit, _QUICK // bytes_each))
        parts = [slice(start, start + n) for start in range(0, size, n)]
        for rows in progress_of(parts, "parts of the texts", len(parts)):
            source = self._source_of(rows) if self._held is None else _examples(self._held, rows)
            with torch.set_grad_enabled(mask.requires_grad):
                results.append(read(self._stream(rows, source, mask)))
        return torch.cat(results)

    def _bytes_of_one(self) -> int:
        """The memory that one example takes.

        Raises:
            ValueError: if that is more than there may be.
        """
        weight, layers = self._model.blocks[0].attn.W_O, self.graph.layers
        readers, width = layers[0].v.stop, weight.shape[-1]
        # Source and differences; a cache of the source; what the heads of a block read, before and
        # after the norm.
        vectors = 2 * len(self.graph.writers) + 2 * len(layers) + 4 * readers + 12
        hidden = 4 * getattr(self._model.config, "d_mlp", 0)
        bytes_each = (vectors * width + hidden) * self._text.tokens.shape[1] * weight.element_size()
        if bytes_each > self.runs.max_bytes:
            raise ValueError(
                f"max_bytes must be at least {bytes_each:,} for one example; got {self.runs.max_bytes:,}"
            )
        return int(bytes_each)

    @without_gradients
    def _source_of(self, rows: slice) -> Tensor:
        """Return what the writers add in the other run."""
        if isinstance(self._source, Tensor):
            return _examples(self._source, rows)
        if self._source == "zero":
            zero = self._model.blocks[0].attn.W_O.new_zeros(1, 1, 1, 1)
            return zero.expand(len(self.graph.writers), -1, -1, -1)
        text = self.runs.other.rows(rows)
        return self.graph.added(self.runs.capture(text, self.graph.needed))

    def _stream(self, rows: slice, source: Tensor, mask: Tensor) -> Tensor:
        """The stream that the logits read."""
        text, values = self._text.rows(rows), dict[nn.Module, Tensor]()
        context = self._model.context(text.tokens, **text.kwargs)
        with Session() as session:
            for point in self.graph.points:
                session.after(point, partial(values.__setitem__, point))
            stream = self._model.input_resid(text.tokens, context)
            values[self._model.blocks[0].resid_pre] = stream
            streams = _Streams(source, mask, stream)
            streams.append(self.graph.inputs(values.__getitem__))
            for layer in self.graph.layers:
                if stream.device != layer.device:
                    stream, context = all_to_device((stream, context), layer.device)
                    streams.move(layer.device)
                stream = _stream_after(layer, stream, context, streams, values)
        return streams.seen(stream, slice(len(self.graph.readers) - 1, None))[0]


def _examples(source: Tensor, rows: slice) -> Tensor:
    return source if source.shape[1] == 1 else source[:, rows]


def _stream_after(
    layer: Layer, before: Tensor, context: Any, streams: "_Streams", values: dict[nn.Module, Tensor]
) -> Tensor:
    """Run a block whose readers see streams of their own, and return the plain stream after it.

    Args:
        layer: the block.
        before: the plain stream before it.
        context: what blocks read besides.
        streams: the streams as readers see them; the writers of this block join them.
        values: values of the points of the block, after it has run.
    """
    attention, mlp = layer.attention, layer.mlp
    q, k, v = streams.projected(layer, before)
    after = before + attention.finished(attention.sublayer.mix(q, k, v, context))
    for writers in layer.attention_writers(values.__getitem__):
        streams.append(writers.vectors())
    if mlp is None:
        return after
    stream = before if layer.is_parallel else after
    mlp_out = mlp.branch(streams.seen(stream, slice(mlp.reader, mlp.reader + 1))[0])
    streams.append(mlp_out[None])
    return after + mlp_out


class _Streams:
    """Streams as each reader sees them, while the writers write one after another.

    Args:
        source: what the writers add in the other run, [writer, batch or 1, pos, d_model].
        mask: how much of each edge is replaced, [writer, reader] or [writer, reader, pos].
        stream: the plain stream, which gives the shape.
    """

    def __init__(self, source: Tensor, mask: Tensor, stream: Tensor) -> None:
        self.source, self.mask = all_to_device((source, mask), stream.device)
        self.n = 0
        # Other - current. A graph keeps what was multiplied, so there it may not be written into.
        self.space = stream.new_empty(0 if mask.requires_grad else len(mask), *stream.shape)

    def move(self, device: torch.device) -> None:
        """Go on on another device."""
        held = self.source, self.mask, self.space
        self.source, self.mask, self.space = all_to_device(held, device)

    def append(self, current: Float[Tensor, "writer batch pos d_model"]) -> None:
        """Take what the next writers add in this run into account."""
        rows = slice(self.n, self.n + len(current))
        self.n = rows.stop
        if self.mask.requires_grad:
            self.space = torch.cat([self.space, self.source[rows] - current])
        else:
            torch.sub(self.source[rows], current, out=self.space[rows])

    def seen(self, stream: Tensor, readers: slice) -> Float[Tensor, "reader batch pos d_model"]:
        """Return the stream as some readers see it."""
        mask, differences = self.mask[: self.n, readers], self.space[: self.n]
        if mask.ndim == 3:
            return stream + torch.einsum("wrp,wbpd->rbpd", mask, differences)
        flat = torch.addmm(stream.flatten()[None], mask.T, differences.flatten(1))
        return flat.view(-1, *stream.shape)

    def projected(self, layer: Layer, stream: Tensor) -> Iterator[Tensor]:
        """Yield the queries, keys and values, each head from the stream as it sees it."""
        attn = layer.attention.sublayer
        # All at once: the matrix product is bound by reading the differences.
        seen = self.seen(stream, slice(layer.q.start, layer.v.stop))
        read = layer.attention.norm(seen.flatten(0, 1)).view(len(seen), -1, stream.shape[-1])
        weights = (attn.W_Q, attn.b_Q), (attn.W_K, attn.b_K), (attn.W_V, attn.b_V)
        sizes = [len(bias) for _, bias in weights]
        for rows, (weight, bias) in zip(read.split(sizes), weights, strict=True):
            heads = torch.baddbmm(bias[:, None], rows, weight)
            yield rearrange(heads, "head (batch pos) d -> batch pos head d", batch=len(stream))
