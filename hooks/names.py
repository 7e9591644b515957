"""Names of points: selectors of points, and the layers and blocks in the names."""

import fnmatch
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor, nn

from hooks.base import layer_of, require_kind, shown, unknown_point
from hooks.base.errors import UnknownNameError, unknown_name
from hooks.base.hints import how_to_mark
from hooks.base.paths import LAYER
from hooks.modes import LAST_PARTS, Mode
from hooks.point import HookPoint, HookPoints, Point, has_forward

Selector = str | Mode | Callable[[Point], bool] | Iterable["Selector"]
"""A name, a glob, a predicate on `Point`, a `Mode`, or a list of selectors.

>>> list(resolve(["embed", "*.q"], {n: Point(n) for n in ("embed", "blocks.0.q", "blocks.0.k")}))
['embed', 'blocks.0.q']
"""


def flatten(selector: Selector) -> list[str | Callable[[Point], bool]]:
    """Return the names, globs, predicates and modes of a selector as a flat list.

    Raises:
        TypeError: if a part has a different type.
    """
    if isinstance(selector, str) or callable(selector):
        return [selector]
    if isinstance(selector, tuple) and [type(part) for part in selector] == [str, int]:
        name, layer = selector
        raise TypeError(
            f"a selector must be a name or a glob, such as '*.{layer}.*{name}'; got {selector!r}, "
            "which selects only from a cache (runner.points lists all names)"
        )
    if isinstance(selector, Iterable) and not isinstance(selector, Tensor):
        parts = list[str | Callable[[Point], bool]]()
        for nested in selector:
            parts += flatten(nested)
        return parts
    kinds = "a name, a glob, a predicate, a mode or a list of them"
    raise TypeError(f"a selector must be {kinds}; got {reprlib.repr(selector)}")


def resolve(
    selector: Selector, known: Mapping[str, Point], points: Mapping[str, Point] | None = None
) -> dict[str, Point]:
    """Return the points that `selector` matches, in the model's order.

    Args:
        selector: the selector.
        known: all modules. Exact names are looked up here, and so are globs that match none of
            `points`.
        points: the candidates for globs, predicates and modes. Default: all modules.

    Raises:
        UnknownNameError: if a part of the selector matches nothing; the error lists close matches.
        TypeError: if a part of the selector has a different type.
    """
    parts = flatten(selector)
    if not parts:
        raise UnknownNameError(
            "a selector must name at least one hook point, such as names='*.resid_post'; got an "
            "empty selector"
        )
    points = known if points is None else points
    matches = [_matching(part, known, points) for part in parts]
    # The names that one part matches are already in order. This saves a loop over all names, which
    # matters if a caller resolves thousands of names one by one.
    if len(matches) == 1:
        return {name: known[name] for name in matches[0]}
    chosen = set().union(*matches)
    return {name: point for name, point in known.items() if name in chosen}


def _matching(
    part: str | Callable[[Point], bool], known: Mapping[str, Point], points: Mapping[str, Point]
) -> list[str]:
    """Return the names that one part of a selector matches.

    Raises:
        UnknownNameError: if this part matches no name. The error contains close matches.
    """
    if isinstance(part, Mode):
        matching = _of_mode(part, points)
    elif isinstance(part, str):
        matching = [part] if part in known else _glob(part, points) or _glob(part, known)
    else:
        if isinstance(part, nn.Module):
            raise TypeError(
                f"a point must be given by its name; got {shown(part)} (the name of a module of "
                "the model; for a dictionary, its reads and writes are names of points, and its "
                "features are a point inside `with interp.splice(model, sae)`)"
            )
        matching = [name for name, point in points.items() if _chooses(part, point)]
    if matching or part is Mode.none:
        return matching
    if not isinstance(part, str) or isinstance(part, Mode):
        described = getattr(part, "__name__", part)
        hint = "" if any(point.axes for point in known.values()) else how_to_mark()
        raise UnknownNameError(f"{described} matches no hook point of this model{hint}")
    if part in list(Mode):
        raise UnknownNameError(f"no hook point is named {part!r}; did you mean mode={part!r}?")
    _require_layer(part, points or known)
    everywhere = f"*.{part}"
    if _glob(everywhere, points or known):
        rule = f"no hook point is named {part!r}"
        raise UnknownNameError(f"{rule}; {everywhere!r} selects this point in every layer")
    error = unknown_point(part, points or known, "hook point")
    plain = unknown_name(part, (), "hook point").args
    is_short = "." not in part.removeprefix("*.")
    if is_short and error.args == plain and not error.close_matches:
        # A short name, such as "patern", is far from whole names, and may be close to a last part.
        ends = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in points or known)
        error = UnknownNameError(plain[0], f"*.{part.removeprefix('*.')}", ends)
    if error.args == plain and not error.close_matches:
        error.args = (f"{error.args[0]} (HookedRunner(model).table() lists all names)",)
    raise error


def _require_layer(part: str, names: Iterable[str]) -> None:
    """Raise a special error if a name or a glob is right except for the number of the layer.

    Raises:
        UnknownNameError: if the same name exists in other layers. The error contains these layers.
    """
    layer = layer_of(part)
    others = [] if layer is None else _glob(LAYER.sub("[0-9]*", part, count=1), names)
    layers = [other for name in others if (other := layer_of(name)) is not None]
    if layers and layer not in layers:
        known = f"{min(layers)} to {max(layers)}"
        raise UnknownNameError(f"{part!r} has layers {known}; got {layer}", part, others)


