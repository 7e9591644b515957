"""Reads JSON files."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hooks.base import storage, unknown_name


def read_json(path: Path) -> Any:
    """Reads the value in a JSON file. Configs of `transformers` have Infinity, so it is read too.

    Raises:
        ValueError: if it is not JSON in UTF-8; the message names the file.
    """
    with storage.one_error(path):
        return json.loads(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        ValueError: if it is not a JSON object in UTF-8; the message names the file.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {str(value)[:40]!r}")
    return value


def without(entries: Mapping[str, Any], ignore: Collection[str], where: str) -> dict[str, Any]:
    """The entries of a file without those under the keys to `ignore`.

    Raises:
        UnknownNameError: if a key to ignore is not in the file; it has close matches.
    """
    for key in ignore:
        if key not in entries:
            raise unknown_name(key, entries, f"key of {where}")
    return {key: value for key, value in entries.items() if key not in ignore}
