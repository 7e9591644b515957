"""Activation patching: which value, put from one run into another, brings the answer back."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from hooks import Hook, Point, index_by_axis
from interp.metrics import Metric
from interp.run import runner_of

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
    """What a patch at each place makes of the metric.

    Attributes:
        values: the metric of each patched run, in the metric's unit, mean over the batch.
        axes: the names of the axes of `values`.
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted run.
    """

    values: Float[Tensor, "..."]
    axes: tuple[str, ...]
    clean: float
    corrupted: float

    def normalized(self) -> Float[Tensor, "..."]:
        """Share of the answer that the patch brings back: 0 is the corrupted run, 1 the clean one.

        Raises:
            ValueError: if the two runs do not differ in the metric.
        """
        if self.clean == self.corrupted:
            raise ValueError(
                f"clean and corrupted runs have the same metric, {self.clean}: nothing to normalize by"
            )
        return (self.values - self.corrupted) / (self.clean - self.corrupted)

    def plot(self) -> "Figure":
        """The normalized values as a heat map; needs the extra `report`.

        Raises:
            ValueError: if there are not two axes.
        """
        if len(self.axes) != 2:
            raise ValueError(f"a heat map has two axes, not {len(self.axes)}: {self.axes}")
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        axes = figure.subplots()
        values = self.normalized().numpy(force=True)
        limit = abs(values).max()
        image = axes.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
        axes.set_ylabel(self.axes[0])
        axes.set_xlabel(self.axes[1])
        axes.locator_params(integer=True)
        figure.colorbar(image, label="share of the clean metric brought back")
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
    """Runs the corrupted tokens once per place, with that place's value taken from the clean run.

    This is the denoising direction of Heimersheim & Nanda 2024, "How to use and interpret activation
    patching".

    Args:
        model: any model with the usual points.
        clean: tokens whose answer is right.
        corrupted: tokens of the same shape whose answer is not.
        metric: what to measure, from logits [batch, pos, vocab] to [batch] or a scalar.
        site: `resid_pre`, `attn_out` or `mlp_out`, by layer and pos, or `z`, by layer and head.
        over: the axes to go through: both, which is what None means, or `("layer",)` alone.

    Raises:
        ValueError: if the shapes of the tokens differ, or the site has no such axes.
        ModeError: if the model is in training mode.
    """
    if clean.shape != corrupted.shape:
        raise ValueError(
            "clean and corrupted tokens have the same shape, "
            f"not {tuple(clean.shape)} and {tuple(corrupted.shape)}"
        )
    if site not in SITES:
        raise ValueError(f"a site is one of {', '.join(SITES)}, not {site!r}")
    over = SITES[site] if over is None else over
    if tuple(over) not in (SITES[site], SITES[site][:1]):
        raise ValueError(f"{site} is patched over {SITES[site]} or {SITES[site][:1]}, not {over!r}")
    runner = runner_of(model)
    names = f"blocks.*.{site}"
    clean_logits, cache = runner.run_with_cache(clean, names=names)
    sources = list(cache.items())
    axes = cache.axes(sources[0][0])
    sizes = [sources[0][1].shape[axes.index(axis)] for axis in over[1:]]
    places = list(itertools.product(range(len(sources)), *map(range, sizes)))
    found = []
    for layer, *place in tqdm(places, f"patching {site}", leave=False, delay=1, disable=None):
        name, source = sources[layer]
        edit = _from(source, dict(zip(over[1:], place, strict=True)))
        found.append(metric(runner.run_with_hooks(corrupted, hooks={name: edit})).mean())
    values = torch.stack(found).view(len(sources), *sizes)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    clean_metric, corrupted_metric = metric(clean_logits).mean(), metric(model(corrupted)).mean()
    return PatchingResult(values, tuple(over), clean_metric.item(), corrupted_metric.item())


def _from(source: Tensor, where: dict[str, int]) -> Hook:
    def edit(activation: Tensor, point: Point) -> Tensor:
        index = index_by_axis(point.axes, where, point.name)
        activation[index] = source[index]
        return activation

    return edit
