"""The results of `evaluate_sae`: scores of dictionaries in a model."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from hooks.base import number_of, require_choice
from interp import plots
from interp.json_form import Table, columns, form
from interp.numbers.intervals import interval_text, standard_error
from interp.plots import objects
from interp.results.result import Result, shares_of

Ablation = Literal["zero", "mean"]
ABLATIONS: tuple[Ablation, ...] = ("zero", "mean")
RUNS = ("unedited", "spliced", *ABLATIONS)
DENSE = 0.1
"""A feature is dense if it is active at more than this share of the positions."""
LEAST_FOR_DEAD = 1_000_000
"""The minimum number of tokens that is needed to call features dead.

If a feature was inactive at all of n tokens, its density is below 3 / n with a confidence of 95%.
For this number of tokens, the density is below 3 in a million. On fewer tokens, many inactive
features are only rare. During training, libraries call a feature dead after 4 million tokens
without activity (SAELens) or 10 million (sparsify, dictionary_learning).
"""


@dataclass(frozen=True, eq=False)
class PointScores:
    """The scores of one dictionary.

    Attributes:
        explained_variance: 1 minus the squared error divided by the variance of the values that the
            dictionary approximates; NaN if these values are constant.
        l0: the mean number of features that are not 0 at a position.
        density: the share of positions where a feature is not 0, for each feature.
        n_tokens: the number of positions that were read, or 0 if it is unknown.

    >>> import torch
    >>> scores = PointScores(explained_variance=0.9, l0=0.7, density=torch.tensor([0.0, 0.2, 0.5]))
    >>> round(scores.dense, 2)
    0.67
    """

    explained_variance: float
    l0: float
    density: Float[Tensor, " feature"]
    n_tokens: int = 0

    @property
    def dead(self) -> float:
        """The share of features that are never active, or NaN if fewer than `LEAST_FOR_DEAD` tokens
        were read.
        """
        if self.n_tokens < LEAST_FOR_DEAD:
            return math.nan
        return (self.density == 0).float().mean().item()

    @property
    def dense(self) -> float:
        """The share of features that are active at more than a tenth of the positions."""
        return (self.density > DENSE).float().mean().item()

    def __str__(self) -> str:
        too_few = f"dead features need {LEAST_FOR_DEAD:,} tokens"
        parts = [
            f"{number_of(self.n_tokens, 'token')}",
            f"explained variance {self.explained_variance:.4f}",
            f"{self.l0:.1f} features at a position",
            f"{self.dense:.1%} dense",
            too_few if self.n_tokens < LEAST_FOR_DEAD else f"{self.dead:.1%} dead",
        ]
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class DictionaryScores(plots.Shown):
    """The scores of one or several dictionaries in a model, returned by `evaluate_sae`.

    Attributes:
        losses: the mean loss of each text in nats per token, [run example]. A mean over examples
            gives short and long texts the same weight. The runs are the unedited model, and the
            model with the reconstructions, with zeros, and with means over all positions in place
            of the values.
        kl: the mean KL(unedited ‖ spliced) of each text, in nats.
        points: the scores of each dictionary, by the point that it writes.
        groups: a number for each text. Copies of a text have the same number, and intervals count
            them once. None if there are no copies.

    >>> from interp.features import evaluate_sae, load_sae
    >>> from models import load
    >>> texts = ["def f(x): return x", "class A: pass"]
    >>> scores = evaluate_sae(load("pydoc-4l"), load_sae("pydoc-4l/resid_post"), texts)
    >>> unedited, spliced, zero, mean = scores.losses.mean(1)
    >>> unedited < spliced < mean < zero
    tensor(True)
    >>> scores.points["blocks.2.resid_post"].l0
    32.0
    """

    losses: Float[Tensor, "run example"]
    kl: Float[Tensor, " example"]
    points: Mapping[str, PointScores]
    groups: tuple[int, ...] | None = None

    def recovered(self, ablation: Ablation = "zero") -> Result:
        """Return the share of the loss that the dictionaries recover, with an interval.

        A share of 1 means that the loss is the loss of the unedited model.

        Args:
            ablation: the model with a share of 0: with zeros, or with means, in place of the
                values. Default: `zero`.

        Raises:
            ValueError: if the ablation raises the loss by less than 0.01 nats or by less than two
                standard errors. A ratio is then meaningless; see `losses` instead.
        """
        require_choice("ablation", ablation, ABLATIONS)
        by_run = dict(zip(RUNS, self.losses, strict=True))
        unedited, spliced, ablated = by_run["unedited"], by_run["spliced"], by_run[ablation]
        gap = ablated - unedited
        # The standard error of a single text is NaN.
        error = standard_error(gap, self.groups).nan_to_num()
        if gap.mean() < max(0.01, 2 * error.item()):
            raise ValueError(
                f"the ablation {ablation!r} must raise the loss by at least 0.01 nats and two "
                f"standard errors; it changes the loss from {unedited.mean():.4f} to "
                f"{ablated.mean():.4f} (standard error {error:.4f}), and a share of this change is "
                "meaningless"
            )
        effects = Result(
            values=(spliced - ablated)[None],
            axes=("run", "example"),
            base=ablated,
            target=unedited,
            labels={"run": ["spliced"]},
            unit="nats",
            groups=self.groups,
        )
        return shares_of(effects)

    def as_json(self) -> dict[str, Any]:
        """Return the losses and the scores of each dictionary, in the JSON form of all results; see
        `interp.json_form`.

        `recovered.zero` and `recovered.mean` are missing if the ablation changes the loss too
        little; see `recovered`.
        """
        kl = Result(self.kl[None], ("place", "example"), unit="nats", groups=self.groups)
        tables = {**self._losses().tables("losses"), **kl.tables("kl")}
        for ablation in ABLATIONS:
            with suppress(ValueError):
                tables |= self.recovered(ablation).tables(f"recovered.{ablation}")
        units = {
            "explained_variance": "share of variance",
            "l0": "features",
            "n_tokens": "tokens",
            "dead": "share of features",
            "dense": "share of features",
        }
        scores = [*self.points.values()]
        tables |= columns("point", scores, " ".join(units), units, labels=[*self.points])
        for name, point in self.points.items():
            tables[f"density.{name}"] = Table(point.density, "feature", "share of positions")
        return form("DictionaryScores", tables)

    def _losses(self) -> Result:
        """Return the losses as a table."""
        labels = {"run": [*RUNS]}
        return Result(
            self.losses, ("run", "example"), labels=labels, unit="nats", groups=self.groups
        )

    def view(self) -> plots.View:
        """Return a view of the losses and of the density of features."""
        return objects.dictionary_scores(self, self._losses())

    def __repr__(self) -> str:
        rows = [
            f"{name:<9} {loss:.4f} nats"
            for name, loss in zip(RUNS, self.losses.mean(1).tolist(), strict=True)
        ]
        for ablation in ABLATIONS:
            try:
                share = self.recovered(ablation)
            except ValueError as error:
                rows.append(f"recovered  {error}")
                continue
            low, high = (end.item() for end in share.interval())
            mean = share.mean().item()
            rows.append(f"recovered of {ablation}: {mean:.4f} {interval_text(low, high, '.4f')}")
        rows.append(f"KL {self.kl.mean():.4f} nats")
        rows += [f"{name}: {score}" for name, score in self.points.items()]
        return "\n".join(
            [f"DictionaryScores of {self.losses.shape[1]} texts", *(f"  {line}" for line in rows)]
        )
