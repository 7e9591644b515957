"""JSON without NaN and infinity.

Python's `json` writes and reads them, although the standard forbids them.

1. `dumps` writes JSON and raises an error at NaN or infinity. The error names the place of the
   number.
2. `finite` replaces NaN and infinity by None, for readers that understand null as a missing number.
3. `encoded` replaces NaN and infinity by an object, and `decoded` reads the object, for our own
   files.
4. `loads` reads JSON and raises an error at NaN or infinity. The error names the place of the
   number.
"""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

# The only key of an object that represents a number, such as {"$float": "NaN"}.
_MARK = "$float"
_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


def dumps(
    value: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    sort_keys: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """Return a value as JSON; for the options see `json.dumps`.

    Raises:
        ValueError: if a number is not finite; the error names its place.
        TypeError: if JSON cannot represent a value.

    >>> dumps({"effects": [0.5, None]})
    '{"effects": [0.5, null]}'
    >>> dumps({"effects": [0.5, math.inf]})
    Traceback (most recent call last):
    ValueError: numbers must be finite in JSON; got inf at effects[1]
    """
    try:
        return json.dumps(
            value,
            indent=indent,
            ensure_ascii=ensure_ascii,
            sort_keys=sort_keys,
            default=default,
            allow_nan=False,
        )
    except ValueError:
        require_finite(value)
        raise


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is not JSON, or a number in it is not finite; the error names its place.

    >>> loads('{"nodes": [{"influence": NaN}]}')
    Traceback (most recent call last):
    ValueError: numbers must be finite in JSON; got nan at nodes[0].influence
    """
    value = json.loads(text)
    require_finite(value)
    return value


def require_finite(value: Any) -> None:
    """Check that all numbers in a value of JSON are finite.

    Raises:
        ValueError: if a number is not finite; the error contains the first such number and its
            place.
    """
    if first := _first_nonfinite(value, ""):
        raise ValueError(f"numbers must be finite in JSON; got {first}")


def finite(value: Any) -> Any:
    """Return a value of JSON with None instead of NaN and infinity.

    >>> finite({"low": -math.inf, "means": (1.5, math.nan)})
    {'low': None, 'means': [1.5, None]}
    """
    return _replaced(value, lambda number: None)


def encoded(value: Any) -> Any:
    """Return a value of JSON with an object instead of each NaN and infinity.

    >>> encoded({"bounds": (0.0, math.inf)})
    {'bounds': [0.0, {'$float': 'Infinity'}]}
    """
    return _replaced(value, lambda number: {_MARK: _NAMES.get(number, "NaN")})


def decoded(text: str | bytes) -> Any:
    """Return the value of a text from `encoded` and `dumps`. NaN in older files is read as NaN.

    >>> decoded('{"bounds": [0.0, {"$float": "Infinity"}]}')
    {'bounds': [0.0, inf]}
    """
    return json.loads(text, object_hook=_number_or_object)


def _number_or_object(entries: dict[str, Any]) -> Any:
    """Return the number that an object represents; any other object is returned unchanged."""
    return float(entries[_MARK]) if entries.keys() == {_MARK} else entries


def _replaced(value: Any, replace: Callable[[float], Any]) -> Any:
    """Return a value of JSON with a replacement for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else replace(value)
    if isinstance(value, dict):
        return {_key(key): _replaced(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, replace) for item in value]
    return value


def _key(key: Any) -> Any:
    """Return a key of a dictionary, NaN and infinity as text.

    All keys in JSON are texts, so these need no replacement.
    """
    return str(key) if isinstance(key, float) and not math.isfinite(key) else key


def _first_nonfinite(value: Any, place: str) -> str:
    """Return the first NaN or infinity and its place, as in `nan at a[3].b`, or an empty text."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} at {place or 'the top'}"
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        parts = ((f"{place}.{key}" if place else str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"{place}[{index}]", item) for index, item in enumerate(value))
    for inner_place, item in parts:
        if first := _first_nonfinite(item, inner_place):
            return first
    return ""
