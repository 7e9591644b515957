"""Direct effects of features, errors and embeddings on features and logits, with attention and norms frozen.

With patterns and the scales of norms fixed at a run's values, and MLPs cut, a model is linear (Ameisen et al. 2025,
"Circuit Tracing"). The effect of each source is then a product of weights:

1. Start with the direction that a target reads, at its position, pulled back through its norm to the stream.
2. From there go down the layers. At `mlp_out` read off what each feature and the error add.
3. A skip connection passes the direction on to what the MLP reads; attention passes it on along its pattern.
4. At the bottom read off what embeddings add.

Constants that norms, attention and transcoders add are the bias. So the parts add up to the target.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.shared import without_gradients
from interp.graph import Graph
from interp.graph.norms import LinearPart, is_identity, linear_part
from interp.inputs.texts import Texts, text_for, writer_of
from interp.numbers.precision import at_least_float32, finite, is_rounding, like
from interp.protocol import logits_of, of
from interp.tracing.transcoders import LayerTranscoder, Transcoders, by_layer

TARGETS_AT_ONCE = 256
"""More are no faster."""


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


class Targets(NamedTuple):
    """Values of the run that are to be explained.

    Attributes:
        layer: the block that reads each; the number of blocks for logits.
        pos: its position.
        direction: the direction of the stream there.
        bias: what its own bias and that of its norm add.
        total: its value.
    """

    layer: Int[Tensor, " target"]
    pos: Int[Tensor, " target"]
    direction: Float[Tensor, "target d_model"]
    bias: Float[Tensor, " target"]
    total: Float[Tensor, " target"]


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
        errors: by layer.
        transcoders, readings: of each layer with features: these, and what they read.
        final: what the unembedding reads.
        write: gives the text of tokens, or their numbers where the model has no tokenizer.

    Raises:
        ValueError: if there are several texts, a number of the run or of a transcoder in it is not finite, if `first` is negative, or if a transcoder stands or reads elsewhere, has another
            size, or has a norm or a gate of its own, as its features are then no linear readings.
        TypeError, ValueError: as for `Graph`.

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
        self.graph = graph = Graph(model, split_embeddings=True)
        self.model: Any = of(graph.model, "W_U")
        self._mlps = {n: layer.mlp.branch for n, layer in enumerate(graph.layers) if layer.mlp}
        given = text_for(model, text)
        if len(given.tokens) != 1 or not given.real.all():
            raise ValueError(f"the text must be one, without padding; got {[*given.tokens.shape]}")
        if first < 0:
            raise ValueError(f"first must be 0 or more; got {first}")
        self.tokens: Int[Tensor, " pos"] = given.tokens[0]
        self.write = writer_of(model) or (lambda tokens: [*map(str, tokens)])
        names = [*graph.needed, *(graph.names[point] for point in self._points())]
        output, self._cache = graph.runner().run_with_cache(given.tokens, names=names)
        self.logits: Float[Tensor, "pos vocab"] = at_least_float32(logits_of(output)[0].detach())
        if not self.logits.isfinite().all():  # a weight's name says more than a place among logits
            for name, weight in model.named_parameters():
                finite(weight, name)
        finite(self.logits, "logits")
        patterns = (self._at(layer.attention.sublayer.pattern) for layer in graph.layers)
        self._is_causal = not any(pattern.triu(1).any() for pattern in patterns)
        self._inputs = graph.inputs(lambda point: self._at(point)[None])[:, 0]
        entering = self._at(graph.layers[0].attention.reads)
        if not is_rounding(self._inputs.sum(0), entering, logits_of(output).dtype).all():
            # Something acts on the embeddings that is no norm of ours: their result is the source.
            self._inputs = entering[None]
        self.transcoders = by_layer(
            transcoders, {graph.names[mlp.added]: n for n, mlp in self._mlps.items()}
        )
        self.readings = {n: self._read_by(n, each) for n, each in self.transcoders.items()}
        self.final = self._reading(getattr(self.model, "ln_final", None), graph.points[-1])
        self.errors = {n: self._at(mlp.added) for n, mlp in self._mlps.items()}
        self._constants = {n: torch.zeros_like(error) for n, error in self.errors.items()}
        empty = self.tokens.new_zeros(0)
        active = [(empty, empty, empty, self.logits[0, :0])]
        for n, (dictionary, decoders) in self.transcoders.items():
            reading, explained = self.readings[n], self._like(dictionary.b_dec)
            self._constants[n] += explained
            if dictionary.W_skip is not None:
                W_skip = self._like(dictionary.W_skip)
                self._constants[n] += self._like(reading.linear.bias) @ W_skip
                explained = explained + reading.value @ W_skip
            self.errors[n] = self.errors[n] - explained
            features = dictionary.encode(reading.value)
            features[:first] = 0
            used = finite(features, f"the features of layer {n}").any(0).nonzero()[:, 0]
            for later, decoder in enumerate(decoders, n):
                finite(decoder[used], f"the decoder of layer {n} to layer {later}")
                made = self._like(features[:, used]) @ self._like(decoder[used])
                self.errors[later] = self.errors[later] - made
            pos, feature = features.nonzero().T
            active.append(
                (torch.full_like(pos, n), pos, feature, self._like(features[pos, feature]))
            )
        for n, error in self.errors.items():
            finite(error, f"what features and constants leave of layer {n}'s output")
        self.layer, self.pos, self.feature, self.activation = map(
            torch.cat, zip(*active, strict=True)
        )

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
        names = self.graph.writers[: len(self._inputs)]
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
            direction = self._like(dictionary.W_enc[:, self.feature[chosen]].mT)
            offset = self._like(dictionary.offset[self.feature[chosen]])
            parts.append(self._targets(self.readings[n], n, self.pos[chosen], direction, offset))
        return Targets(*(torch.cat(part)[order.argsort()] for part in zip(*parts, strict=True)))

    @without_gradients
    def of_logits(self, weights: Float[Tensor, "target vocab"], pos: int = -1) -> Targets:
        """Weighted sums of logits at a position, before a cap.

        Each is less the same sum of the mean logit, unless its weights add up to 0.
        """
        direction, offset = self.of_vocabulary(weights)
        at = self.tokens.new_full((len(weights),), pos % len(self.tokens))
        return self._targets(self.final, len(self.graph.layers), at, direction, offset)

    def of_vocabulary(
        self, weights: Float[Tensor, "target vocab"]
    ) -> tuple[Float[Tensor, "target d_model"], Float[Tensor, " target"]]:
        """The directions and offsets, after the final norm, of weighted sums of logits less their mean."""
        weights = self._like(weights)
        weights = weights - weights.mean(-1, keepdim=True)
        direction, bias = weights @ self._like(self.model.W_U).mT, getattr(self.model, "b_U", None)
        return direction, weights.new_zeros(len(weights)) if bias is None else weights @ self._like(
            bias
        )

    @without_gradients
    def promoted_tokens(self, sources: Int[Tensor, " source"], k: int = 3) -> list[list[str]]:
        """The tokens whose logits the decoders of features raise most, all layers that they write to together."""
        if not len(sources):
            return []
        written = torch.stack([
            self._like(torch.stack([each[feature] for each in self.transcoders[layer].decoders]).sum(0))
            for layer, feature in zip(self.layer[sources].tolist(), self.feature[sources].tolist(), strict=True)
        ])  # fmt: skip
        logits = self.final.linear.after(written) @ self._like(self.model.W_U)
        return [self.write(row) for row in logits.topk(k).indices.tolist()]

    @without_gradients
    def rows(
        self, targets: Targets, strengths: Float[Tensor, "target layer head"] | None = None
    ) -> Float[Tensor, "target source"]:
        """What each source adds to each target.

        Args:
            targets: the targets.
            strengths: what each head's paths are multiplied by, for each target. Biases stay as they are.
        """
        order = targets.layer.argsort(descending=True, stable=True)
        layer, pos, direction, bias, _ = (part[order] for part in targets)
        strengths = None if strengths is None else strengths[order]
        # Where attention looks back alone, all is 0 behind the last target.
        stop = int(pos.max()) + 1 if self._is_causal else len(self.tokens)
        g = direction.new_zeros(stop, len(layer), direction.shape[-1])
        rows = direction.new_zeros(len(layer), self.n_sources)
        rows[:, -1] = bias

        def start(now: int) -> None:
            places = (layer == now).nonzero()[:, 0]
            g[pos[places], places] = direction[places]

        start(len(self.graph.layers))
        for n in reversed(range(len(self.graph.layers))):
            later, here = int((layer > n).sum()), int((layer >= n).sum())
            seen = g[:, :later]
            passed = self._through_mlp(n, seen, rows[:later])
            if self.graph.layers[n].is_parallel:
                passed = passed + self._through_attention(n, seen, rows[:later], strengths)
                g[:, :later] = passed
                start(n)
            else:
                g[:, :later] = passed
                start(n)
                g[:, :here] += self._through_attention(n, g[:, :here], rows[:here], strengths)
        column = len(self.layer) + len(self.tokens) * len(self.errors)
        for n, part in enumerate(self._inputs[:, :stop]):
            added = torch.einsum("ptd,pd->tp", g, part)
            if n in self.embeddings:
                rows[:, column : column + stop] = added
                column += len(self.tokens)
            else:
                rows[:, -1] += added.sum(1)
        return rows[order.argsort()]

    def _through_mlp(
        self, n: int, g: Float[Tensor, "pos target d_model"], rows: Float[Tensor, "target source"]
    ) -> Float[Tensor, "pos target d_model"]:
        """Read off what is added at `mlp_out`, and return the direction in the stream that the MLP reads."""
        if n not in self.errors:
            return g
        first = len(self.layer) + len(self.tokens) * [*self.errors].index(n)
        rows[:, first : first + len(g)] = torch.einsum("ptd,pd->tp", g, self.errors[n][: len(g)])
        rows[:, -1] += torch.einsum("ptd,pd->t", g, self._constants[n][: len(g)])
        for layer, (_, decoders) in self.transcoders.items():
            if not 0 <= n - layer < len(decoders):
                continue
            W_dec = decoders[n - layer]
            begin = int((self.layer < layer).sum())
            counts = self.pos[self.layer == layer].bincount(minlength=len(self.tokens)).tolist()
            for direction, count in zip(g, counts, strict=False):
                columns = slice(begin, begin + count)
                written = self._like(W_dec[self.feature[columns]])
                rows[:, columns] += direction @ written.mT * self.activation[columns]
                begin += count
        skip = self.transcoders[n].dictionary.W_skip if n in self.transcoders else None
        if skip is None:
            return g
        reading = self.readings[n]
        through = reading.linear.before(g @ self._like(skip).mT)
        return g + through / reading.scale[: len(g), None]

    def _through_attention(
        self,
        n: int,
        g: Float[Tensor, "pos target d_model"],
        rows: Float[Tensor, "target source"],
        strengths: Float[Tensor, "every layer head"] | None,
    ) -> Float[Tensor, "pos target d_model"]:
        """What attention passes on of a direction. What its constants add goes to the bias."""
        layer, (stop, n_targets, _) = self.graph.layers[n], g.shape
        attention, added = layer.attention.sublayer, layer.added
        rows[:, -1] += g.sum(0) @ self._like(added.constant)
        along = g if layer.scale is None else g / self._at(layer.scale)[:stop, None]
        rows[:, -1] += along.sum(0) @ self._like(added.bias)
        W_O, W_V, b_V = (self._like(part) for part in (added.weight, attention.W_V, attention.b_V))
        heads, d_head, _ = W_O.shape
        at_z = (along @ W_O.flatten(0, 1).mT).unflatten(-1, (heads, d_head))
        if strengths is not None:
            at_z = at_z * strengths[:n_targets, n, :, None]
        pattern = self._at(attention.pattern)[:, :stop, :stop]
        at_z = at_z.permute(2, 0, 1, 3).reshape(heads, stop, n_targets * d_head)
        at_v = (pattern.mT @ at_z).view(len(W_V), heads // len(W_V), stop, n_targets, d_head).sum(1)
        reading = self._reading(layer.attention.norm, layer.attention.reads)
        # What every value has whatever the norm reads: its bias, and that of the norm through W_V.
        constant = b_V + torch.einsum("d,hde->he", self._like(reading.linear.bias), W_V)
        rows[:, -1] += torch.einsum("hpte,he->t", at_v, constant)
        read = reading.linear.before(W_V.mT.flatten(0, 1))
        at_norm = at_v.permute(1, 2, 0, 3).flatten(2) @ read
        return at_norm / reading.scale[:stop, None]

    def _targets(
        self,
        reading: FrozenReading,
        layer: int,
        pos: Int[Tensor, " target"],
        direction: Float[Tensor, "target d_model"],
        offset: Float[Tensor, " target"],
    ) -> Targets:
        total = (reading.value[pos] * direction).sum(-1) + offset
        bias = direction @ self._like(reading.linear.bias) + offset
        stream = reading.linear.before(direction) / reading.scale[pos]
        return Targets(torch.full_like(pos, layer), pos, stream, bias, total)

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

    def _at(self, point: nn.Module) -> Tensor:
        return at_least_float32(self._cache[self.graph.names[point]])[0]

    def _like(self, values: Tensor) -> Tensor:
        return like(values, self.logits)

    def _reading(self, norm: Any, stream: nn.Module) -> FrozenReading:
        linear = linear_part(norm, self._inputs.shape[-1])
        point = stream if is_identity(norm) else norm.normalized
        value = self._at(point)
        scale = torch.ones_like(value[:, :1]) if is_identity(norm) else self._at(norm.scale)
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
        d_model = self._inputs.shape[-1]
        sizes = {transcoder.dictionary.d_in, *(each.shape[1] for each in transcoder.decoders)}
        if sizes != {d_model}:
            raise ValueError(
                f"a transcoder must read and write {d_model} numbers; got {sorted(sizes)} in layer {layer}"
            )
        return self._reading(known[wanted[0]], branch.reads)
