"""Sampling: select the most probable token, or draw one with temperature, top-k, top-p, min-p."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.base import at_least_float32, generator, to_device
from models.checks import check_types

GREEDY_BELOW = 1e-6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The choice of a token from logits: the most probable one, or a random draw.

    Attributes:
        temperature: the number by which logits are divided. Below 1e-6, the most probable token is
            selected. Default: 0.
        top_k: draw from this number of the most probable tokens. Default: from all tokens.
        top_p: draw from the smallest set of most probable tokens whose probabilities sum to at
            least this number (Holtzman et al. 2020). Default: from all tokens.
        min_p: draw from the tokens whose probability is at least this number times the largest
            probability (Nguyen et al. 2024). Default: from all tokens.

    The filters top-k, top-p and min-p are applied after the temperature, in this order. They never
    remove the most probable token.

    Raises:
        ValueError: if an option is out of range, or if a filter is given without a temperature.

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
                bound = f"in [{least}, {most}]" if most < math.inf else f"at least {least}"
                raise ValueError(f"{name} must be {bound}; got {value}")
            if name in cuts and value is not None and self.is_greedy:
                raise ValueError(
                    f"{name} needs a temperature above 0, because it changes random draws; "
                    f"got temperature={self.temperature}"
                )

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is selected."""
        return self.temperature < GREEDY_BELOW

    def cut(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """Return the logits divided by the temperature, with only the tokens that may be drawn.

        A token that `top_k`, `top_p` or `min_p` excludes has the logit -inf.
        """
        logits = at_least_float32(logits) / self.temperature
        if self.top_k is not None:
            count = min(self.top_k, logits.shape[-1])
            least = logits.topk(count).values[:, -1:]
            above = logits > least
            equal = logits == least
            # If logits are equal, select the first tokens, so that exactly `top_k` tokens remain.
            allowed = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
            logits = torch.where(allowed, logits, -torch.inf)
        # A top_p of 1 must remove no token. A rounded sum of probabilities may reach 1 before the
        # last token, so this cut is skipped.
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.sort(descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            # The token at which the sum reaches top_p remains, and so does the most probable token.
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
        """Return one token for each row.

        Args:
            logits: the logits of the next token.
            generators: the generator of each row, on any device. They are not used at temperature
                0.
            running: True at the rows whose tokens are used. The logits of all other rows are not
                checked. Default: all rows.

        Raises:
            ValueError: if the logits of a row contain NaN, if they are all -inf, or if they contain
                inf when tokens are drawn.
        """
        tokens, largest = self.choose_unchecked(logits, generators, running)
        self.require_finite(largest.tolist())
        return tokens

    def require_finite(self, largest: Sequence[float]) -> None:
        """Check the largest logit of each row.

        Raises:
            ValueError: see `choose`.
        """
        for n, value in enumerate(largest):
            if not (value > -math.inf and (self.is_greedy or value < math.inf)):
                raise ValueError(
                    f"logits of the next token must be finite; got {value} in row {n}: check the "
                    "weights and hooks"
                )

    def choose_unchecked(
        self,
        logits: Float[Tensor, "batch vocab"],
        generators: list[torch.Generator],
        running: Bool[Tensor, " batch"] | None = None,
    ) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Return one token and the largest logit for each row, without waiting for the device.

        The tokens have no meaning if a largest logit is not finite. Call `require_finite` later to
        check this.

        Args:
            logits: the logits of the next token.
            generators: the generator of each row, on any device.
            running: True at the rows whose tokens are used. For all other rows, the largest logit
                in the result is 0. Default: all rows.
        """
        # The maximum of values with NaN is NaN.
        best = logits.max(-1)
        largest = best.values if running is None else best.values.where(running, 0.0)
        if self.is_greedy:
            return best.indices, largest
        odds = self.cut(logits).softmax(-1)
        # The tokens equal the draws of torch.multinomial in float32, without its checks, because
        # they would wait for the device in each row.
        noise = [
            torch.empty(odds.shape[1], device=drawn_from.device).exponential_(generator=drawn_from)
            for _, drawn_from in zip(range(len(odds)), generators, strict=True)
        ]
        noise = [to_device(noise_of_row, odds.device) for noise_of_row in noise]
        return (odds / torch.stack(noise)).argmax(-1), largest


def row_generator(seed: int, row: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator from which row `row` of `generate(..., seed=seed)` draws.

    A prompt alone draws the same tokens as in this row of a batch, if `seed` is this generator. The
    random numbers of two seeds are unrelated. The probability that two seeds give a row the same
    numbers is about one in four billion.

    Args:
        seed: any whole number.
        row: the index of the row in the batch.
        device: the device of the model's logits. Default: "cpu".

    Returns:
        The generator, on `device`, before its first draw.

    >>> from models import generate, load
    >>> model = load("pydoc-4l")
    >>> rows = generate(model, ["def", "part"], max_new_tokens=3, temperature=1.0, seed=7)
    >>> second = row_generator(7, 1)
    >>> generate(model, "part", max_new_tokens=3, temperature=1.0, seed=second) == rows[1:]
    True
    """
    return generator(seed, row, device=device)
