"""Find the difference of means of two kinds of texts, and erase the difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooks import EditError
from hooks.base import Index, number_of, require_module, shows_progress, without_gradients
from interp.directions.contrast import ContrastOrPair, as_contrast
from interp.directions.direction import Direction
from interp.directions.erasing import Eraser, leace
from interp.directions.examples import labelled_examples
from interp.edits.edit import Edit
from interp.edits.places import Region
from interp.json_form import Table, form
from interp.numbers.moments import Moments


@shows_progress
def difference_of_means(
    model: nn.Module,
    contrast: "ContrastOrPair",
    site: str | Sequence[str] = "resid_post",
    *,
    progress: bool = True,
) -> Direction:
    """Return the direction from the mean value of the `no` texts to the mean of the `yes` texts.

    There is one direction in every layer.

    The method is from Marks & Tegmark (2023). With the offset of the direction, the point halfway
    between the two means has the score 0; see `Direction.scores`.

    Args:
        model: any model with hook points, in evaluation mode.
        contrast: the two kinds of texts, as a pair `(yes, no)` or a `Contrast`. A pair is read at
            the last position of each text; `Contrast(yes, no, pos=None)` is read at all tokens.
        site: the last part of the names of points in all layers, the name of one point, or several
            of these. Axes after `pos` are flattened.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        A direction that points from `no` to `yes`, in the units of the values.

    Raises:
        UnknownNameError: if a point or a span is unknown. The error contains close matches.
        ValueError: if a kind has no text, if a text does not have a position, if a value is not
            finite, if a cache is from a run without tokens, or if there is not one label for each
            text of a store.
        TypeError: if `contrast` is not a pair of two lists or a `Contrast`.
        CacheError: if a store is from another model.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> v = difference_of_means(model, (["part KV8", "part QX3"], ["def f(", "return x"]))
    >>> from interp import run_with_cache
    >>> _, cache = run_with_cache(model, ["part AB1", "import o"], mode="residual")
    >>> v.scores(cache)["blocks.2.resid_post"][:, -1].round()  # higher for a number of a part
    tensor([ 10., -50.])
    """
    moments = _moments(model, contrast, site)
    vectors, offsets = {}, {}
    for name, moments_of_point in moments.items():
        share = float(moments_of_point.mean[-1])
        # The moments contain Σ (x - mean x)(z - mean z), where z is the label (1 or 0). With the
        # share of rows with label 1, this is n · share · (1 - share) times the difference of the
        # means.
        vector = moments_of_point.products[:-1, -1] / (moments_of_point.n * share * (1 - share))
        middle = moments_of_point.mean[:-1] + (0.5 - share) * vector
        vectors[name] = vector.float()
        offsets[name] = -float(middle @ vector)
    return Direction(
        vectors, offsets, {"by": "difference of means", "site": site, **_counts(moments)}
    )


@dataclass(frozen=True, eq=False)
class Erasure:
    """Erasers of the difference between two kinds of texts, one for each point.

    It is the result of `erasure`.

    Attributes:
        erasers: the erasers, by the names of points.
        about: facts about the method that found the erasers.

    >>> from models import load
    >>> numbers, words = ["part AB1", "part CD2", "part EF3"], ["part one", "part two", "part ten"]
    >>> found = erasure(load("pydoc-4l"), (numbers, words), "blocks.2.resid_post")
    >>> [*found.erasers]
    ['blocks.2.resid_post']
    >>> hooks = {"blocks.2.resid_post": found.edit(pos=-1)}
    """

    erasers: Mapping[str, Eraser]
    about: Mapping[str, Any]

    def __repr__(self) -> str:
        facts = "".join(f", {name} {value}" for name, value in self.about.items())
        lines = [f"Erasure at {number_of(len(self.erasers), 'point')}{facts}"]
        for name, eraser in [*self.erasers.items()][:38]:
            lines.append(f"  {name}: rank {eraser.left.shape[0]}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the rank of each eraser in the JSON form of all results; see
        `interp.json_form`.
        """
        ranks = [eraser.left.shape[0] for eraser in self.erasers.values()]
        labels = {"point": [*self.erasers]}
        return form("Erasure", {"rank": Table(ranks, "point", "rank", labels)}, self.about)

    def edit(self, **where: Index) -> Edit:
        """Return an edit that erases the difference between the two kinds of texts.

        The edit can be used at each point in `erasers`. It erases the difference that was found at
        that point.

        Args:
            where: the positions to edit, such as `pos=-1`. Default: all positions.
        """
        return Edit("erase", self._erased, {"0": self}).at(**where)

    def _erased(self, region: Tensor, value: Tensor, place: Region) -> Tensor:
        """Return the values that an edit changes, without the difference.

        Raises:
            EditError: if the point has no eraser, or the values have another size.
        """
        eraser = self.erasers.get(place.point.name)
        if eraser is None:
            raise EditError(
                f"an erasure must be used at one of {', '.join(self.erasers)}; got "
                f"{place.point.name}"
            )
        # The eraser was fitted on values with the axes after `pos` flattened.
        values = region.flatten(2)
        size = len(eraser.mean)
        if values.shape[-1] != size:
            raise EditError(
                f"an eraser at {place.point} needs all {size} numbers of a position; got "
                f"{values.shape[-1]}"
            )
        return eraser(values).view_as(region)


