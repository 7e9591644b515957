"""Check if a subspace acts through directions that the model does not use in normal runs.

Makelov et al. 2023, "Is This the Subspace You Are Looking for? An Interpretability Illusion for
Subspace Activation Patching".

A direction can be the sum of two directions a and b. Runs differ along a, but no later part of the
model reads a. A later part reads b, but runs do not differ along b. Patching a + b changes the
answer through a path that the model never uses.

1. Interchange the subspace.
2. Interchange the subspace, but leave out the changes along axes on which the values of the two
   texts of all pairs do not vary.
3. Interchange only the projection of the subspace on the directions that later parts read. As in
   the authors' code, the projected columns are made orthonormal again.
4. The share of the effect that is lost in step 2 or 3 is due to directions that the model does not
   use.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import float32_rounding, is_rounding, without_gradients
from interp.alignment.featurizers import Featurizer
from interp.alignment.runs import InterchangeRuns
from interp.edits.subspaces import orthonormal
from interp.json_form import Table, form
from interp.measuring import unit_of
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.results.result import Result
from interp.runs.runs import Runs


@dataclass(frozen=True, eq=False, repr=False)
class NullSpaces:
    """The effect of exchanging a subspace between two texts, and the effect of two parts of it.

    An exchange can have an effect although the model does not use the subspace: it may change a
    value along directions that do not vary in normal runs, or that no later part of the model
    reads. Such an effect says nothing about the model. `dormant` and `unread` are the shares of the
    effect that need such directions. `null_spaces` returns this object.

    Attributes:
        effects: the change of the metric, [through, example]. The axis `through` has three entries.
            `whole`: the effect of the exchange of the subspace. `varying`: the effect of its part
            along axes on which the values of the pairs vary. `read`: the effect of its part that
            later parts of the model read.

    >>> values = torch.tensor([[2.0, 4.0], [0.5, 1.0], [2.0, 4.0]])  # [through, example]
    >>> labels = {"through": ["whole", "varying", "read"]}
    >>> result = NullSpaces(Result(values, ("through", "example"), labels=labels))
    >>> result  # a quarter of the effect remains along axes that vary
    NullSpaces: suspect, dormant 0.75, unread 0.00 of the effect
    >>> result.is_suspect
    True
    """

    effects: Result

    @property
    def dormant(self) -> float:
        """The share of the effect that needs axes on which the values of the pairs do not vary.

        It is NaN if the subspace has no effect.
        """
        return self._lost("varying")

    @property
    def unread(self) -> float:
        """The share of the effect that needs directions that no later part of the model reads.

        It is NaN if the subspace has no effect.
        """
        return self._lost("read")

    @property
    def is_suspect(self) -> bool:
        """True if `dormant` or `unread` is above 0.5; False if the subspace has no effect."""
        return max(self.dormant, self.unread) > 0.5

    def _lost(self, through: str) -> float:
        """Return the share of the whole effect that is lost with a restricted interchange.

        Args:
            through: the restriction: `varying` or `read`.
        """
        # Effects of examples can have both signs, so a ratio of means can be meaningless. The share
        # that remains is the slope of a regression of the remaining effects on the whole effects.
        whole = self.effects.select(through="whole").values
        left = self.effects.select(through=through).values
        base = self.effects.base
        has_effect = base is None or not is_rounding(whole + base, base).all()
        return float(1 - (left * whole).sum() / whole.square().sum()) if has_effect else math.nan

    def as_json(self) -> dict[str, Any]:
        """Return the effects and the two shares, in the JSON form of all results; see
        `interp.json_form`.
        """
        tables = {
            **self.effects.tables("effects"),
            "dormant": Table(self.dormant, unit="share of the effect"),
            "unread": Table(self.unread, unit="share of the effect"),
            "is_suspect": Table(self.is_suspect),
        }
        return form("NullSpaces", tables, self.effects.about)

    def __repr__(self) -> str:
        if math.isnan(self.dormant):
            return "NullSpaces: no verdict, because the subspace has no effect"
        words = "suspect" if self.is_suspect else "no illusion seen"
        return (
            f"NullSpaces: {words}, dormant {self.dormant:.2f}, unread {self.unread:.2f} of the "
            "effect"
        )


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
    """Return the share of a subspace's effect along directions that the model does not use.

    An axis of the point, such as a neuron, varies if the values of the two texts of all pairs vary
    along it. It is read if the metric has a gradient along it. If every axis varies and is read, as
    in the residual stream, both shares are 0, which is no evidence. With `reader`, such
    as `W_out` at `mlp.post`, the directions that are read are the span of the columns of these
    weights.

    By default, the part of the clean run replaces the part of the corrupted run
    (`direction="denoising"`), which shows the parts that restore the answer. Analyses of circuits
    do the reverse by default.

    Args:
        model: any model with hook points, in evaluation mode.
        pairs: the texts and the metric.
        point: the name of the point.
        directions: a direction, or columns that span the subspace. They need not be orthonormal.
        reader: the weights that read the value as `value @ reader`. Default: use the gradients of
            the metric.
        pos: a position, or the name of a span of the pairs. Default: the last position.
        head: the head, if the point has heads.
        direction: `denoising` runs the corrupted text; `noising` runs the clean text.

    Returns:
        The effects [through, example] in the unit of the metric, and the shares from them.

    Raises:
        ValueError: if the directions have a wrong size or are linearly dependent, if pairs have no
            answers or corrupted texts, or if a point does not have a vector at each position.
        UnknownNameError: if the site or the span is unknown. The error contains close matches.
        ModeError: if the model is in training mode.

    In this model, runs differ along the first number, and the logits read the second number.

    >>> from hooks import HookPoint
    >>> class Toy(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.point = HookPoint("batch pos d_model")
    ...
    ...     def forward(self, tokens):
    ...         numbers = torch.stack([tokens.float(), torch.zeros(tokens.shape)], -1)
    ...         read = self.point(numbers)[..., 1]
    ...         return torch.stack([read, -read], -1)
    >>> pairs = Pairs(torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([[0, 1]]))
    >>> result = null_spaces(Toy().eval(), pairs, "point", torch.tensor([1.0, 1.0]))
    >>> result.effects.mean()  # of the whole subspace, its varying part, its part that is read
    tensor([1.0000, 0.0000, 0.0000])
    >>> result  # the effect needs directions that do not vary, and are not read
    NullSpaces: suspect, dormant 1.00, unread 1.00 of the effect
    """
    runs = Runs(model, pairs, direction)
    site = InterchangeRuns(runs=runs, name=point, pos=pos, head=head, batch=len(runs.text.tokens))
    columns = orthonormal(directions)
    if len(columns) != site.size:
        raise ValueError(f"directions must have {site.size} rows at {point}; got {len(columns)}")
    rows = torch.cat([site.base_values(), site.source]).flatten(0, 1)
    everything = torch.eye(site.size).to(rows)
    varying = _axes(rows.std(0))
    if reader is None:
        read = _axes(site.gradients().abs().flatten(0, 1).mean(0))
    else:
        left, sizes, _ = torch.linalg.svd(reader.to(rows), full_matrices=False)
        left = left[:, sizes > float32_rounding() * sizes.max()]
        read = left @ left.mT
    inside, sizes, _ = torch.linalg.svd(read.double() @ columns, full_matrices=False)
    inside = inside[:, sizes > float32_rounding()]
    parts = {
        "whole": _projected(columns, everything),
        "varying": _projected(columns, varying),
        "read": _projected(inside, everything),
    }
    effects = Result(
        torch.stack([site.scores(part).effect for part in parts.values()]),
        ("through", "example"),
        site.base,
        labels={"through": [*parts]},
        unit=unit_of(runs.metric),
        groups=runs.groups,
    )
    return NullSpaces(effects)


def _projected(columns: Float[Tensor, "d k"], projection: Float[Tensor, "d d"]) -> Featurizer:
    """Return a featurizer with the coordinates along columns as its features.

    An interchange changes only the projection of the value.
    """

    def encode(value: Tensor) -> Tensor:
        return value @ columns.to(value)

    def decode(features: Tensor, value: Tensor) -> Tensor:
        return features @ columns.to(value).mT @ projection

    mask = torch.ones(columns.shape[1])
    return Featurizer(name="subspace", encode=encode, decode=decode, mask=mask)


def _axes(sizes: Float[Tensor, " d"]) -> Float[Tensor, "d d"]:
    """Return the matrix that projects on the axes whose sizes are not negligible."""
    return (sizes > float32_rounding() * sizes.max()).to(sizes).diag()
