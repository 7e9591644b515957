"""Draws that follow from a seed and a place alone, whatever else is drawn."""

import hashlib
import random
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks import EditError


def donors(padding: Sequence[Sequence[bool]], seed: int) -> list[int]:
    """For each row the number of another, drawn from those with the same padding. Each row is drawn once.

    Raises:
        EditError: if a row has no other.

    >>> donors([[True], [False], [True], [False]], seed=0)
    [2, 3, 0, 1]
    """
    draw, groups = random.Random(seed), dict[tuple[bool, ...], list[int]]()
    donor_of: dict[int, int] = {}
    for row, is_padding in enumerate(padding):
        groups.setdefault(tuple(is_padding), []).append(row)
    for rows in groups.values():
        if len(rows) < 2:
            raise EditError(
                f"resample must have 2 rows with the same padding; got one, row {rows[0]}"
            )
        order = draw.sample(rows, len(rows))
        # Each takes from the one before it in a random circle.
        donor_of |= zip(order, order[-1:] + order[:-1], strict=True)
    return [donor_of[row] for row in range(len(padding))]


def normal(name: str, firsts: tuple[int, ...], lengths: tuple[int, ...]) -> Float[Tensor, "..."]:
    """A number from the normal distribution for each place of a box.

    It is a hash (splitmix64) of the name and of the number's own place, so it does not depend on the box.

    Args:
        name: another name gives other numbers.
        firsts, lengths: where the box begins along each axis, and its sizes.
    """
    state = _started(name)
    for first, length in zip(firsts, lengths, strict=True):
        state = _mixed(state[..., None] + torch.arange(first + 1, first + length + 1) * _GOLDEN)
    uniform = (_shifted(state, 11) + 0.5) * 2.0**-53
    return torch.special.ndtri(uniform)


def hashes(name: str, places: Int[Tensor, "row axis"]) -> Int[Tensor, " row"]:
    """A hash (splitmix64) of the name and of each place, as a signed integer; one with other places is another."""
    state = _started(name)
    for column in places.unbind(1):
        state = _mixed(state + (column + 1) * _GOLDEN)
    return state


def _started(name: str) -> Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True))


# Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"; as signed integers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def _mixed(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    """A shift to the right as of unsigned integers."""
    return (state >> by) & ((1 << (64 - by)) - 1)