@shows_progress
def erasure(
    model: nn.Module,
    contrast: "ContrastOrPair",
    site: str | Sequence[str] = "resid_post",
    *,
    progress: bool = True,
) -> Erasure:
    """Return erasers that remove the difference between two kinds of texts (LEACE), one for each
    layer.

    After the erasure, no linear probe separates the two kinds better than chance, and no smaller
    change has this property (Belrose et al. 2023; see `interp.directions.erasing`). The guarantee
    applies to the rows that the erasers are fitted on. On other texts, some of the difference may
    remain.

    Args:
        model: any model with hook points, in evaluation mode.
        contrast: the two kinds of texts, as a pair `(yes, no)` or a `Contrast`. A pair is read at
            the last position of each text.
        site: the last part of the names of points in all layers, the name of one point, or several
            of these.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The erasers, by the names of points. `erasure(...).edit(pos=-1)` is an edit for hooks, which
        works at each of these points.

    Raises:
        UnknownNameError: if a point or a span is unknown. The error contains close matches.
        ValueError: if a kind has no text, if a text does not have a position, if a value is not
            finite, or if a cache is from a run without tokens.
        CacheError: if a store is from another model.
        ModeError: if the model is in training mode.

    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model, point = load("pydoc-4l"), "blocks.2.resid_post"
    >>> numbers, words = ["part AB1", "part CD2", "part EF3"], ["part one", "part two", "part ten"]
    >>> round(float(difference_of_means(model, (numbers, words), point)[point].norm()), 1)
    11.9
    >>> edit = erasure(model, (numbers, words), point).edit(pos=-1)
    >>> with HookedRunner(model).hooks({point: edit}):
    ...     round(float(difference_of_means(model, (numbers, words), point)[point].norm()), 1)
    0.0
    """
    moments = _moments(model, contrast, site)
    erasers = {name: leace(moments_of_point) for name, moments_of_point in moments.items()}
    return Erasure(erasers, {"by": "LEACE", "site": site, **_counts(moments)})


@without_gradients
def _moments(
    model: nn.Module, contrast: ContrastOrPair, site: str | Sequence[str]
) -> dict[str, Moments]:
    """Return the moments of the values at each point. The last column is the label of each row."""
    moments: dict[str, Moments] = {}
    require_module(model)
    _, batches = labelled_examples(model, as_contrast(contrast), site)
    for part in batches:
        for name, values in part.values.items():
            labels = torch.full((len(values), 1), float(part.label), device=values.device)
            new = Moments.of(values, labels)
            moments[name] = moments[name] + new if name in moments else new
    return moments


def _counts(moments: Mapping[str, Moments]) -> dict[str, int]:
    """Return the number of rows as `rows`, and the number of rows of the kind `yes` as `yes`."""
    first = next(iter(moments.values()))
    return {"rows": first.n, "yes": round(first.n * float(first.mean[-1]))}
