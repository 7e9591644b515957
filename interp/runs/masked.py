"""Masked runs: forward passes in which some edges carry values of another run.

The algorithm, after the edge masks of Bhaskar et al. 2024, "Finding Transformer Circuits with Edge
Pruning":

1. Compute the output of each writer in the source run [writer, batch, pos, d_model].
2. Run the blocks of the model on the plain residual stream (`_stream_after`). After each writer,
   store its difference, source - current (`_Streams.append`).
3. Before each block, compute a separate stream for every head: the plain stream plus the sum over
   writers of mask [writer, reader] times difference. One matrix product computes the streams of all
   heads (`_Streams.of`).
4. Normalise and project the stream of each head, and run attention once. The MLP also has a
   separate stream.
5. Compute the logits from the separate stream of the unembedding.
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
    explains_calls,
    mark_padding,
    padding_messages,
    progress_of,
    require_choice,
    require_kind,
    shown,
    sides_of_padding,
    to_device,
    without_gradients,
)
from hooks.shared import Session
from interp.graph.circuit import Circuit
from interp.graph.graph import Graph
from interp.graph.nodes import Layer, Sublayer
from interp.inputs.cached import mask_of
from interp.measuring import metric_of_examples
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.runs.rows import Batch
from interp.runs.runs import Runs

EdgeMask = Shaped[Tensor, "writer reader"] | Shaped[Tensor, "writer reader pos"]
"""The replaced share of each edge, from 0 (nothing) to 1 (everything).

Entries without an edge are ignored.
"""

CircuitSource = (
    Literal["pair", "zero"] | ActivationCache | Float[Tensor, "writer _batch pos d_model"]
)
"""The source of the replaced values.

