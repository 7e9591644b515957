"""Checks of the fields of a file: no field is missing or unknown, and each has the right type.

The readers of a file call these functions for each value. An error names the field by its path,
such as `promised.faithful`.
"""

import math
from collections.abc import Mapping
from typing import Any


def fields(value: Any, path: str, *names: str) -> dict[str, Any]:
    """Return an object of JSON after a check that it has exactly these fields.

    Args:
        value: the object.
        path: the path of the object in the file, for errors.
        names: the names of the fields.

    Raises:
        ValueError: if the value is not an object, or a field is missing or unknown.

    >>> fields({"low": 1, "hihg": 2}, "bounds", "low", "high")
    Traceback (most recent call last):
    ValueError: bounds must have the fields low, high; got the unknown field 'hihg'
    """
    rule = f"{path} must have the fields {', '.join(names)}"
    if not isinstance(value, Mapping):
        raise ValueError(f"{rule}; got {_got(value)}")
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{rule}; got the unknown field {unknown[0]!r}")
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{rule}; got no {missing[0]!r}")
    return dict(value)


def text_field(value: Any, path: str) -> str:
    """Return a text of JSON.

    Raises:
        ValueError: if the value is not a text.
    """
    if not isinstance(value, str):
        raise ValueError(f"{path} must be a text; got {_got(value)}")
    return value


def flag(value: Any, path: str) -> bool:
    """Return true or false of JSON.

    Raises:
        ValueError: if the value is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{path} must be true or false; got {_got(value)}")
    return value


def integer(value: Any, path: str, least: int | None = None) -> int:
    """Return an integer of JSON.

    Args:
        value: the value.
        path: the path of the value in the file, for errors.
        least: the smallest allowed integer. Default: none.

    Raises:
        ValueError: if the value is not an integer, or too small.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least):
        rule = "an integer" if least is None else f"an integer of at least {least}"
        raise ValueError(f"{path} must be {rule}; got {_got(value)}")
    return int(value)


def number(value: Any, path: str, least: float | None = None, most: float | None = None) -> float:
    """Return a finite number.

    Args:
        value: the value.
        path: the path of the value in the file, for errors.
        least, most: the smallest and the largest allowed number. Default: none.

    Raises:
        ValueError: if the value is not a finite number in this range.

    >>> number(1.5, "faithful", least=0, most=1)
    Traceback (most recent call last):
    ValueError: faithful must be a number from 0 to 1; got 1.5
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_inside = (
        is_number
        and math.isfinite(value)
        and (least is None or value >= least)
        and (most is None or value <= most)
    )
    if not is_inside:
        rule = "a finite number" if least is None else f"a number of at least {least:g}"
        rule = rule if most is None else f"a number from {least:g} to {most:g}"
        raise ValueError(f"{path} must be {rule}; got {_got(value)}")
    return float(value)


def entries(value: Any, path: str, least: int = 0) -> list[tuple[str, Any]]:
    """Return the entries of a list of JSON, each with its path.

    Args:
        value: the list.
        path: the path of the list in the file, for errors.
        least: the smallest allowed number of entries.

    Raises:
        ValueError: if the value is not a list, or has too few entries.
    """
    if not isinstance(value, list) or len(value) < least:
        rule = "a list" if least == 0 else f"a list of at least {least} entries"
        raise ValueError(f"{path} must be {rule}; got {_got(value)}")
    return [(f"{path}[{place}]", entry) for place, entry in enumerate(value)]


def choice(value: Any, path: str, choices: tuple[str, ...]) -> str:
    """Return a text that is one of some choices.

    Raises:
        ValueError: if the value is another one.
    """
    if value not in choices:
        raise ValueError(f"{path} must be {' or '.join(choices)}; got {_got(value)}")
    return str(value)


def _got(value: Any) -> str:
    """Return a short text of a value."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
