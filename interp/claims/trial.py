"""The material of a verification, and the tests that several kinds of claims share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import is_cancelled, without_gradients
from interp.claims.verdict import Bounds, Test
from interp.features.dictionary import Dictionary
from interp.inputs.token_positions import mask_of_columns
from interp.measuring import measure, name_of, unit_of
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.protocol import logits_of
from interp.results.result import Result, shares_of
from interp.runs.models import with_shuffled_weights
from interp.runs.runs import Runs


@dataclass(frozen=True, eq=False)
class Trial:
    """The model and the texts of a verification.

    Attributes:
        model: the model.
        found_on: the pairs on which the claim was found.
        fresh: the pairs on which it is tested.
        seeds: the seeds of random choices.
        paraphrase: pairs with the same behaviour in other words. None if there are no other words.
        dictionary: the dictionary of a feature; None for other claims.
        max_bytes: a bound on the memory of runs; see `run_circuit`.
    """

    model: nn.Module
    found_on: Pairs
    fresh: Pairs
    seeds: Sequence[int]
    paraphrase: Pairs | None = None
    dictionary: Dictionary | None = None
    max_bytes: int = 2**30

    @cached_property
    def behaviour(self) -> "Behaviour":
        """The behaviour of the model on the fresh pairs."""
        return Behaviour.of(self.model, self.fresh)

    @cached_property
    def shuffled(self) -> nn.Module:
        """A copy of the model with shuffled weights."""
        return with_shuffled_weights(self.model, self.seeds[0])


class Content:
    """The content of a claim: what is claimed, the promised numbers, and the tests."""

    kind: ClassVar[str]
    compares_texts: ClassVar[bool] = True
    """True if the pairs must have corrupted texts."""
    has_paraphrase: ClassVar[bool] = False
    """True if the tests can use a paraphrase."""

    @property
    def title(self) -> str:
        """A few words about the content, such as `a circuit of 20 edges`."""
        raise NotImplementedError

    @property
    def found_on(self) -> frozenset[str]:
        """The digests of further texts on which the content was found; see `Pairs.digests`."""
        return frozenset()

    def tests(self, trial: Trial) -> list[Test]:
        """Run all tests of the claim on a model, and return their results.

        Args:
            trial: the model, the fresh pairs, and the other material of the tests.
        """
        raise NotImplementedError

    def about(self, trial: Trial) -> Mapping[str, str]:
        """Return facts about the measurement by name, such as the metric and its base."""
        raise NotImplementedError

    def packed(self) -> dict[str, Any]:
        """Return the content as JSON types. The field `promised` contains the numbers."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, value: Any, path: str) -> "Content":
        """Return the content from JSON types.

        Args:
            value: the result of `packed`.
            path: the path of the content in the file, for errors.

        Raises:
            ValueError: if a field is missing, unknown or wrong.
        """
        raise NotImplementedError


def one_place(values: Float[Tensor, " example"], like: Runs, unit: str = "") -> Result:
    """Return one number for each example as a result with a single place.

    Args:
        values: the numbers.
        like: the runs of the examples, whose copies of texts count once in intervals.
        unit: the unit of the numbers.
    """
    return Result(
        values[None], ("test", "example"), labels={"test": [""]}, unit=unit, groups=like.groups
    )


def as_share(
    values: Float[Tensor, " example"],
    none: Float[Tensor, " example"],
    whole: Float[Tensor, " example"],
    like: Runs,
) -> Result:
    """Return differences of a metric as shares of the behaviour, `whole - none`.

    Args:
        values: the differences.
        none: the metric without the behaviour.
        whole: the metric of the whole model.
        like: the runs of the examples.
    """
    effects = Result(
        values[None],
        ("test", "example"),
        base=none,
        target=whole,
        labels={"test": [""]},
        groups=like.groups,
    )
    return shares_of(effects)


