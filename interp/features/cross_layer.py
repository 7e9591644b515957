"""Transcoders across layers."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from interp.features.dictionary import Dictionary


class CrossLayerTranscoder(nn.Module):
    """Features of each layer that write to it and to all later layers (Ameisen et al. 2025). It serves attribution graphs.

    Args:
        W_enc: encoders, one [d_model feature] for each layer.
        W_dec: decoders, one [feature later d_model] for each layer: what its features write to this layer, the next, ...
        b_enc: biases of the encoders, one [feature] for each layer.
        b_dec: what is written to each layer whatever the features are, [layer d_model].
        activations: a nonlinearity for each layer.
        W_skip: skip connections, one [d_model d_model] for each layer, from what it reads to what is written there.
        reads, writes: the last part of the names of the points of each layer, such as `resid_mid` and `mlp_out`.
        config: what its files say about it.

    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> both = CrossLayerTranscoder(
    ...     [one, one], [torch.ones(1, 2, 1), torch.ones(1, 1, 1)], [torch.zeros(1)] * 2, torch.zeros(2, 1), [nn.ReLU()] * 2)
    >>> both.decode(both.encode([torch.tensor([[3.0]]), torch.tensor([[5.0]])]))
    [tensor([[3.]]), tensor([[8.]])]
    """

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
        super().__init__()
        self.W_enc, self.W_dec, self.b_enc, self.W_skip = (
            nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
            for weights in (W_enc, W_dec, b_enc, W_skip or [])
        )
        self.b_dec = nn.Parameter(b_dec, requires_grad=False)
        self.activations = nn.ModuleList(activations)
        self.reads, self.writes, self.config = reads, writes, dict(config or {})

    @property
    def n_layers(self) -> int:
        """The number of layers."""
        return len(self.W_enc)

    def dictionary(self, layer: int) -> Dictionary:
        """Return what the features of a layer read, and what they write to that layer alone."""
        return Dictionary(
            self.W_enc[layer], self.W_dec[layer][:, 0], self.b_enc[layer], self.b_dec[layer], self.activations[layer],
            W_skip=self.W_skip[layer] if self.W_skip else None, reads=self.reads, writes=self.writes, transcodes=True,
        )  # fmt: skip

    def encode(
        self, streams: list[Float[Tensor, "*rows d_model"]]
    ) -> list[Float[Tensor, "*rows _feature"]]:
        """Return the features of each layer, from what each reads."""
        layers = map(self.dictionary, range(self.n_layers))
        return [layer.encode(x) for x, layer in zip(streams, layers, strict=True)]

    def decode(
        self,
        features: list[Float[Tensor, "*rows _feature"]],
        streams: list[Float[Tensor, "*rows d_model"]] | None = None,
    ) -> list[Float[Tensor, "*rows d_model"]]:
        """Return what is written to each layer.

        Args:
            features: the features of each layer.
            streams: what each layer reads, for skip connections.

        Raises:
            ValueError: if there are skip connections, and nothing for them to read.
        """
        outputs = [
            sum(features[n] @ self.W_dec[n][:, layer - n] for n in range(layer + 1)) + bias
            for layer, bias in enumerate(self.b_dec)
        ]
        if not self.W_skip:
            return outputs
        if streams is None:
            raise ValueError("decode needs what each layer reads, as there are skip connections")
        skips = zip(outputs, streams, self.W_skip, strict=True)
        return [output + x.to(W.dtype) @ W for output, x, W in skips]
