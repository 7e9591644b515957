"""Temporal dictionaries, which predict a part of each vector from earlier positions.

1. A code of each vector is computed: `relu(x @ W_enc)`.
2. Attention over the codes of earlier positions predicts a code. The decoder writes it as a vector.
3. The projection of x on this vector is the prediction, and x minus the projection is the rest.
   Each further layer of attention predicts a part of the rest.
4. The features are the nonlinearity of `rest @ W_enc`.
5. The output is the decoded features plus the predictions.

The method is described in "Priors in Time" (Lubana et al. 2025, arXiv 2511.01836). The features of
a position depend on all earlier positions, so a temporal dictionary reads whole texts and not
single rows.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from hooks import position_offset
from hooks.base import (
    padding_messages,
    piece_read,
    shown,
    to_device,
)
from interp.features.activations import FeatureValues
from interp.features.dictionary import Dictionary, DictionarySettings
from interp.features.saving import SAELensParts

RowsOfValues = Float[Tensor, "*rows d_in"]
ValuesOfTexts = Float[Tensor, "batch pos d_in"]
RealTokens = Bool[Tensor, "batch pos"] | None


@dataclass(frozen=True, eq=False)
class AffineMap:
    """The weights of a linear map and its bias: `x @ W + b`.

    Attributes:
        W: the weights.
        b: the bias.

    >>> AffineMap(torch.ones(3, 5), torch.zeros(5)).W.shape
    torch.Size([3, 5])
    """

    W: Float[Tensor, "d_from d_to"]
    b: Float[Tensor, " d_to"]


class ContextAttention(nn.Module):
    """Attention from the code of each position to the codes of all earlier positions.

    Index t of the keys and values contains the code of position t - 1, and index 0 contains zeros.

    Args:
        queries, keys, values: the maps from codes to queries, keys and values of all heads,
            [feature, head · d]. Keys and values may have different sizes.
        output: the map from the values of all heads to a code, [head · d, feature].
        n_heads: the number of heads.

    >>> same = AffineMap(torch.ones(1, 1), torch.zeros(1))
    >>> attention = ContextAttention(same, same, same, output=same, n_heads=1)
    >>> attention(torch.tensor([[[0.0], [3.0], [5.0]]])).flatten()
    tensor([0.0000, 0.0000, 3.0000])
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor
    b_K: Tensor
    b_V: Tensor
    b_O: Tensor
    n_heads: int

    def __init__(
        self,
        queries: AffineMap,
        keys: AffineMap,
        values: AffineMap,
        output: AffineMap,
        n_heads: int,
    ) -> None:
        super().__init__()
        d_query, d_value = len(queries.b), len(values.b)
        if d_query % n_heads or d_value % n_heads:
            raise ValueError(
                f"n_heads must divide the sizes of queries and values; got {n_heads} for "
                f"{d_query} and {d_value}"
            )
        for letter, part in {"Q": queries, "K": keys, "V": values, "O": output}.items():
            self.register_buffer(f"W_{letter}", part.W)
            self.register_buffer(f"b_{letter}", part.b)
        self.n_heads = n_heads

    def extra_repr(self) -> str:
        """The number of heads, for the printed module."""
        return f"n_heads={self.n_heads}"

    def forward(self, codes: Float[Tensor, "batch pos feature"]) -> Tensor:
        """Return the predicted codes, before their ReLU."""
        earlier = pad(codes[:, :-1], (0, 0, 1, 0))
        q = self._heads(codes @ self.W_Q + self.b_Q)
        k = self._heads(earlier @ self.W_K + self.b_K)
        v = self._heads(earlier @ self.W_V + self.b_V)
        z = scaled_dot_product_attention(q, k, v, is_causal=True)
        return rearrange(z, "batch head pos d -> batch pos (head d)") @ self.W_O + self.b_O

    def _heads(self, values: Float[Tensor, "batch pos size"]) -> Float[Tensor, "batch head pos d"]:
        """Return values with an axis of heads."""
        return rearrange(values, "batch pos (head d) -> batch head pos d", head=self.n_heads)


