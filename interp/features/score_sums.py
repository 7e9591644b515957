"""Sums from which scores of dictionaries are computed. The sums of parts of texts add up.

1. `PointSums` contains the sums over the positions of some texts, for one dictionary.
2. `ScoreSums` contains the sums of all dictionaries, and the numbers of each text.
3. The sums of parts are added, and the numbers of texts are joined (`ScoreSums.together`).
4. The scores follow from the sums over all texts (`ScoreSums.scores`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from hooks.base import float32_rounding, to_device, warn
from interp.features.dictionary import Dictionary
from interp.features.scores import RUNS, DictionaryScores, PointScores
from interp.features.splicing import SplicedDictionary
from interp.features.temporal import TemporalDictionary
from interp.inputs.copies import groups


@dataclass(frozen=True, eq=False)
class PointSums:
    """Sums over scored positions, in float64, from which the scores of one dictionary are computed.

    Sums have a row for each position of the texts, so that the variance of each position is known.

    Attributes:
        totals: the sum of the values that the dictionary approximates.
        squares: the sum of their squared lengths.
        counts: the number of values.
        error: the sum of the squared errors of all reconstructions.
        active: the number of values at which each feature is not 0.
    """

    totals: Float64[Tensor, "pos d_out"]
    squares: Float64[Tensor, " pos"]
    counts: Float64[Tensor, " pos"]
    error: Float64[Tensor, ""]
    active: Float64[Tensor, " feature"]

    @classmethod
    def zeros(cls, dictionary: Dictionary) -> "PointSums":
        """Return the sums of no positions."""
        zeros = partial(torch.zeros, dtype=torch.float64)
        return cls(
            totals=zeros(0, dictionary.d_out),
            squares=zeros(0),
            counts=zeros(0),
            error=zeros(()),
            active=zeros(dictionary.n_features),
        )

    @classmethod
    def of(
        cls,
        part: SplicedDictionary,
        value: Tensor,
        read: Tensor,
        is_scored: Bool[Tensor, "batch pos"],
        real: Bool[Tensor, "batch pos"],
    ) -> "PointSums":
        """Return the sums over the scored positions of one batch of texts.

        The dictionary reconstructs the value of each scored position here. See `PointSums` for the
        numbers that are added up.

        Args:
            part: the dictionary.
            value: the value at the point that the dictionary approximates.
            read: the value at the point that the dictionary reads.
            is_scored: True at the positions to add.
            real: True at the real tokens of the texts.
        """
        is_scored = to_device(is_scored, value.device)
        dictionary = part.dictionary
        if isinstance(dictionary, TemporalDictionary):
            texts = part.vector(read)
            mask = to_device(real, texts.device)
            of_texts = dictionary.encode(texts, mask)
            features = of_texts[is_scored]
            output = dictionary.decode(of_texts, texts, mask)[is_scored]
        else:
            x = part.vector(read)[is_scored]
            features = dictionary.encode(x)
            output = dictionary.decode(features, x)
        output = output.cpu().double()
        target = part.vector(value)[is_scored].cpu().double()
        pos = is_scored.nonzero()[:, 1].cpu()

        def by_position(rows: Tensor) -> Tensor:
            return rows.new_zeros(is_scored.shape[1], *rows.shape[1:]).index_add_(0, pos, rows)

        return cls(
            totals=by_position(target),
            squares=by_position(target.square().sum(1)),
            counts=by_position(torch.ones(len(pos), dtype=torch.float64)),
            error=(target - output).square().sum(),
            active=(features != 0).sum(0).cpu().double(),
        )

    def __add__(self, other: "PointSums") -> "PointSums":
        """Return the sums of the positions of both."""
        ours, theirs = vars(self), vars(other)
        return PointSums(**{name: _added(ours[name], theirs[name]) for name in ours})

    @property
    def n(self) -> int:
        """The number of scored positions."""
        return int(self.counts.sum())

    @property
    def mean(self) -> Float64[Tensor, " d_out"]:
        """The mean of the values that the dictionary approximates."""
        return self.totals.sum(0) / self.n

    def variances(self) -> Float[Tensor, " pos"]:
        """Return the sum of squared deviations from the mean of all rows, for each position."""
        mean = self.mean
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
        is_constant = variance <= float32_rounding() ** 2 * self.squares.sum().item()
        explained = math.nan if is_constant else 1 - self.error.item() / variance
        density = self.active / self.n
        return PointScores(
            explained_variance=explained,
            l0=density.sum().item(),
            density=density.float(),
            n_tokens=self.n,
        )


def _added(first: Float64[Tensor, "..."], second: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Return the sum of two tensors, after the shorter one is padded with zeros at its end."""
    if first.shape == second.shape:
        return first + second
    shorter, longer = sorted([first, second], key=len)
    total = longer.clone()
    total[: len(shorter)] += shorter
    return total


