"""Direct effects of features, errors and embeddings on one feature or direction, with attention and norms frozen.

With patterns and the scales of norms fixed at a run's values, and MLPs cut, a model is linear (Ameisen et al. 2025,
"Circuit Tracing"). The effect of each source is then a product of weights:

1. Start with the direction that the target reads, at its position, pulled back through its norm to the stream.
2. From there go down the layers. At `mlp_out` read off what each feature, the error and the bias of the transcoder add.
3. A skip connection passes the direction on to what the MLP reads; attention passes it on along its pattern.
4. At the bottom read off what embeddings add.

All that is no source, constants that norms, attention and transcoders add, is the bias. The parts add up to the target.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks._torch import without_gradients
from interp.features.activations import Gated
from interp.features.dictionary import Dictionary
from interp.graph import Graph
from interp.inputs.token_positions import at_least_float32, like
from interp.linear.norms import LinearPart, is_identity, linear_part
from interp.protocol import runner_of


class Row(NamedTuple):
    """What each source adds to a target. All parts add up to `total` but for `gap`.

    Attributes:
        features: for each layer with a transcoder.
        errors: of each layer; of one without a transcoder, what its MLP adds.
        embeddings: of tokens, and of positions where the model adds them.
        bias: all constants together.
        total: the target in the run.
        gap: the difference between it and the sum of the parts.
    """

    features: dict[int, Float[Tensor, "pos _feature"]]
    errors: dict[int, Float[Tensor, " pos"]]
    embeddings: Float[Tensor, "writer pos"]
    bias: float
    total: float
    gap: float


class FrozenRun:
    """The run of one text, with attention and norms frozen and transcoders in place of MLPs.

    Args:
        model: a model with the parts that `Graph` needs, in evaluation mode.
        text: the text, or its tokens.
        transcoders: by `blocks.L.mlp_out`; each reads `blocks.L.ln2.normalized`.

    Raises:
        ValueError: if there are several texts, or a dictionary stands or reads elsewhere, has a norm of its own, or a
            gate, as its features are then no linear readings.
        TypeError, ValueError: as for `Graph`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> run = FrozenRun(load("pydoc-4l"), "part ZQXJ-KV8", load_sae("pydoc-4l/transcoders"))
    >>> feature = int(run.features[2][-1].argmax())
    >>> row = run.row(2, -1, feature)
    >>> abs(row.gap) < 1e-4 * abs(row.total)
    True
    """

    @without_gradients
    def __init__(self, model: nn.Module, text: Any, transcoders: Mapping[str, Dictionary]) -> None:
        self.graph = Graph(model, split_embeddings=True)
        blocks = self.graph.model.blocks
        known = {f"blocks.{n}.mlp_out": n for n in range(len(blocks)) if self.graph.layers[n].mlp}
        for name, dictionary in transcoders.items():
            reads = name.replace("mlp_out", "ln2.normalized")
            if name not in known or dictionary.reads not in (reads, "ln2.normalized", None):
                raise ValueError(
                    "a transcoder must stand at blocks.L.mlp_out and read blocks.L.ln2.normalized; got "
                    f"{dictionary.reads} -> {name}"
                )
            if dictionary.norm != "none" or isinstance(dictionary.activation, Gated):
                raise ValueError(
                    f"transcoders must read linearly, without a norm or a gate; got one with it at {name}"
                )
        self.transcoders = {known[name]: d for name, d in transcoders.items()}
        cache = runner_of(model).run_with_cache(text, lazy=True)[1]
        self._cache = cache
        if len(cache["resid_post", -1]) != 1:
            raise ValueError(f"the text must be one; got {len(cache['resid_post', -1])}")
        names = self.graph.names
        self.embeddings = self.graph.inputs(lambda p: at_least_float32(cache[names[p]]))[:, 0]
        self.features: dict[int, Tensor] = {}
        self.errors: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        for n in known.values():
            written, read = self._at(f"blocks.{n}.mlp_out"), self._read(n)
            self.errors[n], self._constants[n] = written, torch.zeros_like(written)
            if n in self.transcoders:
                transcoder = self.transcoders[n]
                self.features[n] = transcoder.encode(read)
                self.errors[n] = written - like(transcoder.decode(self.features[n], read), written)
                constant = like(transcoder.b_dec, written)
                if transcoder.W_skip is not None:
                    bias = like(self._norm(n, "ln2")[0].bias, written)
                    constant = constant + bias @ like(transcoder.W_skip, written)
                self._constants[n] = constant.expand_as(written)

    @without_gradients
    def row(self, layer: int, pos: int, feature: int) -> Row:
        """What each source adds to the pre-activation of a feature.

        Args:
            layer: of a transcoder.
            pos: the position of the feature; -1 is the last.
            feature: its number.
        """
        dictionary, read = self.transcoders[layer], self._read(layer)[pos]
        direction = like(dictionary.W_enc[:, feature], read)
        total = dictionary.pre_activations(read)[feature].item()
        linear, scale = self._norm(layer, "ln2")
        start = torch.zeros_like(self.embeddings[0])
        start[pos] = linear.before(direction) / scale[pos]
        constant = dictionary.b_enc[feature] + like(linear.bias, direction) @ direction
        if dictionary.subtracts_b_dec:
            constant = constant - like(dictionary.b_dec, direction) @ direction
        return self._walk(start, layer, constant.item(), total)

    def _walk(self, g: Tensor, layer: int, bias: float, total: float) -> Row:
        """Go down from what the MLP of a layer reads."""
        features: dict[int, Tensor] = {}
        errors: dict[int, Tensor] = {}
        if not self.graph.layers[layer].is_parallel:
            passed, added = self._attention(layer, g)
            g, bias = g + passed, bias + added
        for n in reversed(range(layer)):
            below = g
            if n in self.errors:
                errors[n] = (self.errors[n] * g).sum(-1)
                bias += (self._constants[n] * g).sum().item()
            if n in self.transcoders:
                transcoder, (linear, scale) = self.transcoders[n], self._norm(n, "ln2")
                features[n] = self.features[n] * (g @ like(transcoder.W_dec, g).mT)
                if transcoder.W_skip is not None:
                    below = g + linear.before(g @ like(transcoder.W_skip, g).mT) / scale
            passed, added = self._attention(n, g if self.graph.layers[n].is_parallel else below)
            g, bias = below + passed, bias + added
        embeddings = (self.embeddings * g).sum(-1)
        parts = [embeddings, *features.values(), *errors.values()]
        gap = sum(part.sum().item() for part in parts) + bias - total
        return Row(features, errors, embeddings, bias, total, gap)

    def _attention(self, n: int, g: Tensor) -> tuple[Tensor, float]:
        """What attention passes on of a direction, [pos d_model], and what its constants add along it."""
        layer = self.graph.layers[n]
        attention, written = layer.attention.sublayer, layer.written
        along = g
        bias = (g @ like(written.constant, g)).sum()
        if layer.scale is not None:
            along = g / self._at(self.graph.names[layer.scale])
        bias = bias + (along @ like(written.bias, g)).sum()
        at_z = torch.einsum("qd,hed->hqe", along, like(written.weight, g))
        at_values = self._at(f"blocks.{n}.attn.pattern").mT @ at_z
        W_V, b_V = like(attention.W_V, g), like(attention.b_V, g)
        at_values = at_values.unflatten(0, (len(W_V), -1)).sum(1)
        linear, scale = self._norm(n, "ln1")
        at_norm = torch.einsum("hke,hde->kd", at_values, W_V)
        bias = bias + (at_values.sum(1) * b_V).sum() + (at_norm @ like(linear.bias, g)).sum()
        return linear.before(at_norm) / scale, bias.item()

    def _at(self, name: str) -> Tensor:
        return at_least_float32(self._cache[name])[0]

    def _norm(self, n: int, name: str) -> tuple[LinearPart, Tensor]:
        """The linear part of a norm of a block, and its scale in the run."""
        norm = getattr(self.graph.model.blocks[n], name)
        linear = linear_part(norm, self.embeddings.shape[-1])
        if is_identity(norm):
            return linear, self.embeddings.new_ones(1).expand(self.embeddings.shape[1], 1)
        return linear, self._at(f"blocks.{n}.{name}.scale")

    def _read(self, n: int) -> Tensor:
        """What the MLP of a block reads."""
        branch = self.graph.model.blocks[n].branches[1]
        if is_identity(branch.norm):
            return self._at(self.graph.names[branch.reads])
        return self._at(f"blocks.{n}.ln2.normalized")
