"""A part of many examples, which one call of an analysis runs, and facts over all examples.

`interp.many` runs an analysis once for each part. Inside a part, an analysis does not know means
and largest values over all examples:

1. `running` opens a part, and `interp.many` calls the analysis inside of it.
2. The analysis returns `finished(result, finish)`. Outside of a part this is `finish(result)`.
   Inside a part, it is the unfinished result, and the part records `finish`.
3. `interp.many` joins the unfinished results of all parts, and calls `finish` once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hooks.base import Scoped

R = TypeVar("R")

UNFINISHED = "unfinished"
"""The entry of `about` of an unfinished result.

It contains `examples`, lists by name whose last axis is the example, and `largest`, numbers or
lists by name. When parts are joined, `examples` are joined along the last axis, and of `largest`
the largest numbers are taken.
"""


@dataclass
class RunningPart:
    """A part of many examples.

    Attributes:
        first: the number of the first example of the part.
        is_whole: whether the part contains all examples.
        finish: the function that finishes the joined result; None if the result is finished.
        options: the options of `finish`, which fit JSON.
        digests: a hash of the texts of each example, if the analysis has numbered copies.
        compares_values: whether two examples are copies only if their values in the result are
            equal too.
    """

    first: int = 0
    is_whole: bool = False
    finish: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    digests: Sequence[str] | None = None
    compares_values: bool = False


_RUNNING: Scoped[RunningPart | None] = Scoped("part", None)


def running(part: RunningPart) -> AbstractContextManager[Any]:
    """Return a context manager inside which this thread runs a part of many examples."""
    return _RUNNING.set(part)


def part_now() -> RunningPart | None:
    """Return the part that this thread runs, or None outside of a part."""
    return _RUNNING.get()


def n_before() -> int:
    """Return the number of examples before the part that runs now; 0 outside of a part."""
    part = _RUNNING.get()
    return 0 if part is None else part.first


def finished(result: R, finish: Callable[..., R], **options: Any) -> R:
    """Return a result with its facts over all examples, or the unfinished result of a part.

    Args:
        result: the unfinished result.
        finish: a function of a module, which computes these facts.
        options: options of `finish`, which fit JSON.

    >>> finished(3, lambda result: 2 * result)
    6
    >>> with running(RunningPart()):
    ...     finished(3, lambda result: 2 * result)
    3
    """
    part = _RUNNING.get()
    if part is None:
        return finish(result, **options)
    part.finish = finish
    part.options = options
    return result


def is_in_parts() -> bool:
    """Return whether a part runs now that does not contain all examples."""
    part = _RUNNING.get()
    return part is not None and not part.is_whole


def require_whole(rule: str, what: str) -> None:
    """Check that all examples run now, and not only a part of them.

    Args:
        rule: the rule for parts, such as `steps must be a number`.
        what: the argument that depends on all examples.

    Raises:
        ValueError: if a part runs that does not contain all examples.
    """
    if is_in_parts():
        raise ValueError(
            f"{rule} in over_examples, because {what} depends on all examples, and a part contains "
            "only some of them"
        )
