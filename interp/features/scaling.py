"""Latent scaling: find the features of a crosscoder that truly belong to one model (Minder et al.
2025, arXiv 2504.02922).

A crosscoder can give a feature of both models a decoder row of zeros in one model. There are two
possible reasons, which relative decoder norms do not show. The other model may contain the feature
in its error (complete shrinkage), or other features may write it there (latent decoupling).

1. Take the decoder row d of a feature in the model that it seems to belong to.
2. For each model, find the factor beta for which `beta * feature * d` explains a target best, by
   least squares over all tokens.
3. The first target is the error of the crosscoder, plus the contribution of the feature itself. The
   second target is the reconstruction.
4. nu is the beta of the other model divided by the beta of the model. It is near 0 if the other
   model lacks the feature, and near 1 if it contains the feature as much.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from hooks.base import number_of, require_choice, require_integer, shows_progress, without_gradients
from interp import plots
from interp.features.crosscoder import Crosscoder
from interp.json_form import Table, form
from interp.kinds import require_made
from interp.plots import objects

Target = Literal["error", "reconstruction"]

TARGETS: tuple[Target, ...] = ("error", "reconstruction")
ORDERS = ("norm", *TARGETS)
LEAST_NORM = 0.9
MOST_ERROR = 0.2
MOST_RECONSTRUCTION = 0.5
"""Limits of the paper for features of one model: the relative decoder norm is above the first, nu
of the error is below the second, and nu of the reconstruction is below the third.
"""

_MOST = 2**24

BatchesOfMembers = Iterable[Sequence[Tensor] | Mapping[str, Tensor]]
"""Batches with a value of each member, in order or by name. Batches can have different sizes."""


@dataclass(frozen=True, eq=False, repr=False)
class LatentScaling(plots.Shown):
    """How much each feature of a crosscoder belongs to one model, returned by `latent_scaling`.

    Attributes:
        member, other: the names of the model and of the other model.
        betas: the factors, [target member feature], for the targets `error` and `reconstruction`
            and for `member` and `other`. NaN if the feature is never active, or has a decoder row
            of zeros in `member`.
        relative_norm: the relative decoder norms of `member`, [feature].
        density: the share of tokens where the feature is not 0, [feature].
        n_tokens: the number of tokens.

    >>> import torch
    >>> scaling = LatentScaling(
    ...     "tuned", "base",
    ...     betas=torch.tensor([[[1.0, 1.0], [0.1, 0.8]], [[1.0, 1.0], [0.2, 0.2]]]),
    ...     relative_norm=torch.tensor([0.95, 0.95]), density=torch.tensor([0.01, 0.02]),
    ...     n_tokens=1000,
    ... )
    >>> scaling.belongs()  # the error of base contains feature 1, so it is in both models
    tensor([ True, False])
    """

    member: str
    other: str
    betas: Float[Tensor, "target=2 member=2 feature"]
    relative_norm: Float[Tensor, " feature"]
    density: Float[Tensor, " feature"]
    n_tokens: int

    def nu(self, target: Target) -> Float[Tensor, " feature"]:
        """Return beta of the other model divided by beta of the model.

        Args:
            target: `error`, which detects complete shrinkage, or `reconstruction`, which detects
                latent decoupling.
        """
        require_choice("target", target, TARGETS)
        of_member, of_other = self.betas[TARGETS.index(target)]
        return of_other / of_member

    def belongs(
        self,
        *,
        norm: float = LEAST_NORM,
        error: float = MOST_ERROR,
        reconstruction: float = MOST_RECONSTRUCTION,
    ) -> Bool[Tensor, " feature"]:
        """Return True for each feature that truly belongs to the model.

        Args:
            norm: the relative decoder norm must be above this number. Default: 0.9.
            error: the size of nu of the error must be below this number. Default: 0.2.
            reconstruction: the size of nu of the reconstruction must be below this number. Default:
                0.5.
        """
        is_small = (self.nu("error").abs() < error) & (
            self.nu("reconstruction").abs() < reconstruction
        )
        return (self.relative_norm > norm) & is_small

    def top(self, k: int = 10, by: Literal["norm"] | Target = "norm") -> list[tuple[int, float]]:
        """Return the features that belong most to the model, with their numbers.

        Args:
            k: the largest number of features. Default: 10.
            by: `norm`, the relative decoder norm (largest first), or `error` or `reconstruction`,
                the size of nu (smallest first) of the features whose relative norm is above 0.9.
                Features that are never active are left out. Default: `norm`.
        """
        require_integer("k", k)
        require_choice("by", by, ORDERS)
        numbers = self.relative_norm if by == "norm" else self.nu(by)
        scores = -numbers if by == "norm" else numbers.abs()
        counts = (self.density > 0) & ~scores.isnan()
        if by != "norm":
            counts &= self.relative_norm > LEAST_NORM
        order = scores.masked_fill(~counts, math.inf).argsort(stable=True)
        order = order[: min(k, int(counts.sum()))]
        return [(int(feature), float(numbers[feature])) for feature in order]

    def as_json(self) -> dict[str, Any]:
        """Return the factors and the norms of all features, in the JSON form of all results; see
        `interp.json_form`.
        """
        labels = {"target": TARGETS, "member": (self.member, self.other)}
        tables = {
            "betas": Table(self.betas, "target member feature", "factor", labels),
            "relative_norm": Table(self.relative_norm, "feature", "share of the norm"),
            "density": Table(self.density, "feature", "share of tokens"),
            "belongs": Table(self.belongs(), "feature"),
        }
        for target in TARGETS:
            tables[f"nu.{target}"] = Table(self.nu(target), "feature", "ratio of factors")
        about = {"member": self.member, "other": self.other, "n_tokens": self.n_tokens}
        return form("LatentScaling", tables, about)

    def view(self) -> plots.View:
        """Return a view of the relative decoder norms and of both ratios."""
        return objects.latent_scaling(self)

    def __repr__(self) -> str:
        is_only = (self.relative_norm > LEAST_NORM) & (self.density > 0)
        shrunk = is_only & (self.nu("error").abs() >= MOST_ERROR)
        decoupled = is_only & (self.nu("reconstruction").abs() >= MOST_RECONSTRUCTION)
        tokens = number_of(self.n_tokens, "token")
        return "\n".join(
            [
                f"LatentScaling of {self.member} against {self.other}, {tokens}",
                f"  {int(is_only.sum())} features have a relative decoder norm above {LEAST_NORM}",
                f"  {int(shrunk.sum())} of them are also in the error of {self.other}",
                f"  {int(decoupled.sum())} of them are also in the reconstruction of {self.other}",
                f"  {int(self.belongs().sum())} truly belong to {self.member}",
            ]
        )


@shows_progress
@without_gradients
def latent_scaling(
    crosscoder: Crosscoder,
    values: BatchesOfMembers,
    member: str | int,
    other: str | int | None = None,
    *,
    progress: bool = True,
) -> LatentScaling:
    """Return how much each feature truly belongs to one model.

    Args:
        crosscoder: the crosscoder.
        values: batches of values of all members. They come from `member_values`, or from two
            stores of the same texts. They are read once.
        member: the model whose features are wanted, such as `tuned`.
        other: the other model. Default: the other one of two members.
        progress: whether to show a bar or, outside a terminal, lines of progress. Default: True.

    Returns:
        The relative decoder norms, and the factors of latent scaling.

    Raises:
        ValueError: if there are no values, a value has the wrong size, or `other` is missing.
        UnknownNameError: if a name is no member.

    >>> import torch
    >>> from torch import nn
    >>> eye = torch.eye(2)
    >>> both = Crosscoder(  # feature 1 has no decoder row in base
    ...     torch.stack([0 * eye, eye]), torch.stack([eye * torch.tensor([1.0, 0.0]), eye]),
    ...     torch.zeros(2), torch.zeros(2, 2), nn.ReLU(), names=["base", "tuned"],
    ... )
    >>> value = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    >>> same = latent_scaling(both, [[value, value]], "tuned")  # but the value of base contains it
    >>> same.relative_norm, same.nu("error")[1], same.belongs()
    (tensor([0.5000, 1.0000]), tensor(1.), tensor([False, False]))
    """
    require_made("crosscoder", crosscoder, Crosscoder)
    index = crosscoder.index(member)
    against = crosscoder.other(index) if other is None else crosscoder.index(other)
    members = (index, against)
    rows = crosscoder.W_dec[index].double()
    n_features = crosscoder.n_features
    # Sums over tokens: the products of feature and projected target, the squares of the feature,
    # and the number of tokens where it is active.
    products = rows.new_zeros(len(TARGETS), len(members), n_features)
    squares, active = rows.new_zeros(2, n_features)
    n_tokens = 0
    for listed in _pieces(crosscoder, values):
        features = crosscoder.encode(listed).double()
        n_tokens += len(features)
        squares += features.square().sum(0)
        active += (features != 0).sum(0)
        for number, read in enumerate(members):
            value = crosscoder.normalized(read, listed[read]).double()
            decoder = crosscoder.W_dec[read].double()
            reconstruction = features @ decoder + crosscoder.b_dec[read].double()
            for target, y in enumerate((value - reconstruction, reconstruction)):
                products[target, number] += (features * (y @ rows.mT)).sum(0)
    if not n_tokens:
        raise ValueError("values must contain at least one token; got none")
    lengths = rows.square().sum(1)
    betas = products / (squares * lengths)
    # The contribution of the feature itself belongs to the target of the error.
    for number, written in enumerate(members):
        contribution = (crosscoder.W_dec[written].double() * rows).sum(1) / lengths
        betas[TARGETS.index("error"), number] += contribution
    is_unknown = (squares == 0) | (lengths == 0)
    return LatentScaling(
        member=crosscoder.names[index],
        other=crosscoder.names[against],
        betas=betas.masked_fill(is_unknown, math.nan).float(),
        relative_norm=crosscoder.relative_norms(index, against),
        density=(active / n_tokens).float(),
        n_tokens=n_tokens,
    )


def _pieces(crosscoder: Crosscoder, values: BatchesOfMembers) -> Iterator[list[Tensor]]:
    """Yield the values of all members in pieces of few rows, so that the features of a piece have
    at most `_MOST` numbers.

    Args:
        crosscoder: the crosscoder.
        values: batches of values of all members.
    """
    size = max(1, _MOST // crosscoder.n_features)
    for batch in values:
        rows = [value.flatten(0, -2) for value in crosscoder.listed(batch)]
        yield from map(list, zip(*(value.split(size) for value in rows), strict=True))
