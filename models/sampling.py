"""Which token comes next: the most probable one, or one drawn from what temperature and cuts leave."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.checks import check_types

GREEDY_BELOW = 1e-6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from logits.

    Attributes:
        temperature: what logits are divided by; below 1e-6 the most probable token is taken.
        top_k: draw from this many most probable tokens.
        top_p: draw from the fewest tokens whose probabilities sum to at least this (Holtzman et al.
            2020).
        min_p: draw from tokens at least this many times as probable as the most probable one (Nguyen
            et al. 2024).

    The cuts act after the temperature, in this order, each on what the one before left.

    Raises:
        ValueError: naming the option, its value and its range; or if a cut is given without a
            temperature, as the most probable token survives every cut.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        rules = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "0 to 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name} is {rule}, not {getattr(self, name)}")
        cuts = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) is not None]
        if self.is_greedy and cuts:
            raise ValueError(
                f"{', '.join(cuts)} chooses what to draw from, and temperature="
                f"{self.temperature} draws nothing: give a temperature"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < GREEDY_BELOW

    def cut(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """The logits to draw from: divided by the temperature, -inf where a cut forbids a token."""
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            count = min(self.top_k, logits.shape[-1])
            least = logits.topk(count).values[:, -1:]
            above, level = logits > least, logits == least
            # Of equal tokens the first ones, so that there are `top_k`.
            kept = above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
            logits = torch.where(kept, logits, -torch.inf)
        if self.top_p is not None:
            ordered, order = logits.sort(descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            # The first token that reaches top_p is still in, and the first of all however small top_p.
            beyond = before >= self.top_p
            beyond[:, 0] = False
            forbidden = torch.zeros_like(beyond).scatter_(1, order, beyond)
            logits = torch.where(forbidden, -torch.inf, logits)
        if self.min_p is not None:
            probabilities = logits.softmax(-1)
            least = self.min_p * probabilities.amax(-1, keepdim=True)
            logits = torch.where(probabilities < least, -torch.inf, logits)
        return logits

    def choose(
        self, logits: Float[Tensor, "batch vocab"], generators: list[torch.Generator]
    ) -> Int[Tensor, " batch"]:
        """One token a row.

        Args:
            logits: of the next token.
            generators: what each row draws from; not read where nothing is drawn.

        Raises:
            ValueError: if a row's logits hold NaN, are all -inf or, where tokens are drawn, hold inf.
        """
        best = logits.max(-1)  # NaN counts as the largest
        for row, largest in enumerate(best.values.tolist()):
            if not (largest > -math.inf and (self.is_greedy or largest < math.inf)):
                raise ValueError(
                    f"the next token is chosen from finite logits, and row {row} has {largest}: the "
                    "weights, or what a hook put in, overflow or are no numbers"
                )
        if self.is_greedy:
            return best.indices
        rows = zip(self.cut(logits).softmax(-1), generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in rows])
