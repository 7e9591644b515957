"""Direct effects in an attribution graph, from a run with frozen attention and norms.

A model is linear if its patterns and the scales of its norms are frozen at the values of a run, and
the outputs of its MLPs are constants: sums of active features and errors (Ameisen et al. 2025,
"Circuit Tracing"). The effect of each source on a target is then a sum over paths of products of
weights:

1. Run the model once, and encode the value that each transcoder reads. The error of an MLP is the
   part of its output that the features do not explain.
2. Write each target as a direction in the residual stream at a position. A feature or a logit reads
   a direction in the output of a norm. The transpose of the linear part of the norm, divided by the
   scale, maps it to a direction in the stream before the norm.
3. Carry this direction down the layers, and compute the effect of each source
   (`interp.attribution_graphs.descent`).

The last source is the sum of all constants that norms, attention and transcoders add. With this
source, the effects on a target add up to the value of the target.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import (
    Text,
    Texts,
    at_least_float32,
    is_rounding,
    padding_messages,
    require_integer,
    to_device,
    without_gradients,
    writer_of,
)
from interp.attribution_graphs.branches import Branches, JoinedScores
from interp.attribution_graphs.descent import Descent, Targets
from interp.attribution_graphs.padded import PaddedFeatures, grouped
from interp.attribution_graphs.readings import FrozenAttention, FrozenReading, LinearReads
from interp.attribution_graphs.transcoders import AnyTranscoders, LayerTranscoder, by_layer
from interp.features.places import warn_of_place
from interp.graph import Graph
from interp.graph.norms import LinearPart, is_identity, linear_part
from interp.graph.scores import BlockScores
from interp.inputs.texts import text_for
from interp.inputs.words import AnswerTokens
from interp.numbers.precision import all_finite, finite, like
from interp.pairs.answers import Continuations, rows_of_answers
from interp.pairs.scoring import require_causal
from interp.protocol import logits_of, of


class FrozenRun:
    """The run of one text, with frozen attention and norms, and with transcoders in place of MLPs.

    The sources are, in this order: the active features; the error of each layer with an MLP, at
    each position; the tokens; the positions, if the model adds position embeddings; and the sum of
    all constants. The error of a layer without a transcoder is the whole output of the MLP.

    Args:
        model: a model in evaluation mode, with `W_U` and the parts that `Graph` needs.
        text: the text, or its tokens.
        transcoders: transcoders by `blocks.L.mlp_out`, a single transcoder with a known point, or a
            cross-layer transcoder. Each transcoder must read `blocks.L.ln2.normalized`, or the
            stream before that norm.
        first: the first position with features. At earlier positions no feature is active, so the
            output of an MLP is an error, except for its constants. Default: 0.
        answers: the tokens of one answer or of two different answers that continue the text. The
            run then reads the text and all tokens of each answer except the last. The positions
            are the positions of the text, then of the first answer, then of the second answer.
            Default: no answers.

    Attributes:
        tokens: the tokens of all positions.
        branches: the rows that the model runs, one for each answer, and their positions.
        logits: the logits of the model, in at least float32.
        layer, pos, feature, activation: the layer, position, index and value of each active
            feature.
        cache: the cache of the run.
        errors: the errors by layer.
        transcoders, readings: the transcoder of each layer with features, and the value that it
            reads.
        final: the value that the unembedding reads.
        write: a function that returns the texts of tokens, or their ids if the model has no
            tokenizer.

    Raises:
        ValueError: if there are several texts, an answer is several tokens and the model reads
            texts in both directions, a number in the run or in an active part of a transcoder is
            not finite, `first` is negative, or a transcoder reads or writes another point, has the
            wrong size, or has features that are not a nonlinearity applied to a linear map of the
            input: if it normalizes its input, is gated, or uses matching pursuit.
        TypeError, ValueError: for the same reasons as in `Graph`.

    Warns:
        UserWarning: if a transcoder was trained at another place of the model; see
            `interp.features.places`.

    >>> from interp.features import load_transcoders
    >>> from models import load
    >>> transcoders = load_transcoders("pydoc-4l/transcoders")
    >>> run = FrozenRun(load("pydoc-4l"), "part ZQXJ-KV8", transcoders)
    >>> target = run.of_features(torch.tensor([-1]))
    >>> rows = run.rows(target)
    >>> bool((rows.sum(1) - target.total).abs() < 1e-5 * rows.abs().sum(1))
    True
    """

    @without_gradients
    def __init__(
        self,
        model: nn.Module,
        text: Texts,
        transcoders: AnyTranscoders,
        first: int = 0,
        answers: Sequence[AnswerTokens] = (),
    ) -> None:
        self.graph = Graph(model, split_embeddings=True)
        self.model: Any = of(self.graph.model, "W_U")
        self._mlps = {
            number: layer.mlp.branch for number, layer in enumerate(self.graph.layers) if layer.mlp
        }
        self.write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
        one_text = text_for(model, text)
        require_one_text(one_text)
        require_integer("first", first, 0)
        self._texts, self.branches = _texts_of(model, one_text, answers)
        logits = self._run()
        joined = self.branches.joined(logits.detach())
        self.logits: Float[Tensor, "pos vocab"] = at_least_float32(joined)
        tokens = self.branches.joined(self._texts.tokens)
        self.tokens: Int[Tensor, " pos"] = to_device(tokens, self.logits.device)
        _require_finite(self.logits, model)
        self.is_causal = self._looks_back()
        self.inputs = self._inputs(logits.dtype)
        self.transcoders = self._placed(transcoders)
        self.readings = {
            number: self._read_by(number, transcoder)
            for number, transcoder in self.transcoders.items()
        }
        self.final = self.reading(getattr(self.model, "ln_final", None), self.graph.points[-1])
        self._padded: dict[tuple[int, int], PaddedFeatures] = {}
        self._attentions: dict[int, FrozenAttention] = {}
        self._encode(first)

    def _run(self) -> Float[Tensor, "row column vocab"]:
        """Run the model once, set `cache`, and return the logits."""
        names = [*self.graph.needed, *(self.graph.names[point] for point in self._points())]
        output, self.cache = self.graph.runner().run_with_cache(
            self._texts.tokens, names=names, **self._arguments
        )
        return logits_of(output)

    def run_with_hooks(self, hooks: Sequence[Any]) -> None:
        """Run the model with hooks. The values at hook points have an axis of rows."""
        self.graph.runner().run_with_hooks(self._texts.tokens, hooks=hooks, **self._arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        """The arguments of a run besides the tokens: the mask of rows of different lengths."""
        return self._texts.arguments(self.graph.model) if self._has_mask else {}

    @property
    def _has_mask(self) -> bool:
        """True if the rows of two answers have different lengths."""
        return not self.branches.is_single and self._texts.attention_mask is not None

    def _looks_back(self) -> bool:
        """Return True if no query attends to a later key."""
        patterns = (self.pattern(layer) for layer in range(len(self.graph.layers)))
        # Compare with exactly 0: the exponential of a masked score underflows to 0.
        later = [pattern.triu(1).any() for pattern in patterns]
        return not (later and torch.stack(later).any())

    def _inputs(self, dtype: torch.dtype) -> Float[Tensor, "writer pos d_model"]:
        """Return the values that the embeddings add to the stream, or only the input of the first
        block if the sum of these values does not equal it up to the rounding of a dtype.
        """
        inputs = self.graph.inputs(lambda point: self.at(point)[None])[:, 0]
        entering = self.at(self.graph.layers[0].attention.reads)
        if is_rounding(inputs.sum(0), entering, dtype).all():
            return inputs
        # The model changes the embeddings before the first block in an unknown way. Therefore the
        # input of the first block is one source at each position.
        return entering[None]

    def _placed(self, transcoders: AnyTranscoders) -> dict[int, LayerTranscoder]:
        """Return the transcoders of each layer, and warn if a transcoder was trained at another
        place.
        """
        written_at = {self.graph.names[mlp.added]: layer for layer, mlp in self._mlps.items()}
        placed = by_layer(transcoders, written_at)
        for layer, (dictionary, _) in placed.items():
            use = (dictionary.writes, self.graph.names[self._mlps[layer].added])
            warn_of_place(self.graph.runner(), use)
        return placed

    def _encode(self, first: int) -> None:
        """Divide the output of each MLP into active features, constants and an error. Store them.

        The features are the features of the transcoders. The constants are their biases, which do
        not depend on the text. The error is the remainder of the output.
        """
        self.errors = {n: self.at(mlp.added) for n, mlp in self._mlps.items()}
        self.constants: dict[int, Tensor] = {}
        empty = self.tokens.new_zeros(0)
        active = [(empty, empty, empty, self.logits[0, :0])]
        for n in self.transcoders:
            self._explain_constants(n)
            pos, feature, activation = self._explain_features(n, first)
            active.append((torch.full_like(pos, n), pos, feature, activation))
        all_finite({f"the error of layer {n}": error for n, error in self.errors.items()})
        self.layer, self.pos, self.feature, self.activation = map(
            torch.cat, zip(*active, strict=True)
        )

    def _explain_constants(self, n: int) -> None:
        """Subtract the bias and the skip connection of a layer's transcoder from the error."""
        dictionary = self.transcoders[n].dictionary
        reading = self.readings[n]
        explained = self.constants[n] = self.like(dictionary.b_dec)
        if dictionary.W_skip is not None:
            W_skip = self.like(dictionary.W_skip)
            self.constants[n] = explained + reading.linear.bias @ W_skip
            explained = explained + reading.value @ W_skip
        self.errors[n] = self.errors[n] - explained

    def _explain_features(
        self, n: int, first: int
    ) -> tuple[Int[Tensor, " active"], Int[Tensor, " active"], Float[Tensor, " active"]]:
        """Compute the active features of a layer, and subtract their outputs from the errors.

        A cross-layer transcoder writes to later layers too, so the errors of these layers change as
        well.

        Args:
            n: the layer.
            first: the first position that has features. At earlier positions, features count as 0.

        Returns:
            The position, the index and the value of each active feature.
        """
        dictionary, decoders = self.transcoders[n]
        features = dictionary.encode(self.readings[n].value)
        features[:first] = 0
        used = features.any(0).nonzero()[:, 0]
        activations = self.like(features[:, used])
        numbers = {f"the features of layer {n}": features}
        for later, decoder in enumerate(decoders, n):
            rows = decoder[used]
            numbers[f"the decoder of layer {n} to layer {later}"] = rows
            self.errors[later] = self.errors[later] - activations @ self.like(rows)
        all_finite(numbers)
        pos, feature = features.nonzero().T
        return pos, feature, self.like(features[pos, feature])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the run.

        Effects add up to their target only up to rounding in this dtype.
        """
        return self.cache[self.graph.needed[-1]].dtype

    def values(self, parts: Sequence[str]) -> dict[str, Tensor]:
        """Return the values of all points whose last part of the name is among `parts`.

        For example, `["pattern"]` returns the values of `blocks.L.attn.pattern` in all layers.
        """
        names = (name for name in self.cache if name.rpartition(".")[2] in parts)
        return {name: self.cache[name] for name in names}

    def scores_of(self, layer: int) -> BlockScores:
        """Return the attention scores of a block, with their queries, keys and values."""
        block = self.graph.layers[layer]
        stream = self.cache[self.graph.names[block.attention.reads]]
        scores = BlockScores(block, stream, self._context)
        return scores if self.branches.is_single else JoinedScores(scores, self.branches)

    @cached_property
    def _context(self) -> Any:
        """The masks and positions that each block gets besides the residual stream."""
        tokens = to_device(self._texts.tokens, self.logits.device)
        return self.model.context(tokens, **(self._texts.kwargs if self._has_mask else {}))

    @property
    def n_sources(self) -> int:
        """The number of sources."""
        n_pos = len(self.tokens)
        return len(self.layer) + n_pos * (len(self.errors) + len(self.embeddings)) + 1

    @property
    def n_heads(self) -> int:
        """The largest number of heads in a layer."""
        return max(layer.n_heads for layer in self.graph.layers)

    @property
    def embeddings(self) -> list[int]:
        """The indices of the embeddings in `inputs`: of the token embeddings and, if the model has
        them, of the position embeddings. The other inputs are biases.
        """
        names = self.graph.writers[: len(self.inputs)]
        return [number for number, name in enumerate(names) if not name.endswith("bias")]

    @cached_property
    def counts(self) -> dict[int, list[int]]:
        """The number of active features at each position, by the layer of a transcoder."""
        n_pos = len(self.tokens)
        cells = self.layer * n_pos + self.pos
        n_layers = len(self.graph.layers)
        counts = torch.bincount(cells, minlength=n_layers * n_pos).view(n_layers, n_pos).tolist()
        return {n: counts[n] for n in self.transcoders}

    def padded_features(self, layer: int, stop: int) -> PaddedFeatures:
        """Return the active features of a layer at the positions before `stop`, in padded groups.

        Positions with similar numbers of features form a group, in which all positions have the
        same number of slots (`PaddedFeatures`).
        """
        if (layer, stop) not in self._padded:
            self._padded[layer, stop] = self._pad(layer, stop)
        return self._padded[layer, stop]

    def _pad(self, layer: int, stop: int) -> PaddedFeatures:
        """Compute `padded_features`."""
        counts = self.counts[layer][:stop]
        first = sum(sum(self.counts[n]) for n in self.counts if n < layer)
        groups, slot = grouped(counts)
        features = self.feature[first : first + len(slot)]
        return PaddedFeatures(
            first=first,
            groups=[
                (self._places(group.positions), features[self._index(group.features)])
                for group in groups
            ],
            slot=self._index(slot),
        )

    def _places(self, positions: Sequence[int]) -> slice | Int[Tensor, " pos"]:
        """Return a slice of positions in a row, or their indices."""
        start, stop = positions[0], positions[-1] + 1
        return slice(start, stop) if stop - start == len(positions) else self._index(positions)

    def _index(self, numbers: Sequence[Any]) -> Int[Tensor, "..."]:
        """Return indices on the device of the logits."""
        return to_device(torch.tensor(numbers, dtype=torch.long), self.logits.device)

    def attention(self, n: int) -> FrozenAttention:
        """Return the attention of a layer, with all vectors in the dtype of the logits."""
        if n not in self._attentions:
            self._attentions[n] = self._freeze_attention(n)
        return self._attentions[n]

    def _freeze_attention(self, n: int) -> FrozenAttention:
        """Compute `attention`."""
        layer = self.graph.layers[n]
        attention, divided = layer.attention, layer.heads.divided
        added = layer.heads.added
        assert added is not None
        reading = self.reading(attention.norm, attention.reads)
        W_V, b_V = (self.like(part) for part in (divided.W_V, divided.b_V))
        after = self._in_our_dtype(linear_part(attention.after, self.inputs.shape[-1]))
        return FrozenAttention(
            reading=reading,
            after=after,
            bias=self.like(added.bias),
            constant=self.like(added.constant),
            value_constant=(b_V + reading.linear.bias @ W_V).flatten(),
        )

    def _in_our_dtype(self, linear: LinearPart) -> LinearPart:
        """Return the linear part of a norm on the device and in the dtype of the logits."""
        gain = None if linear.gain is None else self.like(linear.gain)
        return replace(linear, gain=gain, bias=self.like(linear.bias))

    @without_gradients
    def of_features(self, sources: Int[Tensor, " target"]) -> Targets:
        """Return the pre-activations of features as targets.

        Args:
            sources: the indices of the features among the active features. A negative index counts
                from the end.
        """
        sources = sources % len(self.layer)
        order, sizes = self._by_layer(sources)
        ordered = sources[order]
        parts = []
        features = self.feature[ordered].split([*sizes.values()])
        places = self.pos[ordered].split([*sizes.values()])
        for n, feature, pos in zip(sizes, features, places, strict=True):
            dictionary = self.transcoders[n].dictionary
            parts.append(
                LinearReads(
                    reading=self.readings[n],
                    stage=2 * n + (not self.graph.layers[n].is_parallel),
                    pos=pos,
                    direction=self.like(dictionary.W_enc[:, feature].mT),
                    offset=self.like(dictionary.offset[feature]),
                )
            )
        back = order.argsort()
        return Targets(*(field[back] for field in self.targets(*parts)))

    def _by_layer(
        self, sources: Int[Tensor, " target"]
    ) -> tuple[Int[Tensor, " target"], dict[int, int]]:
        """Sort features by layer.

        Args:
            sources: the indices of the features among the active features.

        Returns:
            The order of the features, and the number of features in each layer with a transcoder.
        """
        ends = [*itertools.accumulate(sum(counts) for counts in self.counts.values())]
        numbers = [bisect_right(ends, source) for source in sources.tolist()]
        order = sorted(range(len(numbers)), key=lambda place: numbers[place])
        sizes = {n: numbers.count(number) for number, n in enumerate(self.counts)}
        return self._index(order), sizes

    @without_gradients
    def of_logits(
        self, weights: Float[Tensor, "target vocab"], pos: int | Int[Tensor, " target"] = -1
    ) -> Targets:
        """Return weighted sums of the logits at a position as targets.

        If the model caps its logits (a soft cap), these are the logits before the cap. The mean
        over the vocabulary is subtracted from each logit. This makes no difference if the weights
        add up to 0.

        Args:
            weights: the weight of each token's logit in each sum.
            pos: the position of the logits, or one for each sum. Default: -1.
        """
        direction, offset = self.of_vocabulary(weights)
        at = self.tokens.new_zeros(len(weights)) + pos
        return self.targets(
            LinearReads(
                reading=self.final,
                stage=2 * len(self.graph.layers),
                pos=at % len(self.tokens),
                direction=direction,
                offset=offset,
            )
        )

    def of_vocabulary(
        self, weights: Float[Tensor, "target vocab"]
    ) -> tuple[Float[Tensor, "target d_model"], Float[Tensor, " target"]]:
        """Return weighted sums of logits as linear functions of the output of the final norm.

        The mean logit is subtracted from each logit.

        Args:
            weights: the weight of each token's logit in each sum.

        Returns:
            The direction and the offset of each sum. The sum is the product of the direction with
            the output of the final norm, plus the offset.
        """
        weights = self.like(weights)
        weights = weights - weights.mean(-1, keepdim=True)
        direction = weights @ self.like(self.model.W_U).mT
        bias = getattr(self.model, "b_U", None)
        if bias is None:
            return direction, weights.new_zeros(len(weights))
        return direction, weights @ self.like(bias)

    @property
    def logits_before_cap(self) -> Float[Tensor, "pos vocab"]:
        """The logits before a soft cap, which are linear in the output of the final norm."""
        logits = self.final.value @ self.like(self.model.W_U)
        bias = getattr(self.model, "b_U", None)
        return logits if bias is None else logits + self.like(bias)

    @without_gradients
    def rows(
        self,
        targets: Targets,
        strengths: Float[Tensor, "row layer head"] | None = None,
        row: Int[Tensor, " target"] | None = None,
    ) -> Float[Tensor, "row source"]:
        """Return the effect of each source on each target.

        Args:
            targets: the targets.
            strengths: for each row, the factors by which the paths through each head are
                multiplied. The constants that attention adds after the heads keep the factor 1.
                Default: 1.
            row: the index of the row to which the effects on each target are added. Default: one
                row for each target.
        """
        return Descent(self, targets, strengths, row=row).rows

    def targets(self, *parts: LinearReads) -> Targets:
        """Return targets of the form `direction · value + offset`, one part after the other."""
        streams = []
        biases = []
        for reading, _, pos, direction, _ in parts:
            streams.append(reading.linear.before(direction) / reading.scale[pos])
            biases.append(direction @ reading.linear.bias)
        pos = torch.cat([part.pos for part in parts])
        offset = torch.cat([part.offset for part in parts])
        direction = torch.cat([part.direction for part in parts])
        value = torch.cat([part.reading.value[part.pos] for part in parts])
        stages = [[part.stage] * len(part.pos) for part in parts]
        return Targets(
            stage=self._index([*itertools.chain.from_iterable(stages)]),
            pos=pos,
            direction=torch.cat(streams),
            bias=torch.cat(biases) + offset,
            total=(value * direction).sum(-1) + offset,
        )

    def _points(self) -> Iterator[nn.Module]:
        """Yield the points that the run must cache in addition to the points of the graph: inputs
        of sublayers, patterns, and the scales and outputs of norms.
        """
        norms = [getattr(self.model, "ln_final", None)]
        for branch in (*(layer.attention for layer in self.graph.layers), *self._mlps.values()):
            norms.append(branch.norm)
            yield branch.reads
        for layer in self.graph.layers:
            yield layer.heads.divided.pattern
        for norm in norms:
            if norm is not None and not is_identity(norm):
                yield from (norm.scale, norm.normalized)

    def at(self, point: nn.Module) -> Float[Tensor, "*size"]:
        """Return the value of a point in at least float32, on the device of the logits."""
        value = self.branches.joined(at_least_float32(self.cache[self.graph.names[point]]))
        return to_device(value, self.logits.device)

    def pattern(self, layer: int) -> Float[Tensor, "head query key"]:
        """Return the attention pattern of a layer in at least float32, on the device of the
        logits.
        """
        point = self.graph.layers[layer].heads.divided.pattern
        rows = at_least_float32(self.cache[self.graph.names[point]])
        return to_device(self.branches.joined_pattern(rows), self.logits.device)

    def like(self, values: Tensor) -> Tensor:
        """Return values on the device and in the dtype of the logits."""
        return like(values, self.logits)

    def reading(self, norm: Any, stream: nn.Module) -> FrozenReading:
        """Return the output of a norm as a `FrozenReading`.

        If the norm is missing or an identity, the value is the stream.

        Args:
            norm: the norm, or None.
            stream: the point of the stream that the norm reads.
        """
        linear = self._in_our_dtype(linear_part(norm, self.inputs.shape[-1]))
        point = stream if is_identity(norm) else norm.normalized
        value = self.at(point)
        scale = torch.ones_like(value[:, :1]) if is_identity(norm) else self.at(norm.scale)
        return FrozenReading(name=self.graph.names[point], value=value, linear=linear, scale=scale)

    def _read_by(self, layer: int, transcoder: LayerTranscoder) -> FrozenReading:
        """Return the value that the features of a layer read: the input of the MLP, or the stream
        before its norm.
        """
        branch = self._mlps[layer]
        names = self.graph.names
        norm: Any = branch.norm
        known = {names[branch.reads]: None}
        if not is_identity(norm):
            known[names[norm.normalized]] = norm
        wanted = [
            name for name in known if transcoder.dictionary.reads in (name, name.split(".", 2)[-1])
        ]
        if not wanted:
            raise ValueError(
                f"the attribute reads of the transcoder of layer {layer} must be "
                f"{' or '.join(known)}; got {transcoder.dictionary.reads}"
            )
        d_model = self.inputs.shape[-1]
        sizes = {transcoder.dictionary.d_in, *(decoder.shape[1] for decoder in transcoder.decoders)}
        if sizes != {d_model}:
            raise ValueError(
                f"a transcoder must read and write vectors of size {d_model}; got {sorted(sizes)} "
                f"in layer {layer}"
            )
        return self.reading(known[wanted[0]], branch.reads)


def require_one_text(text: Text) -> None:
    """Check that there is one text without padding.

    Raises:
        ValueError: if there are several texts, or padding.
    """
    if len(text.tokens) != 1 or text.has_padding:
        given = f"tokens {[*text.tokens.shape]}"
        raise ValueError(padding_messages.several_texts("text", given))


def _texts_of(
    model: nn.Module, text: Text, answers: Sequence[AnswerTokens]
) -> tuple[Text, Branches]:
    """Return the rows that the model runs, and their positions.

    Args:
        model: the model.
        text: the text.
        answers: the answers; see `FrozenRun`.
    """
    read = [answer[:-1] for answer in answers]
    n_pos = text.tokens.shape[1]
    if not any(read):
        return text, Branches(n_pos)
    require_causal(model, None)
    rows = rows_of_answers(text, Continuations((tuple(answers),)))
    return rows, Branches(n_pos, tuple(len(tokens) for tokens in read))


def _require_finite(logits: Float[Tensor, "pos vocab"], model: nn.Module) -> None:
    """Check that logits are finite.

    Raises:
        ValueError: if logits are not finite. The error names a weight that is not finite, if there
            is one.
    """
    if not logits.isfinite().all():
        for name, weight in model.named_parameters():
            finite(weight, name)
    finite(logits, "logits")