def _of_mode(mode: Mode, points: Mapping[str, Point]) -> list[str]:
    """Return the names of the points that a mode caches."""
    last_parts = LAST_PARTS[mode]
    if last_parts is None:
        return [*points]
    # Only a HookPoint declares axes. In other modules, a last part such as `v` may have any
    # meaning.
    marked = (name for name, point in points.items() if point.axes)
    return [name for name in marked if name.rpartition(".")[2] in last_parts]


def _chooses(predicate: Callable[[Point], bool], point: Point) -> bool:
    """Return the result of a user's predicate.

    Raises:
        TypeError: if the predicate raises an AttributeError or a TypeError, as a predicate does
            that expects a name instead of a `Point`.
    """
    try:
        return predicate(point)
    except (AttributeError, TypeError) as error:
        # Predicates written for other libraries expect a name.
        form = 'lambda point: point.name.endswith(".z")'
        raise TypeError(f"a predicate gets a Point, as in {form}; it raised: {error}") from error


def _glob(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a glob."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def names_by_layer(short: str, names: Collection[str]) -> dict[int, str]:
    """Return the names that end in `short`, by layer.

    If a name that begins with `blocks.` ends in `short`, names in other stacks of blocks are
    ignored. To choose another stack, begin `short` with its name: `vision.resid_post` selects
    `vision.blocks.*.resid_post`, and this longer form is accepted too.

    Raises:
        TypeError: if `short` is no text.
        UnknownNameError: if no name with a layer ends in `short`, or two names in one layer do.

    >>> names_by_layer("encoder.z", ["encoder.blocks.0.z", "decoder.blocks.0.z"])
    {0: 'encoder.blocks.0.z'}
    """
    require_kind("the last part of a name", short, str, "a text, such as 'resid_post'")
    layered = {name: layer for name in names if (layer := layer_of(name)) is not None}
    chosen = [name for name in layered if name == short or name.endswith(f".{short}")]
    if not chosen:
        stack, _, end = short.partition(".*." if ".*." in short else ".")
        in_stack = [name for name in layered if name.startswith(f"{stack}.")]
        chosen = [name for name in in_stack if end and name.endswith(f".{end}")]
    chosen = [name for name in chosen if name.startswith("blocks.")] or chosen
    by_layer: dict[int, str] = {}
    for name in chosen:
        if (layer := layered[name]) in by_layer:
            ambiguous = (by_layer[layer], name)
            stack = name.partition(".")[0]
            rule = f"; begin with the name of a stack, as in '{stack}.{short}'"
            hint = "" if ambiguous[0].startswith(f"{stack}.") else rule
            raise UnknownNameError(
                f"{short!r} is ambiguous in layer {layer}{hint}", short, ambiguous
            )
        by_layer[layer] = name
    if not by_layer:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in layered)
        raise unknown_point(short, [*ends, *names], "value of a layer")
    return dict(sorted(by_layer.items()))


def lines_by_layer(described: Mapping[str, str], limit: int | None = None) -> str:
    """Return one line for each name and description, at most `limit` lines.

    Layers with the same description share a line.

    >>> print(lines_by_layer({"embed": "tokens", "blocks.0.q": "queries", "blocks.1.q": "queries"}))
    embed         tokens
    blocks.0-1.q  queries
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, description in described.items():
        groups.setdefault((LAYER.sub("#", name, count=1), description), []).append(name)
    rows = [(_shared_name(pattern, group), text) for (pattern, text), group in groups.items()]
    if limit is not None and len(rows) > limit:
        rows = [*rows[: limit - 1], (f"and {len(rows) - limit + 1} more lines", "")]
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:<{width}}  {text}".rstrip() for label, text in rows)


def _shared_name(pattern: str, group: list[str]) -> str:
    """Return one name for a group: its pattern, with the numbers of its layers in place of `#`."""
    if len(group) == 1:
        return group[0]
    layers = [layer for layer in map(layer_of, group) if layer is not None]
    is_range = layers == list(range(layers[0], layers[-1] + 1))
    numbers = f"{layers[0]}-{layers[-1]}" if is_range else ",".join(map(str, layers))
    return pattern.replace("#", numbers, 1)


Blocks = dict[str, tuple[str, nn.Module]]
"""For the name of each module inside a block, the block's name and the block."""


def blocks_of(model: nn.Module) -> Blocks:
    """Return the block of each module inside a block, by the name of the module.

    A block is a module that a lazy run can run again. There are two kinds:

    1. each module with a `forward` in one of the model's outermost `ModuleList`s. If the list
       contains containers without a `forward`, the modules in the containers are blocks;
    2. each module elsewhere that contains only `HookPoint`s, such as a final norm, because it may
       have a fused form too.
    """
    inside: Blocks = {}
    containers: set[str] = set()
    names = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        parent = name.rpartition(".")[0]
        if parent in inside:
            inside[name] = inside[parent]
        elif isinstance(module, HookPoints):
            target = names[module.module]
            inside[name] = inside.get(target, (target, module.module))
        elif has_forward(module) and (parent in containers or (name and _holds_points(module))):
            inside[name] = name, module
        elif parent in containers or isinstance(module, nn.ModuleList):
            containers.add(name)
    return inside


def _holds_points(module: nn.Module) -> bool:
    """Return whether a module contains only `HookPoint`s, and at least one."""
    inside = list(module.children())
    return inside != [] and all(isinstance(child, HookPoint) for child in inside)
