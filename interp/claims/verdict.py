"""The result of a verification: one test for each doubt, and the worst of them as the verdict.

1. A test compares the 95% interval of a measured number with the promised bounds.
2. It *holds* if the whole interval is inside the bounds, *fails* if the whole interval is outside,
   and *cannot tell* if the interval contains a bound or there is no interval.
3. The verdict is the worst status of all tests. Statuses are never averaged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hooks.base import aligned_rows, number_of, unknown_name
from interp import plots
from interp.json_form import Table, columns, form
from interp.results.result import Result

Status = Literal["holds", "cannot tell", "fails"]

STATUSES: tuple[Status, ...] = ("holds", "cannot tell", "fails")
"""All statuses, the best first."""

_MOST_TESTS = 24


@dataclass(frozen=True)
class Bounds:
    """The numbers that a promise allows.

    Attributes:
        least, most: the smallest and the largest allowed number. Default: no bound.
        above: a number that must be exceeded. Default: no bound.

    >>> Bounds(least=0.8, most=1.2), Bounds(above=0.0)
    (0.8 to 1.2, above 0)
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def status(self, low: float, high: float) -> Status:
        """Return whether an interval is inside the bounds.

        Args:
            low, high: the ends of the interval; NaN without an interval.

        >>> bounds = Bounds(least=0.8)
        >>> bounds.status(0.9, 1.1), bounds.status(0.7, 1.1), bounds.status(0.1, 0.3)
        ('holds', 'cannot tell', 'fails')
        """
        if math.isnan(low) or math.isnan(high):
            return "cannot tell"
        is_inside, is_outside = True, False
        if self.least is not None:
            is_inside &= low >= self.least
            is_outside |= high < self.least
        if self.most is not None:
            is_inside &= high <= self.most
            is_outside |= low > self.most
        if self.above is not None:
            is_inside &= low > self.above
            is_outside |= high <= self.above
        if is_inside:
            return "holds"
        return "fails" if is_outside else "cannot tell"

    def __repr__(self) -> str:
        if self.above is not None:
            return f"above {self.above:g}"
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return f"at most {self.most:g}" if self.least is None else f"at least {self.least:g}"


@dataclass(frozen=True)
class Test:
    """One test of a claim.

    Attributes:
        name: the name of the test.
        status: `holds`, `cannot tell` or `fails`.
        promised: the allowed numbers, as text.
        measured: the measured number; NaN if nothing was measured.
        low, high: the ends of its 95% interval over examples; NaN without an interval.
        unit: the unit of the numbers.
        note: a remark.

    >>> import torch
    >>> shares = Result(torch.tensor([[0.9, 1.0, 1.1, 0.9, 1.0]]), ("place", "example"))
    >>> test = Test.of("fresh pairs", shares, Bounds(least=0.8))
    >>> test.status, round(test.measured, 3), round(test.low, 3)
    ('holds', 0.98, 0.876)
    """

    name: str
    status: Status
    promised: str = ""
    measured: float = math.nan
    low: float = math.nan
    high: float = math.nan
    unit: str = ""
    note: str = ""

    # Pytest collects classes whose names begin with Test.
    __test__ = False

    @classmethod
    def of(
        cls, name: str, result: Result, bounds: Bounds, unit: str = "share", note: str = ""
    ) -> "Test":
        """Return the test of a number that was measured at one place.

        Args:
            name: the name of the test.
            result: the number of each example, [place, example] with a single place.
            bounds: the allowed numbers.
            unit: the unit of the number. Default: a share of the behaviour.
            note: a remark.
        """
        (entry,) = result.places([0])
        return cls(
            name=name,
            status=bounds.status(entry.low, entry.high),
            promised=repr(bounds),
            measured=entry.effect,
            low=entry.low,
            high=entry.high,
            unit=unit,
            note=note,
        )

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a row: the name, the promise, the number, the interval, the status
        and the unit.
        """
        measured = "" if math.isnan(self.measured) else f"{self.measured:+.3f}"
        interval = "" if math.isnan(self.low) else f"[{self.low:+.3f}, {self.high:+.3f}]"
        return (self.name, self.promised, measured, interval, self.status, self.unit)


_HEAD = ("test", "promised", "measured", "95% interval", "status", "unit")


@dataclass(frozen=True, eq=False, repr=False)
class Verdict(plots.Shown):
    """The tests of a claim; the result of `Claim.verify`.

    Attributes:
        says: the claim in words.
        about: facts about the verification by name: the model, the texts, the metric, the base and
            the seeds.
        tests: the tests, in order.

    >>> fresh = Test("fresh pairs", "holds", "at least 0.8", 0.93, 0.88, 0.97)
    >>> other = Test("mean ablation", "cannot tell", "at least 0.5", 0.61, 0.42, 0.77)
    >>> verdict = Verdict("a head copies the digit", {"texts": "12 fresh pairs"}, (fresh, other))
    >>> verdict.status
    'cannot tell'
    >>> verdict
    Verdict: cannot tell, the worst of 2 tests
      claim: a head copies the digit
      texts: 12 fresh pairs
      test           promised      measured  95% interval      status       unit
      fresh pairs    at least 0.8  +0.930    [+0.880, +0.970]  holds
      mean ablation  at least 0.5  +0.610    [+0.420, +0.770]  cannot tell
    """

    says: str
    about: Mapping[str, str]
    tests: tuple[Test, ...]

    @property
    def status(self) -> Status:
        """The worst status of all tests: `holds`, `cannot tell` or `fails`."""
        return max((test.status for test in self.tests), key=STATUSES.index)

    def __getitem__(self, name: str) -> Test:
        """Return the test with a name.

        Raises:
            UnknownNameError: if there is no such test; the error names close matches.
        """
        by_name = {test.name: test for test in self.tests}
        if name not in by_name:
            raise unknown_name(name, by_name, "test of this verdict")
        return by_name[name]

    def as_json(self) -> dict[str, Any]:
        """Return the status and a row for each test, in the JSON form of all results; see
        `interp.json_form`.
        """
        names = [test.name for test in self.tests]
        fields = "status promised measured low high unit note"
        tables = {"status": Table(self.status)}
        tables |= columns("test", self.tests, fields, labels=names)
        return form("Verdict", tables, {"says": self.says, **self.about})

    def view(self) -> plots.View:
        """Return a view of the table."""
        title, *lines = repr(self).splitlines()
        return plots.View(title, [], says=lines)

    def __repr__(self) -> str:
        lines = [f"Verdict: {self.status}, the worst of {number_of(len(self.tests), 'test')}"]
        lines.append(f"  claim: {self.says:.90}")
        lines += [f"  {name}: {fact}" for name, fact in self.about.items()]
        rows = aligned_rows([_HEAD, *(test.cells() for test in self.tests[:_MOST_TESTS])])
        lines += [f"  {row}" for row in rows]
        lines += [f"  {test.name}: {test.note}" for test in self.tests if test.note][:6]
        return "\n".join(lines)
