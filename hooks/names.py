"""Reading layers out of names: `blocks.3.attn.q` is `attn.q` of layer 3."""

import re
from collections.abc import Iterable

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


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Names grouped by what they are once the layer is left out.

    >>> by_pattern(["embed", "blocks.0.attn.q", "blocks.1.attn.q"])
    {'embed': ['embed'], 'blocks.0-1.attn.q': ['blocks.0.attn.q', 'blocks.1.attn.q']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name, count=1), []).append(name)
    return {_label(pattern, group): group for pattern, group in groups.items()}


def _label(pattern: str, group: list[str]) -> str:
    if len(group) == 1:
        return group[0]
    numbers = [layer for layer in map(layer_of, group) if layer is not None]
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))
    return pattern.replace("#", text, 1)
