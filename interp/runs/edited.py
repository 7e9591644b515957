"""Analyses of one edit: their runs, and edits of texts that have a row for each answer.

With `edit=`, an analysis runs only the clean texts, and makes the edit at one place at a time
(`runs_of`). Positions of the edit are positions of the texts. If answers have several tokens, a
text has a row for each answer, which ends with the answer: `edit_of_texts` returns the edit that
makes the same change in all rows of a text.
"""

import itertools
from dataclasses import replace

from torch import nn

from hooks import Point
from hooks.base import POSITION_AXES, TEXT_AXES, Selection, Texts, require_kind, shown
from interp.edits import Edit
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.protocol import has_text_of_logits
from interp.runs.models import Source
from interp.runs.runs import Runs, require_no_direction


def runs_of(
    model: nn.Module,
    pairs: Pairs | Texts,
    direction: PatchingDirection,
    source: Source | None,
    edit: Edit | None,
) -> Runs:
    """Return the two runs of an analysis, or with an edit the run that is edited.

    Args:
        model, pairs, direction, source, edit: see `activation_patching`.

    Raises:
        TypeError: if `edit` was not made by a function of `interp.edits`, or `pairs` are texts
            without a source model.
        ValueError: if an edit is given together with a source or a direction, or for the reasons of
            `Runs`.
    """
    require_no_direction(source, direction, "denoising")
    if edit is not None:
        _require_one_edit(pairs, edit, direction=direction, source=source)
    return Runs(model, pairs, direction=direction if edit is None else None, source=source)


def _require_one_edit(
    pairs: object, edit: object, *, direction: PatchingDirection, source: Source | None
) -> None:
    """Check the edit of an analysis, and that the call has pairs and no second run.

    Args:
        pairs, edit, direction, source: see `runs_of`.
    """
    if not isinstance(edit, Edit):
        raise TypeError(
            "edit must be made by a function of interp.edits, such as edits.zero(); got "
            f"{shown(edit)} (sweep accepts functions, and edits of several points)"
        )
    if direction != "denoising":
        raise ValueError(
            "an edit always changes the clean run; leave out direction; got "
            f"direction={direction!r}"
        )
    if source is not None:
        raise ValueError("edit and source cannot be used together; got both: leave one out")
    require_kind(
        "pairs",
        pairs,
        Pairs,
        "Pairs",
        call="with an edit, Pairs(texts, metric=cross_entropy(texts)) is enough",
    )


def edit_of_texts(edit: Edit, point: Point, prompts: list[list[int]]) -> Edit:
    """Return an edit that makes the same change in all rows of a text, at positions of its prompt.

    The texts of an encoder and of a tower are not continued by answers, so positions in them do not
    change. In the text of a cache, negative positions still count from the end of that text.

    Args:
        edit: the edit.
        point: the point that is edited.
        prompts: the columns of the tokens of each text's prompt.

    Raises:
        SelectionError: if a position is outside a prompt.
    """
    where = {}
    source = edit.source
    has_answers = has_text_of_logits(point.name)
    for axis, selection in edit.where.items():
        # The edit itself raises an error for an axis that the point does not have.
        if axis in TEXT_AXES and axis in point.axes and has_answers:
            if axis in POSITION_AXES and source is not None and selection.counts_back:
                source = source.counting(selection, axis)
            selection = _columns_of_prompts(selection, axis, prompts)
        where[axis] = selection
    return replace(edit, where=where, source=source, n_texts=len(prompts))


def _columns_of_prompts(selection: Selection, axis: str, prompts: list[list[int]]) -> Selection:
    """Return the selected columns of each text's prompt.

    Args:
        selection: the selected positions.
        axis: the name of the axis, for errors.
        prompts: see `edit_of_texts`.

    Raises:
        SelectionError: if a position is outside a prompt.
    """
    n_columns = max(columns[-1] for columns in prompts) + 1
    rows = []
    selected_columns = selection.rows(n_columns, axis, len(prompts), real=prompts)
    for selected, columns in zip(itertools.cycle(selected_columns), prompts):
        rows.append([column for column in selected if column in columns])
    return Selection(rows if any(row != rows[0] for row in rows) else rows[0])
