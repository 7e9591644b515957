"""Scores of dictionaries: what they reconstruct, what the model loses with them, and how sparse they are.

1. Run the model, and encode and decode what each dictionary reads: explained variance, features at a position.
2. Run it with the reconstructions, and with zeros and with means in their place.
3. The share of the loss that is recovered is (ablated - spliced) / (ablated - unedited), of mean losses.

A high share is no evidence that features mean something: a dictionary can have it with its decoder near the random
start. Compare two seeds (`stability`), and what activates features with what activates neurons (`purity`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import Hook, HookedRunner, Point
from hooks.base import (
    Index,
    Text,
    Texts,
    progress_of,
    require_choice,
    shows_progress,
    to_device,
    warn,
    without_gradients,
)
from hooks.shared import with_parts
from interp import pictures
from interp.features.splicing import Dictionaries, SplicedDictionary, placed
from interp.inputs.copies import digests, groups
from interp.inputs.texts import batches
from interp.measuring import measure
from interp.metrics import cross_entropy, kl_divergence
from interp.numbers.intervals import interval_text, standard_error
from interp.pictures import objects
from interp.protocol import logits_of, runner_of
from interp.results.result import Result

Ablation = Literal["zero", "mean"]
ABLATIONS: tuple[Ablation, ...] = ("zero", "mean")
RUNS = ("unedited", "spliced", *ABLATIONS)
DENSE = 0.1
"""A feature that is active at a larger share of positions is dense."""
LEAST_FOR_DEAD = 1_000_000
"""The fewest tokens on which features that were never active count as dead.

