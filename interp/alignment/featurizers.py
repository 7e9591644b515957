"""Featurizers: features of values, some of which an interchange takes from another run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import at_least_float32, require_integer
from interp.edits.subspaces import orthonormal
from interp.features.dictionary import Dictionary


@dataclass(frozen=True, eq=False, repr=False)
class Featurizer:
    """Features of a value, how they become a value again, and which of them are interchanged. `edits.interchange` takes it.

    What the features do not make up is kept from the run that is edited.

    Attributes:
        name: the kind.
        encode: from values [*rows d] to features [*rows feature].
        decode: from features, and the values that they are of, to values.
        mask: how much of each feature is taken from the other run, from 0 to 1.
        place: the place that the features were trained at; None if it is not known.
    """

    name: str
    encode: Callable[[Float[Tensor, "*rows d"]], Float[Tensor, "*rows feature"]]
    decode: Callable[
        [Float[Tensor, "*rows feature"], Float[Tensor, "*rows d"]], Float[Tensor, "*rows d"]
    ]
    mask: Float[Tensor, " feature"]
    place: str | None = None

    def only(self, mask: Float[Tensor, " feature"]) -> "Featurizer":
        """The same features, of which others are interchanged."""
        return replace(self, mask=mask)

    def interchanged(
        self, value: Float[Tensor, "*rows d"], source: Float[Tensor, "*rows d"]
    ) -> Float[Tensor, "*rows d"]:
        """The value with the chosen features of the source, in its dtype."""
        here, there = at_least_float32(value), at_least_float32(source)
        features = self.encode(here)
        taken = self.mask.to(features) * (self.encode(there) - features)
        change = self.decode(features + taken, here) - self.decode(features, here)
        return (here + change).to(value.dtype)

    def __repr__(self) -> str:
        return f"{self.name}, {int((self.mask > 0).sum())} of {len(self.mask)} features"


def coordinates(columns: Float[Tensor, "d k"], name: str = "subspace") -> Featurizer:
    """Coordinates along columns that are orthonormal, all interchanged."""

    def encode(value: Tensor) -> Tensor:
        return value @ columns.to(value)

    def decode(features: Tensor, value: Tensor) -> Tensor:
        return features @ columns.to(features).mT

    return Featurizer(name, encode, decode, torch.ones(columns.shape[1]))


def subspace(directions: Float[Tensor, "d *k"]) -> Featurizer:
    """Coordinates in the span of a direction, or of several as columns, all interchanged. They need not be orthonormal.

    Raises:
        ValueError: if the directions are not linearly independent.

    >>> part = subspace(torch.tensor([3.0, 4.0]))
    >>> part.interchanged(torch.tensor([0.0, 0.0]), torch.tensor([5.0, 0.0]))
    tensor([1.8000, 2.4000])
    """
    return coordinates(orthonormal(directions).to(at_least_float32(directions).dtype))


def neurons(size: int) -> Featurizer:
    """The numbers of a value themselves, all interchanged: the whole value."""
    return Featurizer(
        "neurons", lambda value: value, lambda features, value: features, torch.ones(size)
    )


def pca(values: Float[Tensor, "row d"], k: int) -> Featurizer:
    """The first `k` principal components of values, such as a point's over many texts.

    Raises:
        ValueError: if there are not so many.
    """
    x = values.double()
    components = torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh
    require_integer("k", k, most=len(components))
    return coordinates(components[:k].mT.to(values.dtype), "principal components")


def of_dictionary(dictionary: Dictionary) -> Featurizer:
    """The features of a sparse autoencoder, all interchanged; its error is kept.

    Raises:
        ValueError: if it is a transcoder.
    """
    if dictionary.is_transcoder:
        raise ValueError("features of a point are those of an autoencoder; got a transcoder")
    every = torch.ones(dictionary.n_features)
    return Featurizer(
        "dictionary", dictionary.encode, dictionary.write, every, place=dictionary.writes
    )
