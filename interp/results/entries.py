"""Entries of a result: labels, a mean effect and its interval."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from hooks.base import HintsAtNames, number_of
from interp.numbers.intervals import interval_text

_WITHOUT_BOUND = (
    "inf: the share has no bound, because target - base may be 0 (its interval, widened for skewed "
    "examples, contains 0)"
)


def sizes_in_words(axes: Sequence[str], shape: Sequence[int]) -> str:
    """Return the sizes of axes, such as `3 layers x 1 head`.

    >>> sizes_in_words(["head", "query", "pos", "batch"], [1, 2, 3, 4])
    '1 head x 2 queries x 3 positions x 4 batches'
    """
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        parts.append(number_of(size, "position" if axis == "pos" else axis))
    return " x ".join(parts)


class Entry(NamedTuple):
    """One entry of a result.

    Attributes:
        where: the label on each axis, by the name of the axis.
        effect: the mean effect.
        low, high: the ends of the 95% interval of the effect.
        words: by the name of an axis, the text at the label, such as the token at a position.
        together: a phrase for the layers that were changed together, such as `all 4 layers`; empty
            if each layer was changed alone.
        is_rounding: whether the effect on every example is at most the rounding of the metric. The
            effect is then printed as 0.
        examples: the number of texts that have the place, such as `1 of 2 texts`; empty if all
            texts have it.

    >>> Entry({"layer": 2, "head": 3}, 0.5, 0.1, 0.9)
    layer 2, head 3  +0.5  [+0.1, +0.9]
    """

    where: Mapping[str, Any]
    effect: float
    low: float
    high: float
    words: Mapping[str, str] = {}
    together: str = ""
    is_rounding: bool = False
    examples: str = ""

    @property
    def name(self) -> str:
        """The labels as one text, such as `layer 2, pos 9 ' Mary'` or `head 3 of all 4 layers`."""
        labels = []
        for axis, label in self.where.items():
            word = self.words.get(axis)
            # If the label is the name of the axis, such as `circuit` on the axis `circuit`, write
            # it once.
            name = axis if label == axis else f"{axis} {label}"
            labels.append(f"{name} {word!r}" if word else name)
        name = ", ".join(labels)
        return f"{name} of {self.together}" if self.together else name

    @property
    def numbers(self) -> str:
        """The effect and its interval as one text, such as `+0.5  [+0.1, +0.9]`."""
        if math.isnan(self.effect):
            return "NaN, not ranked"
        if self.is_rounding and self.effect != 0:
            return "0 up to rounding"
        interval = interval_text(self.low, self.high)
        return f"{self.effect:+.4g} {interval}" if interval else f"{self.effect:+.4g}"

    def _line(self, width: int = 0) -> str:
        """Return the entry as one line.

        Args:
            width: the number of characters of the name with the spaces after it. Default: 0, for
                the name alone.
        """
        line = f"{self.name:<{width}}  {self.numbers}"
        return f"{line} ({self.examples})" if self.examples else line

    def __repr__(self) -> str:
        return self._line()


class Entries(HintsAtNames, tuple[Entry, ...]):
    """Entries of a result, which are printed one per line.

    If a printed interval has an infinite end, the last line gives the reason. Only intervals of
    ratios have infinite ends; see `interp.numbers.intervals`. A note of the whole result, such as
    the note of a probe far below chance, is the last line too.

    >>> Entries([Entry({"head": 3}, 0.5, 0.1, 0.9), Entry({"head": 10}, *[math.nan] * 3)])
    head 3   +0.5  [+0.1, +0.9]
    head 10  NaN, not ranked
    """

    _of_result: tuple[str, ...] = ()

    def with_notes(self, notes: Iterable[str]) -> Self:
        """Return the entries with notes of the whole result, which are printed after the entries.

        Args:
            notes: the notes, one line each.
        """
        entries = type(self)(self)
        entries._of_result = (*self._of_result, *notes)
        return entries

    def __repr__(self) -> str:
        width = max((len(entry.name) for entry in self), default=0)
        lines = [entry._line(width) for entry in self]
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """Return the reason for infinite ends of intervals, if an end is infinite, and the notes of
        the whole result.
        """
        has_no_bound = any("inf" in entry.numbers for entry in self)
        return [*[_WITHOUT_BOUND] * has_no_bound, *self._of_result]