The source is the other text of each pair, a cache of texts with the same positions, the outputs of
the writers (`Graph.contributions`, or `Graph.mean` of several texts), or zeros.
"""

# More examples at a time are slower, because the streams of a block do not fit into the processor's
# cache.
_QUICK = 2**28


@explains_calls
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
    """Return the logits of a run in which all edges outside a circuit carry values of another run.

    An edge leads from a writer, a node that adds its output to the stream, to a reader, an input
    that is computed from the stream, such as the queries of a head.

    Each reader sees the stream plus the sum of `mask * (source - current)` over the edges to the
    reader: `source` is the writer's output in the source run, `current` its output in this run. So
    a run without masked edges equals the run of the text, and a run with all edges masked equals
    the source run. A run takes one forward pass for any number of edges. Replaced edges also change
    later values: a head computes its output in this run from the streams that its q, k and v see.

    By default, corrupted values replace values of the clean run (`direction="noising"`), which
    shows the loss without a part: the parts outside the circuit are replaced in the clean run.
    Activation and attribution patching do the reverse by default.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: the texts. Corrupted texts are needed if the source is `pair`.
        circuit: the edges to keep, as a `Circuit` or by name, or a mask of the edges to replace.
            Gradients flow to a mask. Freeze the weights of the model if you do not need their
            gradients.
        source: the source of the replaced values; see `CircuitSource`. Default: the other text of
            each pair.
        direction: `noising` runs the clean texts, `denoising` runs the corrupted texts.
        split_embeddings: whether token and position embeddings are two separate writers; see
            `Graph`.
        max_bytes: a bound on the memory in bytes, not counting the model, the source and the
            result. The bound applies only if no gradient is recorded. Examples that do not fit
            together are run one after another.

    Returns:
        The logits at all positions of the texts that `direction` runs.

    Raises:
        ValueError: if circuit, mask or source do not fit the model or the texts, if the source is a
            cache of texts with other padding, or a tensor with one row for all examples and a text
            has padding on the left, or if `max_bytes` is too small for one example.
        UnknownNameError: if the circuit has a node that the model lacks.
        HookError: if hooks are active on the model, because this function computes values several
            times.
        ModeError: if the model is in training mode.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> clean, corrupted = torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]])
    >>> logits = run_circuit(model, Pairs(clean, corrupted), circuit=[])
    >>> torch.allclose(logits, model(corrupted), atol=1e-5)
    True
    """
    graph = Graph(model, split_embeddings)
    runs = MaskedRuns(graph, pairs, source, direction=direction, max_bytes=max_bytes)
    return runs.logits(circuit)


class MaskedRuns:
    """Masked runs of the same texts with different circuits.

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
        self.graph = graph
        self._model = graph.model
        model = graph.runner().model
        require_choice("direction", direction, ("denoising", "noising"))
        self.runs = Runs(model, pairs, direction=direction, max_bytes=max_bytes)
        self._text = self.runs.text
        self._source = self._checked(source)
        self.runs.reads_other = isinstance(source, str) and source == "pair"
        # If all examples fit into memory together, the source run is computed only once, for the
        # first circuit.
        self._whole_source: Tensor | None = None

    def logits(self, circuit: EdgeMask | Iterable[str]) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of the run of one circuit."""
        logits: Tensor = self._run(circuit, self._model.unembed)
        mark_padding(logits, self._text.attention_mask)
        return logits

    def metric(self, circuit: EdgeMask | Iterable[str]) -> Float[Tensor, " batch"]:
        """Return the metric of each example for one circuit, in the metric's unit.

        Logits are computed only where the metric reads them.

        Args:
            circuit: see `run_circuit`.

        Raises:
            ValueError: for the reasons of `run_circuit`, or if the metric is not one number for
                each example.
        """
        metric = self.runs.metric
        batch = Batch(self._text, metric)
        stream = batch.read(self._run(circuit, lambda stream: stream))
        with torch.set_grad_enabled(stream.requires_grad):
            logits = self._model.unembed(stream)
            return metric_of_examples(metric, logits, len(stream), batch.mask)

    def _checked(self, source: CircuitSource) -> Tensor | str:
        """Check a source, and return it: `pair`, `zero`, or a tensor of the writers' outputs.

        Raises:
            ValueError: if the source does not fit the texts.
        """
        if isinstance(source, str):
            self._require_named_source(source)
            return source
        sources = (ActivationCache, Tensor)
        require_kind("source", source, sources, "'pair', 'zero', a cache or a tensor")
        outputs = (
            self.graph.contributions(source) if isinstance(source, ActivationCache) else source
        )
        size, n_pos = self._text.tokens.shape
        n_writers = len(self.graph.writers)
        d_model = self._model.config.d_model
        shape = [n_writers, size, n_pos, d_model]
        if [*outputs.shape] not in (shape, [n_writers, 1, n_pos, d_model]):
            raise ValueError(
                "source must be the outputs of all graph.writers, [writer, batch, pos, d_model], "
                f"{shape}; got {[*outputs.shape]}"
            )
        if isinstance(source, ActivationCache):
            self._require_same_padding(mask_of(source, outputs.shape[1:3]), len(outputs[0]))
        if len(outputs[0]) < size and sides_of_padding(self._text.real)[0]:
            because = "one source for all examples needs all first tokens in one column"
            raise ValueError(padding_messages.wrong_side("left", because))
        return outputs

    def _require_same_padding(self, mask: Tensor | None, n_rows: int) -> None:
        """Check that a source has a value of a real token at each real token of the texts.

        Args:
            mask: the mask of the source's texts; None without padding.
            n_rows: the number of the source's texts.

        Raises:
            ValueError: if a text of the source is shorter, or begins in another column.
        """
        real = self._text.real.cpu()
        of_source = real.new_ones(n_rows, real.shape[1]) if mask is None else mask.bool().cpu()
        of_source = of_source.expand_as(real)
        starts_differ = real.int().argmax(1) != of_source.int().argmax(1)
        is_wrong = starts_differ | (real & ~of_source).any(1)
        if is_wrong.any():
            row = int(is_wrong.nonzero()[0])
            raise ValueError(
                padding_messages.different_padding(
                    "the source and the texts", given=f"different padding in text {row}"
                )
            )

    def _require_named_source(self, source: str) -> None:
        """Check that a source is `pair` or `zero`. For `pair`, also check the corrupted texts.

        Raises:
            ValueError: if the source has another name. For `pair`, also if there are no corrupted
                texts, or if their positions do not correspond to the clean texts.
        """
        if source not in ("pair", "zero"):
            raise ValueError(
                f"source must be 'pair', 'zero', a cache or a tensor; got {shown(source)}"
            )
        has_other = self.runs.pairs.corrupted is not None
        if source == "pair" and not (has_other and self._text.is_aligned_with(self.runs.other)):
            raise ValueError(
                "source='pair' needs corrupted texts whose positions correspond; pass corrupted "
                "texts or another source"
            )

    def _mask(self, circuit: EdgeMask | Iterable[str]) -> Tensor:
        """Return the mask of replaced edges, with 0 where there is no edge."""
        if isinstance(circuit, Circuit):
            self.graph.require(circuit.graph.identity)
        mask = circuit if isinstance(circuit, Tensor) else self.graph.mask(circuit)
        shape = self.graph.allowed.shape
        n_pos = self._text.tokens.shape[1]
        if mask.shape not in (shape, (*shape, n_pos)):
            raise ValueError(
                "a mask must be a table with a row for each of graph.writers and a column for each "
                f"of graph.readers, {[*shape]}, with an optional axis of {n_pos} positions; got "
                f"{[*mask.shape]}"
            )
        if mask.dtype == torch.bool:
            raise ValueError(
                "a mask must be numbers, 1 if an edge is replaced; got booleans; pass the "
                "Circuit instead"
            )
        if not ((mask >= 0) & (mask <= 1)).all():
            raise ValueError("a mask must be numbers from 0 to 1; got numbers outside this range")
        like = self.graph.like
        mask = to_device(mask, like.device).to(like.dtype)
        allowed = to_device(self.graph.allowed, like.device)
        return mask * (allowed if mask.ndim == 2 else allowed[..., None])

    def _run(
        self, circuit: EdgeMask | Iterable[str], read: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch pos _size"]:
        """Run a circuit, some examples at a time, and read the stream before the unembedding.

        Args:
            circuit: see `run_circuit`.
            read: a function of the stream [batch, pos, d_model], whose result is returned.
        """
        # Creating a runner raises an error if hooks are active on the model.
        self.graph.runner()
        mask = self._mask(circuit)
        size = len(self._text.tokens)
        bytes_of_one = self._bytes_of_one()
        n_fitting = size if mask.requires_grad else self.runs.max_bytes // bytes_of_one
        if self._whole_source is None and n_fitting >= size:
            self._whole_source = self._source_of(slice(None))
        n = size if mask.requires_grad else max(1, min(n_fitting, _QUICK // bytes_of_one))
        parts = [slice(start, start + n) for start in range(0, size, n)]
        results = []
        for rows in progress_of(parts, "parts of the texts", len(parts)):
            if self._whole_source is None:
                source = self._source_of(rows)
            else:
                source = _examples(self._whole_source, rows)
            with torch.set_grad_enabled(mask.requires_grad):
                results.append(read(self._stream(rows, source, mask)))
        return torch.cat(results)

    def _bytes_of_one(self) -> int:
        """Return the memory of one example in bytes.

        Raises:
            ValueError: if the memory is larger than `max_bytes`.
        """
        width = self._model.config.d_model
        layers = self.graph.layers
        n_readers = max(part.reads.stop - part.reads.start for part in self.graph.sublayers)
        # Count vectors [pos, d_model]: the source and the differences, with one vector for each
        # writer; the cached values of the source run; and the streams of the readers of a block,
        # before and after the norm.
        vectors = 2 * len(self.graph.writers) + 2 * len(layers) + 4 * n_readers + 12
        hidden = 4 * getattr(self._model.config, "d_mlp", 0)
        n_pos = self._text.tokens.shape[1]
        bytes_of_one = (vectors * width + hidden) * n_pos * self.graph.like.element_size()
        if bytes_of_one > self.runs.max_bytes:
            raise ValueError(
                f"max_bytes must be at least {bytes_of_one:,} for one example; got "
                f"{self.runs.max_bytes:,}"
            )
        return int(bytes_of_one)

    @without_gradients
    def _source_of(self, rows: slice) -> Tensor:
        """Return the outputs of the writers in the source run, for some examples."""
        if isinstance(self._source, Tensor):
            return _examples(self._source, rows)
        if self._source == "zero":
            zero = self.graph.like.new_zeros(1, 1, 1, 1)
            return zero.expand(len(self.graph.writers), -1, -1, -1)
        text = self.runs.other.rows(rows)
        return self.graph.added(self.runs.capture(text, self.graph.needed))

    def _stream(self, rows: slice, source: Tensor, mask: Tensor) -> Tensor:
        """Return the stream before the unembedding.

        Args:
            rows: the examples.
            source: the outputs of the writers in the source run.
            mask: the replaced share of each edge.
        """
        text = self._text.rows(rows)
        values: dict[nn.Module, Tensor] = {}
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
                stream = _stream_after(layer, stream, context, streams=streams, values=values)
        logits_reader = slice(len(self.graph.readers) - 1, None)
        return streams.of(logits_reader, stream)[0]


def _examples(source: Tensor, rows: slice) -> Tensor:
    """Return a source for some examples. A source of one row is the source of all examples."""
    return source if source.shape[1] == 1 else source[:, rows]


def _stream_after(
    layer: Layer, before: Tensor, context: Any, streams: "_Streams", values: dict[nn.Module, Tensor]
) -> Tensor:
    """Run a block with a separate stream for each reader, and return the plain stream after it.

    Args:
        layer: the block.
        before: the plain stream before the block.
        context: the other inputs of blocks.
        streams: the streams of the readers. The writers of this block are added to them.
        values: the values of the model's points. Hooks store the values of this block while the
            block runs.
    """
    stream = after = before
    reads = None
    for sublayer in layer.sublayers:
        branch = sublayer.branch
        # Sublayers side by side read the same stream, and a later sublayer reads their sum.
        if branch.reads is not reads:
            stream, reads = after, branch.reads
        if sublayer.is_divided:
            q, k, v = streams.projected(sublayer, stream)
            added = branch.finished(sublayer.divided.mix(q, k, v, context))
        else:
            added = sublayer.output(streams.of(sublayer.reads, stream)[0], context)
        after = after + added
        if sublayer.has_heads:
            for writers in sublayer.outputs(values.__getitem__):
                streams.append(writers.vectors())
        else:
            streams.append(added[None])
    return after


class _Streams:
    """The streams of all readers, updated after each writer.

    Args:
        source: the outputs of the writers in the source run, [writer, batch or 1, pos, d_model].
        mask: the replaced share of each edge, [writer, reader] or [writer, reader, pos].
        stream: the plain stream, which determines the shape.
    """

    def __init__(self, source: Tensor, mask: Tensor, stream: Tensor) -> None:
        self.source, self.mask = all_to_device((source, mask), stream.device)
        self.n = 0
        # The differences, source - current. Without gradients, they are written into one memory.
        # With gradients, autograd keeps the differences that were multiplied by the mask, so they
        # must not be overwritten, and the space grows by `cat`.
        self.space = stream.new_empty(0 if mask.requires_grad else len(mask), *stream.shape)

    def move(self, device: torch.device) -> None:
        """Move all tensors to another device."""
        tensors = self.source, self.mask, self.space
        self.source, self.mask, self.space = all_to_device(tensors, device)

    def append(self, current: Float[Tensor, "writer batch pos d_model"]) -> None:
        """Store the differences of the next writers from their outputs in this run."""
        rows = slice(self.n, self.n + len(current))
        self.n = rows.stop
        if self.mask.requires_grad:
            self.space = torch.cat([self.space, self.source[rows] - current])
        else:
            torch.sub(self.source[rows], current, out=self.space[rows])

    def of(self, readers: slice, stream: Tensor) -> Float[Tensor, "reader batch pos d_model"]:
        """Return the streams of some readers.

        Args:
            readers: the readers.
            stream: the plain stream before the readers.
        """
        mask = self.mask[: self.n, readers]
        differences = self.space[: self.n]
        if mask.ndim == 3:
            return stream + torch.einsum("wrp,wbpd->rbpd", mask, differences)
        flat = torch.addmm(stream.flatten()[None], mask.T, differences.flatten(1))
        return flat.view(-1, *stream.shape)

    def projected(self, sublayer: Sublayer, stream: Tensor) -> Iterator[Tensor]:
        """Yield the queries, the keys and the values of all heads.

        The queries of each head are computed from a separate stream, and so are the keys and the
        values.

        Args:
            sublayer: divided attention.
            stream: the plain stream before the sublayer.
        """
        attn = sublayer.divided
        # Compute all streams at once, because reading the differences takes most of the time.
        streams = self.of(sublayer.reads, stream)
        normed = sublayer.branch.norm(streams.flatten(0, 1))
        normed = normed.view(len(streams), -1, stream.shape[-1])
        weights = (attn.W_Q, attn.b_Q), (attn.W_K, attn.b_K), (attn.W_V, attn.b_V)
        sizes = [len(bias) for _, bias in weights]
        for inputs, (weight, bias) in zip(normed.split(sizes), weights, strict=True):
            heads = torch.baddbmm(bias[:, None], inputs, weight)
            yield rearrange(heads, "head (batch pos) d -> batch pos head d", batch=len(stream))