If a feature was active at none of n tokens, its density is below 3 / n with a confidence of 95%,
here below 3 in a million. On fewer tokens many of these features are only rare. In training,
libraries call a feature dead after 4 million tokens without it (SAELens) or after 10 million
(sparsify, dictionary_learning).
"""


@dataclass(frozen=True, eq=False)
class PointScores:
    """Scores of one dictionary.

    Attributes:
        explained_variance: 1 less the squared error over the variance of what it stands for; NaN if that is constant.
        l0: the mean number of features that are not 0 at a position.
        density: for each feature, the share of positions where it is not 0.
        n_tokens: how many positions were read; 0 if that is not known.
    """

    explained_variance: float
    l0: float
    density: Float[Tensor, " feature"]
    n_tokens: int = 0

    @property
    def dead(self) -> float:
        """The share of features that are never active. It is NaN below `LEAST_FOR_DEAD` tokens."""
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
            f"{self.n_tokens:,} tokens",
            f"explained variance {self.explained_variance:.4f}",
            f"{self.l0:.1f} features at a position",
            f"{self.dense:.1%} dense",
            too_few if self.n_tokens < LEAST_FOR_DEAD else f"{self.dead:.1%} dead",
        ]
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class DictionaryScores(pictures.Shown):
    """Scores of one or several dictionaries in a model; made by `evaluate_sae`.

    Attributes:
        losses: the mean loss of each text in nats per token, [run example]: of the model unedited, with the
            reconstructions, with zeros, and with means over all positions in their place.
        kl: the mean KL(unedited ‖ spliced) of each text, in nats.
        points: scores of each dictionary.
        groups: a number for each text, which its copies share. Intervals count copies once. None if
            there are no copies.
    """

    losses: Float[Tensor, "run example"]
    kl: Float[Tensor, " example"]
    points: Mapping[str, PointScores]
    groups: tuple[int, ...] | None = None

    def recovered(self, ablation: Ablation = "zero") -> Result:
        """The share of the loss that the dictionaries recover, with an interval: 1 is the unedited model.

        Args:
            ablation: what is 0: the model with zeros, or with means, in place of the values.

        Raises:
            ValueError: if that ablation hardly changes the loss: by less than 0.01 nats, or two standard errors. A
                ratio would say nothing then; see `losses`.
        """
        require_choice("ablation", ablation, ABLATIONS)
        unedited, spliced, ablated = (self.losses[RUNS.index(run)] for run in (*RUNS[:2], ablation))
        gap = ablated - unedited
        error = standard_error(gap, self.groups).nan_to_num()  # NaN for a single text
        if gap.mean() < max(0.01, 2 * error.item()):
            raise ValueError(
                f"the ablation {ablation!r} must raise the loss by at least 0.01 nats and two standard errors; it goes from "
                f"{unedited.mean():.4f} to {ablated.mean():.4f} (standard error {error:.4f}), and a share of that says nothing"
            )
        values, labels = (spliced - ablated)[None], {"run": ["spliced"]}
        axes, same = ("run", "example"), self.groups
        effects = Result(values, axes, ablated, unedited, labels, "nats", groups=same)
        return effects.normalized()

    def view(self) -> pictures.View:
        """The losses, and how often each feature is active."""
        axes, labels = ("run", "example"), {"run": [*RUNS]}
        losses = Result(self.losses, axes, labels=labels, unit="nats", groups=self.groups)
        return objects.dictionary_scores(self, losses)

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
            [f"DictionaryScores of {self.losses.shape[1]} texts", *(f"  {row}" for row in rows)]
        )


@shows_progress
@without_gradients
def evaluate_sae(
    model: nn.Module,
    dictionaries: Dictionaries,
    texts: Texts,
    *,
    reads: str | Mapping[str, str] | None = None,
    pos: Index | None = None,
    batch: int = 16,
    progress: bool = True,
) -> DictionaryScores:
    """Measure how well dictionaries stand for the values of a model, together, on texts that they were not trained on.

    Args:
        model: any model, in evaluation mode.
        dictionaries, reads: see `splice`.
        texts: the texts. Padding does not count, and texts of one token, which have no loss, are left out.
        pos: the positions of each text that are scored, and where values are replaced; None for all. The others keep the
            model's values. `slice(1, None)` leaves out the first token, whose stream is many times as long in most models.
        batch: how many texts are read together.
        progress: whether to show a bar after two seconds.

    Raises:
        TypeError, UnknownNameError, ValueError, HookError, ModeError: as for `splice`; or if there are no texts.

    Warns:
        UserWarning: as for `splice`; if texts were left out; or if one position has most of the variance, so that explained variance says
            little of the others.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> scores = evaluate_sae(load("pydoc-4l"), load_sae("pydoc-4l/resid_post"), ["def f(x): return x", "class A: pass"])
    >>> scores.recovered().mean() > 0.9
    tensor([True])
    """
    runner = runner_of(model)
    parts = placed(runner, dictionaries, None, reads)
    read = _with_loss([text for _, text in batches(texts, model, batch)])
    sums = {name: _Sums(part) for name, part in parts.items()}
    losses: dict[str, list[Tensor]] = {run: [] for run in RUNS}
    kl: list[Tensor] = []
    for text in progress_of(read, "batches", len(read)):
        unedited = _add_values(sums, runner, text, text.at(pos))
        with with_parts(model, runner.points, parts):
            spliced = logits_of(model(text.tokens, **text.arguments(model)))
        losses["unedited"].append(_loss(text, unedited))
        losses["spliced"].append(_loss(text, spliced))
        divergence = kl_divergence(unedited, None, attention_mask=text.attention_mask)
        kl.append(measure(divergence, spliced, text.attention_mask).cpu())
    for ablation in ABLATIONS:
        hooks = {
            name: _replaced(part, sums[name].ablated(ablation)) for name, part in parts.items()
        }
        for text in progress_of(read, f"batches with the {ablation} in place", len(read)):
            for part in parts.values():
                part.kept = text.at(pos)
            output = runner.run_with_hooks(text.tokens, hooks=hooks, **text.arguments(model))
            losses[ablation].append(_loss(text, logits_of(output)))
    for name, total in sums.items():
        total.warn_of_one_position(name)
    return DictionaryScores(
        losses=torch.stack([torch.cat(losses[run]) for run in RUNS]),
        kl=torch.cat(kl),
        points={name: total.scores() for name, total in sums.items()},
        groups=groups([digest for text in read for digest in digests(text)]),
    )


def _add_values(
    sums: Mapping[str, "_Sums"], runner: HookedRunner, text: Text, kept: Bool[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos vocab"]:
    """Run the unedited model on a text, add its values at the kept positions, and return the logits."""
    names = [*sums, *(total.part.reads for total in sums.values() if total.part.reads)]
    arguments = text.arguments(runner.model)
    output, cache = runner.run_with_cache(text.tokens, names=names, **arguments)
    for name, total in sums.items():
        total.add(cache[name], cache[total.part.reads or name], kept)
        total.part.kept = kept
    return logits_of(output)


def _loss(text: Text, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
    """The mean loss of each text, in nats per token."""
    metric = cross_entropy(text.tokens, attention_mask=text.attention_mask)
    return measure(metric, logits, text.attention_mask).cpu()


def _with_loss(read: list[Text]) -> list[Text]:
    """The texts of at least two tokens.

    Raises:
        ValueError: if there is none.
    """
    long = [text.real.sum(1) > 1 for text in read]
    n, n_long = sum(map(len, long)), sum(int(rows.sum()) for rows in long)
    if not n_long:
        raise ValueError("texts must have at least two tokens, one to read and one to predict")
    if n_long < n:
        warn(f"{n - n_long} of {n} texts are left out: one token alone has no loss")
    return [text.rows(rows) for text, rows in zip(read, long, strict=True) if rows.any()]


def _replaced(part: SplicedDictionary, vector: Float[Tensor, " d_out"]) -> Hook:
    """A hook that puts one vector where a dictionary stands, at the positions that it replaces."""

    def put(value: Tensor, point: Point) -> Tensor:
        return part.replaced(value, to_device(vector, value.device)[None, None])

    return put


class _Sums:
    """Sums over positions, in float64, from which the scores of one dictionary follow."""

    def __init__(self, part: SplicedDictionary) -> None:
        self.part, self.n = part, 0
        self.totals = torch.zeros(0, part.dictionary.d_out, dtype=torch.float64)  # by position
        self.squares, self.counts = torch.zeros(2, 0, dtype=torch.float64)
        self.error = 0.0
        self.active = torch.zeros(part.dictionary.n_features, dtype=torch.float64)

    def add(self, value: Tensor, read: Tensor, kept: Bool[Tensor, "batch pos"]) -> None:
        kept = to_device(kept, value.device)
        target = self.part.vector(value)[kept]
        x = self.part.vector(read)[kept]
        dictionary = self.part.dictionary
        features = dictionary.encode(x)
        output = dictionary.decode(features, x)
        target, output = target.cpu().double(), output.cpu().double()
        self.n += len(target)
        pos, more = kept.nonzero()[:, 1].cpu(), max(0, kept.shape[1] - len(self.totals))
        for name, rows in (
            ("totals", target),
            ("squares", target.square().sum(1)),
            ("counts", pos >= 0),
        ):
            held = getattr(self, name)
            longer = torch.cat([held, held.new_zeros(more, *held.shape[1:])])
            setattr(self, name, longer.index_add_(0, pos, rows.to(longer)))
        self.error += (target - output).square().sum().item()
        self.active += (features != 0).sum(0).cpu()

    def ablated(self, ablation: Ablation) -> Float[Tensor, " d_out"]:
        """The vector that an ablation puts in the place of each value."""
        if ablation == "zero":
            return torch.zeros(self.part.dictionary.d_out)
        return (self.totals.sum(0) / self.n).float()

    def variances(self) -> Float[Tensor, " pos"]:
        """The squared deviations from the mean of all rows, summed at each position."""
        mean = self.totals.sum(0) / self.n
        return self.squares - 2 * self.totals @ mean + self.counts * mean.square().sum()

    def warn_of_one_position(self, name: str) -> None:
        """Warn if one of several positions has most of the variance."""
        shares = self.variances() / self.variances().sum()
        if (self.counts > 0).sum() > 3 and shares.max() > 0.5:
            warn(
                f"position {int(shares.argmax())} has {float(shares.max()):.0%} of the variance at {name}, so explained "
                "variance says little of the others: leave it out by pos=, as in pos=slice(1, None)",
            )

    def scores(self) -> PointScores:
        if not self.n:
            raise ValueError("pos must select a token of at least one text; got none")
        variance = self.variances().sum().item()
        # What the difference may be by rounding.
        is_constant = variance <= 1e-12 * self.squares.sum().item()
        explained = math.nan if is_constant else 1 - self.error / variance
        density = self.active / self.n
        return PointScores(explained, density.sum().item(), density.float(), self.n)
