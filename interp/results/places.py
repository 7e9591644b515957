"""Entries of a result: labels, a mean effect and its interval."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One entry of a result.

    Attributes:
        where: its labels by axis.
        effect: its mean effect.
        low, high: the 95% interval of the effect.
        words: the text at a label, by axis.
        together: the layers that were changed together, such as `all 4 layers`; empty for one layer.
    """

    where: Mapping[str, Any]
    effect: float
    low: float
    high: float
    words: Mapping[str, str] = {}
    together: str = ""

    @property
    def name(self) -> str:
        """The labels as one text, such as `layer 2, pos 9 ' Mary'` or `head 3 of all 4 layers`."""
        words = {axis: f" {word!r}" for axis, word in self.words.items() if word}
        labels = [f"{axis} {label}{words.get(axis, '')}" for axis, label in self.where.items()]
        return ", ".join(labels) + (f" of {self.together}" if self.together else "")


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
