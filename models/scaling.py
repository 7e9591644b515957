"""RotaryScaling: how rotary positions reach beyond the context that a model was first trained on."""

from dataclasses import dataclass
from typing import Literal

from models.fields import check_types, require, require_default

PREFIX = "rotary_scaling."
# Turns within the original context: divided below the first, kept above the second; as published.
PUBLISHED_TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched for contexts longer than a model was first trained on.

    Attributes:
        kind: `linear` divides all by `factor` (Chen et al. 2023). `llama3` divides the slow ones and
            blends in between (Grattafiori et al. 2024). `yarn` blends by turns made within
            `original_n_ctx` and scales the vectors (Peng et al. 2023). `factors` divides each
            frequency by its own number.
        factor: by how much.
        original_n_ctx: the context first trained on, in tokens; for `llama3` and `yarn`.
        low, high: `llama3`: turns within the original context below which a frequency is divided,
            and above which it is kept. `yarn`: likewise, published as beta_slow and beta_fast. 0
            stands for the published numbers: 1 and 4, or 1 and 32.
        attention_factor: `yarn`: what rotated vectors are multiplied by; 0 stands for
            `0.1 ln(factor) + 1`.
        factors: `factors`: one divisor a frequency.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_n_ctx: int = 0
    low: float = 0.0
    high: float = 0.0
    attention_factor: float = 0.0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, PREFIX)
        blends = self.kind in PUBLISHED_TURNS
        for names, used, reason in (
            ("factor", self.kind != "factors", "kind is linear, llama3 or yarn"),
            ("original_n_ctx low high", blends, "kind is llama3 or yarn"),
            ("attention_factor", self.kind == "yarn", "kind is yarn"),
            ("factors", self.kind == "factors", "kind is factors"),
        ):
            require_default(self, names, used, reason, PREFIX)
        self._require("factor", self.factor >= 1, "at least 1")
        self._require("attention_factor", self.attention_factor >= 0, "at least 0")
        if blends:
            self._require("original_n_ctx", self.original_n_ctx >= 1, f"at least 1 for {self.kind}")
            low, high = self.turns
            if not 0 < low < high:
                raise ValueError(f"{PREFIX}low is above 0 and below high ({high}), not {low}")
        if self.kind == "factors":
            positive = self.factors and min(self.factors) > 0
            self._require("factors", positive, "one number above 0 a frequency")

    @property
    def turns(self) -> tuple[float, float]:
        """`low` and `high`, the published ones where they are 0."""
        low, high = PUBLISHED_TURNS[self.kind]
        return self.low or low, self.high or high

    def _require(self, name: str, holds: object, rule: str) -> None:
        require(self, name, holds, rule, PREFIX)
