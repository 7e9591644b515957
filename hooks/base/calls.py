"""Numbers of calls, for modules that run many times in one run."""

from collections import Counter

from hooks.base.scoped import Scoped

number_of_call = Scoped[int | None]("call", None)
"""The number of the module's call whose value a hook edits, from 0 in each run of a model.

None if calls are not counted.
"""


class Calls(Counter[str]):
    """The numbers of times that points have fired in a run, by name.

    >>> calls = Calls()
    >>> [calls.next("state"), calls.next("embed"), calls.next("state")]
    [0, 0, 1]
    """

    def next(self, name: str) -> int:
        """Count one call of a point and return its number, from 0."""
        self[name] += 1
        return self[name] - 1
