"""Cross-layer transcoders, whose features write to several layers."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from interp.features.dictionary import Dictionary
from interp.features.transcoders import Transcoders


class CrossLayerTranscoder(Transcoders):
    """A transcoder whose features of each layer write to that layer and to all later layers
    (Ameisen et al. 2025).

    It is made for attribution graphs.

    Args:
        W_enc: the encoder of each layer, [d_model, feature].
        W_dec: the decoder of each layer, [feature, later, d_model]. Index 0 of the axis `later` is
            the layer of the features, index 1 the next layer, and so on.
        b_enc: the bias of each layer's encoder, [feature].
        b_dec: the biases of the decoders, [layer, d_model]. The bias of a layer is written to this
            layer, whichever features are active.
        activations: a nonlinearity for each layer.
        W_skip: the skip connection of each layer, [d_model, d_model], from the vector that the
            transcoder reads in the layer to the vector that it writes there. Default: no skip
            connections.
        reads, writes: the last part of the names of the points of each layer, such as `resid_mid`
            and `mlp_out`. Default: unknown.
        config: the config in the files of the transcoder. Default: empty.

    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> both = CrossLayerTranscoder(
    ...     W_enc=[one, one],
    ...     W_dec=[torch.ones(1, 2, 1), torch.ones(1, 1, 1)],
    ...     b_enc=[torch.zeros(1), torch.zeros(1)],
    ...     b_dec=torch.zeros(2, 1),
    ...     activations=[nn.ReLU(), nn.ReLU()],
    ... )
    >>> both.decode(both.encode([torch.tensor([[3.0]]), torch.tensor([[5.0]])]))
    [tensor([[3.]]), tensor([[8.]])]
    """

    W_enc: nn.ParameterList
    W_dec: nn.ParameterList
    b_enc: nn.ParameterList
    b_dec: nn.Parameter
    W_skip: nn.ParameterList
    activations: nn.ModuleList

    def __init__(
        self,
        W_enc: list[Float[Tensor, "d_model _feature"]],
        W_dec: list[Float[Tensor, "_feature _later d_model"]],
        b_enc: list[Float[Tensor, " _feature"]],
        b_dec: Float[Tensor, "layer d_model"],
        activations: list[nn.Module],
        *,
        W_skip: list[Float[Tensor, "d_model d_model"]] | None = None,
        reads: str | None = None,
        writes: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(reads=reads, writes=writes, config=config)
        self.W_enc = _frozen(W_enc)
        self.W_dec = _frozen(W_dec)
        self.b_enc = _frozen(b_enc)
        self.W_skip = _frozen(W_skip or [])
        self.b_dec = nn.Parameter(b_dec, requires_grad=False)
        self.activations = nn.ModuleList(activations)

    @property
    def n_layers(self) -> int:
        """The number of layers."""
        return len(self.W_enc)

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers: all layers from 0."""
        return [*range(self.n_layers)]

    def dictionary(self, layer: int) -> Dictionary:
        """Return the features of a layer as a dictionary that writes to that layer only."""
        return Dictionary(
            W_enc=self.W_enc[layer],
            W_dec=self.W_dec[layer][:, 0],
            b_enc=self.b_enc[layer],
            b_dec=self.b_dec[layer],
            activation=self.activations[layer],
            W_skip=self.W_skip[layer] if self.W_skip else None,
            reads=self.reads,
            writes=self.writes,
            transcodes=True,
        )

    def _decoded(self, features: list[Tensor], streams: list[Tensor] | None) -> list[Tensor]:
        """Return the output at each layer: the sum of the decoders of this and all earlier layers.

        Args:
            features: the features of each layer.
            streams: the vector that each layer reads. Needed only for skip connections.

        Raises:
            ValueError: if the transcoder has skip connections, and `streams` is None.
        """
        outputs = []
        for layer, bias in enumerate(self.b_dec):
            written = (
                features[source] @ self.W_dec[source][:, layer - source]
                for source in range(layer + 1)
            )
            outputs.append(sum(written) + bias)
        if not self.W_skip:
            return outputs
        if streams is None:
            raise ValueError(
                "decode needs streams, the vectors that each layer reads, for the skip connections"
            )
        skips = zip(outputs, streams, self.W_skip, strict=True)
        return [output + stream.to(weight.dtype) @ weight for output, stream, weight in skips]


def _frozen(weights: Iterable[Tensor]) -> nn.ParameterList:
    """Return weights as parameters without gradients."""
    return nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
