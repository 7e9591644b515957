"""Generators from a seed and a place, and a check whether a run drew random numbers.

For example, dropout in training mode draws random numbers.
"""

import hashlib
from collections.abc import Sequence
from operator import attrgetter, index

import torch
from torch import Tensor, nn

from hooks.base._torch import state_of, unset_fake_temporarily
from hooks.base.errors import require_integer
from hooks.base.warning import warn


def generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose draws depend only on the key, and not on any other draws.

    Different keys have unrelated streams. PyTorch keeps 32 bits of a seed on the CPU, so two keys
    share a stream with a chance of about one in four billion.

    Args:
        key: a seed, followed by texts and numbers that say what the draws are for, such as the name
            of a point or the number of a row.
        device: the device of the draws.

    Raises:
        TypeError: if a number is not an integer.

    >>> draws = [torch.rand(1, generator=generator(7, row)).item() for row in (0, 0, 1)]
    >>> draws[0] == draws[1], draws[0] == draws[2]
    (True, False)
    """
    # Hash the key. With seed + row, row 1 of seed 0 would equal row 0 of seed 1.
    words = [part if isinstance(part, str) else index(part) for part in key]
    mixed = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(mixed))


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU for the seed that a user gives.

    Raises:
        TypeError, ValueError: if the seed is not a whole number of at most 64 bits.

    >>> torch.rand(1, generator=seeded(3)) == torch.rand(1, generator=seeded(3))
    tensor([True])
    >>> seeded("3")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: seed must be a whole number from ...; got '3'
    """
    require_integer("seed", seed, least=-(2**63), most=2**64 - 1)
    return torch.Generator().manual_seed(int(seed))


class Draws:
    """The states of PyTorch's generators before a run of modules.

    After the run, `warn` compares them with the present states. The states are stored, and `warn`
    can warn, only if a module is in training mode.

    Args:
        modules: the modules that may run, the model first.

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
            devices = (tensor.device for tensor in state_of(modules[0]))
            self._devices = {torch.device("cpu"), *devices}
        self._before = self._states()

    def warn(self, what: str) -> bool:
        """Warn if random numbers were drawn since this object was made.

        Return True if random numbers were drawn.

        Args:
            what: the part of the model that may have drawn them, for the warning.
        """
        # In a plan (`HookedRunner.plan`), new tensors have no numbers, but the states must have
        # numbers to be compared.
        with unset_fake_temporarily():
            pairs = zip(self._before, self._states(), strict=True)
            drew = any(not torch.equal(*pair) for pair in pairs)
        if drew:
            warn(
                f"{what} drew random numbers in this run, like dropout in training mode, so each "
                "run has different results: call model.eval() first",
            )
        return drew

    def _states(self) -> list[Tensor]:
        """Return the present state of the generator of each device."""
        with unset_fake_temporarily():
            return [*map(_state, self._devices)]


def _state(device: torch.device) -> Tensor:
    """Return the present state of PyTorch's generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
