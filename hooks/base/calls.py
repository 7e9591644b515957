"""Calls: which call of its module a value is of, for modules that run many times in one run."""

from collections import Counter

from hooks.base.scoped import Scoped

number_of_call = Scoped[int | None]("call", None)
"""The number of the call at whose value a hook acts, from 0 in each run of a model; None where nobody counts."""


class Calls(Counter[str]):
    """The numbers of times that points have fired in a run, by name.

    >>> calls = Calls()
    >>> [calls.next("state"), calls.next("embed"), calls.next("state")]
    [0, 0, 1]
    """

    def next(self, name: str) -> int:
        """The number of the call that a point fires in now, from 0; it is counted."""
        self[name] += 1
        return self[name] - 1
