"""Dictionaries whose encoder takes one feature after another."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.features.activations import Features
from interp.features.dictionary import Dictionary


class MatchingPursuit(Dictionary):
    """A dictionary whose encoder takes one feature after another, each the best for what is left (Mallat & Zhang 1993).

    Args:
        W_dec: decoder, [feature d_out]. The encoder is its transpose.
        b_dec: bias, which is subtracted first and added at the end.
        threshold: a row is done when what is left is shorter.
        most: the most steps; None for d_in.
        stops_when_same: a row is also done when a step takes a feature again.
        settings: `norm` and the keywords of `Origin`, as for `Dictionary`.
    """

    def __init__(
        self,
        W_dec: Float[Tensor, "feature d_out"],
        b_dec: Float[Tensor, " d_out"],
        threshold: float,
        most: int | None = None,
        stops_when_same: bool = True,
        **settings: Any,
    ) -> None:
        b_enc = W_dec.new_zeros(len(W_dec))
        super().__init__(W_dec.T, W_dec, b_enc, b_dec, nn.ReLU(), subtracts_b_dec=True, **settings)
        self.threshold, self.stops_when_same = threshold, stops_when_same
        self.most = self.d_in if most is None else most

    def with_unit_decoder(self) -> Dictionary:
        """Refused: a step that takes a feature also takes its row away."""
        raise ValueError("features must be readings of one step; got those of matching pursuit")

    def encode(self, x: Float[Tensor, "*rows d_in"]) -> Features:
        """Return the features of each row."""
        rest = (self._normed(x.to(self.W_dec.dtype)) - self.b_dec).reshape(-1, self.d_in)
        features = rest.new_zeros(len(rest), self.n_features)
        going = torch.ones(len(rest), 1, dtype=torch.bool, device=rest.device)
        for _ in range(self.most):
            if not going.any():
                break
            values, numbers = (rest @ self.W_enc).relu().max(-1, keepdim=True)
            before, values = features, values * going
            features = features.scatter_add(-1, numbers, values)
            rest = rest - values * self.W_dec[numbers[:, 0]]
            if self.stops_when_same:
                going = going & ((features != 0) != (before != 0)).any(-1, keepdim=True)
            if self.threshold > 0:
                going = going & (rest.norm(dim=-1, keepdim=True) >= self.threshold)
        return features.view(*x.shape[:-1], -1)
