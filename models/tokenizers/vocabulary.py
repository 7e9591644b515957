"""What tokenizers share: their files, the signs of bytes, and refusing what has no token."""

import importlib
import json
from collections.abc import Collection, Sequence
from operator import index
from pathlib import Path
from typing import Any

_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256))

# How deeply values may be nested in a JSON file; those of models and tokenizers stay below ten.
_DEEPEST = 100


def byte_signs() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, and that byte.

    Printable Latin-1 stands for itself, and the characters from 256 on for the other bytes, in order
    (`bytes_to_unicode` in GPT-2's encoder.py).

    >>> byte_signs()["A"], byte_signs()["Ġ"]
    (65, 32)
    """
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    signs = {chr(byte): byte for byte in _PRINTABLE}
    return signs | {chr(256 + place): byte for place, byte in enumerate(others)}


def library(name: str) -> Any:
    """The library, imported.

    Raises:
        ImportError: if it is missing, with what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f'{name} is missing: pip install "hookscope[hf]"', name=name) from None


def read(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: naming the file, if it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: naming the file, if it is not JSON in UTF-8, or nested too deeply to be read.
    """
    try:
        value = json.loads(read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep(path) from None
    inner = [value]
    # What could be read may be too deep still to be shown in an error.
    for _ in range(_DEEPEST):
        inner = [
            one
            for outer in inner
            if isinstance(outer, dict | list)
            for one in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if inner:
        raise _too_deep(path)
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: naming the file, if it is not JSON, or not an object.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object: it is {str(value)[:40]!r}")
    return value


def _too_deep(path: Path) -> ValueError:
    return ValueError(f"{path} is nested at most {_DEEPEST} deep, and not more")


def check_encodable(text: str) -> None:
    """Refuses a text that has no UTF-8 form.

    Raises:
        ValueError: naming the first lone surrogate and its place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{text[error.start]!r} at {error.start} is a lone surrogate, which has no tokens"
        ) from None


def as_known(tokens: Sequence[int], known: Collection[int]) -> list[int]:
    """The tokens as plain numbers, whatever holds them.

    Raises:
        ValueError: naming those that are not among the known ones, or no whole numbers.
    """
    try:
        tokens = [index(token) for token in tokens]
    except TypeError:
        raise ValueError(
            f"tokens are whole numbers, one after another, not {str(tokens)[:50]}"
        ) from None
    if outside := [token for token in tokens if token not in known]:
        raise ValueError(
            f"the vocabulary's {len(known)} tokens are within 0 to {max(known, default=-1)}, and not "
            f"{outside[:5]}"
        )
    return tokens


def few(items: Sequence[object]) -> str:
    """The first items, to be named in an error."""
    return ", ".join(map(repr, items[:5])) + ", ..." * (len(items) > 5)
