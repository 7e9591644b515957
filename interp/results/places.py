"""Entries of a result: labels, a mean effect and its interval."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Place(NamedTuple):
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


class Places(tuple[Place, ...]):
    """Entries of a result. They print one a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = [place.name for place in self]
        width = max(map(len, names), default=0)
        spreads = ["" if math.isnan(p.low) else f"  [{p.low:+.4g}, {p.high:+.4g}]" for p in self]
        rows = zip(names, self, spreads, strict=True)
        return "\n".join(f"{name:<{width}}  {p.effect:+.4g}{spread}" for name, p, spread in rows)
