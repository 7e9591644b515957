"""Sampling: takes the most probable next token, or draws one by temperature and cuts."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.base import generator, to_device
from models.checks import check_types

GREEDY_BELOW = 1e-6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The choice of a token from logits: the most probable one, or a random draw.

    Attributes:
        temperature: the divisor of logits; below 1e-6 the most probable token is taken.
        top_k: draw from this many of the most probable tokens.
        top_p: draw from the fewest tokens whose probabilities sum to at least this (Holtzman et al.
            2020).
        min_p: draw from tokens at least this many times as probable as the most probable one (Nguyen
            et al. 2024).

    The cuts act after the temperature, one after another in this order. The most probable token always
    remains.

    Raises:
        ValueError: if an option is out of range, or a cut is given without a temperature.

    >>> logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    >>> Sampling(temperature=1.0, top_k=2).cut(logits).softmax(-1)
    tensor([[0.5714, 0.4286, 0.0000, 0.0000]])
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        cuts = {"top_k": (1, math.inf), "top_p": (0, 1), "min_p": (0, 1)}
        for name, (least, most) in {"temperature": (0, math.inf), **cuts}.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                bound = f"{least} to {most}" if most < math.inf else f"at least {least}"
                raise ValueError(f"{name} must be {bound}; got {value}")
            if name in cuts and value is not None and self.is_greedy:
                raise ValueError(
                    f"{name} must come with a temperature above 0, because it acts on random draws; "
                    f"got temperature={self.temperature}"
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
            # Of equal tokens keep the first ones, for exactly `top_k` tokens.
            allowed = above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
            logits = torch.where(allowed, logits, -torch.inf)
        if self.top_p is not None and self.top_p < 1:  # a sum of probabilities may round to 1 early
            ordered, order = logits.sort(descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            # Keep the token at which the sum reaches top_p, and always the most probable one.
            beyond = probabilities.cumsum(-1) - probabilities >= self.top_p
            beyond[:, 0] = False
            forbidden = torch.zeros_like(beyond).scatter_(1, order, beyond)
            logits = torch.where(forbidden, -torch.inf, logits)
        if self.min_p is not None:
            probabilities = logits.softmax(-1)
            least = self.min_p * probabilities.amax(-1, keepdim=True)
            logits = torch.where(probabilities < least, -torch.inf, logits)
        return logits

    def choose(
        self,
        logits: Float[Tensor, "batch vocab"],
        generators: list[torch.Generator],
        running: Bool[Tensor, " batch"] | None = None,
    ) -> Int[Tensor, " batch"]:
        """One token for each row.

        Args:
            logits: the logits of the next token.
            generators: the generator of each row, on any device; not used at temperature 0.
            running: the rows whose tokens count; None for all. The logits of others may be anything.

        Raises:
            ValueError: if a row's logits hold NaN or are all -inf, or hold inf when tokens are drawn.
        """
        best = logits.max(-1)  # NaN counts as the largest
        largest = best.values if running is None else best.values.where(running, 0.0)
        for row, value in enumerate(largest.tolist()):
            if not (value > -math.inf and (self.is_greedy or value < math.inf)):
                raise ValueError(
                    f"logits of the next token must be finite; got {value} in row {row}, from the "
                    "weights or from a hook"
                )
        if self.is_greedy:
            return best.indices
        odds = self.cut(logits).softmax(-1)
        # What torch.multinomial draws, without its checks, in which the host waits for each row.
        noise = [
            torch.empty(odds.shape[1], device=drawn_from.device).exponential_(generator=drawn_from)
            for _, drawn_from in zip(range(len(odds)), generators, strict=True)
        ]
        noise = [to_device(row, odds.device) for row in noise]
        return (odds / torch.stack(noise)).argmax(-1)


def row_generator(seed: int, row: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator from which row `row` of `generate(..., seed=seed)` draws.

    With it as the seed, a prompt alone draws what it draws as that row of a batch. Other seeds have
    unrelated streams, but for a chance of about one in four billion for each row.

    Args:
        seed: any whole number.
        row: the place of the row in the batch.
        device: where the model's logits are.

    >>> first, second = (torch.rand(1, generator=row_generator(7, row)) for row in (0, 1))
    >>> bool(first == second)
    False
    """
    return generator(seed, row, device=device)
