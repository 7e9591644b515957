"""Edits as texts on the command line: `blocks.1.attn.z zero head=3 pos=-1`."""

import shlex
from collections.abc import Mapping
from typing import Any

from hooks.base import unknown_name
from interp import edits
from interp.edits.edit import Edit

# The kinds of edits. After the kind, the text contains so many numbers:
# `blocks.1.attn.z scale 0.5`.
KINDS: Mapping[str, int] = {"zero": 0, "scale": 1, "noise": 1}
# The name of the parameter of the functions in `interp.edits` that receives this number.
NUMBERS: Mapping[str, str] = {"scale": "factor", "noise": "scale"}


def parsed(text: str) -> tuple[str, Edit]:
    """Return the point and the edit of a text.

    Raises:
        ValueError: if the text is not an edit. The error names the mistake.
        UnknownNameError: if the kind of edit is unknown.

    >>> parsed("blocks.*.attn.z zero head=1,3 pos=4:")
    ('blocks.*.attn.z', edits.zero(head=[1, 3], pos=slice(4, None)))
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"an edit must have matching quotes; got {text!r}: {error}") from None
    if len(words) < 2 or words[0] in KINDS:
        rule = "an edit must be a point and a kind, for example 'blocks.1.attn.z zero'"
        raise ValueError(f"{rule}; got {text!r}")
    point, kind, *rest = words
    if kind not in KINDS:
        raise unknown_name(kind, KINDS, f"kind of edit (of {', '.join(KINDS)})")
    plain = [part for part in rest if "=" not in part]
    if len(plain) != KINDS[kind]:
        raise ValueError(f"{kind} needs {KINDS[kind]} numbers before axes; got {plain} in {text!r}")
    try:
        numbers = [*map(float, plain)]
    except ValueError:
        raise ValueError(f"{kind} needs a number; got {plain[0]!r}") from None
    options: dict[str, Any] = {}
    for name, value in (part.split("=", 1) for part in rest if "=" in part):
        if name in options:
            raise ValueError(f"an edit must have {name} only once; got {name} twice in {text!r}")
        is_seed = (kind, name) == ("noise", "seed")
        options[name] = _seed(value) if is_seed else _selection(name, value)
    if NUMBERS.get(kind) in options:
        raise ValueError(
            f"the number of {kind} must be given without a name, as in '{kind} 0.5'; "
            f"got {NUMBERS[kind]}= in {text!r}"
        )
    return point, getattr(edits, kind)(*numbers, **options)


def _seed(text: str) -> int:
    """Return the seed in a text.

    Raises:
        ValueError: if the text is no whole number of at least 0.
    """
    if not text.isdecimal():
        raise ValueError(f"seed must be an integer of at least 0; got {text!r}")
    return int(text)


def _selection(axis: str, text: str) -> int | slice | list[int]:
    """Return the index, the indices or the slice of an axis in a text.

    Raises:
        ValueError: if the text is something else.
    """
    try:
        if ":" in text:
            if text.count(":") == 2 and text.endswith(":0"):
                raise ValueError("a step of 0")
            return slice(*(int(part) if part else None for part in text.split(":")))
        several = [int(part) for part in text.split(",")]
    except (ValueError, TypeError):
        rule = "an index, several with commas, or a slice such as 2:5"
        raise ValueError(f"{axis} must be {rule}; got {text!r}") from None
    return several if len(several) > 1 else several[0]
