"""Counts of the calls of each module, for modules that run several times in one run of a model."""

from collections import Counter

from hooks.base.scoped import Scoped

number_of_call = Scoped[int | None]("call", None)
"""The number of the call of the module whose value a hook edits now.

The first call of a module in a run of a model has the number 0. The number is None if calls are not
counted.
"""


class Calls(Counter[str]):
    """The number of times that each point has fired in a run, by the name of the point.

    >>> calls = Calls()
    >>> [calls.next("state"), calls.next("embed"), calls.next("state")]
    [0, 0, 1]
    """

    def next(self, name: str) -> int:
        """Count one call of a point and return its number, from 0."""
        self[name] += 1
        return self[name] - 1
