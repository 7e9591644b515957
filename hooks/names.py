"""Reading layers out of names: `blocks.3.attn.q` is `attn.q` of layer 3."""

import re
from collections.abc import Iterable, Mapping

from hooks.errors import UnknownNameError, unknown_name

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def layer_of(name: str) -> int | None:
    """The first number among the parts of `name`, or None."""
    found = _NUMBER.search(name)
    return int(found.group()) if found else None


def layers(short: str, names: Iterable[str]) -> dict[int, str]:
    """The names that end in `short`, by layer.

    Raises:
        UnknownNameError: if no name with a layer ends in `short`, or two of one layer do.
    """
    names = list(names)
    found: dict[int, str] = {}
    for name in names:
        layer = layer_of(name)
        if layer is None or not (name == short or name.endswith("." + short)):
            continue
        if layer in found:
            raise UnknownNameError(
                f"{short!r} is ambiguous in layer {layer}: {found[layer]} or {name}",
                (found[layer], name),
            )
        found[layer] = name
    if not found:
        raise unknown_name(short, names, "value of a layer")
    return dict(sorted(found.items()))


def by_layer(described: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names with their descriptions; layers that have the same description share a line.

    >>> by_layer({"embed": "tokens", "blocks.0.q": "queries", "blocks.1.q": "queries"})
    [('embed', 'tokens'), ('blocks.0-1.q', 'queries')]
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, description in described.items():
        groups.setdefault((_NUMBER.sub("#", name, count=1), description), []).append(name)
    return [
        (_label(pattern, group), description) for (pattern, description), group in groups.items()
    ]


def aligned(described: Mapping[str, str]) -> str:
    """The lines of `by_layer`, descriptions below each other.

    >>> print(aligned({"embed": "tokens", "blocks.0.q": "queries"}))
    embed       tokens
    blocks.0.q  queries
    """
    rows = by_layer(described)
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:<{width}}  {text}".rstrip() for label, text in rows)


def _label(pattern: str, group: list[str]) -> str:
    if len(group) == 1:
        return group[0]
    numbers = [layer for layer in map(layer_of, group) if layer is not None]
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))
    return pattern.replace("#", text, 1)
