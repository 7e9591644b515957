"""Selectors: how a run says which points it is about. One resolver serves every run."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from hooks.errors import UnknownNameError, unknown_name
from hooks.point import Point


class Mode(StrEnum):
    """How much of a run to keep.

    `none` keeps nothing, `svd_targets` the attention scores, patterns and values, `residual` those
    and the residual stream, `full` every point.
    """

    none = "none"
    svd_targets = "svd_targets"
    residual = "residual"
    full = "full"


RESIDUAL_STREAM = frozenset({"resid_pre", "resid_mid", "resid_post"})
SVD_TARGETS = frozenset({"scores", "pattern", "v"})

# The one place that maps a mode to the last part of a name; `full` asks for every last part.
LAST_PARTS: Mapping[Mode, frozenset[str] | None] = {
    Mode.none: frozenset(),
    Mode.svd_targets: SVD_TARGETS,
    Mode.residual: SVD_TARGETS | RESIDUAL_STREAM,
    Mode.full: None,
}

Selector = str | Mode | Callable[[Point], bool] | Iterable["Selector"]


def resolve(
    selector: Selector, points: Mapping[str, Point], modules: Mapping[str, Point]
) -> dict[str, Point]:
    """The points that `selector` names, in the model's order.

    An exact name may be any module of `modules`. A glob, a predicate and a mode range over `points`;
    a glob that matches none of them ranges over `modules`.

    Raises:
        UnknownNameError: if a part of the selector matches nothing; it carries close matches.
        TypeError: if a part of the selector is none of the kinds above.
    """
    chosen = _names(selector, points, modules)
    return {name: point for name, point in modules.items() if name in chosen}


def _names(
    selector: Selector, points: Mapping[str, Point], modules: Mapping[str, Point]
) -> set[str]:
    if isinstance(selector, Mode):
        if selector is Mode.none:
            return set()
        last = LAST_PARTS[selector]
        found = {name for name in points if last is None or name.rpartition(".")[2] in last}
        return _some(found, f"mode {selector.value!r}")
    if isinstance(selector, str):
        if selector in modules:
            return {selector}
        if not any(sign in selector for sign in "*?["):
            raise unknown_name(selector, points or modules, "hook point")
        found = set(fnmatch.filter(points, selector) or fnmatch.filter(modules, selector))
        if not found:
            raise unknown_name(selector, points or modules, "hook point")
        return found
    if callable(selector):
        found = {name for name, point in points.items() if selector(point)}
        return _some(found, f"the predicate {getattr(selector, '__name__', selector)!r}")
    if isinstance(selector, Iterable):
        parts = list(selector)
        return _some(
            {name for part in parts for name in _names(part, points, modules)},
            f"the selector {parts!r}",
            ok=any(isinstance(part, Mode) for part in parts),
        )
    raise TypeError(
        "a selector is a name, a glob, a predicate, a mode or a list of them, "
        f"not {type(selector).__name__}"
    )


def _some(found: set[str], what: str, ok: bool = False) -> set[str]:
    if not found and not ok:
        raise UnknownNameError(f"{what} matches no hook point of this model")
    return found