@dataclass(frozen=True, eq=False)
class ScoreSums:
    """Numbers of texts and sums over their positions, from which scores are computed.

    Attributes:
        rows: numbers of each text, by name: the loss of each run, and `kl`.
        points: the sums for each dictionary, by the point that it writes.
        digests: a hash of each text.
        n_left_out: the number of texts of a single token, which have no loss.
    """

    rows: Mapping[str, Float[Tensor, " example"]]
    points: Mapping[str, "PointSums"] = field(default_factory=dict)
    digests: Sequence[str] = ()
    n_left_out: int = 0

    @staticmethod
    def together(parts: "Sequence[ScoreSums]") -> "ScoreSums":
        """Return the numbers and sums of the texts of all parts, at least one part."""
        first = parts[0]
        points = {}
        for name, zeros in first.points.items():
            points[name] = sum((part.points[name] for part in parts[1:]), zeros)
        rows = {}
        for name in first.rows:
            rows[name] = torch.cat([part.rows[name] for part in parts])
        return ScoreSums(
            rows=rows,
            points=points,
            digests=[digest for part in parts for digest in part.digests],
            n_left_out=sum(part.n_left_out for part in parts),
        )

    def means(self) -> dict[str, Float[Tensor, " d_out"]]:
        """Return the mean over all scored positions for each dictionary."""
        return {name: sums.mean.float() for name, sums in self.points.items()}

    def scores(self, second: "ScoreSums") -> DictionaryScores:
        """Return the scores.

        Args:
            second: the losses of the second pass.

        Raises:
            ValueError: if no text has a loss, or no position was scored.
        """
        n = len(self.digests)
        if not n:
            raise ValueError(
                "texts must have at least two tokens: a token to read and a token to predict"
            )
        if self.n_left_out:
            warn(
                f"{self.n_left_out} of {n + self.n_left_out} texts are left out, because a text of "
                "one token has no loss"
            )
        for name, sums in self.points.items():
            sums.warn_of_one_position(name)
        rows = {**self.rows, **second.rows}
        return DictionaryScores(
            losses=torch.stack([rows[run] for run in RUNS]),
            kl=rows["kl"],
            points={name: sums.scores() for name, sums in self.points.items()},
            groups=groups(self.digests),
        )

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the numbers and sums as tensors and facts for a file."""
        tensors = {f"rows {name}": numbers for name, numbers in self.rows.items()}
        for name, sums in self.points.items():
            tensors |= {f"{key} {name}": value for key, value in vars(sums).items()}
        facts = {"points": [*self.points], "digests": [*self.digests], "short": self.n_left_out}
        return tensors, {"rows": [*self.rows], **facts}

    @classmethod
    def unpacked(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> "ScoreSums":
        """Return the numbers and sums of tensors and facts that `packed` made."""
        points = {}
        for name in facts["points"]:
            sums = {key.name: tensors[f"{key.name} {name}"] for key in fields(PointSums)}
            points[name] = PointSums(**sums)
        rows = {name: tensors[f"rows {name}"] for name in facts["rows"]}
        return cls(rows, points, facts["digests"], facts["short"])
