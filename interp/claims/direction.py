"""Claims that a direction moves a metric, and the tests of such a claim.

The direction is added to the values at its points, times a strength. On fresh prompts:

1. The change of the metric must be at least the promise.
2. It must exceed the change by the best of several random directions with the same lengths.
3. It must exceed the change by the best of several directions that are found in the same way from
   the same texts, with shuffled labels.
4. The opposite direction must move the metric the other way.
5. On other texts, the predictions may change only a little (KL divergence).
6. In a model with shuffled weights, at most half of the promised change may occur.

A probe can find a direction that no later part of the model reads. It moves nothing, and the claim
fails.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import Text, Texts, without_gradients
from interp import edits
from interp.claims.fields import entries, fields, number
from interp.claims.texts import TokenRows, listed, read_rows
from interp.claims.trial import Content, Trial, highest, one_place
from interp.claims.verdict import Bounds, Test
from interp.directions.direction import Direction
from interp.directions.finding import difference_of_means
from interp.directions.steering import steering_curve
from interp.inputs.texts import text_for
from interp.kinds import require_made
from interp.measuring import name_of, unit_of
from interp.metrics import log_prob
from interp.runs.runs import Runs
from interp.runs.sweep import effects_of_edits

_KINDS = ("yes", "no", "others")
_PROMISES = ("moves", "cost")


@dataclass(frozen=True)
class DirectionContent(Content):
    """A direction and its promised effect.

    Attributes:
        vectors: the vector of each point.
        strength: the factor of the direction.
        texts: the tokens of the texts of each kind: `yes`, `no` and `others`.
        moves: the promised change of the metric, in its unit.
        cost: the largest KL divergence on other texts, in nats.
    """

    vectors: Mapping[str, tuple[float, ...]]
    strength: float
    texts: Mapping[str, TokenRows]
    moves: float
    cost: float

    kind: ClassVar[str] = "direction"
    compares_texts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        number(self.strength, "strength")
        number(self.cost, "cost", least=0)
        if number(self.moves, "moves") == 0:
            raise ValueError("moves must be above or below 0; got 0")
        for name, vector in self.vectors.items():
            if not 0 < math.hypot(*vector) < math.inf:
                raise ValueError(f"the vector at {name} must have a finite length above 0")

    @classmethod
    def of(
        cls, model: nn.Module, direction: Direction, texts: Mapping[str, Texts], **numbers: float
    ) -> "DirectionContent":
        """Return the content of a claim about a direction.

        Args:
            model: the model that reads the texts.
            direction: the direction.
            texts: the texts of each kind.
            numbers: the strength and the promised numbers.
        """
        require_made("direction", direction, Direction)
        rows = {}
        for kind in _KINDS:
            rows[kind] = tuple(tuple(row) for row in text_for(model, texts[kind]).listed())
        vectors = {}
        for name, vector in direction.vectors.items():
            vectors[name] = tuple(vector.detach().cpu().double().tolist())
        return cls(vectors=vectors, texts=rows, **numbers)

    @property
    def title(self) -> str:
        """The points of the direction."""
        names = [*self.vectors]
        return f"a direction at {', '.join(names[:2])}{' and more' if len(names) > 2 else ''}"

    @without_gradients
    def tests(self, trial: Trial) -> list[Test]:
        """Return the results of all tests that the module's docstring lists."""
        own = self._direction(trial.model)
        runs = Runs(trial.model, trial.fresh.clean_only())
        sign = 1 if self.moves > 0 else -1
        unit = unit_of(runs.metric)
        changes = self._changes(runs, [own, own * -1.0])
        randoms = self._changes(runs, [_random(own, seed) for seed in trial.seeds])
        mislabelled = self._changes(runs, self._mislabelled(trial, own))
        shuffled_runs = Runs(trial.shuffled, trial.fresh.clean_only())
        (in_shuffled,) = self._changes(shuffled_runs, [own])

        def test(name: str, values: Tensor, bounds: Bounds, note: str = "") -> Test:
            return Test.of(name, one_place(values, runs, unit), bounds, unit=unit, note=note)

        promised = Bounds(least=self.moves) if sign > 0 else Bounds(most=self.moves)
        above = Bounds(above=0.0)
        moved = sign * changes[0]
        limit = Bounds(most=abs(self.moves) / 2)
        return [
            test("moves the metric", changes[0], promised),
            test("above random directions", moved - highest([*(sign * randoms)]), above),
            test("above shuffled labels", moved - highest([*(sign * mislabelled)]), above),
            test("opposite direction", -sign * changes[1], above),
            self._cost(trial, own),
            test("shuffled weights", sign * in_shuffled.to(moved), limit),
        ]

    def _direction(self, model: nn.Module) -> Direction:
        """Return the direction, times its strength, in the dtype of a model."""
        weight = next(model.parameters(), torch.zeros(()))
        vectors = {}
        for name, vector in self.vectors.items():
            vectors[name] = self.strength * torch.tensor(vector, dtype=torch.float64).to(weight)
        return Direction(vectors)

    def _changes(
        self, runs: Runs, directions: Sequence[Direction]
    ) -> Float[Tensor, "direction example"]:
        """Return the change of the metric by each direction."""
        jobs = [dict.fromkeys(direction.vectors, edits.add(direction)) for direction in directions]
        return runs.per_example(effects_of_edits(runs, jobs)[1])

    def _mislabelled(self, trial: Trial, own: Direction) -> list[Direction]:
        """Return directions from texts with shuffled labels, with the lengths of a direction."""
        rows = [*self.texts["yes"], *self.texts["no"]]
        n_yes = len(self.texts["yes"])
        directions = []
        for seed in trial.seeds:
            draw = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(rows), generator=draw).tolist()
            yes = [[*rows[n]] for n in order[:n_yes]]
            no = [[*rows[n]] for n in order[n_yes:]]
            again = difference_of_means(trial.model, (yes, no), [*own.vectors])
            directions.append(_as_long(again, own))
        return directions

    def _cost(self, trial: Trial, own: Direction) -> Test:
        """Return the test of the KL divergence on other texts."""
        rows = [torch.tensor(row) for row in self.texts["others"]]
        text = Text.padded(rows, device=trial.fresh.text.tokens.device)
        curve = steering_curve(
            trial.model,
            own,
            trial.fresh.text,
            [1.0],
            # The score is not used.
            log_prob(0),
            others=text,
            max_bytes=trial.max_bytes,
        )
        assert curve.kl is not None
        return Test.of("cost on other texts", curve.kl, Bounds(most=self.cost), unit="nats")

    def about(self, trial: Trial) -> Mapping[str, str]:
        """Return facts about the metric."""
        runs = Runs(trial.model, trial.fresh.clean_only())
        metric = f"{name_of(runs.metric)}, in {unit_of(runs.metric)}"
        return {"metric": f"{metric}; base: the model without the direction"}

    def packed(self) -> dict[str, Any]:
        """Return the content as JSON types."""
        return {
            "vectors": {name: [*vector] for name, vector in self.vectors.items()},
            "strength": self.strength,
            "texts": {kind: listed(rows) for kind, rows in self.texts.items()},
            "promised": {name: getattr(self, name) for name in _PROMISES},
        }

    @classmethod
    def from_json(cls, value: Any, path: str) -> "DirectionContent":
        """Return the content from JSON types.

        Raises:
            ValueError: if a field is missing, unknown or wrong.
        """
        facts = fields(value, path, "vectors", "strength", "texts", "promised")
        if not isinstance(facts["vectors"], dict) or not facts["vectors"]:
            raise ValueError(f"{path}.vectors must have a vector for each point")
        vectors = {}
        for name, vector in facts["vectors"].items():
            listed_numbers = entries(vector, f"{path}.vectors.{name}", least=1)
            vectors[name] = tuple(number(entry, at) for at, entry in listed_numbers)
        texts = fields(facts["texts"], f"{path}.texts", *_KINDS)
        promised = fields(facts["promised"], f"{path}.promised", *_PROMISES)
        for name in _PROMISES:
            promised[name] = number(promised[name], f"{path}.promised.{name}")
        return cls(
            vectors=vectors,
            strength=number(facts["strength"], f"{path}.strength"),
            texts={kind: read_rows(texts[kind], f"{path}.texts.{kind}") for kind in _KINDS},
            **promised,
        )


def _random(like: Direction, seed: int) -> Direction:
    """Return random vectors with the lengths of a direction."""
    draw = torch.Generator().manual_seed(seed)
    vectors = {}
    for name, vector in like.vectors.items():
        vectors[name] = torch.randn(vector.shape, generator=draw).to(vector)
    return _as_long(Direction(vectors), like)


def _as_long(direction: Direction, like: Direction) -> Direction:
    """Return a direction with the lengths of another direction."""
    vectors = {}
    for name, vector in direction.unit().vectors.items():
        vectors[name] = vector.to(like[name]) * like[name].norm()
    return Direction(vectors)
