"""Direct effects of features, errors and embeddings on features and logits, with attention and norms frozen.

With patterns and the scales of norms fixed at a run's values, and MLPs cut, a model is linear (Ameisen et al. 2025,
"Circuit Tracing"). The effect of each source is then a product of weights:

1. Run the model once, and encode what each transcoder reads. What features do not explain of an MLP is its error.
2. A target is a direction that something reads, at its position, pulled back through its norm to the stream.
3. Carry that direction down the layers, and read off what each source adds (`interp.tracing.descent`).

Constants that norms, attention and transcoders add are the bias. So the parts add up to the target.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import (
    Texts,
    at_least_float32,
    is_rounding,
    require_integer,
    to_device,
    without_gradients,
    writer_of,
)
from interp.features.places import warn_of_place
from interp.graph import Graph
from interp.graph.norms import LinearPart, is_identity, linear_part
from interp.graph.scores import BlockScores
from interp.inputs.texts import text_for
from interp.numbers.precision import finite, like
from interp.protocol import logits_of, of
from interp.tracing.descent import Descent, Targets
from interp.tracing.transcoders import LayerTranscoder, Transcoders, by_layer


class FrozenReading(NamedTuple):
    """What an MLP, a transcoder or the unembedding reads in the run, and the norm before it.

    Attributes:
        name: its point.
        value: what is read.
        linear: the linear part of the norm.
        scale: what the norm divided by.
    """

    name: str
    value: Float[Tensor, "pos d_model"]
    linear: LinearPart
    scale: Float[Tensor, "pos 1"]


class FrozenRun:
    """The run of one text, with attention and norms frozen and transcoders in place of MLPs.

    Its sources are, in this order: active features; the error of each layer with an MLP at each position, which is all
    that an MLP without a transcoder adds; tokens; positions, where the model adds them; and all constants together.

    Args:
        model: a model with the parts that `Graph` needs and `W_U`, in evaluation mode.
        text: the text, or its tokens.
        transcoders: by `blocks.L.mlp_out`, or one that says where it belongs, or one of all layers. Each reads
            `blocks.L.ln2.normalized`, or the stream before that norm.
        first: the first position with features. What MLPs add before it are errors.

    Attributes:
        tokens: the text.
        logits: of the model, in at least float32.
        layer, pos, feature, activation: of each active feature.
        cache: of the run.
        errors: by layer.
        transcoders, readings: of each layer with features: these, and what they read.
        final: what the unembedding reads.
        write: gives the text of tokens, or their numbers where the model has no tokenizer.

    Raises:
        ValueError: if there are several texts, a number of the run or of a transcoder in it is not finite, if `first` is negative, or if a transcoder stands or reads elsewhere, has another
            size, or has a norm or a gate of its own, as its features are then no linear readings.
        TypeError, ValueError: as for `Graph`.

    Warns:
        UserWarning: if a transcoder says that it was trained at another place; see
            `interp.features.places`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> run = FrozenRun(load("pydoc-4l"), "part ZQXJ-KV8", load_sae("pydoc-4l/transcoders"))
    >>> target = run.of_features(torch.tensor([-1]))
    >>> rows = run.rows(target)
    >>> bool((rows.sum(1) - target.total).abs() < 1e-5 * rows.abs().sum(1))
    True
    """

    @without_gradients
    def __init__(
        self, model: nn.Module, text: Texts, transcoders: Transcoders, first: int = 0
    ) -> None:
        self.graph = Graph(model, split_embeddings=True)
        self.model: Any = of(self.graph.model, "W_U")
        self._mlps = {n: layer.mlp.branch for n, layer in enumerate(self.graph.layers) if layer.mlp}
        self.write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
        one_text = text_for(model, text)
        if len(one_text.tokens) != 1 or not one_text.real.all():
            raise ValueError(
                f"the text must be one, without padding; got {[*one_text.tokens.shape]}"
            )
        require_integer("first", first, 0)
        logits = self._run(one_text.tokens)
        self.logits: Float[Tensor, "pos vocab"] = at_least_float32(logits[0].detach())
        self.tokens: Int[Tensor, " pos"] = to_device(one_text.tokens[0], self.logits.device)
        _require_finite(self.logits, model)
        self.is_causal = self._looks_back()
        self.inputs = self._inputs(logits.dtype)
        self.transcoders = self._placed(transcoders)
        self.readings = {n: self._read_by(n, each) for n, each in self.transcoders.items()}
        self.final = self.reading(getattr(self.model, "ln_final", None), self.graph.points[-1])
        self._encode(first)

    def _run(self, tokens: Int[Tensor, "1 pos"]) -> Float[Tensor, "1 pos vocab"]:
        """Run the model once, set `cache`, and return the logits."""
        names = [*self.graph.needed, *(self.graph.names[point] for point in self._points())]
        output, self.cache = self.graph.runner().run_with_cache(tokens, names=names)
        return logits_of(output)

    def _looks_back(self) -> bool:
        """Whether no query has weight at a later key."""
        patterns = (self.at(layer.attention.sublayer.pattern) for layer in self.graph.layers)
        # A masked weight is exactly 0: the exponential of its score is below the smallest number.
        return not any(pattern.triu(1).any() for pattern in patterns)

    def _inputs(self, dtype: torch.dtype) -> Float[Tensor, "writer pos d_model"]:
        """The embeddings whose sum enters the first block, up to the rounding of a dtype."""
        inputs = self.graph.inputs(lambda point: self.at(point)[None])[:, 0]
        entering = self.at(self.graph.layers[0].attention.reads)
        if is_rounding(inputs.sum(0), entering, dtype).all():
            return inputs
        # Something acts on the embeddings that is no norm of ours: their result is the source.
        return entering[None]

    def _placed(self, transcoders: Transcoders) -> dict[int, LayerTranscoder]:
        """The transcoders of each layer; a warning if one was trained at another place."""
        written_at = {self.graph.names[mlp.added]: n for n, mlp in self._mlps.items()}
        placed = by_layer(transcoders, written_at)
        for n, (dictionary, _) in placed.items():
            use = dictionary.writes, self.graph.names[self._mlps[n].added]
            warn_of_place(self.graph.runner(), use)
        return placed

    def _encode(self, first: int) -> None:
        """Encode what transcoders read: set the active features, errors and constants.

        An error is what active features and constants leave of the output of an MLP.
        """
        self.errors = {n: self.at(mlp.added) for n, mlp in self._mlps.items()}
        self.constants = {n: torch.zeros_like(error) for n, error in self.errors.items()}
        empty = self.tokens.new_zeros(0)
        active = [(empty, empty, empty, self.logits[0, :0])]
        for n in self.transcoders:
            self._explain_constants(n)
            pos, feature, activation = self._explain_features(n, first)
            active.append((torch.full_like(pos, n), pos, feature, activation))
        for n, error in self.errors.items():
            finite(error, f"what features and constants leave of layer {n}'s output")
        self.layer, self.pos, self.feature, self.activation = map(
            torch.cat, zip(*active, strict=True)
        )

    def _explain_constants(self, n: int) -> None:
        """Take the bias and the skip connection of a layer's transcoder out of the error."""
        dictionary, reading = self.transcoders[n].dictionary, self.readings[n]
        explained = self.like(dictionary.b_dec)
        self.constants[n] += explained
        if dictionary.W_skip is not None:
            W_skip = self.like(dictionary.W_skip)
            self.constants[n] += self.like(reading.linear.bias) @ W_skip
            explained = explained + reading.value @ W_skip
        self.errors[n] = self.errors[n] - explained

    def _explain_features(
        self, n: int, first: int
    ) -> tuple[Int[Tensor, " active"], Int[Tensor, " active"], Float[Tensor, " active"]]:
        """Take what a layer's features write out of the errors of this layer and later ones.

        Returns:
            The position, the number and the value of each active feature.
        """
        dictionary, decoders = self.transcoders[n]
        features = dictionary.encode(self.readings[n].value)
        features[:first] = 0
        used = finite(features, f"the features of layer {n}").any(0).nonzero()[:, 0]
        for later, decoder in enumerate(decoders, n):
            finite(decoder[used], f"the decoder of layer {n} to layer {later}")
            made = self.like(features[:, used]) @ self.like(decoder[used])
            self.errors[later] = self.errors[later] - made
        pos, feature = features.nonzero().T
        return pos, feature, self.like(features[pos, feature])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the run, whose rounding sums may miss."""
        return self.cache[self.graph.needed[-1]].dtype

    def values(self, parts: Sequence[str]) -> dict[str, Tensor]:
        """The values of all points whose names end in one of these, such as `pattern`."""
        names = (name for name in self.cache if name.rpartition(".")[2] in parts)
        return {name: self.cache[name] for name in names}

    def scores_of(self, layer: int) -> BlockScores:
        """The scores of a block, and what they are made of."""
        block = self.graph.layers[layer]
        stream = self.cache[self.graph.names[block.attention.reads]]
        return BlockScores(block, stream, self._context)

    @cached_property
    def _context(self) -> Any:
        return self.model.context(self.tokens[None])

    @property
    def n_sources(self) -> int:
        """The number of sources."""
        n_pos = len(self.tokens)
        return len(self.layer) + n_pos * (len(self.errors) + len(self.embeddings)) + 1

    @property
    def n_heads(self) -> int:
        """The most heads of a layer."""
        return max(layer.heads.stop - layer.heads.start for layer in self.graph.layers)

    @property
    def embeddings(self) -> list[int]:
        """The embeddings among the first writers of the graph: of tokens and, where there are any, of positions."""
        names = self.graph.writers[: len(self.inputs)]
        return [n for n, name in enumerate(names) if not name.endswith("bias")]

    @without_gradients
    def of_features(self, sources: Int[Tensor, " target"]) -> Targets:
        """The pre-activations of features, by their numbers among the active ones."""
        sources = sources % len(self.layer)
        parts = []
        # Sources are in the order of layers, so their parts are put back by one sort.
        ordered, order = sources.sort()
        for n, (dictionary, _) in self.transcoders.items():
            chosen = ordered[self.layer[ordered] == n]
            direction = self.like(dictionary.W_enc[:, self.feature[chosen]].mT)
            offset = self.like(dictionary.offset[self.feature[chosen]])
            stage = 2 * n + (not self.graph.layers[n].is_parallel)
            parts.append(self.targets(self.readings[n], stage, self.pos[chosen], direction, offset))
        return Targets(*(torch.cat(part)[order.argsort()] for part in zip(*parts, strict=True)))

    @without_gradients
    def of_logits(self, weights: Float[Tensor, "target vocab"], pos: int = -1) -> Targets:
        """Weighted sums of logits at a position, before a cap.

        Each is less the same sum of the mean logit, unless its weights add up to 0.
        """
        direction, offset = self.of_vocabulary(weights)
        at = self.tokens.new_full((len(weights),), pos % len(self.tokens))
        return self.targets(self.final, 2 * len(self.graph.layers), at, direction, offset)

    def of_vocabulary(
        self, weights: Float[Tensor, "target vocab"]
    ) -> tuple[Float[Tensor, "target d_model"], Float[Tensor, " target"]]:
        """The directions and offsets, after the final norm, of weighted sums of logits less their mean."""
        weights = self.like(weights)
        weights = weights - weights.mean(-1, keepdim=True)
        direction, bias = weights @ self.like(self.model.W_U).mT, getattr(self.model, "b_U", None)
        return direction, weights.new_zeros(len(weights)) if bias is None else weights @ self.like(
            bias
        )

    @without_gradients
    def rows(
        self, targets: Targets, strengths: Float[Tensor, "target layer head"] | None = None
    ) -> Float[Tensor, "target source"]:
        """What each source adds to each target.

        Args:
            targets: the targets.
            strengths: what each head's paths are multiplied by, for each target. Biases stay as they are.
        """
        return Descent(self, targets, strengths).rows

    def targets(
        self,
        reading: FrozenReading,
        stage: int,
        pos: Int[Tensor, " target"],
        direction: Float[Tensor, "target d_model"],
        offset: Float[Tensor, " target"],
    ) -> Targets:
        """Directions of what is read, at a stage and at positions, as targets."""
        total = (reading.value[pos] * direction).sum(-1) + offset
        bias = direction @ self.like(reading.linear.bias) + offset
        stream = reading.linear.before(direction) / reading.scale[pos]
        return Targets(torch.full_like(pos, stage), pos, stream, bias, total)

    def _points(self) -> Iterator[nn.Module]:
        """The points that are needed besides those of the graph."""
        norms = [getattr(self.model, "ln_final", None)]
        for branch in (*(layer.attention for layer in self.graph.layers), *self._mlps.values()):
            norms.append(branch.norm)
            yield branch.reads
        for layer in self.graph.layers:
            yield layer.attention.sublayer.pattern
        for norm in norms:
            if norm is not None and not is_identity(norm):
                yield from (norm.scale, norm.normalized)

    def at(self, point: nn.Module) -> Float[Tensor, "*size"]:
        """The value of a point, in at least float32, on the device of the logits."""
        value = at_least_float32(self.cache[self.graph.names[point]])[0]
        return to_device(value, self.logits.device)

    def like(self, values: Tensor) -> Tensor:
        """Values on the device and in the dtype of the logits."""
        return like(values, self.logits)

    def reading(self, norm: Any, stream: nn.Module) -> FrozenReading:
        """What a norm gives of a point of the stream."""
        linear = linear_part(norm, self.inputs.shape[-1])
        point = stream if is_identity(norm) else norm.normalized
        value = self.at(point)
        scale = torch.ones_like(value[:, :1]) if is_identity(norm) else self.at(norm.scale)
        return FrozenReading(self.graph.names[point], value, linear, scale)

    def _read_by(self, layer: int, transcoder: LayerTranscoder) -> FrozenReading:
        """What features read: what the MLP reads, or the stream."""
        branch, names = self._mlps[layer], self.graph.names
        known = {names[branch.reads]: None}
        if not is_identity(branch.norm):
            known[names[branch.norm.normalized]] = branch.norm
        wanted = [
            name for name in known if transcoder.dictionary.reads in (name, name.split(".", 2)[-1])
        ]
        if not wanted:
            raise ValueError(
                f"the transcoder of layer {layer} must read {' or '.join(known)}, and say so in its `reads`; "
                f"got {transcoder.dictionary.reads}"
            )
        d_model = self.inputs.shape[-1]
        sizes = {transcoder.dictionary.d_in, *(each.shape[1] for each in transcoder.decoders)}
        if sizes != {d_model}:
            raise ValueError(
                f"a transcoder must read and write {d_model} numbers; got {sorted(sizes)} in layer {layer}"
            )
        return self.reading(known[wanted[0]], branch.reads)


def _require_finite(logits: Float[Tensor, "pos vocab"], model: nn.Module) -> None:
    """Refuse logits that are not finite.

    Raises:
        ValueError: naming a weight that is not finite, as that says more than a place among logits.
    """
    if not logits.isfinite().all():
        for name, weight in model.named_parameters():
            finite(weight, name)
    finite(logits, "logits")