class TemporalDictionary(Dictionary):
    """A dictionary that predicts a part of each vector from earlier positions, and whose features
    encode the rest.

    `load_sae` loads published dictionaries of this kind. A dictionary reads whole texts,
    [batch pos d_in]. Padding does not affect the result: a text has the same features in a batch as
    alone. In a run of a model, the padding of the texts is known. In other calls, give the mask:
    `dictionary.encode(x, mask)`.

    Args:
        W_enc: the encoder of codes and features, [d_in feature].
        W_dec: the decoder, [feature d_in].
        b_dec: the bias of the output.
        activation: the nonlinearity of the features.
        attention: the layers that predict, each a `ContextAttention` of `interp.features`.
        eps: the number that is added to the length of a predicted vector before the division by
            this length. Default: 1e-6.
        subtracts_b_dec, settings: see `Dictionary`. The settings are `norm` and the keywords of
            `DictionaryOrigin`.

    >>> from interp.features import AffineMap, ContextAttention
    >>> eye, zero = torch.eye(2), torch.zeros(2)
    >>> same = AffineMap(eye, zero)
    >>> dictionary = TemporalDictionary(
    ...     W_enc=eye,
    ...     W_dec=eye,
    ...     b_dec=zero,
    ...     activation=nn.ReLU(),
    ...     attention=[ContextAttention(same, same, same, output=same, n_heads=1)],
    ... )
    >>> x = torch.tensor([[[2.0, 0.0], [2.0, 3.0]]])
    >>> dictionary.encode(x).round(decimals=3)  # the second position repeats the 2
    tensor([[[2., 0.],
             [0., 3.]]])
    >>> dictionary(x).round(decimals=3).equal(x)
    True
    """

    attention: nn.ModuleList
    eps: float

    def __init__(
        self,
        W_enc: Float[Tensor, "d_in feature"],
        W_dec: Float[Tensor, "feature d_in"],
        b_dec: Float[Tensor, " d_in"],
        activation: nn.Module,
        attention: Sequence[ContextAttention],
        eps: float = 1e-6,
        subtracts_b_dec: bool = False,
        **settings: Unpack[DictionarySettings],
    ) -> None:
        super().__init__(
            W_enc=W_enc,
            W_dec=W_dec,
            b_enc=W_dec.new_zeros(len(W_dec)),
            b_dec=b_dec,
            activation=activation,
            subtracts_b_dec=subtracts_b_dec,
            **settings,
        )
        self.attention = nn.ModuleList(attention)
        self.eps = eps

    def pre_activations(self, x: RowsOfValues) -> FeatureValues:
        """Return the pre-activations of the features.

        The rest of a vector is the vector minus its prediction. Features encode the rest.

        Raises:
            ValueError: if `x` is no tensor [batch, pos, d_in], its mask has another shape, or the
                run reads only a piece of its texts.
        """
        return self._split(x)[0] @ self.W_enc

    def encode(self, x: RowsOfValues, mask: RealTokens = None) -> FeatureValues:
        """Return the features of each position, in the dtype of the dictionary.

        Args:
            x: the values of whole texts.
            mask: True at real tokens. Default: the mask of the current run; outside of a run, all
                tokens are real.

        Raises:
            ValueError: if `x` is no tensor [batch, pos, d_in], its mask has another shape, or the
                run reads only a piece of its texts.
        """
        with _texts_with(mask):
            return super().encode(x)

    def decode(
        self, features: FeatureValues, x: RowsOfValues | None = None, mask: RealTokens = None
    ) -> ValuesOfTexts:
        """Return the output for some features: the decoded features plus the prediction.

        Args:
            features: the features.
            x: the input of the dictionary, from which the prediction is computed.
            mask: True at real tokens. Default: the mask of the current run, or no padding.

        Raises:
            ValueError: if `x` is missing; see also `pre_activations`.
        """
        if x is None:
            raise ValueError(
                "decode needs x, the input, because a temporal dictionary adds a prediction; "
                "write(features, x) returns the decoded features alone"
            )
        with _texts_with(mask):
            return super().decode(features, x)

    def forward(self, x: RowsOfValues, mask: RealTokens = None) -> ValuesOfTexts:
        """Return the reconstruction of `x`; see `encode` for the arguments."""
        return self.decode(self.encode(x, mask), x, mask)

    def bypass(self, x: ValuesOfTexts) -> ValuesOfTexts:
        """Return the prediction, the part of the output that does not depend on the features."""
        return self._in_units_of(x, self._split(x)[1])

    @property
    def offset(self) -> Float[Tensor, " feature"]:
        """Raise an error, because the prediction is different at each position."""
        raise ValueError(
            "a temporal dictionary has no single offset, because its features also depend on "
            "earlier positions"
        )

    def with_unit_decoder(self) -> Dictionary:
        """Raise an error, because attention reads the codes, so their lengths matter."""
        raise ValueError(
            "with_unit_decoder needs a dictionary that reads single positions; got a temporal "
            "dictionary"
        )

    def _as_sae_lens(self) -> SAELensParts:
        """Raise an error: the weights of SAELens differ from the weights here by factors, and a
        product with such a factor is not exact.
        """
        raise ValueError(
            "save needs a dictionary that reads single positions; got a temporal dictionary, which "
            "load_sae reads from the files of its training"
        )

    def _with(self, **changes: Any) -> Dictionary:
        """Raise an error: this dictionary cannot be copied with changed weights.

        The attention uses the same weights, so it would change too.
        """
        raise ValueError(f"{', '.join(changes)} of a temporal dictionary cannot be changed")

    def _split(self, x: RowsOfValues) -> tuple[ValuesOfTexts, ValuesOfTexts]:
        """Return the rest of the input and the prediction, both normalized as `norm` says."""
        real = self._mask_of(x)
        rest = self._normed(x.to(self.W_enc.dtype))
        if self.subtracts_b_dec:
            rest = rest - self.b_dec
        if real is None:
            return self._predicted(rest)
        # Move the real tokens of each text to its start. The layers are causal, so the padding
        # that follows has no effect on these tokens.
        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        rest, prediction = self._predicted(_moved(rest.where(real[..., None], 0.0), order))
        back = order.argsort(dim=1)
        return _moved(rest, back), _moved(prediction, back)

    def _predicted(self, rest: ValuesOfTexts) -> tuple[ValuesOfTexts, ValuesOfTexts]:
        """Return the rest and the sum of the predictions of all layers."""
        prediction = torch.zeros_like(rest)
        for layer in self.attention:
            vector = layer((rest @ self.W_enc).relu()).relu() @ self.W_dec
            length = vector.norm(dim=-1, keepdim=True) + self.eps
            part = vector * (vector * rest).sum(-1, keepdim=True) / length.square()
            prediction = prediction + part
            rest = rest - part
        return rest, prediction

    def _mask_of(self, x: object) -> RealTokens:
        """Return the mask of the texts that a run reads, or None if all tokens are real.

        Raises:
            ValueError: see `pre_activations`.
        """
        piece = piece_read()
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != self.d_in:
            raise ValueError(
                f"a temporal dictionary must read whole texts, [batch, pos, {self.d_in}], because "
                f"its features depend on earlier positions; got {shown(x)}"
            )
        if piece.start:
            raise ValueError(
                "a temporal dictionary must read whole texts; got a run from position "
                f"{piece.start} on; run the model without a key-value cache"
            )
        if piece.real is None:
            return None
        if piece.real.shape != x.shape[:2]:
            name = "the mask of a temporal dictionary's texts"
            raise ValueError(padding_messages.mask_shape(name, x.shape[:2], piece.real.shape))
        return to_device(piece.real.bool(), x.device)


def _texts_with(mask: RealTokens) -> AbstractContextManager[None]:
    """Return a context manager inside which texts have a mask, or the mask of the run."""
    return nullcontext() if mask is None else position_offset(None, mask)


def _moved(values: ValuesOfTexts, order: Int[Tensor, "batch pos"]) -> ValuesOfTexts:
    """Return the positions of each text in another order."""
    return values.gather(1, order[..., None].expand_as(values))
