"""k-sparse probes: how well a few features of a dictionary tell two kinds of texts apart.

1. Insert the dictionary into the model, so that its features are values of a point.
2. For each k, fit a probe of the k features whose means differ most between both kinds, and score
   it on texts that neither the fit nor the choice of the features has seen (`probe`).
3. Fit the same probe on the values that the dictionary reads. A dictionary that represents the
   distinction as a feature reaches nearly this score with k = 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hooks.base import require_kind, shows_progress, without_gradients
from interp import plots
from interp.directions.contrast import ContrastOrPair
from interp.directions.probing import Probe, probe
from interp.features import Dictionary, splice
from interp.json_form import Table, form
from interp.numbers.intervals import interval_text
from interp.results.result import Result

_SHOWN = 4


@dataclass(frozen=True, eq=False, repr=False)
class SparseProbes(plots.Shown):
    """Probes that use only a few features, returned by `sparse_probes`.

    Attributes:
        features: for each k, the features of the probe with their coefficients, the largest first.
            A coefficient is the change of the log odds for a feature value of 1. These probes are
            fitted on all texts.
        auroc: the AUROC on held-out texts, [k, example]. The examples are the folds.
        control: the AUROC of probes that are fitted to random labels, [k, example].
        raw: the probe of the values that the dictionary reads, with all their columns.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> model, sae = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
    >>> numbers = ["part AB1", "part CD2", "part EF3", "part GH4", "part JK5", "part LM6"]
    >>> words = ["part one", "part two", "part ten", "part six", "part all", "part new"]
    >>> result = sparse_probes(model, sae, (numbers, words), k=(1, 3), folds=3)
    >>> result
    AUROC on held-out texts [95% interval], with random labels, and the features
      k=1        1.000 [0.654, 1.000]  0.475  897 (+0.63)
      k=3        1.000 [0.654, 1.000]  0.500  696 (-0.53), 897 (+0.38), 731 (+0.25)
      all values 1.000 [0.654, 1.000]  0.450
    """

    features: dict[int, list[tuple[int, float]]]
    auroc: Result
    control: Result
    raw: Probe

    is_plot = True

    def as_json(self) -> dict[str, Any]:
        """Return the AUROC of each k and of all values, the controls and the features, in the JSON
        form of all results; see `interp.json_form`.

        Each entry of `features` is a list of features with their coefficients.
        """
        labels = {"k": [*self.features]}
        tables = {
            **self.auroc.tables("auroc"),
            **self.control.tables("control"),
            **self.raw.auroc.tables("raw.auroc"),
            **self.raw.control.tables("raw.control"),
            "features": Table([*self.features.values()], "k", "log odds", labels),
        }
        return form("SparseProbes", tables, self.auroc.about)

    def view(self) -> plots.View:
        """Return a view of the AUROC for each k."""
        return plots.effects(self.auroc)

    def __repr__(self) -> str:
        lines = ["AUROC on held-out texts [95% interval], with random labels, and the features"]
        names = [*(f"k={k}" for k in self.features), "all values"]
        of_raw = _numbers(self.raw.auroc, self.raw.control)
        numbers = [*_numbers(self.auroc, self.control), *of_raw]
        texts = [*map(_listed, self.features.values()), ""]
        for name, row, text in [*zip(names, numbers, texts, strict=True)][-38:]:
            mean, low, high, control = row
            ends = interval_text(low, high, ".3f")
            lines.append(f"  {name:10} {mean:.3f}{ends}  {control:.3f}  {text}".rstrip())
        return "\n".join(lines)


def _numbers(auroc: Result, control: Result) -> list[tuple[float, ...]]:
    """Return the mean AUROC, its interval and the control, for each place."""
    ends = auroc.interval()
    columns = (auroc.mean(), ends.low, ends.high, control.mean())
    return [*zip(*(column.tolist() for column in columns), strict=True)]


def _listed(features: Sequence[tuple[int, float]]) -> str:
    """Return the first features and their coefficients as text."""
    shown = ", ".join(f"{index} ({weight:+.2g})" for index, weight in features[:_SHOWN])
    return shown + (f" and {len(features) - _SHOWN} more" if len(features) > _SHOWN else "")


@shows_progress
@without_gradients
def sparse_probes(
    model: nn.Module,
    dictionary: Dictionary,
    contrast: "ContrastOrPair",
    *,
    k: Sequence[int] = (1, 2, 5, 10),
    reads: str | None = None,
    C: float = 1.0,
    folds: int = 5,
    draws: int = 5,
    seed: int = 0,
    progress: bool = True,
) -> SparseProbes:
    """Return probes that use only a few features to classify two kinds of texts, with scores.

    This needs the extra `probes` (scikit-learn).

    Args:
        model: any model in evaluation mode.
        dictionary, reads: the dictionary, and the point that it reads; see `splice`.
        contrast: the two kinds of texts, strings or tokens, as a pair `(yes, no)` or a `Contrast`.
        k: the numbers of features. Default: 1, 2, 5 and 10.
        C: the inverse of the strength of the penalty, as in scikit-learn.
        folds: the number of folds. All copies of a text are in one fold.
        draws: the number of draws of random labels for the control.
        seed: the seed of the folds and of the random labels.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The features and the AUROC for each k, next to a probe of all values.

    Raises:
        TypeError, ValueError, UnknownNameError, ModeError, ImportError: as in `probe` and `splice`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> model, sae = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
    >>> numbers = ["part AB1", "part CD2", "part EF3", "part GH4", "part JK5", "part LM6"]
    >>> words = ["part one", "part two", "part ten", "part six", "part all", "part new"]
    >>> result = sparse_probes(model, sae, (numbers, words), k=(1, 5), folds=3)
    >>> result.raw.auroc.mean()
    tensor([1.])
    """
    require_kind("k", k, Sequence, "a list of numbers of features", "for example [1, 5]")
    if not k:
        raise ValueError(f"k must contain at least one number of features; got {k!r}")
    options: dict[str, Any] = dict(C=C, folds=folds, draws=draws, seed=seed)
    found: dict[int, Probe] = {}
    with splice(model, dictionary, reads=reads) as runner:
        (point,) = (name for name in runner.points if name.endswith(".features"))
        for number in k:
            found[number] = probe(model, contrast, point, k=number, progress=progress, **options)
    read = point.removesuffix(".features")
    raw = probe(model, contrast, read, progress=progress, **options)
    features = {}
    for number, fitted in found.items():
        vector = fitted.direction.vectors[point]
        order = vector.abs().argsort(descending=True)[:number]
        used = order[vector[order] != 0]
        features[number] = [*zip(used.tolist(), vector[used].tolist(), strict=True)]
    return SparseProbes(
        features=features,
        auroc=_joined([fitted.auroc for fitted in found.values()], k),
        control=_joined([fitted.control for fitted in found.values()], k),
        raw=raw,
    )


def _joined(results: Sequence[Result], k: Sequence[int]) -> Result:
    """Return the results of all k as one result, [k, example]."""
    values = torch.cat([result.values for result in results])
    first = results[0]
    return Result(
        values,
        ("k", "example"),
        labels={"k": [*k]},
        unit=first.unit,
        about=first.about,
        bounds=first.bounds,
        counts=first.counts,
    )
