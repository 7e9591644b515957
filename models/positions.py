"""Position encodings that are added to embeddings, and rotary embeddings of queries and keys."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import FakeTensor, traced_as_constant
from models.config import TransformerConfig
from models.rotary_scaling import RotaryBase, RotaryScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, Float[batch pos 1 d_rotary].

Each angle occurs twice, once for each dimension of a rotated pair.
"""


class Frequencies:
    """Radians per position, in float32, with one copy for each device.

    They are not a buffer, because `model.to(bfloat16)` would round a buffer, and a buffer is lost
    on the meta device.

    Args:
        values: the frequencies, on the CPU.
    """

    values: Float[Tensor, " half"]

    def __init__(self, values: Float[Tensor, " half"]) -> None:
        self.values = values
        self._copies = {values.device: values}

    def __reduce__(self) -> tuple[object, ...]:
        return Frequencies, (self.values,)

    @traced_as_constant
    def on(self, device: torch.device) -> Float[Tensor, " half"]:
        """Return the values on a device."""
        if device in self._copies:
            return self._copies[device]
        copy = self.values.to(device, non_blocking=True)
        if not isinstance(copy, FakeTensor):
            self._copies[device] = copy
        return copy


class Sinusoidal(nn.Module):
    """`sin(pos / 10000^(2i/d_model))` in dimension 2i, the cosine in 2i+1 (Vaswani et al. 2017).

    Args:
        d_model: the size of an encoding, an even number.
    """

    frequencies: Frequencies

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.frequencies = Frequencies(_frequencies(d_model, 10_000.0))

    def forward(self, positions: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the encoding of each position."""
        angles = positions[..., None] * self.frequencies.on(positions.device)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)  # [batch, pos, half * 2]


class NoPositions(nn.Module):
    """A module that adds nothing to the token embeddings."""

    def forward(self, positions: Int[Tensor, "batch pos"]) -> Int[Tensor, "1 1 1"]:
        """Return zero for all positions."""
        return positions.new_zeros(1, 1, 1)


def added_positions(config: TransformerConfig) -> nn.Embedding | Sinusoidal | NoPositions:
    """Return the module whose encodings are added to token embeddings."""
    if config.positions == "learned":
        return nn.Embedding(config.n_ctx, config.d_model)
    return Sinusoidal(config.d_model) if config.positions == "sinusoidal" else NoPositions()


class Rotary:
    """Rotary embeddings of queries and keys (Su et al. 2021).

    Pairs of dimensions rotate by angles that grow with the position. Dimension i is paired with i +
    d_rotary/2, or 2i with 2i + 1. Dimensions from d_rotary on do not change.

    Args:
        config: the config of the model.
        window: the window of the blocks; 0 for blocks without a window. The base and the scaling
            of blocks with a window may differ.
    """

    d_rotary: int
    adjacent: bool
    frequencies: Frequencies
    length: float

    def __init__(self, config: TransformerConfig, window: int = 0) -> None:
        self.d_rotary = config.d_rotary
        self.adjacent = config.rotary_pairs == "adjacent"
        base = config.rotary_base(window)
        scaling = base.scaling
        frequencies = _frequencies(self.d_rotary, base.theta)
        self.frequencies = Frequencies(_stretched(frequencies, base))
        self.length = 1.0
        if scaling and scaling.kind == "yarn":
            self.length = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1

    def rotation(self, positions: Int[Tensor, "batch pos"], dtype: torch.dtype) -> Rotation:
        """Return the cosines and sines of the rotation angles."""
        angles = positions[..., None] * self.frequencies.on(positions.device)
        pair = (angles, angles)
        angles = torch.stack(pair, -1).flatten(-2) if self.adjacent else torch.cat(pair, -1)
        angles = angles.unsqueeze(-2)  # [batch, pos, 1, d_rotary]
        return (angles.cos() * self.length).to(dtype), (angles.sin() * self.length).to(dtype)

    def __call__(
        self, x: Float[Tensor, "batch pos head d_head"], rotation: Rotation | None
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Return the rotated vectors of each position."""
        if rotation is None:
            raise ValueError(
                "a rotary block must be called with the context of a rotary model; got a context "
                "without rotary embeddings"
            )
        cos, sin = rotation
        rotated, unchanged = x[..., : self.d_rotary], x[..., self.d_rotary :]
        if self.adjacent:
            first, second = rotated[..., ::2], rotated[..., 1::2]
            quarter = torch.stack([-second, first], -1).flatten(-2)
        else:
            first, second = rotated.chunk(2, -1)
            quarter = torch.cat([-second, first], -1)
        rotated = rotated * cos + quarter * sin
        return torch.cat([rotated, unchanged], -1) if unchanged.shape[-1] else rotated


class NoRotation:
    """The absence of rotary embeddings: queries and keys do not change."""

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> None:
        """Return None."""

    def __call__(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Return `x`."""
        return x


def rotary(config: TransformerConfig, window: int = 0) -> Rotary | NoRotation:
    """Return the rotary embeddings of the blocks with a window; 0 means no window."""
    return Rotary(config, window) if config.positions == "rotary" else NoRotation()


def _frequencies(size: int, theta: float) -> Float[Tensor, " half"]:
    """Return `theta^(-2i/size)` for each pair of dimensions, in radians per position."""
    # The original models compute this in float32 and in this order. The device is explicit, because
    # a model may be built on the meta device.
    return 1.0 / theta ** (torch.arange(0, size, 2, device="cpu").float() / size)


def _stretched(frequencies: Tensor, base: RotaryBase) -> Float[Tensor, " half"]:
    """Return frequencies in radians per position, scaled by `RotaryScaling`."""
    scaling = base.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, device="cpu")
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_n_ctx * frequencies / (2 * math.pi)
        low, high = scaling.turns
        undivided = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        undivided = _undivided_by_yarn(len(frequencies), base.theta, scaling)
    return undivided * frequencies + (1 - undivided) * frequencies / scaling.factor


def _undivided_by_yarn(half: int, theta: float, scaling: RotaryScaling) -> Tensor:
    """Return the share of each frequency that YaRN does not divide.

    The share is 1 for frequencies with many turns within the original context.
    """

    def dimension(turns: float) -> float:
        return half * math.log(scaling.original_n_ctx / (turns * 2 * math.pi)) / math.log(theta)

    low, high = scaling.turns
    start = max(math.floor(dimension(high)), 0)
    end = min(math.ceil(dimension(low)), 2 * half - 1)
    ramp = (torch.arange(half, device="cpu") - start) / ((end - start) or 0.001)
    return 1 - ramp.clamp(0, 1)
