"""Activation patching: which value of the clean run restores the answer in the corrupted run."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from hooks import ActivationCache, Hook, HookedRunner, Point, index_by_axis
from interp.metrics import Metric, mean_of
from interp.protocol import logits_of, runner_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What can be patched, and over which axes.
SITES = {
    "resid_pre": ("layer", "pos"),
    "attn_out": ("layer", "pos"),
    "mlp_out": ("layer", "pos"),
    "z": ("layer", "head"),
}


@dataclass(frozen=True)
class PatchingResult:
    """The metric after a patch at each place.

    Attributes:
        values: the metric of each patched run, as a mean over the batch, in the metric's unit.
        axes: the names of the axes of `values`.
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
    """

    values: Float[Tensor, "..."]
    axes: tuple[str, ...]
    clean: float
    corrupted: float

    def normalized(self) -> Float[Tensor, "..."]:
        """The share of the answer that each patch restores: 0 is the corrupted run, 1 the clean one.

        Raises:
            ValueError: if the two runs do not differ in the metric.
        """
        if self.clean == self.corrupted:
            raise ValueError(
                f"clean and corrupted runs must differ in the metric; got {self.clean} for both"
            )
        return (self.values - self.corrupted) / (self.clean - self.corrupted)

    def plot(self) -> "Figure":
        """The normalized values as a heat map, if they have two axes; needs the extra `report`."""
        from matplotlib.figure import Figure

        if len(self.axes) != 2:
            raise ValueError(f"a heat map must have two axes; got {self.axes}")
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        values = self.normalized().numpy(force=True)
        limit = abs(values).max()
        image = axes.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
        axes.set_ylabel(self.axes[0])
        axes.set_xlabel(self.axes[1])
        axes.locator_params(integer=True)
        figure.colorbar(image, label="share of the clean metric restored")
        return figure


@torch.no_grad()
def activation_patching(
    model: nn.Module,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
    site: str = "resid_pre",
    over: tuple[str, ...] | None = None,
) -> PatchingResult:
    """Runs the corrupted tokens once for each place, with the value of the clean run there.

    This is the denoising direction of Heimersheim & Nanda 2024, "How to use and interpret activation
    patching".

    Args:
        model: any model with the usual points.
        clean: tokens with the right answer.
        corrupted: tokens of the same shape with another answer.
        metric: a function from logits [batch, pos, vocab] to [batch] or a scalar.
        site: `resid_pre`, `attn_out` or `mlp_out`, by layer and pos, or `z`, by layer and head.
        over: the axes to patch over: `("layer",)`, or both axes of the site, the default.

    Raises:
        ValueError: if the shapes of the tokens differ, `site` or `over` is unknown, or the metric
            returns another shape.
        ModeError: if the model is in training mode.
    """
    if clean.shape != corrupted.shape:
        raise ValueError(
            "clean and corrupted tokens must have the same shape; "
            f"got {tuple(clean.shape)} and {tuple(corrupted.shape)}"
        )
    if site not in SITES:
        raise ValueError(f"site must be one of {', '.join(SITES)}; got {site!r}")
    over = SITES[site] if over is None else tuple(over)
    if over not in (SITES[site], SITES[site][:1]):
        raise ValueError(f"over must be {SITES[site]} or {SITES[site][:1]} at {site}; got {over}")
    runner = runner_of(model)
    output, cache = runner.run_with_cache(clean, names=f"blocks.*.{site}")
    right, wrong = (mean_of(metric, logits_of(out)).item() for out in (output, model(corrupted)))
    return PatchingResult(patched(runner, cache, corrupted, metric, site, over), over, right, wrong)


def patched(
    runner: HookedRunner,
    clean: ActivationCache,
    corrupted: Int[Tensor, "batch pos"],
    metric: Metric,
    site: str,
    over: tuple[str, ...],
) -> Float[Tensor, "..."]:
    """The metric of each corrupted run with one value of the clean run: [layer] or [layer, place]."""
    names = [name for name in clean if name.rpartition(".")[2] == site]
    sources, axes = clean.stack(site), clean.axes(names[0])
    sizes = [sources[0].shape[axes.index(axis)] for axis in over[1:]]
    places = list(itertools.product(range(len(names)), *map(range, sizes)))
    found = []
    for layer, *place in tqdm(places, f"patching {site}", leave=False, delay=1, disable=None):
        edit = _from(sources[layer], dict(zip(over[1:], place, strict=True)))
        output = runner.run_with_hooks(corrupted, hooks={names[layer]: edit})
        found.append(mean_of(metric, logits_of(output)))
    return torch.stack(found).view(len(names), *sizes)


def _from(source: Tensor, where: dict[str, int]) -> Hook:
    def edit(activation: Tensor, point: Point) -> Tensor:
        index = index_by_axis(point.axes, where, point.name)
        activation[index] = source[index]
        return activation

    return edit