@dataclass(frozen=True, eq=False)
class Behaviour:
    """The metric of pairs in the clean and in the corrupted run.

    Attributes:
        runs: the runs.
        clean, corrupted: the metric of each example.
    """

    runs: Runs
    clean: Float[Tensor, " example"]
    corrupted: Float[Tensor, " example"]

    @classmethod
    @without_gradients
    def of(cls, model: nn.Module, pairs: Pairs) -> "Behaviour":
        """Return the behaviour of a model on pairs."""
        metrics = {}
        directions: tuple[PatchingDirection, ...] = ("noising", "denoising")
        for direction in directions:
            runs = Runs(model, pairs, direction=direction)
            text = runs.text
            logits = logits_of(runs.runner.model(text.tokens, **text.arguments(model)))
            mask = mask_of_columns(logits, text.of_logits.attention_mask)
            values = measure(runs.metric, logits, mask)
            metrics[direction] = runs.per_example(values)
        runs = Runs(model, pairs, direction="noising")
        return cls(runs, clean=metrics["noising"], corrupted=metrics["denoising"])

    @property
    def gap(self) -> Float[Tensor, " example"]:
        """The metric of the clean run minus the metric of the corrupted run."""
        return self.clean - self.corrupted

    @property
    def is_zero(self) -> bool:
        """True if both runs have the same mean metric, so that shares do not exist."""
        size = torch.maximum(self.clean.abs(), self.corrupted.abs())
        return bool(is_cancelled(self.gap.mean(), size.mean()))

    @property
    def unit(self) -> str:
        """The unit of the metric."""
        return unit_of(self.runs.metric)

    def share(self, values: Float[Tensor, " example"]) -> Result:
        """Return differences of the metric as shares of the behaviour."""
        return as_share(values, self.corrupted, self.clean, self.runs)

    def test(self) -> Test:
        """Return the test that the model behaves differently on clean and corrupted texts."""
        result = one_place(self.gap, self.runs, self.unit)
        return Test.of("behaviour", result, Bounds(above=0.0), unit=self.unit)

    def about(self) -> Mapping[str, str]:
        """Return the name and unit of the metric, and its means on the corrupted and clean texts.

        The mean on the corrupted texts is called base, and the mean on the clean texts target.
        """
        numbers = (
            f"base {float(self.corrupted.mean()):+.4g}, target {float(self.clean.mean()):+.4g}"
        )
        return {"metric": f"{name_of(self.runs.metric)}, {numbers}, in {self.unit}"}


def shuffled_weights(trial: Trial) -> Test:
    """Return the test that a model with shuffled weights has at most half of the behaviour.

    Otherwise the metric measures the texts, and not the model.
    """
    shuffled = Behaviour.of(trial.shuffled, trial.fresh)
    gap = shuffled.gap.to(trial.behaviour.gap)
    return Test.of("shuffled weights", trial.behaviour.share(gap), Bounds(most=0.5))


def highest(values: Sequence[Float[Tensor, " example"]]) -> Float[Tensor, " example"]:
    """Return the numbers with the highest mean, such as the best of several random circuits."""
    return max(values, key=lambda numbers: float(numbers.mean()))


def signed(
    trial: Trial,
    name: str,
    values: Float[Tensor, " example"],
    promised: float,
    is_difference: bool = False,
) -> Test:
    """Return the test that a change of the metric has the promised size and sign.

    Args:
        trial: the model and the pairs of the verification.
        name: the name of the test.
        values: the changes, which become shares of the behaviour.
        promised: the promised share. If it is negative, the share is at most this number.
        is_difference: whether only the sign is promised.
    """
    sign = 1 if promised > 0 else -1
    if is_difference:
        return Test.of(name, trial.behaviour.share(sign * values), Bounds(above=0.0))
    bounds = Bounds(least=promised) if sign > 0 else Bounds(most=promised)
    return Test.of(name, trial.behaviour.share(values), bounds)
