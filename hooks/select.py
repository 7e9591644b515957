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

    @classmethod
    def _missing_(cls, value: object) -> "Mode":
        raise ValueError(f"a mode is one of {', '.join(cls)}, not {value!r}")

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


def flatten(selector: Selector) -> list[str | Callable[[Point], bool]]:
    """The names, globs, predicates and modes that a selector is made of.

    Raises:
        TypeError: if a part of it is none of these.
    """
    if isinstance(selector, str) or callable(selector):
        return [selector]
    if isinstance(selector, Iterable):
        return [part for nested in selector for part in flatten(nested)]
    raise TypeError(
        "a selector is a name, a glob, a predicate, a mode or a list of them, "
        f"not {type(selector).__name__}"
    )


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
    parts = flatten(selector)
    if not parts:
        raise UnknownNameError("an empty selector matches no hook point")
    chosen = {name for part in parts for name in _matching(part, points, modules)}
    return {name: point for name, point in modules.items() if name in chosen}


def _matching(
    part: str | Callable[[Point], bool], points: Mapping[str, Point], modules: Mapping[str, Point]
) -> list[str]:
    if isinstance(part, Mode):
        last = LAST_PARTS[part]
        found = [name for name in points if last is None or name.rpartition(".")[2] in last]
        if not found and part is not Mode.none:
            raise UnknownNameError(f"mode {part.value!r} matches no hook point of this model")
    elif isinstance(part, str):
        found = [part] if part in modules else _glob(part, points) or _glob(part, modules)
        if not found and part in list(Mode):
            raise UnknownNameError(
                f"no hook point is named {part!r}, which is a mode: mode={part!r}"
            )
        if not found:
            raise unknown_name(part, points or modules, "hook point")
    else:
        found = [name for name, point in points.items() if part(point)]
        if not found:
            what = getattr(part, "__name__", part)
            raise UnknownNameError(f"the predicate {what!r} matches no hook point of this model")
    return found


def _glob(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
