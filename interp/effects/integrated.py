"""Integrated gradients: effects that add up to that of the whole change, by gradients along a path."""

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import Point
from hooks.transfer import to_device
from interp import edits
from interp.inputs.pairs import Direction, Pairs
from interp.inputs.token_positions import at_least_float32
from interp.results.result import Result
from interp.running.gradients.backward import Gradients
from interp.running.gradients.estimates import Contrast, contrast, effects
from interp.running.gradients.trapezoid import Steps, averaged
from interp.running.sites import Choice, Some


def integrated_gradients(
    model: nn.Module,
    pairs: Pairs,
    site: str = "embed",
    over: Sequence[str] | None = None,
    *,
    steps: Steps = "auto",
    tolerance: float = 0.01,
    direction: Direction = "denoising",
    layers: Some = None,
    heads: Some = None,
    neurons: int | None = None,
) -> Result:
    """Estimate effects as (target - base) times the mean gradient on the straight path between the two.

    A path moves all values of one point together, and their effects add up to what replacing them all
    does to the metric (Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks"). Each layer of
    a site has a path of its own. The mean is that of the trapezoid rule. The completeness gap is the difference
    between the sum of the effects and the measured change of the metric: it says how good the mean is.

    Args:
        model: any model with the usual points. Its weights need no gradients, and get none.
        pairs: see `attribution_patching`.
        site: see `activation_patching`; by default the token embeddings.
        over: see `activation_patching`; with several layers `layer` is one of them.
        steps: how many steps each path has; one more gradient is taken. `auto` doubles them until the gap
            of every example is within the tolerance, at most 1024, and keeps each gradient it has.
        tolerance: for the gap, as a share of the mean absolute change of the metric over examples.
        direction, layers, heads, neurons: see `attribution_patching`.

    Returns:
        Effects [*over, example], in float32 at least. `about` has the `steps` of each path, and its `gaps`
        for each example, as shares like the tolerance.

    Raises:
        ValueError: as for `attribution_patching`, or if `steps` is less than 1, or a metric is infinite.
        UnknownNameError: if there is no such site, or the model lacks it; with close matches.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if a gap is larger than the tolerance.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> integrated_gradients(model, pairs, "mlp_out", layers=3).top(1)
    layer 3, pos 8 'm|i'  +4.531
    """
    choice = Choice(site, over, layers, heads, neurons)
    runs = contrast(model, pairs, choice, direction)
    start = Gradients(runs.runner, runs.edited, runs.metric, runs.names.values())
    first: dict[str, Tensor] = {}
    start.backward(first.__setitem__)
    paths = {
        name: _Path(runs, name, start, first[name], steps, tolerance)
        for name in runs.names.values()
        if name in first
    }
    taken = [paths[name].steps if name in paths else 0 for name in runs.names.values()]
    none = torch.zeros_like(start.base)
    gaps = [paths[name].gap if name in paths else none for name in runs.names.values()]
    result = runs.of_layers(
        {name: path.effects for name, path in paths.items()},
        start.base,
        estimate="integrated gradients",
        steps=taken,
        gaps=[[float(f"{share:.2g}") for share in gap.tolist()] for gap in gaps],
    )
    if (largest := max(float(gap.max()) for gap in gaps)) > tolerance:
        rule = f"effects should add up to within {tolerance:.2g} of the mean change of the metric"
        warnings.warn(f"{rule}; got {largest:.2g} after {max(taken)} steps", stacklevel=2)
    return result


class _Path:
    """The straight path of one point's values from base to target.

    Args:
        runs: the two runs.
        name: the point.
        start: the run at the beginning.
        first: its gradient.
        steps, tolerance: see `integrated_gradients`.

    Attributes:
        steps: into how many equal steps the path is divided.
        gap: how far the effects are from adding up, as a share of the mean absolute change of the metric.
        effects: the effect at each place.
    """

    def __init__(
        self,
        runs: Contrast,
        name: str,
        start: Gradients,
        first: Tensor,
        steps: Steps,
        tolerance: float,
    ) -> None:
        self._runs, self._point = runs, runs.runner.points[name]
        self._base = start.values[name]
        self._change = _whole_change(runs, self._point, self._base)
        last, end = self._gradient(1.0)
        self._difference = to_device(end - start.base, self._base.device)
        if not self._difference.isfinite().all():
            raise ValueError(
                f"the metric must be finite at both ends of a path; got others at {name}"
            )
        mean, (self.steps,) = averaged(
            lambda paths, share: self._gradient(share)[0][None],
            at_least_float32(first)[None],
            last[None],
            steps,
            lambda means: self._gap(means[0]).max()[None],
            tolerance,
        )
        self.gap = self._gap(mean[0])
        self.effects = effects(self._point, self._base, mean[0], runs.cache, runs.places)

    def _gap(self, mean: Tensor) -> Float[Tensor, " batch"]:
        added = (self._change * mean).flatten(1).sum(1)
        off = (added - self._difference).abs() / self._difference.abs().mean()
        return off.nan_to_num(nan=0.0)  # 0 / 0, where nothing changes

    def _gradient(self, share: float) -> tuple[Tensor, Tensor]:
        """The gradient after a share of the path, and the metric there."""
        value = (self._base + share * self._change).to(self._base.dtype)
        name = self._point.name
        gradients: dict[str, Tensor] = {}
        with self._runs.runner.hooks({name: lambda activation, point: value}):
            run = Gradients(self._runs.runner, self._runs.edited, self._runs.metric, [name])
        run.backward(gradients.__setitem__)
        return at_least_float32(gradients[name]), run.base


def _whole_change(runs: Contrast, point: Point, base: Tensor) -> Tensor:
    """The change at all places together."""
    changed = at_least_float32(base).clone()
    if "span" not in runs.places:
        return at_least_float32(runs.cache[point.name]) - changed
    for _, selected in runs.places["span"]:
        changed = edits.replace(runs.cache, **selected)(changed, point)
    return changed - base
