"""Featurizers: features of values. An interchange takes some of the features from another run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import at_least_float32, require_integer, require_kind
from interp.edits.subspaces import orthonormal
from interp.features.dictionary import Dictionary
from interp.features.temporal import TemporalDictionary


@dataclass(frozen=True, eq=False, repr=False)
class Featurizer:
    """Features of a value, with a mask of the features that `edits.interchange` interchanges.

    The part of the value that the features do not reconstruct stays the same.

    Attributes:
        name: the kind of features.
        encode: a function from values [*rows d] to features [*rows feature].
        decode: a function from features and the original values to values.
        mask: the share of each feature that is taken from the other run, from 0 to 1.
        place: the place at which the features were trained. Default: None, which means unknown.

    >>> first = neurons(3).only(torch.tensor([1.0, 0.0, 0.0]))
    >>> first
    neurons, 1 of 3 features
    >>> first.interchanged(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7.0, 8.0, 9.0]))
    tensor([7., 2., 3.])
    """

    name: str
    encode: Callable[[Float[Tensor, "*rows d"]], Float[Tensor, "*rows feature"]]
    decode: Callable[
        [Float[Tensor, "*rows feature"], Float[Tensor, "*rows d"]], Float[Tensor, "*rows d"]
    ]
    mask: Float[Tensor, " feature"]
    place: str | None = None

    def only(self, mask: Float[Tensor, " feature"]) -> "Featurizer":
        """Return the same features with another mask."""
        return replace(self, mask=mask)

    def interchanged(
        self, value: Float[Tensor, "*rows d"], source: Float[Tensor, "*rows d"]
    ) -> Float[Tensor, "*rows d"]:
        """Return the value with the selected features of the source, in the dtype of the value.

        Args:
            value: the value that is changed.
            source: the value of the other run.
        """
        base = at_least_float32(value)
        features = self.encode(base)
        source_features = self.encode(at_least_float32(source))
        edited = features + self.mask.to(features) * (source_features - features)
        change = self.decode(edited, base) - self.decode(features, base)
        return (base + change).to(value.dtype)

    def __repr__(self) -> str:
        return f"{self.name}, {int((self.mask > 0).sum())} of {len(self.mask)} features"


def coordinates(columns: Float[Tensor, "d k"], name: str = "subspace") -> Featurizer:
    """Return a featurizer with the coordinates along orthonormal columns as its features.

    All of these coordinates are interchanged.

    Args:
        columns: the columns.
        name: the kind of features. Default: `subspace`.
    """

    def encode(value: Tensor) -> Tensor:
        return value @ columns.to(value)

    def decode(features: Tensor, value: Tensor) -> Tensor:
        return features @ columns.to(features).mT

    return Featurizer(name=name, encode=encode, decode=decode, mask=torch.ones(columns.shape[1]))


def subspace(directions: Float[Tensor, "d *k"]) -> Featurizer:
    """Return a featurizer with the coordinates in the span of directions as its features.

    All of these coordinates are interchanged.

    Args:
        directions: one direction [d_model], or several as the columns of a matrix [d_model,
            direction]. The directions need not be orthonormal.

    Returns:
        The featurizer, for `edits.interchange` and `align`, with one feature for each direction.

    Raises:
        ValueError: if the directions are not linearly independent.

    >>> part = subspace(torch.tensor([3.0, 4.0]))
    >>> part.interchanged(torch.tensor([0.0, 0.0]), torch.tensor([5.0, 0.0]))
    tensor([1.8000, 2.4000])
    """
    return coordinates(orthonormal(directions).to(at_least_float32(directions).dtype))


def neurons(size: int) -> Featurizer:
    """Return a featurizer with the components of a value as its features.

    All components are interchanged, so the other run's value replaces the whole value.

    Args:
        size: the number of components of a value.

    Returns:
        The featurizer, for `edits.interchange` and `align`, with `size` features in the unit of the
        value.

    >>> neurons(2).interchanged(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    """
    require_integer("size", size)
    return Featurizer(
        name="neurons",
        encode=lambda value: value,
        decode=lambda features, value: features,
        mask=torch.ones(size),
    )


def pca(values: Float[Tensor, "row d"], k: int) -> Featurizer:
    """Return the first `k` principal components of values as features, all of them interchanged.

    Args:
        values: the values.
        k: the number of components.

    Returns:
        The featurizer, for `edits.interchange` and `align`, with `k` features, by decreasing
        variance.

    Raises:
        ValueError: if the values have fewer than `k` components.

    >>> part = pca(torch.tensor([[1.0, 0.0], [5.0, 0.0], [3.0, 1e-3]]), k=1)
    >>> part.interchanged(torch.tensor([1.0, 7.0]), torch.tensor([2.0, 8.0])).round()
    tensor([2., 7.])
    """
    require_kind("values", values, Tensor, "a tensor [row d]", "for example cache['z', 2][0, :, 3]")
    x = values.double()
    components = torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh
    require_integer("k", k, most=len(components))
    return coordinates(components[:k].mT.to(values.dtype), "principal components")


def of_dictionary(dictionary: Dictionary) -> Featurizer:
    """Return the features of a sparse autoencoder, all of them interchanged.

    The reconstruction error of the autoencoder stays in the value.

    Returns:
        The featurizer, for `edits.interchange` and `align`, with one feature for each feature of
        the dictionary, in the unit of its activations.

    Raises:
        ValueError: if the dictionary is a transcoder or a temporal dictionary.

    >>> eye, zeros, place = torch.eye(2), torch.zeros(2), "blocks.1.resid_post"
    >>> relu = Dictionary(eye, eye, zeros, zeros, torch.nn.ReLU(), reads=place, writes=place)
    >>> of_dictionary(relu).interchanged(torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -4.0]))
    tensor([2., 0.])
    """
    if dictionary.is_transcoder:
        raise ValueError(
            "dictionary must be an autoencoder, to read and write at one point; got a transcoder"
        )
    if isinstance(dictionary, TemporalDictionary):
        raise ValueError(
            "dictionary must read single positions; got a temporal dictionary, whose features "
            "depend on earlier positions"
        )
    return Featurizer(
        name="dictionary",
        encode=dictionary.encode,
        decode=dictionary.write,
        mask=torch.ones(dictionary.n_features),
        place=dictionary.writes,
    )
