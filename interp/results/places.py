"""Entries of a result: labels, a mean effect and its interval."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One entry of a result: its labels by axis, its mean effect and the 95% interval; and words, by axis."""

    where: Mapping[str, Any]
    effect: float
    low: float
    high: float
    words: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """The labels as one text, such as `layer 2, pos 9 ' Mary'`."""
        words = {axis: f" {word!r}" for axis, word in self.words.items() if word}
        return ", ".join(
            f"{axis} {label}{words.get(axis, '')}" for axis, label in self.where.items()
        )


def written(low: float, high: float, form: str = "+.4g") -> str:
    """An interval as text, such as ` [-0.5, +1.5]`; nothing where there is none."""
    return "" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]"


class Entries(tuple[Entry, ...]):
    """Entries of a result. They print one a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = [place.name for place in self]
        width = max(map(len, names), default=0)
        ends = [written(place.low, place.high) for place in self]
        rows = zip(names, self, [end and f" {end}" for end in ends], strict=True)
        return "\n".join(f"{name:<{width}}  {p.effect:+.4g}{spread}" for name, p, spread in rows)
