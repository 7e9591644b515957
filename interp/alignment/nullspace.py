"""Check whether a subspace acts through directions that the model does not use (Makelov et al. 2023).

Makelov et al. 2023, "Is This the Subspace You Are Looking for? An Interpretability Illusion for Subspace Activation Patching".
A direction can join one along which runs differ but which nobody reads to one that somebody reads but along which no run
differs. Patching it then moves the answer by a way that the model never goes.

1. Interchange the subspace.
2. Interchange it, and drop what it changes where clean values do not vary.
3. Interchange the part of it that is read, made as long as the whole, as the authors' code does.
4. What the effect loses in 2 or 3 went through parts that the model does not use.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import is_rounding, without_gradients
from interp.alignment.featurizers import Featurizer
from interp.alignment.runs import InterchangeRuns
from interp.edits.subspaces import orthonormal
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.results.result import Result
from interp.runs.runs import Runs

_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, eq=False, repr=False)
class NullSpaces:
    """Effects of a subspace, whole and without what the model does not use; made by `null_spaces`.

    Attributes:
        effects: the change of the metric, [through, example]: `whole`; `varying`, without changes where clean values do not
            vary; `read`, along the part of the subspace that is read.
    """

    effects: Result

    @property
    def dormant(self) -> float:
        """The share of the effect that goes through directions along which no clean run varies; NaN without an effect."""
        return self._lost("varying")

    @property
    def unread(self) -> float:
        """The share of the effect that the part of the subspace which is read does not have by itself; likewise."""
        return self._lost("read")

    @property
    def is_suspect(self) -> bool:
        """Whether one of the shares is above one half; no verdict without an effect."""
        return max(self.dormant, self.unread) > 0.5

    def _lost(self, through: str) -> float:
        # Effects may have both signs, so what is left is the slope of one on the other.
        whole, left = (self.effects.select(through=name).values for name in ("whole", through))
        base = self.effects.base
        has_effect = base is None or not is_rounding(whole + base, base).all()
        return float(1 - (left * whole).sum() / whole.square().sum()) if has_effect else math.nan

    def __repr__(self) -> str:
        if math.isnan(self.dormant):
            return "NullSpaces: no verdict, as the subspace has no effect"
        words = "suspect" if self.is_suspect else "no illusion seen"
        return f"NullSpaces: {words}, dormant {self.dormant:.2f}, unread {self.unread:.2f} of the effect"


@without_gradients
def null_spaces(
    model: nn.Module,
    pairs: Pairs,
    point: str,
    directions: Float[Tensor, "d *k"],
    *,
    reader: Float[Tensor, "d out"] | None = None,
    pos: int | str = -1,
    head: int | None = None,
    direction: PatchingDirection = "denoising",
) -> NullSpaces:
    """Measure how much of a subspace's effect goes through directions that no clean run uses.

    It looks along the axes of the point, such as neurons: along which values of the pairs vary, and along which the metric has
    a gradient. Where every axis does both, as in the residual stream, it finds nothing, and proves nothing. With `reader`,
    such as `W_out` at `mlp.post`, what is read is the row space of those weights.

    Args:
        model: any model with hook points, in evaluation mode.
        pairs: the texts and the metric.
        point: the name of the point.
        directions: a direction, or columns that span the subspace. They need not be orthonormal.
        reader: weights that read the value, `value @ reader`.
        pos, head, direction: see `align`.

    Raises:
        ValueError: if the directions do not fit or are not linearly independent; or as for `align`.
        UnknownNameError, ModeError: as for `align`.
    """
    runs = Runs(model, pairs, direction)
    site = InterchangeRuns(runs, point, pos, head, batch=len(runs.text.tokens))
    columns = orthonormal(directions)
    if len(columns) != site.size:
        raise ValueError(f"directions must have {site.size} rows at {point}; got {len(columns)}")
    rows = torch.cat([site.base_values(), site.source]).flatten(0, 1)
    every = torch.eye(site.size).to(rows)
    varying = _axes(rows.std(0))
    if reader is None:
        read = _axes(site.gradients().abs().flatten(0, 1).mean(0))
    else:
        left, sizes, _ = torch.linalg.svd(reader.to(rows), full_matrices=False)
        left = left[:, sizes > _NEGLIGIBLE * sizes.max()]
        read = left @ left.mT

    inside, sizes, _ = torch.linalg.svd(read.double() @ columns, full_matrices=False)
    inside = inside[:, sizes > _NEGLIGIBLE]

    def change(columns: Tensor, kept: Tensor) -> Featurizer:
        def encode(value: Tensor) -> Tensor:
            return value @ columns.to(value)

        def decode(features: Tensor, value: Tensor) -> Tensor:
            return features @ columns.to(value).mT @ kept

        return Featurizer("subspace", encode, decode, torch.ones(columns.shape[1]))

    parts = {"whole": (columns, every), "varying": (columns, varying), "read": (inside, every)}
    values = torch.stack([site.scores(change(*part)).effect for part in parts.values()])
    unit = getattr(runs.metric, "unit", "")
    axes, labels = ("through", "example"), {"through": [*parts]}
    effects = Result(values, axes, site.base, labels=labels, unit=unit, groups=runs.groups)
    return NullSpaces(effects)


def _axes(sizes: Float[Tensor, " d"]) -> Float[Tensor, "d d"]:
    """The projection on the axes whose sizes are not negligible."""
    return (sizes > _NEGLIGIBLE * sizes.max()).to(sizes).diag()
