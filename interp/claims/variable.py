"""Claims that a value carries a variable of a causal model, and the tests of such a claim.

`verify` repeats the search (`interp.alignment.align`) on the pairs of the claim, and interchanges
the learned columns in fresh pairs:

1. The share of right answers must be at least the promise, with each of two seeds.
2. It must exceed the share with random columns, the share that the same search reaches in a model
   with shuffled weights, and the share with columns that were learned from shuffled answers.
3. It must come near the share with the whole value, which carries the variable if any part does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hooks.base import require_integer
from interp.alignment import align
from interp.claims.fields import fields, integer, number, text_field
from interp.claims.trial import Content, Trial
from interp.claims.verdict import Bounds, Test
from interp.results.result import Result

_FACTS = ("point", "k", "pos", "head", "epochs", "rate")
_CONTROLS = {
    "random": "above a random part",
    "shuffled weights": "above shuffled weights",
    "shuffled answers": "above shuffled answers",
}


@dataclass(frozen=True)
class VariableContent(Content):
    """The place of a variable, the settings of the search and the promised accuracy.

    Attributes:
        point: the name of the point.
        k: the number of columns.
        pos: the position.
        head: the head; None if the point has no heads.
        epochs, rate: the number of epochs and the learning rate of `align`.
        accuracy: the promised share of right answers.
    """

    point: str
    k: int
    pos: int
    head: int | None
    epochs: int
    rate: float
    accuracy: float

    kind: ClassVar[str] = "variable"

    def __post_init__(self) -> None:
        require_integer("k", self.k)
        require_integer("epochs", self.epochs)
        number(self.rate, "rate", least=0)
        number(self.accuracy, "accuracy", least=0, most=1)

    @property
    def title(self) -> str:
        """The place and the number of columns."""
        head = "" if self.head is None else f", head {self.head},"
        return f"a variable in {self.k} columns of {self.point}{head} at position {self.pos}"

    def tests(self, trial: Trial) -> list[Test]:
        """Return the results of all tests that the module's docstring lists.

        If a fresh pair is also a pair of the search, the result is one test with the outcome
        `cannot tell`.
        """
        if {*trial.fresh.digests()} & {*trial.found_on.digests()}:
            return [Test("aligned", "cannot tell", note="it needs pairs that are not trained on")]
        first = self._accuracy(trial, trial.seeds[0])
        bounds = Bounds(least=self.accuracy)
        tests = [_test("aligned", first.select(control="aligned"), bounds)]
        for seed in trial.seeds[1:]:
            again = self._accuracy(trial, seed).select(control="aligned")
            tests.append(_test(f"aligned, seed {seed}", again, bounds))
        for control, name in _CONTROLS.items():
            tests.append(_test(name, _above(first, control), Bounds(above=0.0)))
        near = Bounds(least=self.accuracy - 1)
        tests.append(_test("near the whole value", _above(first, "whole"), near))
        return tests

    def _accuracy(self, trial: Trial, seed: int) -> Result:
        """Return the accuracy of the learned part and of its controls, [control, example]."""
        alignment = align(
            trial.model,
            trial.found_on,
            self.point,
            self.k,
            test=trial.fresh,
            pos=self.pos,
            head=self.head,
            epochs=self.epochs,
            rate=self.rate,
            seed=seed,
        )
        return alignment.accuracy.select(point=self.point, pos=self.pos)

    def about(self, trial: Trial) -> Mapping[str, str]:
        """Return facts about the measurement."""
        return {"metric": "1 if the answer is right, otherwise 0; base: the corrupted run"}

    def packed(self) -> dict[str, Any]:
        """Return the content as JSON types."""
        facts: dict[str, Any] = {name: getattr(self, name) for name in _FACTS}
        return {**facts, "promised": {"accuracy": self.accuracy}}

    @classmethod
    def from_json(cls, value: Any, path: str) -> "VariableContent":
        """Return the content from JSON types.

        Raises:
            ValueError: if a field is missing, unknown or wrong.
        """
        facts = fields(value, path, *_FACTS, "promised")
        promised = fields(facts["promised"], f"{path}.promised", "accuracy")
        accuracy = number(promised["accuracy"], f"{path}.promised.accuracy", least=0, most=1)
        head = facts["head"]
        return cls(
            point=text_field(facts["point"], f"{path}.point"),
            k=integer(facts["k"], f"{path}.k", least=1),
            pos=integer(facts["pos"], f"{path}.pos"),
            head=None if head is None else integer(head, f"{path}.head", least=0),
            epochs=integer(facts["epochs"], f"{path}.epochs", least=1),
            rate=number(facts["rate"], f"{path}.rate", least=0),
            accuracy=accuracy,
        )


def _test(name: str, result: Result, bounds: Bounds) -> Test:
    """Return the test of an accuracy or of a difference of accuracies."""
    return Test.of(name, result, bounds, unit="accuracy")


def _above(accuracy: Result, control: str) -> Result:
    """Return the accuracy of the learned part minus the accuracy of a control, for each pair."""
    aligned = accuracy.select(control="aligned")
    other = accuracy.select(control=control)
    # A difference of two shares is between -1 and 1.
    return replace(aligned, values=aligned.values - other.values, bounds=(-1.0, 1.0))
