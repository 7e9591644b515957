"""The linear part of a norm: what it does to a vector apart from the division by its scale."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import Identity
from interp.columns import at_least_float32, like


@dataclass(frozen=True)
class LinearPart:
    """A norm is `centred(x) * gain / scale + bias`. This is all of it but the scale.

    Attributes:
        gain: the gain, in float64, ones where it has none; None for an identity.
        bias: the bias, in float64; zeros where it has none.
        centres: whether the mean is subtracted.
    """

    gain: Float[Tensor, "*shape"] | None
    bias: Float[Tensor, "*shape"]
    centres: bool

    def after(self, written: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Vectors that the norm reads, as it writes them times its scale.

        In at least float32; an identity gives what it gets.
        """
        if self.gain is None:
            return written
        wide = at_least_float32(written)
        return self._centred(wide) * like(self.gain, wide)

    def before(self, read: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """The transpose: directions of what the norm writes, as directions of what it reads."""
        if self.gain is None:
            return read
        wide = at_least_float32(read)
        return self._centred(wide * like(self.gain, wide))

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centres else x


def is_identity(norm: nn.Module | None) -> bool:
    """Whether there is no norm."""
    return norm is None or isinstance(norm, (Identity, nn.Identity))


def linear_part(norm: nn.Module | None, *shape: int) -> LinearPart:
    """The linear part of a LayerNorm, an RMSNorm or an identity.

    A norm that has `centres` says itself what it is, by this, `weight` and `bias`; see `LanguageModel`. Any
    other is run on a few vectors.

    Args:
        norm: a module of tensors [batch, pos, *shape]; None is an identity.
        shape: of what it norms.

    Raises:
        TypeError: if it computes something else.
    """
    if norm is None or is_identity(norm):
        return LinearPart(None, torch.zeros(shape, dtype=torch.float64), False)
    if not hasattr(norm, "centres"):
        return _measured(norm, shape)

    def spread(held: Any, default: float) -> Tensor:
        like = torch.full(shape, default, dtype=torch.float64) if held is None else held.double()
        # The heads of a norm of queries or keys share its gain, or have a part of it each.
        return like.view(-1, shape[-1]).expand(math.prod(shape) // shape[-1], -1).reshape(shape)

    parts = (getattr(norm, name, None) for name in ("weight", "bias"))
    gain, bias = map(spread, parts, (1.0, 0.0))
    return LinearPart(gain, bias, bool(norm.centres))


def _measured(norm: nn.Module, shape: tuple[int, ...]) -> LinearPart:
    # A copy in float64 and without its hooks: an interrupt cannot leave its own weights changed.
    precise = {id(value): value.double() for value in norm.state_dict(keep_vars=True).values()}
    attributes = [item for module in norm.modules() for item in vars(module).items()]
    hooks = {id(held): type(held)() for name, held in attributes if name.endswith("hooks")}
    twin = copy.deepcopy(norm, {**precise, **hooks})
    device = next((value.device for value in precise.values()), None)
    signs = torch.ones(shape, dtype=torch.float64, device=device)
    signs[..., 1::2] = -1
    wave = torch.arange(shape[-1], dtype=torch.float64, device=device).cos().expand(shape)
    probes = torch.stack([signs, signs + 3, wave])
    # Vectors so long that the epsilon has no effect.
    ends = twin(1e12 * torch.stack([probes, -probes])).double()
    (shown, moved, waved), bias = (ends[0] - ends[1]) / 2, (ends[0, 0] + ends[1, 0]) / 2
    centres = torch.allclose(moved, shown, rtol=1e-4, atol=0, equal_nan=True)
    signs, wave = (x - x.mean() if centres else x for x in (signs, wave))
    unit, wave = (x / x.square().mean().sqrt() for x in (signs, wave))
    gain = shown / unit
    if not torch.allclose(waved, gain * wave, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise TypeError(
            "a norm must be a LayerNorm, an RMSNorm or an identity; got another map, "
            f"{type(norm).__name__} (weights can be read with fold=False)"
        )
    return LinearPart(gain, bias, centres)
