"""Probes: classifiers of two kinds of texts from values, with controls for their scores.

1. Read the values of all examples. Texts are divided into folds, and all copies of a text are in
   the same fold, as are all texts of a group. Therefore, examples of one text are never in two
   folds.
2. For each fold, fit a classifier on the other folds and score it on this fold. The score is the
   area under the ROC curve (AUROC), which is 0.5 by chance. The fit uses all copies; the score
   counts each text once.
3. Repeat this with random labels for each text, with the same label for all copies of a text. A
   fit on some texts cannot know the random labels of other texts, so with many texts this control
   is near 0.5 for every probe. It would be above 0.5 if rows of one text were in two folds.

The control says nothing about words that tell the two kinds of texts apart. For the word at the
position that is read, the baseline is a probe of the token embeddings (`site="embed"`): if it
scores as well as a later point, the probe at this point may only read the word. By default, this
baseline sees only the last token of each text, and no other word.

For all words of a text, the control is a bag of words: `harvest` the embeddings of each kind with
`HarvestConfig(pool="mean")`, and probe the two stores at `embed`. If it scores as well as a later
point, write texts with the same words in both kinds.

Groups of nearly equal texts need `groups` of `Contrast`. The control tasks of Hewitt & Liang 2019,
"Designing and Interpreting Probes with Control Tasks", are different: their random labels belong to
words, which are the same in the fit and in the test.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import (
    Index,
    float32_rounding,
    library,
    number_of,
    progress_of,
    require_choice,
    require_integer,
    require_kind,
    require_module,
    shows_progress,
    storage,
    without_gradients,
)
from interp import plots
from interp.directions.contrast import ContrastOrPair, as_contrast
from interp.directions.direction import Direction
from interp.directions.examples import labelled_examples
from interp.directions.folds import (
    ExampleRows,
    Split,
    masks_by_position,
    rows_of_examples,
    split_of,
)
from interp.json_form import form
from interp.numbers.intervals import interval_text
from interp.numbers.ranks import area_under_curve
from interp.results.entries import Entries
from interp.results.result import Result

if TYPE_CHECKING:
    from interp.plots.figure import Figure

_KIND = "probe"
_RESULTS = ("auroc", "control")
_BELOW_CHANCE = 0.35
"""Chance hardly ever gives a mean AUROC below this number."""


@dataclass(frozen=True, eq=False, repr=False)
class Probe(plots.Shown):
    """Probes of a site, one for each point; the result of `probe`.

    Attributes:
        direction: the direction of each probe, fitted on all examples. `value @ vector + offset` is
            the score of a value; for `logistic`, it is the log odds.
        auroc: the AUROC on held-out texts, [point, example] or [point, pos, example], where the
            examples are folds. In the intervals, all copies of a text count as one text, and all
            texts of a group count as one text; see
            `interp.numbers.intervals.auroc_interval`.
        control: the AUROC with random labels for each text, the mean over draws. With many texts it
            is near 0.5 for every probe whose folds share no text. With a dozen texts it can be 0.3
            or 0.7 by chance.

    >>> from models import load
    >>> numbers = ["part AB1", "part CD2", "part EF3", "part GH4", "part JK5", "part LM6"]
    >>> words = ["part one", "part two", "part ten", "part six", "part all", "part new"]
    >>> result = probe(load("pydoc-4l"), (numbers, words), "blocks.2.resid_post", folds=3)
    >>> result.selectivity.mean() > 0.3  # above the same probe with random labels
    tensor([True])
    >>> result.direction[2].shape
    torch.Size([128])
    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/probe.safetensors"
    >>> result.save(path)
    >>> Probe.load(path).top(1)
    point blocks.2.resid_post  +1  [+0.654, +1]
    """

    direction: Direction
    auroc: Result
    control: Result

    is_plot = True

    @property
    def about(self) -> Mapping[str, Any]:
        """The facts about the method that found the direction."""
        return self.direction.about

    def top(self, k: int = 10) -> Entries:
        """Return the places with the largest AUROC, the largest first; see `Result.top`.

        If the AUROC of a place is far below 0.5, the printed entries end with the note of the
        printed probe.
        """
        return self.auroc.top(k).with_notes(self._notes())

    def plot(self, facet: str | None = None) -> "Figure":
        """Plot the AUROC with true labels; see `Result.plot`."""
        return self.auroc.plot(facet)

    def to_dataframe(self) -> Any:
        """Return a pandas table with a row for each probe.

        The columns are the labels of its place, `auroc` (the mean over folds), `low` and `high`
        (the 95% interval) and `control`. This needs the extra `tables` (pandas).

        Raises:
            ImportError: if pandas is not installed.
        """
        table = self.auroc.to_dataframe().rename(columns={"effect": "auroc"})
        return table.assign(control=self.control.mean().flatten().tolist())

    @property
    def selectivity(self) -> Result:
        """The difference `auroc` - `control`."""
        return self.auroc - self.control

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that write files, by suffix."""
        return {**super()._writers(), **dict.fromkeys(storage.SAFETENSORS, self._save)}

    def _save(self, path: Path) -> None:
        """Write the direction and both results as safetensors, which `load` reads."""
        tensors = {f"direction/{name}": vector for name, vector in self.direction.vectors.items()}
        facts: dict[str, Any] = {
            "offsets": dict(self.direction.offsets),
            "about": dict(self.direction.about),
        }
        for part in _RESULTS:
            values, facts[part] = getattr(self, part).packed()
            tensors |= {f"{part}/{name}": value for name, value in values.items()}
        storage.save(path, _KIND, tensors, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Probe":
        """Load a probe from a file of `save` with the suffix `.safetensors` or without a suffix.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged or does not contain a probe.
        """
        with storage.opened(storage.path_of(path), _KIND) as (tensors, facts):
            parts: dict[str, dict[str, Tensor]] = {name: {} for name in ("direction", *_RESULTS)}
            for key, value in tensors.items():
                part, _, name = key.partition("/")
                parts[part][name] = value
            direction = Direction(parts["direction"], facts["offsets"], facts["about"])
            return cls(direction, *(Result.unpacked(parts[name], facts[name]) for name in _RESULTS))

    def as_json(self) -> dict[str, Any]:
        """Return the AUROC, the control and the length of each direction, in the JSON form of all
        results; see `interp.json_form`.
        """
        tables = {**self.auroc.tables("auroc"), **self.control.tables("control")}
        direction = self.direction.as_json()
        listed = form("Probe", tables, self.direction.about)
        return {**listed, "tables": listed["tables"] | direction["tables"]}

    def view(self) -> plots.View:
        """Return a view of the AUROC with true and with random labels."""
        values = torch.stack([self.auroc.values, self.control.values])
        labels = {"labels": ["true", "drawn"], **self.auroc.labels}
        axes = ("labels", *self.auroc.axes)
        both = replace(self.auroc, values=values, axes=axes, labels=labels)
        return plots.effects(both)

    def __repr__(self) -> str:
        ends = self.auroc.interval()
        labels = self.auroc.labels
        labels_of_axes = [labels[axis] for axis in self.auroc.axes[:-1]]
        places = [" ".join(map(str, place)) for place in product(*labels_of_axes)]
        columns = (self.auroc.mean(), ends.low, ends.high, self.control.mean())
        rows = zip(places, *(column.flatten().tolist() for column in columns), strict=True)
        head = (
            f"Probe at {number_of(len(self.direction.vectors), 'point')}, "
            "AUROC on held-out texts and with drawn labels"
        )
        lines = [
            f"  {place}  {mean:.3f}{interval_text(low, high, '.3f')}  {control:.3f}"
            for place, mean, low, high, control in islice(rows, 38)
        ]
        return "\n".join([head, *lines, *self._notes()])

    def _notes(self) -> list[str]:
        """Return the usual reason for an AUROC far below 0.5; nothing if no AUROC is so low."""
        is_below = (self.auroc.mean() < _BELOW_CHANCE) & (self.auroc.interval().high < 0.5)
        if not is_below.any():
            return []
        return [
            "an AUROC far below 0.5 usually means that texts that differ in a few words were in "
            "different folds: pass groups= to Contrast, such as groups='pairs'"
        ]


@shows_progress
@without_gradients
def probe(
    model: nn.Module,
    contrast: "ContrastOrPair",
    site: str | Sequence[str] = "resid_post",
    *,
    over: Literal["pos"] | None = None,
    kind: Literal["logistic", "linear"] = "logistic",
    C: float = 1.0,
    k: int | None = None,
    folds: int = 5,
    draws: int = 5,
    seed: int = 0,
    progress: bool = True,
) -> Probe:
    """Return linear probes that tell two kinds of texts apart, one for each layer, with scores.

    A probe is a linear classifier of values. Its score is the AUROC on texts that it was not fitted
    on: 0.5 by chance, 1 if every value of one kind is above every value of the other kind. As a
    control, the same probe is fitted to random labels for each text. With many texts, this control
    is near 0.5 for every probe whose folds share no text; with a dozen texts it can be 0.3 or 0.7
    by chance. It does not find words that tell the two kinds apart.
    There are two other controls for words:

    - `site=["embed", "resid_post"]`: the score at `embed` is the score of the token at the position
      that is read. By default this is the last token of each text, and no other word.
    - A bag of words, which sees all words of a text: a probe of the mean embedding of each text.
      `harvest(model, yes, ["embed"], folder, HarvestConfig(pool="mean"))` makes a store of these
      means, and another call one of `no`; then `probe(model, (store, other), "embed")`.

    The module's docstring explains the steps. This needs the extra `probes` (scikit-learn).

    Values are standardised before the fit, but the direction applies to the original values.
    Columns that are constant up to rounding have the coefficient 0.

    Texts with the same real tokens are copies of one text, even if one copy is in `yes` and another
    copy in `no`. In a cache, the values of copies must agree too, because the run of the cache may
    have had other inputs in addition to tokens. The same applies to a store that contains only some
    positions of each text, or pooled values.

    Texts of the two kinds may be pairs that differ in a few words. If the two texts of a pair are
    in different folds, the fit learns the wrong label for the text that it is scored on, and the
    AUROC of a few such texts can be far below 0.5. `Contrast(yes, no, groups="pairs")` keeps the
    texts of each pair in one fold. For other groups, such as all texts about one person, pass a
    list as `groups` of `Contrast`.

    Args:
        model: any model with hook points, in evaluation mode.
        contrast: the two kinds of texts, as a pair `(yes, no)` or a `Contrast`. A pair is read at
            the last position of each text. All examples are in memory; from a store, only the rows
            at the positions of the contrast.
        site: the last part of the names of points in all layers, the name of one point, or several
            of these.
        over: with `over="pos"`, a separate probe is fitted and scored at each position of the
            contrast, such as `Contrast(yes, no, pos=[-2, -1])`. All texts must have the same number
            of positions. The direction that is returned is still fitted on all positions. Default:
            one probe for all positions.
        kind: `logistic` regression, or `linear` regression on labels of -1 and 1 (ridge).
        C: the inverse of the strength of the penalty, as in scikit-learn.
        k: the number of columns of a value that a probe uses: the columns with the largest
            difference between the means of both kinds (Gurnee et al. 2023, "Finding Neurons in a
            Haystack", arXiv 2305.01610). They are chosen again for each fold, from the other folds.
            All other coefficients are 0. Default: all columns.
        folds: the number of folds. All copies of a text are in one fold, and all texts of a group.
        draws: the number of draws of random labels for the control, which is the mean over draws.
        seed: the seed of the folds and of the random labels.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The direction of each probe, [d] at each point, and the AUROC with the true labels and with
        random labels, [point, example] or [point, pos, example]. The examples are the folds.

    Raises:
        ValueError: if a kind has fewer different texts, or groups of texts, than there are folds,
            if a fold would have fewer than 2 different texts, if the groups do not fit the texts,
            if there are fewer than 2 folds, if `kind` or `over` is unknown, or if texts have
            different numbers of positions with `over="pos"`.
        CacheError: if a store is from another model.
        TypeError: if `contrast` is not a pair of two lists or a `Contrast`.
        UnknownNameError: if a point or a span is unknown. The error contains close matches.
        ModeError: if the model is in training mode.
        ImportError: if scikit-learn is not installed.

    >>> from models import load
    >>> numbers = ["part AB1", "part CD2", "part EF3", "part GH4", "part JK5", "part LM6"]
    >>> words = ["part one", "part two", "part ten", "part six", "part all", "part new"]
    >>> result = probe(load("pydoc-4l"), (numbers, words), "blocks.2.resid_post", folds=3)
    >>> result.auroc.mean()  # on texts that the probe was not fitted on
    tensor([1.])
    >>> result.control.mean() < 0.7  # with random labels
    tensor([True])
    """
    require_choice("kind", kind, ("logistic", "linear"))
    require_choice("over", over, (None, "pos"))
    if k is not None:
        require_integer("k", k)
    require_kind("C", C, (int, float), "a number above 0")
    require_module(model)
    contrast = as_contrast(contrast)
    points, batches = labelled_examples(model, contrast, site)
    parts = [*batches]
    rows = rows_of_examples(parts, contrast)
    split = split_of(rows, folds, draws=draws, seed=seed)
    masks = [slice(None)] if over is None else masks_by_position(rows)
    classifier = _Classifier(kind, C, k)
    scores = []
    vectors = {}
    offsets = {}
    for name in progress_of(points, "points", len(points)):
        values = torch.cat([part.values[name] for part in parts]).double().cpu().numpy()
        scores += [classifier.scores(values, rows, split, is_used) for is_used in masks]
        vector, offsets[name] = classifier.fitted(values, rows.label)
        vectors[name] = torch.tensor(vector).float()
    labels_of: dict[str, Sequence[Any]] = {"point": points}
    if over is not None:
        labels_of["pos"] = _labels_of_positions(contrast.pos, len(masks))
    facts = {"rows": len(rows.label), "yes": int(rows.label.sum())}
    about = {"by": f"{kind} probe", "site": site, **facts}
    auroc, control = _results(torch.tensor(scores), labels_of, kinds=split.kinds, about=about)
    return Probe(Direction(vectors, offsets, about), auroc, control)


def _labels_of_positions(pos: Index | str | None, n_positions: int) -> Sequence[int]:
    """Return the labels of the axis `pos`: the positions that the caller listed, or 0, 1, 2, ... if
    `pos` is not a list of numbers.
    """
    if isinstance(pos, list) and all(type(place) is int for place in pos):
        return cast(list[int], pos)
    return range(n_positions)


def _results(
    scores: Float[Tensor, "place labels fold"],
    labels_of: Mapping[str, Sequence[Any]],
    kinds: Sequence[Any],
    about: Mapping[str, Any],
) -> tuple[Result, Result]:
    """Return the AUROC with true labels, and the mean AUROC with random labels.

    Args:
        scores: the AUROC of each fold. The first entry of the axis `labels` is with true labels.
        labels_of: the labels of the axes `point` and, with `over="pos"`, `pos`. The axis `place` of
            the scores contains all combinations of these labels.
        kinds: two arrays: the numbers of the groups that have texts of kind `no`, and of the groups
            that have texts of kind `yes`. Without groups, each text is a group.
        about: facts about the probes.
    """
    folds = scores.shape[-1]
    shape = [*map(len, labels_of.values()), folds]
    of_no, of_yes = (len(kind) / folds for kind in kinds)
    of_both = len(np.intersect1d(kinds[0], kinds[1])) / folds
    # One half of the texts gets the random label 0, and the other half gets 1.
    half = (of_no + of_yes - of_both) / 2
    auroc = Result(
        scores[:, 0].view(shape),
        (*labels_of, "example"),
        labels=labels_of,
        unit="AUROC",
        about=about,
        bounds=(0.0, 1.0),
        counts=(of_yes, of_no),
    )
    control = scores[:, 1:].mean(1).view(shape)
    return auroc, replace(auroc, values=control, counts=(half, half))


def _scores(values: Any, vector: Any, offset: float) -> Any:
    """Return numbers [row] in the order of `values @ vector + offset`.

    Rows with equal values have equal numbers: two products that differ by no more than rounding
    count as equal. A matrix product may round equal rows in different ways. A fit that finds
    nothing has weights of the size of rounding, so the limit is at least 1e-9 of the labels' size.

    Args:
        values: the values, [row, d].
        vector: the direction, [d].
        offset: the offset.
    """
    products = values @ vector + offset
    sizes = abs(values) @ abs(vector) + abs(offset)
    rounding = 1e-9 * sizes.max(initial=1)
    order = np.argsort(products, kind="stable")
    is_larger = np.diff(products[order], prepend=-np.inf) > rounding
    numbers = np.empty_like(products)
    numbers[order] = np.cumsum(is_larger)
    return numbers


def _once(*columns: Any) -> Any:
    """Return a mask of rows that keeps one of several equal rows: the first."""
    first = np.zeros(len(columns[0]), bool)
    first[np.unique(np.stack(columns, 1), axis=0, return_index=True)[1]] = True
    return first


@dataclass(frozen=True)
class _Classifier:
    """A linear classifier. For `kind`, `C` and `k`, see `probe`."""

    kind: str
    C: float
    k: int | None = None

    def scores(
        self, values: Any, rows: ExampleRows, split: Split, is_used: Any
    ) -> list[list[float]]:
        """Return the AUROC of some rows, [labels, fold]: with the true labels, and of each draw.

        Args:
            values: the values of all rows, [row, d].
            rows: the facts of all rows.
            split: the folds, and the labels of all rows.
            is_used: the rows that are used, as a slice or a mask.
        """
        used_values = values[is_used]
        scores = []
        for labels in split.labels:
            scores.append(self.aurocs(used_values, rows.at(is_used, labels), split.fold_of))
        return scores

    def fitted(self, values: Any, labels: Any) -> tuple[Any, float]:
        """Return the direction and the offset that separate values by their labels.

        Args:
            values: the values, [row, d].
            labels: the labels, 0 or 1.
        """
        linear = library("sklearn.linear_model", extra="probes")
        mean, spread = values.mean(0), values.std(0)
        # A column that varies by no more than float32 rounding is treated as constant, in any
        # dtype. Its coefficient is 0.
        spread = np.where(spread > float32_rounding() * abs(values).max(0), spread, np.inf)
        if self.k is not None:
            gaps = abs(values[labels == 1].mean(0) - values[labels == 0].mean(0))
            is_used = np.zeros(len(gaps), bool)
            is_used[np.argsort(-gaps, kind="stable")[: self.k]] = True
            spread = np.where(is_used, spread, np.inf)
        scaled = (values - mean) / spread
        if self.kind == "logistic":
            fit = linear.LogisticRegression(C=self.C, max_iter=1000).fit(scaled, labels)
            weights = fit.coef_[0]
            bias = float(fit.intercept_[0])
        else:
            fit = linear.Ridge(alpha=1 / self.C).fit(scaled, 2 * labels - 1)
            weights = fit.coef_
            bias = float(fit.intercept_)
        return weights / spread, bias - float(mean @ (weights / spread))

    def aurocs(self, values: Any, rows: ExampleRows, fold_of: Any) -> list[float]:
        """Return the AUROC of each fold with a fit on the other folds.

        Copies of a text count once in the AUROC: of several rows with the same label, text and
        place, only the first is scored.

        Args:
            values: the values of all examples, [row, d].
            rows: the label, text and place of each example.
            fold_of: the fold of each text.
        """
        once = _once(rows.label, rows.text, rows.place)
        scores = []
        for fold in range(fold_of.max() + 1):
            is_held_out = fold_of[rows.text] == fold
            vector, offset = self.fitted(values[~is_held_out], rows.label[~is_held_out])
            scored = is_held_out & once
            strength = torch.from_numpy(_scores(values[scored], vector, offset))
            is_yes = torch.from_numpy(rows.label[scored] == 1)
            scores.append(area_under_curve(strength, is_yes))
        return scores
