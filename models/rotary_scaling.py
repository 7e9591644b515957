"""The base of rotary frequencies, and their scaling for contexts longer than in the training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.checks import check_types, require

# The published `low` and `high` of `RotaryScaling`.
PUBLISHED_TURNS: Mapping[str, tuple[float, float]] = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """The scaling of rotary frequencies for contexts longer than the original training context.

    Attributes:
        kind: `linear` divides all frequencies by `factor` (Chen et al. 2023). `llama3` divides only
            slow frequencies, does not change fast frequencies, and interpolates in between; see
            `low` and `high` (Grattafiori et al. 2024). `yarn` does the same with another
            interpolation, and also scales the rotated vectors (Peng et al. 2023). `factors` divides
            each frequency by its own number.
        factor: the divisor.
        original_n_ctx: for `llama3` and `yarn`: the original training context, in tokens.
        low, high: for `llama3` and `yarn`: a frequency with fewer than `low` turns within the
            original context is divided, and a frequency with more than `high` turns does not
            change. YaRN calls them beta_slow and beta_fast. 0 means the published numbers: 1 and 4,
            or 1 and 32.
        attention_factor: for `yarn`: the factor of rotated vectors; 0 means `0.1 ln(factor) + 1`.
        factors: for `factors`: one divisor for each frequency.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.

    >>> RotaryScaling(kind="yarn", factor=4.0, original_n_ctx=2048).turns
    (1.0, 32.0)
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_n_ctx: int = 0
    low: float = 0.0
    high: float = 0.0
    attention_factor: float = 0.0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "rotary_scaling.")
        self._require("factor", self.factor >= 1, "at least 1")
        if self.kind in PUBLISHED_TURNS:
            self._require("original_n_ctx", self.original_n_ctx >= 1, f"at least 1 for {self.kind}")
            low, high = self.turns
            self._require("low", 0 < low < high, f"above 0 and below high ({high})")
        if self.kind == "factors":
            positive = self.factors and min(self.factors) > 0
            self._require("factors", positive, "one number above 0 for each frequency")

    @property
    def turns(self) -> tuple[float, float]:
        """`low` and `high`, or the published numbers if they are 0."""
        low, high = PUBLISHED_TURNS[self.kind]
        return self.low or low, self.high or high

    def _require(self, name: str, holds: object, rule: str) -> None:
        """Check that the rule of a field holds."""
        require(self, name, holds, rule=rule, prefix="rotary_scaling.")


@dataclass(frozen=True, kw_only=True)
class RotaryBase:
    """The base of rotary wavelengths and their scaling, for one kind of block.

    Attributes:
        theta: base of the wavelengths.
        scaling: the scaling of frequencies; None for no scaling.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.

    >>> RotaryBase(theta=10_000.0)
    RotaryBase(theta=10000.0, scaling=None)
    """

    theta: float
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        check_types(self, "rotary_base.")
        require(
            self, "theta", self.theta > self.least, f"above {self.least}", prefix="rotary_base."
        )

    @property
    def least(self) -> int:
        """The number that the base must exceed. YaRN divides by the logarithm of the base."""
        return 1 if self.scaling is not None and self.scaling.kind == "yarn" else 0
