"""Draws: a generator by seed and place; and whether a run drew random numbers, as dropout does in training mode."""

import hashlib
from collections.abc import Sequence
from operator import attrgetter, index

import torch
from torch import Tensor, nn

from hooks.base._torch import state_of, unset_fake_temporarily
from hooks.base.errors import warn


def generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose draws follow from numbers and words alone, whatever else is drawn.

    Keys that differ have unrelated streams. PyTorch keeps 32 bits of a seed on the CPU, so two keys share a stream
    with a chance of about one in four billion.

    Args:
        key: a seed, and for what it is used, such as a row.
        device: where the numbers are drawn.

    Raises:
        TypeError: if a number is not whole.

    >>> first, again, other = (torch.rand(1, generator=generator(7, row)).item() for row in (0, 0, 1))
    >>> first == again, first == other
    (True, False)
    """
    # Numbers that follow each other are good seeds for rows, but not for users' seeds: row 1 of seed 0 would be row 0 of seed 1.
    words = [part if isinstance(part, str) else index(part) for part in key]
    mixed = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(mixed))


class Draws:
    """The states of PyTorch's generators before a run of modules of which some are in training mode.

    Args:
        modules: those that may run, the model first; none for no warning.

    >>> import pytest
    >>> draws = Draws([nn.Dropout(0.5)])
    >>> _ = torch.rand(1)
    >>> with pytest.warns(UserWarning, match="drew random numbers"):
    ...     draws.warn("a Dropout")
    True
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._devices: set[torch.device] = set()
        if any(map(attrgetter("training"), modules)):
            self._devices = {torch.device("cpu"), *(t.device for t in state_of(modules[0]))}
        self._before = self._states()

    def warn(self, what: str) -> bool:
        """Warn if numbers were drawn since, and say whether they were."""
        with unset_fake_temporarily():  # a plan draws nothing
            pairs = zip(self._before, self._states(), strict=True)
            drew = any(not torch.equal(*pair) for pair in pairs)
        if drew:
            warn(
                f"{what} drew random numbers in this run, as dropout does in training mode, so each run gives others: "
                "call model.eval() first",
            )
        return drew

    def _states(self) -> list[Tensor]:
        with unset_fake_temporarily():
            return [*map(_state, self._devices)]


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
