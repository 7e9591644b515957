"""Edits of texts that have a row for each answer.

If answers have several tokens, a text has a row for each answer, which ends with the answer; see
`interp.pairs.answers`. Positions of an edit are positions of the texts: `edit_of_texts` returns the
edit that makes the same change in all rows of a text.
"""

import itertools
from dataclasses import replace

from torch import nn

from hooks import HookError, Point
from hooks.base import POSITION_AXES, TEXT_AXES, Selection
from hooks.shared import edited_points_in_force, parts_of
from interp.edits import Edit
from interp.protocol import has_text_of_logits


def edit_of_texts(edit: Edit, point: Point, prompts: list[list[int]]) -> Edit:
    """Return an edit that makes the same change in all rows of a text, at positions of its prompt.

    The texts of an encoder and of a tower are not continued by answers, so positions in them do not
    change. The text of a cache may have no answer, and negative positions still count from its end.

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
            if axis in POSITION_AXES and source is not None:
                source = source.selecting(selection, axis)
            selection = _columns_of_prompts(selection, axis, prompts)
        where[axis] = selection
    return replace(edit, where=where, source=source, n_texts=len(prompts))


def require_edits_of_rows(model: nn.Module) -> None:
    """Check that edits that act on a model do not depend on rows and positions.

    The runs of an analysis have a row for each answer of several tokens. Edits of the analysis are
    edits of texts (`edit_of_texts`), but an edit that is already active acts on these rows. A
    dictionary that is spliced in acts on them too, and must not count from their end.

    Raises:
        HookError: if an active edit depends on rows or positions, or a dictionary counts positions
            from the end.
    """
    for name, part in parts_of(model).items():
        if part.counts_back:
            raise HookError(
                "with answers of several tokens, splice(pos=...) must count from the start, "
                f"because rows end with an answer; got {part.settings.strip()} at {name}"
            )
    for edited in edited_points_in_force(model):
        for hook in edited.hooks:
            if isinstance(hook, Edit) and _depends_on_rows(hook):
                raise HookError(
                    "with answers of several tokens, an active edit must be the same for all "
                    f"positions and texts; got {hook!r} at {edited.point}, which would also count "
                    "tokens of answers: pass the edit to sweep, or use answers of one token"
                )


def _depends_on_rows(edit: Edit) -> bool:
    """Return whether the change depends on the row or the position, apart from the values there."""
    return bool({*TEXT_AXES, "batch"} & edit.where.keys()) or "seed" in edit.arguments


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
