"""The two kinds of texts that a direction, an eraser or a probe tells apart.

1. A caller writes the kinds as a pair `(yes, no)`, or as a `Contrast`, which has more settings: the
   positions that are read in each text, the groups of texts that belong together, and the kinds
   of the texts of one store.
2. `as_contrast` turns both forms into a `Contrast`, which checks its settings.
3. `Contrast.kinds` returns the texts of each kind. A store is replaced by its texts of this kind.
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import numpy as np
from jaxtyping import Shaped
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    Index,
    Texts,
    explains_calls,
    is_one_text,
    names_fields,
    require_integer,
    require_kind,
    shown,
)
from interp.directions.stored import Labels, StoredTexts, all_of, by_label
from interp.store import Activations

KindOfExamples = Texts | ActivationCache | Activations
"""Texts of one kind, as the user provides them."""

Groups = Sequence[Any] | Shaped[Tensor, " text"] | Shaped[np.ndarray, " text"]
"""The group of each text, a name or a number; or the word `pairs`."""

TextsOfKind = Texts | ActivationCache | StoredTexts
"""Texts of one kind, with a store replaced by its texts of this kind."""


@names_fields
@dataclass(frozen=True, eq=False)
class Contrast:
    """Two kinds of texts, `yes` and `no`, which a direction, an eraser or a probe tells apart.

    The pair `(yes, no)` has the same meaning as `Contrast(yes, no)`. If no kind is a stream,
    several analyses can share one contrast.

    Attributes:
        yes, no: the texts of each kind: strings or tokens, a cache of a run on the texts, or a
            store (`interp.store`). Texts are read once, so they can be a stream. A store is read in
            batches. One store can contain both kinds; then omit `no` and give `labels`.
        labels: for one store with both kinds: True for each text of kind `yes`, and False for each
            text of kind `no`.
        groups: the group of each text, a name or a number. In `probe` and `sparse_probes`, all
            texts of a group are in one fold, as in scikit-learn's `GroupKFold`. The order is the
            texts of `yes` followed by the texts of `no`; with `labels`, the texts of the store. For
            matched lists, write `"pairs"`: then text n of `yes` and text n of `no` are one group.
            Default: each text is a group.
        pos: the positions of the examples in each text; None for all tokens. Position 0 is the
            first token of a text; in a cache of padded texts, it is column 0. Padding is never an
            example. For chats (`models.chat`), it can be the name of a span. It can also contain a
            list of positions for each text: for the texts of `yes` followed by the texts of `no`,
            or one sequence of lists that is used for both kinds; with `labels`, for the texts of
            the store. A store may contain only some positions of a text. Then negative positions
            count from the last stored token, None and slices select the stored positions, and texts
            without stored positions are ignored. Default: the last position.
        batch: the number of texts in a batch. Default: 16.

    Raises:
        ValueError: if neither `no` nor `labels` are given, if both are given, if only one kind is a
            store, or if `batch` is below 1.
        TypeError: if `groups` is neither a list nor `"pairs"`, or if `yes` or `no` are no texts.

    >>> from interp.directions import difference_of_means, erasure
    >>> from models import load
    >>> model, point = load("pydoc-4l"), "blocks.2.resid_post"
    >>> contrast = Contrast(["part KV8", "part QX3"], ["def f(", "return x"], pos=None)
    >>> difference_of_means(model, contrast, point).about["rows"]  # a row for each token
    30
    >>> erasure(model, contrast, point).about["rows"]
    30
    """

    yes: "KindOfExamples"
    no: "KindOfExamples | None" = None
    _: KW_ONLY
    labels: "Labels | None" = None
    groups: "Groups | None" = None
    pos: "Index | str | None" = -1
    batch: int = 16

    def __post_init__(self) -> None:
        require_integer("batch", self.batch)
        self._require_groups()
        for name, texts in (("yes=", self.yes), ("no=", self.no)):
            if texts is not None or name == "yes=":
                require_kind(name, texts, (Activations, Iterable), "a list of texts, or a store")
        if self.labels is not None:
            self._require_one_store()
            return
        labels = ("0", "1", "True", "False")
        if isinstance(self.no, list | tuple) and self.no and {*map(str, self.no)} <= {*labels}:
            raise ValueError(
                "no= must be texts of the other kind; got labels: pass the texts of each kind as "
                "(yes, no) (labels= of a Contrast is for one store)"
            )
        if self.no is None:
            raise ValueError(
                "no= (the texts of the other kind) or, for one store, labels= must be given; "
                "got neither"
            )
        if isinstance(self.yes, Activations) != isinstance(self.no, Activations):
            others = self.no if isinstance(self.yes, Activations) else self.yes
            raise ValueError(
                "yes= and no= must be two stores or two lists of texts; "
                f"got a store and a {type(others).__name__}"
            )

    def _require_groups(self) -> None:
        """Check that `groups` is None, a list, an array or the word `pairs`.

        Raises:
            TypeError: if not.
        """
        is_word = isinstance(self.groups, str) and self.groups == "pairs"
        is_list = isinstance(self.groups, list | tuple) or hasattr(self.groups, "tolist")
        if not (self.groups is None or is_word or is_list):
            raise TypeError(
                "groups must be a list with the group of each text, or 'pairs'; got "
                f"{shown(self.groups)}"
            )

    def _require_one_store(self) -> None:
        """Check that `yes` is a store, and that `no` is omitted.

        Raises:
            ValueError: if not.
        """
        if not isinstance(self.yes, Activations):
            raise ValueError(
                f"yes= must be a store with labels=; got a {type(self.yes).__name__}: pass the two "
                "kinds as (yes, no)"
            )
        if self.no is not None:
            raise ValueError(
                "no= must be omitted with labels=, because one store has both kinds; got a "
                f"{type(self.no).__name__}"
            )

    @explains_calls
    def kinds(self, model: nn.Module) -> tuple[TextsOfKind, TextsOfKind]:
        """Return the texts of both kinds. A store is replaced by its texts of each kind.

        Raises:
            ValueError: if there is not one label for each text of the store.
            CacheError: if a store is from another model or incomplete.
        """
        for kind in (self.yes, self.no):
            if isinstance(kind, Activations):
                kind.require_weights_of(model)
        return self._kinds()

    def groups_of_kinds(self, counts: tuple[int, int]) -> tuple[list[Any], list[Any]] | None:
        """Return the group of each text of `yes`, and of each text of `no`; None without groups.

        Args:
            counts: the number of texts of each kind that were read. For a store, all texts count,
                also texts without a row.

        Raises:
            ValueError: if there is not one group for each text, or if the kinds do not have equally
                many texts with `groups="pairs"`.
        """
        if self.groups is None:
            return None
        kinds = self._kinds()
        sizes = []
        for kind, n_read in zip(kinds, counts, strict=True):
            sizes.append(len(kind.numbers) if isinstance(kind, StoredTexts) else n_read)
        n_yes, n_no = sizes
        if isinstance(self.groups, str):
            if n_yes != n_no:
                raise ValueError(
                    "yes and no must have equally many texts with groups='pairs'; got "
                    f"{n_yes} and {n_no}"
                )
            return [*range(n_yes)], [*range(n_no)]
        listed = [*getattr(self.groups, "tolist", self.groups.__iter__)()]
        if len(listed) != n_yes + n_no:
            raise ValueError(
                f"groups must be one for each of {n_yes + n_no} texts ({n_yes} of yes and {n_no} "
                f"of no); got {len(listed)}"
            )
        if self.labels is None:
            return listed[:n_yes], listed[n_yes:]
        of_yes, of_no = (kind.numbers for kind in kinds if isinstance(kind, StoredTexts))
        return [listed[number] for number in of_yes], [listed[number] for number in of_no]

    def _kinds(self) -> tuple[TextsOfKind, TextsOfKind]:
        """Return the texts of both kinds. A store is replaced by its texts of each kind.

        Raises:
            ValueError: if there is not one label for each text of the store.
        """
        if self.labels is not None:
            assert isinstance(self.yes, Activations)
            return by_label(self.yes, self.labels)
        if isinstance(self.yes, Activations) and isinstance(self.no, Activations):
            return all_of(self.yes), all_of(self.no)
        return cast(TextsOfKind, self.yes), cast(TextsOfKind, self.no)


ContrastOrPair = Contrast | Sequence[KindOfExamples]
"""A contrast, or a pair of the texts of both kinds: `(yes, no)`."""


def as_contrast(contrast: Any) -> Contrast:
    """Return a contrast, or the contrast of a pair `(yes, no)`.

    Raises:
        TypeError: if the value is neither. A list of two strings is refused, because it may be the
            texts of one kind.

    >>> as_contrast((["part KV8"], ["def f("])).yes
    ['part KV8']
    """
    if isinstance(contrast, Contrast):
        return contrast
    advice = "write (yes, no), such as probe(model, (yes, no), 'resid_post')"
    if isinstance(contrast, Activations):
        advice = "for one store with both kinds, write Contrast(store, labels=labels)"
    if not isinstance(contrast, tuple | list) or len(contrast) != 2:
        raise TypeError(
            "contrast must be a pair of two kinds of texts, or a Contrast; got "
            f"{_described(contrast)}: {advice}"
        )
    pair = Contrast(*contrast)
    for kind in contrast:
        is_list = hasattr(kind, "__len__") and not isinstance(kind, ActivationCache | Activations)
        if is_list and is_one_text(kind):
            raise TypeError(
                "contrast must be a pair of two lists of texts; got a pair with the single text "
                f"{shown(kind)}: {advice}"
            )
    return pair


def _described(value: Any) -> str:
    """Return a value as text for an error. A list or tuple is described by its length."""
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return shown(value)
