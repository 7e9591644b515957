"""Analyse the checkpoints of a run on held-out walks, for the tables of `svd_stability.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from svd_statistics import interval, locked
from svd_tables import (
    METRICS,
    Around,
    Beyond,
    Drift,
    Event,
    Learned,
    Measure,
    Norm,
    Setting,
    Spectrum,
    Tables,
)
from torch import Tensor
from tqdm import tqdm
from walks import Walks, event_windows, sliding_windows

from hooks import HookedRunner
from interp import residual_stream, svd_targets
from interp import svd_spectra as spectra_of
from interp.spectral import (
    SVD,
    condition_number,
    drift,
    effective_rank,
    spectral_gap,
    stable_rank,
    subspace_angles,
    svd,
)
from models import Transformer, load, next_token_loss

# Drift between checkpoints is measured on every 16th window.
EVERY = 16


@dataclass(frozen=True)
class Seen:
    """The measurements of one checkpoint.

    A target is one of the matrices QK^T, AVWo and WvWo.

    Attributes:
        spectra: the singular values of each target: [layer, k] for wvwo, which does not depend on
            the window, and [window, layer, k] for the others.
        kept: the SVD of each target on every 16th window, [matrix, layer, ...], to compare it with
            other checkpoints.
        steps: the change from each window to the next, for each (target, metric).
    """

    spectra: dict[str, Tensor]
    kept: dict[str, SVD]
    steps: dict[tuple[str, str], Float[Tensor, "walk change layer"]]


def analyse(setting: Setting, checkpoints: Mapping[int, Path], walks: Walks) -> Tables:
    """Return all tables, from the checkpoints of a run. The first checkpoint is untrained.

    Raises:
        ValueError, OSError: if a checkpoint cannot be read.
    """
    tables = Tables()
    inside = event_windows(walks.events, setting.delay, setting.buffer)
    # The change from one window to the next belongs to the newest token of the next window. The
    # newest token of the second window has the index `width`.
    newest, events = inside[:, setting.width :], walks.events[:, setting.width :]
    steps = list(checkpoints)
    untrained = before = None
    # With disable=None, tqdm shows no bar if the output is not a terminal.
    for step in tqdm(steps, desc="checkpoints", disable=None):
        model = load(checkpoints[step])
        seen = observe(model, walks, setting)
        untrained = untrained or seen
        tables.learning.append(Learned(step, *learned(model, walks, setting)))
        for target, s in seen.spectra.items():
            tables.spectra.extend(_spectrum(step, target, s))
            tables.measures.extend(_measures(step, target, s))
        for (target, metric), values in seen.steps.items():
            for layer, each in enumerate(values.unbind(-1)):
                found = interval(each, newest)
                tables.events.append(Event(step, target, layer, metric, *found))
                if metric == "angle" and step in (steps[0], steps[-1]):
                    # Eight steps before the event, and eight after its window.
                    lags = range(-8, setting.delay + setting.buffer + 9)
                    tables.around_events.extend(
                        Around(step, target, layer, *row) for row in locked(each, events, lags)
                    )
        if before is not None:
            tables.drift.extend(_drift(*before, step, seen, setting.top))
        before = step, seen
    for (target, metric), last in seen.steps.items():
        for layer, each in enumerate((last - untrained.steps[target, metric]).unbind(-1)):
            found = interval(each, newest)
            tables.beyond_untrained.append(Beyond(target, layer, metric, *found[2:]))
    tables.residual_norms.extend(residual_norms(model, walks, inside, setting))
    return tables


@torch.no_grad()
def observe(model: Transformer, walks: Walks, setting: Setting) -> Seen:
    """Return the SVD of the three targets on every window of the walks."""
    runner, top = HookedRunner(model), setting.top
    spectra: dict[str, list[Tensor]] = {"qkt": [], "avwo": []}
    vectors: dict[str, list[Tensor]] = {"qkt": [], "avwo": []}
    steps: dict[tuple[str, str], list[Tensor]] = {
        (target, metric): [] for target in spectra for metric in METRICS
    }
    for windows in sliding_windows(walks.tokens, setting.width):
        _, cache = runner.run_with_cache(windows, mode="svd_targets")
        targets = svd_targets(model, cache).squeeze_heads()
        for name, found in spectra_of(targets).items():
            if name == "wvwo":
                constant = found
                continue
            moved = (found.s[1:] - found.s[:-1]).norm(dim=-1) / found.s[:-1].norm(dim=-1)
            if name == "qkt":
                # The columns of QK^T are tokens of the window. Compare only the columns of tokens
                # that both windows contain.
                before, after = targets.qkt[:-1, ..., 1:], targets.qkt[1:, ..., :-1]
                angles = subspace_angles(svd(before), svd(after), top)
            else:
                angles = drift(found, top)
            steps[name, "angle"].append(angles[..., -1])
            steps[name, "change"].append(moved)
            spectra[name].append(found.s)
            vectors[name].append(getattr(targets, name)[::EVERY])
    kept = {name: svd(torch.cat(parts), name) for name, parts in vectors.items()}
    return Seen(
        {"wvwo": constant.s, **{name: torch.cat(parts) for name, parts in spectra.items()}},
        {"wvwo": constant[None], **kept},
        {key: torch.stack(parts) for key, parts in steps.items()},
    )


@torch.no_grad()
def learned(model: Transformer, walks: Walks, setting: Setting) -> tuple[float, float, float]:
    """Return what the model has learned: two losses and a probability.

    The losses, in nats, are of steps along an edge and of landings (the last step of an event,
    which jumps to another region). The probability is the probability of the region where the
    walk lands, one step before the landing. Only the last position of each window counts, because
    it has seen the most tokens.
    """
    region, width = setting.graph.region, setting.width
    windows = sliding_windows(walks.tokens, width)
    logits = torch.stack([model(rows)[:, -2:] for rows in windows])
    losses = next_token_loss(logits.flatten(0, 1), windows[..., -2:].flatten(0, 1)).view(
        windows.shape[:2]
    )
    # `roll` moves events from the end to the start, but only to steps inside the first window,
    # which are not counted.
    lands = walks.events.roll(setting.delay, 1)[:, width - 1 :]
    to = region == region[windows[..., -1]][..., None]
    mass = logits[..., -2, :].softmax(-1).where(to, 0).sum(-1)
    return losses[~lands].mean().item(), losses[lands].mean().item(), mass[lands].mean().item()


@torch.no_grad()
def residual_norms(
    model: Transformer, walks: Walks, inside: Bool[Tensor, "walk step"], setting: Setting
) -> list[Norm]:
    """Return the norm of the residual stream after each block, inside and outside event windows."""
    width = setting.width
    length = inside.shape[1] // width * width
    tokens, windows = (value[:, :length].reshape(-1, width) for value in (walks.tokens, inside))
    stream = residual_stream(HookedRunner(model).capture(tokens, names="*.resid_post"), windows)
    ranks = effective_rank(svd(stream.vectors.transpose(0, 1), "residual stream").s).tolist()
    norms = stream.norms.unflatten(0, (len(inside), -1)).flatten(1, 2).unbind(-1)
    return [
        Norm(layer, *interval(each, inside[:, :length]), rank)
        for layer, (each, rank) in enumerate(zip(norms, ranks, strict=True))
    ]


def _spectrum(step: int, target: str, s: Float[Tensor, "*window layer k"]) -> list[Spectrum]:
    return [
        Spectrum(step, target, layer, number, value)
        for layer, values in enumerate(s.reshape(-1, *s.shape[-2:]).mean(0).tolist())
        for number, value in enumerate(values, start=1)
    ]


def _measures(step: int, target: str, s: Float[Tensor, "*window layer k"]) -> list[Measure]:
    of = (effective_rank(s), stable_rank(s), spectral_gap(s), condition_number(s))
    each = [value.reshape(-1, s.shape[-2]).median(0).values.tolist() for value in of]
    return [
        Measure(step, target, layer, *values)
        for layer, values in enumerate(zip(*each, strict=True))
    ]


def _drift(one: int, before: Seen, two: int, after: Seen, top: int) -> list[Drift]:
    """Return the angles by which top subspaces turn between two checkpoints, on the kept windows.

    Matrices in which the top subspace is not defined (equal singular values) are left out.
    """
    rows = []
    for target in ("qkt", "wvwo", "avwo"):
        turned = subspace_angles(before.kept[target], after.kept[target], top)[..., -1]
        for layer, angles in enumerate(turned.T):
            found = angles[~angles.isnan()]
            mean, spread = found.mean().item(), found.std(correction=0).item()
            rows.append(Drift(one, two, target, layer, mean, spread))
    return rows
