"""Parts of pictures in the form that the script reads: axes, tables and notes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from hooks.base import shown
from interp.plots.view import limit_of, visible, visible_title

# The largest numbers that a browser draws without a pause.
MOST_WEIGHTS = 1_300_000
MOST_COLUMNS = 400


def axis_part(
    name: str, labels: Sequence[Any], words: Sequence[str] | None, most: int
) -> dict[str, Any]:
    """Return the last labels of an axis, and its words.

    Args:
        name: the name of the axis.
        labels: all labels.
        words: a text for each label, or None.
        most: the largest number of labels.
    """
    axis = {"name": name, "labels": [visible_title(str(label)) for label in labels[-most:]]}
    return axis | ({"words": [visible(word) for word in words[-most:]]} if words else {})


def grid_part(
    title: str,
    values: Float[Tensor, "facet row column"],
    rows: Mapping[str, Any],
    columns: Mapping[str, Any],
    unit: str,
    *,
    least: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """Return tables to draw as colours.

    Args:
        title: the title of the tables.
        values: the tables.
        rows, columns: the axes of the rows and the columns.
        unit: the unit of the values.
        least: the colour scale ends at the largest absolute value, or at `least` if all absolute
            values are smaller. Default: 0.
        more: further fields for the script's function `grid`.
    """
    return {
        "kind": "grid",
        "title": title,
        "values": values,
        "rows": rows,
        "columns": columns,
        "unit": unit,
        "limit": limit_of(values, least),
        "signed": bool((values < 0).any()),
    } | more


def thinned(every: int, n_shown: int, what: str) -> str:
    """Return the note of a picture that shows only a part; empty if all is shown.

    Args:
        every: the number of all things.
        n_shown: the number of shown things.
        what: the kind of things, such as `links`.

    >>> thinned(900, 400, "edges")
    'The strongest 400 of 900 edges are shown.'
    """
    which = "strongest" if what in ("edges", "links") else "last"
    if what == "points":
        return f"{n_shown} of {every} points are drawn." if n_shown < every else ""
    return f"The {which} {n_shown} of {every} {what} are shown." if n_shown < every else ""


def facts_of(result: Any, but: Collection[str] = ()) -> str:
    """Return the facts about a result in one line of at most 200 characters, for a title.

    A list of one or two names, such as the receivers of `path_patching`, is a fact too.

    Args:
        result: the result.
        but: names of facts to leave out.
    """
    facts = []
    for name, fact in result.about.items():
        # The texts of a result are hashes.
        if name in ("texts", "gap", "error", "node_gap", *but):
            continue
        if isinstance(fact, list | tuple) and len(fact) <= 2 and {*map(type, fact)} == {str}:
            fact = " and ".join(fact)
        if isinstance(fact, str | int | float):
            facts.append(f"{name}: {fact}")
    return ", ".join(facts)[:200]


def require_table(name: str, value: Any) -> None:
    """Check that a value is a table of effects, such as a `Result`. Plots do not import its class.

    Raises:
        TypeError: if the value has no axes. The error names the argument.
    """
    if not hasattr(value, "axes"):
        call = "an analysis such as activation_patching or head_scores gives one"
        raise TypeError(f"{name} must be a Result; got {shown(value)}; {call}")


def with_head_map(result: Any) -> Any:
    """Return a result with the axes `layer` and `head` in place of its only axis, if this axis has
    all heads of several layers, such as the heads of `path_patching`. Otherwise return the result.

    Args:
        result: the result.
    """
    require_table("result", result)
    axes = result.axes[:-1]
    nodes = result.labels[axes[0]] if len(axes) == 1 else ()
    layers = {getattr(node, "layer", None) for node in nodes}
    heads = {getattr(node, "number", None) for node in nodes}
    are_heads = all(getattr(node, "kind", "") == "head" for node in nodes)
    is_map = min(len(layers), len(heads)) > 1 and len(nodes) == len(layers) * len(heads)
    return result.by("head") if are_heads and is_map else result


def headline(result: Any) -> str:
    """Return a title for a result: `effects` or `mean effects`, and the facts about them.

    Hashes of texts, lists and the rounding gap of a sum are left out.
    """
    facts = facts_of(result)
    about = f" ({facts})" if facts else ""
    return f"{'mean ' if result.values.shape[-1] > 1 else ''}effects{about}"
