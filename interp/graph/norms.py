"""The linear part of a norm: the whole norm except the division by its scale."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import HookPoint, Identity
from hooks.base import at_least_float32
from hooks.shared import is_listened_to
from interp.numbers.precision import like

_CENTRES = {nn.LayerNorm: True, nn.RMSNorm: False}

# The attributes of every module, and the types of settings that can be compared.
_MODULE = frozenset(vars(nn.Module()))
_SETTINGS = (type(None), bool, int, float, str, torch.dtype)


@dataclass(frozen=True)
class LinearPart:
    """The linear part of a norm `centred(x) * gain / scale + bias`: everything except the scale.

    Attributes:
        gain: the gain in float64. It is 1 if the norm has no gain, and None for an identity.
        bias: the bias in float64. It is 0 if the norm has no bias.
        centres: whether the norm subtracts the mean.
    """

    gain: Float[Tensor, "*shape"] | None
    bias: Float[Tensor, "*shape"]
    centres: bool

    def after(self, vectors: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Apply the linear part without the bias to vectors: `centred(x) * gain`.

        The result is in at least float32. An identity returns its argument.
        """
        if self.gain is None:
            return vectors
        vectors = at_least_float32(vectors)
        return self._centred(vectors) * like(self.gain, vectors)

    def before(self, directions: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Map directions of the output to directions of the input: the transpose of `after`."""
        if self.gain is None:
            return directions
        directions = at_least_float32(directions)
        return self._centred(directions * like(self.gain, directions))

    def _centred(self, x: Tensor) -> Tensor:
        """Return vectors minus their means, if the norm subtracts the mean."""
        return x - x.mean(-1, keepdim=True) if self.centres else x


def is_identity(norm: nn.Module | None) -> bool:
    """Return True if the norm is missing or an identity."""
    return norm is None or isinstance(norm, (Identity, nn.Identity))


def kind_of_scale(norm: nn.Module) -> Hashable:
    """Return a value that is equal for two norms only if they divide equal vectors by equal scales.

    The gain and the bias of a norm do not change its scale. Two norms are equal if they have the
    same class and the same settings, such as `eps`, and if nothing else can change their results.
    Otherwise the value belongs to this norm alone.

    Args:
        norm: the norm.
    """
    settings = {name: value for name, value in vars(norm).items() if name not in _MODULE}
    tensors = {name for name, _ in (*norm.named_parameters(), *norm.named_buffers())}
    is_plain = all(map(_is_plain, settings.values()))
    points = [*norm.named_children()]
    if (
        not (is_plain and tensors <= {"weight", "bias"})
        or is_listened_to(norm)
        or not all(isinstance(point, HookPoint) for _, point in points)
    ):
        return id(norm)
    return type(norm), repr(sorted(settings.items())), *(name for name, _ in points)


def _is_plain(value: Any) -> bool:
    """Return True if equal texts of two settings mean equal settings."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _SETTINGS)


def linear_part(norm: nn.Module | None, *shape: int) -> LinearPart:
    """Return the linear part of a LayerNorm, an RMSNorm or an identity.

    PyTorch's norms are known. Any other norm needs the attribute `centres`, and may have a
    `weight` and a `bias`; see `LanguageModel`.

    Args:
        norm: a module of tensors [batch, pos, *shape]; None is an identity.
        shape: the shape of the normalised vectors.

    Raises:
        TypeError: if the norm is of another type, and does not have the attribute `centres`.
    """
    if norm is None or is_identity(norm):
        return LinearPart(None, torch.zeros(shape, dtype=torch.float64), False)
    # A subclass may compute something else, so it needs the attribute.
    centres = getattr(norm, "centres", _CENTRES.get(type(norm)))
    if centres is None:
        raise TypeError(
            "a norm must be a LayerNorm, an RMSNorm or an identity, or have an attribute "
            "`centres` (whether it "
            f"subtracts the mean); got {type(norm).__name__} (weights can be read with fold=False)"
        )

    def spread(parameter: Any, default: float) -> Tensor:
        if parameter is None:
            return torch.full(shape, default, dtype=torch.float64)
        # A norm of queries or keys has one gain of the size d_head for all heads, or the gains of
        # all heads one after another.
        n_rows = math.prod(shape) // shape[-1]
        return parameter.double().view(-1, shape[-1]).expand(n_rows, -1).reshape(shape)

    gain = spread(getattr(norm, "weight", None), 1.0)
    bias = spread(getattr(norm, "bias", None), 0.0)
    return LinearPart(gain, bias, centres)
