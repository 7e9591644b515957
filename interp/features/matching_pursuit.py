"""Dictionaries of matching pursuit: the encoder selects features one after another."""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.features.activations import FeatureValues
from interp.features.dictionary import Dictionary, DictionarySettings
from interp.features.saving import SAELensParts


class MatchingPursuit(Dictionary):
    """A dictionary of matching pursuit (Mallat & Zhang 1993): the encoder selects features one
    after another.

    Each step selects the feature whose decoder row has the largest product with the residual, and
    subtracts the contribution of this feature from the residual.

    Args:
        W_dec: the decoder, [feature d_out]. The encoder is its transpose.
        b_dec: the bias, which is subtracted from the input and added to the output.
        threshold: the encoding of a row ends when its residual is shorter than this.
        most: the maximum number of steps. Default: d_in.
        stops_when_same: whether the encoding of a row also ends when a step selects a feature
            again. Default: True.
        settings: `norm` and the keywords of `DictionaryOrigin`; see `Dictionary`.

    >>> decoder = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    >>> dictionary = MatchingPursuit(decoder, torch.zeros(2), threshold=0.1)
    >>> dictionary.encode(torch.tensor([[[3.0, 4.0]]]))  # five times the third row
    tensor([[[0., 0., 5.]]])
    """

    threshold: float
    most: int
    stops_when_same: bool

    def __init__(
        self,
        W_dec: Float[Tensor, "feature d_out"],
        b_dec: Float[Tensor, " d_out"],
        threshold: float,
        most: int | None = None,
        stops_when_same: bool = True,
        **settings: Unpack[DictionarySettings],
    ) -> None:
        b_enc = W_dec.new_zeros(len(W_dec))
        super().__init__(
            W_enc=W_dec.T,
            W_dec=W_dec,
            b_enc=b_enc,
            b_dec=b_dec,
            activation=nn.ReLU(),
            subtracts_b_dec=True,
            **settings,
        )
        self.threshold = threshold
        self.stops_when_same = stops_when_same
        self.most = self.d_in if most is None else most

    def with_unit_decoder(self) -> Dictionary:
        """Raise an error, because each step of the encoder subtracts decoder rows, so their lengths
        matter.
        """
        raise ValueError(
            "with_unit_decoder needs features of one step; got a dictionary of matching pursuit"
        )

    def _as_sae_lens(self) -> SAELensParts:
        """Return the fields and weights of the architecture `matching_pursuit`."""
        if self.is_transcoder:
            raise ValueError(
                "save needs a dictionary of matching pursuit that writes the point that it reads; "
                f"got {self.reads} -> {self.writes}"
            )
        fields = {
            "architecture": "matching_pursuit",
            "residual_threshold": self.threshold,
            "max_iterations": self.most,
            "stop_on_duplicate_support": self.stops_when_same,
        }
        return fields, {"W_dec": self.W_dec, "b_dec": self.b_dec}

    def encode(self, x: Float[Tensor, "*rows d_in"]) -> FeatureValues:
        """Return the features of each row."""
        rest = (self._normed(x.to(self.W_dec.dtype)) - self.b_dec).reshape(-1, self.d_in)
        features = rest.new_zeros(len(rest), self.n_features)
        going = torch.ones(len(rest), 1, dtype=torch.bool, device=rest.device)
        for _ in range(self.most):
            if not going.any():
                break
            values, numbers = (rest @ self.W_enc).relu().max(-1, keepdim=True)
            before = features
            values = values * going
            features = features.scatter_add(-1, numbers, values)
            rest = rest - values * self.W_dec[numbers[:, 0]]
            if self.stops_when_same:
                going = going & ((features != 0) != (before != 0)).any(-1, keepdim=True)
            if self.threshold > 0:
                going = going & (rest.norm(dim=-1, keepdim=True) >= self.threshold)
        return features.view(*x.shape[:-1], -1)
