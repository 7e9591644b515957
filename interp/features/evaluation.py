"""Scores of dictionaries: the quality of the reconstruction, the loss of the model with it, and the
sparsity.

1. Run the model, and encode and decode the values that each dictionary reads. This gives the
   explained variance and the number of active features at a position.
2. Run the model with the reconstructions, with zeros, and with means in place of the values.
3. The share of the loss that is recovered is (ablated - spliced) / (ablated - unedited), where each
   term is a mean loss.

A high share is no evidence that features are meaningful: a dictionary can reach a high share while
its decoder is still close to its random initialization. Compare two seeds (`stability`), and
compare the tokens that activate features and neurons (`purity`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
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
from interp import plots
from interp.features.splicing import Dictionaries, SplicedDictionary, placed
from interp.inputs.copies import digests, groups
from interp.inputs.texts import batches
from interp.measuring import measure
from interp.metrics import cross_entropy, kl_divergence
from interp.numbers.intervals import interval_text, standard_error
from interp.plots import objects
from interp.protocol import logits_of, runner_of
from interp.results.result import Result

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
            f"{self.n_tokens:,} tokens",
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
        losses: the mean loss of each text in nats per token, [run example]. The runs are the
            unedited model, and the model with the reconstructions, with zeros, and with means over
            all positions in place of the values.
        kl: the mean KL(unedited ‖ spliced) of each text, in nats.
        points: the scores of each dictionary, by the point that it writes.
        groups: a number for each text. Copies of a text have the same number, and intervals count
            them once. None if there are no copies.

    >>> from interp.features import load_sae
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
        return effects.normalized()

    def view(self) -> plots.View:
        """Return a view of the losses and of the density of features."""
        axes = ("run", "example")
        labels = {"run": [*RUNS]}
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
            [f"DictionaryScores of {self.losses.shape[1]} texts", *(f"  {line}" for line in rows)]
        )


@shows_progress
@without_gradients
def evaluate_sae(
    model: nn.Module,
    dictionaries: "Dictionaries",
    texts: "Texts",
    *,
    reads: str | Mapping[str, str] | None = None,
    pos: "Index | None" = None,
    batch: int = 16,
    progress: bool = True,
) -> DictionaryScores:
    """Return the loss, KL, explained variance and density of dictionaries in a model.

    Several dictionaries are spliced in together. Use texts that the dictionaries were not trained
    on.

    Args:
        model: any model, in evaluation mode.
        dictionaries, reads: see `splice`.
        texts: the texts. Padding is ignored. Texts of a single token are left out, because they
            have no loss.
        pos: the positions of each text that are scored and where values are replaced. All other
            positions keep the values of the model. `slice(1, None)` leaves out the first token,
            whose stream is many times longer in most models. Default: all positions.
        batch: the number of texts in a batch. Default: 16.
        progress: whether to show a progress bar after two seconds. Default: True.

    Returns:
        The losses in nats per token, [run, example], the KL in nats, [example], and the scores of
        each dictionary by the point that it writes.

    Raises:
        TypeError, UnknownNameError, ValueError, HookError, ModeError: for the same reasons as in
            `splice`, or if there are no texts.

    Warns:
        UserWarning: for the same reasons as in `splice`; if texts were left out; or if a single
            position has most of the variance, so that the explained variance mainly measures this
            position.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> texts = ["def f(x): return x", "class A: pass"]
    >>> scores = evaluate_sae(load("pydoc-4l"), load_sae("pydoc-4l/resid_post"), texts)
    >>> scores.recovered().mean() > 0.9
    tensor([True])
    """
    runner = runner_of(model)
    parts = placed(runner, dictionaries, error=None, reads=reads)
    read = _with_loss([text for _, text in batches(texts, model, batch)])
    sums = {name: _Sums(part) for name, part in parts.items()}
    losses: dict[str, list[Tensor]] = {run: [] for run in RUNS}
    kl: list[Tensor] = []
    for text in progress_of(read, "batches", len(read)):
        unedited = _add_values(sums, runner, text=text, is_scored=text.at(pos))
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
    digests_of_texts: list[str] = []
    for text in read:
        digests_of_texts += digests(text)
    return DictionaryScores(
        losses=torch.stack([torch.cat(losses[run]) for run in RUNS]),
        kl=torch.cat(kl),
        points={name: total.scores() for name, total in sums.items()},
        groups=groups(digests_of_texts),
    )


def _add_values(
    sums: Mapping[str, "_Sums"],
    runner: HookedRunner,
    text: Text,
    is_scored: Bool[Tensor, "batch pos"],
) -> Float[Tensor, "batch pos vocab"]:
    """Run the unedited model on a batch of texts, and return the logits.

    Args:
        sums: the sums of each dictionary. The values at the scored positions are added to them.
        runner: the runner of the model.
        text: the texts.
        is_scored: True at the scored positions.
    """
    names = [*sums, *(total.part.reads for total in sums.values() if total.part.reads)]
    arguments = text.arguments(runner.model)
    output, cache = runner.run_with_cache(text.tokens, names=names, **arguments)
    for name, total in sums.items():
        total.add(cache[name], cache[total.part.reads or name], is_scored)
        total.part.kept = is_scored
    return logits_of(output)


def _loss(text: Text, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
    """Return the mean loss of each text, in nats per token."""
    metric = cross_entropy(text.tokens, attention_mask=text.attention_mask)
    return measure(metric, logits, text.attention_mask).cpu()


def _with_loss(read: list[Text]) -> list[Text]:
    """Return the texts of at least two tokens.

    Raises:
        ValueError: if all texts are shorter.
    """
    is_long = [text.real.sum(1) > 1 for text in read]
    n = sum(map(len, is_long))
    n_long = sum(int(rows.sum()) for rows in is_long)
    if not n_long:
        raise ValueError(
            "texts must have at least two tokens: a token to read and a token to predict"
        )
    if n_long < n:
        warn(f"{n - n_long} of {n} texts are left out, because a text of one token has no loss")
    return [text.rows(rows) for text, rows in zip(read, is_long, strict=True) if rows.any()]


def _replaced(part: SplicedDictionary, vector: Float[Tensor, " d_out"]) -> Hook:
    """Return a hook that replaces the values at the point of a dictionary by one vector, at the
    scored positions.
    """

    def put(value: Tensor, point: Point) -> Tensor:
        """Return the value with the vector at the scored positions."""
        return part.replaced(value, to_device(vector, value.device)[None, None])

    return put


class _Sums:
    """Sums over positions, in float64, from which the scores of one dictionary are computed."""

    def __init__(self, part: SplicedDictionary) -> None:
        self.part = part
        self.n = 0
        # `totals`, `squares` and `counts` have a row for each position of the texts, so that the
        # variance of each position is known.
        self.totals = torch.zeros(0, part.dictionary.d_out, dtype=torch.float64)
        self.squares, self.counts = torch.zeros(2, 0, dtype=torch.float64)
        self.error = 0.0
        self.active = torch.zeros(part.dictionary.n_features, dtype=torch.float64)

    def add(self, value: Tensor, read: Tensor, is_scored: Bool[Tensor, "batch pos"]) -> None:
        """Add the values of a run to the sums.

        Args:
            value: the value at the point that the dictionary approximates.
            read: the value at the point that the dictionary reads.
            is_scored: True at the positions to add.
        """
        is_scored = to_device(is_scored, value.device)
        target = self.part.vector(value)[is_scored]
        x = self.part.vector(read)[is_scored]
        dictionary = self.part.dictionary
        features = dictionary.encode(x)
        output = dictionary.decode(features, x)
        target, output = target.cpu().double(), output.cpu().double()
        self.n += len(target)
        pos = is_scored.nonzero()[:, 1].cpu()
        more = max(0, is_scored.shape[1] - len(self.totals))
        self.totals = _added(self.totals, more, pos=pos, rows=target)
        self.squares = _added(self.squares, more, pos=pos, rows=target.square().sum(1))
        self.counts = _added(self.counts, more, pos=pos, rows=torch.ones_like(pos))
        self.error += (target - output).square().sum().item()
        self.active += (features != 0).sum(0).cpu()

    def ablated(self, ablation: Ablation) -> Float[Tensor, " d_out"]:
        """Return the vector that replaces each value in an ablation."""
        if ablation == "zero":
            return torch.zeros(self.part.dictionary.d_out)
        return (self.totals.sum(0) / self.n).float()

    def variances(self) -> Float[Tensor, " pos"]:
        """Return the sum of squared deviations from the mean of all rows, for each position."""
        mean = self.totals.sum(0) / self.n
        return self.squares - 2 * self.totals @ mean + self.counts * mean.square().sum()

    def warn_of_one_position(self, name: str) -> None:
        """Warn if a single position has most of the variance."""
        shares = self.variances() / self.variances().sum()
        if (self.counts > 0).sum() > 3 and shares.max() > 0.5:
            warn(
                f"position {int(shares.argmax())} has {float(shares.max()):.0%} of the variance at "
                f"{name}, so the explained variance mainly measures this position: leave it out by "
                "pos=, for example pos=slice(1, None)",
            )

    def scores(self) -> PointScores:
        """Return the scores of the dictionary.

        Raises:
            ValueError: if no position was scored.
        """
        if not self.n:
            raise ValueError("pos must select a token of at least one text; got none")
        variance = self.variances().sum().item()
        # Such a small variance may come from rounding only.
        is_constant = variance <= 1e-12 * self.squares.sum().item()
        explained = math.nan if is_constant else 1 - self.error / variance
        density = self.active / self.n
        return PointScores(
            explained_variance=explained,
            l0=density.sum().item(),
            density=density.float(),
            n_tokens=self.n,
        )


def _added(
    sums: Float[Tensor, "pos ..."], more: int, pos: Int[Tensor, " row"], rows: Tensor
) -> Float[Tensor, "longer ..."]:
    """Return sums over texts for each position, with more positions and more rows.

    Args:
        sums: the sums, with a row for each position.
        more: the number of positions to append.
        pos: the position of each new row.
        rows: the new rows, which are added to the sums of their positions.
    """
    longer = torch.cat([sums, sums.new_zeros(more, *sums.shape[1:])])
    return longer.index_add_(0, pos, rows.to(longer))
